/* SPDX-License-Identifier: BSD-3-Clause */
/* What is ours, and the libibverbs that everything else is passed on to, found at the first such call. */
#include <dlfcn.h>

#include "verbs/entry.h"

static void *real_library;
static pthread_once_t real_once = PTHREAD_ONCE_INIT;

static void real_open(void) {
    real_library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
}

void *srn_real_symbol(const char *name, void *_Atomic *cache) {
    void *symbol = atomic_load_explicit(cache, memory_order_acquire);

    if (symbol)
        return symbol;
    pthread_once(&real_once, real_open);
    if (real_library)
        symbol = dlsym(real_library, name);
    atomic_store_explicit(cache, symbol, memory_order_release);
    return symbol;
}

bool srn_device_is_ours(const struct ibv_device *device) {
    uintptr_t p = (uintptr_t)device, first = (uintptr_t)&srn_global.devices[0];

    return p >= first && p < first + sizeof(srn_global.devices);
}

bool srn_is_ours(const struct ibv_context *context) {
    return context && srn_device_is_ours(context->device);
}
