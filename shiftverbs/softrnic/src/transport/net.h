/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The network side of a NIC: its UDP socket, its timer and its progress thread. Nothing above this layer touches them.
 *
 * Packets are sent by whoever holds the NIC's lock, gathered and handed over with one system call; they are received by
 * the progress thread, which also runs the timer and takes the news of faults.
 */
#ifndef SOFTRNIC_TRANSPORT_NET_H
#define SOFTRNIC_TRANSPORT_NET_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "faults/fault.h"
#include "objects/nic.h"
#include "wire/wire.h"

#define BATCH 32
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
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control; /* IP_TOS, where it is not 0 */
};

struct rx_slot {
    struct sockaddr_in from;
    struct iovec iov;
    struct wire_packet pkt;
    bool good;
    enum fault_verdict verdict;
    uint32_t delay_us;
    uint8_t *data; /* SLOT_LEN */
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control; /* IP_TOS, if net->ecn */
};

struct srn_net {
    struct srn_nic *nic;
    int sock, epoll, timer, wake;
    pthread_t thread;
    atomic_bool stop;
    uint64_t timer_at; /* what the timerfd is set to; 0 = not set. nic->lock */
    /* A packet that was held back goes on. */
    void (*go_on)(struct srn_nic *nic, enum fault_direction direction, struct srn_peer peer,
                  const uint8_t *data, size_t len);
    /* A packet that was carried arrives, unless the switch is gone; a QP that paused for its link goes on. */
    void (*transmit)(struct srn_nic *nic, uint32_t peer_ip, const uint8_t *data, size_t len, uint8_t tos);
    void (*resume)(struct srn_nic *nic, uint32_t qpn);
    bool ecn;    /* the socket tells of the TOS byte */
    bool tx_tos; /* a packet in tx has one */
    uint32_t tx_count;
    struct mmsghdr tx_msg[BATCH];
    struct tx_slot tx[BATCH];
    struct mmsghdr rx_msg[BATCH];
    struct rx_slot rx[BATCH];
};

#endif
