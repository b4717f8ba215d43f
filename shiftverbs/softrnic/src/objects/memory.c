/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The program's memory, as the NIC reaches it. A real NIC has pinned the pages; ours has addresses only, and what is
 * behind them may be gone or protected by now, or go at this very moment. So no access is a load or a store of ours: the
 * kernel copies, between a file in memory that packets lie in and the program's addresses, and tells where it could not.
 * That costs half of what process_vm_readv() on ourselves does, which looks up and holds each page. The calls are made
 * without the C library: there they are points where a thread may be cancelled, with our locks held, and that costs too.
 *
 * Where there is no such file, or it cannot be written (the program's files may have a greatest size), the dearer call does
 * it.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "objects/nic.h"
#include "objects/queues.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
/* Sanitizers know what these do to memory, and nothing of bare system calls. */
#define COPY_IN(fd, vec, count, offset) pwritev(fd, vec, count, offset)
#define COPY_OUT(fd, vec, count, offset) preadv(fd, vec, count, offset)
#else
_Static_assert(sizeof(long) == sizeof(off_t), "an offset is one argument of a system call");
#define COPY_IN(fd, vec, count, offset)                                                                      \
    ((count) == 1 ? syscall(SYS_pwrite64, fd, (vec)->iov_base, (vec)->iov_len, offset)                       \
                  : syscall(SYS_pwritev, fd, vec, count, offset, 0))
#define COPY_OUT(fd, vec, count, offset)                                                                     \
    ((count) == 1 ? syscall(SYS_pread64, fd, (vec)->iov_base, (vec)->iov_len, offset)                        \
                  : syscall(SYS_preadv, fd, vec, count, offset, 0))
#endif

/* All atomics of this process, on whatever NIC: a region may be registered with several. */
static pthread_mutex_t atomics = PTHREAD_MUTEX_INITIALIZER;

static bool get_slowly(const struct iovec *from, int count, uint8_t *to, size_t len) {
    struct iovec ours = {to, len};

    return process_vm_readv(getpid(), &ours, 1, from, (unsigned long)count, 0) == (ssize_t)len;
}

static bool put_slowly(const struct iovec *to, int count, const uint8_t *from, size_t len) {
    struct iovec ours = {(void *)from, len};

    return process_vm_writev(getpid(), &ours, 1, to, (unsigned long)count, 0) == (ssize_t)len;
}

/* The file, mapped at base. 0 or errno. */
static int open_file(struct srn_memory *memory) {
    struct rlimit most;
    int rc = 0;

    /* A file that is greater brings a signal that ends the program. */
    if (!getrlimit(RLIMIT_FSIZE, &most) && most.rlim_cur != RLIM_INFINITY && most.rlim_cur < memory->size)
        return EFBIG;
    memory->fd = memfd_create("softrnic-packets", MFD_CLOEXEC);
    if (memory->fd < 0)
        return errno;
    if (ftruncate(memory->fd, (off_t)memory->size))
        rc = errno;
    if (!rc) {
        memory->base = mmap(NULL, memory->size, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
        if (memory->base == MAP_FAILED)
            rc = errno;
    }
    if (rc) {
        close(memory->fd);
        memory->fd = -1;
        return rc;
    }
    (void)fcntl(memory->fd, F_SETFL, O_NOATIME); /* nobody asks when it was read: a little faster */
    return 0;
}

int srn_memory_open(struct srn_memory *memory, size_t packets) {
    uint8_t here = 1, there = 0;
    struct iovec one = {&here, 1};
    int rc;

    memory->size = packets + SRN_MEMORY_BOUNCE;
    rc = open_file(memory);
    if (rc) {
        memory->base = NULL;
        if (!get_slowly(&one, 1, &there, 1))
            return rc;
        memory->base = mmap(NULL, memory->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory->base == MAP_FAILED) {
            memory->base = NULL;
            return errno;
        }
    }
    /* A forked child must not see our packets, let alone write them. */
    (void)madvise(memory->base, memory->size, MADV_DONTFORK);
    return 0;
}

void srn_memory_close(struct srn_memory *memory) {
    if (memory->base)
        munmap(memory->base, memory->size);
    if (memory->fd >= 0)
        close(memory->fd);
    memory->base = NULL;
    memory->fd = -1;
}

void srn_memory_after_fork(struct srn_memory *memory) {
    if (memory->fd >= 0)
        close(memory->fd);
    memory->base = NULL;
    memory->fd = -1;
}

void srn_atomics_after_fork(void) {
    pthread_mutex_init(&atomics, NULL);
}

/* Where these bytes are in the file; -1 if they are not there. */
static off_t offset_of(const struct srn_memory *memory, const uint8_t *data, size_t len) {
    uintptr_t at = (uintptr_t)data - (uintptr_t)memory->base;

    return at < memory->size && len <= memory->size - at ? (off_t)at : -1;
}

static off_t bounce(const struct srn_memory *memory) {
    return (off_t)(memory->size - SRN_MEMORY_BOUNCE);
}

bool srn_memory_get(struct srn_memory *memory, const struct iovec *from, int count, uint8_t *to, size_t len) {
    off_t offset = offset_of(memory, to, len);
    bool direct = offset >= 0;
    long n;

    if (memory->fd < 0)
        return get_slowly(from, count, to, len);
    if (!direct) {
        if (len > SRN_MEMORY_BOUNCE)
            return false;
        offset = bounce(memory);
    }
    n = COPY_IN(memory->fd, from, count, offset);
    /* As a rule not all of the memory is there; or the limit on the size of files was lowered meanwhile. */
    if (n != (long)len)
        return get_slowly(from, count, to, len);
    if (!direct)
        memcpy(to, memory->base + offset, len);
    return true;
}

bool srn_memory_put(struct srn_memory *memory, const struct iovec *to, int count, const uint8_t *from,
                    size_t len) {
    off_t offset = offset_of(memory, from, len);
    long n;

    if (memory->fd < 0)
        return put_slowly(to, count, from, len);
    if (offset < 0) {
        if (len > SRN_MEMORY_BOUNCE)
            return false;
        offset = bounce(memory);
        memcpy(memory->base + offset, from, len);
    }
    n = COPY_OUT(memory->fd, to, count, offset);
    return n == (long)len;
}

bool srn_memory_place(struct srn_memory *memory, uint8_t *to, const uint8_t *from, size_t len) {
    size_t tail = (((uintptr_t)to + len - 1) & 7) + 1;
    struct iovec parts[2];

    if (tail >= len)
        tail = 0;
    parts[0] = (struct iovec){to, len - tail};
    parts[1] = (struct iovec){to + len - tail, tail};
    return srn_memory_put(memory, parts, tail ? 2 : 1, from, len);
}

bool srn_memory_atomic(struct srn_memory *memory, uint8_t *at, bool swap, uint64_t compare, uint64_t swap_add,
                       uint64_t *original) {
    struct iovec word = {at, sizeof(*original)};
    uint64_t value;
    bool ok;

    pthread_mutex_lock(&atomics);
    ok = srn_memory_get(memory, &word, 1, (uint8_t *)original, sizeof(*original));
    if (ok && (!swap || *original == compare)) {
        value = swap ? swap_add : *original + swap_add;
        ok = srn_memory_put(memory, &word, 1, (const uint8_t *)&value, sizeof(value));
    }
    pthread_mutex_unlock(&atomics);
    return ok;
}
