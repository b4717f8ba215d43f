/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The registry: state shared by all processes that use softrnic with one SOFTRNIC_DIR.
 *
 * It holds what people and tests do to the hardware from outside (port down, NIC killed, switch port down,
 * drop rules) and which process has which address on which rail. The data path reads one atomic word per
 * packet; only when that is not zero does it look further. A change is in force for every packet at once; the
 * asynchronous events that a NIC would raise are learned from a notification socket.
 *
 * Thread safe. No function blocks but for the registry's short lock.
 */
#ifndef SOFTRNIC_FAULT_H
#define SOFTRNIC_FAULT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "faults/config.h"
#include "wire/wire.h"

#define FAULT_MAX_HOSTS 64
#define FAULT_MAX_RAILS CONFIG_MAX_DEVICES
#define FAULT_MAX_RULES 128
#define FAULT_MAX_SLOTS 254

enum fault_direction { FAULT_TX = 1, FAULT_RX = 2 };

/* What to do with a packet. */
enum fault_verdict {
    FAULT_PASS = 0,
    FAULT_DROP = 1,
    FAULT_DELAY = 2,     /* it goes on after the delay */
    FAULT_DUPLICATE = 3, /* a copy follows after the delay */
    FAULT_REORDER = 4, /* it goes on behind the next packet of its direction, at the latest after the delay */
    FAULT_CARRY = 5    /* TX only: the rail has limits, it goes through them (rails.h) */
};

/* One device of this process: made by fault_claim(). The fields are read only outside fault.c. */
struct fault_port {
    const uint32_t
        *active; /* in the shared file: 0 = nothing is wrong with this device or its rail, no rules */
    int host_index;
    int rail;
    int slot;         /* 1 .. 254 for CONFIG_LOOPBACK, else 0 */
    uint32_t address; /* IPv4, network order; 0 for CONFIG_NULL */
    int notify_fd;    /* readable when fault_handle_notify() has something to do; put it in the epoll set */
    struct fault_port_private *priv;
};

/*
 * Bind attempt made by fault_claim() for a candidate address (network order): 0 = mine now; -EADDRINUSE =
 * taken by someone else (another SOFTRNIC_DIR, a kernel RNIC): the next is tried; other -errno = give up.
 */
typedef int (*fault_bind_fn)(void *arg, uint32_t address);

/*
 * Register one device of this process: host name, device, an address by lock file. For CONFIG_ADDRESS and
 * CONFIG_NETDEV pass the address in `address` (network order). Returns 0, or -errno with a sentence in err:
 * -EADDRINUSE (the fixed address belongs to another process), -ENOSPC (all slots or hosts taken), -EIO (the
 * device was killed and not revived), -EACCES (the directory is not ours alone), ... Call once per device and
 * process; all ibv_contexts of the process share it.
 */
int fault_claim(struct fault_port **port, const struct config *config, const struct config_device *device,
                uint32_t address, fault_bind_fn bind_fn, void *arg, char *err, size_t err_len);

/* Give the address back. */
void fault_release(struct fault_port *port);

/* In the child after fork(): close what was inherited without giving the parent's address away. The port is
 * freed. */
void fault_after_fork(struct fault_port *port);

/* Registered ahead so that faults can be given before the first process opens a device: names and rails only.
 */
int fault_register(const struct config *config, char *err, size_t err_len);

/* --- state --- */
/* The cable, and the netdev's carrier: what query_port reports as ACTIVE or DOWN. */
bool fault_link_is_up(const struct fault_port *port);
bool fault_is_dead(const struct fault_port *port); /* killed since it was claimed; never comes back */
/* May packets pass, leaving rules aside? For those that were held back. */
bool fault_passes(const struct fault_port *port);
bool fault_is_stalled_slow(const struct fault_port *port);
bool fault_commands_hang_slow(const struct fault_port *port);
uint32_t fault_command_us_slow(const struct fault_port *port);
/* Would a fresh claim of this device fail because it was killed? For open_device without a claim (null
 * devices too). */
bool fault_device_killed(const struct config *config, const struct config_device *device);
/* Is the cable of a host's device in? Of one that nobody has opened yet, it is. */
bool fault_cable_is_in(const char *host, int rail);

enum fault_event { FAULT_EVENT_PORT_ERR = 1, FAULT_EVENT_PORT_ACTIVE = 2, FAULT_EVENT_DEVICE_FATAL = 3 };

/*
 * Call when notify_fd is readable (or at any time). Drains it and writes what happened since the last call,
 * in order: a cable that went down and up again in between gives PORT_ERR, PORT_ACTIVE. Returns the number of
 * events (at most max; max >= 8 is never too small). After DEVICE_FATAL nothing more comes.
 */
int fault_handle_notify(struct fault_port *port, enum fault_event *events, int max);

/* --- data path --- */
enum fault_verdict fault_filter_slow(struct fault_port *port, enum fault_direction direction,
                                     const struct wire_packet *pkt, uint32_t local_qpn, uint32_t peer_ip,
                                     uint32_t *delay_us);

/*
 * May this packet pass? Ask once for every packet handed to the network (FAULT_TX, retransmissions too) and
 * for every packet parsed without error (FAULT_RX, before anything else looks at it). pkt needs bth, flags
 * and, for ACKs, aeth. local_qpn is our QP (TX: the sender's, RX: bth.dest_qpn); peer_ip the other end's
 * address, network order. *delay_us is set with the verdicts that have a delay. Only called without locks held that fault_handle_notify()'s caller also takes.
 */
static inline enum fault_verdict fault_filter(struct fault_port *port, enum fault_direction direction,
                                              const struct wire_packet *pkt, uint32_t local_qpn,
                                              uint32_t peer_ip, uint32_t *delay_us) {
    if (__builtin_expect(__atomic_load_n(port->active, __ATOMIC_RELAXED) == 0, 1))
        return FAULT_PASS;
    return fault_filter_slow(port, direction, pkt, local_qpn, peer_ip, delay_us);
}

/* As fault_is_dead(), for the data path. */
static inline bool fault_was_killed(const struct fault_port *port) {
    return __builtin_expect(__atomic_load_n(port->active, __ATOMIC_RELAXED) != 0, 0) && fault_is_dead(port);
}

/* Does the NIC take work and do none of it? */
static inline bool fault_is_stalled(const struct fault_port *port) {
    return __builtin_expect(__atomic_load_n(port->active, __ATOMIC_RELAXED) != 0, 0) &&
           fault_is_stalled_slow(port);
}

/* Do commands (all verbs that are not of the data path) not return? */
static inline bool fault_commands_hang(const struct fault_port *port) {
    return __builtin_expect(__atomic_load_n(port->active, __ATOMIC_RELAXED) != 0, 0) &&
           fault_commands_hang_slow(port);
}

/* How many microseconds does each command take at least? */
static inline uint32_t fault_command_us(const struct fault_port *port) {
    return __builtin_expect(__atomic_load_n(port->active, __ATOMIC_RELAXED) != 0, 0)
               ? fault_command_us_slow(port)
               : 0;
}

#endif
