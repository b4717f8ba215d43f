/* SPDX-License-Identifier: BSD-3-Clause */
/* Finds the libibverbs that this library stands in front of, when the first call has to be passed on. */
#include <dlfcn.h>

#include "softrnic.h"

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
