/* SPDX-License-Identifier: BSD-3-Clause */
/* Protection domains, memory regions and windows: the key table, and what a key permits. nic->lock held. */
#ifndef SOFTRNIC_OBJECTS_KEYS_H
#define SOFTRNIC_OBJECTS_KEYS_H

#include <stdbool.h>
#include <stdint.h>

#include <infiniband/verbs.h>

#include "objects/list.h"

struct srn_nic;
struct srn_qp;
struct srn_swqe;

struct srn_pd {
    struct ibv_pd ib;
    struct srn_nic *nic;
    struct srn_pd *base; /* itself; of a parent domain, the PD whose protection it has */
    uint32_t refs;       /* MRs, QPs, AHs, ... */
};

struct srn_mr {
    struct ibv_mr ib;
    struct srn_nic *nic;
    struct srn_pd *pd;
    uint32_t slot;
    uint32_t key;
    uint64_t iova;
    uint8_t *addr;
    size_t length;
    unsigned int access;
    uint32_t windows; /* bound to it */
};

struct srn_mw {
    struct ibv_mw ib;
    struct srn_nic *nic;
    struct srn_pd *pd;
    uint32_t slot;
    uint32_t key;      /* the R_Key in force; ib.rkey is the program's copy */
    struct srn_mr *mr; /* NULL = not bound */
    uint64_t va;       /* as remote peers address it */
    uint64_t length;
    uint8_t *addr;
    unsigned int access;
    uint32_t qpn; /* type 2: only through this QP */
};

/* A line of the key table: of a region or of a window. */
struct srn_mr_slot {
    struct srn_mr *mr;
    struct srn_mw *mw;
    uint8_t generation;
    uint32_t next_free;
};

static inline struct srn_pd *srn_pd(struct ibv_pd *pd) {
    return srn_container(pd, struct srn_pd, ib);
}

/* --- keys.c --- */
/* The memory behind [va, va + length) or NULL if key, PD, range or access do not permit it. length > 0. */
uint8_t *srn_mr_resolve(struct srn_nic *nic, const struct srn_pd *pd, uint32_t key, uint64_t va,
                        uint64_t length, unsigned int access);
/* The region with this key, NULL if there is none. */
struct srn_mr *srn_mr_find(const struct srn_nic *nic, uint32_t key);
/* Lines of the key table. take: UINT32_MAX if there is none left. */
uint32_t srn_key_take(struct srn_nic *nic);
void srn_key_give(struct srn_nic *nic, uint32_t slot);
uint32_t srn_key_make(const struct srn_nic *nic, uint32_t slot);
/* The line that a key belongs to, whatever its generation; NULL if there is none. */
struct srn_mr_slot *srn_key_slot(const struct srn_nic *nic, uint32_t key);
/* Copy between a flat buffer and an SGE list, starting `offset` bytes into the list. False on a bad SGE, or
 * one whose memory is gone. */
bool srn_sge_gather(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge, uint32_t num_sge,
                    uint32_t offset, uint8_t *to, uint32_t length);
bool srn_sge_scatter(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge,
                     uint32_t num_sge, uint32_t offset, const uint8_t *from, uint32_t length);
/* Are all SGEs valid for this access? */
bool srn_sge_check(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge, uint32_t num_sge,
                   unsigned int access);

/* --- windows.c --- */
/* What a remote peer of this QP may do: as srn_mr_resolve, for keys of regions and of windows. */
uint8_t *srn_remote_resolve(struct srn_qp *qp, uint32_t rkey, uint64_t va, uint64_t length,
                            unsigned int access);
/* Do a BIND_MW or LOCAL_INV. */
enum ibv_wc_status srn_execute_local(struct srn_qp *qp, const struct srn_swqe *w);
/* Make a window's key invalid; false if this QP must not. */
bool srn_invalidate(struct srn_qp *qp, uint32_t rkey);
/* It is not bound any more. */
void srn_mw_unbind(struct srn_mw *mw);

#endif
