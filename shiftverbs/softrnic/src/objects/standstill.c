/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What stands still on request: commands (verbs that a driver gives to its NIC and waits for) that do not return, and a
 * data path that takes work and does none.
 */
#include "objects/nic.h"

int srn_command(struct srn_nic *nic) {
    int rc = srn_nic_gone(nic);

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
