/* SPDX-License-Identifier: BSD-3-Clause */
/* The query verbs of devices and ports, and what goes to the real library for contexts that are not ours. */
#include <endian.h>
#include <stdio.h>
#include <string.h>

#include "verbs/entry.h"

#undef ibv_query_port

#define SOFTRNIC_VENDOR_ID 0x02c1de
#define SOFTRNIC_VENDOR_PART 1

static void fill_device_attr(const struct srn_nic *nic, struct ibv_device_attr *a) {
    memset(a, 0, sizeof(*a));
    snprintf(a->fw_ver, sizeof(a->fw_ver), "softrnic");
    a->node_guid = nic->dev->guid;
    a->sys_image_guid = nic->dev->guid;
    a->max_mr_size = UINT64_MAX;
    a->page_size_cap = 0xfffff000;
    a->vendor_id = SOFTRNIC_VENDOR_ID;
    a->vendor_part_id = SOFTRNIC_VENDOR_PART;
    a->max_qp = SRN_MAX_QP;
    a->max_qp_wr = SRN_MAX_QP_WR;
    a->device_cap_flags = IBV_DEVICE_BAD_PKEY_CNTR | IBV_DEVICE_BAD_QKEY_CNTR | IBV_DEVICE_CHANGE_PHY_PORT |
                          IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_SYS_IMAGE_GUID |
                          IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_MEM_WINDOW |
                          IBV_DEVICE_MEM_WINDOW_TYPE_2B | IBV_DEVICE_MEM_MGT_EXTENSIONS |
                          IBV_DEVICE_SRQ_RESIZE;
    a->max_sge = SRN_MAX_SGE;
    a->max_sge_rd = SRN_MAX_SGE;
    a->max_cq = SRN_MAX_CQ;
    a->max_cqe = SRN_MAX_CQE;
    a->max_mr = SRN_MAX_MR;
    a->max_pd = SRN_MAX_PD;
    a->max_qp_rd_atom = SRN_MAX_RD_ATOMIC;
    a->max_res_rd_atom = SRN_MAX_RD_ATOMIC * SRN_MAX_QP;
    a->max_qp_init_rd_atom = SRN_MAX_RD_ATOMIC;
    a->atomic_cap = IBV_ATOMIC_GLOB; /* among all software NICs of a process; not with the CPU's own */
    a->max_ah = SRN_MAX_AH;
    a->max_mw = SRN_MAX_MW;
    a->max_srq = SRN_MAX_SRQ;
    a->max_srq_wr = SRN_MAX_QP_WR;
    a->max_srq_sge = SRN_MAX_SGE;
    a->max_pkeys = 1;
    a->local_ca_ack_delay = 15;
    a->phys_port_cnt = 1;
}

SRN_EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
    struct srn_nic *nic;

    if (!srn_is_ours(context))
        return SRN_PASS(ibv_query_device, ENOSYS, context, attr);
    nic = srn_ctx(context)->nic;
    if (srn_command(nic))
        return EIO;
    fill_device_attr(nic, attr);
    return 0;
}

int srn_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                        struct ibv_device_attr_ex *attr, size_t len) {
    struct srn_nic *nic = srn_ctx(context)->nic;
    struct ibv_device_attr_ex full;

    if (input && input->comp_mask)
        return EINVAL;
    if (len < sizeof(full.orig_attr))
        return EINVAL;
    if (srn_command(nic))
        return EIO;
    memset(&full, 0, sizeof(full));
    fill_device_attr(nic, &full.orig_attr);
    full.device_cap_flags_ex = full.orig_attr.device_cap_flags;
    full.phys_port_cnt_ex = 1;
    memset(attr, 0, len);
    memcpy(attr, &full, len < sizeof(full) ? len : sizeof(full));
    return 0;
}

int srn_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *a) {
    struct srn_nic *nic = srn_ctx(context)->nic;
    bool up;

    if (port_num != 1)
        return EINVAL;
    if (srn_command(nic))
        return EIO;
    up = fault_link_is_up(nic->port);
    memset(a, 0, sizeof(*a));
    a->state = up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    a->phys_state = up ? 5 : 3; /* LinkUp, Disabled */
    a->max_mtu = IBV_MTU_4096;
    a->active_mtu = nic->active_mtu;
    a->gid_tbl_len = SRN_GID_TABLE;
    a->port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
    a->max_msg_sz = SRN_MAX_MSG;
    a->pkey_tbl_len = 1;
    a->max_vl_num = 1;
    a->active_width = 1; /* 1X */
    a->active_speed = 1; /* 2.5 Gb/s: the names have nothing that fits */
    a->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}

SRN_EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port_num,
                              struct _compat_ibv_port_attr *attr) {
    struct ibv_port_attr full;
    int rc;

    if (!srn_is_ours(context))
        return SRN_PASS(ibv_query_port, ENOSYS, context, port_num, attr);
    rc = srn_query_port(context, port_num, &full);
    /* The old structure is the new one up to link_layer and its padding. */
    if (!rc)
        memcpy(attr, &full, offsetof(struct ibv_port_attr, flags));
    return rc;
}

SRN_EXPORT int ibv_query_pkey(struct ibv_context *context, uint8_t port_num, int index, __be16 *pkey) {
    int rc = 0;

    if (!srn_is_ours(context))
        return SRN_PASS(ibv_query_pkey, -1, context, port_num, index, pkey);
    if (srn_nic_gone(srn_ctx(context)->nic))
        rc = EIO;
    else if (port_num != 1 || index != 0)
        rc = EINVAL;
    if (rc) {
        errno = rc;
        return -1;
    }
    *pkey = htobe16(WIRE_DEFAULT_PKEY);
    return 0;
}

SRN_EXPORT int ibv_get_pkey_index(struct ibv_context *context, uint8_t port_num, __be16 pkey) {
    if (!srn_is_ours(context))
        return SRN_PASS(ibv_get_pkey_index, -1, context, port_num, pkey);
    if (port_num == 1 && (be16toh(pkey) & 0x7fff) == (WIRE_DEFAULT_PKEY & 0x7fff) &&
        !srn_nic_gone(srn_ctx(context)->nic))
        return 0;
    errno = EINVAL;
    return -1;
}

SRN_EXPORT int ibv_resolve_eth_l2_from_gid(struct ibv_context *context, struct ibv_ah_attr *attr,
                                           uint8_t mac[6], uint16_t *vid) {
    if (!srn_is_ours(context))
        return SRN_PASS(ibv_resolve_eth_l2_from_gid, ENOSYS, context, attr, mac, vid);
    return EOPNOTSUPP;
}

/* --- verbs that we do not offer: say so for our objects, pass the others on --- */

SRN_EXPORT int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid) {
    return srn_is_ours(qp->context) ? EOPNOTSUPP : SRN_PASS(ibv_attach_mcast, ENOSYS, qp, gid, lid);
}

SRN_EXPORT int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid) {
    return srn_is_ours(qp->context) ? EOPNOTSUPP : SRN_PASS(ibv_detach_mcast, ENOSYS, qp, gid, lid);
}

SRN_EXPORT struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t handle) {
    if (!srn_is_ours(context))
        return SRN_PASS(ibv_import_pd, NULL, context, handle);
    errno = EOPNOTSUPP;
    return NULL;
}

SRN_EXPORT void ibv_unimport_pd(struct ibv_pd *pd) {
    if (!srn_is_ours(pd->context) && SRN_REAL(ibv_unimport_pd))
        SRN_REAL(ibv_unimport_pd)(pd);
}

SRN_EXPORT struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle) {
    if (!srn_is_ours(pd->context))
        return SRN_PASS(ibv_import_mr, NULL, pd, handle);
    errno = EOPNOTSUPP;
    return NULL;
}

SRN_EXPORT void ibv_unimport_mr(struct ibv_mr *mr) {
    if (!srn_is_ours(mr->context) && SRN_REAL(ibv_unimport_mr))
        SRN_REAL(ibv_unimport_mr)(mr);
}

SRN_EXPORT struct ibv_dm *ibv_import_dm(struct ibv_context *context, uint32_t handle) {
    if (!srn_is_ours(context))
        return SRN_PASS(ibv_import_dm, NULL, context, handle);
    errno = EOPNOTSUPP;
    return NULL;
}

SRN_EXPORT int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece) {
    if (!srn_is_ours(qp->context))
        return SRN_PASS(ibv_query_ece, ENOSYS, qp, ece);
    memset(ece, 0, sizeof(*ece));
    return 0;
}

SRN_EXPORT int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece) {
    if (!srn_is_ours(qp->context))
        return SRN_PASS(ibv_set_ece, ENOSYS, qp, ece);
    return ece->vendor_id ? EOPNOTSUPP : 0;
}

SRN_EXPORT int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags) {
    return srn_is_ours(qp->context) ? 0 : SRN_PASS(ibv_query_qp_data_in_order, 0, qp, op, flags);
}
