# SPDX-License-Identifier: BSD-3-Clause
"""C declarations of libibverbs as far as the data path needs them. Declarations only: no code, no Python."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "<infiniband/verbs.h>" nogil:
    enum:
        IBV_WC_SUCCESS
        IBV_WC_LOC_QP_OP_ERR
        IBV_WC_WR_FLUSH_ERR
        IBV_WC_RETRY_EXC_ERR
        IBV_WC_FATAL_ERR
        IBV_WC_RESP_TIMEOUT_ERR
        IBV_WC_GENERAL_ERR

    enum:
        IBV_WR_RDMA_WRITE
        IBV_WR_RDMA_WRITE_WITH_IMM
        IBV_WR_SEND
        IBV_WR_SEND_WITH_IMM
        IBV_WR_RDMA_READ
        IBV_WR_ATOMIC_CMP_AND_SWP
        IBV_WR_ATOMIC_FETCH_AND_ADD
        IBV_WR_LOCAL_INV
        IBV_WR_BIND_MW
        IBV_WR_SEND_WITH_INV
        IBV_WR_TSO

    enum:
        IBV_SEND_FENCE
        IBV_SEND_SIGNALED
        IBV_SEND_SOLICITED
        IBV_SEND_INLINE
        IBV_SEND_IP_CSUM

    enum ibv_wc_status:
        pass

    enum ibv_wc_opcode:
        IBV_WC_SEND
        IBV_WC_RDMA_WRITE
        IBV_WC_RDMA_READ
        IBV_WC_COMP_SWAP
        IBV_WC_FETCH_ADD
        IBV_WC_BIND_MW
        IBV_WC_LOCAL_INV
        IBV_WC_TSO
        IBV_WC_RECV

    enum ibv_wr_opcode:
        pass

    enum ibv_qp_state:
        pass

    enum ibv_qp_type:
        pass

    enum ibv_mtu:
        pass

    enum ibv_mig_state:
        pass

    struct ibv_wc:
        uint64_t wr_id
        ibv_wc_status status
        ibv_wc_opcode opcode
        uint32_t vendor_err
        uint32_t byte_len
        uint32_t imm_data
        uint32_t qp_num
        uint32_t src_qp
        unsigned int wc_flags
        uint16_t pkey_index
        uint16_t slid
        uint8_t sl
        uint8_t dlid_path_bits

    struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey

    struct _wr_rdma "ibv_send_wr_rdma_does_not_exist":
        uint64_t remote_addr
        uint32_t rkey

    struct _wr_atomic "ibv_send_wr_atomic_does_not_exist":
        uint64_t remote_addr
        uint64_t compare_add
        uint64_t swap
        uint32_t rkey

    # The inner structs have no names in C: they may be used through members only, never declared.
    union _wr_union "ibv_send_wr_union_does_not_exist":
        _wr_rdma rdma
        _wr_atomic atomic

    struct ibv_mw:
        uint32_t rkey

    struct _wr_bind_mw "ibv_send_wr_bind_mw_does_not_exist":
        ibv_mw *mw
        uint32_t rkey

    struct ibv_send_wr:
        uint64_t wr_id
        ibv_send_wr *next
        ibv_sge *sg_list
        int num_sge
        ibv_wr_opcode opcode
        unsigned int send_flags
        uint32_t imm_data
        uint32_t invalidate_rkey
        _wr_union wr
        _wr_bind_mw bind_mw

    struct ibv_recv_wr:
        uint64_t wr_id
        ibv_recv_wr *next
        ibv_sge *sg_list
        int num_sge

    struct ibv_context:
        int async_fd

    struct ibv_device:
        pass

    struct ibv_pd:
        ibv_context *context

    struct ibv_mr:
        ibv_context *context
        ibv_pd *pd
        void *addr
        size_t length
        uint32_t lkey
        uint32_t rkey

    struct ibv_ah:
        ibv_context *context

    struct ibv_srq:
        ibv_context *context

    struct ibv_comp_channel:
        ibv_context *context
        int fd
        int refcnt

    struct ibv_cq:
        ibv_context *context
        ibv_comp_channel *channel
        void *cq_context
        uint32_t handle
        int cqe

    struct ibv_cq_ex:
        ibv_wc_status status
        uint64_t wr_id

    struct ibv_qp:
        ibv_context *context
        ibv_cq *send_cq
        ibv_cq *recv_cq
        uint32_t handle
        uint32_t qp_num
        ibv_qp_state state

    struct ibv_qp_ex:
        uint64_t wr_id
        unsigned int wr_flags

    struct ibv_data_buf:
        void *addr
        size_t length

    struct ibv_qp_cap:
        uint32_t max_send_wr
        uint32_t max_recv_wr
        uint32_t max_send_sge
        uint32_t max_recv_sge
        uint32_t max_inline_data

    struct ibv_qp_init_attr:
        void *qp_context
        ibv_cq *send_cq
        ibv_cq *recv_cq
        ibv_srq *srq
        ibv_qp_cap cap
        ibv_qp_type qp_type
        int sq_sig_all

    struct ibv_qp_init_attr_ex:
        ibv_qp_type qp_type

    struct ibv_srq_attr:
        uint32_t max_wr

    struct ibv_srq_init_attr_ex:
        ibv_srq_attr attr
        ibv_cq *cq

    union ibv_gid:
        uint8_t raw[16]

    struct ibv_global_route:
        ibv_gid dgid
        uint32_t flow_label
        uint8_t sgid_index
        uint8_t hop_limit
        uint8_t traffic_class

    struct ibv_ah_attr:
        ibv_global_route grh
        uint16_t dlid
        uint8_t sl
        uint8_t src_path_bits
        uint8_t static_rate
        uint8_t is_global
        uint8_t port_num

    struct ibv_qp_attr:
        ibv_qp_state qp_state
        ibv_qp_state cur_qp_state
        ibv_mtu path_mtu
        ibv_mig_state path_mig_state
        uint32_t qkey
        uint32_t rq_psn
        uint32_t sq_psn
        uint32_t dest_qp_num
        unsigned int qp_access_flags
        ibv_qp_cap cap
        ibv_ah_attr ah_attr
        ibv_ah_attr alt_ah_attr
        uint16_t pkey_index
        uint16_t alt_pkey_index
        uint8_t en_sqd_async_notify
        uint8_t sq_draining
        uint8_t max_rd_atomic
        uint8_t max_dest_rd_atomic
        uint8_t min_rnr_timer
        uint8_t port_num
        uint8_t timeout
        uint8_t retry_cnt
        uint8_t rnr_retry
        uint8_t alt_port_num
        uint8_t alt_timeout
        uint32_t rate_limit

    int ibv_post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad_wr)
    int ibv_post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad_wr)
    int ibv_poll_cq(ibv_cq *cq, int num_entries, ibv_wc *wc)
    int ibv_req_notify_cq(ibv_cq *cq, int solicited_only)
    int ibv_get_cq_event(ibv_comp_channel *channel, ibv_cq **cq, void **cq_context)
    ibv_qp_ex *ibv_qp_to_qp_ex(ibv_qp *qp)
    void ibv_ack_cq_events(ibv_cq *cq, unsigned int nevents)
