# SPDX-License-Identifier: BSD-3-Clause
"""The values of <infiniband/verbs.h> that our Python uses, under the header's names without their prefix.

pyverbs' own modules name them too, each release in another place; these are there before pyverbs is, and cost no look
at it. `tests/nic/test_ibv.py` compares each with the header. All are plain ints to whoever computes with them.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "AccessFlag",
    "AtomicCap",
    "CqInitAttrMask",
    "CreateCqAttr",
    "EventType",
    "GidType",
    "GidTypeSysfs",
    "LinkLayer",
    "MigState",
    "PortState",
    "QpAttrMask",
    "QpCreateSendOp",
    "QpInitAttrMask",
    "QpState",
    "QpType",
    "ReregMrFlag",
    "WcStatus",
]


class QpState(IntEnum):
    """enum ibv_qp_state"""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class QpType(IntEnum):
    """enum ibv_qp_type"""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10
    DRIVER = 0xFF


class QpAttrMask(IntEnum):
    """enum ibv_qp_attr_mask"""

    STATE = 1 << 0
    CUR_STATE = 1 << 1
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    QKEY = 1 << 6
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    ALT_PATH = 1 << 14
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    PATH_MIG_STATE = 1 << 18
    CAP = 1 << 19
    DEST_QPN = 1 << 20
    RATE_LIMIT = 1 << 25


class QpInitAttrMask(IntEnum):
    """enum ibv_qp_init_attr_mask"""

    PD = 1 << 0
    SEND_OPS_FLAGS = 1 << 6


class QpCreateSendOp(IntEnum):
    """enum ibv_qp_create_send_ops_flags"""

    RDMA_WRITE = 1 << 0
    RDMA_WRITE_WITH_IMM = 1 << 1
    SEND = 1 << 2
    SEND_WITH_IMM = 1 << 3
    RDMA_READ = 1 << 4
    ATOMIC_CMP_AND_SWP = 1 << 5
    ATOMIC_FETCH_AND_ADD = 1 << 6
    LOCAL_INV = 1 << 7
    BIND_MW = 1 << 8
    SEND_WITH_INV = 1 << 9
    TSO = 1 << 10


class CqInitAttrMask(IntEnum):
    """enum ibv_cq_init_attr_mask"""

    FLAGS = 1 << 0


class CreateCqAttr(IntEnum):
    """enum ibv_create_cq_attr_flags"""

    SINGLE_THREADED = 1 << 0


class WcStatus(IntEnum):
    """enum ibv_wc_status"""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23


class EventType(IntEnum):
    """enum ibv_event_type"""

    QP_FATAL = 1
    COMM_EST = 4
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    GID_CHANGE = 18


class AccessFlag(IntEnum):
    """enum ibv_access_flags"""

    LOCAL_WRITE = 1 << 0
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    REMOTE_ATOMIC = 1 << 3


class ReregMrFlag(IntEnum):
    """enum ibv_rereg_mr_flags"""

    CHANGE_ACCESS = 1 << 2


class AtomicCap(IntEnum):
    """enum ibv_atomic_cap. GLOB: atomic to all that is done to that memory, by other NICs as well."""

    NONE = 0
    HCA = 1
    GLOB = 2


class PortState(IntEnum):
    """enum ibv_port_state"""

    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4


class LinkLayer(IntEnum):
    """IBV_LINK_LAYER_*: InfiniBand, or UNSPECIFIED from old providers, which is the same."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


class GidType(IntEnum):
    """enum ibv_gid_type: what ibv_query_gid_ex says."""

    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


class GidTypeSysfs(IntEnum):
    """enum ibv_gid_type_sysfs: what ibv_query_gid_type says, pyverbs' Context.query_gid_type. In driver.h."""

    IB_ROCE_V1 = 0
    ROCE_V2 = 1


class MigState(IntEnum):
    """enum ibv_mig_state"""

    MIGRATED = 0
    REARM = 1
    ARMED = 2
