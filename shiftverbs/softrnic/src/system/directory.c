/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Directories that are listed: what is ours in them, and behind it what the system has there. A list is one of a few
 * slots, told from the C library's own by its address, so that neither a lock nor memory is needed.
 */
#include "system/libc.h"

#include <stdatomic.h>
#include <string.h>

#include "system/answer.h"

#define LISTS 16 /* at a time; then EMFILE */

struct list {
    atomic_flag taken;
    unsigned int cursor; /* of tree_list() */
    unsigned int given;
    bool ours_are_given;
    DIR *behind; /* the system's directory of this name; or NULL */
    char path[TREE_PATH];
    struct config config;
    union {
        struct dirent entry;
        struct dirent64 entry64;
    };
};

static struct list lists[LISTS];

static struct list *list_of(DIR *dir) {
    uintptr_t at = (uintptr_t)dir, first = (uintptr_t)lists;

    return at >= first && at < first + sizeof(lists) ? (struct list *)dir : NULL;
}

static struct list *take(void) {
    for (int i = 0; i < LISTS; i++)
        if (!atomic_flag_test_and_set(&lists[i].taken))
            return &lists[i];
    errno = EMFILE;
    return NULL;
}

SYSTEM_EXPORT DIR *opendir(const char *path) {
    struct config space;
    const struct config *config = NULL;
    struct tree_node node;
    struct list *list;
    int saved = errno;

    if (system_find(path, true, &node))
        config = system_config(&space);
    if (!config)
        return SYSTEM_PASS(opendir, NULL, path);
    if (node.kind != TREE_DIRECTORY) {
        errno = ENOTDIR;
        return NULL;
    }
    list = take();
    if (!list)
        return NULL;
    list->cursor = 0;
    list->given = 0;
    list->ours_are_given = false;
    list->config = *config;
    list->behind = node.shared ? SYSTEM_PASS(opendir, NULL, node.path) : NULL;
    strcpy(list->path, node.path);
    errno = saved;
    return (DIR *)list;
}

/* The next name, with its type as in struct dirent. */
static bool next(struct list *list, char *name, unsigned char *type) {
    static const unsigned char types[] = {
        [TREE_DIRECTORY] = DT_DIR, [TREE_FILE] = DT_REG, [TREE_LINK] = DT_LNK, [TREE_DEVICE] = DT_CHR};
    enum tree_kind kind;

    list->given++;
    if (list->given <= 2) {
        strcpy(name, list->given == 1 ? "." : "..");
        *type = DT_DIR;
        return true;
    }
    list->ours_are_given =
        list->ours_are_given || !tree_list(&list->config, list->path, &list->cursor, name, &kind);
    if (!list->ours_are_given)
        *type = types[kind];
    return !list->ours_are_given;
}

/* Has a name of the system's come already? */
static bool came(const struct list *list, const char *name) {
    char ours[TREE_PATH];
    unsigned int cursor = 0;
    enum tree_kind kind;

    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return true;
    while (tree_list(&list->config, list->path, &cursor, ours, &kind))
        if (strcmp(ours, name) == 0)
            return true;
    return false;
}

/* struct dirent and struct dirent64, which have the same fields. */
#define NEXT(list, to, read)                                                                                 \
    ({                                                                                                       \
        __typeof__(to) found_ = (to);                                                                        \
        char name_[TREE_PATH];                                                                               \
        unsigned char type_;                                                                                 \
        if (next(list, name_, &type_)) {                                                                     \
            memset(found_, 0, sizeof(*found_));                                                              \
            found_->d_ino = (list)->given;                                                                   \
            found_->d_off = (list)->given;                                                                   \
            found_->d_reclen = sizeof(*found_);                                                              \
            found_->d_type = type_;                                                                          \
            strcpy(found_->d_name, name_);                                                                   \
        } else {                                                                                             \
            do                                                                                               \
                found_ = (list)->behind ? SYSTEM_PASS(read, NULL, (list)->behind) : NULL;                    \
            while (found_ && came(list, found_->d_name));                                                    \
        }                                                                                                    \
        found_;                                                                                              \
    })

SYSTEM_EXPORT struct dirent *readdir(DIR *dir) {
    struct list *list = list_of(dir);

    return list ? NEXT(list, &list->entry, readdir) : SYSTEM_PASS(readdir, NULL, dir);
}

SYSTEM_EXPORT struct dirent64 *readdir64(DIR *dir) {
    struct list *list = list_of(dir);

    return list ? NEXT(list, &list->entry64, readdir64) : SYSTEM_PASS(readdir64, NULL, dir);
}

SYSTEM_EXPORT void rewinddir(DIR *dir) {
    struct list *list = list_of(dir);
    __typeof__(&rewinddir) real = SYSTEM_REAL(rewinddir);

    if (!list) {
        if (real)
            real(dir);
        return;
    }
    list->cursor = 0;
    list->given = 0;
    list->ours_are_given = false;
    if (list->behind && real)
        real(list->behind);
}

SYSTEM_EXPORT int closedir(DIR *dir) {
    struct list *list = list_of(dir);
    int rc = 0;

    if (!list)
        return SYSTEM_PASS(closedir, -1, dir);
    if (list->behind)
        rc = SYSTEM_PASS(closedir, -1, list->behind);
    list->behind = NULL;
    atomic_flag_clear(&list->taken);
    return rc;
}

/* POSIX lets a directory stream have none. */
SYSTEM_EXPORT int dirfd(DIR *dir) {
    struct list *list = list_of(dir);

    if (!list)
        return SYSTEM_PASS(dirfd, -1, dir);
    if (list->behind)
        return SYSTEM_PASS(dirfd, -1, list->behind);
    errno = ENOTSUP;
    return -1;
}
