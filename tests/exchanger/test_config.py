# SPDX-License-Identifier: BSD-3-Clause
"""Every SHIFTVERBS_* variable, good and bad."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.config import VARIABLES, Config, ConfigError, Endpoint, unknown_variables


def read(**variables: object) -> Config:
    return Config.from_environ({f"SHIFTVERBS_{name}": str(value) for name, value in variables.items()})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file.pem"
    path.write_text("x")
    return path


def test_nothing_set_is_the_default() -> None:
    config = Config.from_environ({})
    assert config == Config()
    assert config.etcd == ()
    assert config.job == "default"
    assert config.backup is None
    assert not config.disable
    assert not config.require
    assert config.peer_deadline_ms == 2000
    assert config.broker == "shared"


def test_empty_counts_as_not_set() -> None:
    assert Config.from_environ(dict.fromkeys(VARIABLES, " ")) == Config()


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIFTVERBS_JOB", "from-the-process")
    assert Config.from_environ().job == "from-the-process"


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("localhost:2379", [Endpoint("localhost", 2379)]),
        ("localhost", [Endpoint("localhost", 2379)]),
        ("10.0.0.1:1", [Endpoint("10.0.0.1", 1)]),
        ("http://etcd.example:65535", [Endpoint("etcd.example", 65535)]),
        ("http://etcd.example:2379/", [Endpoint("etcd.example", 2379)]),
        ("[::1]:2379", [Endpoint("::1", 2379)]),
        ("http://[fe80::1%eth0]:2379", [Endpoint("fe80::1%eth0", 2379)]),
        ("[2001:db8::2]", [Endpoint("2001:db8::2", 2379)]),
        ("a:1, b:2,a:1", [Endpoint("a", 1), Endpoint("b", 2)]),
    ],
)
def test_endpoints(text: str, endpoints: list[Endpoint]) -> None:
    assert read(ETCD=text).etcd == tuple(endpoints)


@pytest.mark.parametrize(
    "text",
    [
        "a:0", "a:65536", "a:", "a:b", "a:-1", "a:١", ":2379", "::1:2379", "[::1:2379", "[::1]2379", "[a]:1", "[]:1",
        "ftp://a:1", "http://", "a:1/path", "user@a:1", "a:1,,b:2", "a:1,", "http://a:1,https://b:1", "a b:1", "-a:1",
    ],
)  # fmt: skip
def test_bad_endpoints(text: str, file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(ETCD=text)
    assert caught.value.variable == "SHIFTVERBS_ETCD"
    assert repr(text) in str(caught.value)
    assert "host:port" in str(caught.value) or "all https or all http" in str(caught.value)


def test_endpoint_urls_read_back() -> None:
    for text in ("http://a:1", "http://[::1]:2", "https://b:3"):
        try:
            (endpoint,) = read(ETCD=text).etcd
        except ConfigError as error:  # https on a system without a CA file of its own
            assert "SHIFTVERBS_ETCD_CA" in str(error)
            continue
        assert endpoint.url == text


def test_a_ca_means_tls(file: Path) -> None:
    config = read(ETCD="a:1", ETCD_CA=file)
    assert config.etcd == (Endpoint("a", 1, tls=True),)
    assert config.etcd_ca == str(file)
    assert read(ETCD="https://a:1", ETCD_CA=file).etcd == config.etcd
    with pytest.raises(ConfigError, match="contradicts"):
        read(ETCD="http://a:1", ETCD_CA=file)


def test_certificate_and_key_go_together(file: Path) -> None:
    config = read(ETCD="a:1", ETCD_CA=file, ETCD_CERT=file, ETCD_KEY=file)
    assert (config.etcd_cert, config.etcd_key) == (str(file), str(file))
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_ETCD_CERT.*needs SHIFTVERBS_ETCD_KEY"):
        read(ETCD_CERT=file)
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_ETCD_KEY.*needs SHIFTVERBS_ETCD_CERT"):
        read(ETCD_KEY=file)


def test_user_and_password_file_go_together(file: Path) -> None:
    config = read(ETCD_USER="root", ETCD_PASSWORD_FILE=file)
    assert (config.etcd_user, config.etcd_password_file) == ("root", str(file))
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_ETCD_USER.*needs SHIFTVERBS_ETCD_PASSWORD_FILE"):
        read(ETCD_USER="root")
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_ETCD_PASSWORD_FILE.*needs SHIFTVERBS_ETCD_USER"):
        read(ETCD_PASSWORD_FILE=file)
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_ETCD_USER"):
        read(ETCD_USER="a\nb", ETCD_PASSWORD_FILE=file)


@pytest.mark.parametrize("name", ["ETCD_CA", "ETCD_CERT", "ETCD_KEY", "ETCD_PASSWORD_FILE"])
def test_files_must_exist(name: str, tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError) as caught:
            read(**{name: path})
        assert caught.value.variable == f"SHIFTVERBS_{name}"
        assert str(path) in str(caught.value)


def test_relative_paths_become_absolute(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert read(ETCD_CA=file.name).etcd_ca == str(file)
    assert read(BROKER="b.sock").broker == str(file.parent / "b.sock")


@pytest.mark.parametrize("job", ["a", "A.b_c-9", "7", "x" * 64])
def test_jobs(job: str) -> None:
    assert read(JOB=job).job == job


@pytest.mark.parametrize("job", ["a/b", "-a", ".", "x" * 65, "ä", "a b"])
def test_bad_jobs(job: str) -> None:
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_JOB=.*letters, digits"):
        read(JOB=job)


def test_backup_map() -> None:
    config = read(BACKUP="mlx5_0=mlx5_1,mlx5_2; mlx5_1 = mlx5_0;")
    assert config.backup == (("mlx5_0", ("mlx5_1", "mlx5_2")), ("mlx5_1", ("mlx5_0",)))


@pytest.mark.parametrize(
    "text",
    [
        "mlx5_0",
        "=a",
        "a=",
        "a=b,",
        "a=b,b",
        "a=a",
        "a=b;a=c",
        "a=b=c",
        ";",
        "a=b c",
        "a/1=b",
        "a=" + "b" * 70,
    ],
)
def test_bad_backup_maps(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_BACKUP=.*device=backup") as caught:
        read(BACKUP=text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("name", ["DISABLE", "REQUIRE"])
def test_switches(name: str) -> None:
    for value in ("1", "true", "YES", "on"):
        assert getattr(read(**{name: value}), name.lower()) is True
    for value in ("0", "false", "No", "off"):
        assert getattr(read(**{name: value}), name.lower()) is False
    for value in ("2", "ja", "-1"):
        with pytest.raises(ConfigError, match=f"SHIFTVERBS_{name}='{value}': must be 1 or 0"):
            read(**{name: value})


@pytest.mark.parametrize(("name", "default"), [("PEER_DEADLINE_MS", 2000), ("REQUIRE_DEADLINE_MS", 30_000)])
def test_deadlines(name: str, default: int) -> None:
    assert getattr(read(), name.lower()) == default
    assert getattr(read(**{name: " 500 "}), name.lower()) == 500
    for value in ("0", "9", "3600001", "1e3", "2.5", "1_000", "-5", "٥٠٠", "2s", "9" * 30):
        with pytest.raises(ConfigError, match=rf"SHIFTVERBS_{name}=.*from 10 to 3600000"):
            read(**{name: value})


def test_broker_path(tmp_path: Path) -> None:
    assert read(BROKER=tmp_path / "s").broker == str(tmp_path / "s")
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_BROKER=.*107 bytes"):
        read(BROKER="/" + "x" * 107)
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_BROKER=.*not a directory"):
        read(BROKER=tmp_path)


def test_metrics() -> None:
    assert read().metrics is None
    assert read(METRICS="0").metrics == ("127.0.0.1", 0, 0)
    assert read(METRICS="9400").metrics == ("127.0.0.1", 9400, 9400)
    assert read(METRICS="0.0.0.0:9400-9415").metrics == ("0.0.0.0", 9400, 9415)
    assert read(METRICS="[::1]:65535").metrics == ("::1", 65535, 65535)
    for value in ("x", "65536", "9-8", "0-9", ":1", "1-", "-1", "::1:80", "a b:80", "http://a:80", "1-70000"):
        with pytest.raises(ConfigError, match=r"SHIFTVERBS_METRICS=.*must be a port"):
            read(METRICS=value)


def test_straggler() -> None:
    assert read().straggler == "observe"
    for value in ("off", "observe", "Migrate"):
        assert read(STRAGGLER=value).straggler == value.lower()
    for value in ("1", "on", "observe,migrate"):
        with pytest.raises(ConfigError, match=r"SHIFTVERBS_STRAGGLER=.*must be one of off, observe, migrate"):
            read(STRAGGLER=value)


def test_run_dir(tmp_path: Path) -> None:
    assert read(RUN_DIR=tmp_path).run_dir == str(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_RUN_DIR=.*must be a directory"):
        read(RUN_DIR=tmp_path / "file")
    # Too long for a socket: that costs the socket, not the failover.
    assert read(RUN_DIR="/" + "x" * 200).run_dir == "/" + "x" * 200


def test_device() -> None:
    assert read().device is None and read(DEVICE="mlx5_1").device == "mlx5_1"
    with pytest.raises(ConfigError, match="SHIFTVERBS_DEVICE"):
        read(DEVICE="mlx5_0,mlx5_1")


def test_invariants() -> None:
    assert not read().invariants and not read(INVARIANTS="0").invariants
    assert read(INVARIANTS="1").invariants
    with pytest.raises(ConfigError, match=r"SHIFTVERBS_INVARIANTS=.*must be 1 or 0"):
        read(INVARIANTS="maybe")


def test_unknown_variables_are_named_with_the_nearest_known(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"SHIFTVERBS_BAKCUP": "x", "SHIFTVERBS_ZZZ": "1", "SHIFTVERB_JOB": "other", "HOME": "/"}
    with caplog.at_level(logging.WARNING, "shiftverbs.config"):
        assert Config.from_environ(environ) == Config()
    assert unknown_variables(environ) == ["SHIFTVERBS_BAKCUP", "SHIFTVERBS_ZZZ"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "SHIFTVERBS_BAKCUP" in messages[0]
    assert "did you mean SHIFTVERBS_BACKUP?" in messages[0]


@given(
    st.sampled_from(tuple(VARIABLES)),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=60),
)
def test_any_text_is_taken_or_refused_by_name(name: str, value: str) -> None:
    try:
        Config.from_environ({name: value})
    except ConfigError as error:
        assert name in str(error)
        assert error.variable == name


def test_import_reads_nothing() -> None:
    # strace is not everywhere: an audit hook sees what Python itself opens while the module body runs.
    program = (
        "import sys, shiftverbs, logging, difflib, msgspec, re, collections.abc, typing\n"
        "seen = []\n"
        "watched = ('open', 'os.listdir', 'os.putenv', 'socket.connect')\n"
        "sys.addaudithook(lambda event, args: seen.append((event, args)) if event in watched else None)\n"
        "import shiftverbs.config\n"
        "bad = [args[0] for _, args in seen if 'config' not in str(args[0])]\n"
        "assert not bad, bad\n"
    )
    env = {**os.environ, "SHIFTVERBS_PEER_DEADLINE_MS": "nonsense"}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
