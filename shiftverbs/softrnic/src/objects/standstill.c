/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What stands still on request: commands (verbs that a driver gives to its NIC and waits for) that do not return, and a
 * data path that takes work and does none.
 */
#include "objects/nic.h"

#include <sched.h>
#include <time.h>

/* As long as a command of a slow NIC takes: asleep for most of it, and awake at its end, which a timer misses by more. */
static int take_time(struct srn_nic *nic) {
    const uint64_t awake_ns = 100000, look_ns = 10000000;
    uint64_t takes_ns = fault_command_us(nic->port) * UINT64_C(1000);
    uint64_t until, now;
    int rc = 0;

    if (!takes_ns)
        return 0;
    until = srn_now_ns() + takes_ns;
    while (!(rc = srn_nic_gone(nic)) && (now = srn_now_ns()) < until) {
        uint64_t left = until - now;
        struct timespec nap = {0, (long)(left - awake_ns < look_ns ? left - awake_ns : look_ns)};

        if (left > awake_ns)
            (void)nanosleep(&nap, NULL);
        else
            sched_yield();
    }
    return rc;
}

int srn_command(struct srn_nic *nic) {
    int rc = srn_nic_gone(nic);

    if (!rc && nic->port)
        rc = take_time(nic);
    if (rc || !nic->port || !fault_commands_hang(nic->port))
        return rc;
    pthread_mutex_lock(&nic->command_lock);
    while (!(rc = srn_nic_gone(nic)) && nic->port && fault_commands_hang(nic->port))
        pthread_cond_wait(&nic->command_cond, &nic->command_lock);
    pthread_mutex_unlock(&nic->command_lock);
    return rc;
}

void srn_commands_wake(struct srn_nic *nic) {
    pthread_mutex_lock(&nic->command_lock);
    pthread_cond_broadcast(&nic->command_cond);
    pthread_mutex_unlock(&nic->command_lock);
}

bool srn_stalled(struct srn_nic *nic) {
    if (!nic->port || !fault_is_stalled(nic->port))
        return false;
    atomic_store_explicit(&nic->stood_still, true, memory_order_relaxed);
    return true;
}
