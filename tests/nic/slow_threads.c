// SPDX-License-Identifier: BSD-3-Clause
//
// For LD_PRELOAD: other threads than the first have no turn of a processor for a while, as on a loaded machine, where
// they have got memory that is zero, and just before they give a semaphore back. CPython makes a thread's state of such
// memory, before it takes a lock for that; up to 3.12 its locks are semaphores.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <semaphore.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>

#define PREEMPTED_NS 200000

void *__libc_calloc(size_t n, size_t size); // glibc's own: dlsym may need memory itself

static void be_preempted(void) {
    struct timespec preempted = {0, PREEMPTED_NS};

    if (gettid() != getpid())
        nanosleep(&preempted, NULL);
}

void *calloc(size_t n, size_t size) {
    void *memory = __libc_calloc(n, size);

    be_preempted();
    return memory;
}

int sem_post(sem_t *sem) {
    static int (*next)(sem_t *);

    if (!next)
        next = (int (*)(sem_t *))dlsym(RTLD_NEXT, "sem_post");
    be_preempted();
    return next(sem);
}
