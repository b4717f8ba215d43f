/* SPDX-License-Identifier: BSD-3-Clause */
#include "fabric/switch.h"

#include <string.h>

#include "fabric/events.h"

/* Whoever has not asked for so long is gone. */
#define ABANDONED_NS 1000000000u
#define SWEEP_NS 10000000u
/* The heap has room for a packet on each link and on each way out, and a watchdog and an XON for each queue. */
#define MAX_EVENTS_BEFORE_XOFF (FABRIC_EVENTS - FABRIC_HOSTS * (2 + 2 * FABRIC_PRIORITIES))

static bool has(uint8_t bits, unsigned priority) {
    return bits >> priority & 1;
}

static uint64_t held(const struct fabric_fifo *fifo) {
    return fifo->entered - fifo->left;
}

static uint64_t time_ns(const struct fabric_host *host, uint64_t bytes) {
    return host->params.rate ? fabric_time_ns(host->params.rate, bytes) : 0;
}

static void append(struct fabric_switch *sw, struct fabric_fifo *fifo, uint32_t item) {
    struct fabric_packet *packet = &sw->packets[item - 1];

    packet->next = 0;
    packet->sending = false;
    packet->place = fifo->entered += packet->bytes;
    if (fifo->tail)
        sw->packets[fifo->tail - 1].next = item;
    else
        fifo->head = item;
    fifo->tail = item;
}

static uint32_t take(struct fabric_switch *sw, struct fabric_fifo *fifo) {
    uint32_t item = fifo->head;

    fifo->head = sw->packets[item - 1].next;
    if (!fifo->head)
        fifo->tail = 0;
    return item;
}

/* The highest priority that has a packet and is not held up; -1 = none. */
static int choose(const struct fabric_fifo *fifos, uint8_t held_up) {
    int priority = FABRIC_PRIORITIES - 1;

    while (priority >= 0 && (!fifos[priority].head || has(held_up, (unsigned)priority)))
        priority--;
    return priority;
}

static void release(struct fabric_switch *sw, uint32_t item) {
    struct fabric_packet *packet = &sw->packets[item - 1];

    packet->where = FABRIC_FREE;
    packet->life = 0;
    packet->next = sw->free;
    sw->free = item;
}

/* Its way is over: who has the ticket will ask. */
static void finish(struct fabric_switch *sw, uint32_t item, enum fabric_where where) {
    struct fabric_packet *packet = &sw->packets[item - 1];

    packet->where = (uint8_t)where;
    packet->at_ns = sw->now_ns;
    if (packet->forgotten)
        release(sw, item);
}

/* --- links and queues --- */

static void start_link(struct fabric_switch *sw, unsigned index) {
    struct fabric_host *host = &sw->hosts[index];
    struct fabric_packet *packet;
    int priority;

    if (host->link_packet || (priority = choose(host->nic, host->paused)) < 0)
        return;
    host->link_packet = take(sw, &host->nic[priority]);
    packet = &sw->packets[host->link_packet - 1];
    host->nic[priority].left += packet->bytes;
    host->link_until_ns = sw->now_ns + time_ns(host, packet->bytes);
    packet->at_ns = host->link_until_ns;
    packet->sending = true;
    fabric_events_push(sw, host->link_until_ns, FABRIC_SENT, index, 0);
}

/* One event at a time: it looks how long the pause is that there is then. */
static void arm_watchdog(struct fabric_switch *sw, unsigned index, unsigned priority) {
    struct fabric_host *host = &sw->hosts[index];

    if (!host->params.watchdog_ns || has(host->watched, priority))
        return;
    host->watched |= (uint8_t)(1u << priority);
    fabric_events_push(sw, host->blocked_ns[priority] + host->params.watchdog_ns, FABRIC_WATCHDOG, index,
                       priority);
}

/* The host takes no packet: it pauses those priorities that have one for it. */
static void push_back(struct fabric_switch *sw, unsigned index) {
    struct fabric_host *host = &sw->hosts[index];

    for (unsigned priority = 0; priority < FABRIC_PRIORITIES; priority++) {
        if (!host->out[priority].head || has(host->blocked, priority))
            continue;
        host->blocked |= (uint8_t)(1u << priority);
        host->blocked_ns[priority] = sw->now_ns;
        host->prio[priority].tx_pause++;
        arm_watchdog(sw, index, priority);
    }
}

static void start_out(struct fabric_switch *sw, unsigned index) {
    struct fabric_host *host = &sw->hosts[index];
    struct fabric_packet *packet;
    int priority;

    if (host->out_packet)
        return;
    if (host->still && host->params.pfc)
        push_back(sw, index);
    if ((priority = choose(host->out, host->blocked)) < 0)
        return;
    host->out_packet = take(sw, &host->out[priority]);
    packet = &sw->packets[host->out_packet - 1];
    host->out_until_ns = sw->now_ns + time_ns(host, packet->bytes);
    packet->at_ns = host->out_until_ns;
    packet->sending = true;
    fabric_events_push(sw, host->out_until_ns, FABRIC_LEFT, index, 0);
}

static void hear_pause(struct fabric_switch *sw, unsigned index, unsigned priority, bool xoff) {
    struct fabric_host *host = &sw->hosts[index];

    host->prio[priority].rx_pause++;
    if (xoff && !has(host->paused, priority)) {
        host->paused |= (uint8_t)(1u << priority);
        host->paused_ns[priority] = sw->now_ns;
    } else if (!xoff && has(host->paused, priority)) {
        host->paused &= (uint8_t) ~(1u << priority);
        host->prio[priority].rx_pause_ns += sw->now_ns - host->paused_ns[priority];
        start_link(sw, index);
    }
}

/* The switch tells a host to pause, or to go on: it hears of it later. Where too many are told already, not now. */
static void send_pause(struct fabric_switch *sw, unsigned index, unsigned priority, bool xoff) {
    struct fabric_host *host = &sw->hosts[index];

    if (xoff && sw->event_count >= MAX_EVENTS_BEFORE_XOFF)
        return;
    host->xoff = (uint8_t)(xoff ? host->xoff | 1u << priority : host->xoff & ~(1u << priority));
    /* None overtakes another one, not even where the way was just made shorter. */
    if (host->heard_ns[priority] < sw->now_ns + host->params.delay_ns)
        host->heard_ns[priority] = sw->now_ns + host->params.delay_ns;
    fabric_events_push(sw, host->heard_ns[priority], xoff ? FABRIC_XOFF : FABRIC_XON, index, priority);
}

/* A packet of this host's is not in the switch any more. */
static void leave(struct fabric_switch *sw, const struct fabric_packet *packet) {
    struct fabric_host *src = &sw->hosts[packet->src];
    unsigned priority = packet->priority;

    src->inside[priority] -= packet->bytes;
    if (has(src->xoff, priority) && (src->inside[priority] <= src->params.xon || !src->params.pfc))
        send_pause(sw, packet->src, priority, false);
}

/* All bits of a packet are in the switch. */
static void enter(struct fabric_switch *sw, uint32_t item) {
    struct fabric_packet *packet = &sw->packets[item - 1];
    struct fabric_host *src = &sw->hosts[packet->src], *dst = &sw->hosts[packet->dst];
    unsigned priority = packet->priority;
    struct fabric_fifo *queue = &dst->out[priority];
    uint64_t inside = src->inside[priority] + packet->bytes, waiting = 0;

    for (unsigned i = 0; i < FABRIC_PRIORITIES; i++)
        waiting += held(&dst->out[i]);
    if (has(dst->storm, priority)) {
        dst->prio[priority].watchdog_dropped++;
        finish(sw, item, FABRIC_DROPPED);
        return;
    }
    /* Who can be paused has a room of its own; all others share the queue's buffer. */
    if (src->params.pfc ? inside > src->params.xoff + src->params.headroom
                        : dst->params.rate && waiting + packet->bytes > dst->params.buffer) {
        dst->prio[priority].dropped++;
        dst->counters.dropped++;
        finish(sw, item, FABRIC_DROPPED);
        return;
    }
    packet->marked = packet->ect && fabric_marks(&dst->random, &dst->params, held(queue));
    dst->counters.marked += packet->marked;
    packet->where = FABRIC_QUEUE;
    append(sw, queue, item);
    if (waiting + packet->bytes > dst->counters.queue_peak)
        dst->counters.queue_peak = waiting + packet->bytes;
    src->inside[priority] = inside;
    if (src->params.pfc && inside >= src->params.xoff && !has(src->xoff, priority))
        send_pause(sw, packet->src, priority, true);
    start_out(sw, packet->dst);
}

static void link_sent(struct fabric_switch *sw, unsigned index) {
    struct fabric_host *host = &sw->hosts[index];
    uint32_t item = host->link_packet;

    host->link_packet = 0;
    if (sw->packets[item - 1].dst == FABRIC_ELSEWHERE)
        finish(sw, item, FABRIC_OUT);
    else
        enter(sw, item);
    start_link(sw, index);
}

static void left_switch(struct fabric_switch *sw, unsigned index) {
    struct fabric_host *host = &sw->hosts[index];
    uint32_t item = host->out_packet;
    struct fabric_packet *packet = &sw->packets[item - 1];

    host->out_packet = 0;
    host->out[packet->priority].left += packet->bytes;
    host->counters.packets++;
    host->counters.bytes += packet->bytes;
    leave(sw, packet);
    finish(sw, item, FABRIC_OUT);
    start_out(sw, index);
}

/* Has the host paused this queue for too long? */
static void watch(struct fabric_switch *sw, unsigned index, unsigned priority) {
    struct fabric_host *host = &sw->hosts[index];
    uint32_t item;

    host->watched &= (uint8_t) ~(1u << priority);
    if (!has(host->blocked, priority) || has(host->storm, priority))
        return;
    if (sw->now_ns - host->blocked_ns[priority] < host->params.watchdog_ns) {
        arm_watchdog(sw, index, priority);
        return;
    }
    host->storm |= (uint8_t)(1u << priority);
    host->prio[priority].storms++;
    while (host->out[priority].head) {
        item = take(sw, &host->out[priority]);
        host->out[priority].left += sw->packets[item - 1].bytes;
        host->prio[priority].watchdog_dropped++;
        leave(sw, &sw->packets[item - 1]);
        finish(sw, item, FABRIC_DROPPED);
    }
}

static void happen(struct fabric_switch *sw, const struct fabric_event *event) {
    switch ((enum fabric_event_kind)event->kind) {
    case FABRIC_SENT:
        link_sent(sw, event->host);
        break;
    case FABRIC_LEFT:
        left_switch(sw, event->host);
        break;
    case FABRIC_XOFF:
    case FABRIC_XON:
        hear_pause(sw, event->host, event->priority, event->kind == FABRIC_XOFF);
        break;
    case FABRIC_WATCHDOG:
        watch(sw, event->host, event->priority);
        break;
    }
}

/* --- for callers --- */

void fabric_switch_run(struct fabric_switch *sw, uint64_t now_ns) {
    struct fabric_event event;

    while (fabric_events_pop(sw, now_ns, &event)) {
        sw->now_ns = event.at_ns;
        happen(sw, &event);
    }
    if (sw->now_ns < now_ns)
        sw->now_ns = now_ns;
}

void fabric_switch_reset(struct fabric_switch *sw) {
    sw->event_count = 0;
    sw->free = 0;
    sw->now_ns = sw->swept_ns = 0;
    for (uint32_t item = FABRIC_PACKETS; item; item--)
        release(sw, item);
    for (unsigned index = 0; index < FABRIC_HOSTS; index++) {
        struct fabric_host *host = &sw->hosts[index], kept = *host;

        memset(host, 0, sizeof(*host));
        host->params = kept.params;
        host->still = kept.still;
        host->random = kept.random ? kept.random : index + 1; /* no two ports mark alike */
        host->counters = kept.counters;
        memcpy(host->prio, kept.prio, sizeof(host->prio));
    }
}

void fabric_switch_set(struct fabric_switch *sw, unsigned index, const struct fabric_params *params) {
    struct fabric_host *host = &sw->hosts[index];

    host->params = *params;
    /* Who cannot be paused any more, or has more room now, is not left waiting for an XON. */
    for (unsigned priority = 0; priority < FABRIC_PRIORITIES; priority++)
        if (has(host->xoff, priority) && (!params->pfc || host->inside[priority] <= params->xon))
            send_pause(sw, index, priority, false);
    if (!params->pfc)
        host->blocked = host->storm = 0;
    for (unsigned priority = 0; priority < FABRIC_PRIORITIES; priority++)
        if (has(host->blocked, priority))
            arm_watchdog(sw, index, priority);
    start_out(sw, index);
}

void fabric_switch_still(struct fabric_switch *sw, unsigned index, bool still, uint64_t now_ns) {
    struct fabric_host *host = &sw->hosts[index];

    fabric_switch_run(sw, now_ns);
    if (host->still == still)
        return;
    host->still = still;
    for (unsigned priority = 0; !still && priority < FABRIC_PRIORITIES; priority++)
        host->prio[priority].tx_pause += has(host->blocked, priority);
    if (!still)
        host->blocked = host->storm = 0;
    start_out(sw, index);
}

/* Packets whose senders did not live to ask. */
static void sweep(struct fabric_switch *sw) {
    if (sw->now_ns < sw->swept_ns + SWEEP_NS)
        return;
    sw->swept_ns = sw->now_ns;
    for (uint32_t item = 1; item <= FABRIC_PACKETS; item++) {
        const struct fabric_packet *packet = &sw->packets[item - 1];

        if (packet->where >= FABRIC_OUT && packet->at_ns + ABANDONED_NS < sw->now_ns)
            release(sw, item);
    }
}

struct fabric_ticket fabric_switch_send(struct fabric_switch *sw, unsigned src, unsigned dst,
                                        unsigned priority, uint32_t bytes, bool ect, uint64_t now_ns) {
    struct fabric_packet *packet;
    uint32_t item;

    fabric_switch_run(sw, now_ns);
    if (!sw->free)
        sweep(sw);
    item = sw->free;
    if (!item)
        return (struct fabric_ticket){0};
    packet = &sw->packets[item - 1];
    sw->free = packet->next;
    *packet = (struct fabric_packet){.life = ++sw->life,
                                     .bytes = bytes,
                                     .src = (uint8_t)src,
                                     .dst = (uint8_t)dst,
                                     .priority = (uint8_t)priority,
                                     .where = FABRIC_LINK,
                                     .ect = ect};
    append(sw, &sw->hosts[src].nic[priority], item);
    start_link(sw, src);
    return (struct fabric_ticket){packet->life, item - 1, dst * FABRIC_PRIORITIES + priority};
}

static struct fabric_packet *find(struct fabric_switch *sw, struct fabric_ticket ticket) {
    struct fabric_packet *packet = &sw->packets[ticket.index];

    return ticket.life && ticket.index < FABRIC_PACKETS && packet->life == ticket.life ? packet : NULL;
}

/* What is before this place in a queue and in those above it that are not held up, with it: bytes. */
static uint64_t ahead(const struct fabric_fifo *fifos, uint8_t held_up, unsigned priority, uint64_t place) {
    uint64_t bytes = place - fifos[priority].left;

    while (++priority < FABRIC_PRIORITIES)
        bytes += has(held_up, priority) ? 0 : held(&fifos[priority]);
    return bytes;
}

static uint64_t link_time(const struct fabric_switch *sw, const struct fabric_host *host, unsigned priority,
                          uint64_t place) {
    uint64_t start = host->link_packet ? host->link_until_ns : sw->now_ns;

    if (has(host->paused, priority) && host->inside[priority] > host->params.xon)
        start += time_ns(host, host->inside[priority] - host->params.xon) + host->params.delay_ns;
    return start + time_ns(host, ahead(host->nic, host->paused, priority, place));
}

static uint64_t out_time(const struct fabric_switch *sw, const struct fabric_packet *packet) {
    const struct fabric_host *host = &sw->hosts[packet->dst];
    uint64_t at_ns =
        sw->now_ns + time_ns(host, ahead(host->out, host->blocked, packet->priority, packet->place));
    const struct fabric_packet *sent;

    if (!host->out_packet)
        return at_ns;
    sent = &sw->packets[host->out_packet - 1];
    /* What is left of the one that is being sent; where it goes first, all of it is counted already. */
    at_ns += host->out_until_ns - sw->now_ns;
    return sent->priority < packet->priority ? at_ns : at_ns - time_ns(host, sent->bytes);
}

struct fabric_news fabric_switch_ask(struct fabric_switch *sw, struct fabric_ticket ticket, uint64_t now_ns) {
    struct fabric_packet *packet;
    struct fabric_news news = {.where = FABRIC_FREE};

    fabric_switch_run(sw, now_ns);
    packet = find(sw, ticket);
    if (!packet)
        return news;
    news = (struct fabric_news){packet->where, packet->at_ns, packet->marked, packet->sending};
    if (packet->where == FABRIC_LINK && !packet->sending)
        news.at_ns = link_time(sw, &sw->hosts[packet->src], packet->priority, packet->place);
    else if (packet->where == FABRIC_QUEUE && !packet->sending)
        news.at_ns = out_time(sw, packet);
    else if (packet->where >= FABRIC_OUT)
        release(sw, ticket.index + 1);
    return news;
}

void fabric_switch_forget(struct fabric_switch *sw, struct fabric_ticket ticket) {
    struct fabric_packet *packet = find(sw, ticket);

    if (packet && packet->where >= FABRIC_OUT)
        release(sw, ticket.index + 1);
    else if (packet)
        packet->forgotten = true;
}

uint64_t fabric_switch_link_free(struct fabric_switch *sw, unsigned host, unsigned priority,
                                 uint64_t now_ns) {
    fabric_switch_run(sw, now_ns);
    return link_time(sw, &sw->hosts[host], priority, sw->hosts[host].nic[priority].entered);
}

uint64_t fabric_switch_queue(struct fabric_switch *sw, unsigned host, uint64_t now_ns) {
    uint64_t bytes = 0;

    fabric_switch_run(sw, now_ns);
    for (unsigned priority = 0; priority < FABRIC_PRIORITIES; priority++)
        bytes += held(&sw->hosts[host].out[priority]);
    return bytes;
}
