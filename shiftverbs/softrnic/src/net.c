/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The network side of a NIC: its UDP socket, its progress thread and the clock. Nothing else in this library
 * touches either of them.
 *
 * Packets are sent by whoever holds the NIC's lock, gathered and handed over with one system call; they are
 * received by the progress thread, which also runs the timers and takes the news of faults.
 */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "softrnic.h"

#define BATCH 32
#define BATCHES_PER_TURN 16
#define SOCKET_BUFFER (8 << 20)
#define PACKET_COST 9216 /* of socket buffer, for a packet of 4 KiB: what the kernel accounts */
#define MAX_WINDOW 128
#define MIN_WINDOW 16
#define PAGE 4096
/*
 * Where packets lie in nic->memory: payloads of 4 KiB each on one page, which is copied fastest, with what stands before
 * and behind them on pages that the next slot shares. Received ones are best off so with a BTH alone before the payload.
 */
#define SLOT_STRIDE (2 * PAGE)
#define TX_SLOT(i) ((size_t)(i)*SLOT_STRIDE + PAGE - WIRE_MAX_HDR_LEN)
#define RX_SLOT(i) ((size_t)(BATCH + (i)) * SLOT_STRIDE + PAGE - WIRE_BTH_LEN)
#define SLOT_LEN (WIRE_MAX_HDR_LEN + 4096 + 64)
#define SLOTS_LEN (2 * BATCH * SLOT_STRIDE + PAGE)

struct tx_slot {
    struct sockaddr_in to;
    struct iovec iov;
    uint8_t *data; /* SLOT_LEN */
};

struct rx_slot {
    struct sockaddr_in from;
    struct iovec iov;
    struct wire_packet pkt;
    bool good;
    enum fault_verdict verdict;
    uint32_t delay_us;
    uint8_t *data; /* SLOT_LEN */
};

struct srn_net {
    struct srn_nic *nic;
    int sock, epoll, timer, wake;
    pthread_t thread;
    atomic_bool stop;
    uint64_t timer_at; /* what the timerfd is set to; 0 = not set. nic->lock */
    uint32_t tx_count;
    struct mmsghdr tx_msg[BATCH];
    struct tx_slot tx[BATCH];
    struct mmsghdr rx_msg[BATCH];
    struct rx_slot rx[BATCH];
};

uint64_t srn_now_ns(void) {
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t srn_random(void) {
    uint64_t value;

    if (getrandom(&value, sizeof(value), 0) != sizeof(value))
        value = srn_now_ns() * 0x9e3779b97f4a7c15u;
    return value;
}

/* --- sending: nic->lock held --- */

uint8_t *srn_tx_payload(struct srn_nic *nic) {
    if (nic->net->tx_count == BATCH)
        srn_tx_flush(nic);
    return nic->net->tx[nic->net->tx_count].data + WIRE_MAX_HDR_LEN;
}

void srn_tx_commit(struct srn_nic *nic, struct wire_packet *pkt, size_t payload_len, uint32_t local_qpn,
                   struct srn_peer to) {
    struct srn_net *net = nic->net;
    struct tx_slot *slot = &net->tx[net->tx_count];
    uint8_t hdr[WIRE_MAX_HDR_LEN], *start;
    struct iovec payload = {slot->data + WIRE_MAX_HDR_LEN, payload_len};
    struct wire_flow flow;
    size_t hdr_len, tail_len;
    enum fault_verdict verdict;
    uint32_t delay_us = 0;

    pkt->flags = wire_opcode_flags(pkt->bth.opcode);
    pkt->bth.reserved = (uint8_t)(to.gid_index ^ SRN_GID_BITS);
    verdict = fault_filter(nic->port, FAULT_TX, pkt, local_qpn, to.ip, &delay_us);
    if (verdict == FAULT_DROP) {
        nic->counters[SRN_CNT_TX_FILTERED]++;
        return;
    }
    hdr_len = wire_pack_headers(hdr, pkt, payload_len);
    start = slot->data + WIRE_MAX_HDR_LEN - hdr_len;
    memcpy(start, hdr, hdr_len);
    wire_flow_init(&flow, nic->ip, htons(WIRE_UDP_PORT), to.ip, htons(WIRE_UDP_PORT));
    tail_len = wire_seal(slot->data + WIRE_MAX_HDR_LEN + payload_len, &flow, start, hdr_len, &payload, 1);
    slot->iov.iov_base = start;
    slot->iov.iov_len = hdr_len + payload_len + tail_len;
    slot->to.sin_addr.s_addr = to.ip;
    if (verdict != FAULT_PASS)
        srn_hold(nic, FAULT_TX, to.ip, start, slot->iov.iov_len, delay_us, verdict == FAULT_REORDER);
    if (verdict == FAULT_DELAY || verdict == FAULT_REORDER)
        return;
    net->tx_count++;
    if (!srn_list_empty(&nic->held))
        srn_hold_passed(nic, FAULT_TX);
}

void srn_tx_datagram(struct srn_nic *nic, uint32_t dst_ip, const uint8_t *data, size_t len) {
    struct srn_net *net = nic->net;
    struct tx_slot *slot;

    if (net->tx_count == BATCH)
        srn_tx_flush(nic);
    slot = &net->tx[net->tx_count++];
    memcpy(slot->data, data, len);
    slot->iov.iov_base = slot->data;
    slot->iov.iov_len = len;
    slot->to.sin_addr.s_addr = dst_ip;
}

void srn_tx_flush(struct srn_nic *nic) {
    struct srn_net *net = nic->net;
    uint32_t done = 0;

    if (!net)
        return;
    while (done < net->tx_count) {
        int n = sendmmsg(net->sock, net->tx_msg + done, net->tx_count - done, MSG_DONTWAIT | MSG_NOSIGNAL);

        if (n > 0) {
            nic->counters[SRN_CNT_TX_PACKETS] += (uint64_t)n;
            done += (uint32_t)n;
        } else if (errno != EINTR) {
            /* No room, no route, an ICMP error of an earlier packet: lost, as on any network. */
            nic->counters[SRN_CNT_TX_ERRORS]++;
            done++;
        }
    }
    net->tx_count = 0;
}

/* --- timers: nic->lock held --- */

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

static void run_timers(struct srn_nic *nic) {
    struct srn_net *net = nic->net;
    struct srn_list *pos, *tmp;
    uint64_t now, next = 0;

    if (!net->timer_at)
        return;
    now = srn_now_ns();
    if (now < net->timer_at)
        return;
    net->timer_at = 0;
    next = srn_hold_run(nic, now);
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

void srn_nic_unlock(struct srn_nic *nic) {
    if (atomic_load_explicit(&nic->overrun_pending, memory_order_relaxed))
        srn_qp_overrun(nic);
    if (nic->net && nic->net->tx_count)
        srn_tx_flush(nic);
    pthread_mutex_unlock(&nic->lock);
}

/* --- receiving: the progress thread --- */

static void handle_packet(struct srn_nic *nic, const struct wire_packet *pkt, uint32_t src_ip) {
    const struct srn_peer from = {src_ip, (pkt->bth.reserved & SRN_GID_BITS) ^ SRN_GID_BITS};
    struct srn_qp *qp = srn_qp_find(nic, pkt->bth.dest_qpn);
    uint8_t transport = WIRE_TRANSPORT(pkt->bth.opcode);

    nic->counters[SRN_CNT_RX_PACKETS]++;
    if (!qp || transport != (qp->type == IBV_QPT_UD ? WIRE_UD : qp->type == IBV_QPT_UC ? WIRE_UC : WIRE_RC)) {
        nic->counters[SRN_CNT_RX_NO_QP]++;
        return;
    }
    /* Our one P_Key is full membership of the default partition: any membership of it may talk to us. */
    if ((pkt->bth.pkey & 0x7fff) != (WIRE_DEFAULT_PKEY & 0x7fff)) {
        nic->counters[SRN_CNT_RX_BAD_PKEY]++;
        return;
    }
    if (qp->type == IBV_QPT_UD) {
        srn_ud_handle(qp, pkt, from);
        return;
    }
    if (qp->peer.ip != from.ip || qp->peer.gid_index != from.gid_index) {
        nic->counters[SRN_CNT_RX_WRONG_PEER]++;
        return;
    }
    if (qp->type == IBV_QPT_UC)
        srn_uc_handle(qp, pkt);
    else if (pkt->flags & WIRE_F_RESPONSE)
        srn_req_handle(qp, pkt);
    else
        srn_resp_handle(qp, pkt);
}

void srn_rx_datagram(struct srn_nic *nic, uint32_t src_ip, const uint8_t *data, size_t len) {
    struct wire_packet pkt;

    if (wire_parse(&pkt, NULL, data, len) == WIRE_OK && !srn_stalled(nic))
        handle_packet(nic, &pkt, src_ip);
}

/* A good packet, now or later, once or twice. */
static void deliver(struct srn_nic *nic, const struct rx_slot *slot, size_t len) {
    uint32_t from = slot->from.sin_addr.s_addr;

    if (slot->verdict != FAULT_PASS)
        srn_hold(nic, FAULT_RX, from, slot->data, len, slot->delay_us, slot->verdict == FAULT_REORDER);
    if (slot->verdict == FAULT_DELAY || slot->verdict == FAULT_REORDER)
        return;
    handle_packet(nic, &slot->pkt, from);
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
            srn_async_port_event(nic, IBV_EVENT_DEVICE_FATAL);
            break;
        }
    }
    if (!atomic_load(&nic->dead))
        srn_stall_over(nic);
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

static int bind_socket(void *arg, uint32_t address) {
    struct srn_net *net = arg;
    struct sockaddr_in sin = {
        .sin_family = AF_INET, .sin_port = htons(WIRE_UDP_PORT), .sin_addr.s_addr = address};

    if (bind(net->sock, (struct sockaddr *)&sin, sizeof(sin)))
        return -errno;
    return 0;
}

/* The IPv4 address of a network interface. */
static int netdev_address(const char *name, uint32_t *address) {
    struct ifaddrs *all;
    int rc = -ENODEV;

    if (getifaddrs(&all))
        return -errno;
    for (struct ifaddrs *a = all; a && rc; a = a->ifa_next)
        if (a->ifa_addr && a->ifa_addr->sa_family == AF_INET && !strcmp(a->ifa_name, name)) {
            *address = ((struct sockaddr_in *)a->ifa_addr)->sin_addr.s_addr;
            rc = 0;
        }
    freeifaddrs(all);
    return rc;
}

static int watch(struct srn_net *net, int fd) {
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};

    return epoll_ctl(net->epoll, EPOLL_CTL_ADD, fd, &e) ? errno : 0;
}

static int open_socket(struct srn_net *net) {
    int df = IP_PMTUDISC_DO, size = SOCKET_BUFFER;

    net->sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (net->sock < 0)
        return errno;
    /* Don't Fragment, and with it IP identification 0: the ICRC covers both. */
    if (setsockopt(net->sock, IPPROTO_IP, IP_MTU_DISCOVER, &df, sizeof(df)))
        return errno;
    if (setsockopt(net->sock, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof(size)))
        setsockopt(net->sock, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
    if (setsockopt(net->sock, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size)))
        setsockopt(net->sock, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
    return 0;
}

/* The largest MTU whose packets fit the interface that has this address. */
static enum ibv_mtu path_mtu(const struct srn_net *net, uint32_t ip) {
    struct ifaddrs *all;
    int link_mtu = 65536;
    enum ibv_mtu mtu = IBV_MTU_4096;

    if ((ntohl(ip) >> 24) != 127 && getifaddrs(&all) == 0) {
        for (struct ifaddrs *a = all; a; a = a->ifa_next) {
            struct ifreq req;

            if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET ||
                ((struct sockaddr_in *)a->ifa_addr)->sin_addr.s_addr != ip)
                continue;
            memset(&req, 0, sizeof(req));
            snprintf(req.ifr_name, sizeof(req.ifr_name), "%s", a->ifa_name);
            if (ioctl(net->sock, SIOCGIFMTU, &req) == 0)
                link_mtu = req.ifr_mtu;
        }
        freeifaddrs(all);
    }
    while (mtu > IBV_MTU_256 &&
           (int)srn_mtu_bytes(mtu) + WIRE_MAX_HDR_LEN + WIRE_MAX_TAIL_LEN + 28 > link_mtu)
        mtu--;
    return mtu;
}

static void init_buffers(struct srn_net *net, uint8_t *memory) {
    for (int i = 0; i < BATCH; i++) {
        struct tx_slot *tx = &net->tx[i];
        struct rx_slot *rx = &net->rx[i];

        tx->data = memory + TX_SLOT(i);
        rx->data = memory + RX_SLOT(i);
        tx->to = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(WIRE_UDP_PORT)};
        net->tx_msg[i].msg_hdr = (struct msghdr){
            .msg_name = &tx->to, .msg_namelen = sizeof(tx->to), .msg_iov = &tx->iov, .msg_iovlen = 1};
        rx->iov = (struct iovec){rx->data, SLOT_LEN};
        net->rx_msg[i].msg_hdr = (struct msghdr){
            .msg_name = &rx->from, .msg_namelen = sizeof(rx->from), .msg_iov = &rx->iov, .msg_iovlen = 1};
    }
}

static void close_fds(struct srn_net *net) {
    int *fds[] = {&net->sock, &net->epoll, &net->timer, &net->wake};

    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
        if (*fds[i] >= 0) {
            close(*fds[i]);
            *fds[i] = -1;
        }
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

int srn_net_open(struct srn_nic *nic, char *err, size_t err_len) {
    struct srn_net *net = calloc(1, sizeof(*net));
    const struct config_device *config = nic->dev->config;
    uint32_t address = config->address, window;
    int rc = 0, size = 0;
    socklen_t len = sizeof(size);

    if (!net)
        return ENOMEM;
    net->nic = nic;
    net->sock = net->epoll = net->timer = net->wake = nic->memory.fd = -1;
    if (!nic->null_mode)
        rc = open_socket(net);
    if (!rc && config->kind == CONFIG_NETDEV && !address) {
        rc = -netdev_address(config->netdev, &address);
        if (rc)
            snprintf(err, err_len, "network interface %s has no IPv4 address", config->netdev);
    }
    if (!rc)
        rc = -fault_claim(&nic->port, &srn_global.config, config, address,
                          nic->null_mode ? NULL : bind_socket, net, err, err_len);
    if (rc)
        goto fail;
    nic->ip = nic->port->address;
    nic->active_mtu = nic->null_mode ? IBV_MTU_4096 : path_mtu(net, nic->ip);
    nic->window = MAX_WINDOW;
    if (!nic->null_mode) {
        /* What our socket can take is the best guess of what the peer's can. */
        getsockopt(net->sock, SOL_SOCKET, SO_RCVBUF, &size, &len);
        window = (uint32_t)size / (4 * PACKET_COST);
        nic->window = window < MIN_WINDOW ? MIN_WINDOW : window > MAX_WINDOW ? MAX_WINDOW : window;
        rc = srn_memory_open(&nic->memory, SLOTS_LEN);
        if (rc)
            goto fail;
        init_buffers(net, nic->memory.base);
    }
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
    if (!rc)
        rc = start_thread(net);
    if (rc)
        goto fail;
    return 0;

fail:
    nic->net = NULL;
    close_fds(net);
    srn_memory_close(&nic->memory);
    free(net);
    if (nic->port)
        fault_release(nic->port);
    nic->port = NULL;
    return rc;
}

void srn_net_close(struct srn_nic *nic) {
    struct srn_net *net = nic->net;
    uint64_t one = 1;

    atomic_store(&net->stop, true);
    if (write(net->wake, &one, sizeof(one)) < 0)
        return; /* cannot be; better a thread left than one waited for in vain */
    pthread_join(net->thread, NULL);
    srn_commands_wake(nic); /* it is dead by now */
    srn_nic_lock(nic);
    nic->net = NULL;
    srn_hold_clear(nic);
    pthread_mutex_unlock(&nic->lock);
    close_fds(net);
    srn_memory_close(&nic->memory);
    free(net);
    fault_release(nic->port);
    nic->port = NULL;
}

/* Only closes what must not live on in the child; its memory stays, since other threads may have been using
 * it. */
void srn_net_after_fork(struct srn_nic *nic) {
    if (nic->net)
        close_fds(nic->net);
    srn_memory_after_fork(&nic->memory);
    if (nic->port)
        fault_after_fork(nic->port);
    nic->port = NULL;
}
