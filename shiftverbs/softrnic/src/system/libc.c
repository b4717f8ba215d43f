/* SPDX-License-Identifier: BSD-3-Clause */
#include "system/libc.h"

#include <dlfcn.h>

static const char *const names[] = {
#define NAME(name) #name,
    SYSTEM_FUNCTIONS(NAME)
#undef NAME
};
static void *_Atomic behind[SYSTEM_FUNCTION_COUNT];

void *system_behind(enum system_function function) {
    void *found = behind[function];

    /* Called before our constructor, by another library's. */
    if (!found)
        behind[function] = found = dlsym(RTLD_NEXT, names[function]);
    return found;
}

__attribute__((constructor)) static void look_up_all(void) {
    for (unsigned int i = 0; i < SYSTEM_FUNCTION_COUNT; i++)
        system_behind(i);
}
