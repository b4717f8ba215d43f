/* SPDX-License-Identifier: BSD-3-Clause */
#include "system/libc.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#include "system/answer.h"

/* Read once, without a lock: whoever comes while another thread writes it down has a copy of its own. */
static struct config described;
static atomic_int description; /* 0: none yet, 1: being written, 2: there */

const struct config *system_config(struct config *space) {
    int none = 0;

    if (atomic_load_explicit(&description, memory_order_acquire) == 2)
        return &described;
    /* As for the list of devices: what is not set now may be later. */
    if (!getenv("SOFTRNIC"))
        return NULL;
    config_load(space);
    if (!space->device_count)
        return NULL;
    if (!atomic_compare_exchange_strong(&description, &none, 1))
        return space;
    described = *space;
    atomic_store_explicit(&description, 2, memory_order_release);
    return &described;
}

bool system_is_asked(void) {
    Dl_info first, here;

    /* A name of ours that no sanitizer stands before. */
    return dladdr((void *)&dirfd, &first) && dladdr((void *)&described, &here) &&
           first.dli_fbase == here.dli_fbase;
}

/* Apart, so that all other paths cost no stack: they may come from a handler that has little. */
__attribute__((noinline)) static bool look(const char *path, bool follow, struct tree_node *node) {
    struct config space;
    const struct config *config;
    int saved = errno;
    bool found;

    config = system_config(&space);
    found = config && tree_find(config, path, follow, node);
    errno = saved;
    return found;
}

bool system_find(const char *path, bool follow, struct tree_node *node) {
    return path && tree_concerns(path) && look(path, follow, node);
}

bool system_find_ours(const char *path, bool follow, struct tree_node *node) {
    int saved = errno;
    bool ours = system_find(path, follow, node);

    if (ours && node->shared && SYSTEM_PASS(access, -1, node->path, F_OK) == 0)
        ours = false;
    errno = saved;
    return ours;
}
