/* SPDX-License-Identifier: BSD-3-Clause */
/* What a program calls: libibverbs' entry points, and the operations of a context. */
#ifndef SOFTRNIC_VERBS_ENTRY_H
#define SOFTRNIC_VERBS_ENTRY_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <infiniband/verbs.h>

#include "objects/keys.h"
#include "objects/nic.h"
#include "objects/queues.h"
#include "transport/transport.h"

#define SRN_EXPORT __attribute__((visibility("default")))

/* query.c */
int srn_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                        struct ibv_device_attr_ex *attr, size_t len);
int srn_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr);

/* real.c: the libibverbs we stand in front of */
bool srn_device_is_ours(const struct ibv_device *device);
bool srn_is_ours(const struct ibv_context *context);
void *srn_real_symbol(const char *name, void *_Atomic *cache);
#define SRN_REAL(name)                                                                                       \
    ({                                                                                                       \
        static void *_Atomic cache_;                                                                         \
        (__typeof__(&name))srn_real_symbol(#name, &cache_);                                                  \
    })
/* Call the real function, or give `otherwise` with errno ENOSYS where there is none. */
#define SRN_PASS(name, otherwise, ...)                                                                       \
    ({                                                                                                       \
        __typeof__(&name) real_ = SRN_REAL(name);                                                            \
        real_ ? real_(__VA_ARGS__) : (errno = ENOSYS, otherwise);                                            \
    })

/* pd.c */
struct ibv_pd *srn_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr);
struct ibv_td *srn_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr);
int srn_dealloc_td(struct ibv_td *td);

/* mw.c */
struct ibv_mw *srn_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int srn_dealloc_mw(struct ibv_mw *mw);
int srn_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
/* Fill in a BIND_MW from what the program gave; errno. */
int srn_build_bind(struct srn_qp *qp, struct srn_swqe *w, struct ibv_mw *mw, uint32_t rkey,
                   const struct ibv_mw_bind_info *info);

/* cq.c */
/* NULL and errno on failure. */
struct srn_cq *srn_cq_create(struct ibv_context *context, uint32_t cqe, void *cq_context,
                             struct ibv_comp_channel *channel, uint32_t comp_vector);
int srn_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
int srn_req_notify_cq(struct ibv_cq *cq, int solicited_only);

/* cqex.c */
struct ibv_cq_ex *srn_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);

/* srq.c */
int srn_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

/* qpex.c */
/* Make an extended QP of it; errno. */
int srn_qpex_init(struct srn_qp *qp, uint64_t send_ops);
void srn_qpex_free(struct srn_qp *qp);

/* qp.c */
struct ibv_qp *srn_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
bool srn_qp_attr_ok(enum ibv_qp_type type, enum ibv_qp_state cur, enum ibv_qp_state next, int mask);

/* post.c */
int srn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int srn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int srn_null_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int srn_null_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int srn_check_opcode(const struct srn_qp *qp, enum ibv_wr_opcode opcode, unsigned int flags);

#endif
