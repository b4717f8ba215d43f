/* SPDX-License-Identifier: BSD-3-Clause */
/* A NIC's one timer: the earliest of what its QPs and held packets wait for. nic->lock held. */
#include <sys/timerfd.h>

#include "objects/nic.h"
#include "objects/queues.h"
#include "transport/net.h"
#include "transport/transport.h"

static void timer_arm(struct srn_net *net, uint64_t at_ns) {
    struct itimerspec its = {
        .it_value = {.tv_sec = (time_t)(at_ns / 1000000000u), .tv_nsec = (long)(at_ns % 1000000000u)}};

    net->timer_at = at_ns;
    timerfd_settime(net->timer, TFD_TIMER_ABSTIME, &its, NULL);
}

void srn_timer_at(struct srn_nic *nic, uint64_t at_ns) {
    /* A timer that is stopped leaves the timerfd alone: it goes off for nothing now and then, which is
     * cheaper. */
    if (nic->net && (!nic->net->timer_at || at_ns < nic->net->timer_at))
        timer_arm(nic->net, at_ns);
}

void srn_timer_set(struct srn_qp *qp, uint64_t at_ns) {
    if (srn_list_empty(&qp->timer_link))
        srn_list_add_tail(&qp->nic->timed, &qp->timer_link);
    srn_timer_at(qp->nic, at_ns);
}
