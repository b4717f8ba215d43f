/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Event queues: a list, and an eventfd that is readable exactly while the list is not empty. So poll and
 * epoll on the descriptor tell the truth also after an object was destroyed with events unread.
 */
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "objects/nic.h"
#include "objects/queues.h"

int srn_evq_init(struct srn_evq *q) {
    q->fd = eventfd(0, EFD_CLOEXEC);
    if (q->fd < 0)
        return errno;
    pthread_mutex_init(&q->lock, NULL);
    srn_list_init(&q->events);
    return 0;
}

void srn_evq_close(struct srn_evq *q, bool forked) {
    struct srn_list *pos, *tmp;

    if (forked) {
        close(q->fd);
        return;
    }
    pthread_mutex_lock(&q->lock);
    srn_for_each(pos, tmp, &q->events) {
        srn_list_del(pos);
        free(srn_container(pos, struct srn_event, link));
    }
    close(q->fd);
    q->fd = -1;
    pthread_mutex_unlock(&q->lock);
}

static void evq_raise(struct srn_evq *q) {
    uint64_t one = 1;
    ssize_t n = write(q->fd, &one, sizeof(one));

    (void)n; /* cannot fail: the count is 0 before */
}

static void evq_lower(struct srn_evq *q) {
    uint64_t count;
    ssize_t n = read(q->fd, &count, sizeof(count));

    (void)n; /* cannot block: the count is 1 before */
}

void srn_evq_push(struct srn_evq *q, void *object, uint32_t *reported, const struct ibv_async_event *async) {
    struct srn_event *e = calloc(1, sizeof(*e));

    if (!e)
        return;
    e->object = object;
    e->reported = reported;
    if (async)
        e->async = *async;
    pthread_mutex_lock(&q->lock);
    if (q->fd < 0) {
        pthread_mutex_unlock(&q->lock);
        free(e);
        return;
    }
    if (srn_list_empty(&q->events))
        evq_raise(q);
    srn_list_add_tail(&q->events, &e->link);
    pthread_mutex_unlock(&q->lock);
}

int srn_evq_pop(struct srn_evq *q, struct srn_event *out) {
    for (;;) {
        pthread_mutex_lock(&q->lock);
        if (!srn_list_empty(&q->events)) {
            struct srn_event *e = srn_container(q->events.next, struct srn_event, link);

            srn_list_del(&e->link);
            if (srn_list_empty(&q->events))
                evq_lower(q);
            if (e->reported)
                ++*e->reported;
            *out = *e;
            pthread_mutex_unlock(&q->lock);
            free(e);
            return 0;
        }
        pthread_mutex_unlock(&q->lock);

        int flags = fcntl(q->fd, F_GETFL);
        if (flags < 0)
            return -1;
        if (flags & O_NONBLOCK) {
            errno = EAGAIN;
            return -1;
        }
        struct pollfd p = {.fd = q->fd, .events = POLLIN};
        if (poll(&p, 1, -1) < 0)
            return -1;
    }
}

void srn_evq_forget(struct srn_evq *q, const void *object) {
    struct srn_list *pos, *tmp;

    pthread_mutex_lock(&q->lock);
    bool had = !srn_list_empty(&q->events);
    srn_for_each(pos, tmp, &q->events) {
        struct srn_event *e = srn_container(pos, struct srn_event, link);

        if (e->object == object) {
            srn_list_del(&e->link);
            free(e);
        }
    }
    if (had && srn_list_empty(&q->events))
        evq_lower(q);
    pthread_mutex_unlock(&q->lock);
}
