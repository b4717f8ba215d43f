/* SPDX-License-Identifier: BSD-3-Clause */
/* Rules: which packets are lost, late, doubled or out of order on request, and what happens to the NIC in the same instant. */
#include <string.h>

#include "faults/registry.h"

enum rule_class {
    CLASS_SEND = 1 << 0,      /* SEND of any kind */
    CLASS_SEND_IMM = 1 << 1,  /* the packet of a SEND that carries the immediate */
    CLASS_WRITE = 1 << 2,     /* RDMA WRITE, with or without immediate */
    CLASS_WRITE_IMM = 1 << 3, /* the packet of an RDMA WRITE that carries the immediate */
    CLASS_READ_REQUEST = 1 << 4,
    CLASS_READ_RESPONSE = 1 << 5,
    CLASS_ACK = 1 << 6, /* positive */
    CLASS_NAK = 1 << 7,
    CLASS_RNR_NAK = 1 << 8,
    CLASS_ATOMIC = 1 << 9,
    CLASS_ATOMIC_ACK = 1 << 10,
    CLASS_UD = 1 << 11,
    CLASS_REQUEST = 1 << 12,  /* anything that goes to a responder */
    CLASS_RESPONSE = 1 << 13, /* anything that goes to a requester */
    CLASS_ANY = 1 << 14,
};

static const struct {
    const char *name;
    uint32_t bits;
} classes[] = {
    {"any", CLASS_ANY},
    {"send", CLASS_SEND},
    {"send_imm", CLASS_SEND_IMM},
    {"write", CLASS_WRITE},
    {"write_imm", CLASS_WRITE_IMM},
    {"read_request", CLASS_READ_REQUEST},
    {"read_response", CLASS_READ_RESPONSE},
    {"ack", CLASS_ACK},
    {"nak", CLASS_NAK},
    {"rnr_nak", CLASS_RNR_NAK},
    {"atomic", CLASS_ATOMIC},
    {"atomic_ack", CLASS_ATOMIC_ACK},
    {"ud", CLASS_UD},
    {"request", CLASS_REQUEST},
    {"response", CLASS_RESPONSE},
};

uint32_t rules_class_by_name(const char *name) {
    for (size_t i = 0; i < sizeof(classes) / sizeof(classes[0]); i++)
        if (strcmp(classes[i].name, name) == 0)
            return classes[i].bits;
    return 0;
}

const char *rules_class_name(uint32_t bits) {
    for (size_t i = 0; i < sizeof(classes) / sizeof(classes[0]); i++)
        if (classes[i].bits == bits)
            return classes[i].name;
    return "?";
}

const char *rules_class_names(void) {
    return "any, send, send_imm, write, write_imm, read_request, read_response, ack, nak, rnr_nak, atomic, "
           "atomic_ack, ud, request, response";
}

static uint32_t classes_of(const struct wire_packet *pkt) {
    uint32_t flags = pkt->flags;
    uint32_t bits = CLASS_ANY;

    if (flags & WIRE_F_SEND)
        bits |= CLASS_SEND | (flags & WIRE_F_IMM ? CLASS_SEND_IMM : 0);
    if (flags & WIRE_F_WRITE)
        bits |= CLASS_WRITE | (flags & WIRE_F_IMM ? CLASS_WRITE_IMM : 0);
    if (flags & WIRE_F_READ_REQ)
        bits |= CLASS_READ_REQUEST;
    if (flags & WIRE_F_READ_RESP)
        bits |= CLASS_READ_RESPONSE;
    if (flags & WIRE_F_ACK) {
        switch (WIRE_SYN_KIND(pkt->aeth.syndrome)) {
        case WIRE_SYN_ACK:
            bits |= CLASS_ACK;
            break;
        case WIRE_SYN_RNR:
            bits |= CLASS_RNR_NAK;
            break;
        case WIRE_SYN_NAK:
            bits |= CLASS_NAK;
            break;
        }
    }
    if (flags & WIRE_F_ATOMIC)
        bits |= CLASS_ATOMIC;
    if (flags & WIRE_F_ATOMIC_ACK)
        bits |= CLASS_ATOMIC_ACK;
    if (flags & WIRE_F_DETH)
        bits |= CLASS_UD;
    if (flags & WIRE_F_REQUEST)
        bits |= CLASS_REQUEST;
    if (flags & WIRE_F_RESPONSE)
        bits |= CLASS_RESPONSE;
    return bits;
}

static bool matches(const struct registry *reg, const struct registry_rule *rule,
                    enum fault_direction direction, const struct wire_packet *pkt, uint32_t packet_classes,
                    uint32_t local_qpn, uint32_t peer_ip) {
    if (!(rule->directions & direction))
        return false;
    if (rule->opcode >= 0 && rule->opcode != pkt->bth.opcode)
        return false;
    if (rule->classes && !(rule->classes & packet_classes))
        return false;
    if (rule->qpn && rule->qpn != local_qpn)
        return false;
    if (rule->unit == UNIT_MESSAGE && !(pkt->flags & WIRE_F_LAST))
        return false;
    /* MSN is only told by what has an AETH; "at least" in the circular order of 24 bits. */
    if (rule->min_msn && (!(pkt->flags & WIRE_F_AETH) || wire_psn_cmp(pkt->aeth.msn, rule->min_msn) < 0))
        return false;
    if (rule->peer_host >= 0 && registry_host_of(reg, peer_ip) != rule->peer_host)
        return false;
    return true;
}

/* xorshift64*: the same seed gives the same losses. */
static uint32_t next_random(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (uint32_t)(*state * 0x2545f4914f6cdd1du >> 32);
}

static void run_then(struct registry *reg, const struct registry_rule *rule) {
    switch (rule->then) {
    case THEN_DOWN:
        registry_set_link(reg, rule->then_host, rule->then_rail, false);
        break;
    case THEN_KILL:
        registry_kill(reg, rule->then_host, rule->then_rail);
        break;
    case THEN_SWITCH_DOWN:
        registry_set_switch(reg, rule->then_rail, UINT64_MAX, false);
        break;
    }
}

enum fault_verdict rules_apply(struct registry *reg, unsigned host, unsigned rail,
                               enum fault_direction direction, const struct wire_packet *pkt,
                               uint32_t local_qpn, uint32_t peer_ip, uint32_t *delay_us) {
    uint32_t packet_classes = classes_of(pkt);
    enum fault_verdict verdict = FAULT_PASS;

    for (unsigned i = 0; i < reg->file->rule_end; i++) {
        struct registry_rule *rule = &reg->file->rules[i];

        if (!rule->id || rule->host != host || rule->rail != rail ||
            (rule->count && rule->fired >= rule->count) ||
            !matches(reg, rule, direction, pkt, packet_classes, local_qpn, peer_ip))
            continue;
        if (++rule->matched < rule->nth)
            continue;
        if (rule->probability != REGISTRY_ALWAYS && next_random(&rule->random) >= rule->probability)
            continue;
        rule->fired++;
        rule->fired_ns = registry_now_ns();
        if (verdict == FAULT_PASS) {
            verdict = (enum fault_verdict)rule->action;
            *delay_us = rule->delay_us;
        }
        /* After the last time it fires; a rule without end takes its consequence at the first. */
        if (rule->fired == (rule->count ? rule->count : 1))
            run_then(reg, rule);
        if (rule->count && rule->fired == rule->count)
            registry_update_active(reg, host, rail);
    }
    return verdict;
}

const char *rules_action_name(unsigned verdict) {
    static const char *const names[] = {"", "drop", "delay", "duplicate", "reorder"};

    return names[verdict];
}
