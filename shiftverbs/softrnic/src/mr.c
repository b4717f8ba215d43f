/* SPDX-License-Identifier: BSD-3-Clause */
/* Memory regions, the key table, and the access checks that every local key goes through (mw.c: remote keys). */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "softrnic.h"

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define KEY_SLOT_BITS 24
#define NO_SLOT UINT32_MAX

/*
 * The key table: key = slot number (offset by the NIC's base) and a generation, as real NICs do. The slot that became
 * free last is taken first: where there are no new generations, the next registration has the same key.
 */

uint32_t srn_key_make(const struct srn_nic *nic, uint32_t slot) {
    return ((slot + nic->key_base) & ((1u << KEY_SLOT_BITS) - 1)) << 8 | nic->mr_slots[slot].generation;
}

struct srn_mr_slot *srn_key_slot(const struct srn_nic *nic, uint32_t key) {
    uint32_t slot = ((key >> 8) - nic->key_base) & ((1u << KEY_SLOT_BITS) - 1);

    return slot < nic->mr_slot_count ? &nic->mr_slots[slot] : NULL;
}

struct srn_mr *srn_mr_find(const struct srn_nic *nic, uint32_t key) {
    const struct srn_mr_slot *slot = srn_key_slot(nic, key);

    return slot && slot->mr && slot->mr->key == key ? slot->mr : NULL;
}

uint32_t srn_key_take(struct srn_nic *nic) {
    if (nic->mr_free == NO_SLOT) {
        uint32_t old = nic->mr_slot_count, count = old ? old * 2 : 64;
        struct srn_mr_slot *slots;

        if (count > SRN_MAX_MR)
            return NO_SLOT;
        slots = realloc(nic->mr_slots, count * sizeof(*slots));
        if (!slots)
            return NO_SLOT;
        for (uint32_t i = old; i < count; i++)
            slots[i] = (struct srn_mr_slot){
                .generation = (uint8_t)srn_random(),
                .next_free = i + 1 < count ? i + 1 : NO_SLOT,
            };
        nic->mr_slots = slots;
        nic->mr_slot_count = count;
        nic->mr_free = old;
    }

    uint32_t slot = nic->mr_free;
    nic->mr_free = nic->mr_slots[slot].next_free;
    if (!srn_global.config.reuse_keys)
        nic->mr_slots[slot].generation++;
    return slot;
}

void srn_key_give(struct srn_nic *nic, uint32_t slot) {
    nic->mr_slots[slot].mr = NULL;
    nic->mr_slots[slot].mw = NULL;
    nic->mr_slots[slot].next_free = nic->mr_free;
    nic->mr_free = slot;
}

void srn_mr_table_free(struct srn_nic *nic) {
    free(nic->mr_slots);
}

uint8_t *srn_mr_resolve(struct srn_nic *nic, const struct srn_pd *pd, uint32_t key, uint64_t va,
                        uint64_t length, unsigned int access) {
    const struct srn_mr *mr = srn_mr_find(nic, key);

    if (!mr || mr->pd->base != pd->base || (mr->access & access) != access)
        return NULL;
    if (va < mr->iova || length > mr->length || va - mr->iova > mr->length - length)
        return NULL;
    return mr->addr + (va - mr->iova);
}

/* --- memory regions --- */

static int check_access(unsigned int access) {
    const unsigned int known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                               IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_HUGETLB;

    access &= ~(unsigned int)IBV_ACCESS_OPTIONAL_RANGE;
    if (access & (IBV_ACCESS_ON_DEMAND | IBV_ACCESS_ZERO_BASED))
        return EOPNOTSUPP;
    if (access & ~known)
        return EINVAL;
    if ((access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) && !(access & IBV_ACCESS_LOCAL_WRITE))
        return EINVAL;
    return 0;
}

/* A real NIC pins the pages, which fails for addresses where there is nothing. */
static int check_memory(const void *addr, size_t length) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), step = page * 4096;
    uintptr_t from = (uintptr_t)addr & ~(page - 1), end = (uintptr_t)addr + length;
    unsigned char seen[4096];

    if (!length || end < (uintptr_t)addr)
        return EINVAL;
    for (; from < end; from += step) {
        size_t n = end - from < step ? end - from : step;

        if (mincore((void *)from, n, seen))
            return errno == ENOMEM ? EFAULT : errno;
    }
    return 0;
}

static struct ibv_mr *reg_mr(struct ibv_pd *ibpd, void *addr, size_t length, uint64_t iova,
                             unsigned int access) {
    struct srn_pd *pd = srn_pd(ibpd);
    struct srn_nic *nic = pd->nic;
    struct srn_mr *mr;
    int rc = srn_command(nic);

    if (!rc)
        rc = check_access(access);
    if (!rc && ((iova ^ (uintptr_t)addr) & ((uint64_t)sysconf(_SC_PAGESIZE) - 1)))
        rc = EINVAL;
    if (!rc)
        rc = check_memory(addr, length);
    if (rc) {
        errno = rc;
        return NULL;
    }
    mr = calloc(1, sizeof(*mr));
    if (!mr) {
        errno = ENOMEM;
        return NULL;
    }
    mr->nic = nic;
    mr->pd = pd;
    mr->iova = iova;
    mr->addr = addr;
    mr->length = length;
    mr->access = access;
    mr->ib.context = ibpd->context;
    mr->ib.pd = ibpd;
    mr->ib.addr = addr;
    mr->ib.length = length;
    srn_nic_lock(nic);
    mr->slot = srn_key_take(nic);
    if (mr->slot == NO_SLOT) {
        srn_nic_unlock(nic);
        free(mr);
        errno = ENOMEM;
        return NULL;
    }
    nic->mr_slots[mr->slot].mr = mr;
    mr->key = srn_key_make(nic, mr->slot);
    mr->ib.lkey = mr->ib.rkey = mr->key;
    mr->ib.handle = mr->slot;
    pd->refs++;
    srn_ctx_get(srn_ctx(ibpd->context));
    srn_nic_unlock(nic);
    return &mr->ib;
}

SRN_EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
    if (!srn_is_ours(pd->context))
        return SRN_PASS(ibv_reg_mr, NULL, pd, addr, length, access);
    return reg_mr(pd, addr, length, (uintptr_t)addr, (unsigned int)access);
}

SRN_EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                          int access) {
    if (!srn_is_ours(pd->context))
        return SRN_PASS(ibv_reg_mr_iova, NULL, pd, addr, length, iova, access);
    return reg_mr(pd, addr, length, iova, (unsigned int)access);
}

SRN_EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                           unsigned int access) {
    if (!srn_is_ours(pd->context))
        return SRN_PASS(ibv_reg_mr_iova2, NULL, pd, addr, length, iova, access);
    return reg_mr(pd, addr, length, iova, access);
}

SRN_EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
                                            int fd, int access) {
    if (!srn_is_ours(pd->context))
        return SRN_PASS(ibv_reg_dmabuf_mr, NULL, pd, offset, length, iova, fd, access);
    errno = EOPNOTSUPP;
    return NULL;
}

SRN_EXPORT int ibv_dereg_mr(struct ibv_mr *ibmr) {
    struct srn_mr *mr;
    struct srn_nic *nic;
    struct srn_ctx *ctx;

    if (!srn_is_ours(ibmr->context))
        return SRN_PASS(ibv_dereg_mr, ENOSYS, ibmr);
    mr = srn_container(ibmr, struct srn_mr, ib);
    nic = mr->nic;
    (void)srn_command(nic); /* a dead NIC's objects go all the same */
    if (!srn_forked(nic)) {
        srn_nic_lock(nic);
        if (mr->windows) {
            srn_nic_unlock(nic);
            return EBUSY;
        }
        srn_key_give(nic, mr->slot);
        mr->pd->refs--;
        srn_nic_unlock(nic);
    }
    ctx = srn_ctx(ibmr->context);
    free(mr);
    srn_ctx_put(ctx);
    return 0;
}

SRN_EXPORT int ibv_rereg_mr(struct ibv_mr *ibmr, int flags, struct ibv_pd *ibpd, void *addr, size_t length,
                            int access) {
    const int known = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
    struct srn_mr *mr;
    struct srn_nic *nic;
    int rc = 0;

    if (!srn_is_ours(ibmr->context))
        return SRN_PASS(ibv_rereg_mr, IBV_REREG_MR_ERR_INPUT, ibmr, flags, ibpd, addr, length, access);
    mr = srn_container(ibmr, struct srn_mr, ib);
    nic = mr->nic;
    if (!flags || (flags & ~known) ||
        ((flags & IBV_REREG_MR_CHANGE_PD) && (!ibpd || srn_pd(ibpd)->nic != nic)))
        rc = EINVAL;
    if (!rc && (flags & IBV_REREG_MR_CHANGE_TRANSLATION))
        rc = addr ? check_memory(addr, length) : EINVAL;
    if (!rc && (flags & IBV_REREG_MR_CHANGE_ACCESS))
        rc = check_access((unsigned int)access);
    if (rc) {
        errno = rc;
        return IBV_REREG_MR_ERR_INPUT;
    }
    rc = srn_command(nic);
    if (rc) {
        errno = rc;
        return IBV_REREG_MR_ERR_CMD;
    }
    srn_nic_lock(nic);
    if (mr->windows) {
        srn_nic_unlock(nic);
        errno = EBUSY;
        return IBV_REREG_MR_ERR_INPUT;
    }
    if (flags & IBV_REREG_MR_CHANGE_PD) {
        mr->pd->refs--;
        mr->pd = srn_pd(ibpd);
        mr->pd->refs++;
        mr->ib.pd = ibpd;
    }
    if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
        mr->addr = addr;
        mr->iova = (uintptr_t)addr;
        mr->length = length;
        mr->ib.addr = addr;
        mr->ib.length = length;
    }
    if (flags & IBV_REREG_MR_CHANGE_ACCESS)
        mr->access = (unsigned int)access;
    srn_nic_unlock(nic);
    return 0;
}

/* --- SGE lists --- */

bool srn_sge_check(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge, uint32_t num_sge,
                   unsigned int access) {
    for (uint32_t i = 0; i < num_sge; i++)
        if (sge[i].length && !srn_mr_resolve(nic, pd, sge[i].lkey, sge[i].addr, sge[i].length, access))
            return false;
    return true;
}

/*
 * Where `length` bytes at `offset` of the list are; the list must be long enough. Returns how many pieces, -1 on a bad
 * SGE.
 */
static int locate(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge, uint32_t num_sge,
                  uint32_t offset, uint32_t length, unsigned int access, struct iovec *pieces) {
    int count = 0;

    for (uint32_t i = 0; i < num_sge && length; i++) {
        uint32_t n;
        uint8_t *memory;

        if (offset >= sge[i].length) {
            offset -= sge[i].length;
            continue;
        }
        n = sge[i].length - offset < length ? sge[i].length - offset : length;
        /* The whole SGE is checked: a bad one is an error although this packet may not reach its bad end. */
        memory = srn_mr_resolve(nic, pd, sge[i].lkey, sge[i].addr, sge[i].length, access);
        if (!memory)
            return -1;
        pieces[count++] = (struct iovec){memory + offset, n};
        length -= n;
        offset = 0;
    }
    return length ? -1 : count;
}

bool srn_sge_gather(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge, uint32_t num_sge,
                    uint32_t offset, uint8_t *to, uint32_t length) {
    struct iovec pieces[SRN_MAX_SGE];
    int count = locate(nic, pd, sge, num_sge, offset, length, 0, pieces);

    return count == 0 || (count > 0 && srn_memory_get(&nic->memory, pieces, count, to, length));
}

bool srn_sge_scatter(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge,
                     uint32_t num_sge, uint32_t offset, const uint8_t *from, uint32_t length) {
    struct iovec pieces[SRN_MAX_SGE];
    int count = locate(nic, pd, sge, num_sge, offset, length, IBV_ACCESS_LOCAL_WRITE, pieces);

    return count == 0 || (count > 0 && srn_memory_put(&nic->memory, pieces, count, from, length));
}
