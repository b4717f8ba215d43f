/* SPDX-License-Identifier: BSD-3-Clause */
/* What is to be read in the files of our devices, as the kernel writes it. */
#include <endian.h>
#include <stdio.h>
#include <string.h>

#include "objects/nic.h"
#include "system/answer.h"

/* Two bytes a group. */
static size_t groups(char *text, size_t size, const uint8_t *bytes, unsigned int count) {
    size_t used = 0;

    for (unsigned int i = 0; i < count; i += 2)
        used +=
            (size_t)snprintf(text + used, size - used, "%s%02x%02x", i ? ":" : "", bytes[i], bytes[i + 1]);
    return used + (size_t)snprintf(text + used, size - used, "\n");
}

/* srn_global.lock held. The NIC of a device, as this process has it open; or NULL. */
static struct srn_nic *opened(const struct tree_node *node) {
    for (int i = 0; i < srn_global.config.device_count; i++)
        if (srn_global.devices[i].config->rail == node->device.rail)
            return srn_global.devices[i].nic;
    return NULL;
}

static bool link_is_up(const struct tree_node *node) {
    struct srn_nic *nic;
    bool up = true;

    if (node->device.kind == CONFIG_NULL)
        return true;
    pthread_mutex_lock(&srn_global.lock);
    nic = opened(node);
    if (nic)
        up = fault_link_is_up(nic->port);
    pthread_mutex_unlock(&srn_global.lock);
    return nic ? up : fault_cable_is_in(node->host, node->device.rail);
}

/* An address is a process's own, and only while it has the device open: zeros before, as without a network interface. */
static void get_gid(const struct tree_node *node, union ibv_gid *gid) {
    struct srn_nic *nic;

    memset(gid, 0, sizeof(*gid));
    pthread_mutex_lock(&srn_global.lock);
    nic = opened(node);
    if (nic && node->index < nic->gid_count)
        *gid = nic->gids[node->index];
    pthread_mutex_unlock(&srn_global.lock);
}

size_t system_text(const struct tree_node *node, char *text, size_t size) {
    uint64_t guid;
    union ibv_gid gid;
    bool up;

    switch (node->attribute) {
    case TREE_GUID:
        guid = srn_guid_make(node->host, node->device.rail);
        return groups(text, size, (const uint8_t *)&guid, sizeof(guid));
    case TREE_STATE:
        return (size_t)snprintf(text, size, "%s\n", link_is_up(node) ? "4: ACTIVE" : "1: DOWN");
    case TREE_PHYS_STATE:
        up = link_is_up(node);
        return (size_t)snprintf(text, size, "%s\n", up ? "5: LinkUp" : "3: Disabled");
    case TREE_GID:
        get_gid(node, &gid);
        return groups(text, size, gid.raw, sizeof(gid.raw));
    case TREE_GID_TYPE:
        return (size_t)snprintf(text, size, "%s\n", srn_gid_is_v2(node->index) ? "RoCE v2" : "IB/RoCE v1");
    case TREE_GID_NETDEV:
        return (size_t)snprintf(text, size, "%s\n",
                                node->device.kind == CONFIG_NETDEV ? node->device.netdev : "lo");
    case TREE_TEXT:
        break;
    }
    return (size_t)snprintf(text, size, "%s", node->text ? node->text : "");
}
