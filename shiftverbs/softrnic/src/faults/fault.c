/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults/fault.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "faults/netdev.h"
#include "faults/registry.h"

/* Together with DEVICE_FATAL no more than the 8 that fault.h promises. */
#define MAX_CABLE_EVENTS 4
#define MAX_CARRIER_EVENTS 3

struct fault_port_private {
    struct registry *reg;
    struct registry_port *shared;
    struct config_device device;
    int claim_fd;   /* holds the claim */
    int address_fd; /* holds the address */
    unsigned claim_index;
    uint32_t kills; /* as it was when we opened the device */
    pthread_mutex_t event_lock;
    uint32_t seen_link_changes;
    bool seen_death;
    int socket_fd;        /* of the registry's notifications; port->notify_fd, unless that is an epoll set */
    struct netdev netdev; /* CONFIG_NETDEV: its carrier counts like the cable */
    _Atomic bool carrier_up; /* true without a netdev */
    bool seen_up;            /* cable and carrier together, as the events told so far add up to */
};

/* `active` of devices that must be looked at more closely for every packet. */
static const uint32_t always_active = 1;

static int describe_errno(char *err, size_t err_len, const char *device, const char *what, int error) {
    snprintf(err, err_len, "%s: %s: %s", device, what, strerror(error));
    return -error;
}

static struct registry *open_and_add_host(const struct config *config, int *host, char *err, size_t err_len) {
    struct registry *reg = registry_open(err, err_len);
    int rc;

    if (!reg)
        return NULL;
    rc = network_from_environment(reg, err, err_len);
    if (rc) {
        errno = -rc;
        return NULL;
    }
    registry_lock(reg);
    *host = registry_add_host(reg, config);
    registry_unlock(reg);
    if (*host < 0) {
        snprintf(err, err_len, "host %s: there are %d hosts already", config->host, FAULT_MAX_HOSTS);
        errno = ENOSPC;
        return NULL;
    }
    return reg;
}

int fault_register(const struct config *config, char *err, size_t err_len) {
    int host;

    errno = ENOMEM;
    return open_and_add_host(config, &host, err, err_len) ? 0 : -errno;
}

/* A free line of the claim table, with its lock file and notification socket. */
static int take_claim(struct fault_port *port, char *err, size_t err_len) {
    struct fault_port_private *priv = port->priv;
    struct registry *reg = priv->reg;
    struct sockaddr_un at;
    char name[32];
    int rc = 0;

    for (unsigned i = 0; i < REGISTRY_MAX_CLAIMS && priv->claim_fd < 0; i++) {
        snprintf(name, sizeof(name), "claim.%u", i);
        priv->claim_fd = registry_lock_file(reg, name);
        if (priv->claim_fd < 0 && errno != EADDRINUSE)
            return describe_errno(err, err_len, priv->device.name, name, errno);
        priv->claim_index = i;
    }
    if (priv->claim_fd < 0) {
        snprintf(err, err_len, "%s: %d devices are open already", priv->device.name, REGISTRY_MAX_CLAIMS);
        return -ENOSPC;
    }
    priv->socket_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (priv->socket_fd < 0)
        return describe_errno(err, err_len, priv->device.name, "socket", errno);
    snprintf(name, sizeof(name), "notify.%u", priv->claim_index);
    (void)unlinkat(reg->dir_fd, name, 0); /* of a process that died */
    for (int way = 0; way < REGISTRY_SOCKET_WAYS; way++) {
        rc = registry_socket_address(reg, name, way, &at);
        if (rc == -ENAMETOOLONG) {
            snprintf(err, err_len, "%s: without /proc the path of SOFTRNIC_DIR must be shorter: %s",
                     priv->device.name, reg->dir);
            return rc;
        }
        rc = bind(priv->socket_fd, (struct sockaddr *)&at, sizeof(at)) ? -errno : 0;
        if (rc != -ENOENT)
            break;
    }
    if (rc)
        return describe_errno(err, err_len, priv->device.name, name, -rc);
    port->notify_fd = priv->socket_fd;
    return 0;
}

static int watch_netdev(struct fault_port *port, char *err, size_t err_len) {
    struct fault_port_private *priv = port->priv;
    struct epoll_event event = {.events = EPOLLIN};
    bool up = true;
    int rc = netdev_open(&priv->netdev, priv->device.netdev, &up);

    if (rc)
        return describe_errno(err, err_len, priv->device.name, priv->device.netdev, -rc);
    priv->carrier_up = up;
    port->active = &always_active;
    port->notify_fd = epoll_create1(EPOLL_CLOEXEC);
    if (port->notify_fd < 0 || epoll_ctl(port->notify_fd, EPOLL_CTL_ADD, priv->socket_fd, &event) != 0 ||
        epoll_ctl(port->notify_fd, EPOLL_CTL_ADD, priv->netdev.fd, &event) != 0)
        return describe_errno(err, err_len, priv->device.name, "epoll", errno);
    return 0;
}

static int try_address(struct fault_port *port, uint32_t address, fault_bind_fn bind_fn, void *arg) {
    char name[32], text[INET_ADDRSTRLEN];
    int rc;

    inet_ntop(AF_INET, &address, text, sizeof(text));
    snprintf(name, sizeof(name), "addr.%s", text);
    port->priv->address_fd = registry_lock_file(port->priv->reg, name);
    if (port->priv->address_fd < 0)
        return -errno;
    rc = bind_fn ? bind_fn(arg, address) : 0;
    if (rc == 0) {
        port->address = address;
        return 0;
    }
    close(port->priv->address_fd);
    port->priv->address_fd = -1;
    return rc;
}

static int take_address(struct fault_port *port, uint32_t address, fault_bind_fn bind_fn, void *arg,
                        char *err, size_t err_len) {
    const struct config_device *device = &port->priv->device;
    char text[INET_ADDRSTRLEN];
    int rc = 0;

    if (device->kind == CONFIG_NULL)
        return 0;
    if (device->kind != CONFIG_LOOPBACK) {
        inet_ntop(AF_INET, &address, text, sizeof(text));
        rc = try_address(port, address, bind_fn, arg);
        if (rc == -EADDRINUSE)
            snprintf(err, err_len,
                     "%s: address %s belongs to another process; every process needs one of its own",
                     device->name, text);
        else if (rc)
            describe_errno(err, err_len, device->name, text, -rc);
        return rc;
    }
    for (int slot = 1; slot <= FAULT_MAX_SLOTS; slot++) {
        address = htonl(127u << 24 | (uint32_t)(REGISTRY_RAIL_NET + port->rail) << 16 |
                        (uint32_t)(port->host_index + 1) << 8 | (uint32_t)slot);
        rc = try_address(port, address, bind_fn, arg);
        if (rc == 0) {
            port->slot = slot;
            return 0;
        }
        if (rc != -EADDRINUSE) {
            inet_ntop(AF_INET, &address, text, sizeof(text));
            return describe_errno(err, err_len, device->name, text, -rc);
        }
    }
    snprintf(err, err_len, "%s: all %d addresses of host and rail are taken", device->name, FAULT_MAX_SLOTS);
    return -ENOSPC;
}

static void free_port(struct fault_port *port) {
    if (port->notify_fd >= 0 && port->notify_fd != port->priv->socket_fd)
        close(port->notify_fd);
    if (port->priv->socket_fd >= 0)
        close(port->priv->socket_fd);
    netdev_close(&port->priv->netdev);
    if (port->priv->address_fd >= 0)
        close(port->priv->address_fd);
    if (port->priv->claim_fd >= 0)
        close(port->priv->claim_fd);
    pthread_mutex_destroy(&port->priv->event_lock);
    free(port->priv);
    free(port);
}

int fault_claim(struct fault_port **out, const struct config *config, const struct config_device *device,
                uint32_t address, fault_bind_fn bind_fn, void *arg, char *err, size_t err_len) {
    struct fault_port *port;
    struct fault_port_private *priv;
    struct registry_claim *claim;
    struct registry *reg;
    int host, rc;

    errno = ENOMEM;
    reg = open_and_add_host(config, &host, err, err_len);
    if (!reg)
        return -errno;
    port = calloc(1, sizeof(*port));
    priv = calloc(1, sizeof(*priv));
    if (!port || !priv) {
        free(port);
        free(priv);
        return describe_errno(err, err_len, device->name, "claim", ENOMEM);
    }
    port->priv = priv;
    port->host_index = host;
    port->rail = device->rail;
    port->notify_fd = -1;
    priv->reg = reg;
    priv->shared = &reg->file->ports[host][device->rail];
    port->active = &priv->shared->active;
    priv->device = *device;
    priv->claim_fd = priv->address_fd = priv->socket_fd = priv->netdev.fd = -1;
    priv->carrier_up = true;
    pthread_mutex_init(&priv->event_lock, NULL);
    rc = take_claim(port, err, err_len);
    if (rc == 0 && device->kind == CONFIG_NETDEV)
        rc = watch_netdev(port, err, err_len);
    if (rc == 0)
        rc = take_address(port, address, bind_fn, arg, err, err_len);
    if (rc) {
        free_port(port);
        return rc;
    }

    registry_lock(reg);
    if (priv->shared->dead) {
        registry_unlock(reg);
        snprintf(err, err_len, "%s: the device of host %s is dead (killed, not revived)", device->name,
                 config->host);
        free_port(port);
        return -EIO;
    }
    /* From here on changes are reported; what is in force now is what the device starts with. */
    priv->seen_link_changes = priv->shared->link_changes;
    priv->kills = priv->shared->kills;
    priv->seen_up = !(priv->seen_link_changes & 1) && priv->carrier_up;
    claim = &reg->file->claims[priv->claim_index];
    *claim = (struct registry_claim){.host = (uint32_t)host,
                                     .rail = (uint32_t)device->rail,
                                     .address = port->address,
                                     .slot = (uint32_t)port->slot,
                                     .pid = (int32_t)getpid()};
    if (reg->file->claim_end <= priv->claim_index)
        reg->file->claim_end = priv->claim_index + 1;
    registry_update_active(reg, (unsigned)host, (unsigned)device->rail);
    registry_unlock(reg);
    *out = port;
    return 0;
}

void fault_release(struct fault_port *port) {
    struct registry *reg = port->priv->reg;
    char name[32];

    registry_lock(reg);
    memset(&reg->file->claims[port->priv->claim_index], 0, sizeof(struct registry_claim));
    registry_unlock(reg);
    snprintf(name, sizeof(name), "notify.%u", port->priv->claim_index);
    (void)unlinkat(reg->dir_fd, name, 0);
    free_port(port);
}

void fault_after_fork(struct fault_port *port) {
    /* flock belongs to the open file that parent and child share: closing our descriptor leaves the parent's
     * lock. */
    free_port(port);
}

static bool cable_is_in(const struct fault_port_private *priv) {
    return !(__atomic_load_n(&priv->shared->link_changes, __ATOMIC_SEQ_CST) & 1);
}

bool fault_link_is_up(const struct fault_port *port) {
    return cable_is_in(port->priv) && port->priv->carrier_up;
}

bool fault_is_dead(const struct fault_port *port) {
    return __atomic_load_n(&port->priv->shared->kills, __ATOMIC_SEQ_CST) != port->priv->kills;
}

bool fault_device_killed(const struct config *config, const struct config_device *device) {
    char err[256];
    struct registry *reg = registry_open(err, sizeof(err));
    bool dead = false;
    int host;

    if (!reg)
        return false;
    registry_lock(reg);
    host = registry_find_host(reg, config->host);
    if (host >= 0)
        dead = reg->file->ports[host][device->rail].dead;
    registry_unlock(reg);
    return dead;
}

bool fault_cable_is_in(const char *host_name, int rail) {
    char err[256];
    struct registry *reg = registry_open(err, sizeof(err));
    bool in = true;
    int host;

    if (!reg)
        return true;
    registry_lock(reg);
    host = registry_find_host(reg, host_name);
    if (host >= 0)
        in = reg->file->ports[host][rail].link_changes % 2 == 0;
    registry_unlock(reg);
    return in;
}

/* An event if this changes what the port is as a whole. */
static int add_link_event(struct fault_port_private *priv, bool up, enum fault_event *events, int count,
                          int max) {
    if (up == priv->seen_up || count == max)
        return count;
    priv->seen_up = up;
    events[count] = up ? FAULT_EVENT_PORT_ACTIVE : FAULT_EVENT_PORT_ERR;
    return count + 1;
}

int fault_handle_notify(struct fault_port *port, enum fault_event *events, int max) {
    struct fault_port_private *priv = port->priv;
    int count = 0, changes = 0;
    bool carrier[MAX_CARRIER_EVENTS], carrier_before, carrier_now;
    char drain[16];
    uint32_t now, missed;
    bool dead;

    pthread_mutex_lock(&priv->event_lock);
    while (recv(priv->socket_fd, drain, sizeof(drain), MSG_DONTWAIT) >= 0)
        ;
    carrier_before = carrier_now = priv->carrier_up;
    if (priv->netdev.fd >= 0) {
        changes = netdev_poll(&priv->netdev, &carrier_now, carrier, MAX_CARRIER_EVENTS);
        priv->carrier_up = carrier_now;
    }
    now = __atomic_load_n(&priv->shared->link_changes, __ATOMIC_SEQ_CST);
    dead = fault_is_dead(port);
    if (priv->seen_death) {
        pthread_mutex_unlock(&priv->event_lock);
        return 0;
    }
    /* Somebody who plays with the cable while we sleep: keep the parity, forget the oldest pairs. */
    missed = now - priv->seen_link_changes;
    if (missed > MAX_CABLE_EVENTS)
        priv->seen_link_changes += (missed - MAX_CABLE_EVENTS + 1) & ~1u;
    while (priv->seen_link_changes != now && count < max) {
        priv->seen_link_changes++;
        count = add_link_event(priv, !(priv->seen_link_changes & 1) && carrier_before, events, count, max);
    }
    for (int i = 0; i < changes; i++)
        count = add_link_event(priv, !(now & 1) && carrier[i], events, count, max);
    if (dead && count < max) {
        priv->seen_death = true;
        events[count++] = FAULT_EVENT_DEVICE_FATAL;
    }
    pthread_mutex_unlock(&priv->event_lock);
    return count;
}

bool fault_passes(const struct fault_port *port) {
    const struct registry_file *file = port->priv->reg->file;

    return fault_link_is_up(port) && !fault_is_dead(port) &&
           !(__atomic_load_n(&file->switch_down[port->rail], __ATOMIC_RELAXED) >> port->host_index & 1);
}

bool fault_is_stalled_slow(const struct fault_port *port) {
    return __atomic_load_n(&port->priv->shared->stalled, __ATOMIC_SEQ_CST);
}

bool fault_commands_hang_slow(const struct fault_port *port) {
    return __atomic_load_n(&port->priv->shared->hung, __ATOMIC_SEQ_CST);
}

uint32_t fault_command_us_slow(const struct fault_port *port) {
    return __atomic_load_n(&port->priv->shared->command_us, __ATOMIC_SEQ_CST);
}

struct registry *fault_registry(const struct fault_port *port) {
    return port->priv->reg;
}

enum fault_verdict fault_filter_slow(struct fault_port *port, enum fault_direction direction,
                                     const struct wire_packet *pkt, uint32_t local_qpn, uint32_t peer_ip,
                                     uint32_t *delay_us) {
    struct fault_port_private *priv = port->priv;
    struct registry *reg = priv->reg;
    enum fault_verdict verdict = FAULT_PASS;
    bool carried = direction == FAULT_TX && registry_limited(reg, (unsigned)port->rail);

    if (!fault_passes(port))
        return FAULT_DROP;
    if (!__atomic_load_n(&priv->shared->rules, __ATOMIC_RELAXED))
        return carried ? FAULT_CARRY : FAULT_PASS;
    registry_lock(reg);
    /* Again, now that nobody can change it: a rule of another thread may just have pulled the cable. */
    if (!fault_link_is_up(port) || fault_is_dead(port))
        verdict = FAULT_DROP;
    else
        verdict = rules_apply(reg, (unsigned)port->host_index, (unsigned)port->rail, direction, pkt,
                              local_qpn, peer_ip, delay_us);
    registry_unlock(reg);
    return carried && verdict == FAULT_PASS ? FAULT_CARRY : verdict;
}
