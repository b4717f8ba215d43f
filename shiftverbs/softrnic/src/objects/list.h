/* SPDX-License-Identifier: BSD-3-Clause */
/* Intrusive lists, and a lock for sections of a few instructions. */
#ifndef SOFTRNIC_OBJECTS_LIST_H
#define SOFTRNIC_OBJECTS_LIST_H

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

struct srn_list {
    struct srn_list *next, *prev;
};

static inline void srn_list_init(struct srn_list *l) {
    l->next = l->prev = l;
}

static inline bool srn_list_empty(const struct srn_list *l) {
    return l->next == l;
}

static inline void srn_list_add_tail(struct srn_list *head, struct srn_list *n) {
    n->prev = head->prev;
    n->next = head;
    head->prev->next = n;
    head->prev = n;
}

/* Leaves n empty, so that deleting twice is harmless. */
static inline void srn_list_del(struct srn_list *n) {
    n->prev->next = n->next;
    n->next->prev = n->prev;
    n->next = n->prev = n;
}

#define srn_container(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))
#define srn_for_each(pos, tmp, head)                                                                         \
    for ((pos) = (head)->next, (tmp) = (pos)->next; (pos) != (head); (pos) = (tmp), (tmp) = (pos)->next)

/*
 * A lock for sections of a few instructions: half the price of a mutex where nobody else wants it, which is what a
 * poll of a CQ is. Whoever finds it taken gives up the core, in case its holder was preempted.
 */
struct srn_spin {
    atomic_bool taken;
};

static inline void srn_spin_lock(struct srn_spin *l) {
    for (unsigned int i = 0; atomic_exchange_explicit(&l->taken, true, memory_order_acquire); i++)
        if (i >= 64)
            sched_yield();
}

static inline void srn_spin_unlock(struct srn_spin *l) {
    atomic_store_explicit(&l->taken, false, memory_order_release);
}

#endif
