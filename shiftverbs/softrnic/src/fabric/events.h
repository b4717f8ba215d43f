/* SPDX-License-Identifier: BSD-3-Clause */
/* What is going to happen on a rail with flow control, in the order of time: a heap. */
#ifndef SOFTRNIC_FABRIC_EVENTS_H
#define SOFTRNIC_FABRIC_EVENTS_H

#include "fabric/switch.h"

/* Each host has at most one packet on its link and one on the way out; pauses are what there may be too many of. */
void fabric_events_push(struct fabric_switch *sw, uint64_t at_ns, enum fabric_event_kind kind, unsigned host,
                        unsigned priority);
/* The next one, if it is due; of two at once, the one that was pushed first. */
bool fabric_events_pop(struct fabric_switch *sw, uint64_t now_ns, struct fabric_event *event);

#endif
