/* SPDX-License-Identifier: BSD-3-Clause */
/* The lines of the GID table, and the way from a GID to an address and back. */
#include <stdio.h>
#include <string.h>

#include "objects/nic.h"

/*
 * The link-local address of a port is made of its MAC address as EUI-64 (RFC 4291, appendix A). A software NIC's MAC is
 * 02:00 and its IPv4 address, so that either leads to the other.
 */
void srn_gid_make(uint32_t ip, unsigned int index, union ibv_gid *gid) {
    uint8_t address[4];

    memcpy(address, &ip, sizeof(address));
    memset(gid, 0, sizeof(*gid));
    if (srn_gid_is_ipv4(index)) {
        gid->raw[10] = gid->raw[11] = 0xff;
        memcpy(&gid->raw[12], address, 4);
        return;
    }
    gid->raw[0] = 0xfe;
    gid->raw[1] = 0x80;
    /* 8: 02, its universal/local bit inverted; 9: 00 */
    gid->raw[10] = address[0];
    gid->raw[11] = 0xff;
    gid->raw[12] = 0xfe;
    memcpy(&gid->raw[13], &address[1], 3);
}

#define TOS_WITHOUT_ECN 0xfc

bool srn_gid_resolve(const union ibv_gid *gid, unsigned int index, struct srn_peer *peer) {
    union ibv_gid same;
    struct srn_peer found = {.gid_index = index};

    if (srn_gid_is_ipv4(index)) {
        memcpy(&found.ip, &gid->raw[12], 4);
    } else {
        const uint8_t address[4] = {gid->raw[10], gid->raw[13], gid->raw[14], gid->raw[15]};

        memcpy(&found.ip, address, 4);
    }
    srn_gid_make(found.ip, index, &same);
    if (!found.ip || memcmp(&same, gid, sizeof(same)) != 0)
        return false;
    *peer = found;
    return true;
}

bool srn_resolve_av(const struct srn_nic *nic, const struct ibv_ah_attr *attr, struct srn_peer *peer) {
    if (!attr->is_global || attr->grh.sgid_index >= nic->gid_count ||
        !srn_gid_resolve(&attr->grh.dgid, attr->grh.sgid_index, peer))
        return false;
    /* As a NIC that trusts DSCP: its upper three bits. Without one, the service level, which VLANs have as PCP. */
    peer->tos = attr->grh.traffic_class & TOS_WITHOUT_ECN;
    peer->priority = peer->tos ? peer->tos >> 5 : attr->sl & 7;
    return true;
}

void srn_gids_init(struct srn_nic *nic) {
    nic->gid_count = SRN_GID_COUNT;
    for (unsigned int i = 0; i < SRN_GID_COUNT; i++)
        srn_gid_make(nic->ip, i, &nic->gids[i]);
    if (!nic->null_mode)
        return;
    /* Without an address: link-local, of its GUID. */
    nic->gid_count = SRN_GID_IPV4_V1;
    for (unsigned int i = 0; i < nic->gid_count; i++)
        memcpy(&nic->gids[i].raw[8], &nic->dev->guid, 8);
}

/* FNV-1a: a GUID that is the same in every process of one host, whatever the device is called, and another elsewhere. */
uint64_t srn_guid_make(const char *host, int rail) {
    char text[CONFIG_NAME_LEN + 16];
    uint64_t h = 0xcbf29ce484222325u;
    uint8_t guid[8];

    snprintf(text, sizeof(text), "%s/soft%d", host, rail);
    for (const char *p = text; *p; p++)
        h = (h ^ (uint8_t)*p) * 0x100000001b3u;
    memcpy(guid, &h, sizeof(guid));
    guid[0] = (uint8_t)((guid[0] & 0xfc) | 0x02); /* locally administered, unicast */
    guid[3] = 0xff;
    guid[4] = 0xfe;
    memcpy(&h, guid, sizeof(h));
    return h;
}
