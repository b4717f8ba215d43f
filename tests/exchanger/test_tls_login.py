# SPDX-License-Identifier: BSD-3-Clause
"""TLS and login against a real etcd: certificates made on the spot, users with rights to one job only."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import EtcdServer, free_port, stop_process

from exchanger.conftest import GID_A, GID_B, Watched, found_keys, publish_qp
from shiftverbs.commands.demo.etcd_server import etcd_binary
from shiftverbs.config import Config
from shiftverbs.exchanger import Connected, Found, Rejected, Unavailable, qp_key
from shiftverbs.exchanger.etcd import EtcdExchanger


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates() -> Iterator[Path]:
    """ca.pem, server.pem/.key, client.pem/.key, and a CA that signed none of them: other.pem."""
    if shutil.which("openssl") is None:
        pytest.fail("the openssl program is needed: apt-get install openssl")
    directory = Path(tempfile.mkdtemp(prefix="sv-tls-"))
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for ca in ("ca", "other"):
        openssl(
            directory, "req", "-x509", *key, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-days", "2",
            "-subj", f"/CN={ca}",
        )  # fmt: skip
    for name in ("server", "client"):
        openssl(
            directory,
            "req",
            "-new",
            *key,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
        )
        (directory / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        openssl(
            directory, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", f"{name}.ext",
        )  # fmt: skip
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def tls_etcd(certificates: Path) -> Iterator[str]:
    """An etcd that speaks TLS only and asks its clients for a certificate; gives its endpoint."""
    data = tempfile.mkdtemp(prefix="sv-etcd-tls-")
    port, peer = free_port(), f"http://127.0.0.1:{free_port()}"
    url = f"https://127.0.0.1:{port}"
    process = subprocess.Popen(
        [
            etcd_binary(), "--data-dir", data, "--listen-client-urls", url, "--advertise-client-urls", url,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            "--cert-file", f"{certificates}/server.pem", "--key-file", f"{certificates}/server.key",
            "--trusted-ca-file", f"{certificates}/ca.pem", "--client-cert-auth",
            "--unsafe-no-fsync", "--log-level", "error",
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(data, ignore_errors=True)


def tls_config(endpoint: str, certificates: Path, job: str, ca: str = "ca", client: bool = True) -> Config:
    environ = {
        "SHIFTVERBS_ETCD": f"https://{endpoint}",
        "SHIFTVERBS_ETCD_CA": str(certificates / f"{ca}.pem"),
        "SHIFTVERBS_JOB": job,
    }
    if client:
        environ["SHIFTVERBS_ETCD_CERT"] = str(certificates / "client.pem")
        environ["SHIFTVERBS_ETCD_KEY"] = str(certificates / "client.key")
    return Config.from_environ(environ).replace(etcd_backoff_max_ms=300)


def exchange(one: Watched, other: Watched, job: str) -> None:
    """Something published on one side arrives at the other."""
    other.next(Connected, timeout_s=30)
    one.next(Connected, timeout_s=30)
    key = publish_qp(one, job, 1)
    other.exchanger.want(key)
    other.until(lambda events: found_keys(events) == {key})


def test_tls_with_a_client_certificate(tls_etcd: str, certificates: Path, job: str) -> None:
    config = tls_config(tls_etcd, certificates, job)
    with EtcdExchanger(config) as one, EtcdExchanger(config) as other:
        exchange(Watched(one), Watched(other), job)


@pytest.mark.parametrize(("ca", "client"), [("other", True), ("ca", False)])
def test_tls_that_does_not_fit_is_told(
    tls_etcd: str, certificates: Path, job: str, ca: str, client: bool
) -> None:
    # First be sure that etcd is there at all.
    with EtcdExchanger(tls_config(tls_etcd, certificates, job)) as good:
        Watched(good).next(Connected, timeout_s=30)
    with EtcdExchanger(tls_config(tls_etcd, certificates, job, ca, client)) as bad:
        reason = Watched(bad).next(Unavailable).reason
    assert tls_etcd in reason


@pytest.fixture
def login_etcd(etcd_server: EtcdServer, job: str) -> EtcdServer:
    """An etcd with logins: root, and user 'worker' with the password 'secret', who may do all in the job only."""
    server = etcd_server
    start = f"/shiftverbs/{job}/".encode()
    permission = {
        "permType": "READWRITE",
        "key": base64.b64encode(start).decode(),
        "range_end": base64.b64encode(start[:-1] + b"0").decode(),
    }
    server.call("auth/user/add", {"name": "root", "password": "root"})
    server.call("auth/user/grant", {"user": "root", "role": "root"})
    server.call("auth/role/add", {"name": "job"})
    server.call("auth/role/grant", {"name": "job", "perm": permission})
    server.call("auth/user/add", {"name": "worker", "password": "secret"})
    server.call("auth/user/grant", {"user": "worker", "role": "job"})
    server.call("auth/enable", {})
    return server


def login_config(server: EtcdServer, job: str, password_file: Path | None) -> Config:
    environ = {"SHIFTVERBS_ETCD": server.endpoint, "SHIFTVERBS_JOB": job}
    if password_file is not None:
        environ |= {"SHIFTVERBS_ETCD_USER": "worker", "SHIFTVERBS_ETCD_PASSWORD_FILE": str(password_file)}
    return Config.from_environ(environ).replace(etcd_backoff_max_ms=300)


def test_login(login_etcd: EtcdServer, job: str, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    config = login_config(login_etcd, job, password)
    with EtcdExchanger(config) as first, EtcdExchanger(config) as second:
        one, other = Watched(first), Watched(second)
        exchange(one, other, job)
        # etcd forgets its tokens when it restarts: a new login is made.
        assert login_etcd.process is not None
        command = login_etcd.process.args
        login_etcd.kill()
        one.next(Unavailable)
        other.next(Unavailable)
        # Not by start(), whose health check has no login.
        login_etcd.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        one.next(Connected)
        other.next(Connected)
        other.events.clear()
        key = publish_qp(one, job, 2)
        other.exchanger.want(key)
        other.until(lambda events: found_keys(events) == {key})


def test_a_wrong_password_is_told_and_a_corrected_one_taken(
    login_etcd: EtcdServer, job: str, tmp_path: Path
) -> None:
    password = tmp_path / "password"
    password.write_text("guess")
    with EtcdExchanger(login_config(login_etcd, job, password)) as exchanger:
        one = Watched(exchanger)
        assert "authentication failed" in one.next(Unavailable).reason
        password.write_text("secret")
        one.next(Connected)


def stays_down(one: Watched) -> None:
    """It is tried again, and again in vain: that is one outage, not one per attempt."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        one.poll(0.2)
    assert one.events == []


def test_no_login_where_one_is_needed_is_told(login_etcd: EtcdServer, job: str) -> None:
    with EtcdExchanger(login_config(login_etcd, job, None)) as exchanger:
        one = Watched(exchanger)
        one.exchanger.want(qp_key(job, GID_A, 1))
        assert "user name is empty" in one.next(Unavailable).reason
        stays_down(one)


def test_rights_for_another_job_are_told(login_etcd: EtcdServer, job: str, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    other = job[:50] + "-other"
    with EtcdExchanger(login_config(login_etcd, other, password)) as exchanger:
        one = Watched(exchanger)
        one.next(Connected)
        key = publish_qp(one, other, 1)
        rejected = one.next(Rejected)
        assert rejected.key == key
        assert key in rejected.reason
        assert "permission denied" in rejected.reason
        stays_down(one)


def test_what_etcd_denies_to_one_job_is_denied_to_it_alone(
    login_etcd: EtcdServer, job: str, tmp_path: Path, softrnic_dir: Path
) -> None:
    """Processes of two jobs share a broker, and the login has rights to one of the jobs."""
    password = tmp_path / "password"
    password.write_text("secret")
    config = login_config(login_etcd, job, password).replace(
        broker=str(softrnic_dir / "b.sock"), broker_idle_exit_s=1
    )
    denied = job[:50] + "-other"
    with EtcdExchanger(config) as first, EtcdExchanger(config.replace(job=denied)) as second:
        one, stranger = Watched(first), Watched(second)
        one.next(Connected)
        stranger.next(Connected)
        assert first.broker_pid == second.broker_pid
        one.events.clear()
        # In one go, so that transactions hold keys of both.
        stop_process(first.broker_pid or 0)
        try:
            puts = {publish_qp(stranger, denied, qpn) for qpn in range(1, 30)}
            wants = {qp_key(denied, GID_B, qpn) for qpn in range(1, 30)}
            for key in wants:
                stranger.exchanger.want(key)
            keys = {publish_qp(one, job, qpn) for qpn in range(1, 200)}
            for key in keys:
                one.exchanger.want(key)
        finally:
            os.kill(first.broker_pid or 0, signal.SIGCONT)
        one.until(lambda events: found_keys(events) == keys)

        def refused() -> set[str]:
            return {event.key for event in stranger.events if isinstance(event, Rejected)}

        stranger.until(lambda _: refused() == puts | wants)
        for event in stranger.events:
            assert isinstance(event, Rejected)
            assert event.key in event.reason
            assert "permission denied" in event.reason
        assert len(stranger.events) == len(puts | wants), "each is told once"
        assert not [event for event in one.events if isinstance(event, Unavailable)]
        # The rights come after all.
        grant_job(login_etcd, denied)
        stranger.until(lambda events: {event.key for event in events if isinstance(event, Found)} == wants)
        with EtcdExchanger(config.replace(job=denied)) as third:
            late = Watched(third)
            for key in puts:
                late.exchanger.want(key)
            late.until(lambda events: found_keys(events) == puts)


def grant_job(server: EtcdServer, job: str) -> None:
    """Let 'worker' do all in another job too."""
    login = server.call("auth/authenticate", {"name": "root", "password": "root"})
    start = f"/shiftverbs/{job}/".encode()
    permission = {
        "permType": "READWRITE",
        "key": base64.b64encode(start).decode(),
        "range_end": base64.b64encode(start[:-1] + b"0").decode(),
    }
    request = urllib.request.Request(
        f"http://{server.endpoint}/v3/auth/role/grant",
        json.dumps({"name": "job", "perm": permission}).encode(),
        {"Authorization": str(login["token"])},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5):
        pass


def test_the_password_appears_nowhere(login_etcd: EtcdServer, job: str, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    with EtcdExchanger(login_config(login_etcd, job, password)) as exchanger:
        Watched(exchanger).next(Connected)
        broker = Path(f"/proc/{exchanger.broker_pid}")
        arguments = (broker / "cmdline").read_bytes().split(b"\0")
        assert b"secret" not in b" ".join(arguments) + (broker / "environ").read_bytes()
        settings = json.loads(arguments[arguments.index(b"--settings") + 1])
        assert settings["etcd_password_file"] == str(password)
