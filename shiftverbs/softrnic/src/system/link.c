/* SPDX-License-Identifier: BSD-3-Clause */
/* Where links lead, and what a path is called without them. */
#include "system/libc.h"

#include <limits.h>
#include <string.h>

#include "system/answer.h"

static ssize_t give_target(const struct tree_node *node, char *to, size_t len) {
    size_t have = strlen(node->target);

    if (node->kind != TREE_LINK || len == 0) {
        errno = EINVAL;
        return -1;
    }
    if (have > len)
        have = len; /* cut off without a word, as always */
    memcpy(to, node->target, have);
    return (ssize_t)have;
}

SYSTEM_EXPORT ssize_t readlink(const char *restrict path, char *restrict to, size_t len) {
    struct tree_node node;

    return system_find_ours(path, false, &node) ? give_target(&node, to, len)
                                                : SYSTEM_PASS(readlink, -1, path, to, len);
}

SYSTEM_EXPORT ssize_t readlinkat(int fd, const char *restrict path, char *restrict to, size_t len) {
    struct tree_node node;

    return system_find_ours(path, false, &node) ? give_target(&node, to, len)
                                                : SYSTEM_PASS(readlinkat, -1, fd, path, to, len);
}

/* Called with len > size these end the program: that is left to them. */
SYSTEM_EXPORT ssize_t __readlink_chk(const char *path, char *to, size_t len, size_t size) {
    struct tree_node node;

    return len <= size && system_find_ours(path, false, &node)
               ? give_target(&node, to, len)
               : SYSTEM_PASS(__readlink_chk, -1, path, to, len, size);
}

SYSTEM_EXPORT ssize_t __readlinkat_chk(int fd, const char *path, char *to, size_t len, size_t size) {
    struct tree_node node;

    return len <= size && system_find_ours(path, false, &node)
               ? give_target(&node, to, len)
               : SYSTEM_PASS(__readlinkat_chk, -1, fd, path, to, len, size);
}

static char *give_path(const struct tree_node *node, char *resolved) {
    return resolved ? strcpy(resolved, node->path) : strdup(node->path);
}

SYSTEM_EXPORT char *realpath(const char *restrict path, char *restrict resolved) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? give_path(&node, resolved)
                                               : SYSTEM_PASS(realpath, NULL, path, resolved);
}

SYSTEM_EXPORT char *__realpath_chk(const char *path, char *resolved, size_t size) {
    struct tree_node node;

    return size >= PATH_MAX && system_find_ours(path, true, &node)
               ? give_path(&node, resolved)
               : SYSTEM_PASS(__realpath_chk, NULL, path, resolved, size);
}

SYSTEM_EXPORT char *canonicalize_file_name(const char *path) {
    struct tree_node node;

    return system_find_ours(path, true, &node) ? give_path(&node, NULL)
                                               : SYSTEM_PASS(canonicalize_file_name, NULL, path);
}
