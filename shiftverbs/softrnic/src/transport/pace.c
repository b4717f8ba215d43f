/* SPDX-License-Identifier: BSD-3-Clause */
/* A QP keeps to the rate that congestion control leaves it (congestion.c). */
#include "faults/rails.h"
#include "transport/transport.h"

/* How much of its rate a QP may have left over, because this machine was busy, and catch up on. */
#define CATCH_UP_NS 1000000
#define SECOND_NS 1e9

bool srn_pace_waits(const struct srn_qp *qp, uint64_t now_ns) {
    return qp->pace.rp.limited && qp->pace.next_ns > now_ns;
}

void srn_pace_sent(struct srn_qp *qp, uint64_t due_ns, uint64_t now_ns, size_t len) {
    struct srn_pace *pace = &qp->pace;
    struct fabric_params params;

    if (!pace->rp.limited)
        return;
    params = rails_params(qp->nic->port);
    if (!params.rate || !(params.dcqcn.g > 0)) {
        /* It was switched off. */
        pace->rp = (struct dcqcn_rp){0};
        return;
    }
    if (due_ns == now_ns && pace->next_ns < now_ns)
        due_ns = pace->next_ns + CATCH_UP_NS > now_ns ? pace->next_ns : now_ns - CATCH_UP_NS;
    pace->next_ns =
        dcqcn_sent(&pace->rp, &params.dcqcn, (double)params.rate, due_ns, (uint32_t)len + FABRIC_HEADERS);
}

uint64_t srn_pace_next(const struct srn_qp *qp) {
    const struct srn_pace *pace = &qp->pace;

    if (!pace->rp.limited)
        return 0;
    return pace->next_ns + (uint64_t)(8.0 * (double)pace->waiting_bytes * SECOND_NS / pace->rp.rate);
}
