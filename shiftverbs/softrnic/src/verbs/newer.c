/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Verbs that libibverbs has had since 57 and later, and the oldest headers that we compile with have not. Each under a
 * name of ours, with its own in the symbol, and with structures of ours, laid out as theirs.
 */
#include <stdlib.h>
#include <unistd.h>

#include "verbs/entry.h"

#undef ibv_reg_mr_iova

#define NEWER(verb) __asm__(#verb)
#define PASS(verb, otherwise, ...)                                                                           \
    ({                                                                                                       \
        static void *_Atomic cache_;                                                                         \
        __typeof__(&srn_##verb) real_ = (__typeof__(&srn_##verb))srn_real_symbol("ibv_" #verb, &cache_);     \
        real_ ? real_(__VA_ARGS__) : (errno = ENOSYS, otherwise);                                            \
    })

enum {
    MR_IOVA = 1 << 0,
    MR_ADDR = 1 << 1,
    MR_FD = 1 << 2,
    MR_FD_OFFSET = 1 << 3,
    MR_DMAH = 1 << 4,
    MR_BUF = 1 << 5,
};

/* What ibv_alloc_buf gives; programs never look into it. */
struct srn_buf {
    void *addr;
    size_t size;
    struct ibv_pd *pd;
    int dmabuf_fd;
};

struct srn_mr_init_attr {
    size_t length;
    int access;
    uint64_t comp_mask;
    uint64_t iova;
    void *addr;
    int fd;
    uint64_t fd_offset;
    void *dmah;
    struct srn_buf *buf;
};

struct srn_comp_cntr_caps {
    uint64_t max_value;
    uint32_t max_counters;
    uint32_t supported_qp_attach_ops;
};

SRN_EXPORT struct ibv_mr *srn_reg_mr_ex(struct ibv_pd *pd, struct srn_mr_init_attr *attr)
    NEWER(ibv_reg_mr_ex);
SRN_EXPORT void *srn_alloc_buf(struct ibv_pd *pd, size_t size, struct srn_buf **buf) NEWER(ibv_alloc_buf);
SRN_EXPORT void srn_free_buf(struct srn_buf *buf) NEWER(ibv_free_buf);
SRN_EXPORT int srn_export_buf_dmabuf_fd(struct srn_buf *buf) NEWER(ibv_export_buf_dmabuf_fd);
SRN_EXPORT struct ibv_mr *srn_reg_buf_mr(struct ibv_pd *pd, struct srn_buf *buf, void *addr, size_t length,
                                         int access) NEWER(ibv_reg_buf_mr);
SRN_EXPORT void *srn_alloc_dmah(struct ibv_context *context, void *attr) NEWER(ibv_alloc_dmah);
SRN_EXPORT int srn_query_port_speed(struct ibv_context *context, uint32_t port_num, uint64_t *speed)
    NEWER(ibv_query_port_speed);
SRN_EXPORT void *srn_create_comp_cntr(struct ibv_context *context, void *attr) NEWER(ibv_create_comp_cntr);
SRN_EXPORT int srn_query_comp_cntr_caps(struct ibv_context *context, struct srn_comp_cntr_caps *caps,
                                        size_t size) NEWER(_ibv_query_comp_cntr_caps);

static void *refuse(int rc) {
    errno = rc;
    return NULL;
}

/* --- memory regions, by a structure --- */

struct ibv_mr *srn_reg_mr_ex(struct ibv_pd *pd, struct srn_mr_init_attr *attr) {
    const uint64_t mask = attr->comp_mask;

    if (!srn_is_ours(pd->context))
        return PASS(reg_mr_ex, NULL, pd, attr);
    if (mask & ~(uint64_t)(MR_IOVA | MR_ADDR | MR_FD | MR_FD_OFFSET | MR_BUF))
        return refuse(EOPNOTSUPP); /* DMA handles among them */
    if (mask & (MR_FD | MR_FD_OFFSET)) {
        if (mask & (MR_ADDR | MR_BUF) || !(mask & MR_FD) || !(mask & MR_FD_OFFSET) || !(mask & MR_IOVA))
            return refuse(EINVAL);
        return ibv_reg_dmabuf_mr(pd, attr->fd_offset, attr->length, attr->iova, attr->fd, attr->access);
    }
    if (!(mask & MR_ADDR))
        return refuse(EINVAL);
    if (mask & MR_BUF) {
        const struct srn_buf *buf = attr->buf;
        uintptr_t from = (uintptr_t)attr->addr, base = (uintptr_t)buf->addr;

        if (buf->pd != pd || from < base || from - base > buf->size ||
            attr->length > buf->size - (from - base))
            return refuse(EINVAL);
    }
    return ibv_reg_mr_iova2(pd, attr->addr, attr->length, mask & MR_IOVA ? attr->iova : (uintptr_t)attr->addr,
                            (unsigned int)attr->access);
}

/* --- buffers whose memory the NIC's driver chooses: any memory will do for ours --- */

void *srn_alloc_buf(struct ibv_pd *pd, size_t size, struct srn_buf **buf) {
    struct srn_buf *made;
    int rc;

    if (!srn_is_ours(pd->context))
        return PASS(alloc_buf, NULL, pd, size, buf);
    made = calloc(1, sizeof(*made));
    if (!made)
        return refuse(ENOMEM);
    rc = posix_memalign(&made->addr, (size_t)sysconf(_SC_PAGESIZE), size);
    if (rc) {
        free(made);
        return refuse(rc);
    }
    made->size = size;
    made->pd = pd;
    made->dmabuf_fd = -1;
    *buf = made;
    return made->addr;
}

void srn_free_buf(struct srn_buf *buf) {
    if (!srn_is_ours(buf->pd->context)) {
        PASS(free_buf, (void)0, buf);
        return;
    }
    free(buf->addr);
    free(buf);
}

int srn_export_buf_dmabuf_fd(struct srn_buf *buf) {
    if (!srn_is_ours(buf->pd->context))
        return PASS(export_buf_dmabuf_fd, -1, buf);
    errno = ENODATA;
    return -1;
}

struct ibv_mr *srn_reg_buf_mr(struct ibv_pd *pd, struct srn_buf *buf, void *addr, size_t length, int access) {
    struct srn_mr_init_attr attr = {
        .length = length,
        .access = access,
        .comp_mask = MR_BUF | MR_ADDR,
        .addr = addr,
        .buf = buf,
    };

    if (!srn_is_ours(pd->context))
        return PASS(reg_buf_mr, NULL, pd, buf, addr, length, access);
    return srn_reg_mr_ex(pd, &attr);
}

/* --- what our NIC has not: hints for caches, counters of completions --- */

void *srn_alloc_dmah(struct ibv_context *context, void *attr) {
    return srn_is_ours(context) ? refuse(EOPNOTSUPP) : PASS(alloc_dmah, NULL, context, attr);
}

void *srn_create_comp_cntr(struct ibv_context *context, void *attr) {
    return srn_is_ours(context) ? refuse(EOPNOTSUPP) : PASS(create_comp_cntr, NULL, context, attr);
}

int srn_query_comp_cntr_caps(struct ibv_context *context, struct srn_comp_cntr_caps *caps, size_t size) {
    static void *_Atomic cache;
    __typeof__(&srn_query_comp_cntr_caps) real;

    if (srn_is_ours(context))
        return EOPNOTSUPP;
    real = (__typeof__(real))srn_real_symbol("_ibv_query_comp_cntr_caps", &cache);
    return real ? real(context, caps, size) : ENOSYS;
}

/* --- the port --- */

int srn_query_port_speed(struct ibv_context *context, uint32_t port_num, uint64_t *speed) {
    struct ibv_port_attr port;
    int rc;

    if (!srn_is_ours(context))
        return PASS(query_port_speed, ENOSYS, context, port_num, speed);
    rc = port_num > UINT8_MAX ? EINVAL : srn_query_port(context, (uint8_t)port_num, &port);
    if (!rc)
        *speed = 25; /* in 100 Mb/s: 2.5 Gb/s, as query_port's active_speed has it */
    return rc;
}
