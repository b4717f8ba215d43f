/* SPDX-License-Identifier: BSD-3-Clause */
/* A NIC's UDP socket and what is sent by it. */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "faults/rails.h"
#include "transport/net.h"
#include "transport/transport.h"

#define SOCKET_BUFFER (8 << 20)
#define PACKET_COST 9216 /* of socket buffer, for a packet of 4 KiB: what the kernel accounts */
#define MAX_WINDOW 128
#define MIN_WINDOW 16

/* --- sending: nic->lock held --- */

uint8_t *srn_tx_payload(struct srn_nic *nic) {
    if (nic->net->tx_count == BATCH)
        srn_tx_flush(nic);
    return nic->net->tx[nic->net->tx_count].data + WIRE_MAX_HDR_LEN;
}

/* What a rule or a rail's limits hold back of it; true if it does not go out now. */
static bool detour(struct srn_nic *nic, const struct tx_slot *slot, enum fault_verdict verdict,
                   uint32_t delay_us, uint32_t local_qpn, struct srn_peer to) {
    if (verdict != FAULT_CARRY)
        srn_hold(nic, FAULT_TX, to, slot->iov.iov_base, slot->iov.iov_len, delay_us,
                 verdict == FAULT_REORDER);
    if (verdict == FAULT_DELAY || verdict == FAULT_REORDER)
        return true;
    if (!rails_limited(nic->port))
        return false;
    srn_carry(nic, local_qpn, to, slot->iov.iov_base, slot->iov.iov_len);
    if (!srn_list_empty(&nic->held))
        srn_hold_passed(nic, FAULT_TX);
    return true;
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
    if (verdict != FAULT_PASS && detour(nic, slot, verdict, delay_us, local_qpn, to))
        return;
    net->tx_count++;
    if (!srn_list_empty(&nic->held))
        srn_hold_passed(nic, FAULT_TX);
}

static void set_tos(struct msghdr *msg, struct tx_slot *slot, int tos) {
    struct cmsghdr *cmsg;

    msg->msg_control = &slot->control;
    msg->msg_controllen = sizeof(slot->control.space);
    cmsg = CMSG_FIRSTHDR(msg);
    cmsg->cmsg_level = IPPROTO_IP;
    cmsg->cmsg_type = IP_TOS;
    cmsg->cmsg_len = CMSG_LEN(sizeof(tos));
    memcpy(CMSG_DATA(cmsg), &tos, sizeof(tos));
}

void srn_tx_datagram(struct srn_nic *nic, uint32_t dst_ip, const uint8_t *data, size_t len, uint8_t tos) {
    struct srn_net *net = nic->net;
    struct tx_slot *slot;

    if (net->tx_count == BATCH)
        srn_tx_flush(nic);
    slot = &net->tx[net->tx_count];
    if (tos) {
        set_tos(&net->tx_msg[net->tx_count].msg_hdr, slot, tos);
        net->tx_tos = true;
    }
    net->tx_count++;
    memcpy(slot->data, data, len);
    slot->iov.iov_base = slot->data;
    slot->iov.iov_len = len;
    slot->to.sin_addr.s_addr = dst_ip;
}

static void clear_tos(struct srn_net *net) {
    for (uint32_t i = 0; i < net->tx_count; i++) {
        net->tx_msg[i].msg_hdr.msg_control = NULL;
        net->tx_msg[i].msg_hdr.msg_controllen = 0;
    }
    net->tx_tos = false;
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
    if (net->tx_tos)
        clear_tos(net);
    net->tx_count = 0;
}

/* --- ECN --- */

void srn_link_watch_ecn(struct srn_nic *nic) {
    struct srn_net *net = nic->net;
    int on = !nic->null_mode && rails_limited(nic->port);

    if (net->ecn == (on != 0) || setsockopt(net->sock, IPPROTO_IP, IP_RECVTOS, &on, sizeof(on)))
        return;
    net->ecn = on;
    for (int i = 0; i < BATCH; i++)
        net->rx_msg[i].msg_hdr.msg_control = on ? &net->rx[i].control : NULL;
}

void srn_rx_want_marks(struct srn_net *net) {
    for (int i = 0; i < BATCH; i++)
        net->rx_msg[i].msg_hdr.msg_controllen = sizeof(net->rx[i].control.space);
}

bool srn_rx_marked(const struct srn_net *net, int slot) {
    struct msghdr *msg = (struct msghdr *)&net->rx_msg[slot].msg_hdr;

    for (struct cmsghdr *cmsg = CMSG_FIRSTHDR(msg); cmsg; cmsg = CMSG_NXTHDR(msg, cmsg))
        if (cmsg->cmsg_level == IPPROTO_IP && cmsg->cmsg_type == IP_TOS)
            return (*CMSG_DATA(cmsg) & 3) == 3; /* CE */
    return false;
}

void srn_nic_unlock(struct srn_nic *nic) {
    if (atomic_load_explicit(&nic->overrun_pending, memory_order_relaxed))
        srn_qp_overrun(nic);
    if (nic->net && nic->net->tx_count)
        srn_tx_flush(nic);
    pthread_mutex_unlock(&nic->lock);
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

int srn_link_open(struct srn_nic *nic, struct srn_net *net, char *err, size_t err_len) {
    const struct config_device *config = nic->dev->config;
    uint32_t address = config->address, window;
    int rc = 0, size = 0;
    socklen_t len = sizeof(size);

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
        return rc;
    nic->ip = nic->port->address;
    nic->active_mtu = nic->null_mode ? IBV_MTU_4096 : path_mtu(net, nic->ip);
    nic->window = MAX_WINDOW;
    if (nic->null_mode)
        return 0;
    /* What our socket can take is the best guess of what the peer's can. */
    getsockopt(net->sock, SOL_SOCKET, SO_RCVBUF, &size, &len);
    window = (uint32_t)size / (4 * PACKET_COST);
    nic->window = window < MIN_WINDOW ? MIN_WINDOW : window > MAX_WINDOW ? MAX_WINDOW : window;
    rc = srn_memory_open(&nic->memory, SLOTS_LEN);
    if (!rc)
        init_buffers(net, nic->memory.base);
    return rc;
}

void srn_link_close(struct srn_nic *nic, struct srn_net *net) {
    close_fds(net);
    srn_memory_close(&nic->memory);
    if (nic->port)
        fault_release(nic->port);
    nic->port = NULL;
}

/* Only closes what must not live on in the child. */
void srn_link_after_fork(struct srn_nic *nic) {
    if (nic->net)
        close_fds(nic->net);
    srn_memory_after_fork(&nic->memory);
    if (nic->port)
        fault_after_fork(nic->port);
    nic->port = NULL;
}
