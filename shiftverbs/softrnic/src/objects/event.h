/* SPDX-License-Identifier: BSD-3-Clause */
/* Event queues: what stands behind a completion channel and behind a context's async_fd. event.c */
#ifndef SOFTRNIC_OBJECTS_EVENT_H
#define SOFTRNIC_OBJECTS_EVENT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <infiniband/verbs.h>

#include "objects/list.h"

struct srn_evq {
    pthread_mutex_t lock;
    int fd; /* eventfd, readable exactly while the list is not empty */
    struct srn_list events;
};

struct srn_event {
    struct srn_list link;
    void *object; /* the srn_cq or srn_qp it is about, NULL for port and device events */
    uint32_t *reported;
    struct ibv_async_event async;
};

int srn_evq_init(struct srn_evq *q);
/*
 * Drop all events and close the descriptor; the structure stays, and accepts no more. In a forked child the lock may be
 * held for ever by a thread that is not there: then only the descriptor is closed.
 */
void srn_evq_close(struct srn_evq *q, bool forked);
/* `reported` (may be NULL) is incremented when the event is taken. Drops the event if there is no memory. */
void srn_evq_push(struct srn_evq *q, void *object, uint32_t *reported, const struct ibv_async_event *async);
/* Wait for an event as a read on the descriptor would: 0, or -1 with errno (EAGAIN on O_NONBLOCK, EINTR). */
int srn_evq_pop(struct srn_evq *q, struct srn_event *out);
/* Remove what was not yet taken about this object. */
void srn_evq_forget(struct srn_evq *q, const void *object);

#endif
