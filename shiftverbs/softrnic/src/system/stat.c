/* SPDX-License-Identifier: BSD-3-Clause */
/* What a program asks about a path: whether it is there, what it is, and who may use it. */
#include "system/libc.h"

#include <string.h>
#include <sys/sysmacros.h>

#include "system/answer.h"

/* The kernel's for /dev/infiniband/uverbs0 and those behind it (Documentation/admin-guide/devices.txt). */
#define UVERBS_MAJOR 231
#define UVERBS_MINOR 192

#define ATTRIBUTE_SIZE 4096 /* as sysfs says of every attribute */

static mode_t mode_of(const struct tree_node *node) {
    switch (node->kind) {
    case TREE_DIRECTORY:
        return S_IFDIR | 0755;
    case TREE_LINK:
        return S_IFLNK | 0777;
    case TREE_DEVICE:
        return S_IFCHR | 0666;
    default:
        return S_IFREG | 0444;
    }
}

static off_t size_of(const struct tree_node *node) {
    return node->kind == TREE_FILE   ? ATTRIBUTE_SIZE
           : node->kind == TREE_LINK ? (off_t)strlen(node->target)
                                     : 0;
}

static dev_t device_of(const struct tree_node *node) {
    return node->kind == TREE_DEVICE ? makedev(UVERBS_MAJOR, UVERBS_MINOR + (unsigned int)node->device.rail)
                                     : 0;
}

/* FNV-1a: the same for the same path, and not 0. */
static ino_t inode_of(const struct tree_node *node) {
    uint32_t h = 0x811c9dc5u;

    for (const char *p = node->path; *p; p++)
        h = (h ^ (uint8_t)*p) * 0x01000193u;
    return h | 1;
}

/* struct stat and struct stat64, which have the same fields. */
#define FILL(to, node)                                                                                       \
    do {                                                                                                     \
        memset(to, 0, sizeof(*(to)));                                                                        \
        (to)->st_ino = inode_of(node);                                                                       \
        (to)->st_mode = mode_of(node);                                                                       \
        (to)->st_nlink = (node)->kind == TREE_DIRECTORY ? 2 : 1;                                             \
        (to)->st_rdev = device_of(node);                                                                     \
        (to)->st_size = size_of(node);                                                                       \
        (to)->st_blksize = ATTRIBUTE_SIZE;                                                                   \
    } while (0)

static int give(const struct tree_node *node, struct stat *to) {
    FILL(to, node);
    return 0;
}

static int give64(const struct tree_node *node, struct stat64 *to) {
    FILL(to, node);
    return 0;
}

SYSTEM_EXPORT int stat(const char *restrict path, struct stat *restrict to) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? give(&node, to) : SYSTEM_PASS(stat, -1, path, to);
}

SYSTEM_EXPORT int stat64(const char *restrict path, struct stat64 *restrict to) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? give64(&node, to) : SYSTEM_PASS(stat64, -1, path, to);
}

SYSTEM_EXPORT int lstat(const char *restrict path, struct stat *restrict to) {
    struct tree_node node;

    return system_find_ours(path, false, &node) ? give(&node, to) : SYSTEM_PASS(lstat, -1, path, to);
}

SYSTEM_EXPORT int lstat64(const char *restrict path, struct stat64 *restrict to) {
    struct tree_node node;

    return system_find_ours(path, false, &node) ? give64(&node, to) : SYSTEM_PASS(lstat64, -1, path, to);
}

SYSTEM_EXPORT int fstatat(int fd, const char *restrict path, struct stat *restrict to, int flags) {
    struct tree_node node;

    return system_find_ours(path, !(flags & AT_SYMLINK_NOFOLLOW), &node)
               ? give(&node, to)
               : SYSTEM_PASS(fstatat, -1, fd, path, to, flags);
}

SYSTEM_EXPORT int fstatat64(int fd, const char *restrict path, struct stat64 *restrict to, int flags) {
    struct tree_node node;

    return system_find_ours(path, !(flags & AT_SYMLINK_NOFOLLOW), &node)
               ? give64(&node, to)
               : SYSTEM_PASS(fstatat64, -1, fd, path, to, flags);
}

SYSTEM_EXPORT int __xstat(int version, const char *path, struct stat *to) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? give(&node, to)
                                               : SYSTEM_PASS(__xstat, -1, version, path, to);
}

SYSTEM_EXPORT int __xstat64(int version, const char *path, struct stat64 *to) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? give64(&node, to)
                                               : SYSTEM_PASS(__xstat64, -1, version, path, to);
}

SYSTEM_EXPORT int __lxstat(int version, const char *path, struct stat *to) {
    struct tree_node node;

    return system_find_ours(path, false, &node) ? give(&node, to)
                                                : SYSTEM_PASS(__lxstat, -1, version, path, to);
}

SYSTEM_EXPORT int __lxstat64(int version, const char *path, struct stat64 *to) {
    struct tree_node node;

    return system_find_ours(path, false, &node) ? give64(&node, to)
                                                : SYSTEM_PASS(__lxstat64, -1, version, path, to);
}

SYSTEM_EXPORT int __fxstatat(int version, int fd, const char *path, struct stat *to, int flags) {
    struct tree_node node;

    return system_find_ours(path, !(flags & AT_SYMLINK_NOFOLLOW), &node)
               ? give(&node, to)
               : SYSTEM_PASS(__fxstatat, -1, version, fd, path, to, flags);
}

SYSTEM_EXPORT int __fxstatat64(int version, int fd, const char *path, struct stat64 *to, int flags) {
    struct tree_node node;

    return system_find_ours(path, !(flags & AT_SYMLINK_NOFOLLOW), &node)
               ? give64(&node, to)
               : SYSTEM_PASS(__fxstatat64, -1, version, fd, path, to, flags);
}

SYSTEM_EXPORT int statx(int fd, const char *restrict path, int flags, unsigned int mask,
                        struct statx *restrict to) {
    struct tree_node node;
    dev_t device;

    if (!system_find_ours(path, !(flags & AT_SYMLINK_NOFOLLOW), &node))
        return SYSTEM_PASS(statx, -1, fd, path, flags, mask, to);
    device = device_of(&node);
    memset(to, 0, sizeof(*to));
    to->stx_mask = STATX_BASIC_STATS;
    to->stx_ino = inode_of(&node);
    to->stx_mode = (uint16_t)mode_of(&node);
    to->stx_nlink = node.kind == TREE_DIRECTORY ? 2 : 1;
    to->stx_size = (uint64_t)size_of(&node);
    to->stx_blksize = ATTRIBUTE_SIZE;
    to->stx_rdev_major = major(device);
    to->stx_rdev_minor = minor(device);
    return 0;
}

/* --- who may use it --- */

static int may(const struct tree_node *node, int mode) {
    mode_t permissions = mode_of(node);

    if (((mode & W_OK) && !(permissions & S_IWOTH)) || ((mode & X_OK) && !(permissions & S_IXOTH))) {
        errno = EACCES;
        return -1;
    }
    return 0;
}

SYSTEM_EXPORT int access(const char *path, int mode) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? may(&node, mode) : SYSTEM_PASS(access, -1, path, mode);
}

SYSTEM_EXPORT int euidaccess(const char *path, int mode) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? may(&node, mode) : SYSTEM_PASS(euidaccess, -1, path, mode);
}

SYSTEM_EXPORT int eaccess(const char *path, int mode) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? may(&node, mode) : SYSTEM_PASS(eaccess, -1, path, mode);
}

SYSTEM_EXPORT int faccessat(int fd, const char *path, int mode, int flags) {
    struct tree_node node;

    return system_find_ours(path, !(flags & AT_SYMLINK_NOFOLLOW), &node)
               ? may(&node, mode)
               : SYSTEM_PASS(faccessat, -1, fd, path, mode, flags);
}
