/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the outside calls (shiftverbs.softrnic.faults, through ctypes; a C test may too): pull cables, kill
 * NICs, lose packets, make them late. Every function returns 0 (or a rule's id) or a negative number with a sentence in err:
 * -1 = the request is wrong, -2 = the registry cannot be used.
 * The header may only grow at the end: Python declares the same struct.
 */
#ifndef SOFTRNIC_CTL_H
#define SOFTRNIC_CTL_H

#include <stddef.h>
#include <stdint.h>

#define SOFTRNIC_EXPORT __attribute__((visibility("default")))

enum { SOFTRNIC_WRONG_REQUEST = -1, SOFTRNIC_NO_REGISTRY = -2 };

struct softrnic_drop {
    const char *target;      /* "a/soft0": whose packets */
    const char *direction;   /* "tx", "rx" or "both" */
    const char *opcode;      /* a class name ("ack"), an opcode's name ("RC_SEND_ONLY") or number ("0x04") */
    const char *peer;        /* only to or from this host; NULL = any */
    const char *then;        /* "down", "kill" or "switch-down" after the last loss; NULL = nothing */
    const char *then_target; /* what then means; NULL = target */
    uint32_t qpn;            /* only this queue pair of the target; 0 = any */
    uint32_t msn;            /* only packets that acknowledge at least this message (AETH's MSN); 0 = any */
    uint32_t nth;            /* start with the nth match, from 1 */
    uint32_t count;          /* fire so often; 0 = without end */
    uint32_t per_message;    /* count messages (by their last packet) instead of packets */
    uint32_t reserved;
    double probability; /* of each match from the nth on; 1 = always */
    uint64_t seed;      /* for probability */
    const char *action; /* "drop" (NULL too), "delay", "duplicate" or "reorder" */
    uint32_t delay_us;  /* of the packet, of its copy; for reorder how long a next packet is waited for */
    uint32_t reserved2;
};

/*
 * verb: "down", "up", "kill", "revive"; "stall", "unstall": the data path stands still, what is posted is not done;
 * "hang", "unhang": commands do not return.
 */
SOFTRNIC_EXPORT int softrnic_ctl_port(const char *target, const char *verb, char *err, size_t err_len);
/* Every command of the NIC takes at least so long, which it waits for; 0: no longer. */
SOFTRNIC_EXPORT int softrnic_ctl_slow(const char *target, uint32_t command_us, char *err, size_t err_len);
/* rail: "rail0". host NULL: the whole switch, else only that host's port of it. */
SOFTRNIC_EXPORT int softrnic_ctl_switch(const char *rail, const char *host, int up, char *err,
                                        size_t err_len);
/* Returns the rule's id. */
SOFTRNIC_EXPORT int softrnic_ctl_drop(const struct softrnic_drop *drop, char *err, size_t err_len);
/* Remove one rule. */
SOFTRNIC_EXPORT int softrnic_ctl_undrop(int rule, char *err, size_t err_len);
/* Heal: rules of target (NULL: of all) removed; unless rules_only, links up, dead devices revived, switches
 * up. */
SOFTRNIC_EXPORT int softrnic_ctl_clear(const char *target, int rules_only, char *err, size_t err_len);
/* Make a host and its devices known before a process of it runs; the arguments are SOFTRNIC_HOST and
 * SOFTRNIC. */
SOFTRNIC_EXPORT int softrnic_ctl_register(const char *host, const char *config, char *err, size_t err_len);
/* What rails and their ports are like from now on: entries as in fabric/params.h, all of them or none. */
SOFTRNIC_EXPORT int softrnic_ctl_fabric(const char *text, char *err, size_t err_len);
/* Everything as JSON, NUL-terminated. Returns its length; if that is >= len, call again with more room. */
SOFTRNIC_EXPORT int softrnic_ctl_list(char *json, size_t len, char *err, size_t err_len);

#endif
