/* SPDX-License-Identifier: BSD-3-Clause */
/* The program's memory. memory.c */
#ifndef SOFTRNIC_OBJECTS_MEMORY_H
#define SOFTRNIC_OBJECTS_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define SRN_MEMORY_BOUNCE 8192

struct srn_memory {
    int fd;        /* of the file in memory that packets lie in; -1 = there is none */
    uint8_t *base; /* where packets lie; at its end SRN_MEMORY_BOUNCE bytes for what is not a packet's */
    size_t size;
};

/* `packets`: bytes for packets at base. 0 or errno. */
int srn_memory_open(struct srn_memory *memory, size_t packets);
void srn_memory_close(struct srn_memory *memory);
/* In the child: only what must not live on there is closed. */
void srn_memory_after_fork(struct srn_memory *memory);
void srn_atomics_after_fork(void);
/*
 * Copy from and to the program's memory; nic->lock held. `to` and `from` on our side may be anywhere, and cost no copy
 * more within the file. `len` bytes, which is what the vectors have. False: not all of that memory is there, or it does
 * not permit this; some of it may have been written.
 */
bool srn_memory_get(struct srn_memory *memory, const struct iovec *from, int count, uint8_t *to, size_t len);
bool srn_memory_put(struct srn_memory *memory, const struct iovec *to, int count, const uint8_t *from,
                    size_t len);
/*
 * The same to one place, the end of it last. The specification promises no order within a message, but NICs keep it, and
 * programs wait for a flag in the last word of what they expect; one copy may well store the end before the middle.
 */
bool srn_memory_place(struct srn_memory *memory, uint8_t *to, const uint8_t *from, size_t len);
/* Compare and swap, or fetch and add: atomic with respect to all software NICs of this process. */
bool srn_memory_atomic(struct srn_memory *memory, uint8_t *at, bool swap, uint64_t compare, uint64_t swap_add,
                       uint64_t *original);

#endif
