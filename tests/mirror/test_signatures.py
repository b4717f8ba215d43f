"""Arguments by keyword and by position, as any release of pyverbs names them, on whichever one is installed.

Releases before 56 were made by a Cython that takes no keyword where there is one argument. The names are those of
releases 44 to 65; each call is made on objects without a resource, far enough to see whether the names are taken.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from harness import Spawn

# What was called once by position and then by name, "module.Class.method": its arguments.
ONE_ARGUMENT = {
    "device.Context.query_port": "port_num",
    "cq.CompChannel.get_cq_event": "expected_cq",
    "cq.CQ.resize": "cqe",
    "cq.CQ.ack_events": "num_events",
    "cq.CQEX.start_poll": "attr",
    "qp.QP.to_init": "qp_attr",
    "qp.QP.to_rtr": "qp_attr",
    "qp.QP.to_rts": "qp_attr",
    "qp.QP.query": "attr_mask",
    "qp.QP.set_ece": "ece",
    "qp.QPEx.wr_local_inv": "invalidate_rkey",
    "qp.QPEx.wr_send_imm": "data",
    "qp.QPEx.wr_send_inv": "invalidate_rkey",
    "qp.QPEx.wr_set_sge": "sge",
    "qp.QPEx.wr_set_xrc_srqn": "remote_srqn",
    "qp.QPInitAttrEx.mask_to_str": "mask",
    "qp.QPInitAttrEx.flags_to_str": "flags",
    "wr.SendWR.set_qp_type_xrc": "remote_srqn",
}
SEVERAL = {
    "device.Context.query_pkey": "port_num index",
    "device.Context.get_pkey_index": "port_num pkey",
    "device.Context.query_gid": "port_num index",
    "device.Context.query_gid_type": "port_num index",
    "device.Context.query_gid_ex": "port_num gid_index flags",
    "device.Context.query_gid_table": "max_entries flags",
    "pd.PD.advise_mr": "advise flags sg_list",
    "mr.MR.read": "length offset",
    "mr.MR.write": "data length offset",
    "mr.MR.rereg": "flags pd addr length access",
    "cq.CQ.poll": "num_entries",
    "cq.CQ.req_notify": "solicited_only",
    "qp.QP.modify": "qp_attr comp_mask",
    "qp.QP.post_send": "wr bad_wr",
    "qp.QP.post_recv": "wr bad_wr",
    "qp.QP.bind_mw": "mw mw_bind",
    "qp.QPEx.wr_atomic_cmp_swp": "rkey remote_addr compare swap",
    "qp.QPEx.wr_atomic_fetch_add": "rkey remote_addr add",
    "qp.QPEx.wr_atomic_write": "rkey remote_addr atomic_wr",
    "qp.QPEx.wr_bind_mw": "mw rkey bind_info",
    "qp.QPEx.wr_rdma_read": "rkey remote_addr",
    "qp.QPEx.wr_rdma_write": "rkey remote_addr",
    "qp.QPEx.wr_rdma_write_imm": "rkey remote_addr data",
    "qp.QPEx.wr_send_tso": "hdr hdr_sz mss",
    "qp.QPEx.wr_set_inline_data": "addr length",
    "qp.QPEx.wr_set_inline_data_list": "num_buf buf_list",
    "qp.QPEx.wr_set_sge_list": "num_sge sg_list",
    "qp.QPEx.wr_set_ud_addr": "ah remote_qpn remote_rkey",
    "srq.SRQ.modify": "attr comp_mask",
    "srq.SRQ.post_recv": "wr bad_wr",
    "wr.SendWR.set_bind_wr": "mw bind_info",
    "wr.SendWR.set_wr_atomic": "rkey addr compare_add swap",
    "wr.SendWR.set_wr_rdma": "rkey addr",
    "wr.SendWR.set_wr_ud": "ah rqpn rqkey",
    "wr.SGE.read": "length offset",
}
CONSTRUCTORS = {
    "cq.CompChannel": "context",
    "cq.CQ": "context cqe cq_context channel comp_vector",
    "cq.CQEX": "context init_attr",
    "mr.DMMR": "pd length access dm offset",
    "mr.MW": "pd mw_type",
    "qp.QP": "creator init_attr qp_attr",
    "qp.QPEx": "creator init_attr qp_attr",
    "qp.QPInitAttr": "qp_type qp_context scq rcq srq cap sq_sig_all",
    "qp.QPInitAttrEx": "qp_type qp_context scq rcq srq cap sq_sig_all comp_mask pd xrcd create_flags max_tso_header "
    "source_qpn hash_conf ind_table send_ops_flags",
    "srq.SRQ": "creator attr",
    "wr.SGE": "addr length lkey",
    "wr.RecvWR": "wr_id num_sge sg next_wr",
    "wr.SendWR": "wr_id opcode num_sge imm_data send_flags sg",
    "xrcd.XRCD": "context init_attr",
}
EXTRA = "no_release_has_this"


def found(path: str) -> Any:
    module, *names = path.split(".")
    value = importlib.import_module(f"shiftverbs.{module}")
    for name in names:
        value = getattr(value, name)
    return value


def complaint(call: Any, keywords: str) -> str:
    """What TypeError says of all these keywords and one that nobody knows."""
    with pytest.raises(TypeError) as raised:
        call(**dict.fromkeys(keywords.split()), **{EXTRA: None})
    return str(raised.value)


@pytest.mark.parametrize("path", [*ONE_ARGUMENT, *SEVERAL])
def test_a_method_takes_its_arguments_by_name(path: str) -> None:
    holder = found(path.rpartition(".")[0])
    method = getattr(holder.__new__(holder), path.rpartition(".")[2])
    assert re.search(rf"unexpected keyword argument '?{EXTRA}", complaint(method, (ONE_ARGUMENT | SEVERAL)[path]))


@pytest.mark.parametrize("path", CONSTRUCTORS)
def test_a_constructor_takes_its_arguments_by_name(path: str) -> None:
    assert re.search(rf"unexpected keyword argument '?{EXTRA}", complaint(found(path), CONSTRUCTORS[path]))


PROGRAM = """
import shiftverbs.device as d
from shiftverbs import addr, enums as e, pd, cq, qp
from shiftverbs.pyverbs_error import PyverbsRDMAError
context = d.Context(name="soft0")
assert context.query_port(port_num=1).lid == context.query_port(1).lid
default = context.query_pkey(port_num=1, index=0)
assert context.get_pkey_index(port_num=1, pkey=default) == context.get_pkey_index(1, default) == 0
try:
    context.get_pkey_index(port_num=1, pkey=default ^ 1)
except PyverbsRDMAError:
    pass
else:
    raise AssertionError("found a P_Key that the port does not have")
q = cq.CQ(context, 4)
protected = qp.QP(pd.PD(context), qp.QPInitAttr(scq=q, rcq=q, qp_type=e.IBV_QPT_RC, cap=qp.QPCap()))
assert protected.query(attr_mask=e.IBV_QP_STATE)[0].qp_state == e.IBV_QPS_RESET
protected.set_ece(ece=qp.ECE(0, 0, 0))
assert "PD" in qp.QPInitAttrEx().mask_to_str(mask=e.IBV_QP_INIT_ATTR_PD)
print("passed")
"""


def test_the_calls_do_what_they_do_by_position(spawn: Spawn) -> None:
    child = spawn("-c", PROGRAM, softrnic="1", name="keywords")
    child.succeed(30)
    assert child.printed[-1:] == ["passed"]
