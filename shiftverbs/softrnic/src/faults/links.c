/* SPDX-License-Identifier: BSD-3-Clause */
/* What all processes share of the rails' fabric: each port's limits and, where there is flow control, each rail's switch. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "faults/registry.h"

_Static_assert(FABRIC_HOSTS == FAULT_MAX_HOSTS, "a switch has a port for each host");

static pthread_mutex_t map_lock = PTHREAD_MUTEX_INITIALIZER;

struct registry_link *registry_link_lock(struct registry *reg, unsigned host, unsigned rail) {
    struct registry_link *link = &reg->file->links[host][rail];

    /* Who died inside left times and counts, each of them possible. */
    if (pthread_mutex_lock(&link->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&link->lock);
    return link;
}

void registry_link_unlock(struct registry_link *link) {
    pthread_mutex_unlock(&link->lock);
}

static void init_switch(struct registry *reg, unsigned rail, struct registry_switch *shared) {
    pthread_mutexattr_t attr;

    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&shared->lock, &attr);
    pthread_mutexattr_destroy(&attr);
    for (unsigned host = 0; host < FAULT_MAX_HOSTS; host++) {
        struct registry_link *link = registry_link_lock(reg, host, rail);
        const struct registry_port *port = &reg->file->ports[host][rail];

        shared->fabric.hosts[host].params = link->params;
        shared->fabric.hosts[host].random = host * FAULT_MAX_RAILS + rail + 1;
        shared->fabric.hosts[host].still = port->stalled && !port->dead && !(port->link_changes & 1);
        registry_link_unlock(link);
    }
    fabric_switch_reset(&shared->fabric);
    shared->version = REGISTRY_VERSION;
    shared->size = sizeof(*shared);
    __atomic_store_n(&shared->magic, REGISTRY_MAGIC, __ATOMIC_RELEASE);
}

/* The rail's file, open and locked, as long as it must be: -1 and errno. */
static int open_file(struct registry *reg, unsigned rail, bool make) {
    char name[32];
    struct stat st;
    int fd, error;

    snprintf(name, sizeof(name), "rail%u.v%d", rail, REGISTRY_VERSION);
    fd = openat(reg->dir_fd, name, O_RDWR | (make ? O_CREAT : 0) | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return -1;
    error = flock(fd, LOCK_EX) != 0 || fstat(fd, &st) != 0 ? errno : 0;
    /* Allocated, not sparse: a full file system is an error here and not a SIGBUS later. */
    if (!error && st.st_size == 0)
        error = posix_fallocate(fd, 0, sizeof(struct registry_switch));
    else if (!error && (size_t)st.st_size != sizeof(struct registry_switch))
        error = EPROTO;
    if (!error)
        return fd;
    close(fd);
    errno = error;
    return -1;
}

static struct registry_switch *map_switch(struct registry *reg, unsigned rail, bool make) {
    int fd = open_file(reg, rail, make);
    struct registry_switch *shared;

    if (fd < 0)
        return NULL;
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared != MAP_FAILED && !shared->magic)
        init_switch(reg, rail, shared);
    (void)flock(fd, LOCK_UN); /* by hand: the mapping keeps the open file, and its lock with it */
    close(fd);
    if (shared == MAP_FAILED)
        return NULL;
    if (shared->magic != REGISTRY_MAGIC || shared->version != REGISTRY_VERSION ||
        shared->size != sizeof(*shared)) {
        munmap(shared, sizeof(*shared));
        errno = EPROTO;
        return NULL;
    }
    return shared;
}

struct registry_switch *registry_switch_lock(struct registry *reg, unsigned rail, bool make) {
    struct registry_switch *shared = __atomic_load_n(&reg->switches[rail], __ATOMIC_ACQUIRE);

    if (!shared) {
        pthread_mutex_lock(&map_lock);
        shared = reg->switches[rail];
        if (!shared) {
            shared = map_switch(reg, rail, make);
            __atomic_store_n(&reg->switches[rail], shared, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&map_lock);
        if (!shared)
            return NULL;
    }
    /* Who died inside may have left queues in pieces: what was in them is lost. */
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) {
        fabric_switch_reset(&shared->fabric);
        pthread_mutex_consistent(&shared->lock);
    }
    return shared;
}

void registry_switch_unlock(struct registry_switch *shared) {
    pthread_mutex_unlock(&shared->lock);
}
