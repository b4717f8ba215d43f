/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A switch and its hosts in virtual time, without sockets: the rails' model and DCQCN, as the NIC runs them.
 *
 *   dcqcn ENTRY MS SEED PAYLOAD FLOW...     such as: dcqcn 'rail0:rate=40G,dcqcn=sigcomm15' 100 1 1000 0-2 1-2
 *
 * With "steps" instead it checks one sender's steps. A flow is a source, which has no other, and a destination; it always has something to send. Of 2 MS milliseconds,
 * undilated, the second half is measured: a line for each flow and one for each port that flows lead to.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fabric/dcqcn.h"
#include "fabric/params.h"
#include "fabric/port.h"

#define PORTS 64
#define BTH_AND_ICRC 16
#define CNP_BYTES (FABRIC_HEADERS + BTH_AND_ICRC + 16)
#define SAMPLE_NS 5000 /* undilated */

enum kind { SEND, SWITCH, ARRIVE, CNP, SAMPLE };

struct event {
    uint64_t at, sequence;
    enum kind kind;
    unsigned flow;
    bool marked;
};

#define EVENTS (1 << 20)
#include "../../../benchmarks/fabric/agenda.h"

static void plan(uint64_t at, enum kind kind, unsigned flow, bool marked) {
    push(at, (struct event){.kind = kind, .flow = flow, .marked = marked});
}

struct flow {
    unsigned from, to;
    struct dcqcn_rp rp;
    struct dcqcn_np np;
    uint64_t bytes, cnps, last_cnp, closest; /* closest: two CNPs, ns */
};

static struct fabric_params params;
static struct fabric_port ports[PORTS];
static struct flow flows[PORTS];
static unsigned flow_count;

static void send_cnp(struct flow *flow, unsigned index, uint64_t now) {
    uint64_t sent = fabric_send(&ports[flow->to], &params, now, CNP_BYTES);
    struct fabric_fate fate = fabric_forward(&ports[flow->from], &params, sent, CNP_BYTES, false);

    if (flow->cnps++ && now - flow->last_cnp < flow->closest)
        flow->closest = now - flow->last_cnp;
    flow->last_cnp = now;
    plan(fate.out_ns + params.delay_ns, CNP, index, false);
}

static int wrong(const char *what) {
    fprintf(stderr, "not true: %s\n", what);
    return 1;
}

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition))                                                                                    \
            return wrong(#condition);                                                                        \
    } while (0)

static double power(double base, int n) {
    return n ? base * power(base, n - 1) : 1;
}

static bool near(double value, double expected) {
    return value > expected * (1 - 1e-9) && value < expected * (1 + 1e-9);
}

/* The steps of one sender, as the paper has them. */
static int check_steps(void) {
    const struct dcqcn_params p = {1.0 / 256, 50, 55, 100, 1000, 5, 4, 40, 1, true};
    struct dcqcn_params unclamped = p;
    struct dcqcn_rp rp = {0};
    struct dcqcn_np np = {0};
    uint64_t now = 1000;

    unclamped.clamp = false;
    CHECK(dcqcn_handle_mark(&np, &p, now) && !dcqcn_handle_mark(&np, &p, now + 49));
    CHECK(dcqcn_handle_mark(&np, &p, now + 50) &&
          !dcqcn_handle_mark(&np, &(struct dcqcn_params){0}, now + 999));
    CHECK(dcqcn_sent(&rp, &p, 8e9, now, 100) == now + 100 &&
          !rp.limited); /* at line rate: a byte takes 1 ns */
    dcqcn_handle_cnp(&rp, &p, 1024, now);
    CHECK(rp.limited && near(rp.rate, 512) && near(rp.target, 1024) && near(rp.alpha, 1));
    dcqcn_handle_cnp(&rp, &unclamped, 1024, now + 1);
    CHECK(near(rp.rate, 256) && near(rp.target, 1024)); /* no increase between them */
    dcqcn_handle_cnp(&rp, &p, 1024, now += 50);
    CHECK(near(rp.rate, 128) && near(rp.target, 256) && near(rp.alpha, 1));
    for (int step = 1; step <= 5; step++) { /* fast recovery by the timer */
        dcqcn_sent(&rp, &p, 1024, now += 100, 0);
        CHECK(near(rp.target, 256) && near(256 - rp.rate, 128.0 / (1 << step)));
    }
    dcqcn_sent(&rp, &p, 1024, now += 100, 0);
    CHECK(near(rp.target, 260)); /* additive increase */
    for (int step = 1; step <= 5;
         step++) /* the byte counter's steps: additive, because the timer is past F */
        dcqcn_sent(&rp, &p, 1024, now, 1000);
    CHECK(near(rp.target, 280) && rp.byte_steps == 5);
    dcqcn_sent(&rp, &p, 1024, now, 1000);
    CHECK(near(rp.target, 320)); /* hyper increase: both are */
    dcqcn_sent(&rp, &p, 1024, now + 99, 999);
    CHECK(near(rp.target, 320));
    dcqcn_handle_cnp(&rp, &p, 1024,
                     now); /* 600 without a CNP: alpha decayed at 55, 110, ... 550 and 600 is not 605 */
    CHECK(near(rp.alpha, (1 - p.g) * power(1 - p.g, 10) + p.g));
    for (int i = 0; i < 64; i++)
        dcqcn_handle_cnp(&rp, &p, 1024, now);
    CHECK(near(rp.rate, p.min_rate));
    dcqcn_sent(&rp, &p, 1024, now + 100000, 0);
    CHECK(!rp.limited && dcqcn_sent(&rp, &p, 8e9, now, 100) == now + 100);
    return 0;
}

int main(int argc, char **argv) {
    struct {
        double sum, squares;
        uint64_t packets, marked;
    } queues[PORTS] = {0};
    const char *text = argv[1];
    char err[200];
    struct fabric_scope scope;
    uint64_t half, samples = 0;
    uint32_t packet;

    if (argc == 2 && strcmp(argv[1], "steps") == 0)
        return check_steps();
    if (argc < 6 || argc - 5 > PORTS || fabric_parse(&text, &scope, &params, err, sizeof(err)) != 1)
        return 2;
    half = strtoull(argv[2], NULL, 10) * 1000000 * params.dilation;
    packet = (uint32_t)strtoul(argv[4], NULL, 10) + BTH_AND_ICRC + FABRIC_HEADERS;
    for (unsigned i = 0; i < PORTS; i++)
        ports[i].random = strtoull(argv[3], NULL, 10) * PORTS + i;
    for (int i = 5; i < argc; i++) {
        struct flow *flow = &flows[flow_count];

        if (sscanf(argv[i], "%u-%u", &flow->from, &flow->to) != 2 || flow->from >= PORTS || flow->to >= PORTS)
            return 2;
        flow->closest = UINT64_MAX;
        plan(0, SEND, flow_count++, false);
    }
    plan(half, SAMPLE, 0, false);
    for (struct event event = pop(); event.at < 2 * half; event = pop()) {
        struct flow *flow = &flows[event.flow];
        struct fabric_fate fate;

        switch (event.kind) {
        case SEND:
            plan(fabric_send(&ports[flow->from], &params, event.at, packet), SWITCH, event.flow, false);
            plan(dcqcn_sent(&flow->rp, &params.dcqcn, (double)params.rate, event.at, packet), SEND,
                 event.flow, false);
            break;
        case SWITCH:
            fate = fabric_forward(&ports[flow->to], &params, event.at, packet, true);
            if (!fate.dropped)
                plan(fate.out_ns + params.delay_ns, ARRIVE, event.flow, fate.marked);
            break;
        case ARRIVE:
            if (event.at >= half)
                flow->bytes += packet;
            if (event.marked && dcqcn_handle_mark(&flow->np, &params.dcqcn, event.at))
                send_cnp(flow, event.flow, event.at);
            break;
        case CNP:
            dcqcn_handle_cnp(&flow->rp, &params.dcqcn, (double)params.rate, event.at);
            break;
        case SAMPLE:
            samples++;
            for (unsigned i = 0; i < PORTS; i++) {
                double queue = (double)fabric_queue(&ports[i], &params, event.at);

                queues[i].sum += queue;
                queues[i].squares += queue * queue;
            }
            plan(event.at + SAMPLE_NS * params.dilation, SAMPLE, 0, false);
            break;
        }
    }
    for (unsigned i = 0; i < flow_count; i++)
        printf("flow from=%u to=%u rate=%.0f cnps=%" PRIu64 " closest_ns=%" PRIu64 "\n", flows[i].from,
               flows[i].to, (double)flows[i].bytes * 8e9 / (double)half * params.dilation, flows[i].cnps,
               flows[i].closest);
    for (unsigned i = 0; i < PORTS; i++) {
        const struct fabric_counters *counted = &ports[i].counters;
        double mean = queues[i].sum / (double)samples;

        if (counted->packets)
            printf("port at=%u queue=%.0f variance=%.0f peak=%" PRIu64 " packets=%" PRIu64 " marked=%" PRIu64
                   " dropped=%" PRIu64 "\n",
                   i, mean, queues[i].squares / (double)samples - mean * mean, counted->queue_peak,
                   counted->packets, counted->marked, counted->dropped);
    }
    return 0;
}
