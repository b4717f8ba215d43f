/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a NIC counts for all of its processes together, by the names that mlx5 has in sysfs (hw_counters). None of it
 * happens to a packet that goes as it should.
 */
#ifndef SOFTRNIC_COUNTED_H
#define SOFTRNIC_COUNTED_H

enum nic_counter {
    /* Congestion, on rails that have limits */
    NP_ECN_MARKED_ROCE_PACKETS,
    NP_CNP_SENT,
    RP_CNP_HANDLED,
    RP_CNP_IGNORED,
    /* Reliable connections */
    OUT_OF_SEQUENCE,   /* requests that came before one that is missing */
    DUPLICATE_REQUEST, /* requests that had come before */
    OUT_OF_BUFFER,     /* messages that found no receive posted */
    PACKET_SEQ_ERR, /* NAKs for sequence errors received; this and the following, as long as retries are left */
    LOCAL_ACK_TIMEOUT_ERR, /* retry timers that ran out */
    RNR_NAK_RETRY_ERR,     /* RNR NAKs received */
    IMPLIED_NAK_SEQ_ERR,   /* answers that came before one that is missing */
    REQ_TRANSPORT_RETRIES_EXCEEDED,
    REQ_RNR_RETRIES_EXCEEDED,
    RX_ICRC_ENCAPSULATED, /* packets with a wrong ICRC */
    NIC_COUNTERS
};
/* Those before it are shown with the port's limits, the others with the device. */
#define FIRST_OF_DEVICE OUT_OF_SEQUENCE

const char *nic_counter_name(enum nic_counter counter);

#endif
