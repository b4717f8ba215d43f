/* SPDX-License-Identifier: BSD-3-Clause */
/* Memory regions. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "verbs/entry.h"

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

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
    if (mr->slot == UINT32_MAX) {
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
