/* SPDX-License-Identifier: BSD-3-Clause */
/* The GID table: its lines, the verbs that read it, and the way from a GID to an address and back. */
#include <endian.h>
#include <string.h>

#include "verbs/entry.h"

SRN_EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index, union ibv_gid *gid) {
    struct srn_nic *nic;
    int rc = 0;

    if (!srn_is_ours(context))
        return SRN_PASS(ibv_query_gid, -1, context, port_num, index, gid);
    nic = srn_ctx(context)->nic;
    if (srn_nic_gone(nic))
        rc = EIO;
    else if (port_num != 1 || index < 0 || index >= SRN_GID_TABLE)
        rc = EINVAL;
    if (rc) {
        errno = rc;
        return -1;
    }
    /* An empty line reads as zeros, as with libibverbs. */
    if ((uint32_t)index < nic->gid_count)
        *gid = nic->gids[index];
    else
        memset(gid, 0, sizeof(*gid));
    return 0;
}

/* The type as the private verb gives it: sysfs's two kinds, InfiniBand/RoCE v1 and RoCE v2. */
SRN_EXPORT int ibv_query_gid_type(struct ibv_context *context, uint8_t port_num, unsigned int index,
                                  int *type);

SRN_EXPORT int ibv_query_gid_type(struct ibv_context *context, uint8_t port_num, unsigned int index,
                                  int *type) {
    struct srn_nic *nic;

    if (!srn_is_ours(context))
        return SRN_PASS(ibv_query_gid_type, -1, context, port_num, index, type);
    nic = srn_ctx(context)->nic;
    if (port_num != 1 || index >= SRN_GID_TABLE || srn_nic_gone(nic)) {
        errno = EINVAL;
        return -1;
    }
    *type = index < nic->gid_count && srn_gid_is_v2(index);
    return 0;
}

static void fill_gid_entry(const struct srn_nic *nic, uint32_t index, struct ibv_gid_entry *e, size_t size) {
    struct ibv_gid_entry full = {
        .gid = nic->gids[index],
        .gid_index = index,
        .port_num = 1,
        .gid_type = srn_gid_is_v2(index) ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1,
        .ndev_ifindex = 0,
    };

    memset(e, 0, size);
    memcpy(e, &full, size < sizeof(full) ? size : sizeof(full));
}

SRN_EXPORT int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port_num, uint32_t index,
                                 struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size) {
    if (!srn_is_ours(context))
        return SRN_PASS(_ibv_query_gid_ex, ENOSYS, context, port_num, index, entry, flags, entry_size);
    if (srn_nic_gone(srn_ctx(context)->nic))
        return EIO;
    if (port_num != 1 || index >= SRN_GID_TABLE || flags || entry_size < sizeof(union ibv_gid))
        return EINVAL;
    if (index >= srn_ctx(context)->nic->gid_count)
        return ENODATA;
    fill_gid_entry(srn_ctx(context)->nic, index, entry, entry_size);
    return 0;
}

SRN_EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries,
                                        size_t max_entries, uint32_t flags, size_t entry_size) {
    struct srn_nic *nic;

    if (!srn_is_ours(context))
        return SRN_PASS(_ibv_query_gid_table, -ENOSYS, context, entries, max_entries, flags, entry_size);
    nic = srn_ctx(context)->nic;
    if (srn_nic_gone(nic))
        return -EIO;
    if (flags || entry_size < sizeof(union ibv_gid) || max_entries < nic->gid_count)
        return -EINVAL;
    for (uint32_t i = 0; i < nic->gid_count; i++)
        fill_gid_entry(nic, i, (struct ibv_gid_entry *)((char *)entries + i * entry_size), entry_size);
    return nic->gid_count;
}

/* The way back, from the 40 bytes before a datagram: false if they are not a header of one that came here. */
static bool read_grh(const struct srn_nic *nic, const uint8_t *header, struct ibv_global_route *route) {
    const uint8_t *ip = header + 20;
    uint32_t first, source, index;

    /* Before an IPv4 header there are zeros: see wire_make_grh_ipv4(). */
    if (header[0] >> 4 == 6 && (header[6] == WIRE_NEXT_UDP || header[6] == WIRE_NEXT_BTH)) {
        memcpy(&first, header, sizeof(first));
        first = be32toh(first);
        route->traffic_class = (uint8_t)(first >> 20);
        route->flow_label = first & 0xfffff;
        memcpy(&route->dgid, header + 8, sizeof(route->dgid));
        index = header[6] == WIRE_NEXT_UDP ? SRN_GID_LINK_LOCAL_V2 : SRN_GID_LINK_LOCAL_V1;
        while (index < nic->gid_count && memcmp(header + 24, &nic->gids[index], sizeof(union ibv_gid)) != 0)
            index += SRN_GID_IPV4_V1 - SRN_GID_LINK_LOCAL_V1;
    } else if (ip[0] >> 4 == 4) {
        route->traffic_class = ip[1];
        memcpy(&source, ip + 12, sizeof(source));
        index = SRN_GID_IPV4_V2;
        srn_gid_make(source, index, &route->dgid);
    } else {
        return false;
    }
    route->sgid_index = (uint8_t)index;
    route->hop_limit = 0xff;
    return index < nic->gid_count;
}

SRN_EXPORT int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc,
                                   struct ibv_grh *grh, struct ibv_ah_attr *attr) {
    if (!srn_is_ours(context))
        return SRN_PASS(ibv_init_ah_from_wc, -1, context, port_num, wc, grh, attr);
    memset(attr, 0, sizeof(*attr));
    if (port_num != 1 || !(wc->wc_flags & IBV_WC_GRH) ||
        !read_grh(srn_ctx(context)->nic, (const uint8_t *)grh, &attr->grh)) {
        errno = EINVAL;
        return -1;
    }
    attr->port_num = port_num;
    attr->sl = 0; /* wc->sl is not what it came by: see objects/nic.h */
    attr->is_global = 1;
    attr->dlid = wc->slid;
    attr->src_path_bits = wc->dlid_path_bits;
    return 0;
}
