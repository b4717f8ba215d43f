/* SPDX-License-Identifier: BSD-3-Clause */
#include "system/tree.h"

#include <stdio.h>
#include <string.h>

#include "objects/nic.h"

#define MAX_LINKS 8
#define PARENT "/sys/devices/softrnic/rail%R"
#define DEVICE PARENT "/infiniband/%D"
#define PORT DEVICE "/ports/1"

/*
 * %D is the name of a device, %R its rail, %I a line of its GID table. The parent stands where a PCI function would: two
 * above the device, with the files by which programs know a card, and the bus it is on.
 */
static const struct entry {
    const char *path;
    enum tree_kind kind;
    enum tree_attribute attribute;
    const char *text; /* of a file, or where a link leads */
    bool shared;
} entries[] = {
    {"/dev/infiniband", .kind = TREE_DIRECTORY, .shared = true},
    {"/dev/infiniband/uverbs_soft%R", .kind = TREE_DEVICE},
    {"/sys/class/infiniband", .kind = TREE_DIRECTORY, .shared = true},
    {"/sys/class/infiniband/%D", .kind = TREE_LINK, .text = "../../devices/softrnic/rail%R/infiniband/%D"},
    {"/sys/devices/softrnic", .kind = TREE_DIRECTORY},
    {PARENT, .kind = TREE_DIRECTORY},
    {PARENT "/vendor", .kind = TREE_FILE, .text = "0xc1de\n"}, /* the last 16 bits of ibv_query_device()'s */
    {PARENT "/device", .kind = TREE_FILE, .text = "0x0001\n"},
    {PARENT "/numa_node", .kind = TREE_FILE, .text = "-1\n"},
    {PARENT "/infiniband", .kind = TREE_DIRECTORY},
    {DEVICE, .kind = TREE_DIRECTORY},
    {DEVICE "/device", .kind = TREE_LINK, .text = "../../../rail%R"},
    {DEVICE "/fw_ver", .kind = TREE_FILE, .text = "softrnic\n"},
    {DEVICE "/node_guid", .kind = TREE_FILE, .attribute = TREE_GUID},
    {DEVICE "/node_type", .kind = TREE_FILE, .text = "1: CA\n"},
    {DEVICE "/sys_image_guid", .kind = TREE_FILE, .attribute = TREE_GUID},
    {DEVICE "/ports", .kind = TREE_DIRECTORY},
    {PORT, .kind = TREE_DIRECTORY},
    {PORT "/gid_attrs", .kind = TREE_DIRECTORY},
    {PORT "/gid_attrs/ndevs", .kind = TREE_DIRECTORY},
    {PORT "/gid_attrs/ndevs/%I", .kind = TREE_FILE, .attribute = TREE_GID_NETDEV},
    {PORT "/gid_attrs/types", .kind = TREE_DIRECTORY},
    {PORT "/gid_attrs/types/%I", .kind = TREE_FILE, .attribute = TREE_GID_TYPE},
    {PORT "/gids", .kind = TREE_DIRECTORY},
    {PORT "/gids/%I", .kind = TREE_FILE, .attribute = TREE_GID},
    {PORT "/lid", .kind = TREE_FILE, .text = "0x0\n"},
    {PORT "/lid_mask_count", .kind = TREE_FILE, .text = "0\n"},
    {PORT "/link_layer", .kind = TREE_FILE, .text = "Ethernet\n"},
    {PORT "/phys_state", .kind = TREE_FILE, .attribute = TREE_PHYS_STATE},
    {PORT "/pkeys", .kind = TREE_DIRECTORY},
    {PORT "/pkeys/0", .kind = TREE_FILE, .text = "0xffff\n"},
    {PORT "/rate", .kind = TREE_FILE, .text = "2.5 Gb/sec (1X SDR)\n"}, /* as ibv_query_port() has it */
    {PORT "/sm_lid", .kind = TREE_FILE, .text = "0x0\n"},
    {PORT "/sm_sl", .kind = TREE_FILE, .text = "0\n"},
    {PORT "/state", .kind = TREE_FILE, .attribute = TREE_STATE},
};
#define ENTRIES (sizeof(entries) / sizeof(entries[0]))

static bool varies(const struct entry *entry, char with) {
    const char mark[] = {'%', with, '\0'};

    return strstr(entry->path, mark) != NULL;
}

static bool of_device(const struct entry *entry) {
    return varies(entry, 'R') || varies(entry, 'D');
}

/* The path (or target) of an entry for one device and line. No snprintf() over all of it: names may have '%'. */
static void expand(char *to, const char *text, const struct config_device *device, unsigned int index) {
    char *end = to + TREE_PATH - 1;

    for (; *text && to < end; text++) {
        char number[12];
        const char *value = number;

        if (*text != '%') {
            *to++ = *text;
            continue;
        }
        text++;
        if (*text == 'D')
            value = device->name;
        else
            snprintf(number, sizeof(number), "%u", *text == 'R' ? (unsigned int)device->rail : index);
        while (*value && to < end)
            *to++ = *value++;
    }
    *to = '\0';
}

/* How many lines of the GID table are in use: as srn_gids_init() has it. */
static unsigned int gid_lines(const struct config_device *device) {
    return device->kind == CONFIG_NULL ? SRN_GID_IPV4_V1 : SRN_GID_COUNT;
}

/* One path of the tree. */
struct step {
    const struct entry *entry;
    const struct config_device *device;
    unsigned int index;
};

#define PER_DEVICE ((unsigned int)SRN_GID_COUNT)
#define PER_ENTRY (CONFIG_MAX_DEVICES * PER_DEVICE)

static unsigned int depth_of(const char *path) {
    unsigned int depth = 0;

    for (; *path; path++)
        depth += *path == '/';
    return depth;
}

/*
 * The next path of so many parts, from the cursor on, which counts entries, devices and lines, in this order from the
 * slowest.
 */
static bool next_step(const struct config *config, unsigned int depth, unsigned int *cursor,
                      struct step *step, char *path) {
    while (*cursor < ENTRIES * PER_ENTRY) {
        const struct entry *entry = &entries[*cursor / PER_ENTRY];
        int devices = of_device(entry) ? config->device_count : 1;

        step->entry = entry;
        step->device = &config->devices[*cursor % PER_ENTRY / PER_DEVICE];
        step->index = *cursor % PER_DEVICE;
        if (step->device - config->devices >= devices || depth_of(entry->path) != depth) {
            *cursor += PER_ENTRY - *cursor % PER_ENTRY;
        } else if (step->index >= (varies(entry, 'I') ? gid_lines(step->device) : 1)) {
            *cursor += PER_DEVICE - *cursor % PER_DEVICE;
        } else {
            ++*cursor;
            expand(path, entry->path, step->device, step->index);
            return true;
        }
    }
    return false;
}

/* What is at a path that has no links in it. */
static bool look_up(const struct config *config, const char *path, struct tree_node *node) {
    unsigned int cursor = 0, depth = depth_of(path);
    struct step step;
    char at[TREE_PATH];

    while (next_step(config, depth, &cursor, &step, at)) {
        if (strcmp(at, path) != 0)
            continue;
        node->kind = step.entry->kind;
        node->attribute = step.entry->attribute;
        node->shared = step.entry->shared;
        node->of_device = of_device(step.entry);
        node->device = *step.device;
        memcpy(node->host, config->host, sizeof(node->host));
        node->index = step.index;
        node->text = step.entry->text;
        strcpy(node->path, at);
        node->target[0] = '\0';
        if (node->kind == TREE_LINK)
            expand(node->target, step.entry->text, step.device, step.index);
        return true;
    }
    node->kind = TREE_NOTHING;
    return false;
}

static const char *const roots[] = {"/dev/infiniband", "/sys/class/infiniband", "/sys/devices/softrnic"};
#define ROOTS (sizeof(roots) / sizeof(roots[0]))

bool tree_concerns(const char *path) {
    for (unsigned int i = 0; i < ROOTS; i++)
        if (strncmp(path, roots[i], strlen(roots[i])) == 0)
            return true;
    return false;
}

/* Is this a directory of every system's, on the way to the tree? */
static bool leads_to_tree(const char *path) {
    size_t len = strlen(path);

    for (unsigned int i = 0; i < ROOTS; i++)
        if (strncmp(roots[i], path, len) == 0 && roots[i][len] == '/')
            return true;
    return false;
}

/* Take the first part of a path off; "" where there is none. */
static void take_part(char *rest, char *part) {
    size_t skip = strspn(rest, "/"), len = strcspn(rest + skip, "/");

    memcpy(part, rest + skip, len);
    part[len] = '\0';
    memmove(rest, rest + skip + len, strlen(rest + skip + len) + 1);
}

/* Put a link's target before what is left of a path. */
static bool prepend(char *rest, const char *target) {
    char joined[2 * TREE_PATH];

    if (snprintf(joined, sizeof(joined), "%s%s", target, rest) >= TREE_PATH)
        return false;
    strcpy(rest, joined);
    return true;
}

static void go_up(char *at) {
    char *slash = strrchr(at, '/');

    if (slash)
        *slash = '\0';
}

/* Follow the rest of a path. False where it leaves the tree, or what is on the way there. */
static bool walk(const struct config *config, char *rest, bool follow, struct tree_node *node) {
    char at[TREE_PATH] = "", part[TREE_PATH];
    int links = 0;

    node->kind = TREE_NOTHING;
    while (rest[0]) {
        size_t end = strlen(at);

        take_part(rest, part);
        if (node->kind != TREE_DIRECTORY && !(node->kind == TREE_NOTHING && leads_to_tree(at)))
            return false;
        if (!part[0] || strcmp(part, ".") == 0)
            continue;
        if (strcmp(part, "..") == 0) {
            go_up(at);
            look_up(config, at, node);
            continue;
        }
        if (end + 1 + strlen(part) >= sizeof(at))
            return false;
        at[end] = '/';
        strcpy(at + end + 1, part);
        look_up(config, at, node);
        /* What has a slash behind it is meant as a directory. */
        if (node->kind != TREE_LINK || (!rest[0] && !follow))
            continue;
        if (++links > MAX_LINKS || !prepend(rest, node->target))
            return false;
        go_up(at);
        look_up(config, at, node);
    }
    return node->kind != TREE_NOTHING;
}

bool tree_find(const struct config *config, const char *path, bool follow, struct tree_node *node) {
    char rest[TREE_PATH];

    if (path[0] == '/' && strlen(path) < sizeof(rest)) {
        strcpy(rest, path);
        if (walk(config, rest, follow, node))
            return true;
    }
    node->kind = TREE_NOTHING;
    return false;
}

bool tree_list(const struct config *config, const char *directory, unsigned int *cursor, char *name,
               enum tree_kind *kind) {
    unsigned int depth = depth_of(directory) + 1;
    size_t len = strlen(directory);
    struct step step;
    char at[TREE_PATH];

    while (next_step(config, depth, cursor, &step, at)) {
        if (strncmp(at, directory, len) != 0 || at[len] != '/')
            continue;
        strcpy(name, at + len + 1);
        *kind = step.entry->kind;
        return true;
    }
    return false;
}
