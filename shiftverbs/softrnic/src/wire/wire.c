/* SPDX-License-Identifier: BSD-3-Clause */
#include "wire/wire.h"

#include <arpa/inet.h>
#include <string.h>

#define FIRST WIRE_F_FIRST
#define MIDDLE WIRE_F_MIDDLE
#define LAST WIRE_F_LAST
#define ONLY (WIRE_F_FIRST | WIRE_F_LAST)
#define DATA WIRE_F_PAYLOAD
#define REQ (WIRE_F_VALID | WIRE_F_REQUEST)
#define RESP (WIRE_F_VALID | WIRE_F_RESPONSE)

/* IBA table 38 (opcodes), for RC. UC and UD take subsets of it. */
static const uint32_t operation_flags[32] = {
    [WIRE_OP_SEND_FIRST] = REQ | WIRE_F_SEND | DATA | FIRST,
    [WIRE_OP_SEND_MIDDLE] = REQ | WIRE_F_SEND | DATA | MIDDLE,
    [WIRE_OP_SEND_LAST] = REQ | WIRE_F_SEND | DATA | LAST,
    [WIRE_OP_SEND_LAST_IMM] = REQ | WIRE_F_SEND | DATA | LAST | WIRE_F_IMM,
    [WIRE_OP_SEND_ONLY] = REQ | WIRE_F_SEND | DATA | ONLY,
    [WIRE_OP_SEND_ONLY_IMM] = REQ | WIRE_F_SEND | DATA | ONLY | WIRE_F_IMM,
    [WIRE_OP_WRITE_FIRST] = REQ | WIRE_F_WRITE | DATA | FIRST | WIRE_F_RETH,
    [WIRE_OP_WRITE_MIDDLE] = REQ | WIRE_F_WRITE | DATA | MIDDLE,
    [WIRE_OP_WRITE_LAST] = REQ | WIRE_F_WRITE | DATA | LAST,
    [WIRE_OP_WRITE_LAST_IMM] = REQ | WIRE_F_WRITE | DATA | LAST | WIRE_F_IMM,
    [WIRE_OP_WRITE_ONLY] = REQ | WIRE_F_WRITE | DATA | ONLY | WIRE_F_RETH,
    [WIRE_OP_WRITE_ONLY_IMM] = REQ | WIRE_F_WRITE | DATA | ONLY | WIRE_F_RETH | WIRE_F_IMM,
    [WIRE_OP_READ_REQUEST] = REQ | WIRE_F_READ_REQ | ONLY | WIRE_F_RETH,
    [WIRE_OP_READ_RESP_FIRST] = RESP | WIRE_F_READ_RESP | DATA | FIRST | WIRE_F_AETH,
    [WIRE_OP_READ_RESP_MIDDLE] = RESP | WIRE_F_READ_RESP | DATA | MIDDLE,
    [WIRE_OP_READ_RESP_LAST] = RESP | WIRE_F_READ_RESP | DATA | LAST | WIRE_F_AETH,
    [WIRE_OP_READ_RESP_ONLY] = RESP | WIRE_F_READ_RESP | DATA | ONLY | WIRE_F_AETH,
    [WIRE_OP_ACK] = RESP | WIRE_F_ACK | ONLY | WIRE_F_AETH,
    [WIRE_OP_ATOMIC_ACK] = RESP | WIRE_F_ATOMIC_ACK | ONLY | WIRE_F_AETH | WIRE_F_ATOMIC_ACK_ETH,
    [WIRE_OP_CMP_SWAP] = REQ | WIRE_F_ATOMIC | ONLY | WIRE_F_ATOMIC_ETH,
    [WIRE_OP_FETCH_ADD] = REQ | WIRE_F_ATOMIC | ONLY | WIRE_F_ATOMIC_ETH,
    [WIRE_OP_SEND_LAST_INV] = REQ | WIRE_F_SEND | DATA | LAST | WIRE_F_IETH,
    [WIRE_OP_SEND_ONLY_INV] = REQ | WIRE_F_SEND | DATA | ONLY | WIRE_F_IETH,
};

uint32_t wire_opcode_flags(uint8_t opcode) {
    unsigned operation = WIRE_OPERATION(opcode);

    switch (WIRE_TRANSPORT(opcode)) {
    case WIRE_RC:
        return operation_flags[operation];
    case WIRE_UC:
        return operation <= WIRE_OP_WRITE_ONLY_IMM ? operation_flags[operation] : 0;
    case WIRE_UD:
        if (operation == WIRE_OP_SEND_ONLY || operation == WIRE_OP_SEND_ONLY_IMM)
            return operation_flags[operation] | WIRE_F_DETH;
        return 0;
    default:
        /* Neither a request nor a response, and of no transport. */
        return opcode == WIRE_CNP ? WIRE_F_VALID | WIRE_F_PAYLOAD | WIRE_F_FIRST | WIRE_F_LAST : 0;
    }
}

const char *wire_opcode_name(uint8_t opcode) {
    static const char *const names[3][32] = {
#define NAMES(T)                                                                                             \
    {                                                                                                        \
        [WIRE_OP_SEND_FIRST] = T "_SEND_FIRST",                                                              \
        [WIRE_OP_SEND_MIDDLE] = T "_SEND_MIDDLE",                                                            \
        [WIRE_OP_SEND_LAST] = T "_SEND_LAST",                                                                \
        [WIRE_OP_SEND_LAST_IMM] = T "_SEND_LAST_IMM",                                                        \
        [WIRE_OP_SEND_ONLY] = T "_SEND_ONLY",                                                                \
        [WIRE_OP_SEND_ONLY_IMM] = T "_SEND_ONLY_IMM",                                                        \
        [WIRE_OP_WRITE_FIRST] = T "_WRITE_FIRST",                                                            \
        [WIRE_OP_WRITE_MIDDLE] = T "_WRITE_MIDDLE",                                                          \
        [WIRE_OP_WRITE_LAST] = T "_WRITE_LAST",                                                              \
        [WIRE_OP_WRITE_LAST_IMM] = T "_WRITE_LAST_IMM",                                                      \
        [WIRE_OP_WRITE_ONLY] = T "_WRITE_ONLY",                                                              \
        [WIRE_OP_WRITE_ONLY_IMM] = T "_WRITE_ONLY_IMM",                                                      \
        [WIRE_OP_READ_REQUEST] = T "_READ_REQUEST",                                                          \
        [WIRE_OP_READ_RESP_FIRST] = T "_READ_RESP_FIRST",                                                    \
        [WIRE_OP_READ_RESP_MIDDLE] = T "_READ_RESP_MIDDLE",                                                  \
        [WIRE_OP_READ_RESP_LAST] = T "_READ_RESP_LAST",                                                      \
        [WIRE_OP_READ_RESP_ONLY] = T "_READ_RESP_ONLY",                                                      \
        [WIRE_OP_ACK] = T "_ACK",                                                                            \
        [WIRE_OP_ATOMIC_ACK] = T "_ATOMIC_ACK",                                                              \
        [WIRE_OP_CMP_SWAP] = T "_CMP_SWAP",                                                                  \
        [WIRE_OP_FETCH_ADD] = T "_FETCH_ADD",                                                                \
        [WIRE_OP_SEND_LAST_INV] = T "_SEND_LAST_INV",                                                        \
        [WIRE_OP_SEND_ONLY_INV] = T "_SEND_ONLY_INV",                                                        \
    }
        NAMES("RC"), NAMES("UC"), NAMES("UD")};
#undef NAMES
    unsigned transport = WIRE_TRANSPORT(opcode);

    if (!wire_opcode_flags(opcode))
        return "UNKNOWN";
    if (opcode == WIRE_CNP)
        return "CNP";
    return names[transport == WIRE_RC ? 0 : transport == WIRE_UC ? 1 : 2][WIRE_OPERATION(opcode)];
}

const char *wire_error_name(enum wire_error error) {
    static const char *const names[WIRE_ERR_COUNT] = {
        [WIRE_OK] = "ok",
        [WIRE_ERR_SHORT] = "too short for a transport header",
        [WIRE_ERR_VERSION] = "unknown transport version",
        [WIRE_ERR_OPCODE] = "unknown opcode",
        [WIRE_ERR_TRUNCATED] = "too short for the headers of its opcode",
        [WIRE_ERR_PAD] = "pad count without payload",
        [WIRE_ERR_PAYLOAD] = "payload of an impossible length",
        [WIRE_ERR_ICRC] = "wrong ICRC",
    };

    return (unsigned)error < WIRE_ERR_COUNT ? names[error] : "unknown error";
}

static uint8_t *put16(uint8_t *p, uint16_t v) {
    p[0] = v >> 8;
    p[1] = v;
    return p + 2;
}

static uint8_t *put24(uint8_t *p, uint32_t v) {
    p[0] = v >> 16;
    p[1] = v >> 8;
    p[2] = v;
    return p + 3;
}

static uint8_t *put32(uint8_t *p, uint32_t v) {
    return put16(put16(p, v >> 16), v);
}

static uint8_t *put64(uint8_t *p, uint64_t v) {
    return put32(put32(p, v >> 32), v);
}

static uint32_t get16(const uint8_t *p) {
    return (uint32_t)p[0] << 8 | p[1];
}

static uint32_t get24(const uint8_t *p) {
    return (uint32_t)p[0] << 16 | get16(p + 1);
}

static uint32_t get32(const uint8_t *p) {
    return get16(p) << 16 | get16(p + 2);
}

static uint64_t get64(const uint8_t *p) {
    return (uint64_t)get32(p) << 32 | get32(p + 4);
}

/* Bytes of BTH and everything that the opcode puts between BTH and payload. */
static size_t header_len(uint32_t flags) {
    size_t len = WIRE_BTH_LEN;

    if (flags & WIRE_F_DETH)
        len += WIRE_DETH_LEN;
    if (flags & WIRE_F_RETH)
        len += WIRE_RETH_LEN;
    if (flags & WIRE_F_ATOMIC_ETH)
        len += WIRE_ATOMIC_ETH_LEN;
    if (flags & WIRE_F_AETH)
        len += WIRE_AETH_LEN;
    if (flags & WIRE_F_ATOMIC_ACK_ETH)
        len += WIRE_ATOMIC_ACK_ETH_LEN;
    if (flags & (WIRE_F_IMM | WIRE_F_IETH))
        len += WIRE_IMM_LEN;
    return len;
}

size_t wire_pack_headers(uint8_t *buf, struct wire_packet *pkt, size_t payload_len) {
    struct wire_bth *bth = &pkt->bth;
    uint32_t flags = wire_opcode_flags(bth->opcode);
    uint8_t *p = buf;

    if (!flags)
        return 0;
    pkt->flags = flags;
    bth->pad = -payload_len & 3;
    *p++ = bth->opcode;
    *p++ = bth->solicited << 7 | bth->migreq << 6 | bth->pad << 4;
    p = put16(p, bth->pkey);
    *p++ = bth->fecn << 7 | bth->becn << 6 | bth->reserved;
    p = put24(p, bth->dest_qpn);
    *p++ = bth->ack_req << 7;
    p = put24(p, bth->psn);
    if (flags & WIRE_F_DETH) {
        p = put32(p, pkt->deth.qkey);
        *p++ = 0;
        p = put24(p, pkt->deth.src_qpn);
    }
    if (flags & WIRE_F_RETH) {
        p = put64(p, pkt->reth.va);
        p = put32(p, pkt->reth.rkey);
        p = put32(p, pkt->reth.length);
    }
    if (flags & WIRE_F_ATOMIC_ETH) {
        p = put64(p, pkt->atomic.va);
        p = put32(p, pkt->atomic.rkey);
        p = put64(p, pkt->atomic.swap_add);
        p = put64(p, pkt->atomic.compare);
    }
    if (flags & WIRE_F_AETH) {
        *p++ = pkt->aeth.syndrome;
        p = put24(p, pkt->aeth.msn);
    }
    if (flags & WIRE_F_ATOMIC_ACK_ETH)
        p = put64(p, pkt->atomic_ack);
    if (flags & (WIRE_F_IMM | WIRE_F_IETH)) {
        memcpy(p, &pkt->imm_data, WIRE_IMM_LEN);
        p += WIRE_IMM_LEN;
    }
    return (size_t)(p - buf);
}

static void unpack_bth(struct wire_bth *bth, const uint8_t *p) {
    bth->opcode = p[0];
    bth->solicited = p[1] >> 7;
    bth->migreq = p[1] >> 6 & 1;
    bth->pad = p[1] >> 4 & 3;
    bth->pkey = get16(p + 2);
    bth->fecn = p[4] >> 7;
    bth->becn = p[4] >> 6 & 1;
    bth->reserved = p[4] & 0x3f;
    bth->dest_qpn = get24(p + 5);
    bth->ack_req = p[8] >> 7;
    bth->psn = get24(p + 9);
}

/* Extension headers, from behind BTH; the caller has checked that they are all there. */
static void unpack_extensions(struct wire_packet *pkt, const uint8_t *p) {
    uint32_t flags = pkt->flags;

    if (flags & WIRE_F_DETH) {
        pkt->deth.qkey = get32(p);
        pkt->deth.src_qpn = get24(p + 5);
        p += WIRE_DETH_LEN;
    }
    if (flags & WIRE_F_RETH) {
        pkt->reth.va = get64(p);
        pkt->reth.rkey = get32(p + 8);
        pkt->reth.length = get32(p + 12);
        p += WIRE_RETH_LEN;
    }
    if (flags & WIRE_F_ATOMIC_ETH) {
        pkt->atomic.va = get64(p);
        pkt->atomic.rkey = get32(p + 8);
        pkt->atomic.swap_add = get64(p + 12);
        pkt->atomic.compare = get64(p + 20);
        p += WIRE_ATOMIC_ETH_LEN;
    }
    if (flags & WIRE_F_AETH) {
        pkt->aeth.syndrome = p[0];
        pkt->aeth.msn = get24(p + 1);
        p += WIRE_AETH_LEN;
    }
    if (flags & WIRE_F_ATOMIC_ACK_ETH) {
        pkt->atomic_ack = get64(p);
        p += WIRE_ATOMIC_ACK_ETH_LEN;
    }
    if (flags & (WIRE_F_IMM | WIRE_F_IETH))
        memcpy(&pkt->imm_data, p, WIRE_IMM_LEN);
}

static bool icrc_ok(const struct wire_flow *flow, const uint8_t *data, size_t hdr_len, size_t body_len) {
    struct wire_seal_state state;
    uint8_t tail[WIRE_MAX_TAIL_LEN];
    const uint8_t *sent = data + hdr_len + body_len;
    uint32_t difference = 0;
    uint16_t id;

    /* The padding is fed as payload here, so that what is checked is what was received. */
    wire_seal_start(&state, flow, data, hdr_len, body_len);
    wire_seal_feed(&state, data + hdr_len, body_len);
    wire_seal_finish(&state, tail);
    for (int i = 0; i < WIRE_ICRC_LEN; i++)
        difference |= (uint32_t)(tail[i] ^ sent[i]) << 8 * i;
    if (!difference)
        return true;
    /* Behind the identification: 14 bytes of IPv4, 8 of UDP, and the rest. */
    return flow->any_id && wire_icrc_ip_id(difference, 14 + 8 + hdr_len + body_len, &id);
}

enum wire_error wire_parse(struct wire_packet *pkt, const struct wire_flow *flow, const uint8_t *data,
                           size_t len) {
    size_t hdr_len, body_len;

    memset(pkt, 0, sizeof(*pkt));
    if (len < WIRE_BTH_LEN + WIRE_ICRC_LEN)
        return WIRE_ERR_SHORT;
    unpack_bth(&pkt->bth, data);
    if (data[1] & 0x0f)
        return WIRE_ERR_VERSION;
    pkt->flags = wire_opcode_flags(pkt->bth.opcode);
    if (!pkt->flags)
        return WIRE_ERR_OPCODE;
    hdr_len = header_len(pkt->flags);
    if (len < hdr_len + WIRE_ICRC_LEN)
        return WIRE_ERR_TRUNCATED;
    body_len = len - hdr_len - WIRE_ICRC_LEN;
    if (body_len % 4 || (body_len && !(pkt->flags & WIRE_F_PAYLOAD)))
        return WIRE_ERR_PAYLOAD;
    if (pkt->bth.pad > body_len)
        return WIRE_ERR_PAD;
    if (flow && !icrc_ok(flow, data, hdr_len, body_len))
        return WIRE_ERR_ICRC;
    unpack_extensions(pkt, data + WIRE_BTH_LEN);
    pkt->payload = data + hdr_len;
    pkt->payload_len = body_len - pkt->bth.pad;
    return WIRE_OK;
}

void wire_make_grh_ipv4(uint8_t grh[WIRE_GRH_LEN], uint32_t src_ip, uint32_t dst_ip, uint16_t ip_len,
                        uint8_t tos, uint8_t ttl) {
    uint8_t *ip = grh + WIRE_GRH_LEN - 20;
    uint32_t sum = 0;

    memset(grh, 0, WIRE_GRH_LEN);
    ip[0] = 0x45;
    ip[1] = tos;
    put16(ip + 2, ip_len);
    put16(ip + 6, 0x4000); /* DF, as wire_flow_init() */
    ip[8] = ttl;
    ip[9] = WIRE_NEXT_UDP;
    memcpy(ip + 12, &src_ip, 4);
    memcpy(ip + 16, &dst_ip, 4);
    for (int i = 0; i < 20; i += 2)
        sum += get16(ip + i);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    put16(ip + 10, ~sum);
}

void wire_make_grh(uint8_t grh[WIRE_GRH_LEN], const uint8_t src[16], const uint8_t dst[16],
                   uint16_t payload_len, uint8_t next_header, uint8_t hop_limit) {
    memset(grh, 0, 4);
    grh[0] = 0x60;
    put16(grh + 4, payload_len);
    grh[6] = next_header;
    grh[7] = hop_limit;
    memcpy(grh + 8, src, 16);
    memcpy(grh + 24, dst, 16);
}
