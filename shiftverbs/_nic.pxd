# SPDX-License-Identifier: BSD-3-Clause
"""C declarations of _nic: the verbs it issues, the threads it runs on, and the C side of its wake-up."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_attr_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_condattr_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attr)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_cond_destroy(pthread_cond_t *cond)
    int pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex)
    int pthread_cond_signal(pthread_cond_t *cond)
    int pthread_cond_broadcast(pthread_cond_t *cond)
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)


cdef extern from "<infiniband/verbs.h>" nogil:
    enum:
        IBV_ACCESS_LOCAL_WRITE
        IBV_WC_GRH
        IBV_SEND_SIGNALED
        IBV_WR_SEND
        IBV_QPT_RC
        IBV_QPT_UD
        IBV_QPS_RESET
        IBV_QPS_INIT
        IBV_QPS_RTR
        IBV_QPS_RTS
        IBV_QPS_ERR
        IBV_WC_SUCCESS
        IBV_QP_STATE
        IBV_QP_CUR_STATE
        IBV_QP_EN_SQD_ASYNC_NOTIFY
        IBV_QP_ACCESS_FLAGS
        IBV_QP_PKEY_INDEX
        IBV_QP_PORT
        IBV_QP_QKEY
        IBV_QP_AV
        IBV_QP_PATH_MTU
        IBV_QP_TIMEOUT
        IBV_QP_RETRY_CNT
        IBV_QP_RNR_RETRY
        IBV_QP_RQ_PSN
        IBV_QP_MAX_QP_RD_ATOMIC
        IBV_QP_ALT_PATH
        IBV_QP_MIN_RNR_TIMER
        IBV_QP_SQ_PSN
        IBV_QP_MAX_DEST_RD_ATOMIC
        IBV_QP_PATH_MIG_STATE
        IBV_QP_CAP
        IBV_QP_DEST_QPN
        IBV_QP_RATE_LIMIT

    struct ibv_device:
        pass

    struct ibv_context:
        int async_fd
        int num_comp_vectors

    struct ibv_pd:
        pass

    struct ibv_mr:
        uint32_t lkey
        uint32_t rkey

    struct ibv_comp_channel:
        int fd

    struct ibv_cq:
        int cqe

    struct ibv_srq:
        pass

    struct ibv_ah:
        pass

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
        int qp_type
        int sq_sig_all

    struct ibv_qp:
        uint32_t qp_num

    union ibv_gid:
        uint8_t raw[16]

    struct ibv_gid_entry:
        ibv_gid gid
        uint32_t gid_type
        uint32_t ndev_ifindex

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
        int qp_state
        int cur_qp_state
        int path_mtu
        int path_mig_state
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

    struct ibv_port_attr:
        int state
        int max_mtu
        int active_mtu
        int gid_tbl_len
        uint32_t port_cap_flags
        uint32_t max_msg_sz
        uint16_t pkey_tbl_len
        uint16_t lid
        uint16_t sm_lid
        uint8_t lmc
        uint8_t sm_sl
        uint8_t active_width
        uint8_t active_speed
        uint8_t phys_state
        uint8_t link_layer
        uint8_t flags

    struct ibv_device_attr:
        char fw_ver[64]
        uint64_t node_guid
        uint64_t max_mr_size
        uint32_t vendor_id
        uint32_t vendor_part_id
        uint32_t hw_ver
        int max_qp
        int max_qp_wr
        unsigned int device_cap_flags
        int max_sge
        int max_sge_rd
        int max_cq
        int max_cqe
        int max_mr
        int max_pd
        int max_qp_rd_atom
        int max_res_rd_atom
        int max_qp_init_rd_atom
        int atomic_cap
        int max_ah
        uint16_t max_pkeys
        uint8_t local_ca_ack_delay
        uint8_t phys_port_cnt

    struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey

    struct ibv_send_wr:
        uint64_t wr_id
        ibv_send_wr *next
        ibv_sge *sg_list
        int num_sge
        int opcode
        unsigned int send_flags

    struct ibv_recv_wr:
        uint64_t wr_id
        ibv_recv_wr *next
        ibv_sge *sg_list
        int num_sge

    struct ibv_wc:
        uint64_t wr_id
        int status
        uint32_t byte_len
        uint32_t src_qp
        unsigned int wc_flags

    struct ibv_async_event:
        int event_type

    ibv_device **ibv_get_device_list(int *num_devices)
    void ibv_free_device_list(ibv_device **devices)
    const char *ibv_get_device_name(ibv_device *device)
    ibv_context *ibv_open_device(ibv_device *device)
    int ibv_close_device(ibv_context *context)
    int ibv_query_device(ibv_context *context, ibv_device_attr *attr)
    int ibv_query_port(ibv_context *context, uint8_t port_num, ibv_port_attr *attr)
    int ibv_query_pkey(ibv_context *context, uint8_t port_num, int index, uint16_t *pkey)
    int ibv_query_gid(ibv_context *context, uint8_t port_num, int index, ibv_gid *gid)
    int ibv_query_gid_ex(ibv_context *context, uint32_t port_num, uint32_t index, ibv_gid_entry *entry,
                         uint32_t flags)
    ibv_pd *ibv_alloc_pd(ibv_context *context)
    int ibv_dealloc_pd(ibv_pd *pd)
    ibv_mr *ibv_reg_mr_iova2(ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
    int ibv_rereg_mr(ibv_mr *mr, int flags, ibv_pd *pd, void *addr, size_t length, int access)
    int ibv_dereg_mr(ibv_mr *mr)
    ibv_comp_channel *ibv_create_comp_channel(ibv_context *context)
    int ibv_destroy_comp_channel(ibv_comp_channel *channel)
    ibv_cq *ibv_create_cq(ibv_context *context, int cqe, void *cq_context, ibv_comp_channel *channel,
                          int comp_vector)
    int ibv_resize_cq(ibv_cq *cq, int cqe)
    int ibv_destroy_cq(ibv_cq *cq)
    int ibv_poll_cq(ibv_cq *cq, int num_entries, ibv_wc *wc)
    int ibv_req_notify_cq(ibv_cq *cq, int solicited_only)
    int ibv_get_cq_event(ibv_comp_channel *channel, ibv_cq **cq, void **cq_context)
    void ibv_ack_cq_events(ibv_cq *cq, unsigned int nevents)
    ibv_qp *ibv_create_qp(ibv_pd *pd, ibv_qp_init_attr *attr)
    int ibv_modify_qp(ibv_qp *qp, ibv_qp_attr *attr, int attr_mask)
    int ibv_query_qp(ibv_qp *qp, ibv_qp_attr *attr, int attr_mask, ibv_qp_init_attr *init_attr)
    int ibv_destroy_qp(ibv_qp *qp)
    int ibv_post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad_wr)
    int ibv_post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad_wr)
    ibv_ah *ibv_create_ah(ibv_pd *pd, ibv_ah_attr *attr)
    int ibv_destroy_ah(ibv_ah *ah)
    int ibv_get_async_event(ibv_context *context, ibv_async_event *event)
    void ibv_ack_async_event(ibv_async_event *event)


# One QP state transition: what ibv_modify_qp is given.
cdef struct ModifyStep:
    ibv_qp_attr attr
    int mask


# What has to happen so that somebody runs the driver: the attention flag, the control thread's eventfd, and
# the eventfds of application threads blocked elsewhere ("listeners").
#
# Ownership: counted references (`refs`, atomic). The Waiter holds one, each NicWorker one (its C thread
# lives on the NicWorker's), each wait under way one. Whoever drops the last closes the descriptors and frees
# the memory, so a late command can never write to a descriptor number that has been reused. It contains no
# Python object, so any thread may drop it. In a forked child it is never touched, except that Waiter.close()
# closes the child's copies of the descriptors.
cdef struct WakePoint:
    int refs
    int pid
    int *attention
    int epoll_fd
    int event_fd
    int timer_fd
    int closed              # atomic
    int parked              # atomic; set at interpreter exit: waits never return to Python any more
    pthread_mutex_t lock    # guards the listeners
    int *listeners
    int n_listeners
    int listeners_size
    uint64_t raised         # atomic counters, for tests and statistics
    uint64_t answered_inline
    WakePoint *next         # registry of live wake points, under registry_lock
    WakePoint *previous


# Raise attention and wake everybody who might run the driver. Any thread, no GIL.
cdef void wake_raise(WakePoint *wake) noexcept nogil


cdef class ModifySteps:
    cdef ModifyStep *steps
    cdef readonly int count
    cdef int size
    cdef ModifyStep *_append(self) except NULL


cdef class Waiter:
    cdef WakePoint *wake_point
    cdef object __weakref__
    cdef int _check(self) except -1
