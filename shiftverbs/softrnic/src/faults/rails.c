/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults/rails.h"

#include <arpa/inet.h>

#include "faults/registry.h"

bool rails_limited(const struct fault_port *port) {
    return registry_limited(fault_registry(port), (unsigned)port->rail);
}

struct fabric_params rails_params(const struct fault_port *port) {
    struct registry_link *link =
        registry_link_lock(fault_registry(port), (unsigned)port->host_index, (unsigned)port->rail);
    struct fabric_params params = link->params;

    registry_link_unlock(link);
    return params;
}

void rails_count(const struct fault_port *port, enum nic_counter counter) {
    struct registry_link *link = &fault_registry(port)->file->links[port->host_index][port->rail];

    __atomic_add_fetch(&link->counters[counter], 1, __ATOMIC_RELAXED);
}

uint64_t rails_send(const struct fault_port *port, uint64_t now_ns, size_t len) {
    struct registry_link *link =
        registry_link_lock(fault_registry(port), (unsigned)port->host_index, (unsigned)port->rail);

    if (link->params.rate)
        now_ns = fabric_send(&link->port, &link->params, now_ns, (uint32_t)len + FABRIC_HEADERS);
    registry_link_unlock(link);
    return now_ns;
}

struct fabric_fate rails_forward(const struct fault_port *port, uint32_t peer_ip, uint64_t now_ns, size_t len,
                                 bool ect) {
    struct fabric_fate fate = {.out_ns = now_ns};
    struct registry *reg = fault_registry(port);
    struct registry_link *link;
    int host = registry_host_at(reg, (unsigned)port->rail, peer_ip);

    if (host < 0)
        return fate; /* nobody of ours: what is behind a real interface has a network of its own */
    link = registry_link_lock(reg, (unsigned)host, (unsigned)port->rail);
    if (link->params.rate) {
        fate = fabric_forward(&link->port, &link->params, now_ns, (uint32_t)len + FABRIC_HEADERS, ect);
        fate.out_ns += link->params.delay_ns;
    }
    registry_link_unlock(link);
    return fate;
}

bool rails_switched(const struct fault_port *port) {
    return registry_switched(fault_registry(port), (unsigned)port->rail);
}

static struct registry_switch *lock_switch(const struct fault_port *port) {
    return registry_switch_lock(fault_registry(port), (unsigned)port->rail, true);
}

struct fabric_ticket rails_give(const struct fault_port *port, uint32_t peer_ip, unsigned priority,
                                size_t len, bool ect, uint64_t now_ns) {
    int host = registry_host_at(fault_registry(port), (unsigned)port->rail, peer_ip);
    struct registry_switch *shared = lock_switch(port);
    struct fabric_ticket ticket = {0};

    if (!shared)
        return ticket;
    ticket = fabric_switch_send(&shared->fabric, (unsigned)port->host_index,
                                host < 0 ? FABRIC_ELSEWHERE : (unsigned)host, priority,
                                (uint32_t)len + FABRIC_HEADERS, ect, now_ns);
    registry_switch_unlock(shared);
    return ticket;
}

struct fabric_news rails_ask(const struct fault_port *port, uint32_t peer_ip, struct fabric_ticket ticket,
                             uint64_t now_ns) {
    int host = registry_host_at(fault_registry(port), (unsigned)port->rail, peer_ip);
    struct registry_switch *shared = lock_switch(port);
    struct fabric_news news = {.where = FABRIC_FREE};

    if (!shared)
        return news;
    news = fabric_switch_ask(&shared->fabric, ticket, now_ns);
    if (news.where == FABRIC_OUT && host >= 0)
        news.at_ns += shared->fabric.hosts[host].params.delay_ns;
    registry_switch_unlock(shared);
    return news;
}

void rails_forget(const struct fault_port *port, struct fabric_ticket ticket) {
    struct registry_switch *shared = lock_switch(port);

    if (!shared)
        return;
    fabric_switch_forget(&shared->fabric, ticket);
    registry_switch_unlock(shared);
}

uint64_t rails_link_free(const struct fault_port *port, unsigned priority, uint64_t now_ns) {
    struct registry_switch *shared = lock_switch(port);

    if (!shared)
        return now_ns;
    now_ns = fabric_switch_link_free(&shared->fabric, (unsigned)port->host_index, priority, now_ns);
    registry_switch_unlock(shared);
    return now_ns;
}
