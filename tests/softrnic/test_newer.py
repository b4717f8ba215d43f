# SPDX-License-Identifier: BSD-3-Clause
"""Verbs that libibverbs has had since 57 and later: on our NIC also where an older one is installed."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, child_env, python_args

IOVA, ADDR, FD, FD_OFFSET, DMAH, BUF, UNKNOWN = (1 << i for i in range(7))

PROGRAM = textwrap.dedent(
    """
    import ctypes, json, sys
    from shiftverbs import softrnic
    softrnic.enable()
    from pyverbs.device import Context
    from pyverbs.pd import PD
    from shiftverbs.shadows.pyverbs_objects import pointer
    from softrnic.test_newer import *

    from shiftverbs import softrnic
    nic = ctypes.CDLL(str(softrnic.library_path()), use_errno=True)
    for name, result in RESULTS.items():
        getattr(nic, name).restype = result
    context = Context(name="soft0")
    domain = PD(context)
    pd, ctx = ctypes.c_void_p(pointer(domain)), ctypes.c_void_p(pointer(context))

    def region(mr):
        if not mr:
            return errno.errorcode[ctypes.get_errno()]
        there = Region.from_address(mr)
        shown = [there.context == ctx.value, there.pd == pd.value, there.addr, there.length, there.lkey != 0]
        assert nic.ibv_dereg_mr(ctypes.c_void_p(mr)) == 0
        return shown

    def register(mask, **values):
        return region(nic.ibv_reg_mr_ex(pd, ctypes.byref(Attr(comp_mask=mask, access=1, **values))))

    print(json.dumps(eval(sys.argv[1])))
    """
)


class Attr(ctypes.Structure):
    """`ibv_mr_init_attr`."""

    _fields_ = [
        ("length", ctypes.c_size_t),
        ("access", ctypes.c_int),
        ("comp_mask", ctypes.c_uint64),
        ("iova", ctypes.c_uint64),
        ("addr", ctypes.c_void_p),
        ("fd", ctypes.c_int),
        ("fd_offset", ctypes.c_uint64),
        ("dmah", ctypes.c_void_p),
        ("buf", ctypes.c_void_p),
    ]


class Region(ctypes.Structure):
    """`ibv_mr`."""

    _fields_ = [
        ("context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("addr", ctypes.c_uint64),
        ("length", ctypes.c_size_t),
        ("handle", ctypes.c_uint32),
        ("lkey", ctypes.c_uint32),
        ("rkey", ctypes.c_uint32),
    ]


RESULTS: dict[str, Any] = {
    "ibv_reg_mr_ex": ctypes.c_void_p,
    "ibv_reg_buf_mr": ctypes.c_void_p,
    "ibv_alloc_buf": ctypes.c_void_p,
    "ibv_free_buf": None,
    "ibv_export_buf_dmabuf_fd": ctypes.c_int,
    "ibv_alloc_dmah": ctypes.c_void_p,
    "ibv_create_comp_cntr": ctypes.c_void_p,
    "_ibv_query_comp_cntr_caps": ctypes.c_int,
    "ibv_query_port_speed": ctypes.c_int,
    "ibv_dereg_mr": ctypes.c_int,
}
MEMORY = ctypes.create_string_buffer(8192)
HERE = ctypes.addressof(MEMORY)


def say(network: Path, expression: str) -> Any:
    """What the expression is in a process with a device, its PD and the verbs."""
    ended = subprocess.run(
        [*python_args("-c", PROGRAM, expression)],
        env=child_env(network, "a", extra={"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_region_by_a_structure(network: Path) -> None:
    said = say(
        network,
        "[HERE, register(ADDR, addr=HERE, length=8192), register(ADDR | IOVA, addr=HERE, iova=HERE % 4096, length=5)]",
    )
    assert said[1:] == [[True, True, said[0], 8192, True], [True, True, said[0], 5, True]]


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        ("0", "EINVAL"),
        ("IOVA", "EINVAL"),
        ("ADDR | FD_OFFSET", "EINVAL"),
        ("ADDR | FD | FD_OFFSET | IOVA", "EINVAL"),
        ("FD | IOVA", "EINVAL"),
        ("FD | FD_OFFSET | IOVA", "ENOTSUP"),
        ("ADDR | DMAH", "ENOTSUP"),
        ("ADDR | UNKNOWN", "ENOTSUP"),
    ],
)
def test_refused(network: Path, mask: str, why: str) -> None:
    assert say(network, f"register({mask}, addr=HERE, length=8)") == why


def test_buffers(network: Path) -> None:
    said = say(
        network,
        """(lambda handle: (lambda at, buf: [
            at % 4096,
            region(nic.ibv_reg_buf_mr(pd, buf, ctypes.c_void_p(at + 100), ctypes.c_size_t(9900), 1)) is not None,
            region(nic.ibv_reg_buf_mr(pd, buf, ctypes.c_void_p(at + 100), ctypes.c_size_t(9901), 1)),
            region(nic.ibv_reg_buf_mr(pd, buf, ctypes.c_void_p(at - 1), ctypes.c_size_t(1), 1)),
            region(nic.ibv_reg_buf_mr(pd, buf, ctypes.c_void_p(at + 10001), ctypes.c_size_t(0), 1)),
            register(BUF, buf=buf, length=1),
            register(BUF | ADDR, buf=buf, addr=at, length=10000)[2:4] == [at, 10000],
            nic.ibv_export_buf_dmabuf_fd(buf),
            errno.errorcode[ctypes.get_errno()],
            nic.ibv_free_buf(buf),
        ])(nic.ibv_alloc_buf(pd, ctypes.c_size_t(10000), ctypes.byref(handle)), handle))(ctypes.c_void_p())""",
    )
    assert said == [0, True, "EINVAL", "EINVAL", "EINVAL", "EINVAL", True, -1, "ENODATA", None]


def test_the_ports_speed(network: Path) -> None:
    """In 100 Mb/s."""
    speed = "(lambda s: [nic.ibv_query_port_speed(ctx, {}, ctypes.byref(s)), s.value])(ctypes.c_uint64())"
    assert say(network, speed.format(1)) == [0, 25]
    for port in (0, 2, 257):
        assert say(network, speed.format(port)) == [errno.EINVAL, 0]


def test_what_the_nic_has_not(network: Path) -> None:
    said = say(
        network,
        """[
            (nic.ibv_alloc_dmah(ctx, None), ctypes.get_errno()),
            (nic.ibv_create_comp_cntr(ctx, None), ctypes.get_errno()),
            nic._ibv_query_comp_cntr_caps(ctx, None, ctypes.c_size_t(0)),
        ]""",
    )
    assert said == [[None, errno.EOPNOTSUPP], [None, errno.EOPNOTSUPP], errno.EOPNOTSUPP]
