/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Devices, NICs and contexts.
 *
 * One srn_nic is one device as opened by this process: an address, a socket, a progress thread, and everything that the
 * process made on it. All ibv_contexts of one device in a process share it. Its lock covers QPs, MRs and the transport
 * state; a CQ has a lock of its own, so that polling does not wait for the network.
 *
 * Lock order: srn_global.lock > srn_nic.lock > srn_cq.lock > srn_evq.lock > the mutex in ibv_cq / ibv_qp.
 * srn_cq_poll.lock and srn_builder.lock, which a program holds between two calls, come before all of them.
 */
#ifndef SOFTRNIC_OBJECTS_NIC_H
#define SOFTRNIC_OBJECTS_NIC_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <infiniband/verbs.h>

#include "faults/config.h"
#include "faults/fault.h"
#include "objects/event.h"
#include "objects/list.h"
#include "objects/memory.h"
#include "wire/wire.h"

#define SRN_GID_TABLE 8
#define SRN_MAX_QP_WR 65536
#define SRN_MAX_SGE 32
#define SRN_MAX_INLINE 1024
#define SRN_MAX_CQE (1 << 22)
#define SRN_MAX_QP 65536
#define SRN_MAX_CQ 65536
#define SRN_MAX_MR (1 << 20)
#define SRN_MAX_PD 65536
#define SRN_MAX_AH (1 << 20)
#define SRN_MAX_MW (1 << 19)
#define SRN_MAX_SRQ 65536
#define SRN_MAX_RD_ATOMIC 128
#define SRN_MAX_MSG ((uint32_t)1 << 30)
#define SRN_UD_GRH WIRE_GRH_LEN
#define SRN_QP_BUCKETS 1024

/* --- addresses --- */
/*
 * The GID table of a RoCE port with one IPv4 address, as the kernel fills it. All of them travel in the same datagrams
 * between IPv4 addresses; the lowest reserved bits of the BTH tell by which one a packet goes, and are 0 for the one
 * that means just such datagrams. A QP takes what comes by its own, as packets of RoCE v1, of v2 over IPv6 and of v2
 * over IPv4 do not reach each other's QPs on a real port.
 */
enum srn_gid_index {
    SRN_GID_LINK_LOCAL_V1,
    SRN_GID_LINK_LOCAL_V2,
    SRN_GID_IPV4_V1,
    SRN_GID_IPV4_V2,
    SRN_GID_COUNT,
};
#define SRN_GID_BITS 3 /* exclusive or of index and reserved bits */

static inline bool srn_gid_is_ipv4(unsigned int index) {
    return index >= SRN_GID_IPV4_V1;
}

static inline bool srn_gid_is_v2(unsigned int index) {
    return index & 1;
}

/*
 * What a datagram's WC has in place of a service level, which Ethernet has none of: the network header that it came with,
 * as mlx5's completions have it there (0 is a GRH, 1 IPv6, 2 IPv4). UCX reads from it where in the first 40 bytes the
 * addresses are.
 */
static inline uint8_t srn_network_header(unsigned int index) {
    return srn_gid_is_v2(index) ? (uint8_t)(srn_gid_is_ipv4(index) ? 2 : 1) : 0;
}

/* Where packets go or come from. */
struct srn_peer {
    uint32_t ip;        /* network order; 0 = not set */
    uint32_t gid_index; /* here and there */
    uint8_t tos;        /* the traffic class, without ECN's bits */
    uint8_t priority;   /* of flow control, 0 to 7 */
};

/* --- devices --- */
struct srn_nic;

struct srn_device {
    struct ibv_device ib; /* what ibv_get_device_list() shows */
    const struct config_device *config;
    uint64_t guid; /* network order */
    struct srn_nic *nic;
    int last_error; /* of opening it */
};

/* Process-wide state. */
struct srn_globals {
    pthread_mutex_t lock;
    struct config config;
    struct srn_device devices[CONFIG_MAX_DEVICES];
    struct srn_list nics;
};
extern struct srn_globals srn_global;

/* --- contexts --- */
struct srn_ctx {
    struct srn_list link; /* in srn_nic.contexts */
    atomic_uint refs;     /* itself while open, and every object made on it: they may outlive it */
    struct srn_nic *nic;
    struct srn_evq async;
    struct verbs_context verbs; /* holds the ibv_context; verbs_get_ctx() finds its way from there */
};

static inline struct srn_ctx *srn_ctx(const struct ibv_context *context) {
    return srn_container(context, struct srn_ctx, verbs.context);
}
/* --- NIC --- */
enum srn_counter {
    SRN_CNT_TX_PACKETS,
    SRN_CNT_RX_PACKETS,
    SRN_CNT_TX_FILTERED,
    SRN_CNT_RX_FILTERED,
    SRN_CNT_TX_ERRORS,
    SRN_CNT_RX_NO_QP,
    SRN_CNT_RX_WRONG_PEER,
    SRN_CNT_RX_WRONG_STATE,
    SRN_CNT_RX_UD_DROPPED,
    SRN_CNT_RX_BAD_PKEY,
    SRN_CNT_RX_BAD_QKEY,
    SRN_CNT_DUPLICATES,
    SRN_CNT_SEQ_NAK_SENT,
    SRN_CNT_RNR_NAK_SENT,
    SRN_CNT_SEQ_NAK_RECEIVED,
    SRN_CNT_RNR_NAK_RECEIVED,
    SRN_CNT_TIMEOUTS,
    SRN_CNT_RETRANSMITS,
    SRN_CNT_RX_BAD, /* + enum wire_error */
    SRN_CNT_COUNT = SRN_CNT_RX_BAD + WIRE_ERR_COUNT
};

struct srn_carry;
struct srn_net; /* socket, buffers, timer and thread: transport/net.h */
struct srn_mr_slot;
struct srn_cq;
struct srn_qp;
struct srn_srq;

struct srn_nic {
    struct srn_list link; /* in srn_global.nics */
    struct srn_device *dev;
    uint32_t opens;   /* open contexts, under srn_global.lock; the last one to close ends the network */
    atomic_uint refs; /* srn_ctx structures, which keep the memory */
    struct fault_port *port;
    struct srn_net *net; /* NULL in null mode */
    struct srn_memory memory;
    bool null_mode;
    atomic_bool forked; /* we are a child of the process that opened it */
    atomic_bool dead;   /* the NIC was killed: commands fail, nothing completes */
    uint32_t ip;        /* network order */
    union ibv_gid gids[SRN_GID_COUNT];
    uint32_t gid_count; /* only link-local ones in null mode */

    pthread_mutex_t lock;
    struct srn_list contexts;
    struct srn_qp *qps[SRN_QP_BUCKETS];
    uint32_t qp_count;
    uint32_t last_handle;
    uint32_t next_qpn;
    struct srn_mr_slot *mr_slots;
    uint32_t mr_slot_count;
    uint32_t mr_free; /* head of the free list, UINT32_MAX = none */
    uint32_t key_base;
    enum ibv_mtu active_mtu;
    uint32_t window; /* packets a QP may have unacknowledged */
    struct srn_list ack_list;
    struct srn_list timed;
    struct srn_list held;    /* packets that a fault rule holds back */
    struct srn_carry *carry; /* packets on a rail that has limits; NULL = never any. transport/carry.c */
    atomic_bool overrun_pending;
    atomic_bool stood_still; /* work was left undone because the NIC is stalled */
    pthread_mutex_t command_lock;
    pthread_cond_t command_cond;
    uint64_t counters[SRN_CNT_COUNT];
};

static inline void srn_nic_lock(struct srn_nic *nic) {
    pthread_mutex_lock(&nic->lock);
}
/* 0, or EIO if the NIC behind this object is gone (killed, or left behind by fork). */
static inline int srn_nic_gone(struct srn_nic *nic) {
    return atomic_load_explicit(&nic->forked, memory_order_relaxed) ||
                   atomic_load_explicit(&nic->dead, memory_order_relaxed)
               ? EIO
               : 0;
}

/* Is the NIC dead, also if its thread has not heard of it yet? */
static inline bool srn_killed(struct srn_nic *nic) {
    return atomic_load_explicit(&nic->dead, memory_order_relaxed) ||
           (nic->port && fault_was_killed(nic->port));
}

static inline bool srn_forked(struct srn_nic *nic) {
    return atomic_load_explicit(&nic->forked, memory_order_relaxed);
}

static inline uint32_t srn_mtu_bytes(enum ibv_mtu mtu) {
    return 128u << mtu;
}

/* --- standstill.c --- */
/* Every verb that is a command begins with this: 0, or EIO if the NIC is gone. Waits while commands hang. */
int srn_command(struct srn_nic *nic);
void srn_commands_wake(struct srn_nic *nic);
/* Must the data path stand still? The caller leaves its work undone: it is done when that is over. */
bool srn_stalled(struct srn_nic *nic);

/* --- nic.c --- */
uint64_t srn_now_ns(void);
uint64_t srn_random(void);
/* When nobody refers to it any more. */
void srn_nic_free(struct srn_nic *nic);
/* An object of this context was made, or went. */
void srn_ctx_get(struct srn_ctx *ctx);
void srn_ctx_put(struct srn_ctx *ctx);
void srn_async_port_event(struct srn_nic *nic, enum ibv_event_type type);
void srn_async_qp_event(struct srn_qp *qp, enum ibv_event_type type);
void srn_async_cq_event(struct srn_cq *cq, enum ibv_event_type type);
void srn_async_srq_event(struct srn_srq *srq, enum ibv_event_type type);

/* --- gid.c --- */
/* The GID table of a NIC whose address is known. */
void srn_gids_init(struct srn_nic *nic);
/* Of a host's device on this rail, whatever it is called. Network order. */
uint64_t srn_guid_make(const char *host, int rail);
/* The GID of an address in a line of the table of its port. */
void srn_gid_make(uint32_t ip, unsigned int index, union ibv_gid *gid);
/* Whose GID is it? False if the line `index` of our table does not lead there. */
bool srn_gid_resolve(const union ibv_gid *gid, unsigned int index, struct srn_peer *peer);
/* As in the address vector of a QP or AH: false if it is not one that packets can go by. */
bool srn_resolve_av(const struct srn_nic *nic, const struct ibv_ah_attr *attr, struct srn_peer *peer);

/* --- counters.c --- */
void srn_counters_print(const struct srn_nic *nic);

#endif
