/* SPDX-License-Identifier: BSD-3-Clause */
/* The key table, and the access checks that every local key goes through (windows.c: remote keys). */
#include <stdlib.h>

#include "objects/keys.h"
#include "objects/nic.h"

#define KEY_SLOT_BITS 24
#define NO_SLOT UINT32_MAX

/*
 * The key table: key = slot number (offset by the NIC's base) and a generation, as real NICs do. The slot that became
 * free last is taken first: where there are no new generations, the next registration has the same key.
 */

uint32_t srn_key_make(const struct srn_nic *nic, uint32_t slot) {
    return ((slot + nic->key_base) & ((1u << KEY_SLOT_BITS) - 1)) << 8 | nic->mr_slots[slot].generation;
}

struct srn_mr_slot *srn_key_slot(const struct srn_nic *nic, uint32_t key) {
    uint32_t slot = ((key >> 8) - nic->key_base) & ((1u << KEY_SLOT_BITS) - 1);

    return slot < nic->mr_slot_count ? &nic->mr_slots[slot] : NULL;
}

struct srn_mr *srn_mr_find(const struct srn_nic *nic, uint32_t key) {
    const struct srn_mr_slot *slot = srn_key_slot(nic, key);

    return slot && slot->mr && slot->mr->key == key ? slot->mr : NULL;
}

uint32_t srn_key_take(struct srn_nic *nic) {
    if (nic->mr_free == NO_SLOT) {
        uint32_t old = nic->mr_slot_count, count = old ? old * 2 : 64;
        struct srn_mr_slot *slots;

        if (count > SRN_MAX_MR)
            return NO_SLOT;
        slots = realloc(nic->mr_slots, count * sizeof(*slots));
        if (!slots)
            return NO_SLOT;
        for (uint32_t i = old; i < count; i++)
            slots[i] = (struct srn_mr_slot){
                .generation = (uint8_t)srn_random(),
                .next_free = i + 1 < count ? i + 1 : NO_SLOT,
            };
        nic->mr_slots = slots;
        nic->mr_slot_count = count;
        nic->mr_free = old;
    }

    uint32_t slot = nic->mr_free;
    nic->mr_free = nic->mr_slots[slot].next_free;
    if (!srn_global.config.reuse_keys)
        nic->mr_slots[slot].generation++;
    return slot;
}

void srn_key_give(struct srn_nic *nic, uint32_t slot) {
    nic->mr_slots[slot].mr = NULL;
    nic->mr_slots[slot].mw = NULL;
    nic->mr_slots[slot].next_free = nic->mr_free;
    nic->mr_free = slot;
}

uint8_t *srn_mr_resolve(struct srn_nic *nic, const struct srn_pd *pd, uint32_t key, uint64_t va,
                        uint64_t length, unsigned int access) {
    const struct srn_mr *mr = srn_mr_find(nic, key);

    if (!mr || mr->pd->base != pd->base || (mr->access & access) != access)
        return NULL;
    if (va < mr->iova || length > mr->length || va - mr->iova > mr->length - length)
        return NULL;
    return mr->addr + (va - mr->iova);
}

/* --- SGE lists --- */

bool srn_sge_check(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge, uint32_t num_sge,
                   unsigned int access) {
    for (uint32_t i = 0; i < num_sge; i++)
        if (sge[i].length && !srn_mr_resolve(nic, pd, sge[i].lkey, sge[i].addr, sge[i].length, access))
            return false;
    return true;
}

/*
 * Where `length` bytes at `offset` of the list are; the list must be long enough. Returns how many pieces, -1 on a bad
 * SGE.
 */
static int locate(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge, uint32_t num_sge,
                  uint32_t offset, uint32_t length, unsigned int access, struct iovec *pieces) {
    int count = 0;

    for (uint32_t i = 0; i < num_sge && length; i++) {
        uint32_t n;
        uint8_t *memory;

        if (offset >= sge[i].length) {
            offset -= sge[i].length;
            continue;
        }
        n = sge[i].length - offset < length ? sge[i].length - offset : length;
        /* The whole SGE is checked: a bad one is an error although this packet may not reach its bad end. */
        memory = srn_mr_resolve(nic, pd, sge[i].lkey, sge[i].addr, sge[i].length, access);
        if (!memory)
            return -1;
        pieces[count++] = (struct iovec){memory + offset, n};
        length -= n;
        offset = 0;
    }
    return length ? -1 : count;
}

bool srn_sge_gather(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge, uint32_t num_sge,
                    uint32_t offset, uint8_t *to, uint32_t length) {
    struct iovec pieces[SRN_MAX_SGE];
    int count = locate(nic, pd, sge, num_sge, offset, length, 0, pieces);

    return count == 0 || (count > 0 && srn_memory_get(&nic->memory, pieces, count, to, length));
}

bool srn_sge_scatter(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge,
                     uint32_t num_sge, uint32_t offset, const uint8_t *from, uint32_t length) {
    struct iovec pieces[SRN_MAX_SGE];
    int count = locate(nic, pd, sge, num_sge, offset, length, IBV_ACCESS_LOCAL_WRITE, pieces);

    return count == 0 || (count > 0 && srn_memory_put(&nic->memory, pieces, count, from, length));
}
