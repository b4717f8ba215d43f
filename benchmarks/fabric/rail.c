/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A rail with flow control in virtual time, without sockets: links, switch and DCQCN as the NIC has them, and under them
 * reliable connections of their own, which go back N.
 *
 *   rail ENTRY MS SEED PAYLOAD [OPTION...] FLOW...
 *   rail 'rail0:rate=40G,pfc=on' 20 1 1000 window=1000 0-8 1-8/3 still=8@5+2
 *
 * A flow is a source, a destination and perhaps a priority (0 if not said), and always has something to send. Options:
 * window=PACKETS that may be unacknowledged (1000), timeout=US of a connection (4000), series=US: the queue of the first
 * flow's destination all along, still=HOST@MS+MS: a host that takes no packets from then on, for so long. Of 2 MS
 * milliseconds, undilated, the second half is measured: a line for each flow and one for each port.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fabric/dcqcn.h"
#include "fabric/params.h"
#include "fabric/switch.h"

#define FLOWS 256
#define BTH_AND_ICRC 16
#define ACK_BYTES (FABRIC_HEADERS + BTH_AND_ICRC + 4)
#define CNP_BYTES (FABRIC_HEADERS + BTH_AND_ICRC + 16)
#define CNP_PRIORITY 6
#define ACK_EVERY 16
#define IN_THE_NIC 2     /* packets of a flow that its NIC has taken already */
#define SAMPLE_NS 5000   /* undilated, as all times here */
#define ASK_AGAIN_NS 500 /* about a packet that is held up */

enum kind { TURN, ASK, ARRIVE, TIMER, SAMPLE, STILL, MOVES };
enum what { DATA, ACK, NAK, CNP };

struct event {
    uint64_t at, sequence;
    struct fabric_ticket ticket;
    unsigned subject; /* a flow, or a host */
    uint32_t psn;     /* of DATA; what ACK and NAK expect next */
    enum kind kind;
    enum what what;
    bool in_nic, marked;
};

#define EVENTS (1 << 18)
#include "agenda.h"

struct flow {
    unsigned from, to, priority, in_nic;
    struct dcqcn_rp rp;
    struct dcqcn_np np;
    uint64_t rate_at, timer_at; /* its rate has something for a packet; 0 = no timer */
    uint32_t psn, una, newest, expected, unacked;
    bool nak_sent, waits;
    uint64_t bytes, sent, again, timeouts, cnps;
};

static struct fabric_params params;
static struct fabric_switch rail;
static struct flow flows[FLOWS];
static unsigned flow_count;
static uint64_t half, timeout_ns = 4000000, series_ns;
static uint32_t packet_bytes, window = 1000;

static void ask(struct event event, uint64_t now);

static void send(unsigned index, enum what what, uint32_t psn, uint64_t now) {
    struct flow *flow = &flows[index];
    uint32_t bytes = what == DATA ? packet_bytes : what == CNP ? CNP_BYTES : ACK_BYTES;
    struct event event = {.kind = ASK, .what = what, .subject = index, .psn = psn, .in_nic = what == DATA};

    event.ticket =
        fabric_switch_send(&rail, what == DATA ? flow->from : flow->to, what == DATA ? flow->to : flow->from,
                           what == CNP ? CNP_PRIORITY : flow->priority, bytes, what == DATA, now);
    if (!event.ticket.life)
        abort(); /* the flows' own limits are below the switch's */
    flow->in_nic += event.in_nic;
    ask(event, now);
}

static void start_timer(unsigned index, uint64_t now) {
    flows[index].timer_at = now + timeout_ns;
    push(flows[index].timer_at, (struct event){.kind = TIMER, .subject = index});
}

/* What the connection, its rate and its NIC let go now. */
static void turn(unsigned index, uint64_t now) {
    struct flow *flow = &flows[index];

    while (flow->psn - flow->una < window && flow->in_nic < IN_THE_NIC) {
        if (flow->rate_at > now) {
            if (!flow->waits)
                push(flow->rate_at, (struct event){.kind = TURN, .subject = index});
            flow->waits = true;
            return;
        }
        flow->again += flow->psn < flow->newest;
        flow->sent++;
        send(index, DATA, flow->psn++, now);
        if (flow->psn > flow->newest)
            flow->newest = flow->psn;
        if (!flow->timer_at)
            start_timer(index, now);
        flow->rate_at = params.dcqcn.g > 0
                            ? dcqcn_sent(&flow->rp, &params.dcqcn, (double)params.rate, now, packet_bytes)
                            : 0;
    }
}

static void ask(struct event event, uint64_t now) {
    struct flow *flow = &flows[event.subject];
    struct fabric_news news = fabric_switch_ask(&rail, event.ticket, now);
    uint64_t soonest = now + ASK_AGAIN_NS * params.dilation;

    if (news.where != FABRIC_LINK && event.in_nic) {
        event.in_nic = false;
        flow->in_nic--;
        turn(event.subject, now);
    }
    if (news.where == FABRIC_DROPPED || news.where == FABRIC_FREE)
        return;
    event.marked = news.marked;
    if (news.where == FABRIC_OUT) {
        event.kind = ARRIVE;
        push(news.at_ns + params.delay_ns, event);
    } else {
        push(news.at_ns > now ? news.at_ns : soonest, event);
    }
}

static void acknowledge(unsigned index, uint32_t expected, bool nak, uint64_t now) {
    struct flow *flow = &flows[index];

    if (expected > flow->una) {
        flow->una = expected;
        flow->timer_at = 0;
    }
    if (flow->psn < flow->una)
        flow->psn = flow->una;
    if (nak && expected == flow->una)
        flow->psn = flow->una; /* go back N */
    if (!flow->timer_at && flow->una < flow->newest)
        start_timer(index, now);
    turn(index, now);
}

static void arrive(const struct event *event, uint64_t now) {
    struct flow *flow = &flows[event->subject];

    switch (event->what) {
    case DATA:
        if (event->marked && dcqcn_handle_mark(&flow->np, &params.dcqcn, now)) {
            flow->cnps++;
            send(event->subject, CNP, 0, now);
        }
        if (event->psn == flow->expected) {
            flow->expected++;
            flow->nak_sent = false;
            if (now >= half)
                flow->bytes += packet_bytes;
            if (++flow->unacked == ACK_EVERY || event->psn % (window / 4) == 0) {
                flow->unacked = 0;
                send(event->subject, ACK, flow->expected, now);
            }
        } else if (event->psn < flow->expected) {
            if (++flow->unacked >= ACK_EVERY) {
                flow->unacked = 0;
                send(event->subject, ACK, flow->expected, now);
            }
        } else if (!flow->nak_sent) {
            flow->nak_sent = true;
            send(event->subject, NAK, flow->expected, now);
        }
        break;
    case ACK:
    case NAK:
        acknowledge(event->subject, event->psn, event->what == NAK, now);
        break;
    case CNP:
        dcqcn_handle_cnp(&flow->rp, &params.dcqcn, (double)params.rate, now);
        break;
    }
}

static void timer(unsigned index, uint64_t now) {
    struct flow *flow = &flows[index];

    if (flow->timer_at != now)
        return;
    flow->timer_at = 0;
    if (flow->una == flow->newest)
        return;
    flow->timeouts++;
    flow->psn = flow->una;
    start_timer(index, now);
    turn(index, now);
}

static int read_option(const char *text) {
    unsigned long n = 0, from = 0, length = 0;
    unsigned host;
    struct flow *flow = &flows[flow_count];

    if (sscanf(text, "still=%u@%lu+%lu", &host, &from, &length) == 3 && host < FABRIC_HOSTS) {
        push(from * 1000000 * params.dilation, (struct event){.kind = STILL, .subject = host});
        push((from + length) * 1000000 * params.dilation, (struct event){.kind = MOVES, .subject = host});
    } else if (sscanf(text, "window=%lu", &n) == 1 && n >= 4) {
        window = (uint32_t)n;
    } else if (sscanf(text, "timeout=%lu", &n) == 1 && n) {
        timeout_ns = n * 1000 * params.dilation;
    } else if (sscanf(text, "series=%lu", &n) == 1 && n) {
        series_ns = n * 1000 * params.dilation;
    } else if (flow_count < FLOWS && sscanf(text, "%u-%u/%u", &flow->from, &flow->to, &flow->priority) >= 2 &&
               flow->from < FABRIC_HOSTS && flow->to < FABRIC_HOSTS && flow->priority < FABRIC_PRIORITIES) {
        flow_count++;
    } else {
        return 2;
    }
    return 0;
}

static void print(const double *sums, const double *squares, uint64_t samples) {
    for (unsigned i = 0; i < flow_count; i++)
        printf("flow from=%u to=%u priority=%u rate=%.0f sent=%" PRIu64 " again=%" PRIu64 " timeouts=%" PRIu64
               " cnps=%" PRIu64 "\n",
               flows[i].from, flows[i].to, flows[i].priority,
               (double)flows[i].bytes * 8e9 / (double)half * params.dilation, flows[i].sent, flows[i].again,
               flows[i].timeouts, flows[i].cnps);
    for (unsigned i = 0; i < FABRIC_HOSTS; i++) {
        const struct fabric_host *host = &rail.hosts[i];
        struct fabric_prio_counters all = {0};
        double mean = sums[i] / (double)samples;

        for (unsigned p = 0; p < FABRIC_PRIORITIES; p++) {
            all.rx_pause += host->prio[p].rx_pause;
            all.tx_pause += host->prio[p].tx_pause;
            all.rx_pause_ns += host->prio[p].rx_pause_ns;
            all.watchdog_dropped += host->prio[p].watchdog_dropped;
            all.storms += host->prio[p].storms;
        }
        if (host->counters.packets || host->counters.dropped || all.rx_pause || all.watchdog_dropped)
            printf("port at=%u queue=%.0f variance=%.0f peak=%" PRIu64 " packets=%" PRIu64 " marked=%" PRIu64
                   " dropped=%" PRIu64 " rx_pause=%" PRIu64 " tx_pause=%" PRIu64
                   " paused=%.6f watchdog_dropped=%" PRIu64 " storms=%" PRIu64 "\n",
                   i, mean, squares[i] / (double)samples - mean * mean, host->counters.queue_peak,
                   host->counters.packets, host->counters.marked, host->counters.dropped, all.rx_pause,
                   all.tx_pause, (double)all.rx_pause_ns / 2 / (double)half, all.watchdog_dropped,
                   all.storms);
    }
}

int main(int argc, char **argv) {
    static double sums[FABRIC_HOSTS], squares[FABRIC_HOSTS];
    const char *text = argv[1];
    struct fabric_scope scope;
    struct event event;
    uint64_t samples = 0, period;
    char err[200];

    if (argc < 6 || fabric_parse(&text, &scope, &params, err, sizeof(err)) != 1)
        return 2;
    half = strtoull(argv[2], NULL, 10) * 1000000 * params.dilation;
    timeout_ns *= params.dilation;
    packet_bytes = (uint32_t)strtoul(argv[4], NULL, 10) + BTH_AND_ICRC + FABRIC_HEADERS;
    for (int i = 5; i < argc; i++)
        if (read_option(argv[i]))
            return 2;
    for (unsigned i = 0; i < FABRIC_HOSTS; i++)
        rail.hosts[i].random = strtoull(argv[3], NULL, 10) * FABRIC_HOSTS + i + 1;
    fabric_switch_reset(&rail);
    for (unsigned i = 0; i < FABRIC_HOSTS; i++)
        fabric_switch_set(&rail, i, &params);
    for (unsigned i = 0; i < flow_count; i++)
        push(0, (struct event){.kind = TURN, .subject = i});
    period = series_ns ? series_ns : SAMPLE_NS * params.dilation;
    push(series_ns ? 0 : half, (struct event){.kind = SAMPLE});
    for (event = pop(); event.at < 2 * half; event = pop()) {
        switch (event.kind) {
        case TURN:
            flows[event.subject].waits = false;
            turn(event.subject, event.at);
            break;
        case ASK:
            ask(event, event.at);
            break;
        case ARRIVE:
            arrive(&event, event.at);
            break;
        case TIMER:
            timer(event.subject, event.at);
            break;
        case STILL:
        case MOVES:
            fabric_switch_still(&rail, event.subject, event.kind == STILL, event.at);
            break;
        case SAMPLE:
            samples += event.at >= half;
            for (unsigned i = 0; event.at >= half && i < FABRIC_HOSTS; i++) {
                double queue = (double)fabric_switch_queue(&rail, i, event.at);

                sums[i] += queue;
                squares[i] += queue * queue;
            }
            if (series_ns)
                printf("at us=%.1f queue=%" PRIu64 "\n", (double)event.at / 1000 / params.dilation,
                       fabric_switch_queue(&rail, flows[0].to, event.at));
            push(event.at + period, event);
            break;
        }
    }
    print(sums, squares, samples);
    return 0;
}
