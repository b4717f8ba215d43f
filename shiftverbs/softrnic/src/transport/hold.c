/* SPDX-License-Identifier: BSD-3-Clause */
/* Packets that a fault rule holds back: late ones, copies, and those that go behind the next one. */
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#include "transport/net.h"
#include "transport/transport.h"

struct held {
    struct srn_list link; /* in srn_nic.held, in the order in which they were held */
    enum fault_direction direction;
    uint64_t due_ns;
    bool overtaken_by_next;
    struct srn_peer peer;
    size_t len;
    uint8_t data[];
};

void srn_hold(struct srn_nic *nic, enum fault_direction direction, struct srn_peer peer, const uint8_t *data,
              size_t len, uint32_t delay_us, bool overtaken_by_next) {
    struct held *h = malloc(sizeof(*h) + len);

    if (!h)
        return; /* lost, as on any network */
    h->direction = direction;
    h->due_ns = srn_now_ns() + (uint64_t)delay_us * 1000;
    h->overtaken_by_next = overtaken_by_next;
    h->peer = peer;
    h->len = len;
    memcpy(h->data, data, len);
    srn_list_add_tail(&nic->held, &h->link);
    srn_timer_at(nic, h->due_ns);
}

static void release(struct srn_nic *nic, struct held *h) {
    srn_list_del(&h->link);
    if (!fault_passes(nic->port))
        nic->counters[h->direction == FAULT_TX ? SRN_CNT_TX_FILTERED : SRN_CNT_RX_FILTERED]++;
    else
        nic->net->go_on(nic, h->direction, h->peer, h->data, h->len);
    free(h);
}

/*
 * The first that goes now: by time, or (now_ns = 0) because a packet of this direction went. What is released may be
 * answered, and the answer held or pass: so the list is looked through afresh each time.
 */
static struct held *find(struct srn_nic *nic, enum fault_direction direction, uint64_t now_ns) {
    struct srn_list *pos, *tmp;

    srn_for_each(pos, tmp, &nic->held) {
        struct held *h = srn_container(pos, struct held, link);

        if (now_ns ? h->due_ns <= now_ns : h->direction == direction && h->overtaken_by_next)
            return h;
    }
    return NULL;
}

void srn_hold_passed(struct srn_nic *nic, enum fault_direction direction) {
    struct held *h;

    while ((h = find(nic, direction, 0)))
        release(nic, h);
}

uint64_t srn_hold_run(struct srn_nic *nic, uint64_t now_ns) {
    struct srn_list *pos, *tmp;
    uint64_t next = 0;
    struct held *h;

    while ((h = find(nic, FAULT_TX, now_ns)))
        release(nic, h);
    srn_for_each(pos, tmp, &nic->held) {
        h = srn_container(pos, struct held, link);
        if (!next || h->due_ns < next)
            next = h->due_ns;
    }
    return next;
}

void srn_hold_clear(struct srn_nic *nic) {
    while (!srn_list_empty(&nic->held)) {
        struct held *h = srn_container(nic->held.next, struct held, link);

        srn_list_del(&h->link);
        free(h);
    }
}
