/* SPDX-License-Identifier: BSD-3-Clause */
/* Which attributes each QP state transition requires and permits (IBA 11.2.5.2, table 91 and following). */
#include "verbs/entry.h"

struct transition {
    enum ibv_qp_state from, to;
    int rc_required, rc_optional;
    int uc_required, uc_optional;
    int ud_required, ud_optional;
};

#define ALT_PATH (IBV_QP_ALT_PATH)
#define MIG (IBV_QP_PATH_MIG_STATE)

#define PKEY_PORT (IBV_QP_PKEY_INDEX | IBV_QP_PORT)
#define CONNECTED_ANY (IBV_QP_CUR_STATE | ALT_PATH | IBV_QP_ACCESS_FLAGS | MIG)

static const struct transition transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, PKEY_PORT | IBV_QP_ACCESS_FLAGS, 0, PKEY_PORT | IBV_QP_ACCESS_FLAGS, 0,
     PKEY_PORT | IBV_QP_QKEY, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, PKEY_PORT | IBV_QP_ACCESS_FLAGS, 0, PKEY_PORT | IBV_QP_ACCESS_FLAGS, 0,
     PKEY_PORT | IBV_QP_QKEY},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER,
     ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
     ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     CONNECTED_ANY | IBV_QP_MIN_RNR_TIMER, IBV_QP_SQ_PSN, CONNECTED_ANY, IBV_QP_SQ_PSN,
     IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, CONNECTED_ANY | IBV_QP_MIN_RNR_TIMER, 0, CONNECTED_ANY, 0,
     IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY, 0,
     IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, CONNECTED_ANY | IBV_QP_MIN_RNR_TIMER, 0, CONNECTED_ANY, 0,
     IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0,
     IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
         IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC | ALT_PATH | IBV_QP_ACCESS_FLAGS |
         IBV_QP_PKEY_INDEX | IBV_QP_MIN_RNR_TIMER | MIG,
     0, PKEY_PORT | IBV_QP_AV | ALT_PATH | IBV_QP_ACCESS_FLAGS | MIG, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_SQE, IBV_QPS_RTS, 0, 0, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS, 0,
     IBV_QP_CUR_STATE | IBV_QP_QKEY},
};

bool srn_qp_attr_ok(enum ibv_qp_type type, enum ibv_qp_state cur, enum ibv_qp_state next, int mask) {
    mask &= ~IBV_QP_STATE;
    /* RESET and ERR can be reached from everywhere and take nothing along. */
    if (next == IBV_QPS_RESET || next == IBV_QPS_ERR)
        return (mask & ~IBV_QP_CUR_STATE) == 0;
    for (size_t i = 0; i < sizeof(transitions) / sizeof(transitions[0]); i++) {
        const struct transition *t = &transitions[i];
        int required = type == IBV_QPT_UD   ? t->ud_required
                       : type == IBV_QPT_UC ? t->uc_required
                                            : t->rc_required;
        int optional = type == IBV_QPT_UD   ? t->ud_optional
                       : type == IBV_QPT_UC ? t->uc_optional
                                            : t->rc_optional;

        if (t->from == cur && t->to == next)
            return (mask & required) == required && !(mask & ~(required | optional));
    }
    return false;
}
