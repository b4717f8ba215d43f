/* SPDX-License-Identifier: BSD-3-Clause */
/* What the answers to a program's questions about files have in common. */
#ifndef SOFTRNIC_SYSTEM_ANSWER_H
#define SOFTRNIC_SYSTEM_ANSWER_H

#include <stdbool.h>
#include <stddef.h>

#include "system/tree.h"

/*
 * Is this path one of ours, and what is there? Only absolute ones are. Takes no lock, and once the environment was read
 * allocates nothing, so that signals' handlers and forked children may ask. errno stays as it is.
 */
bool system_find(const char *path, bool follow, struct tree_node *node);
/* The same, but what the system has by itself is the system's: a directory that is there anyway. */
bool system_find_ours(const char *path, bool follow, struct tree_node *node);

/*
 * Does this process ask us about files? Only where the library is before the C library: by LD_PRELOAD, and not where it
 * was opened later.
 */
bool system_is_asked(void);

/* The devices that SOFTRNIC describes; `space` may be used for them. NULL where there are none. */
const struct config *system_config(struct config *space);

/* What is to be read in a file. Its length. Takes locks: of the device list, and of the registry for a port's state. */
size_t system_text(const struct tree_node *node, char *text, size_t size);

#endif
