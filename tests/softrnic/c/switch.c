/* SPDX-License-Identifier: BSD-3-Clause */
/* A rail's switch step by step: times, what may be asked of a ticket, and what becomes of packets nobody asks about. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fabric/switch.h"

/* At 8 Gb/s a byte takes 1 ns. */
#define BYTES 1000

static struct fabric_switch rail;
static struct fabric_params params = {.rate = 8000000000,
                                      .delay_ns = 100,
                                      .buffer = 20000,
                                      .pfc = true,
                                      .xoff = 10000,
                                      .xon = 5000,
                                      .headroom = 10000};

static int wrong(const char *what) {
    fprintf(stderr, "not true: %s\n", what);
    return 1;
}

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition))                                                                                    \
            return wrong(#condition);                                                                        \
    } while (0)

static void begin(void) {
    memset(&rail, 0, sizeof(rail));
    fabric_switch_reset(&rail);
    for (unsigned host = 0; host < FABRIC_HOSTS; host++)
        fabric_switch_set(&rail, host, &params);
}

static struct fabric_ticket send(unsigned from, unsigned to, unsigned priority, uint64_t now) {
    return fabric_switch_send(&rail, from, to, priority, BYTES, false, now);
}

static bool is_at(struct fabric_ticket ticket, uint64_t now, enum fabric_where where, uint64_t at_ns) {
    struct fabric_news news = fabric_switch_ask(&rail, ticket, now);

    return news.where == where && news.at_ns == at_ns;
}

/* What is foretold comes true where nothing comes between, and each answer ends what it should. */
static int check_times(void) {
    struct fabric_ticket first, second, above;

    begin();
    first = send(0, 1, 3, 50);
    second = send(0, 1, 3, 50);
    CHECK(is_at(first, 50, FABRIC_LINK, 1050) && is_at(second, 50, FABRIC_LINK, 2050));
    above = send(0, 1, 4, 60); /* goes before the second, not before the first: that is begun */
    CHECK(is_at(above, 60, FABRIC_LINK, 2050) && is_at(second, 60, FABRIC_LINK, 3050));
    CHECK(fabric_switch_link_free(&rail, 0, 3, 60) == 3050 &&
          fabric_switch_link_free(&rail, 0, 4, 60) == 2050);
    CHECK(is_at(first, 1050, FABRIC_QUEUE, 2050) && fabric_switch_queue(&rail, 1, 1050) == BYTES);
    CHECK(is_at(first, 5000, FABRIC_OUT, 2050) && is_at(first, 5000, FABRIC_FREE, 0));
    CHECK(is_at(above, 5000, FABRIC_OUT, 3050) && is_at(second, 5000, FABRIC_OUT, 4050));
    CHECK(is_at(send(0, FABRIC_ELSEWHERE, 0, 6000), 9000, FABRIC_OUT, 7000));
    CHECK(is_at((struct fabric_ticket){0}, 9000, FABRIC_FREE, 0));
    CHECK(is_at((struct fabric_ticket){.life = 7, .index = FABRIC_PACKETS + 1}, 9000, FABRIC_FREE, 0));
    return 0;
}

/* XOFF takes a delay to be heard; what is being sent is finished; the other priority goes on. */
static int check_pause(void) {
    const struct fabric_host *host = &rail.hosts[0];
    struct fabric_ticket last = {0}, other;

    begin();
    rail.hosts[1].params.rate = params.rate / 10; /* a packet in 1 us, out in 10 us */
    for (int i = 0; i < 20; i++)
        last = send(0, 1, 3, 0);
    fabric_switch_run(&rail, 10099);
    CHECK(host->xoff == 1 << 3 && !host->paused && host->inside[3] == 10 * BYTES);
    fabric_switch_run(&rail, 12000);
    CHECK(host->paused == 1 << 3 && host->inside[3] == 10 * BYTES && !host->link_packet);
    other = send(0, 2, 5, 12000);
    CHECK(is_at(other, 20000, FABRIC_OUT, 14000));
    fabric_switch_run(&rail, 1000 + 6 * 10000 + 99);
    CHECK(!host->xoff && host->paused);
    fabric_switch_run(&rail, 1000 + 6 * 10000 + 100);
    CHECK(!host->paused && host->link_packet && host->prio[3].rx_pause == 2);
    CHECK(host->prio[3].rx_pause_ns == 61100 - 10100);
    CHECK(is_at(last, 300000, FABRIC_OUT, 201000) && rail.hosts[1].counters.dropped == 0);
    return 0;
}

/* Who gives packets and never asks leaves no trace, and a switch that is found in pieces begins anew. */
static int check_forgotten(void) {
    struct fabric_ticket ticket = {0}, kept;

    begin();
    ticket = send(0, 1, 0, 0);
    fabric_switch_forget(&rail, ticket);
    CHECK(is_at(ticket, 500, FABRIC_LINK, 1000) && is_at(ticket, 5000, FABRIC_FREE, 0));
    ticket = send(0, 1, 0, 5000);
    fabric_switch_run(&rail, 9000);
    fabric_switch_forget(&rail, ticket);
    CHECK(is_at(ticket, 9000, FABRIC_FREE, 0));
    for (int i = 0; i < FABRIC_PACKETS; i++)
        CHECK(send((unsigned)i % 32, 32 + (unsigned)i % 32, 0, 10000).life);
    CHECK(!send(0, 1, 0, 10000).life);
    CHECK(!send(0, 1, 0, 500000000).life); /* they are all out, but perhaps somebody will ask */
    kept = send(0, 1, 0, 1600000000);
    CHECK(kept.life && is_at(kept, 1600000000, FABRIC_LINK, 1600001000));
    fabric_switch_reset(&rail);
    CHECK(is_at(kept, 1600000000, FABRIC_FREE, 0) && rail.hosts[32].counters.packets > 0);
    CHECK(is_at(send(0, 1, 0, 1600000000), 1700000000, FABRIC_OUT, 1600002000));
    return 0;
}

/* More pauses than may be under way: some are not sent, and nobody is left paused. */
static int check_long_ways(void) {
    uint32_t most = 0;

    begin();
    for (unsigned host = 0; host < FABRIC_HOSTS; host++) {
        rail.hosts[host].params.delay_ns = 1000000000;
        rail.hosts[host].params.xoff = rail.hosts[host].params.xon = BYTES;
        rail.hosts[host].params.headroom = 1000 * BYTES;
    }
    for (int i = 0; i < FABRIC_PACKETS; i++)
        send((unsigned)i % 32, 32 + (unsigned)i % 32, (unsigned)i / 32 % 8, 0);
    for (uint64_t now = 0; now < 100000000; now += 1000) {
        fabric_switch_run(&rail, now);
        CHECK(rail.event_count <= FABRIC_EVENTS);
        most = rail.event_count > most ? rail.event_count : most;
    }
    CHECK(most > FABRIC_EVENTS / 3);
    fabric_switch_run(&rail, UINT64_C(100000000000));
    for (unsigned host = 0; host < 32; host++)
        CHECK(!rail.hosts[host].xoff && !rail.hosts[host].paused);
    CHECK(rail.event_count == 0 && rail.hosts[32].counters.packets == FABRIC_PACKETS / 32);
    return 0;
}

/* The way to a host is made shorter, and flow control switched off, while a pause is under way to it. */
static int check_changes(void) {
    struct fabric_params other = params;

    begin();
    rail.hosts[0].params.delay_ns = 1000000;
    rail.hosts[1].params.rate = params.rate / 10;
    for (int i = 0; i < 20; i++)
        send(0, 1, 0, 0);
    fabric_switch_run(&rail, 20000);
    CHECK(rail.hosts[0].xoff == 1 && !rail.hosts[0].paused);
    other.pfc = false;
    fabric_switch_set(&rail, 0, &other);
    CHECK(!rail.hosts[0].xoff);
    fabric_switch_run(&rail, 2000000);
    CHECK(!rail.hosts[0].paused && rail.hosts[0].prio[0].rx_pause == 2 && rail.event_count == 0);
    return 0;
}

/* --- anything, in any order --- */

static uint64_t random_state;

static unsigned pick(unsigned below) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (unsigned)((z ^ z >> 31) % below);
}

/* What hosts have in the switch is what is in its queues. */
static int check_counts(void) {
    static uint64_t inside[FABRIC_HOSTS][FABRIC_PRIORITIES], queued[FABRIC_HOSTS][FABRIC_PRIORITIES];

    memset(inside, 0, sizeof(inside));
    memset(queued, 0, sizeof(queued));
    for (unsigned i = 0; i < FABRIC_PACKETS; i++) {
        const struct fabric_packet *packet = &rail.packets[i];

        if (packet->where == FABRIC_QUEUE) {
            inside[packet->src][packet->priority] += packet->bytes;
            queued[packet->dst][packet->priority] += packet->bytes;
        }
    }
    for (unsigned host = 0; host < FABRIC_HOSTS; host++)
        for (unsigned p = 0; p < FABRIC_PRIORITIES; p++) {
            const struct fabric_fifo *fifo = &rail.hosts[host].out[p];

            CHECK(rail.hosts[host].inside[p] == inside[host][p]);
            CHECK(fifo->entered - fifo->left == queued[host][p]);
        }
    CHECK(rail.event_count <= FABRIC_EVENTS);
    return 0;
}

static void change(unsigned host) {
    struct fabric_params other = params;

    other.pfc = pick(4) != 0;
    other.rate = pick(3) ? params.rate / (1 + pick(20)) : pick(2) * params.rate;
    other.delay_ns = pick(2) ? pick(1000) : pick(1000000);
    other.xoff = pick(20 * BYTES);
    other.xon = pick((unsigned)other.xoff + 1);
    other.headroom = 20 * BYTES;
    other.watchdog_ns = pick(2) * (1000 + pick(100000));
    fabric_switch_set(&rail, host, &other);
}

/* At the end nobody is paused, nothing is left in a queue, and there is room for as many packets as before. */
static int check_anything(uint64_t seed) {
    struct fabric_ticket tickets[256] = {{0}};
    uint64_t now = 1000;
    unsigned room = 0;

    random_state = seed;
    begin();
    for (int step = 0; step < 20000; step++) {
        unsigned host = pick(6), at = pick(256), what = pick(100);

        now += pick(3) ? pick(500) : pick(5000);
        if (what < 60) {
            fabric_switch_forget(&rail, tickets[at]);
            tickets[at] = fabric_switch_send(&rail, host, pick(20) ? pick(6) : FABRIC_ELSEWHERE, pick(3),
                                             40 + pick(4 * BYTES), pick(2), now);
            CHECK(tickets[at].life);
        } else if (what < 97) {
            struct fabric_news news = fabric_switch_ask(&rail, tickets[at], now);

            CHECK(news.where == FABRIC_FREE || news.where >= FABRIC_OUT ? news.at_ns <= now
                                                                        : news.at_ns >= now);
        } else if (what < 99) {
            fabric_switch_still(&rail, host, pick(2), now);
        } else {
            fabric_switch_run(&rail, now);
            change(host);
        }
        if (step % 100 == 0 && check_counts())
            return 1;
    }
    for (unsigned host = 0; host < FABRIC_HOSTS; host++)
        fabric_switch_still(&rail, host, false, now);
    fabric_switch_run(&rail, now += UINT64_C(100000000000));
    for (unsigned i = 0; i < 256; i++)
        fabric_switch_forget(&rail, tickets[i]);
    for (uint32_t item = rail.free; item; item = rail.packets[item - 1].next)
        room++;
    CHECK(room == FABRIC_PACKETS && rail.event_count == 0 && check_counts() == 0);
    for (unsigned host = 0; host < FABRIC_HOSTS; host++) {
        const struct fabric_host *it = &rail.hosts[host];

        CHECK(!it->xoff && !it->paused && !it->blocked && !it->storm && !it->link_packet && !it->out_packet);
    }
    return 0;
}

/* switch: the steps; switch FIRST LAST: anything, with these seeds. */
int main(int argc, char **argv) {
    if (argc != 3)
        return check_changes() || check_times() || check_pause() || check_forgotten() || check_long_ways();
    for (uint64_t seed = strtoull(argv[1], NULL, 10); seed <= strtoull(argv[2], NULL, 10); seed++)
        if (check_anything(seed)) {
            fprintf(stderr, "seed %" PRIu64 "\n", seed);
            return 1;
        }
    return 0;
}
