// SPDX-License-Identifier: BSD-3-Clause
//
// For LD_PRELOAD: threads whose name begins with "nic" have no turn of a processor for a while just before they give a
// semaphore back, as on a loaded machine. CPython's locks are semaphores.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <time.h>

#define PREEMPTED_NS 200000

int sem_post(sem_t *sem) {
    static int (*next)(sem_t *);
    static __thread int is_nic; // 0: not known yet
    struct timespec preempted = {0, PREEMPTED_NS};

    if (!next)
        next = (int (*)(sem_t *))dlsym(RTLD_NEXT, "sem_post");
    if (!is_nic) {
        char name[16] = "";
        pthread_getname_np(pthread_self(), name, sizeof(name));
        is_nic = strncmp(name, "nic", 3) == 0 ? 1 : -1;
    }
    if (is_nic > 0)
        nanosleep(&preempted, NULL);
    return next(sem);
}
