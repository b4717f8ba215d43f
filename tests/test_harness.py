# SPDX-License-Identifier: BSD-3-Clause
"""The test tools themselves: a tool that hides a failure would make every other test worthless."""

from __future__ import annotations

import pytest
from harness import EtcdServer, Spawn, wait_until


def test_child_output_and_status(spawn: Spawn) -> None:
    child = spawn("-c", "print('got', input()); raise SystemExit(3)", host="b")
    child.send("hello")
    assert child.expect(r"got (\w+)").group(1) == "hello"
    assert child.wait() == 3
    with pytest.raises(AssertionError, match=r"ended(.|\n)*got hello"):
        child.expect("something else")


def test_child_environment_is_a_host(spawn: Spawn) -> None:
    child = spawn("-c", "import os; print(os.environ['SOFTRNIC_HOST'], os.environ['SOFTRNIC_DIR'])", host="b")
    assert child.succeed().startswith("b ")


def test_wait_until_fails_at_its_deadline() -> None:
    with pytest.raises(AssertionError, match="the impossible"):
        wait_until(lambda: False, 0.02, "the impossible")


def test_etcd_keeps_its_data_over_a_kill(etcd_server: EtcdServer) -> None:
    etcd_server.put("/x/1", "one")
    etcd_server.put("/x/2", b"\x00\xff")
    etcd_server.kill()
    etcd_server.start()
    assert etcd_server.items("/x/") == {"/x/1": b"one", "/x/2": b"\x00\xff"}
    etcd_server.delete("/x/1")
    assert list(etcd_server.items("/x/")) == ["/x/2"]
