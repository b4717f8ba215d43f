/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults/ctl.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "faults/registry.h"

enum { WRONG_REQUEST = -1, NO_REGISTRY = -2 };

#define MAX_DELAY_US 60000000
#define REORDER_WAIT_US 20000

/* enum fault_verdict */
static const char *const actions[] = {"", "drop", "delay", "duplicate", "reorder"};

struct text {
    char *at;
    size_t len, used; /* used counts what would have been written, too */
};

__attribute__((format(printf, 2, 3))) static void append(struct text *text, const char *format, ...) {
    size_t room = text->used < text->len ? text->len - text->used : 0;
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(room ? text->at + text->used : NULL, room, format, args);
    va_end(args);
    if (n > 0)
        text->used += (size_t)n;
}

/* The name of a device that was described. */
static const char *device_name(const struct registry *reg, unsigned host, unsigned rail) {
    return reg->file->hosts[host].devices[rail];
}

/* "; there are: a/soft0, a/soft1" */
static void append_devices(struct text *text, const struct registry *reg) {
    const char *before = "; there are: ";

    for (unsigned h = 0; h < reg->file->host_count; h++)
        for (unsigned r = 0; r < FAULT_MAX_RAILS; r++)
            if (reg->file->hosts[h].rails >> r & 1) {
                append(text, "%s%s/%s", before, reg->file->hosts[h].name, device_name(reg, h, r));
                before = ", ";
            }
    if (!reg->file->host_count)
        append(text, "; no host has used softrnic with %s yet", reg->dir);
}

/* The number in "rail3", or -1. */
static int parse_rail(const char *text) {
    char *end;
    long rail;

    if (strncmp(text, "rail", 4) != 0 || !isdigit((unsigned char)text[4]))
        return -1;
    rail = strtol(text + 4, &end, 10);
    return *end == '\0' && rail < FAULT_MAX_RAILS ? (int)rail : -1;
}

/* "a/soft0" to indices. With the lock held. */
static int find_target(const struct registry *reg, const char *target, uint32_t *host, uint32_t *rail,
                       char *err, size_t err_len) {
    struct text text = {err, err_len, 0};
    const char *slash = strchr(target, '/');
    char name[CONFIG_NAME_LEN];
    int h = -1;

    if (!slash) {
        append(&text, "'%.60s' is no device of a host: write HOST/DEVICE, for example a/soft0", target);
        append_devices(&text, reg);
        return WRONG_REQUEST;
    }
    if ((size_t)(slash - target) < sizeof(name)) {
        snprintf(name, sizeof(name), "%.*s", (int)(slash - target), target);
        h = registry_find_host(reg, name);
    }
    if (h < 0) {
        append(&text, "unknown host '%.*s'", (int)(slash - target > 60 ? 60 : slash - target), target);
        append_devices(&text, reg);
        return WRONG_REQUEST;
    }
    for (unsigned r = 0; r < FAULT_MAX_RAILS; r++) {
        if ((reg->file->hosts[h].rails >> r & 1) &&
            strcmp(device_name(reg, (unsigned)h, r), slash + 1) == 0) {
            *host = (uint32_t)h;
            *rail = r;
            return 0;
        }
    }
    append(&text, "host '%s' has no device '%.63s'", name, slash + 1);
    append_devices(&text, reg);
    return WRONG_REQUEST;
}

static struct registry *open_locked(char *err, size_t err_len) {
    struct registry *reg;

    errno = ENOMEM;
    reg = registry_open(err, err_len);
    if (reg)
        registry_lock(reg);
    return reg;
}

int softrnic_ctl_port(const char *target, const char *verb, char *err, size_t err_len) {
    struct registry *reg = open_locked(err, err_len);
    uint32_t host, rail;
    int rc;

    if (!reg)
        return NO_REGISTRY;
    rc = find_target(reg, target, &host, &rail, err, err_len);
    if (rc == 0) {
        if (strcmp(verb, "down") == 0) {
            registry_set_link(reg, host, rail, false);
        } else if (strcmp(verb, "up") == 0) {
            registry_set_link(reg, host, rail, true);
        } else if (strcmp(verb, "kill") == 0) {
            registry_kill(reg, host, rail);
        } else if (strcmp(verb, "revive") == 0) {
            registry_revive(reg, host, rail);
        } else if (strcmp(verb, "stall") == 0) {
            registry_set_stalled(reg, host, rail, true);
        } else if (strcmp(verb, "unstall") == 0) {
            registry_set_stalled(reg, host, rail, false);
        } else if (strcmp(verb, "hang") == 0) {
            registry_set_hung(reg, host, rail, true);
        } else if (strcmp(verb, "unhang") == 0) {
            registry_set_hung(reg, host, rail, false);
        } else {
            snprintf(err, err_len,
                     "unknown action '%.40s': there are down, up, kill, revive, stall, unstall, hang, unhang",
                     verb);
            rc = WRONG_REQUEST;
        }
    }
    registry_unlock(reg);
    return rc;
}

int softrnic_ctl_switch(const char *rail, const char *host, int up, char *err, size_t err_len) {
    struct registry *reg = open_locked(err, err_len);
    struct text text = {err, err_len, 0};
    uint64_t hosts = UINT64_MAX;
    int r, rc = 0;

    if (!reg)
        return NO_REGISTRY;
    r = parse_rail(rail);
    if (r < 0) {
        append(&text, "unknown rail '%.60s': there are rail0 to rail%d", rail, FAULT_MAX_RAILS - 1);
        rc = WRONG_REQUEST;
    } else if (host) {
        int h = registry_find_host(reg, host);

        if (h < 0) {
            append(&text, "unknown host '%.60s'", host);
            append_devices(&text, reg);
            rc = WRONG_REQUEST;
        } else {
            hosts = UINT64_C(1) << h;
        }
    }
    if (rc == 0)
        registry_set_switch(reg, (unsigned)r, hosts, up);
    registry_unlock(reg);
    return rc;
}

/* A class name, an opcode's name or its number. */
static int parse_opcode(const char *text, struct registry_rule *rule) {
    char *end;
    unsigned long number;

    rule->opcode = -1;
    rule->classes = rules_class_by_name(text);
    if (rule->classes)
        return 0;
    for (int opcode = 0; opcode < 256; opcode++) {
        if (wire_opcode_flags((uint8_t)opcode) && strcmp(text, wire_opcode_name((uint8_t)opcode)) == 0) {
            rule->opcode = opcode;
            return 0;
        }
    }
    if (!isdigit((unsigned char)*text))
        return -1;
    number = strtoul(text, &end, 0);
    if (*end || number > 255 || !wire_opcode_flags((uint8_t)number))
        return -1;
    rule->opcode = (int)number;
    return 0;
}

static int parse_then(const struct registry *reg, const struct softrnic_drop *drop,
                      struct registry_rule *rule, char *err, size_t err_len) {
    rule->then_host = rule->host;
    rule->then_rail = rule->rail;
    if (!drop->then) {
        rule->then = THEN_NOTHING;
        return 0;
    }
    if (strcmp(drop->then, "down") == 0) {
        rule->then = THEN_DOWN;
    } else if (strcmp(drop->then, "kill") == 0) {
        rule->then = THEN_KILL;
    } else if (strcmp(drop->then, "switch-down") == 0) {
        rule->then = THEN_SWITCH_DOWN;
    } else {
        snprintf(err, err_len, "unknown consequence '%.40s': there are down, kill, switch-down", drop->then);
        return WRONG_REQUEST;
    }
    if (drop->then_target)
        return find_target(reg, drop->then_target, &rule->then_host, &rule->then_rail, err, err_len);
    return 0;
}

static int parse_action(const struct softrnic_drop *drop, struct registry_rule *rule, char *err,
                        size_t err_len) {
    unsigned action = FAULT_DROP;

    while (action <= FAULT_REORDER && drop->action && strcmp(drop->action, actions[action]) != 0)
        action++;
    if (action > FAULT_REORDER) {
        snprintf(err, err_len, "unknown action '%.40s': there are drop, delay, duplicate, reorder",
                 drop->action);
        return WRONG_REQUEST;
    }
    if ((action == FAULT_DELAY && !drop->delay_us) || drop->delay_us > MAX_DELAY_US ||
        (action == FAULT_DROP && drop->delay_us)) {
        snprintf(err, err_len, "a delay is greater than 0 and at most %d s, and not of what is lost",
                 MAX_DELAY_US / 1000000);
        return WRONG_REQUEST;
    }
    rule->action = action;
    rule->delay_us = action == FAULT_REORDER && !drop->delay_us ? REORDER_WAIT_US : drop->delay_us;
    return 0;
}

static int parse_drop(const struct registry *reg, const struct softrnic_drop *drop,
                      struct registry_rule *rule, char *err, size_t err_len) {
    struct text text = {err, err_len, 0};
    int rc = find_target(reg, drop->target, &rule->host, &rule->rail, err, err_len);

    if (rc == 0)
        rc = parse_action(drop, rule, err, err_len);
    if (rc)
        return rc;
    if (strcmp(drop->direction, "tx") == 0) {
        rule->directions = FAULT_TX;
    } else if (strcmp(drop->direction, "rx") == 0) {
        rule->directions = FAULT_RX;
    } else if (strcmp(drop->direction, "both") == 0) {
        rule->directions = FAULT_TX | FAULT_RX;
    } else {
        append(&text, "unknown direction '%.40s': there are tx, rx, both", drop->direction);
        return WRONG_REQUEST;
    }
    if (parse_opcode(drop->opcode, rule) != 0) {
        append(&text, "unknown opcode '%.40s': there are %s, names like RC_SEND_ONLY and numbers like 0x04",
               drop->opcode, rules_class_names());
        return WRONG_REQUEST;
    }
    rule->peer_host = -1;
    if (drop->peer) {
        rule->peer_host = registry_find_host(reg, drop->peer);
        if (rule->peer_host < 0) {
            append(&text, "unknown host '%.60s'", drop->peer);
            append_devices(&text, reg);
            return WRONG_REQUEST;
        }
    }
    if (drop->nth == 0) {
        append(&text, "nth counts from 1");
        return WRONG_REQUEST;
    }
    if (!(drop->probability > 0 && drop->probability <= 1)) {
        append(&text, "a probability is greater than 0 and at most 1, not %g", drop->probability);
        return WRONG_REQUEST;
    }
    if (drop->qpn > WIRE_QPN_MASK || drop->msn > WIRE_MSN_MASK) {
        append(&text, "QP numbers and message sequence numbers have 24 bits");
        return WRONG_REQUEST;
    }
    rule->qpn = drop->qpn;
    rule->min_msn = drop->msn;
    rule->unit = drop->per_message ? UNIT_MESSAGE : UNIT_PACKET;
    rule->nth = drop->nth;
    rule->count = drop->count;
    rule->probability = drop->probability >= 1 ? REGISTRY_ALWAYS : (uint32_t)(drop->probability * UINT32_MAX);
    rule->seed = drop->seed;
    /* Spread the seed's bits; the generator's state must not be zero. */
    rule->random = (drop->seed + 1) * 0x9e3779b97f4a7c15u;
    if (!rule->random)
        rule->random = 1;
    return parse_then(reg, drop, rule, err, err_len);
}

int softrnic_ctl_drop(const struct softrnic_drop *drop, char *err, size_t err_len) {
    struct registry *reg = open_locked(err, err_len);
    struct registry_rule rule = {0};
    int rc;

    if (!reg)
        return NO_REGISTRY;
    rc = parse_drop(reg, drop, &rule, err, err_len);
    if (rc == 0) {
        struct registry_file *file = reg->file;
        unsigned i = 0;

        while (i < FAULT_MAX_RULES && file->rules[i].id)
            i++;
        if (i == FAULT_MAX_RULES) {
            snprintf(err, err_len, "there are %d rules already; remove some with clear", FAULT_MAX_RULES);
            rc = WRONG_REQUEST;
        } else {
            rule.id = file->next_rule_id;
            file->next_rule_id = file->next_rule_id < INT32_MAX ? file->next_rule_id + 1 : 1;
            file->rules[i] = rule;
            if (file->rule_end <= i)
                file->rule_end = i + 1;
            registry_update_active(reg, rule.host, rule.rail);
            rc = (int)rule.id;
        }
    }
    registry_unlock(reg);
    return rc;
}

static void remove_rule(struct registry *reg, struct registry_rule *rule) {
    uint32_t host = rule->host, rail = rule->rail;

    memset(rule, 0, sizeof(*rule));
    while (reg->file->rule_end && !reg->file->rules[reg->file->rule_end - 1].id)
        reg->file->rule_end--;
    registry_update_active(reg, host, rail);
}

int softrnic_ctl_undrop(int id, char *err, size_t err_len) {
    struct registry *reg = open_locked(err, err_len);
    int rc = WRONG_REQUEST;

    if (!reg)
        return NO_REGISTRY;
    for (unsigned i = 0; id > 0 && i < reg->file->rule_end; i++) {
        if (reg->file->rules[i].id == (uint32_t)id) {
            remove_rule(reg, &reg->file->rules[i]);
            rc = 0;
            break;
        }
    }
    if (rc)
        snprintf(err, err_len, "there is no rule %d", id);
    registry_unlock(reg);
    return rc;
}

int softrnic_ctl_clear(const char *target, int rules_only, char *err, size_t err_len) {
    struct registry *reg = open_locked(err, err_len);
    uint32_t host = 0, rail = 0;

    if (!reg)
        return NO_REGISTRY;
    if (target && find_target(reg, target, &host, &rail, err, err_len) != 0) {
        registry_unlock(reg);
        return WRONG_REQUEST;
    }
    for (unsigned i = FAULT_MAX_RULES; i-- > 0;) {
        struct registry_rule *rule = &reg->file->rules[i];

        if (rule->id && (!target || (rule->host == host && rule->rail == rail)))
            remove_rule(reg, rule);
    }
    for (unsigned r = 0; !rules_only && r < FAULT_MAX_RAILS; r++) {
        if (target && r != rail)
            continue;
        registry_set_switch(reg, r, target ? UINT64_C(1) << host : UINT64_MAX, true);
        for (unsigned h = 0; h < reg->file->host_count; h++) {
            if (target && h != host)
                continue;
            registry_revive(reg, h, r);
            registry_set_link(reg, h, r, true);
            registry_set_stalled(reg, h, r, false);
            registry_set_hung(reg, h, r, false);
        }
    }
    registry_unlock(reg);
    return 0;
}

int softrnic_ctl_register(const char *host, const char *softrnic, char *err, size_t err_len) {
    struct config config;

    if (config_parse(&config, softrnic, host, err, err_len) != 0)
        return WRONG_REQUEST;
    return fault_register(&config, err, err_len) == 0 ? 0 : NO_REGISTRY;
}

int softrnic_ctl_fabric(const char *entries, char *err, size_t err_len) {
    struct registry *reg = open_locked(err, err_len);
    int rc;

    if (!reg)
        return NO_REGISTRY;
    rc = network_apply(reg, entries, false, err, err_len);
    registry_unlock(reg);
    return rc ? WRONG_REQUEST : 0;
}

/* As a JSON string is written, without its quotes. */
static void append_escaped(struct text *text, const char *p) {
    for (; *p; p++) {
        if (*p == '"' || *p == '\\' || (unsigned char)*p < 0x20)
            append(text, "\\u%04x", (unsigned char)*p);
        else
            append(text, "%c", *p);
    }
}

static void append_processes(struct text *text, struct registry *reg, unsigned host, unsigned rail,
                             const bool *alive) {
    const char *before = "";

    append(text, "\"processes\":[");
    for (unsigned i = 0; i < reg->file->claim_end; i++) {
        const struct registry_claim *claim = &reg->file->claims[i];
        char address[INET_ADDRSTRLEN] = "";

        if (!claim->pid || claim->host != host || claim->rail != rail || !alive[i])
            continue;
        if (claim->address)
            inet_ntop(AF_INET, &claim->address, address, sizeof(address));
        append(text, "%s{\"pid\":%d,\"address\":\"%s\"}", before, claim->pid, address);
        before = ",";
    }
    append(text, "]");
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

    append(text, ",\"pfc\":%s,\"xoff\":%" PRIu64 ",\"xon\":%" PRIu64 ",\"headroom\":%" PRIu64,
           params->pfc ? "true" : "false", params->xoff, params->xon, params->headroom);
    append(text, ",\"watchdog_ns\":%" PRIu64 ",\"prio\":{", params->watchdog_ns);
    for (unsigned p = 0; p < FABRIC_PRIORITIES; p++) {
        const struct fabric_prio_counters *counted = &found->prio[p];

        append(text, "%s\"rx_prio%u_pause\":%" PRIu64 ",\"rx_prio%u_pause_duration\":%" PRIu64, p ? "," : "",
               p, counted->rx_pause, p, counted->rx_pause_ns / 1000);
        append(text, ",\"tx_prio%u_pause\":%" PRIu64 ",\"rx_prio%u_discards\":%" PRIu64, p, counted->tx_pause,
               p, counted->dropped);
        storms += counted->storms;
        dropped += counted->watchdog_dropped;
    }
    append(text, "},\"storms\":%" PRIu64 ",\"watchdog_dropped\":%" PRIu64, storms, dropped);
}

static void append_link(struct text *text, struct registry *reg, unsigned host, unsigned rail) {
    struct registry_link *shared = registry_link_lock(reg, host, rail), link = *shared;
    uint64_t queue = fabric_queue(&link.port, &link.params, registry_now_ns());
    struct fabric_counters *counted = &link.port.counters;
    struct fabric_host in_switch;

    registry_link_unlock(shared);
    if (!link.params.rate) {
        append(text, "null");
        return;
    }
    in_switch = look_into_switch(reg, host, rail, &queue);
    append(text, "{\"rate\":%" PRIu64 ",\"delay_ns\":%" PRIu64 ",\"buffer\":%" PRIu64, link.params.rate,
           link.params.delay_ns, link.params.buffer);
    append(text, ",\"kmin\":%" PRIu64 ",\"kmax\":%" PRIu64 ",\"pmax\":%.9g", link.params.kmin,
           link.params.kmax, link.params.pmax);
    append(text, ",\"dcqcn\":%s,\"dilation\":%u", link.params.dcqcn.g > 0 ? "true" : "false",
           link.params.dilation);
    append(text, ",\"queue\":%" PRIu64 ",\"queue_peak\":%" PRIu64, queue,
           counted->queue_peak > in_switch.counters.queue_peak ? counted->queue_peak
                                                               : in_switch.counters.queue_peak);
    append(text, ",\"packets\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"dropped\":%" PRIu64 ",\"marked\":%" PRIu64,
           counted->packets + in_switch.counters.packets, counted->bytes + in_switch.counters.bytes,
           counted->dropped + in_switch.counters.dropped, counted->marked + in_switch.counters.marked);
    for (unsigned i = 0; i < FIRST_OF_DEVICE; i++)
        append(text, ",\"%s\":%" PRIu64, nic_counter_name(i), link.counters[i]);
    append_pfc(text, &link.params, &in_switch);
    append(text, "}");
}

static void append_counters(struct text *text, const struct registry_link *link) {
    const char *before = "";

    append(text, "\"counters\":{");
    for (unsigned i = FIRST_OF_DEVICE; i < NIC_COUNTERS; i++) {
        append(text, "%s\"%s\":%" PRIu64, before, nic_counter_name(i),
               __atomic_load_n(&link->counters[i], __ATOMIC_RELAXED));
        before = ",";
    }
    append(text, "}");
}

static void append_hosts(struct text *text, struct registry *reg, const bool *alive) {
    const struct registry_file *file = reg->file;
    const char *before = "";

    append(text, "\"devices\":[");
    for (unsigned h = 0; h < file->host_count; h++) {
        for (unsigned r = 0; r < FAULT_MAX_RAILS; r++) {
            const struct registry_port *port = &file->ports[h][r];

            if (!(file->hosts[h].rails >> r & 1))
                continue;
            append(text, "%s{\"host\":\"%s\",\"device\":\"", before, file->hosts[h].name);
            append_escaped(text, device_name(reg, h, r));
            append(text,
                   "\",\"rail\":\"rail%u\",\"link_up\":%s,\"dead\":%s,"
                   "\"switch_up\":%s,\"stalled\":%s,\"commands_hang\":%s,\"link_changes\":%u,\"kills\":%u,"
                   "\"changed_ns\":%" PRIu64 ",",
                   r, port->link_changes & 1 ? "false" : "true", port->dead ? "true" : "false",
                   file->switch_down[r] >> h & 1 ? "false" : "true", port->stalled ? "true" : "false",
                   port->hung ? "true" : "false", port->link_changes, port->kills, port->changed_ns);
            append_processes(text, reg, h, r, alive);
            append(text, ",");
            append_counters(text, &file->links[h][r]);
            append(text, ",\"link\":");
            append_link(text, reg, h, r);
            append(text, "}");
            before = ",";
        }
    }
    append(text, "]");
}

static void append_rules(struct text *text, const struct registry *reg) {
    static const char *const directions[] = {"", "tx", "rx", "both"};
    static const char *const thens[] = {"", "down", "kill", "switch-down"};
    const struct registry_file *file = reg->file;
    const char *before = "";

    append(text, "\"rules\":[");
    for (unsigned i = 0; i < file->rule_end; i++) {
        const struct registry_rule *rule = &file->rules[i];

        if (!rule->id)
            continue;
        append(text, "%s{\"id\":%u,\"action\":\"%s\",\"delay_us\":%u,\"target\":\"%s/", before, rule->id,
               actions[rule->action], rule->delay_us, file->hosts[rule->host].name);
        append_escaped(text, device_name(reg, rule->host, rule->rail));
        append(text, "\",\"direction\":\"%s\",\"opcode\":\"%s\",", directions[rule->directions & 3],
               rule->opcode >= 0 ? wire_opcode_name((uint8_t)rule->opcode) : rules_class_name(rule->classes));
        append(text, "\"peer\":\"%s\",\"qpn\":%u,\"msn\":%u,\"per_message\":%s,\"nth\":%u,\"count\":%u,",
               rule->peer_host >= 0 ? file->hosts[rule->peer_host].name : "", rule->qpn, rule->min_msn,
               rule->unit == UNIT_MESSAGE ? "true" : "false", rule->nth, rule->count);
        /* Of 2^32 - 1: printf would write a fraction as the locale has it, in many with a comma. */
        append(text, "\"probability\":%u,\"seed\":%" PRIu64 ",\"then\":\"%s\",\"then_target\":\"%s/",
               rule->probability, rule->seed, thens[rule->then & 3], file->hosts[rule->then_host].name);
        append_escaped(text, device_name(reg, rule->then_host, rule->then_rail));
        append(text, "\",\"matched\":%" PRIu64 ",\"fired\":%" PRIu64 ",\"fired_ns\":%" PRIu64 "}",
               rule->matched, rule->fired, rule->fired_ns);
        before = ",";
    }
    append(text, "]");
}

int softrnic_ctl_list(char *json, size_t len, char *err, size_t err_len) {
    struct text text = {json, len, 0};
    bool alive[REGISTRY_MAX_CLAIMS] = {false};
    struct registry *reg;
    unsigned claims;

    errno = ENOMEM;
    reg = registry_open(err, err_len);
    if (!reg)
        return NO_REGISTRY;
    /* Outside the lock: these are system calls, and the data path may want the lock. */
    claims = __atomic_load_n(&reg->file->claim_end, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < claims && i < REGISTRY_MAX_CLAIMS; i++)
        alive[i] = registry_claim_alive(reg, i);
    registry_lock(reg);
    append(&text, "{\"directory\":\"");
    append_escaped(&text, reg->dir);
    append(&text, "\",");
    append_hosts(&text, reg, alive);
    append(&text, ",");
    append_rules(&text, reg);
    append(&text, "}");
    registry_unlock(reg);
    return (int)text.used;
}
