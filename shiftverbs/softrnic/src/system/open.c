/* SPDX-License-Identifier: BSD-3-Clause */
/* Files that are opened: a descriptor of memory that has what there is to read, as it is at that moment. */
#include "system/libc.h"

#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>

#include "system/answer.h"

#define TEXT_MAX 512

static int fail(int error) {
    errno = error;
    return -1;
}

/* A device is opened for nothing: what is to be done with it, verbs do. */
static int open_node(const struct tree_node *node, int flags) {
    bool device = node->kind == TREE_DEVICE;
    char text[TEXT_MAX];
    size_t len;
    int fd, error;

    if (flags & O_PATH || node->kind == TREE_DIRECTORY)
        return fail(EOPNOTSUPP); /* there is nothing that a descriptor could stand for: see opendir() */
    if (flags & O_DIRECTORY)
        return fail(ENOTDIR);
    if (node->kind == TREE_LINK)
        return fail(ELOOP); /* O_NOFOLLOW */
    if ((flags & O_CREAT) && (flags & O_EXCL))
        return fail(EEXIST);
    if (!device && (flags & O_ACCMODE) != O_RDONLY)
        return fail(EACCES);
    fd = memfd_create(strrchr(node->path, '/') + 1, flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
    if (fd < 0 || device)
        return fd;
    len = system_text(node, text, sizeof(text));
    if (write(fd, text, len) == (ssize_t)len && lseek(fd, 0, SEEK_SET) == 0)
        return fd;
    error = errno;
    close(fd);
    return fail(error);
}

#define MODE(flags)                                                                                          \
    ({                                                                                                       \
        int flags_ = (flags);                                                                                \
        mode_t mode_ = 0;                                                                                    \
        if (flags_ & O_CREAT || (flags_ & O_TMPFILE) == O_TMPFILE) {                                         \
            va_list rest_;                                                                                   \
            va_start(rest_, flags);                                                                          \
            mode_ = va_arg(rest_, mode_t);                                                                   \
            va_end(rest_);                                                                                   \
        }                                                                                                    \
        mode_;                                                                                               \
    })

static bool ours(const char *path, int flags, struct tree_node *node) {
    return system_find_ours(path, !(flags & O_NOFOLLOW), node);
}

SYSTEM_EXPORT int open(const char *path, int flags, ...) {
    struct tree_node node;
    mode_t mode = MODE(flags);

    return ours(path, flags, &node) ? open_node(&node, flags) : SYSTEM_PASS(open, -1, path, flags, mode);
}

SYSTEM_EXPORT int open64(const char *path, int flags, ...) {
    struct tree_node node;
    mode_t mode = MODE(flags);

    return ours(path, flags, &node) ? open_node(&node, flags) : SYSTEM_PASS(open64, -1, path, flags, mode);
}

SYSTEM_EXPORT int openat(int fd, const char *path, int flags, ...) {
    struct tree_node node;
    mode_t mode = MODE(flags);

    return ours(path, flags, &node) ? open_node(&node, flags)
                                    : SYSTEM_PASS(openat, -1, fd, path, flags, mode);
}

SYSTEM_EXPORT int openat64(int fd, const char *path, int flags, ...) {
    struct tree_node node;
    mode_t mode = MODE(flags);

    return ours(path, flags, &node) ? open_node(&node, flags)
                                    : SYSTEM_PASS(openat64, -1, fd, path, flags, mode);
}

/* Called with O_CREAT these end the program: that is left to them. */
SYSTEM_EXPORT int __open_2(const char *path, int flags) {
    struct tree_node node;

    return !(flags & O_CREAT) && ours(path, flags, &node) ? open_node(&node, flags)
                                                          : SYSTEM_PASS(__open_2, -1, path, flags);
}

SYSTEM_EXPORT int __open64_2(const char *path, int flags) {
    struct tree_node node;

    return !(flags & O_CREAT) && ours(path, flags, &node) ? open_node(&node, flags)
                                                          : SYSTEM_PASS(__open64_2, -1, path, flags);
}

SYSTEM_EXPORT int __openat_2(int fd, const char *path, int flags) {
    struct tree_node node;

    return !(flags & O_CREAT) && ours(path, flags, &node) ? open_node(&node, flags)
                                                          : SYSTEM_PASS(__openat_2, -1, fd, path, flags);
}

SYSTEM_EXPORT int __openat64_2(int fd, const char *path, int flags) {
    struct tree_node node;

    return !(flags & O_CREAT) && ours(path, flags, &node) ? open_node(&node, flags)
                                                          : SYSTEM_PASS(__openat64_2, -1, fd, path, flags);
}

static FILE *open_stream(const struct tree_node *node, const char *mode) {
    int fd = open_node(node, (mode[0] == 'r' && !strchr(mode, '+') ? O_RDONLY : O_RDWR) |
                                 (strchr(mode, 'e') ? O_CLOEXEC : 0));
    FILE *stream = fd >= 0 ? fdopen(fd, mode) : NULL;

    if (fd >= 0 && !stream) {
        int error = errno;

        close(fd);
        errno = error;
    }
    return stream;
}

SYSTEM_EXPORT FILE *fopen(const char *restrict path, const char *restrict mode) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? open_stream(&node, mode)
                                               : SYSTEM_PASS(fopen, NULL, path, mode);
}

SYSTEM_EXPORT FILE *fopen64(const char *restrict path, const char *restrict mode) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? open_stream(&node, mode)
                                               : SYSTEM_PASS(fopen64, NULL, path, mode);
}
