/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The files that the kernel would show of our devices, in /dev and /sys: which there are, where links lead. Pure; no
 * allocation, no lock.
 */
#ifndef SOFTRNIC_SYSTEM_TREE_H
#define SOFTRNIC_SYSTEM_TREE_H

#include <stdbool.h>

#include "faults/config.h"

#define TREE_PATH 320 /* longer than any path of the tree: two names of devices and what is around them */

enum tree_kind { TREE_NOTHING, TREE_DIRECTORY, TREE_FILE, TREE_LINK, TREE_DEVICE };

/* What stands in a file: attributes by the kernel's names (Documentation/ABI/stable/sysfs-class-infiniband). */
enum tree_attribute {
    TREE_TEXT, /* always the same: tree_node.text */
    TREE_GUID,
    TREE_STATE,
    TREE_PHYS_STATE,
    TREE_GID,
    TREE_GID_TYPE,
    TREE_GID_NETDEV,
};

struct tree_node {
    enum tree_kind kind;
    enum tree_attribute attribute; /* of a TREE_FILE */
    bool shared;    /* a directory that the system may have too, with devices of its own in it */
    bool of_device; /* else a directory above them */
    char host[CONFIG_NAME_LEN];
    struct config_device device;
    unsigned int index;     /* of a line of the GID table */
    const char *text;       /* of a TREE_TEXT */
    char path[TREE_PATH];   /* without links */
    char target[TREE_PATH]; /* of a TREE_LINK, as readlink() gives it */
};

/*
 * What is at an absolute path; `follow`: a link at its end is followed, as all others are. False if that is nothing of
 * ours. Parent directories ("..") are those of where links led.
 */
bool tree_find(const struct config *config, const char *path, bool follow, struct tree_node *node);

/* May tree_find() find something at this path, whatever devices there are? */
bool tree_concerns(const char *path);

/*
 * What is in a directory, by number from 0 on. False behind the last one. `name` has room for TREE_PATH bytes; *cursor
 * is 0 at the beginning.
 */
bool tree_list(const struct config *config, const char *directory, unsigned int *cursor, char *name,
               enum tree_kind *kind);

#endif
