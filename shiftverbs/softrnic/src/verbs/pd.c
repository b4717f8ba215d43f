/* SPDX-License-Identifier: BSD-3-Clause */
/* Protection domains, parent domains and thread domains. */
#include <stdlib.h>

#include "verbs/entry.h"

SRN_EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    struct srn_pd *pd;
    struct srn_nic *nic;

    if (!srn_is_ours(context))
        return SRN_PASS(ibv_alloc_pd, NULL, context);
    nic = srn_ctx(context)->nic;
    if (srn_command(nic)) {
        errno = EIO;
        return NULL;
    }
    pd = calloc(1, sizeof(*pd));
    if (!pd) {
        errno = ENOMEM;
        return NULL;
    }
    pd->nic = nic;
    pd->base = pd;
    pd->ib.context = context;
    srn_nic_lock(nic);
    pd->ib.handle = ++nic->last_handle;
    srn_ctx_get(srn_ctx(context));
    srn_nic_unlock(nic);
    return &pd->ib;
}

SRN_EXPORT int ibv_dealloc_pd(struct ibv_pd *ibpd) {
    struct srn_pd *pd;
    struct srn_ctx *ctx;

    if (!srn_is_ours(ibpd->context))
        return SRN_PASS(ibv_dealloc_pd, ENOSYS, ibpd);
    pd = srn_pd(ibpd);
    (void)srn_command(pd->nic); /* a dead NIC's objects go all the same */
    if (!srn_forked(pd->nic)) {
        srn_nic_lock(pd->nic);
        if (pd->refs) {
            srn_nic_unlock(pd->nic);
            return EBUSY;
        }
        if (pd->base != pd)
            pd->base->refs--;
        srn_nic_unlock(pd->nic);
    }
    ctx = srn_ctx(ibpd->context);
    free(pd);
    srn_ctx_put(ctx);
    return 0;
}

/*
 * A parent domain is the PD it was made of, with wishes for how its objects are allocated and locked. Allocators are
 * for memory that a NIC reads directly; ours has none, so they are never called.
 */
struct ibv_pd *srn_alloc_parent_domain(struct ibv_context *context,
                                       struct ibv_parent_domain_init_attr *attr) {
    const uint32_t unprotected =
        1 << 2; /* since 65: in confidential guests memory may be the host's to see */
    const uint32_t known =
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT | unprotected;
    struct ibv_pd *pd;

    if ((attr->comp_mask & ~known) || !attr->pd || attr->pd->context != context) {
        errno = EINVAL;
        return NULL;
    }
    pd = ibv_alloc_pd(context);
    if (!pd)
        return NULL;
    srn_pd(pd)->base = srn_pd(attr->pd)->base;
    srn_nic_lock(srn_pd(pd)->nic);
    srn_pd(pd)->base->refs++;
    srn_nic_unlock(srn_pd(pd)->nic);
    return pd;
}

struct ibv_td *srn_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr) {
    struct ibv_td *td;
    int rc = srn_command(srn_ctx(context)->nic);

    if (!rc && attr->comp_mask)
        rc = EOPNOTSUPP;
    td = rc ? NULL : calloc(1, sizeof(*td));
    if (!td) {
        errno = rc ? rc : ENOMEM;
        return NULL;
    }
    td->context = context;
    srn_ctx_get(srn_ctx(context));
    return td;
}

int srn_dealloc_td(struct ibv_td *td) {
    struct srn_ctx *ctx = srn_ctx(td->context);

    free(td);
    srn_ctx_put(ctx);
    return 0;
}
