/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Packets on rails that have limits: they wait here, first for the host's link, then in the switch and on its wire. The
 * process that sends a packet keeps it until it arrives; what links and queues do with it is in shared memory (rails.h).
 *
 * A QP that has enough waiting for the link pauses: a NIC takes the next packet of a send queue when it can send it.
 */
#include <stdlib.h>
#include <string.h>

#include "faults/rails.h"
#include "transport/net.h"
#include "transport/transport.h"

/* How much a QP gives the link ahead, in its time: what it takes a busy machine to come back to it. */
#define AHEAD_NS 500000
/* What a NIC has memory for, of packets that cannot be paused (datagrams, answers). */
#define MAX_WAITING ((size_t)32 << 20)

enum stage { LINK, SWITCH, RESUME };

struct carried {
    uint64_t due_ns;
    uint64_t sequence; /* of two that are due at once, the first goes first */
    enum stage stage;
    uint32_t peer_ip;
    uint32_t qpn; /* RESUME */
    size_t len;
    uint8_t data[];
};

/* A heap by due_ns. */
struct srn_carry {
    struct carried **items;
    size_t count, capacity;
    size_t waiting; /* bytes for the link */
    uint64_t sequence;
};

static bool before(const struct carried *a, const struct carried *b) {
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->sequence < b->sequence;
}

static bool push(struct srn_nic *nic, struct carried *item) {
    struct srn_carry *carry = nic->carry;
    size_t i = carry->count;

    if (i == carry->capacity) {
        size_t capacity = i ? 2 * i : 64;
        struct carried **items = realloc(carry->items, capacity * sizeof(struct carried *));

        if (!items)
            return false;
        carry->items = items;
        carry->capacity = capacity;
    }
    for (carry->count++; i && before(item, carry->items[(i - 1) / 2]); i = (i - 1) / 2)
        carry->items[i] = carry->items[(i - 1) / 2];
    carry->items[i] = item;
    srn_timer_at(nic, item->due_ns);
    return true;
}

static struct carried *pop(struct srn_carry *carry) {
    struct carried *first = carry->items[0], *last = carry->items[--carry->count];
    size_t i = 0;

    for (;;) {
        size_t child = 2 * i + 1;

        if (child + 1 < carry->count && before(carry->items[child + 1], carry->items[child]))
            child++;
        if (child >= carry->count || !before(carry->items[child], last))
            break;
        carry->items[i] = carry->items[child];
        i = child;
    }
    if (carry->count)
        carry->items[i] = last;
    return first;
}

static struct carried *new_item(struct srn_carry *carry, enum stage stage, uint64_t due_ns, size_t len) {
    struct carried *item = malloc(sizeof(*item) + len);

    if (item)
        *item = (struct carried){.due_ns = due_ns, .sequence = carry->sequence++, .stage = stage, .len = len};
    return item;
}

static struct srn_carry *get_carry(struct srn_nic *nic) {
    if (!nic->carry)
        nic->carry = calloc(1, sizeof(*nic->carry));
    return nic->carry;
}

/* This QP's next packet waits until the link has time for it. */
static void pause(struct srn_nic *nic, uint32_t qpn, uint64_t until_ns) {
    struct srn_qp *qp = srn_qp_find(nic, qpn);
    struct carried *item;

    if (!qp || qp->type != IBV_QPT_RC || !qp->req.window)
        return;
    item = new_item(nic->carry, RESUME, until_ns, 0);
    if (!item)
        return;
    item->qpn = qpn;
    if (push(nic, item))
        qp->req.window = 0;
    else
        free(item);
}

/* All its bits are in the switch. */
static void forward(struct srn_nic *nic, struct carried *item) {
    struct fabric_fate fate = rails_forward(nic->port, item->peer_ip, item->due_ns, item->len);

    item->due_ns = fate.out_ns;
    item->stage = SWITCH;
    if (fate.dropped || !push(nic, item))
        free(item);
}

void srn_carry(struct srn_nic *nic, uint32_t qpn, uint32_t peer_ip, const uint8_t *data, size_t len) {
    struct srn_carry *carry = get_carry(nic);
    uint64_t now = srn_now_ns(), sent;
    struct carried *item;

    item = carry && carry->waiting + len <= MAX_WAITING ? new_item(carry, LINK, 0, len) : NULL;
    if (!item) {
        nic->counters[SRN_CNT_TX_ERRORS]++;
        return;
    }
    memcpy(item->data, data, len);
    item->peer_ip = peer_ip;
    item->due_ns = sent = rails_send(nic->port, now, len);
    if (sent <= now) {
        forward(nic, item);
        return;
    }
    if (!push(nic, item)) {
        free(item);
        nic->counters[SRN_CNT_TX_ERRORS]++;
        return;
    }
    carry->waiting += len;
    if (sent > now + AHEAD_NS)
        pause(nic, qpn, sent - AHEAD_NS);
}

uint64_t srn_carry_run(struct srn_nic *nic, uint64_t now_ns) {
    struct srn_carry *carry = nic->carry;

    if (!carry)
        return 0;
    while (carry->count && carry->items[0]->due_ns <= now_ns) {
        struct carried *item = pop(carry);

        switch (item->stage) {
        case LINK:
            carry->waiting -= item->len;
            /* What had not left the host is lost with its cable. */
            if (fault_passes(nic->port)) {
                forward(nic, item);
            } else {
                nic->counters[SRN_CNT_TX_FILTERED]++;
                free(item);
            }
            break;
        case SWITCH:
            nic->net->transmit(nic, item->peer_ip, item->data, item->len);
            free(item);
            break;
        case RESUME:
            nic->net->resume(nic, item->qpn);
            free(item);
            break;
        }
    }
    return carry->count ? carry->items[0]->due_ns : 0;
}

/* What is in the switch first, so that connections keep their order. */
static int in_order(const void *a, const void *b) {
    const struct carried *one = *(struct carried *const *)a, *two = *(struct carried *const *)b;

    if (one->stage != two->stage)
        return one->stage == SWITCH ? -1 : two->stage == SWITCH ? 1 : one->stage < two->stage ? -1 : 1;
    return before(one, two) ? -1 : 1;
}

void srn_carry_finish(struct srn_nic *nic, bool arrive) {
    struct srn_carry *carry = nic->carry;

    if (!carry)
        return;
    if (carry->count)
        qsort(carry->items, carry->count, sizeof(struct carried *), in_order);
    for (size_t i = 0; i < carry->count; i++) {
        struct carried *item = carry->items[i];

        if (arrive && item->stage != RESUME)
            nic->net->transmit(nic, item->peer_ip, item->data, item->len);
        free(item);
    }
    free(carry->items);
    free(carry);
    nic->carry = NULL;
}
