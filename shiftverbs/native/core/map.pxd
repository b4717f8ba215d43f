# SPDX-License-Identifier: BSD-3-Clause
"""A hash map from 64-bit keys to 64-bit values in plain C memory: open addressing, linear probing.

For lookups on the data path (QP number to QP, rkey to shadow rkey), where a dict would box and unbox integers.
The two largest keys are reserved. A zeroed Map is an empty one.
"""

from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc


cdef enum:
    MAP_MIN_SLOTS = 16


ctypedef struct MapSlot:
    uint64_t key
    uint64_t value


ctypedef struct Map:
    MapSlot *slots
    size_t mask      # number of slots - 1
    size_t live      # keys present
    size_t used      # slots not empty: live ones and tombstones


cdef inline uint64_t map_empty() noexcept nogil:
    return <uint64_t>-1


cdef inline uint64_t map_tombstone() noexcept nogil:
    return <uint64_t>-2


cdef inline size_t map_hash(uint64_t key) noexcept nogil:
    """Fibonacci hashing, upper half folded down: keys are small counters, pointers, (number << 32 | small)."""
    key *= <uint64_t>0x9E3779B97F4A7C15
    return <size_t>(key ^ (key >> 32))


cdef inline MapSlot *map_find(const Map *m, uint64_t key) noexcept nogil:
    """The slot of `key`, or NULL."""
    cdef size_t i
    if m.slots == NULL:
        return NULL
    i = map_hash(key) & m.mask
    while m.slots[i].key != map_empty():
        if m.slots[i].key == key:
            return &m.slots[i]
        i = (i + 1) & m.mask
    return NULL


cdef inline bint map_resize(Map *m, size_t n) noexcept nogil:
    """Move to a table of `n` slots (a power of two above the number of live keys). False: out of memory."""
    cdef size_t i, j
    cdef MapSlot *old = m.slots
    cdef size_t old_n = m.mask + 1 if old != NULL else 0
    cdef MapSlot *new = <MapSlot *>malloc(n * sizeof(MapSlot))
    if new == NULL:
        return False
    for i in range(n):
        new[i].key = map_empty()
        new[i].value = 0
    for i in range(old_n):
        if old[i].key < map_tombstone():
            j = map_hash(old[i].key) & (n - 1)
            while new[j].key != map_empty():
                j = (j + 1) & (n - 1)
            new[j] = old[i]
    free(old)
    m.slots = new
    m.mask = n - 1
    m.used = m.live
    return True


cdef inline bint map_set(Map *m, uint64_t key, uint64_t value) noexcept nogil:
    """Insert or replace. False: out of memory, or a reserved key."""
    cdef MapSlot *slot = map_find(m, key)
    cdef size_t i, n
    if slot != NULL:
        slot.value = value
        return True
    if key >= map_tombstone():
        return False
    if m.slots == NULL or (m.used + 1) * 4 > (m.mask + 1) * 3:
        n = MAP_MIN_SLOTS
        while n < (m.live + 1) * 2:
            n *= 2
        if not map_resize(m, n):
            return False
    i = map_hash(key) & m.mask
    while m.slots[i].key < map_tombstone():
        i = (i + 1) & m.mask
    if m.slots[i].key == map_empty():
        m.used += 1
    m.slots[i].key = key
    m.slots[i].value = value
    m.live += 1
    return True


cdef inline bint map_del(Map *m, uint64_t key) noexcept nogil:
    """Remove; False where the key was not there."""
    cdef MapSlot *slot = map_find(m, key)
    if slot == NULL:
        return False
    slot.key = map_tombstone()
    m.live -= 1
    return True


cdef inline void map_free(Map *m) noexcept nogil:
    free(m.slots)
    m.slots = NULL
    m.mask = 0
    m.live = 0
    m.used = 0
