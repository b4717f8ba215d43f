/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A port of a rail: the host's link to the switch, and the switch's queue towards the host. Pure: time and a packet in,
 * when it is through or that it is dropped out. The caller says what time it is, so that the same code runs in a NIC and
 * in virtual time, and keeps two callers from one port.
 *
 * Store and forward: a packet takes the time of its bytes twice, into the switch and out of it. Of what waits in the
 * switch only the time is kept at which all of it will be gone: first come, first served, and never idle while one waits.
 */
#ifndef SOFTRNIC_FABRIC_PORT_H
#define SOFTRNIC_FABRIC_PORT_H

#include <stdbool.h>
#include <stdint.h>

#include "fabric/params.h"

/* What a link carries besides the UDP payload: Ethernet with FCS (18), IPv4 (20), UDP (8). */
#define FABRIC_HEADERS 46

struct fabric_counters {
    uint64_t packets, bytes; /* went through the switch's queue */
    uint64_t dropped;        /* found it full */
    uint64_t marked;         /* got the CE mark of ECN */
    uint64_t queue_peak;     /* bytes that waited, at most, with the packet that came last */
};

struct fabric_port {
    uint64_t link_free_ns;  /* the host's link has sent all it was given */
    uint64_t queue_free_ns; /* the switch's queue towards the host is empty */
    uint64_t latest_ns;     /* the last arrival at that queue */
    uint64_t random;        /* for marking; any value */
    struct fabric_counters counters;
};

struct fabric_fate {
    bool dropped;
    bool marked;
    uint64_t out_ns; /* when its last bit has left the switch */
    uint64_t queue;  /* bytes that waited before it */
};

/* Does the switch mark a packet that finds so many bytes in the queue? RED; random is the port's. */
bool fabric_marks(uint64_t *random, const struct fabric_params *params, uint64_t queue);

/* The time that bytes take on a link of this rate, bits per second and not 0; ns. */
uint64_t fabric_time_ns(uint64_t rate, uint64_t bytes);

/* The host gives its link a packet of so many bytes; returns when its last bit is in the switch. */
uint64_t fabric_send(struct fabric_port *port, const struct fabric_params *params, uint64_t now_ns,
                     uint32_t bytes);
/* Bytes that wait for the host's link. */
uint64_t fabric_backlog(const struct fabric_port *port, const struct fabric_params *params, uint64_t now_ns);
/* Bytes that wait in the switch for the host. */
uint64_t fabric_queue(const struct fabric_port *port, const struct fabric_params *params, uint64_t now_ns);

/*
 * A packet for this host came to the switch. Callers that were late may give times that go back: it is never before
 * one that was here already. ect: ECN may mark it.
 */
struct fabric_fate fabric_forward(struct fabric_port *port, const struct fabric_params *params,
                                  uint64_t now_ns, uint32_t bytes, bool ect);

#endif
