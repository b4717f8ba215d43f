/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Packets on rails that have limits: they wait here, first for their QP's rate, then for the host's link, then in the
 * switch and on its wire. The process that sends a packet keeps it until it arrives; what links and queues do with it is
 * in shared memory (rails.h). Where there is flow control nobody knows when a packet will get on: it is asked about.
 *
 * Each packet has a time of its own at which it is asked about, and one that was held up may be asked later than those
 * behind it. But none arrives before those that the switch was given earlier for the same host in the same priority: there
 * they keep their order, and a connection that did not would be answered with a NAK (IBA 9.7.5.2).
 *
 * A QP that has enough waiting pauses: a NIC takes the next packet of a send queue when it can send it.
 */
#include <stdlib.h>
#include <string.h>

#include "faults/rails.h"
#include "transport/net.h"
#include "transport/transport.h"

/* How much a QP gives the link ahead, in its time: what it takes a busy machine to come back to it. */
#define AHEAD_NS 500000
/* What a NIC has memory for, of packets that cannot be paused (datagrams, answers). */
#define MAX_WAITING ((size_t)32 << 20)

/* The TOS byte: what ECN may mark and has marked (RFC 3168), and what CNPs go by, DSCP 48. */
#define TOS_ECN 0x03
#define TOS_ECT0 0x02
#define TOS_CE 0x03
#define TOS_CNP 0xc0
#define CNP_PRIORITY 6

/* A packet that is still where it was is asked about again when it has waited so much longer. */
#define PATIENCE 8
#define SOONEST_NS 50000

enum stage { RATE, LINK, SWITCH, RESUME };

struct carried {
    uint64_t due_ns;
    uint64_t sequence; /* of two that are due at once, the first goes first */
    enum stage stage;
    uint32_t peer_ip;
    uint32_t qpn; /* RESUME, RATE */
    uint8_t tos, priority;
    struct fabric_ticket
        ticket;             /* LINK, SWITCH: its switch has flow control, and is asked. life 0: it has none */
    uint64_t since_ns;      /* and since when it is in this stage; 0 = nobody asked yet */
    struct carried *behind; /* RATE: the QP's next one. Only its first is in the heap */
    bool switched;          /* given to a switch with flow control: it has a place in its way */
    struct carried *ahead, *next;
    size_t place; /* in the heap */
    size_t len;
    uint8_t data[];
};

/* A heap by due_ns. */
struct srn_carry {
    struct carried **items;
    size_t count, capacity;
    size_t waiting; /* bytes for a rate or the link */
    uint64_t sequence;
    struct carried *last[FABRIC_WAYS]; /* given to the switch, of each way */
};

static bool before(const struct carried *a, const struct carried *b) {
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->sequence < b->sequence;
}

static void put(struct srn_carry *carry, size_t i, struct carried *item) {
    carry->items[i] = item;
    item->place = i;
}

static void rise(struct srn_carry *carry, size_t i, struct carried *item) {
    for (; i && before(item, carry->items[(i - 1) / 2]); i = (i - 1) / 2)
        put(carry, i, carry->items[(i - 1) / 2]);
    put(carry, i, item);
}

static bool push(struct srn_nic *nic, struct carried *item) {
    struct srn_carry *carry = nic->carry;
    size_t i = carry->count;

    if (i == carry->capacity) {
        size_t capacity = i ? 2 * i : 64;
        struct carried **items = realloc(carry->items, capacity * sizeof(struct carried *));

        if (!items)
            return false;
        carry->items = items;
        carry->capacity = capacity;
    }
    carry->count++;
    rise(carry, i, item);
    srn_timer_at(nic, item->due_ns);
    return true;
}

static struct carried *pop(struct srn_carry *carry) {
    struct carried *first = carry->items[0], *last = carry->items[--carry->count];
    size_t i = 0;

    for (;;) {
        size_t child = 2 * i + 1;

        if (child + 1 < carry->count && before(carry->items[child + 1], carry->items[child]))
            child++;
        if (child >= carry->count || !before(carry->items[child], last))
            break;
        put(carry, i, carry->items[child]);
        i = child;
    }
    if (carry->count)
        put(carry, i, last);
    return first;
}

static struct carried *new_item(struct srn_carry *carry, enum stage stage, uint64_t due_ns, size_t len) {
    struct carried *item = malloc(sizeof(*item) + len);

    if (item)
        *item = (struct carried){.due_ns = due_ns, .sequence = carry->sequence++, .stage = stage, .len = len};
    return item;
}

static struct srn_carry *get_carry(struct srn_nic *nic) {
    if (!nic->carry)
        nic->carry = calloc(1, sizeof(*nic->carry));
    return nic->carry;
}

/* The switch has it: it is the last on its way. */
static void join_way(struct srn_carry *carry, struct carried *item) {
    struct carried **last = &carry->last[item->ticket.way];

    item->switched = true;
    item->sequence = carry->sequence++;
    item->ahead = *last;
    if (item->ahead)
        item->ahead->next = item;
    *last = item;
}

/* It has arrived, or is lost. */
static void discard(struct srn_carry *carry, struct carried *item) {
    if (item->ahead)
        item->ahead->next = item->next;
    if (item->next)
        item->next->ahead = item->ahead;
    else if (item->switched)
        carry->last[item->ticket.way] = item->ahead;
    free(item);
}

/* This QP's next packet waits until the link has time for it, and its rate. */
static void pause(struct srn_nic *nic, struct srn_qp *qp, uint8_t priority, uint64_t until_ns) {
    struct carried *item;

    if (qp->type != IBV_QPT_RC || !qp->req.window)
        return;
    item = new_item(nic->carry, RESUME, until_ns, 0);
    if (!item)
        return;
    item->qpn = qp->qpn;
    item->priority = priority;
    if (push(nic, item))
        qp->req.window = 0;
    else
        free(item);
}

/* It has another stage before it: false if it is lost. */
static bool wait_for(struct srn_nic *nic, struct carried *item, enum stage stage, uint64_t due_ns) {
    item->stage = stage;
    item->due_ns = due_ns;
    if (push(nic, item))
        return true;
    free(item);
    return false;
}

static bool has_data(const struct carried *item) {
    return (item->tos & TOS_ECN) == TOS_ECT0;
}

/* All its bits are in the switch. */
static void forward(struct srn_nic *nic, struct carried *item) {
    struct fabric_fate fate =
        rails_forward(nic->port, item->peer_ip, item->due_ns, item->len, has_data(item));

    if (fate.marked)
        item->tos |= TOS_CE;
    if (fate.dropped)
        free(item);
    else
        wait_for(nic, item, SWITCH, fate.out_ns);
}

/* What has a rail with flow control done with it by now? */
static void look(struct srn_nic *nic, struct carried *item, uint64_t now_ns) {
    struct fabric_news news = rails_ask(nic->port, item->peer_ip, item->ticket, now_ns);
    uint64_t soonest = now_ns;

    if (item->stage == LINK && news.where != FABRIC_LINK) {
        nic->carry->waiting -= item->len;
        item->since_ns = 0;
        item->stage = SWITCH;
        if (!fault_passes(nic->port)) {
            nic->counters[SRN_CNT_TX_FILTERED]++;
            rails_forget(nic->port, item->ticket);
            discard(nic->carry, item);
            return;
        }
    }
    if (news.where == FABRIC_DROPPED || news.where == FABRIC_FREE) {
        discard(nic->carry, item);
        return;
    }
    if (news.where == FABRIC_OUT) {
        item->ticket.life = 0;
        item->tos |= news.marked ? TOS_CE : 0;
        /* So is the one ahead of it, or lost: it is asked about now. */
        if (item->ahead && item->ahead->ticket.life && item->ahead->due_ns > now_ns) {
            item->ahead->due_ns = now_ns;
            rise(nic->carry, item->ahead->place, item->ahead);
            srn_timer_at(nic, now_ns);
        }
    } else if (!item->since_ns) {
        item->since_ns = now_ns;
    } else if (!news.sending) {
        /* It was held up: an answer may say "soon" for as long as that takes. */
        soonest += SOONEST_NS + (now_ns - item->since_ns) / PATIENCE;
    }
    item->due_ns = news.at_ns > soonest ? news.at_ns : soonest;
    if (push(nic, item))
        return;
    nic->carry->waiting -= item->stage == LINK ? item->len : 0;
    discard(nic->carry, item); /* its ticket is one that nobody asks about any more */
}

/* The same of a rail with flow control. Returns when the link will have sent it, as it looks now. */
static uint64_t give_switch(struct srn_nic *nic, struct carried *item, uint64_t now_ns) {
    uint8_t priority = item->priority;

    item->ticket = rails_give(nic->port, item->peer_ip, priority, item->len, has_data(item), now_ns);
    if (!item->ticket.life) {
        nic->counters[SRN_CNT_TX_ERRORS]++;
        free(item);
        return now_ns;
    }
    join_way(nic->carry, item);
    item->stage = LINK;
    nic->carry->waiting += item->len;
    look(nic, item, now_ns);
    return rails_link_free(nic->port, priority, now_ns);
}

/* The link gets it, at the time that it was due. Returns when it is in the switch. */
static uint64_t give_link(struct srn_nic *nic, struct carried *item, uint64_t now_ns) {
    uint64_t sent;

    if (rails_switched(nic->port))
        return give_switch(nic, item, now_ns);
    sent = rails_send(nic->port, item->due_ns, item->len);
    item->due_ns = sent;
    /* Where this NIC is late, what the link sent before may still be here: that is in the switch first. */
    if (sent <= now_ns && !(nic->carry->count && nic->carry->items[0]->due_ns <= sent))
        forward(nic, item);
    else if (wait_for(nic, item, LINK, sent))
        nic->carry->waiting += item->len;
    else
        nic->counters[SRN_CNT_TX_ERRORS]++;
    return sent;
}

/* It waits until its QP's rate has something for it, behind those that do. */
static bool queue_up(struct srn_nic *nic, struct srn_qp *qp, struct carried *item) {
    struct srn_pace *pace = &qp->pace;

    item->qpn = qp->qpn;
    if (pace->last_waiting)
        pace->last_waiting->behind = item;
    else if (!wait_for(nic, item, RATE, pace->next_ns))
        return false;
    pace->last_waiting = item;
    pace->waiting_bytes += item->len;
    nic->carry->waiting += item->len;
    return true;
}

/* The first of a QP's packets that wait goes to the link. The QP may be gone, or have another connection. */
static void release(struct srn_nic *nic, struct carried *item, uint64_t now_ns) {
    struct srn_qp *qp = srn_qp_find(nic, item->qpn);
    struct carried *next = item->behind;

    item->behind = NULL;
    nic->carry->waiting -= item->len;
    if (qp) {
        qp->pace.waiting_bytes -= item->len < qp->pace.waiting_bytes ? item->len : qp->pace.waiting_bytes;
        if (qp->pace.last_waiting == item)
            qp->pace.last_waiting = NULL;
        if (has_data(item))
            srn_pace_sent(qp, item->due_ns, now_ns, item->len);
    }
    if (next) {
        next->due_ns = item->due_ns;
        if (qp && has_data(next) && srn_pace_waits(qp, next->due_ns))
            next->due_ns = qp->pace.next_ns;
        push(nic, next); /* there is room: where the first one was */
    }
    give_link(nic, item, now_ns);
}

void srn_carry(struct srn_nic *nic, uint32_t qpn, struct srn_peer to, const uint8_t *data, size_t len) {
    struct srn_carry *carry = get_carry(nic);
    struct srn_qp *qp = qpn ? srn_qp_find(nic, qpn) : NULL;
    uint64_t now = srn_now_ns(), next = 0;
    bool cnp = data[0] == WIRE_CNP;
    struct carried *item;

    item = carry && carry->waiting + len <= MAX_WAITING ? new_item(carry, RATE, now, len) : NULL;
    if (!item) {
        nic->counters[SRN_CNT_TX_ERRORS]++;
        return;
    }
    memcpy(item->data, data, len);
    item->peer_ip = to.ip;
    item->priority = cnp ? CNP_PRIORITY : to.priority;
    item->tos = cnp ? TOS_CNP : wire_opcode_flags(data[0]) & WIRE_F_PAYLOAD ? to.tos | TOS_ECT0 : to.tos;
    if (qp && !cnp && (qp->pace.last_waiting || (has_data(item) && srn_pace_waits(qp, now)))) {
        if (!queue_up(nic, qp, item)) {
            nic->counters[SRN_CNT_TX_ERRORS]++;
            return;
        }
    } else {
        if (qp && has_data(item))
            srn_pace_sent(qp, now, now, len);
        next = give_link(nic, item, now);
    }
    if (!qp)
        return;
    if (srn_pace_next(qp) > next)
        next = srn_pace_next(qp);
    if (next > now + AHEAD_NS)
        pause(nic, qp, to.priority, next - AHEAD_NS);
}

/* A link with flow control may have got nowhere since its QP paused: then that waits for longer. */
static bool still_busy(struct srn_nic *nic, struct carried *item, uint64_t now_ns) {
    uint64_t next = rails_switched(nic->port) ? rails_link_free(nic->port, item->priority, now_ns) : 0;

    if (next <= now_ns + AHEAD_NS)
        return false;
    item->due_ns = next - AHEAD_NS;
    return push(nic, item);
}

uint64_t srn_carry_run(struct srn_nic *nic, uint64_t now_ns) {
    struct srn_carry *carry = nic->carry;

    if (!carry)
        return 0;
    while (carry->count && carry->items[0]->due_ns <= now_ns) {
        struct carried *item = pop(carry);

        switch (item->stage) {
        case RATE:
            release(nic, item, now_ns);
            break;
        case LINK:
            if (item->ticket.life) {
                look(nic, item, now_ns);
                break;
            }
            carry->waiting -= item->len;
            /* What had not left the host is lost with its cable. */
            if (fault_passes(nic->port)) {
                forward(nic, item);
            } else {
                nic->counters[SRN_CNT_TX_FILTERED]++;
                free(item);
            }
            break;
        case SWITCH:
            if (item->ticket.life) {
                look(nic, item, now_ns);
                break;
            }
            if (item->ahead) {
                item->due_ns = item->ahead->due_ns; /* which is asked about then */
                push(nic, item);                    /* there is room: where it was */
                break;
            }
            nic->net->transmit(nic, item->peer_ip, item->data, item->len, item->tos);
            discard(carry, item);
            break;
        case RESUME:
            if (!still_busy(nic, item, now_ns)) {
                nic->net->resume(nic, item->qpn);
                free(item);
            }
            break;
        }
    }
    return carry->count ? carry->items[0]->due_ns : 0;
}

/* What is in the switch first, so that connections keep their order. */
static int in_order(const void *a, const void *b) {
    const struct carried *one = *(struct carried *const *)a, *two = *(struct carried *const *)b;

    if (one->switched != two->switched)
        return one->switched ? -1 : 1;
    if (one->switched)
        return one->sequence < two->sequence ? -1 : 1;
    if (one->stage != two->stage)
        return one->stage > two->stage ? -1 : 1;
    return before(one, two) ? -1 : 1;
}

void srn_carry_finish(struct srn_nic *nic, bool arrive) {
    struct srn_carry *carry = nic->carry;

    if (!carry)
        return;
    if (carry->count)
        qsort(carry->items, carry->count, sizeof(struct carried *), in_order);
    for (size_t i = 0; i < carry->count; i++) {
        struct srn_qp *qp = carry->items[i]->stage == RATE ? srn_qp_find(nic, carry->items[i]->qpn) : NULL;

        if (qp)
            qp->pace.last_waiting = NULL;
        for (struct carried *item = carry->items[i], *next; item; item = next) {
            next = item->behind;
            if (item->ticket.life)
                rails_forget(nic->port, item->ticket);
            if (arrive && item->stage != RESUME)
                nic->net->transmit(nic, item->peer_ip, item->data, item->len, item->tos);
            free(item);
        }
    }
    free(carry->items);
    free(carry);
    nic->carry = NULL;
}
