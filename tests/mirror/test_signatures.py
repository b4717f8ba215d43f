# SPDX-License-Identifier: BSD-3-Clause
"""Arguments by keyword and by position, as any release of pyverbs names them, on whichever one is installed.

Releases before 56 were made by a Cython that takes no keyword where there is one argument. The names are those of
releases 44 to 65; each call is made on objects without a resource, far enough to see whether the names are taken.
Where pyverbs tells its own signatures, from 56 on, these are compared with ours, and with the tables here.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Spawn

from mirror.test_names import SHADOWED
from shiftverbs.process.releases import release

# What was called once by position and then by name, "module.Class.method": its arguments.
ONE_ARGUMENT = {
    "device.Context.query_port": "port_num",
    "device.Context.query_rt_values_ex": "comp_mask",
    "device.Context.query_device_ex": "ex_input",
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
    "qp.QP.query_data_in_order": "op flags",
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
    "srq.SRQ.post_srq_ops": "wr bad_wr",
    "wr.SendWR.set_bind_wr": "mw bind_info",
    "wr.SendWR.set_wr_atomic": "rkey addr compare_add swap",
    "wr.SendWR.set_wr_rdma": "rkey addr",
    "wr.SendWR.set_wr_ud": "ah rqpn rqkey",
    "wr.SGE.read": "length offset",
}
# What came later than 44: the release of those here that has it first, and its arguments.
LATER = {
    "qp.QPEx.wr_flush": (56, "rkey remote_addr length ptype level"),
    "device.Context.query_port_speed": (65, "port_num"),
    "qp.QP.attach_comp_cntr": (65, "comp_cntr attr"),
    "qp.QP.modify_rate_limit": (65, "attr"),
}
CONSTRUCTORS = {
    "cq.CompChannel": "context",
    "cq.CQ": "context cqe cq_context channel comp_vector",
    "cq.CQEX": "context init_attr",
    "mr.DMMR": "pd length access dm offset",
    "mr.MW": "pd mw_type",
    "pd.ParentDomain": "context attr",
    "qp.QP": "creator init_attr qp_attr",
    "qp.QPEx": "creator init_attr qp_attr",
    "qp.QPInitAttr": "qp_type qp_context scq rcq srq cap sq_sig_all",
    "qp.QPInitAttrEx": "qp_type qp_context scq rcq srq cap sq_sig_all comp_mask pd xrcd create_flags max_tso_header "
    "source_qpn hash_conf ind_table send_ops_flags",
    "srq.SRQ": "creator attr",
    "srq.SrqInitAttrEx": "max_wr max_sge srq_limit",
    "wr.SGE": "addr length lkey",
    "wr.RecvWR": "wr_id num_sge sg next_wr",
    "wr.SendWR": "wr_id opcode num_sge imm_data sg send_flags next_wr",
    "xrcd.XRCD": "context init_attr",
}
# These pass on what they do not know by name: no call of theirs tells whether a name is taken.
ANY_KEYWORDS = {"addr.AH", "device.Context", "mr.DmaBufMR", "mr.MR", "pd.PD"}
EXTRA = "no_release_has_this"
RELEASE = int(re.match(r"\d*", release())[0] or 0)  # type: ignore[index]


def found(path: str, package: str = "shiftverbs") -> Any:
    module, *names = path.split(".")
    value = importlib.import_module(f"{package}.{module}")
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
    assert re.search(
        rf"unexpected keyword argument '?{EXTRA}", complaint(method, (ONE_ARGUMENT | SEVERAL)[path])
    )


@pytest.mark.parametrize("path", LATER)
def test_what_later_releases_have_is_there_on_those(path: str) -> None:
    since, keywords = LATER[path]
    holder, name = found(path.rpartition(".")[0]), path.rpartition(".")[2]
    if RELEASE < since:
        assert not hasattr(holder, name)
        return
    said = complaint(getattr(holder.__new__(holder), name), keywords)
    assert re.search(rf"unexpected keyword argument '?{EXTRA}", said)


@pytest.mark.parametrize("package", ["shiftverbs", "pyverbs"])
@pytest.mark.parametrize("path", CONSTRUCTORS)
def test_a_constructor_takes_its_arguments_by_name(path: str, package: str) -> None:
    assert re.search(
        rf"unexpected keyword argument '?{EXTRA}", complaint(found(path, package), CONSTRUCTORS[path])
    )


def test_every_constructor_is_here() -> None:
    ours = {f"{module}.{name}" for module, names in SHADOWED.items() for name in names}
    assert ours == CONSTRUCTORS.keys() | ANY_KEYWORDS


def methods() -> Iterator[tuple[str, list[inspect.Parameter]]]:
    """Each public method of a pyverbs class that we have a subclass of, and its parameters but self."""
    for module, names in SHADOWED.items():
        for name in names:
            for method, value in vars(found(f"{module}.{name}", "pyverbs")).items():
                # Cython's functions are no functions to `inspect`; and a class method tells less.
                if not method.startswith("_") and callable(value) and hasattr(value, "__code__"):
                    yield f"{module}.{name}.{method}", list(inspect.signature(value).parameters.values())[1:]


@pytest.mark.skipif(RELEASE < 56, reason="pyverbs before release 56 does not tell its signatures")
def test_every_method_of_the_installed_release_is_here_and_ours_is_called_alike() -> None:
    table = ONE_ARGUMENT | SEVERAL | {path: keywords for path, (_since, keywords) in LATER.items()}
    seen = 0
    for path, theirs in methods():
        names = [parameter.name for parameter in theirs]
        if names:
            # An override, DMMR's write say, has its base's arguments.
            assert table.get(path, table.get(f"mr.MR.{path.rpartition('.')[2]}")) == " ".join(names), path
        seen += 1
        ours = getattr(found(path.rpartition(".")[0]), path.rpartition(".")[2])
        if not (ours.__module__ or "").startswith("shiftverbs"):
            continue
        mine = list(inspect.signature(ours).parameters.values())[1:]
        assert [one.name for one in mine if not one.name.startswith("_")] == names, path
        for one, other in zip(mine, theirs, strict=False):
            assert one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, path
            assert (one.default is one.empty) == (other.default is other.empty), path
    assert seen > 60


PROGRAM = """
import shiftverbs.device as d
from shiftverbs import addr, enums as e, mr, pd, cq, qp
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
domain = pd.PD(creator=context)
memory = mr.MR(creator=domain, length=4096, access=e.IBV_ACCESS_LOCAL_WRITE)
memory.write(data=b"abc", length=3, offset=5)
assert memory.read(length=3, offset=5) == memory.read(3, 5) == b"abc"
assert mr.MR(domain, 64, e.IBV_ACCESS_LOCAL_WRITE, memory.buf, False).buf == memory.buf
assert mr.MR(domain, length=64, access=1, address=memory.buf, implicit=False).buf == memory.buf
gid = context.query_gid(port_num=1, index=0)
assert gid.gid == context.query_gid(1, 0).gid
route = addr.GlobalRoute(dgid=gid, sgid_index=0)
handle = addr.AH(pd=domain, attr=addr.AHAttr(port_num=1, is_global=1, gr=route))
handle.close()
print("passed")
"""


def test_the_calls_do_what_they_do_by_position(spawn: Spawn) -> None:
    child = spawn("-c", PROGRAM, softrnic="1", name="keywords")
    child.succeed(30)
    assert child.printed[-1:] == ["passed"]
