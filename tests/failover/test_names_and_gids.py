# SPDX-License-Identifier: BSD-3-Clause
"""Failover on NICs of other names, and by each index of the GID table that programs have written in them."""

from typing import Any

import pytest
from hosts import HOME, Network, connect


@pytest.mark.parametrize("index", [3, 2, 1, 0], ids=["v2 IPv4", "v1 IPv4", "v2 link-local", "v1 link-local"])
def test_traffic_survives_and_comes_home(network: Network, faults: Any, index: int) -> None:
    """The backup's GID is at the same index: of the same type and family. The hosts call their NICs differently."""
    names = {"a": ("mlx5_0", "mlx5_1"), "b": ("bnxt_re0", "bnxt_re1")}
    a, b = (network.host(host, nics=";".join(names[host]), FAILOVER_GID=str(index)) for host in "ab")
    connect(a, b, "device.Context(name=device.get_device_list()[0].name.decode())")
    for host, (default, backup) in zip((a, b), names.values(), strict=True):
        assert host("ep.qp.shift.wait_protected(20)"), host("ep.shift()")
        assert host("[d.name.decode() for d in device.get_device_list()][:2]") == [default, backup]

    def message(text: str) -> None:
        b("ep.recv(1)")
        a(f"ep.fill(0, {text!r}); ep.post('SEND', length={len(text)}, wr_id=5)")
        assert a("ep.poll(1, 20)")[0][:2] == [5, "SUCCESS"] and b("ep.poll(1, 20)")[0][1] == "SUCCESS"
        assert b(f"ep.text(1, {len(text)})") == text

    message("at home")
    faults.down("a/mlx5_0")
    for host, (_, backup) in zip((a, b), names.values(), strict=True):
        host(f"ep.wait(\"s.state == 'FALLBACK' and s.path == s.recv_path == '{backup}'\", 20)")
        assert host("ep.qp._shadow.route(1)[1]") == index
    message("away, at the same index")
    faults.up("a/mlx5_0")
    for host in (a, b):
        host(f"ep.wait({HOME!r}, 20)")
    message("at home again")
