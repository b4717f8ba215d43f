/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults/registry.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static struct registry *registries; /* one, unless SOFTRNIC_DIR changes while the process runs */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;

uint64_t registry_now_ns(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int directory_path(char *path, size_t len, char *err, size_t err_len) {
    const char *dir = getenv("SOFTRNIC_DIR");
    int n;

    if (dir && *dir) {
        n = snprintf(path, len, "%s", dir);
    } else {
        const char *tmp = getenv("TMPDIR");

        n = snprintf(path, len, "%s/softrnic-%u", tmp && *tmp ? tmp : "/tmp", (unsigned)geteuid());
    }
    if (n < 0 || (size_t)n >= len) {
        snprintf(err, err_len, "SOFTRNIC_DIR: path longer than %zu characters", len - 1);
        errno = ENAMETOOLONG;
        return -1;
    }
    return 0;
}

/*
 * The directory must be ours and closed to others: whoever can write here decides what this process's NICs
 * do, and the default place is world-writable.
 */
static int open_directory(struct registry *reg, char *err, size_t err_len) {
    struct stat st;
    int fd;

    if (mkdir(reg->dir, 0700) != 0 && errno != EEXIST) {
        snprintf(err, err_len, "%s: cannot create: %s", reg->dir, strerror(errno));
        return -1;
    }
    fd = open(reg->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 || fstat(fd, &st) != 0) {
        snprintf(err, err_len, "%s: cannot open: %s", reg->dir, strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    if (st.st_uid != geteuid() || (st.st_mode & (S_IWGRP | S_IWOTH))) {
        snprintf(err, err_len, "%s: must belong to the user and not be writable by others", reg->dir);
        close(fd);
        errno = EACCES;
        return -1;
    }
    return fd;
}

static void init_file(struct registry_file *file) {
    pthread_mutexattr_t attr;

    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&file->lock, &attr);
    for (unsigned host = 0; host < FAULT_MAX_HOSTS; host++)
        for (unsigned rail = 0; rail < FAULT_MAX_RAILS; rail++)
            pthread_mutex_init(&file->links[host][rail].lock, &attr);
    pthread_mutexattr_destroy(&attr);
    file->next_rule_id = 1;
    file->version = REGISTRY_VERSION;
    file->size = sizeof(*file);
    __atomic_store_n(&file->magic, REGISTRY_MAGIC, __ATOMIC_RELEASE);
}

static int map_file(struct registry *reg, char *err, size_t err_len) {
    char name[32];
    struct stat st;
    struct registry_file *file;
    int fd;

    snprintf(name, sizeof(name), "state.v%d", REGISTRY_VERSION);
    fd = openat(reg->dir_fd, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0 || flock(fd, LOCK_EX) != 0 || fstat(fd, &st) != 0)
        goto fail;
    if (st.st_size == 0) {
        /* Allocated, not sparse: a full file system is an error here and not a SIGBUS later. */
        int rc = posix_fallocate(fd, 0, sizeof(*file));

        if (rc) {
            errno = rc;
            goto fail;
        }
    } else if ((size_t)st.st_size != sizeof(*file)) {
        errno = EPROTO;
        goto fail;
    }
    file = mmap(NULL, sizeof(*file), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (file == MAP_FAILED)
        goto fail;
    if (st.st_size == 0 || file->magic == 0)
        init_file(file);
    if (file->magic != REGISTRY_MAGIC || file->version != REGISTRY_VERSION || file->size != sizeof(*file)) {
        munmap(file, sizeof(*file));
        errno = EPROTO;
        goto fail;
    }
    (void)flock(fd, LOCK_UN); /* by hand: the mapping keeps the open file, and its lock with it */
    close(fd);
    reg->file = file;
    return 0;
fail:
    if (errno == EPROTO)
        snprintf(err, err_len, "%s/%s: not a state file of this softrnic; remove it when no process uses it",
                 reg->dir, name);
    else
        snprintf(err, err_len, "%s/%s: %s", reg->dir, name, strerror(errno));
    if (fd >= 0) {
        int saved = errno;

        close(fd);
        errno = saved;
    }
    return -1;
}

static void close_registry(struct registry *reg) {
    int saved = errno;

    if (reg->notify_fd >= 0)
        close(reg->notify_fd);
    if (reg->dir_fd >= 0)
        close(reg->dir_fd);
    free(reg);
    errno = saved;
}

/* Opened before, and still what the path means? */
static struct registry *find_open(const char *dir) {
    struct stat now, then;

    for (struct registry *reg = registries; reg; reg = reg->next)
        if (strcmp(reg->dir, dir) == 0 && stat(dir, &now) == 0 && fstat(reg->dir_fd, &then) == 0 &&
            now.st_ino == then.st_ino && now.st_dev == then.st_dev)
            return reg;
    return NULL;
}

static struct registry *open_new(const char *dir, char *err, size_t err_len) {
    struct registry *reg = calloc(1, sizeof(*reg));

    if (!reg) {
        snprintf(err, err_len, "out of memory");
        return NULL;
    }
    snprintf(reg->dir, sizeof(reg->dir), "%s", dir);
    reg->notify_fd = -1;
    reg->dir_fd = open_directory(reg, err, err_len);
    if (reg->dir_fd < 0)
        goto fail;
    reg->notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (reg->notify_fd < 0) {
        snprintf(err, err_len, "socket: %s", strerror(errno));
        goto fail;
    }
    if (map_file(reg, err, err_len) != 0)
        goto fail;
    reg->next = registries;
    registries = reg;
    return reg;
fail:
    close_registry(reg);
    return NULL;
}

struct registry *registry_open(char *err, size_t err_len) {
    char dir[sizeof(((struct registry *)0)->dir)];
    struct registry *reg = NULL;

    if (directory_path(dir, sizeof(dir), err, err_len) != 0)
        return NULL;
    pthread_mutex_lock(&open_lock);
    reg = find_open(dir);
    if (!reg)
        reg = open_new(dir, err, err_len);
    pthread_mutex_unlock(&open_lock);
    return reg;
}

void registry_lock(struct registry *reg) {
    /* A process that died inside leaves single words changed, all of them meaningful: only `active` is
     * derived. */
    if (pthread_mutex_lock(&reg->file->lock) == EOWNERDEAD) {
        pthread_mutex_consistent(&reg->file->lock);
        for (unsigned host = 0; host < FAULT_MAX_HOSTS; host++)
            for (unsigned rail = 0; rail < FAULT_MAX_RAILS; rail++)
                registry_update_active(reg, host, rail);
    }
}

void registry_unlock(struct registry *reg) {
    pthread_mutex_unlock(&reg->file->lock);
}

int registry_find_host(const struct registry *reg, const char *name) {
    for (unsigned i = 0; i < reg->file->host_count; i++)
        if (strncmp(reg->file->hosts[i].name, name, CONFIG_NAME_LEN) == 0)
            return (int)i;
    return -1;
}

/* A name is one device's of a host: who had it before is known by that of its rail. */
static void name_device(struct registry_host *host, unsigned rail, const char *name) {
    for (unsigned other = 0; other < FAULT_MAX_RAILS; other++)
        if (other != rail && strcmp(host->devices[other], name) == 0)
            snprintf(host->devices[other], CONFIG_DEVICE_LEN, "soft%u", other);
    if (strcmp(host->devices[rail], name) != 0)
        snprintf(host->devices[rail], CONFIG_DEVICE_LEN, "%s", name);
    host->rails |= 1u << rail;
}

int registry_add_host(struct registry *reg, const struct config *config) {
    struct registry_file *file = reg->file;
    int host = registry_find_host(reg, config->host);

    if (host < 0) {
        if (file->host_count == FAULT_MAX_HOSTS)
            return -1;
        host = (int)file->host_count;
        snprintf(file->hosts[host].name, CONFIG_NAME_LEN, "%s", config->host);
        file->hosts[host].rails = 0;
        __atomic_store_n(&file->host_count, file->host_count + 1, __ATOMIC_RELEASE);
        /* A rail that is cut for all hosts is cut for this one too. */
        for (unsigned rail = 0; rail < FAULT_MAX_RAILS; rail++)
            registry_update_active(reg, (unsigned)host, rail);
    }
    for (int i = 0; i < config->device_count; i++)
        name_device(&file->hosts[host], (unsigned)config->devices[i].rail, config->devices[i].name);
    return host;
}

/* A NIC that stands still takes no packets, and says so. One that is dead, or behind a cut cable, says nothing. */
static void tell_switch(struct registry *reg, unsigned host, unsigned rail) {
    const struct registry_port *port = &reg->file->ports[host][rail];
    bool still = port->stalled && !port->dead && !(port->link_changes & 1);
    struct registry_switch *shared = registry_switch_lock(reg, rail, false);

    if (!shared)
        return;
    fabric_switch_still(&shared->fabric, host, still, registry_now_ns());
    registry_switch_unlock(shared);
}

void registry_update_active(struct registry *reg, unsigned host, unsigned rail) {
    struct registry_port *port = &reg->file->ports[host][rail];
    uint32_t rules = 0;
    uint32_t active;

    for (unsigned i = 0; i < reg->file->rule_end; i++) {
        const struct registry_rule *rule = &reg->file->rules[i];

        if (rule->id && rule->host == host && rule->rail == rail &&
            (!rule->count || rule->fired < rule->count))
            rules++;
    }
    __atomic_store_n(&port->rules, rules, __ATOMIC_RELAXED);
    /* A device that ever died stays on the slow path: only there is it known which of its processes saw it
     * die. */
    active = (port->link_changes & 1) || port->kills || rules || port->stalled || port->hung ||
             port->command_us || reg->file->limited[rail] || (reg->file->switch_down[rail] >> host & 1);
    __atomic_store_n(&port->active, active, __ATOMIC_SEQ_CST);
    if (registry_switched(reg, rail))
        tell_switch(reg, host, rail);
}

int registry_socket_address(const struct registry *reg, const char *name, int way, struct sockaddr_un *at) {
    int n;

    *at = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (way == 0)
        n = snprintf(at->sun_path, sizeof(at->sun_path), "/proc/self/fd/%d/%s", reg->dir_fd, name);
    else
        n = snprintf(at->sun_path, sizeof(at->sun_path), "%s/%s", reg->dir, name);
    return n < 0 || (size_t)n >= sizeof(at->sun_path) ? -ENAMETOOLONG : 0;
}

void registry_notify(struct registry *reg, unsigned host, unsigned rail) {
    for (unsigned i = 0; i < reg->file->claim_end; i++) {
        const struct registry_claim *claim = &reg->file->claims[i];
        struct sockaddr_un to;
        char name[32];

        if (!claim->pid || claim->host != host || claim->rail != rail)
            continue;
        snprintf(name, sizeof(name), "notify.%u", i);
        /* Not there any more, or so full that it will look anyway: both are fine. */
        for (int way = 0; way < REGISTRY_SOCKET_WAYS; way++)
            if (registry_socket_address(reg, name, way, &to) == 0 &&
                sendto(reg->notify_fd, "", 1, MSG_NOSIGNAL, (struct sockaddr *)&to, sizeof(to)) == 1)
                break;
    }
}

void registry_set_link(struct registry *reg, unsigned host, unsigned rail, bool up) {
    struct registry_port *port = &reg->file->ports[host][rail];

    if (!(port->link_changes & 1) == up)
        return;
    __atomic_store_n(&port->changed_ns, registry_now_ns(), __ATOMIC_RELAXED);
    __atomic_store_n(&port->link_changes, port->link_changes + 1, __ATOMIC_SEQ_CST);
    registry_update_active(reg, host, rail);
    registry_notify(reg, host, rail);
}

void registry_kill(struct registry *reg, unsigned host, unsigned rail) {
    struct registry_port *port = &reg->file->ports[host][rail];

    if (port->dead)
        return;
    __atomic_store_n(&port->changed_ns, registry_now_ns(), __ATOMIC_RELAXED);
    __atomic_store_n(&port->dead, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&port->kills, port->kills + 1, __ATOMIC_SEQ_CST);
    registry_update_active(reg, host, rail);
    registry_notify(reg, host, rail);
}

void registry_revive(struct registry *reg, unsigned host, unsigned rail) {
    struct registry_port *port = &reg->file->ports[host][rail];

    if (!port->dead)
        return;
    __atomic_store_n(&port->changed_ns, registry_now_ns(), __ATOMIC_RELAXED);
    __atomic_store_n(&port->dead, 0, __ATOMIC_SEQ_CST);
}

void registry_set_stalled(struct registry *reg, unsigned host, unsigned rail, bool stalled) {
    __atomic_store_n(&reg->file->ports[host][rail].stalled, stalled, __ATOMIC_SEQ_CST);
    registry_update_active(reg, host, rail);
    registry_notify(reg, host, rail);
}

void registry_set_hung(struct registry *reg, unsigned host, unsigned rail, bool hung) {
    __atomic_store_n(&reg->file->ports[host][rail].hung, hung, __ATOMIC_SEQ_CST);
    registry_update_active(reg, host, rail);
    registry_notify(reg, host, rail);
}

void registry_set_slow(struct registry *reg, unsigned host, unsigned rail, uint32_t command_us) {
    __atomic_store_n(&reg->file->ports[host][rail].command_us, command_us, __ATOMIC_SEQ_CST);
    registry_update_active(reg, host, rail);
}

void registry_set_switch(struct registry *reg, unsigned rail, uint64_t hosts, bool up) {
    uint64_t mask = reg->file->switch_down[rail];

    __atomic_store_n(&reg->file->switch_down[rail], up ? mask & ~hosts : mask | hosts, __ATOMIC_SEQ_CST);
    for (unsigned host = 0; host < reg->file->host_count; host++)
        registry_update_active(reg, host, rail);
}

int registry_host_of(const struct registry *reg, uint32_t address) {
    for (unsigned i = 0; i < reg->file->claim_end; i++)
        if (reg->file->claims[i].pid && reg->file->claims[i].address == address)
            return (int)reg->file->claims[i].host;
    return -1;
}

int registry_host_at(const struct registry *reg, unsigned rail, uint32_t address) {
    uint32_t ip = ntohl(address), host = (ip >> 8 & 255) - 1;

    if (ip >> 16 == (127u << 8 | (REGISTRY_RAIL_NET + rail)))
        return host < __atomic_load_n(&reg->file->host_count, __ATOMIC_ACQUIRE) ? (int)host : -1;
    return registry_host_of(reg, address);
}

/* If there is one already; one that is made later begins with what the links say then. */
static void set_switch(struct registry *reg, int host, unsigned rail, const struct fabric_params *params) {
    struct registry_switch *shared = registry_switch_lock(reg, rail, false);

    if (!shared)
        return;
    fabric_switch_run(&shared->fabric, registry_now_ns());
    for (unsigned h = 0; h < FAULT_MAX_HOSTS; h++)
        if (host < 0 || h == (unsigned)host)
            fabric_switch_set(&shared->fabric, h, params);
    registry_switch_unlock(shared);
}

void registry_set_fabric(struct registry *reg, int host, int rail, const struct fabric_params *params) {
    struct registry_file *file = reg->file;

    for (unsigned r = 0; r < FAULT_MAX_RAILS; r++) {
        uint32_t limited = 0, switched = 0;

        if (rail >= 0 && r != (unsigned)rail)
            continue;
        for (unsigned h = 0; h < FAULT_MAX_HOSTS; h++) {
            if (host < 0 || h == (unsigned)host) {
                struct registry_link *link = registry_link_lock(reg, h, r);

                /* What waits goes on as it was promised. */
                link->params = *params;
                if (!link->port.random)
                    link->port.random = h * FAULT_MAX_RAILS + r + 1; /* no two ports mark alike */
                registry_link_unlock(link);
            }
            limited |= file->links[h][r].params.rate != 0;
            switched |= file->links[h][r].params.pfc;
        }
        set_switch(reg, host, r, params);
        __atomic_store_n(&file->limited[r], limited, __ATOMIC_SEQ_CST);
        __atomic_store_n(&file->switched[r], switched, __ATOMIC_SEQ_CST);
        for (unsigned h = 0; h < file->host_count; h++) {
            registry_update_active(reg, h, r);
            registry_notify(reg, h, r);
        }
    }
}

int registry_lock_file(struct registry *reg, const char *name) {
    int fd = openat(reg->dir_fd, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

    if (fd < 0)
        return -1;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        int saved = errno == EWOULDBLOCK ? EADDRINUSE : errno;

        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

bool registry_claim_alive(struct registry *reg, unsigned index) {
    char name[32];
    int fd;

    snprintf(name, sizeof(name), "claim.%u", index);
    fd = openat(reg->dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    /* Shared, so that two who ask at once do not see each other; a claimer that fails because of us tries
     * again. */
    if (flock(fd, LOCK_SH | LOCK_NB) != 0) {
        close(fd);
        return true;
    }
    close(fd);
    return false;
}
