/* SPDX-License-Identifier: BSD-3-Clause */
#include "fabric/events.h"

static bool before(const struct fabric_event *a, const struct fabric_event *b) {
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->sequence < b->sequence;
}

void fabric_events_push(struct fabric_switch *sw, uint64_t at_ns, enum fabric_event_kind kind, unsigned host,
                        unsigned priority) {
    struct fabric_event event = {at_ns, sw->sequence++, (uint8_t)kind, (uint8_t)host, (uint8_t)priority};
    uint32_t i = sw->event_count++;

    for (; i && before(&event, &sw->events[(i - 1) / 2]); i = (i - 1) / 2)
        sw->events[i] = sw->events[(i - 1) / 2];
    sw->events[i] = event;
}

bool fabric_events_pop(struct fabric_switch *sw, uint64_t now_ns, struct fabric_event *event) {
    struct fabric_event last;
    uint32_t i = 0;

    if (!sw->event_count || sw->events[0].at_ns > now_ns)
        return false;
    *event = sw->events[0];
    last = sw->events[--sw->event_count];
    for (;;) {
        uint32_t child = 2 * i + 1;

        if (child + 1 < sw->event_count && before(&sw->events[child + 1], &sw->events[child]))
            child++;
        if (child >= sw->event_count || !before(&sw->events[child], &last))
            break;
        sw->events[i] = sw->events[child];
        i = child;
    }
    sw->events[i] = last;
    return true;
}
