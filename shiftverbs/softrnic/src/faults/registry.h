/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The file behind fault.h and ctl.h: its layout, its lock, and changes to it. Private to the files of
 * this folder that deal with it.
 */
#ifndef SOFTRNIC_REGISTRY_H
#define SOFTRNIC_REGISTRY_H

#include <pthread.h>
#include <sys/un.h>

#include "fabric/port.h"
#include "fabric/switch.h"
#include "faults/counted.h"
#include "faults/fault.h"

#define REGISTRY_MAGIC 0x736f6674u
#define REGISTRY_VERSION 6 /* part of the file's name: another layout is another file */
#define REGISTRY_MAX_CLAIMS 1024
#define REGISTRY_ALWAYS UINT32_MAX /* probability 1 */
#define REGISTRY_RAIL_NET 32       /* rail N is 127.(32 + N).0.0/16, host H of it 127.(32 + N).(H + 1).0/24 */

struct registry_host {
    char name[CONFIG_NAME_LEN];
    uint32_t rails; /* bit per device that was ever described */
    char devices[FAULT_MAX_RAILS]
                [CONFIG_DEVICE_LEN]; /* its name, as last described; only with the lock held */
};

/* One device of one host. Written under the lock, read without it: every field by one atomic access. */
struct registry_port {
    uint32_t active;       /* fault.h */
    uint32_t link_changes; /* even: up, odd: down */
    uint32_t kills;        /* how often it died */
    uint32_t dead;         /* died and not yet revived: nobody can open it */
    uint32_t rules;        /* rules that may still fire */
    uint32_t stalled;      /* its data path stands still */
    uint32_t hung;         /* its commands do not return */
    uint32_t command_us;   /* its commands take at least so long */
    uint64_t changed_ns;   /* CLOCK_MONOTONIC of the last change of link or life */
};

enum registry_then { THEN_NOTHING, THEN_DOWN, THEN_KILL, THEN_SWITCH_DOWN };
enum registry_unit { UNIT_PACKET, UNIT_MESSAGE };

/* What a rule asks for. The first half is filled in by ctl.c; see softrnic_drop there for the meanings. */
struct registry_rule {
    uint32_t id; /* 0 = free */
    uint32_t host, rail;
    uint32_t directions;  /* enum fault_direction bits */
    uint32_t classes;     /* class bits, 0 = given by opcode */
    int32_t opcode;       /* exact opcode, or -1 */
    int32_t peer_host;    /* or -1 */
    uint32_t qpn;         /* ours; 0 = any */
    uint32_t min_msn;     /* ACKs that acknowledge at least this message; 0 = any */
    uint32_t unit;        /* enum registry_unit */
    uint32_t nth;         /* the first match that counts, from 1 */
    uint32_t count;       /* how often it fires; 0 = without end */
    uint32_t probability; /* of 2^32 - 1 */
    uint32_t action;      /* enum fault_verdict */
    uint32_t delay_us;    /* of DELAY, DUPLICATE and REORDER */
    uint32_t then;        /* enum registry_then */
    uint32_t then_host, then_rail;
    uint64_t seed, random;
    uint64_t matched, fired;
    uint64_t fired_ns; /* CLOCK_MONOTONIC when it last fired */
};

/* One device of one process. Alive as long as the process holds the claim's lock file. */
struct registry_claim {
    uint32_t host, rail;
    uint32_t address;
    uint32_t slot;
    int32_t pid;
};

/* One host's port of a rail's fabric. */
struct registry_link {
    pthread_mutex_t lock;
    struct fabric_params params; /* changed with the registry's lock held, too */
    struct fabric_port port;
    uint64_t counters[NIC_COUNTERS]; /* of the host's NIC, in all processes; atomic */
};

struct registry_file {
    uint32_t magic, version;
    uint64_t size;
    pthread_mutex_t lock;
    uint32_t host_count;
    uint32_t next_rule_id;
    uint32_t rule_end;  /* no rule in use from here on */
    uint32_t claim_end; /* no claim was ever made from here on */
    struct registry_host hosts[FAULT_MAX_HOSTS];
    struct registry_port ports[FAULT_MAX_HOSTS][FAULT_MAX_RAILS];
    uint64_t switch_down[FAULT_MAX_RAILS]; /* bit per host whose switch port is down */
    struct registry_rule rules[FAULT_MAX_RULES];
    struct registry_claim claims[REGISTRY_MAX_CLAIMS];
    uint32_t limited[FAULT_MAX_RAILS];  /* has any port of the rail limits? */
    uint32_t switched[FAULT_MAX_RAILS]; /* has any port of the rail flow control? */
    uint64_t fabric_text; /* a hash of the SOFTRNIC_FABRIC that was in force last; 0 = none yet */
    struct registry_link links[FAULT_MAX_HOSTS][FAULT_MAX_RAILS];
};

/* A rail with flow control, in a file of its own: there is none before it is needed. */
struct registry_switch {
    uint32_t magic, version;
    uint64_t size;
    pthread_mutex_t lock;
    struct fabric_switch fabric;
};

struct registry {
    struct registry *next;
    struct registry_file *file;
    struct registry_switch *switches[FAULT_MAX_RAILS]; /* mapped at first use; atomic */
    int dir_fd;
    int notify_fd; /* a socket to send notifications from */
    char dir[256];
};

/* The registry that SOFTRNIC_DIR names now, opened at the first call and never closed. NULL with a sentence
 * in err and errno set. */
struct registry *registry_open(char *err, size_t err_len);

void registry_lock(struct registry *reg);
void registry_unlock(struct registry *reg);

/* With the lock held. */
int registry_find_host(const struct registry *reg, const char *name); /* -1: unknown */
/* Make the host and its devices known, or known by other names. -1: table full. */
int registry_add_host(struct registry *reg, const struct config *config);
void registry_set_link(struct registry *reg, unsigned host, unsigned rail, bool up);
void registry_kill(struct registry *reg, unsigned host, unsigned rail);
void registry_revive(struct registry *reg, unsigned host, unsigned rail);
void registry_set_stalled(struct registry *reg, unsigned host, unsigned rail, bool stalled);
void registry_set_hung(struct registry *reg, unsigned host, unsigned rail, bool hung);
void registry_set_slow(struct registry *reg, unsigned host, unsigned rail, uint32_t command_us);
void registry_set_switch(struct registry *reg, unsigned rail, uint64_t hosts, bool up);
void registry_update_active(struct registry *reg, unsigned host, unsigned rail);
/*
 * The address of a socket in the directory. Way 0 is through /proc, because the directory's own path may be longer than
 * a socket's address, and may lead elsewhere by now; way 1 is that path, for where there is no /proc. 0 or -ENAMETOOLONG.
 */
#define REGISTRY_SOCKET_WAYS 2
int registry_socket_address(const struct registry *reg, const char *name, int way, struct sockaddr_un *at);
/* Wake every process that has this device open. */
void registry_notify(struct registry *reg, unsigned host, unsigned rail);
/* Host of an address that a process has or had, or -1. */
int registry_host_of(const struct registry *reg, uint32_t address);
/* The same of an address on this rail, without the lock. */
int registry_host_at(const struct registry *reg, unsigned rail, uint32_t address);
/* What the ports in this scope are like from now on; a host index, or -1 for all hosts there are and will be. */
void registry_set_fabric(struct registry *reg, int host, int rail, const struct fabric_params *params);

/* Without the lock. */
static inline bool registry_limited(const struct registry *reg, unsigned rail) {
    return __atomic_load_n(&reg->file->limited[rail], __ATOMIC_RELAXED);
}
static inline bool registry_switched(const struct registry *reg, unsigned rail) {
    return __atomic_load_n(&reg->file->switched[rail], __ATOMIC_RELAXED);
}
/* links.c. No other lock is taken under these; the registry's may be held. */
struct registry_link *registry_link_lock(struct registry *reg, unsigned host, unsigned rail);
void registry_link_unlock(struct registry_link *link);
/* NULL if the rail has none yet and none is to be made, or none can be, with errno set. */
struct registry_switch *registry_switch_lock(struct registry *reg, unsigned rail, bool make);
void registry_switch_unlock(struct registry_switch *shared);

/* Is the process behind a claim alive? Without the lock. */
bool registry_claim_alive(struct registry *reg, unsigned index);
/* Take lock file `name` of the directory: a descriptor that holds it until closed, or -1 and errno
 * (EADDRINUSE: held). */
int registry_lock_file(struct registry *reg, const char *name);

uint64_t registry_now_ns(void);

/* fault.c: the registry that a device is registered in. */
struct registry *fault_registry(const struct fault_port *port);

/* network.c: the fabric that SOFTRNIC_FABRIC asks for, unless it was in force before. 0 or -errno. */
int network_from_environment(struct registry *reg, char *err, size_t err_len);
/* The same of a text, with the lock held. Hosts that are not known yet are made known, or refused. */
int network_apply(struct registry *reg, const char *text, bool make_hosts, char *err, size_t err_len);

/* The name of a device that was described. With the lock held. */
static inline const char *registry_device_name(const struct registry *reg, unsigned host, unsigned rail) {
    return reg->file->hosts[host].devices[rail];
}

/* rules.c: decide by the rules of this port; lock held. delay_us as fault_filter(). */
enum fault_verdict rules_apply(struct registry *reg, unsigned host, unsigned rail,
                               enum fault_direction direction, const struct wire_packet *pkt,
                               uint32_t local_qpn, uint32_t peer_ip, uint32_t *delay_us);
/* Class bits of a name ("send", "ack", "any", ...), 0 if there is none of that name. */
uint32_t rules_class_by_name(const char *name);
/* The other way round; "?" for bits that have no name. */
const char *rules_class_name(uint32_t bits);
/* All names, separated by ", ". */
const char *rules_class_names(void);
/* "drop" to "reorder", of a verdict that a rule may have. */
const char *rules_action_name(unsigned verdict);

#endif
