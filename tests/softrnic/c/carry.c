/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Packets that a NIC carries over a rail, in virtual time: none overtakes another one of its connection, and none waits
 * for that longer than the network takes.
 *
 *   carry FIRST LAST [finish]      seeds, with flow control; finish: the process ends in the midst of it
 *   carry FIRST LAST paced         without it; the connections keep to a rate of their own
 *   carry still MS                 a host takes nothing for so long; then packets come evenly, and none of these waits
 *
 * The NIC is host 0's; the others' packets compete with its own for the switch and stand in nobody's way otherwise. It is
 * late at times, as on a busy machine.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "faults/rails.h"
#include "transport/net.h"
#include "transport/transport.h"

#define HOSTS 4
#define FLOWS 6
#define STEPS 4000
#define LATEST_NS 1500000 /* at most, of a NIC that has something to do */

struct content {
    unsigned flow;
    uint32_t number;
};

static struct fabric_switch rail;
static struct fabric_params params = {.rate = 80000000,
                                      .delay_ns = 1000,
                                      .buffer = 1000000,
                                      .pfc = true,
                                      .xoff = 50000,
                                      .xon = 47000,
                                      .headroom = 20000};
static uint64_t now, seed, begun;
static uint32_t given[FLOWS], arrived[FLOWS];
static unsigned late; /* packets that came behind a later one of their flow */

static bool paced;
static struct srn_qp qps[FLOWS];             /* number 1 and on */
static uint64_t link_free, port_free[HOSTS]; /* when the last packet has left the NIC, and the switch */

static uint64_t any(uint64_t below) {
    seed = seed * 6364136223846793005 + 1442695040888963407;
    return (seed >> 33) % below;
}

/* --- what the carrier stands on, but for the switch --- */

uint64_t srn_now_ns(void) {
    return now;
}

void srn_timer_at(struct srn_nic *nic, uint64_t at_ns) {
    (void)nic, (void)at_ns;
}

/* How long a packet takes at 1/n of the rail's rate. */
static uint64_t takes(size_t len, unsigned n) {
    return len * 8 * 1000000000 / params.rate * n;
}

void srn_pace_sent(struct srn_qp *qp, uint64_t due_ns, uint64_t now_ns, size_t len) {
    (void)now_ns;
    qp->pace.next_ns = due_ns + takes(len, 2);
}

bool srn_pace_waits(const struct srn_qp *qp, uint64_t now_ns) {
    return qp->pace.next_ns > now_ns;
}

uint64_t srn_pace_next(const struct srn_qp *qp) {
    return qp->pace.next_ns + takes(qp->pace.waiting_bytes, 2);
}

struct srn_qp *srn_qp_find(struct srn_nic *nic, uint32_t qpn) {
    (void)nic;
    return &qps[qpn - 1];
}

bool fault_passes(const struct fault_port *port) {
    (void)port;
    return true;
}

uint32_t wire_opcode_flags(uint8_t opcode) {
    (void)opcode;
    return WIRE_F_PAYLOAD;
}

uint64_t rails_send(const struct fault_port *port, uint64_t now_ns, size_t len) {
    (void)port;
    link_free = (now_ns > link_free ? now_ns : link_free) + takes(len, 1);
    return link_free;
}

struct fabric_fate rails_forward(const struct fault_port *port, uint32_t peer_ip, uint64_t now_ns, size_t len,
                                 bool ect) {
    uint64_t *free = &port_free[peer_ip];

    (void)port, (void)ect;
    *free = (now_ns > *free ? now_ns : *free) + takes(len, 1);
    return (struct fabric_fate){.out_ns = *free};
}

bool rails_switched(const struct fault_port *port) {
    (void)port;
    return !paced;
}

/* An address is a host's number. */
struct fabric_ticket rails_give(const struct fault_port *port, uint32_t peer_ip, unsigned priority,
                                size_t len, bool ect, uint64_t now_ns) {
    (void)port;
    return fabric_switch_send(&rail, 0, peer_ip, priority, (uint32_t)len, ect, now_ns);
}

struct fabric_news rails_ask(const struct fault_port *port, uint32_t peer_ip, struct fabric_ticket ticket,
                             uint64_t now_ns) {
    struct fabric_news news = fabric_switch_ask(&rail, ticket, now_ns);

    (void)port;
    if (news.where == FABRIC_OUT)
        news.at_ns += rail.hosts[peer_ip].params.delay_ns;
    return news;
}

void rails_forget(const struct fault_port *port, struct fabric_ticket ticket) {
    (void)port;
    fabric_switch_forget(&rail, ticket);
}

uint64_t rails_link_free(const struct fault_port *port, unsigned priority, uint64_t now_ns) {
    (void)port;
    return fabric_switch_link_free(&rail, 0, priority, now_ns);
}

static void transmit(struct srn_nic *nic, uint32_t peer_ip, const uint8_t *data, size_t len, uint8_t tos) {
    struct content content;

    (void)nic, (void)peer_ip, (void)len, (void)tos;
    memcpy(&content, data + 1, sizeof(content));
    if (content.number <= arrived[content.flow]) {
        fprintf(stderr, "seed %" PRIu64 ": flow %u: packet %u behind packet %u\n", begun, content.flow,
                content.number, arrived[content.flow]);
        late++;
        return;
    }
    arrived[content.flow] = content.number;
}

static void resume(struct srn_nic *nic, uint32_t qpn) {
    (void)nic, (void)qpn;
}

/* --- who sends --- */

/* Two connections to each of the other hosts, which share a priority or do not. */
static void give(struct srn_nic *nic, unsigned flow) {
    uint8_t data[4096] = {0};
    struct content content = {flow, ++given[flow]};
    struct srn_peer to = {.ip = 1 + flow % (HOSTS - 1), .priority = (uint8_t)(flow == FLOWS - 1 ? 3 : 0)};

    data[0] = 1;
    memcpy(data + 1, &content, sizeof(content));
    srn_carry(nic, paced ? flow + 1 : 0, to, data, any(4) ? sizeof(data) : 64);
}

/* The others' packets: nobody asks about them. */
static void compete(void) {
    unsigned from = 1 + (unsigned)any(HOSTS - 1), to = 1 + (unsigned)any(HOSTS - 1);

    if (from != to && fabric_switch_queue(&rail, to, now) < 200000)
        fabric_switch_forget(&rail, fabric_switch_send(&rail, from, to, any(8) ? 0 : 3, 4096, false, now));
}

static void step(struct srn_nic *nic) {
    uint64_t due = srn_carry_run(nic, now), free = now + 100000 + any(400000);
    unsigned flow = (unsigned)any(FLOWS);

    if (given[flow] - arrived[flow] < 24)
        give(nic, flow);
    for (uint64_t i = paced ? 0 : any(3); i; i--)
        compete();
    if (!paced && !any(100))
        fabric_switch_still(&rail, 1 + (unsigned)any(HOSTS - 1), any(2), now);
    if (due && due < free)
        now = due > now ? due : now;
    else
        now = free;
    if (!any(8))
        now += any(LATEST_NS);
}

static unsigned run(uint64_t number, bool finish) {
    struct srn_net net = {.transmit = transmit, .resume = resume};
    struct srn_nic nic = {.net = &net};

    seed = begun = number;
    now = 1000000;
    late = 0;
    memset(given, 0, sizeof(given));
    memset(arrived, 0, sizeof(arrived));
    memset(qps, 0, sizeof(qps));
    for (unsigned flow = 0; flow < FLOWS; flow++)
        qps[flow].qpn = flow + 1;
    link_free = 0;
    memset(port_free, 0, sizeof(port_free));
    memset(&rail, 0, sizeof(rail));
    fabric_switch_reset(&rail);
    for (unsigned host = 0; host < HOSTS; host++)
        fabric_switch_set(&rail, host, &params);
    for (int i = 0; i < STEPS; i++)
        step(&nic);
    if (!finish) {
        for (unsigned host = 1; host < HOSTS; host++)
            fabric_switch_still(&rail, host, false, now);
        for (uint64_t due; (due = srn_carry_run(&nic, now));)
            now = due > now ? due : now;
    }
    srn_carry_finish(&nic, true);
    for (unsigned flow = 0; flow < FLOWS; flow++)
        if (arrived[flow] != given[flow] || given[flow] < 20) {
            fprintf(stderr, "seed %" PRIu64 ": flow %u: %u of %u arrived\n", begun, flow, arrived[flow],
                    given[flow]);
            late++;
        }
    return late;
}

/* One packet waits for the host; each of the next comes when the one before has arrived. */
static int stand_still(uint64_t ms) {
    struct srn_net net = {.transmit = transmit, .resume = resume};
    struct srn_nic nic = {.net = &net};
    uint64_t begin = now = 1000000, due, since, longest = 0;
    unsigned waiting = 0;

    seed = begun = ms;
    memset(&rail, 0, sizeof(rail));
    fabric_switch_reset(&rail);
    for (unsigned host = 0; host < HOSTS; host++)
        fabric_switch_set(&rail, host, &params);
    fabric_switch_still(&rail, 1, true, now);
    give(&nic, 0);
    while ((due = srn_carry_run(&nic, now)) && due < begin + ms * 1000000)
        now = due > now ? due : now;
    now = begin + ms * 1000000;
    fabric_switch_still(&rail, 1, false, now);
    for (int i = 0; i < 200; i++) {
        since = now;
        give(&nic, 0);
        for (uint64_t next = now + 2000000; now < next;
             now = due && due < next ? (due > now ? due : now) : next) {
            due = srn_carry_run(&nic, now);
            if (arrived[0] == given[0] && since) {
                longest = now - since > longest ? now - since : longest;
                since = 0;
            }
        }
        waiting = given[0] - arrived[0] > waiting ? given[0] - arrived[0] : waiting;
    }
    srn_carry_finish(&nic, true);
    printf("%.3f ms, %u\n", (double)longest / 1e6, waiting);
    return longest > 2000000 || waiting || late;
}

int main(int argc, char **argv) {
    unsigned long first, last;
    unsigned bad = 0;

    if (argc < 3)
        return 2;
    if (strcmp(argv[1], "still") == 0)
        return stand_still(strtoul(argv[2], NULL, 10));
    first = strtoul(argv[1], NULL, 10);
    last = strtoul(argv[2], NULL, 10);
    paced = argc > 3 && strcmp(argv[3], "paced") == 0;
    for (unsigned long number = first; number <= last; number++)
        bad += run(number, argc > 3 && !paced) > 0;
    printf("%u of %lu\n", bad, last - first + 1);
    return bad ? 1 : 0;
}
