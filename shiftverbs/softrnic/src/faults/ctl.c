/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults/ctl.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "faults/registry.h"
#include "faults/text.h"

#define MAX_DELAY_US 60000000
#define REORDER_WAIT_US 20000

/* "; there are: a/soft0, a/soft1" */
static void append_devices(struct text *text, const struct registry *reg) {
    const char *before = "; there are: ";

    for (unsigned h = 0; h < reg->file->host_count; h++)
        for (unsigned r = 0; r < FAULT_MAX_RAILS; r++)
            if (reg->file->hosts[h].rails >> r & 1) {
                text_append(text, "%s%s/%s", before, reg->file->hosts[h].name,
                            registry_device_name(reg, h, r));
                before = ", ";
            }
    if (!reg->file->host_count)
        text_append(text, "; no host has used softrnic with %s yet", reg->dir);
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
        text_append(&text, "'%.60s' is no device of a host: write HOST/DEVICE, for example a/soft0", target);
        append_devices(&text, reg);
        return SOFTRNIC_WRONG_REQUEST;
    }
    if ((size_t)(slash - target) < sizeof(name)) {
        snprintf(name, sizeof(name), "%.*s", (int)(slash - target), target);
        h = registry_find_host(reg, name);
    }
    if (h < 0) {
        text_append(&text, "unknown host '%.*s'", (int)(slash - target > 60 ? 60 : slash - target), target);
        append_devices(&text, reg);
        return SOFTRNIC_WRONG_REQUEST;
    }
    for (unsigned r = 0; r < FAULT_MAX_RAILS; r++) {
        if ((reg->file->hosts[h].rails >> r & 1) &&
            strcmp(registry_device_name(reg, (unsigned)h, r), slash + 1) == 0) {
            *host = (uint32_t)h;
            *rail = r;
            return 0;
        }
    }
    text_append(&text, "host '%s' has no device '%.63s'", name, slash + 1);
    append_devices(&text, reg);
    return SOFTRNIC_WRONG_REQUEST;
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
        return SOFTRNIC_NO_REGISTRY;
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
            rc = SOFTRNIC_WRONG_REQUEST;
        }
    }
    registry_unlock(reg);
    return rc;
}

int softrnic_ctl_slow(const char *target, uint32_t command_us, char *err, size_t err_len) {
    struct registry *reg = open_locked(err, err_len);
    uint32_t host, rail;
    int rc;

    if (!reg)
        return SOFTRNIC_NO_REGISTRY;
    rc = find_target(reg, target, &host, &rail, err, err_len);
    if (rc == 0 && command_us > MAX_DELAY_US) {
        snprintf(err, err_len, "a command of %u us is none: at most %u", command_us, MAX_DELAY_US);
        rc = SOFTRNIC_WRONG_REQUEST;
    }
    if (rc == 0)
        registry_set_slow(reg, host, rail, command_us);
    registry_unlock(reg);
    return rc;
}

int softrnic_ctl_switch(const char *rail, const char *host, int up, char *err, size_t err_len) {
    struct registry *reg = open_locked(err, err_len);
    struct text text = {err, err_len, 0};
    uint64_t hosts = UINT64_MAX;
    int r, rc = 0;

    if (!reg)
        return SOFTRNIC_NO_REGISTRY;
    r = parse_rail(rail);
    if (r < 0) {
        text_append(&text, "unknown rail '%.60s': there are rail0 to rail%d", rail, FAULT_MAX_RAILS - 1);
        rc = SOFTRNIC_WRONG_REQUEST;
    } else if (host) {
        int h = registry_find_host(reg, host);

        if (h < 0) {
            text_append(&text, "unknown host '%.60s'", host);
            append_devices(&text, reg);
            rc = SOFTRNIC_WRONG_REQUEST;
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
        return SOFTRNIC_WRONG_REQUEST;
    }
    if (drop->then_target)
        return find_target(reg, drop->then_target, &rule->then_host, &rule->then_rail, err, err_len);
    return 0;
}

static int parse_action(const struct softrnic_drop *drop, struct registry_rule *rule, char *err,
                        size_t err_len) {
    unsigned action = FAULT_DROP;

    while (action <= FAULT_REORDER && drop->action && strcmp(drop->action, rules_action_name(action)) != 0)
        action++;
    if (action > FAULT_REORDER) {
        snprintf(err, err_len, "unknown action '%.40s': there are drop, delay, duplicate, reorder",
                 drop->action);
        return SOFTRNIC_WRONG_REQUEST;
    }
    if ((action == FAULT_DELAY && !drop->delay_us) || drop->delay_us > MAX_DELAY_US ||
        (action == FAULT_DROP && drop->delay_us)) {
        snprintf(err, err_len, "a delay is greater than 0 and at most %d s, and not of what is lost",
                 MAX_DELAY_US / 1000000);
        return SOFTRNIC_WRONG_REQUEST;
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
        text_append(&text, "unknown direction '%.40s': there are tx, rx, both", drop->direction);
        return SOFTRNIC_WRONG_REQUEST;
    }
    if (parse_opcode(drop->opcode, rule) != 0) {
        text_append(&text,
                    "unknown opcode '%.40s': there are %s, names like RC_SEND_ONLY and numbers like 0x04",
                    drop->opcode, rules_class_names());
        return SOFTRNIC_WRONG_REQUEST;
    }
    rule->peer_host = -1;
    if (drop->peer) {
        rule->peer_host = registry_find_host(reg, drop->peer);
        if (rule->peer_host < 0) {
            text_append(&text, "unknown host '%.60s'", drop->peer);
            append_devices(&text, reg);
            return SOFTRNIC_WRONG_REQUEST;
        }
    }
    if (drop->nth == 0) {
        text_append(&text, "nth counts from 1");
        return SOFTRNIC_WRONG_REQUEST;
    }
    if (!(drop->probability > 0 && drop->probability <= 1)) {
        text_append(&text, "a probability is greater than 0 and at most 1, not %g", drop->probability);
        return SOFTRNIC_WRONG_REQUEST;
    }
    if (drop->qpn > WIRE_QPN_MASK || drop->msn > WIRE_MSN_MASK) {
        text_append(&text, "QP numbers and message sequence numbers have 24 bits");
        return SOFTRNIC_WRONG_REQUEST;
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
        return SOFTRNIC_NO_REGISTRY;
    rc = parse_drop(reg, drop, &rule, err, err_len);
    if (rc == 0) {
        struct registry_file *file = reg->file;
        unsigned i = 0;

        while (i < FAULT_MAX_RULES && file->rules[i].id)
            i++;
        if (i == FAULT_MAX_RULES) {
            snprintf(err, err_len, "there are %d rules already; remove some with clear", FAULT_MAX_RULES);
            rc = SOFTRNIC_WRONG_REQUEST;
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
    int rc = SOFTRNIC_WRONG_REQUEST;

    if (!reg)
        return SOFTRNIC_NO_REGISTRY;
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
        return SOFTRNIC_NO_REGISTRY;
    if (target && find_target(reg, target, &host, &rail, err, err_len) != 0) {
        registry_unlock(reg);
        return SOFTRNIC_WRONG_REQUEST;
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
            registry_set_slow(reg, h, r, 0);
        }
    }
    registry_unlock(reg);
    return 0;
}

int softrnic_ctl_register(const char *host, const char *softrnic, char *err, size_t err_len) {
    struct config config;

    if (config_parse(&config, softrnic, host, err, err_len) != 0)
        return SOFTRNIC_WRONG_REQUEST;
    return fault_register(&config, err, err_len) == 0 ? 0 : SOFTRNIC_NO_REGISTRY;
}

int softrnic_ctl_fabric(const char *entries, char *err, size_t err_len) {
    struct registry *reg = open_locked(err, err_len);
    int rc;

    if (!reg)
        return SOFTRNIC_NO_REGISTRY;
    rc = network_apply(reg, entries, false, err, err_len);
    registry_unlock(reg);
    return rc ? SOFTRNIC_WRONG_REQUEST : 0;
}
