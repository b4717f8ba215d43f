/* SPDX-License-Identifier: BSD-3-Clause */
/* The progress thread: receives packets, runs the timer, takes the news of faults. */
#include <arpa/inet.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "faults/rails.h"
#include "transport/net.h"
#include "transport/transport.h"

#define BATCHES_PER_TURN 16

static void run_timers(struct srn_nic *nic) {
    struct srn_net *net = nic->net;
    struct srn_list *pos, *tmp;
    uint64_t now, next = 0, carried;

    if (!net->timer_at)
        return;
    now = srn_now_ns();
    if (now < net->timer_at)
        return;
    net->timer_at = 0;
    next = srn_hold_run(nic, now);
    carried = srn_carry_run(nic, now);
    if (carried && (!next || carried < next))
        next = carried;
    /* What runs out while the NIC stands still is seen when it moves again. */
    if (srn_stalled(nic)) {
        if (next)
            srn_timer_at(nic, next);
        return;
    }
    srn_for_each(pos, tmp, &nic->timed) {
        struct srn_qp *qp = srn_container(pos, struct srn_qp, timer_link);

        srn_req_timer(qp, now);
        if (!qp->req.retry_at && !qp->req.rnr_until) {
            srn_list_del(&qp->timer_link);
            continue;
        }
        if (qp->req.retry_at && (!next || qp->req.retry_at < next))
            next = qp->req.retry_at;
        if (qp->req.rnr_until && (!next || qp->req.rnr_until < next))
            next = qp->req.rnr_until;
    }
    if (next)
        srn_timer_at(nic, next);
}

/* --- receiving --- */

/* A good packet, now or later, once or twice. */
static void deliver(struct srn_nic *nic, const struct rx_slot *slot, size_t len) {
    uint32_t from = slot->from.sin_addr.s_addr;

    if (slot->verdict != FAULT_PASS)
        srn_hold(nic, FAULT_RX, (struct srn_peer){.ip = from}, slot->data, len, slot->delay_us,
                 slot->verdict == FAULT_REORDER);
    if (slot->verdict == FAULT_DELAY || slot->verdict == FAULT_REORDER)
        return;
    srn_receive(nic, &slot->pkt, from);
    if (!srn_list_empty(&nic->held))
        srn_hold_passed(nic, FAULT_RX);
}

/* One batch. Returns how many datagrams it had. */
static int receive(struct srn_nic *nic) {
    struct srn_net *net = nic->net;
    uint64_t bad[WIRE_ERR_COUNT] = {0}, filtered = 0;
    int n;

    for (int i = 0; i < BATCH; i++)
        net->rx_msg[i].msg_hdr.msg_namelen = sizeof(net->rx[i].from);
    if (net->ecn)
        srn_rx_want_marks(net);
    n = recvmmsg(net->sock, net->rx_msg, BATCH, MSG_DONTWAIT, NULL);
    if (n <= 0)
        return 0;
    for (int i = 0; i < n; i++) {
        struct rx_slot *slot = &net->rx[i];
        struct wire_flow flow;
        enum wire_error error;

        slot->good = false;
        wire_flow_init(&flow, slot->from.sin_addr.s_addr, slot->from.sin_port, nic->ip, htons(WIRE_UDP_PORT));
        flow.any_id = true;
        error = wire_parse(&slot->pkt, &flow, slot->data, net->rx_msg[i].msg_len);
        if (error != WIRE_OK) {
            bad[error]++;
            if (error == WIRE_ERR_ICRC)
                rails_count(nic->port, RX_ICRC_ENCAPSULATED);
            continue;
        }
        slot->verdict = fault_filter(nic->port, FAULT_RX, &slot->pkt, slot->pkt.bth.dest_qpn,
                                     slot->from.sin_addr.s_addr, &slot->delay_us);
        if (slot->verdict == FAULT_DROP || srn_stalled(nic)) {
            filtered++;
            continue;
        }
        slot->good = true;
    }
    srn_nic_lock(nic);
    nic->counters[SRN_CNT_RX_FILTERED] += filtered;
    for (int e = 0; e < WIRE_ERR_COUNT; e++)
        nic->counters[SRN_CNT_RX_BAD + e] += bad[e];
    if (!atomic_load_explicit(&nic->dead, memory_order_relaxed)) {
        for (int i = 0; i < n; i++)
            if (net->rx[i].good)
                deliver(nic, &net->rx[i], net->rx_msg[i].msg_len);
        if (net->ecn)
            srn_handle_marks(nic, n);
        srn_resp_flush_acks(nic);
    }
    srn_nic_unlock(nic);
    return n;
}

static void handle_faults(struct srn_nic *nic) {
    enum fault_event events[8];
    int n = fault_handle_notify(nic->port, events, 8);

    srn_nic_lock(nic);
    for (int i = 0; i < n; i++) {
        switch (events[i]) {
        case FAULT_EVENT_PORT_ERR:
            srn_async_port_event(nic, IBV_EVENT_PORT_ERR);
            break;
        case FAULT_EVENT_PORT_ACTIVE:
            srn_async_port_event(nic, IBV_EVENT_PORT_ACTIVE);
            break;
        case FAULT_EVENT_DEVICE_FATAL:
            /* Nothing more happens on this NIC: no timer, no packet, no completion. */
            atomic_store(&nic->dead, true);
            while (!srn_list_empty(&nic->timed))
                srn_list_del(nic->timed.next);
            srn_hold_clear(nic);
            srn_carry_finish(nic, false);
            srn_async_port_event(nic, IBV_EVENT_DEVICE_FATAL);
            break;
        }
    }
    if (!atomic_load(&nic->dead))
        srn_stall_over(nic);
    srn_link_watch_ecn(nic);
    srn_nic_unlock(nic);
    srn_commands_wake(nic);
}

/*
 * A NIC does not wait for the program to yield. Asking for a short slice lets the scheduler run this thread
 * as soon as a packet wakes it, also where every core is busy with programs that poll (EEVDF, Linux 6.12).
 * Without it the NIC is slow there, by milliseconds, and nothing worse.
 */
static void be_prompt(void) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attr = {.size = sizeof(attr), .runtime = 100000};

    syscall(SYS_sched_setattr, 0, &attr, 0);
}

static void *progress(void *arg) {
    struct srn_nic *nic = arg;
    struct srn_net *net = nic->net;
    struct epoll_event events[4];

    be_prompt();
    while (!atomic_load(&net->stop)) {
        int n = epoll_wait(net->epoll, events, 4, -1);

        for (int i = 0; i < n; i++) {
            if (events[i].data.fd == net->timer) {
                uint64_t expirations;
                ssize_t r = read(net->timer, &expirations, sizeof(expirations));

                (void)r; /* not readable any more if it was set anew: nothing to do then */
            } else if (events[i].data.fd == nic->port->notify_fd) {
                handle_faults(nic);
            }
        }
        if (net->sock >= 0)
            /* Before the timers: what arrived in time must not look late because we were not running. */
            for (int i = 0; i < BATCHES_PER_TURN && receive(nic) == BATCH; i++)
                ;
        srn_nic_lock(nic);
        if (!atomic_load_explicit(&nic->dead, memory_order_relaxed))
            run_timers(nic);
        srn_nic_unlock(nic);
    }
    return NULL;
}

/* --- opening and closing --- */

static int watch(struct srn_net *net, int fd) {
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};

    return epoll_ctl(net->epoll, EPOLL_CTL_ADD, fd, &e) ? errno : 0;
}

/* The thread takes no signals: they are the program's. */
static int start_thread(struct srn_net *net) {
    sigset_t all, old;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    rc = pthread_create(&net->thread, NULL, progress, net->nic);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!rc)
        pthread_setname_np(net->thread, "softrnic");
    return rc;
}

static void go_on(struct srn_nic *nic, enum fault_direction direction, struct srn_peer peer,
                  const uint8_t *data, size_t len) {
    if (direction == FAULT_TX && rails_limited(nic->port))
        srn_carry(nic, 0, peer, data, len);
    else if (direction == FAULT_TX)
        srn_tx_datagram(nic, peer.ip, data, len, 0);
    else
        srn_rx_datagram(nic, peer.ip, data, len);
}

int srn_net_open(struct srn_nic *nic, char *err, size_t err_len) {
    struct srn_net *net = calloc(1, sizeof(*net));
    int rc;

    if (!net)
        return ENOMEM;
    net->nic = nic;
    net->go_on = go_on;
    net->transmit = srn_tx_datagram;
    net->resume = srn_resume;
    rc = srn_link_open(nic, net, err, err_len);
    if (rc)
        goto fail;
    net->epoll = epoll_create1(EPOLL_CLOEXEC);
    net->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    net->wake = eventfd(0, EFD_CLOEXEC);
    if (net->epoll < 0 || net->timer < 0 || net->wake < 0) {
        rc = errno;
        goto fail;
    }
    rc = watch(net, net->timer);
    if (!rc)
        rc = watch(net, net->wake);
    if (!rc)
        rc = watch(net, nic->port->notify_fd);
    if (!rc && net->sock >= 0)
        rc = watch(net, net->sock);
    nic->net = net;
    srn_link_watch_ecn(nic);
    if (!rc)
        rc = start_thread(net);
    if (rc)
        goto fail;
    return 0;

fail:
    nic->net = NULL;
    srn_link_close(nic, net);
    free(net);
    return rc;
}

void srn_net_close(struct srn_nic *nic) {
    struct srn_net *net = nic->net;
    uint64_t one = 1;

    atomic_store(&net->stop, true);
    if (write(net->wake, &one, sizeof(one)) < 0)
        return; /* cannot be; better leave a thread behind than wait for it for ever */
    pthread_join(net->thread, NULL);
    srn_commands_wake(nic); /* it is dead by now */
    srn_nic_lock(nic);
    srn_hold_clear(nic);
    srn_carry_finish(nic, !fault_was_killed(nic->port));
    srn_tx_flush(nic);
    nic->net = NULL;
    pthread_mutex_unlock(&nic->lock);
    srn_link_close(nic, net);
    free(net);
}

void srn_net_at_exit(struct srn_nic *nic) {
    struct timespec soon;

    if (srn_forked(nic))
        return;
    /* Whoever has the lock may be a thread that is gone: then it is lost, as with a process that is killed. */
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_sec++;
    if (pthread_mutex_timedlock(&nic->lock, &soon))
        return;
    if (nic->net) {
        srn_carry_finish(nic, !fault_was_killed(nic->port));
        srn_tx_flush(nic);
    }
    pthread_mutex_unlock(&nic->lock);
}

/* Its memory stays in the child, since other threads may have been using it. */
void srn_net_after_fork(struct srn_nic *nic) {
    srn_link_after_fork(nic);
}
