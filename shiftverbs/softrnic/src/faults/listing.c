/* SPDX-License-Identifier: BSD-3-Clause */
/* Everything that the registry knows, as JSON: what the command line and shiftverbs.softrnic.faults show. */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>

#include "faults/ctl.h"
#include "faults/registry.h"
#include "faults/text.h"

/* As a JSON string is written, without its quotes. */
static void append_escaped(struct text *text, const char *p) {
    for (; *p; p++) {
        if (*p == '"' || *p == '\\' || (unsigned char)*p < 0x20)
            text_append(text, "\\u%04x", (unsigned char)*p);
        else
            text_append(text, "%c", *p);
    }
}

static void append_processes(struct text *text, struct registry *reg, unsigned host, unsigned rail,
                             const bool *alive) {
    const char *before = "";

    text_append(text, "\"processes\":[");
    for (unsigned i = 0; i < reg->file->claim_end; i++) {
        const struct registry_claim *claim = &reg->file->claims[i];
        char address[INET_ADDRSTRLEN] = "";

        if (!claim->pid || claim->host != host || claim->rail != rail || !alive[i])
            continue;
        if (claim->address)
            inet_ntop(AF_INET, &claim->address, address, sizeof(address));
        text_append(text, "%s{\"pid\":%d,\"address\":\"%s\"}", before, claim->pid, address);
        before = ",";
    }
    text_append(text, "]");
}

/* What a rail's switch with flow control counted of a port; 0 where there is none. */
static struct fabric_host look_into_switch(struct registry *reg, unsigned host, unsigned rail,
                                           uint64_t *queue) {
    struct registry_switch *shared = registry_switch_lock(reg, rail, false);
    struct fabric_host found = {0};

    if (!shared)
        return found;
    *queue += fabric_switch_queue(&shared->fabric, host, registry_now_ns());
    found = shared->fabric.hosts[host];
    registry_switch_unlock(shared);
    return found;
}

/* By priority as mlx5 has it in ethtool; a duration in microseconds. */
static void append_pfc(struct text *text, const struct fabric_params *params,
                       const struct fabric_host *found) {
    uint64_t storms = 0, dropped = 0;

    text_append(text, ",\"pfc\":%s,\"xoff\":%" PRIu64 ",\"xon\":%" PRIu64 ",\"headroom\":%" PRIu64,
                params->pfc ? "true" : "false", params->xoff, params->xon, params->headroom);
    text_append(text, ",\"watchdog_ns\":%" PRIu64 ",\"prio\":{", params->watchdog_ns);
    for (unsigned p = 0; p < FABRIC_PRIORITIES; p++) {
        const struct fabric_prio_counters *counted = &found->prio[p];

        text_append(text, "%s\"rx_prio%u_pause\":%" PRIu64 ",\"rx_prio%u_pause_duration\":%" PRIu64,
                    p ? "," : "", p, counted->rx_pause, p, counted->rx_pause_ns / 1000);
        text_append(text, ",\"tx_prio%u_pause\":%" PRIu64 ",\"rx_prio%u_discards\":%" PRIu64, p,
                    counted->tx_pause, p, counted->dropped);
        storms += counted->storms;
        dropped += counted->watchdog_dropped;
    }
    text_append(text, "},\"storms\":%" PRIu64 ",\"watchdog_dropped\":%" PRIu64, storms, dropped);
}

static void append_link(struct text *text, struct registry *reg, unsigned host, unsigned rail) {
    struct registry_link *shared = registry_link_lock(reg, host, rail), link = *shared;
    uint64_t queue = fabric_queue(&link.port, &link.params, registry_now_ns());
    struct fabric_counters *counted = &link.port.counters;
    struct fabric_host in_switch;

    registry_link_unlock(shared);
    if (!link.params.rate) {
        text_append(text, "null");
        return;
    }
    in_switch = look_into_switch(reg, host, rail, &queue);
    text_append(text, "{\"rate\":%" PRIu64 ",\"delay_ns\":%" PRIu64 ",\"buffer\":%" PRIu64, link.params.rate,
                link.params.delay_ns, link.params.buffer);
    text_append(text, ",\"kmin\":%" PRIu64 ",\"kmax\":%" PRIu64 ",\"pmax\":%.9g", link.params.kmin,
                link.params.kmax, link.params.pmax);
    text_append(text, ",\"dcqcn\":%s,\"dilation\":%u", link.params.dcqcn.g > 0 ? "true" : "false",
                link.params.dilation);
    text_append(text, ",\"queue\":%" PRIu64 ",\"queue_peak\":%" PRIu64, queue,
                counted->queue_peak > in_switch.counters.queue_peak ? counted->queue_peak
                                                                    : in_switch.counters.queue_peak);
    text_append(text,
                ",\"packets\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"dropped\":%" PRIu64 ",\"marked\":%" PRIu64,
                counted->packets + in_switch.counters.packets, counted->bytes + in_switch.counters.bytes,
                counted->dropped + in_switch.counters.dropped, counted->marked + in_switch.counters.marked);
    for (unsigned i = 0; i < FIRST_OF_DEVICE; i++)
        text_append(text, ",\"%s\":%" PRIu64, nic_counter_name(i), link.counters[i]);
    append_pfc(text, &link.params, &in_switch);
    text_append(text, "}");
}

static void append_counters(struct text *text, const struct registry_link *link) {
    const char *before = "";

    text_append(text, "\"counters\":{");
    for (unsigned i = FIRST_OF_DEVICE; i < NIC_COUNTERS; i++) {
        text_append(text, "%s\"%s\":%" PRIu64, before, nic_counter_name(i),
                    __atomic_load_n(&link->counters[i], __ATOMIC_RELAXED));
        before = ",";
    }
    text_append(text, "}");
}

static void append_hosts(struct text *text, struct registry *reg, const bool *alive) {
    const struct registry_file *file = reg->file;
    const char *before = "";

    text_append(text, "\"devices\":[");
    for (unsigned h = 0; h < file->host_count; h++) {
        for (unsigned r = 0; r < FAULT_MAX_RAILS; r++) {
            const struct registry_port *port = &file->ports[h][r];

            if (!(file->hosts[h].rails >> r & 1))
                continue;
            text_append(text, "%s{\"host\":\"%s\",\"device\":\"", before, file->hosts[h].name);
            append_escaped(text, registry_device_name(reg, h, r));
            text_append(text,
                        "\",\"rail\":\"rail%u\",\"link_up\":%s,\"dead\":%s,"
                        "\"switch_up\":%s,\"stalled\":%s,\"commands_hang\":%s,\"command_us\":%u,\"link_"
                        "changes\":%u,\"kills\":%u,"
                        "\"changed_ns\":%" PRIu64 ",",
                        r, port->link_changes & 1 ? "false" : "true", port->dead ? "true" : "false",
                        file->switch_down[r] >> h & 1 ? "false" : "true", port->stalled ? "true" : "false",
                        port->hung ? "true" : "false", port->command_us, port->link_changes, port->kills,
                        port->changed_ns);
            append_processes(text, reg, h, r, alive);
            text_append(text, ",");
            append_counters(text, &file->links[h][r]);
            text_append(text, ",\"link\":");
            append_link(text, reg, h, r);
            text_append(text, "}");
            before = ",";
        }
    }
    text_append(text, "]");
}

static void append_rules(struct text *text, const struct registry *reg) {
    static const char *const directions[] = {"", "tx", "rx", "both"};
    static const char *const thens[] = {"", "down", "kill", "switch-down"};
    const struct registry_file *file = reg->file;
    const char *before = "";

    text_append(text, "\"rules\":[");
    for (unsigned i = 0; i < file->rule_end; i++) {
        const struct registry_rule *rule = &file->rules[i];

        if (!rule->id)
            continue;
        text_append(text, "%s{\"id\":%u,\"action\":\"%s\",\"delay_us\":%u,\"target\":\"%s/", before, rule->id,
                    rules_action_name(rule->action), rule->delay_us, file->hosts[rule->host].name);
        append_escaped(text, registry_device_name(reg, rule->host, rule->rail));
        text_append(text, "\",\"direction\":\"%s\",\"opcode\":\"%s\",", directions[rule->directions & 3],
                    rule->opcode >= 0 ? wire_opcode_name((uint8_t)rule->opcode)
                                      : rules_class_name(rule->classes));
        text_append(text, "\"peer\":\"%s\",\"qpn\":%u,\"msn\":%u,\"per_message\":%s,\"nth\":%u,\"count\":%u,",
                    rule->peer_host >= 0 ? file->hosts[rule->peer_host].name : "", rule->qpn, rule->min_msn,
                    rule->unit == UNIT_MESSAGE ? "true" : "false", rule->nth, rule->count);
        /* Of 2^32 - 1: printf would write a fraction as the locale has it, in many with a comma. */
        text_append(text, "\"probability\":%u,\"seed\":%" PRIu64 ",\"then\":\"%s\",\"then_target\":\"%s/",
                    rule->probability, rule->seed, thens[rule->then & 3], file->hosts[rule->then_host].name);
        append_escaped(text, registry_device_name(reg, rule->then_host, rule->then_rail));
        text_append(text, "\",\"matched\":%" PRIu64 ",\"fired\":%" PRIu64 ",\"fired_ns\":%" PRIu64 "}",
                    rule->matched, rule->fired, rule->fired_ns);
        before = ",";
    }
    text_append(text, "]");
}

int softrnic_ctl_list(char *json, size_t len, char *err, size_t err_len) {
    struct text text = {json, len, 0};
    bool alive[REGISTRY_MAX_CLAIMS] = {false};
    struct registry *reg;
    unsigned claims;

    errno = ENOMEM;
    reg = registry_open(err, err_len);
    if (!reg)
        return SOFTRNIC_NO_REGISTRY;
    /* Outside the lock: these are system calls, and the data path may want the lock. */
    claims = __atomic_load_n(&reg->file->claim_end, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < claims && i < REGISTRY_MAX_CLAIMS; i++)
        alive[i] = registry_claim_alive(reg, i);
    registry_lock(reg);
    text_append(&text, "{\"directory\":\"");
    append_escaped(&text, reg->dir);
    text_append(&text, "\",");
    append_hosts(&text, reg, alive);
    text_append(&text, ",");
    append_rules(&text, reg);
    text_append(&text, "}");
    registry_unlock(reg);
    return (int)text.used;
}
