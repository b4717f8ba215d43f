/* SPDX-License-Identifier: BSD-3-Clause */
#include "fabric/port.h"

#define BITS_NS 8000000000u /* of a byte at one bit per second */

uint64_t fabric_time_ns(uint64_t rate, uint64_t bytes) {
    return (uint64_t)(((unsigned __int128)bytes * BITS_NS + rate / 2) / rate);
}

static uint64_t bytes_until(const struct fabric_params *params, uint64_t free_ns, uint64_t now_ns) {
    if (free_ns <= now_ns || !params->rate)
        return 0;
    return (uint64_t)((unsigned __int128)(free_ns - now_ns) * params->rate / BITS_NS);
}

uint64_t fabric_send(struct fabric_port *port, const struct fabric_params *params, uint64_t now_ns,
                     uint32_t bytes) {
    uint64_t start = port->link_free_ns > now_ns ? port->link_free_ns : now_ns;

    port->link_free_ns = start + fabric_time_ns(params->rate, bytes);
    return port->link_free_ns;
}

uint64_t fabric_backlog(const struct fabric_port *port, const struct fabric_params *params, uint64_t now_ns) {
    return bytes_until(params, port->link_free_ns, now_ns);
}

uint64_t fabric_queue(const struct fabric_port *port, const struct fabric_params *params, uint64_t now_ns) {
    return bytes_until(params, port->queue_free_ns, now_ns);
}

/* 0 up to 1, the same numbers each time (splitmix64). */
static double next_random(uint64_t *random) {
    uint64_t z = *random += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* RED, by the queue as it is (Zhu et al. 2015, figure 5). */
bool fabric_marks(uint64_t *random, const struct fabric_params *params, uint64_t queue) {
    if (!params->kmax || queue <= params->kmin)
        return false;
    if (queue > params->kmax)
        return true;
    return next_random(random) <
           params->pmax * (double)(queue - params->kmin) / (double)(params->kmax - params->kmin);
}

struct fabric_fate fabric_forward(struct fabric_port *port, const struct fabric_params *params,
                                  uint64_t now_ns, uint32_t bytes, bool ect) {
    struct fabric_fate fate = {0};

    if (now_ns < port->latest_ns)
        now_ns = port->latest_ns;
    port->latest_ns = now_ns;
    fate.queue = fabric_queue(port, params, now_ns);
    if (fate.queue + bytes > params->buffer) {
        port->counters.dropped++;
        fate.dropped = true;
        return fate;
    }
    if (port->queue_free_ns < now_ns)
        port->queue_free_ns = now_ns;
    port->queue_free_ns += fabric_time_ns(params->rate, bytes);
    fate.out_ns = port->queue_free_ns;
    fate.marked = ect && fabric_marks(&port->random, params, fate.queue);
    port->counters.marked += fate.marked;
    port->counters.packets++;
    port->counters.bytes += bytes;
    if (fate.queue + bytes > port->counters.queue_peak)
        port->counters.queue_peak = fate.queue + bytes;
    return fate;
}
