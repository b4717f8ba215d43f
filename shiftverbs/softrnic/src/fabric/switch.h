/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A rail whose switch has priority flow control (IEEE 802.1Qbb): the hosts' links, the switch's queues, pauses. Pure: the
 * caller says what time it is, keeps two callers apart, and asks what became of the packets it gave.
 *
 * A host has a queue per priority for its link, the switch one per priority for each host. Both are served by strict
 * priority (802.1Q), 7 first, and within one as packets came. What a host has in the switch is counted by priority, in
 * whichever queues it is: at XOFF the host is paused, its whole queue of that priority, whoever its packets are for. A
 * packet on its way is finished first. At XON it goes on. What comes before the pause is in force takes the headroom.
 *
 * A host that stands still takes no packet and pauses the switch, for each priority that has one for it. A pause that
 * lasts longer than the watchdog's time is a storm (Guo et al., RDMA over Commodity Ethernet at Scale, SIGCOMM 2016): the
 * queue and all that comes to it are dropped until it ends.
 *
 * No time passes here unless somebody calls; then all that happened until now happens in its order. So nothing stops
 * because a caller is late, or gone.
 */
#ifndef SOFTRNIC_FABRIC_SWITCH_H
#define SOFTRNIC_FABRIC_SWITCH_H

#include <stdbool.h>
#include <stdint.h>

#include "fabric/params.h"
#include "fabric/port.h"

#define FABRIC_PRIORITIES 8
#define FABRIC_HOSTS 64
#define FABRIC_PACKETS 8192
#define FABRIC_EVENTS 2048
#define FABRIC_ELSEWHERE FABRIC_HOSTS /* a destination beyond the rail: only the link is passed */
#define FABRIC_WAYS ((FABRIC_HOSTS + 1) * FABRIC_PRIORITIES) /* of a host's packets */

/* Of one host and priority. Names of pauses are the NIC's: rx, the switch pauses the host; tx, the host the switch. */
struct fabric_prio_counters {
    uint64_t rx_pause, tx_pause; /* frames, XOFF and XON alike; those that repeat an XOFF are not counted */
    uint64_t rx_pause_ns;        /* how long the host was paused, without a pause under way */
    uint64_t dropped;            /* of the host's queue in the switch: no buffer or headroom for it */
    uint64_t watchdog_dropped;   /* dropped because of a storm */
    uint64_t storms;
};

struct fabric_fifo {
    uint32_t head, tail;    /* index + 1; 0 = none */
    uint64_t entered, left; /* bytes, ever */
};

enum fabric_where { FABRIC_FREE, FABRIC_LINK, FABRIC_QUEUE, FABRIC_OUT, FABRIC_DROPPED };

struct fabric_packet {
    uint64_t life;  /* the ticket's */
    uint64_t at_ns; /* being sent: until when; out or dropped: since when */
    uint64_t place; /* what its queue's `entered` was, with it */
    uint32_t next, bytes;
    uint8_t src, dst, priority, where;
    bool ect, marked, sending, forgotten;
};

struct fabric_host {
    struct fabric_params params;
    struct fabric_fifo nic[FABRIC_PRIORITIES]; /* for its link */
    struct fabric_fifo out[FABRIC_PRIORITIES]; /* in the switch, for it */
    uint64_t link_until_ns, out_until_ns;      /* of the packet that is being sent */
    uint32_t link_packet, out_packet;          /* index + 1 */
    uint64_t inside[FABRIC_PRIORITIES];        /* bytes of its packets in the switch */
    uint8_t xoff, paused;   /* bit per priority: what the switch said last, what the host has heard */
    uint8_t blocked, storm; /* the other way round: the host pauses the switch, for too long */
    uint8_t watched;        /* a watchdog's event is under way */
    bool still;             /* it takes no packets */
    uint64_t paused_ns[FABRIC_PRIORITIES], blocked_ns[FABRIC_PRIORITIES]; /* since when */
    uint64_t heard_ns[FABRIC_PRIORITIES]; /* when the last pause frame on its way to the host is there */
    uint64_t random;
    struct fabric_counters counters;
    struct fabric_prio_counters prio[FABRIC_PRIORITIES];
};

enum fabric_event_kind { FABRIC_SENT, FABRIC_LEFT, FABRIC_XOFF, FABRIC_XON, FABRIC_WATCHDOG };

struct fabric_event {
    uint64_t at_ns, sequence;
    uint8_t kind, host, priority;
};

struct fabric_switch {
    uint64_t now_ns, sequence, life, swept_ns;
    uint32_t free; /* list of packets, index + 1 */
    uint32_t event_count;
    struct fabric_event events[FABRIC_EVENTS]; /* heap */
    struct fabric_host hosts[FABRIC_HOSTS];
    struct fabric_packet packets[FABRIC_PACKETS];
};

struct fabric_ticket {
    uint64_t life; /* 0 = none */
    uint32_t index;
    uint32_t way; /* by destination and priority: packets that have the same keep their order */
};

struct fabric_news {
    enum fabric_where where; /* FREE: nobody knows this ticket (any more) */
    uint64_t at_ns; /* OUT: when its last bit left the switch. LINK and QUEUE: not before, as it looks now */
    bool marked, sending; /* sending: at_ns is when */
};

/* Empty, with limits and counts as they are. In memory that is 0, or after who knows what. */
void fabric_switch_reset(struct fabric_switch *sw);
/* What a host's port is like from now on. */
void fabric_switch_set(struct fabric_switch *sw, unsigned host, const struct fabric_params *params);
/* Does the host take no packets from now on? */
void fabric_switch_still(struct fabric_switch *sw, unsigned host, bool still, uint64_t now_ns);

/* A packet for the host's link. A ticket without life if there is no room: it is lost. */
struct fabric_ticket fabric_switch_send(struct fabric_switch *sw, unsigned src, unsigned dst,
                                        unsigned priority, uint32_t bytes, bool ect, uint64_t now_ns);
/* Where is it? A ticket whose packet is out or dropped ends with this answer. */
struct fabric_news fabric_switch_ask(struct fabric_switch *sw, struct fabric_ticket ticket, uint64_t now_ns);
/* Nobody will ask. */
void fabric_switch_forget(struct fabric_switch *sw, struct fabric_ticket ticket);

/* When the host's link will have sent what waits for it in this priority and those above, as it looks now. */
uint64_t fabric_switch_link_free(struct fabric_switch *sw, unsigned host, unsigned priority, uint64_t now_ns);
/* Bytes that wait in the switch for the host, with what is on its way out. */
uint64_t fabric_switch_queue(struct fabric_switch *sw, unsigned host, uint64_t now_ns);
/* All that happens until then. */
void fabric_switch_run(struct fabric_switch *sw, uint64_t now_ns);

#endif
