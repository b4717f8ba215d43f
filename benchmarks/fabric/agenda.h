/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What is to happen, in virtual time: a heap of events, those of one moment in the order they were made. Before it is
 * included, `struct event` is defined, with at (ns) and sequence (set here) among its members, and EVENTS, the most of them.
 */
#ifndef AGENDA_H
#define AGENDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static struct event heap[EVENTS];
static size_t heap_count;

static bool before(const struct event *a, const struct event *b) {
    return a->at != b->at ? a->at < b->at : a->sequence < b->sequence;
}

/* Have it happen at that time. */
static void push(uint64_t at, struct event event) {
    static uint64_t sequence;
    size_t i = heap_count++;

    event.at = at;
    event.sequence = sequence++;
    if (heap_count == EVENTS)
        abort();
    for (; i && before(&event, &heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = event;
}

/* The next one; there must be one. */
static struct event pop(void) {
    struct event first = heap[0], last = heap[--heap_count];
    size_t i = 0;

    for (;;) {
        size_t child = 2 * i + 1;

        if (child + 1 < heap_count && before(&heap[child + 1], &heap[child]))
            child++;
        if (child >= heap_count || !before(&heap[child], &last))
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return first;
}

#endif
