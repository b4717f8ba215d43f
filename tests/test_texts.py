# SPDX-License-Identifier: BSD-3-Clause
"""Texts that others read, made from addresses, floats, enumerations and paths: on every Python and pyverbs the same.

Python has changed how it writes each of these between releases (IPv4-mapped addresses in 3.13, mixed-in enumerations
in 3.11 and 3.12), and pyverbs what its constants are. Two hosts of one job may run different ones, and a key in etcd
that one of them spells otherwise is never found; so each text stands here as it has to read.
"""

from __future__ import annotations

import ast
import ctypes
import io
import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from harness import ROOT
from msgspec.structs import replace

import shiftverbs.enums as e
from shiftverbs import addr, config, observe, softrnic, state_machine
from shiftverbs.commands import cli, doctor, status
from shiftverbs.commands.demo import endpoint, report, scenario, story
from shiftverbs.exchanger import etcd, records, settings, start
from shiftverbs.failover.driver import Driver
from shiftverbs.failover.qp import pairing
from shiftverbs.failover.services.control_channel import gid_bytes
from shiftverbs.failover.services.totals import Totals
from shiftverbs.mirroring import eligibility
from shiftverbs.native.ibv import GidTypeSysfs
from shiftverbs.process import run_dir
from shiftverbs.protocol import codec, events, messages
from shiftverbs.qp import QPInitAttr, QPInitAttrEx
from shiftverbs.shadows.pyverbs_objects import init_attr
from shiftverbs.softrnic import __main__ as softrnic_command
from shiftverbs.softrnic import faults
from shiftverbs.telemetry import metrics, publisher, reader

THIRD = 0.1 + 0.2  # 0.30000000000000004
ODD_NAME = os.fsdecode(b"caf\xc3\xa9-\xff")  # two bytes of UTF-8, and one that is none

# ---- addresses -------------------------------------------------------------------------------------------------------

# What stands in keys and records, and what people are shown.
GIDS = {
    "IPv4-mapped": ("0000:0000:0000:0000:0000:ffff:c000:0201", "192.0.2.1"),
    "IPv4-mapped, all zero": ("0000:0000:0000:0000:0000:ffff:0000:0000", "0.0.0.0"),
    "IPv4-mapped, all ones": ("0000:0000:0000:0000:0000:ffff:ffff:ffff", "255.255.255.255"),
    "IPv4-compatible": ("0000:0000:0000:0000:0000:0000:c000:0201", "::c000:201"),
    "IPv4 behind NAT64's prefix": ("0064:ff9b:0000:0000:0000:0000:c000:0201", "64:ff9b::c000:201"),
    "link-local": ("fe80:0000:0000:0000:0211:22ff:fe33:4455", "fe80::211:22ff:fe33:4455"),
    "link-local of a subnet": ("fec0:0000:0000:0001:0000:0000:0000:000a", "fec0:0:0:1::a"),
    "zero": ("0000:0000:0000:0000:0000:0000:0000:0000", "::"),
    "loopback": ("0000:0000:0000:0000:0000:0000:0000:0001", "::1"),
    "one run of zeros": ("2001:0db8:0000:0000:0000:0000:0000:0001", "2001:db8::1"),
    "two runs of zeros": ("2001:0db8:0000:0000:0001:0000:0000:0001", "2001:db8::1:0:0:1"),
    "one group of zeros": ("2001:0db8:0000:0001:0001:0001:0001:0001", "2001:db8:0:1:1:1:1:1"),
    "zeros at the end": ("2001:0db8:0000:0000:0000:0000:0000:0000", "2001:db8::"),
    "no zeros": ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
}
gids = pytest.mark.parametrize("record, shown", GIDS.values(), ids=list(GIDS))


@gids
def test_a_gid_has_one_spelling_in_records(record: str, shown: str) -> None:
    raw = bytes.fromhex(record.replace(":", ""))
    assert pairing.gid_text(raw) == record
    assert gid_bytes(record) == raw
    for spelling in (record, record.upper(), socket.inet_ntop(socket.AF_INET6, raw)):
        assert records.canonical_gid(spelling) == record
    if ":" in shown:
        assert records.canonical_gid(shown) == record
    else:
        assert records.canonical_gid(f"::ffff:{shown}") == record


@gids
def test_people_are_shown_a_gid_as_an_address(record: str, shown: str) -> None:
    assert doctor._text(gid_bytes(record)) == shown


@gids
def test_pyverbs_spells_a_gid_as_records_do(record: str, shown: str) -> None:
    """A demo's hosts tell each other their GIDs in pyverbs' spelling, and choose by it."""
    assert str(addr.GID(record)) == addr.GID(record).gid == record
    route = addr.GlobalRoute(dgid=addr.GID(record), sgid_index=0)
    assert route.dgid == record


@gids
def test_keys_and_routes(record: str, shown: str) -> None:
    key = f"/shiftverbs/job.1/qp/{record}/17"
    assert records.qp_key("job.1", record, 17) == key
    assert records.parse_key(key) == records.Key("job.1", record, None, None, 17)
    short = socket.inet_ntop(socket.AF_INET6, gid_bytes(record))
    assert records.qp_key("job.1", short, 17) == key
    prefix = record.replace(":", "")[:16]
    assert records.qp_lid_key("job.1", short, 7, 17) == f"/shiftverbs/job.1/qp/{prefix}.7/17"
    assert records.Route(short, 7, 17).gid == record
    assert records.Route(short, 7, 17) == records.Route(record, 7, 17)


@pytest.mark.parametrize(
    "gid",
    [
        "",
        "::ffff:1.2.3.256",
        "::ffff:192.0.2.01",
        "192.0.2.1",
        "fe80::1%eth0",
        "::1/64",
        "1::2::3",
        " ::1",
        "1234x::",
    ],
)
def test_what_is_no_gid(gid: str) -> None:
    with pytest.raises(ValueError):
        records.canonical_gid(gid)
    with pytest.raises(ValueError, match=r"^gid is not a GID$"):
        records.Route(gid, 0, 1)


def test_a_record_as_it_stands_in_etcd() -> None:
    """Rights given as pyverbs' constants, which in some releases are members of an enumeration."""
    rights = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
    mapped, link_local = "::ffff:192.0.2.1", "fe80::1"
    record = records.QpRecord(
        job="j", instance="0" * 16, default=records.Route(mapped, 0, 17), peer=records.Route(link_local, 0, 18),
        peer_life=None, shadows=(records.ShadowRoute("mlx5_1", "::", 0, e.IBV_MTU_4096, 19),),
        control=(records.ControlEndpoint("mlx5_0", "2001:db8::1", 0, e.IBV_MTU_1024, 20, 5, "ab" * 16),),
        life="f" * 16, qp_access_flags=rights,
    )  # fmt: skip
    key = "/shiftverbs/j/qp/0000:0000:0000:0000:0000:ffff:c000:0201/17"
    assert records.encode_value(key, record) == (
        '{"control":[{"device":"mlx5_0","gid":"2001:0db8:0000:0000:0000:0000:0000:0001","lid":0,"mtu":3,"qkey":5,'
        '"qpn":20,"secret":"abababababababababababababababab"}],'
        '"default":{"gid":"0000:0000:0000:0000:0000:ffff:c000:0201","lid":0,"qpn":17},'
        '"instance":"0000000000000000","job":"j","kind":"qp","life":"ffffffffffffffff",'
        '"peer":{"gid":"fe80:0000:0000:0000:0000:0000:0000:0001","lid":0,"qpn":18},"peer_life":null,'
        '"qp_access_flags":7,"shadows":[{"device":"mlx5_1","gid":"0000:0000:0000:0000:0000:0000:0000:0000",'
        '"lid":0,"mtu":5,"qpn":19}],"version":2}'
    )
    other = "/shiftverbs/j/qp/0000:0000:0000:0000:0000:ffff:c000:0202/17"
    with pytest.raises(records.RecordError) as raised:
        records.encode_value(other, record)
    assert str(raised.value) == f"{other}: the value is about GID 0000:0000:0000:0000:0000:ffff:c000:0201"
    lid = "/shiftverbs/j/qp/fe80000000000000.7/17"
    mapped_too = replace(record, default=records.Route("::ffff:192.0.2.1", 7, 17))
    with pytest.raises(records.RecordError) as raised:
        records.encode_value(lid, mapped_too)
    assert str(raised.value) == (
        f"{lid}: the value is about GID 0000:0000:0000:0000:0000:ffff:c000:0201, on another subnet"
    )


def test_the_demo_takes_the_first_ipv4_gid() -> None:
    table = ["::", "fe80::1", "::ffff:192.0.2.1", "::ffff:192.0.2.2"]
    other, v2 = GidTypeSysfs.IB_ROCE_V1, GidTypeSysfs.ROCE_V2
    kinds = [other, v2, other, v2]

    def query_gid(_port: int, index: int) -> addr.GID:
        return addr.GID(records.canonical_gid(table[index]))

    context = SimpleNamespace(query_gid=query_gid, query_gid_type=lambda _port, index: kinds[index])
    verbs = SimpleNamespace(error=SimpleNamespace(PyverbsError=IndexError))
    host: Any = SimpleNamespace(context=context, verbs=verbs)
    assert endpoint.Endpoint._find_gid(host) == (3, "0000:0000:0000:0000:0000:ffff:c000:0202")
    kinds[3] = other
    assert endpoint.Endpoint._find_gid(host) == (1, "fe80:0000:0000:0000:0000:0000:0000:0001")


@pytest.mark.parametrize(
    "given, url",
    [
        ("[fd00::1]:2379", "http://[fd00::1]:2379"),
        ("[::ffff:192.0.2.1]", "http://[::ffff:192.0.2.1]:2379"),
        ("https://[FD00:0::1]:1", "https://[FD00:0::1]:1"),
        ("192.0.2.1:65535", "http://192.0.2.1:65535"),
        ("etcd.example", "http://etcd.example:2379"),
    ],
)
def test_what_processes_and_their_broker_call_etcd(given: str, url: str) -> None:
    """As the user wrote it: a broker serves those whose text is the same."""
    found = config.Config(etcd=config._endpoints("SHIFTVERBS_ETCD", given))
    assert settings.store_identity(found) == {"endpoints": [url], "user": None}
    assert settings.config_of(json.loads(json.dumps(settings.settings_of(found)))).etcd == found.etcd


@pytest.mark.parametrize(
    "host, shown",
    [
        ("::1", "[::1]"),
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:127.0.0.1", "[::ffff:127.0.0.1]"),
        ("host", "host"),
    ],
)
def test_where_metrics_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str, shown: str
) -> None:
    server = SimpleNamespace(server_address=(host, 9400))
    monkeypatch.setattr(prometheus_client, "start_http_server", lambda *_arguments: (server, None))
    monkeypatch.setattr(observe, "register_prometheus", lambda _registry: None)
    runtime: Any = None
    monkeypatch.setattr(metrics.Collector, "collect", lambda _self: [])
    with caplog.at_level(logging.INFO, "shiftverbs.telemetry"):
        assert metrics.serve(runtime, host, range(9400, 9401)) == 9400
    assert caplog.messages == [f"metrics on http://{shown}:9400/metrics"]


# ---- floats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds, shown",
    [
        (0.0, "0.0 s"), (-0.0, "0.0 s"), (-1e-7, "0.0 s"), (1e-7, "0.0 s"), (THIRD, "0.3 s"), (0.25, "0.2 s"),
        (0.35, "0.3 s"), (9.94, "9.9 s"), (9.96, "10.0 s"), (10.5, "10 s"), (11.5, "12 s"), (119.4, "119 s"),
        (120, "2 min"), (7199.0, "120 min"), (7200.0, "2 h"), (172799.0, "48 h"), (172800.0, "2 d"),
        (math.inf, "inf d"), (math.nan, "nan d"), (-math.inf, "0.0 s"),
    ],
)  # fmt: skip
def test_times_in_status(seconds: float, shown: str) -> None:
    assert status._span(seconds) == shown


@pytest.mark.parametrize(
    "number, shown",
    [
        (0.0, "0"), (1e-7, "0"), (0.5, "0"), (1.5, "2"), (THIRD, "0"), (999.4, "999"), (1e3, "1.0 k"),
        (1250.0, "1.2 k"), (1e6, "1.0 M"), (2.5e9, "2.5 G"), (math.inf, "inf G"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_rates_in_top(number: float, shown: str) -> None:
    assert status._count(number) == shown


def one_process(**changes: Any) -> dict[str, Any]:
    return {
        "pid": 4711, "host": "a", "command": ["python3", "x.py"], "instance": "i", "job": "j", "started": 0.0,
        "exchanger": {"answers": True, "why": None, "broker": 12},
        "totals": {"switches": 1, "homecomings": 0, "failed": {}},
        "nics": [{"name": "soft0", "state": "ACTIVE", "error": None}],
        "qps": [
            {
                "qp_num": 0x11, "device": "soft0", "status": "PROTECTED", "why": "", "state": "FALLBACK",
                "recv_state": "FALLBACK", "path": "soft1", "recv_path": "soft1", "away_s": THIRD, "fallback_ms": THIRD,
                "last_failure": {"ago_s": 1e-7, "why": "RETRY_EXC_ERR on soft0"}, "counters": {"rx": 1},
            }
        ],
    } | changes  # fmt: skip


def written_by_status(
    monkeypatch: pytest.MonkeyPatch, answers: reader.Answers, *arguments: str, **stream: str
) -> bytes:
    """What a command writes on a standard output of this encoding."""
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, **stream)  # type: ignore[arg-type]
    monkeypatch.setattr(status, "_asked", lambda _pids: answers)
    monkeypatch.setattr(time, "time", lambda: 3600.0)
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        cli.main(arguments)
    out.flush()
    return raw.getvalue()


def test_status_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = reader.Answers([one_process()], [(12, "it does not answer")])
    lines = written_by_status(monkeypatch, answers, "status", encoding="utf-8").decode().splitlines()
    assert [line.rstrip() for line in lines] == [
        "4711 on a  python3 x.py",
        "  NICs  soft0 ACTIVE",
        "  etcd answers  broker 12  job j  up 60 min",
        "  1 PROTECTED  SWITCHes 1  home again 0",
        "   QP    NIC    runs on  status     queue     fallback   away",
        "   0x11  soft0  soft1    PROTECTED  FALLBACK    0.3 ms  0.3 s",
        "  last failure 0.0 s ago, QP 0x11: RETRY_EXC_ERR on soft0",
        "",
        "pid 12: it does not answer",
    ]


def test_status_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    process = {"away_s": THIRD, "rate": 1e-7, "why": ODD_NAME}
    said = written_by_status(monkeypatch, reader.Answers([process]), "status", "--json", encoding="ascii")
    assert said.decode() == (
        '{\n "processes": [\n  {\n   "away_s": 0.30000000000000004,\n   "rate": 1e-07,\n'
        '   "why": "caf\\u00e9-\\udcff"\n  }\n ],\n "silent": []\n}\n'
    )


@pytest.mark.parametrize(
    "ms, shown",
    [
        (None, "-"), (0.0, "0.0"), (THIRD, "0.3"), (1e-7, "0.0"), (1234.56, "1234.6"), (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)  # fmt: skip
def test_milliseconds_in_the_demo(ms: float | None, shown: str) -> None:
    assert report._number(ms) == shown
    result = scenario.ScenarioResult("send", "switch", 12345, 1_234_567_890, detect_ms=ms, ok=True)
    assert report._scenario_row(result) == [
        " switch", "12,345", "1,235", "0", "0", "0", "0", shown, "-", "-", "ok"
    ]  # fmt: skip
    died = scenario.BaselineResult("send", "switch", False, "RETRY_EXC_ERR", ms)
    assert shown in report.baseline_table([died], 100)[-1].split()


def test_the_demos_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert scenario._ms(10_300_000, 10_000_000) == 0.3
    result = scenario.ScenarioResult(
        "send", "switch", 1, 2, detect_ms=THIRD, fallback_ms=1e-7, states=["DEFAULT"]
    )
    died = scenario.BaselineResult("send", "switch", False, "RETRY_EXC_ERR", math.inf)
    report.write_json("-", report.to_json([result], [died]))
    assert json.dumps(json.loads(capsys.readouterr().out)) == (
        '{"scenarios": [{"traffic": "send", "fault": "switch", "messages": 1, "bytes": 2, "lost": 0, "duplicated": 0, '
        '"reordered": 0, "corrupt": 0, "detect_ms": 0.30000000000000004, "fallback_ms": 1e-07, "failback_ms": null, '
        '"states": ["DEFAULT"], "ok": false}], '
        '"baseline": [{"traffic": "send", "fault": "switch", "survived": false, "error": "RETRY_EXC_ERR"}]}'
    )


def test_metrics_text() -> None:
    totals = Totals()
    totals.away_ns = 300_000_000
    connection = SimpleNamespace(
        closed=False, device=lambda k: f"soft{k}", send_pair=1, status=events.Status.PROTECTED,
        timeline=SimpleNamespace(away_since_ns=None),
    )  # fmt: skip
    nic = SimpleNamespace(name="café", dead=True, is_open=True, ports=())
    driver = SimpleNamespace(totals=totals, connections={1: connection}, directory=SimpleNamespace(away=None))
    runtime: Any = SimpleNamespace(
        driver=driver, nics=SimpleNamespace(all=lambda: [nic]), exchanger=SimpleNamespace(broker_pid=None)
    )
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.Collector(runtime))  # type: ignore[arg-type]
    with observe.register_prometheus(registry):
        for ms in (THIRD, 1e-7, math.inf):
            observe.publish(observe.Fallback(qp_num=1, device="soft0", durations={"fallback_ms": ms}))
        assert observe.flush()
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    lines = [line for line in lines if not line.startswith("#") and "_created" not in line]
    # Releases of prometheus_client differ in the order of labels, which has no meaning.
    name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (.*)", lines[0]).groups()  # type: ignore[union-attr]
    assert (name, value) == ("shiftverbs_qps", "1.0")
    assert sorted(labels.split(",")) == ['carrier="soft1"', 'device="soft0"', 'status="PROTECTED"']
    assert lines[1:8] == [
        "shiftverbs_qps_away 0.0",
        "shiftverbs_away_seconds_total 0.3",
        "shiftverbs_switches_total 0.0",
        "shiftverbs_homecomings_total 0.0",
        'shiftverbs_nic_up{device="café"} 0.0',
        "shiftverbs_etcd_up 1.0",
        "shiftverbs_broker_up 0.0",
    ]
    buckets = [line for line in lines if line.startswith("shiftverbs_fallback_seconds_bucket")]
    assert [line.partition('le="')[2] for line in buckets] == [
        '0.0005"} 2.0', '0.001"} 2.0', '0.002"} 2.0', '0.005"} 2.0', '0.01"} 2.0', '0.02"} 2.0', '0.05"} 2.0',
        '0.1"} 2.0', '0.5"} 2.0', '1.0"} 2.0', '2.0"} 2.0', '+Inf"} 3.0',
    ]  # fmt: skip
    assert 'shiftverbs_fallback_seconds_sum{device="soft0"} +Inf' in lines
    assert any(line.endswith(" 3.0") and 'kind="Fallback"' in line for line in lines)


def test_how_long_the_way_to_etcd_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100 + THIRD)
    waiting: Any = SimpleNamespace(_state=None, _phase=("starting a broker", 100.0))
    waiting._state = None
    assert etcd.EtcdExchanger.progress.fget(waiting) == "starting a broker, for 0.3 s"  # type: ignore[attr-defined]
    monkeypatch.setattr(start, "look_at", lambda _pid: start.Looks("S", 30, 1, 1))
    monkeypatch.setattr(os, "sysconf", lambda _name: 100)
    monkeypatch.setattr(os, "getloadavg", lambda: (THIRD, 0.0, 0.0))
    assert (
        start._Spawned(7, -1).looks() == "; process 7 (state S) has had 0.3 s of a processor, the load is 0.3"
    )


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e-7", "0", "-1", "3600.1", "1e300", "x", "", "0x1"])
def test_seconds_that_no_command_takes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, option, limits in (
        ("top", "--interval", "must be from 0.1 to 3600 seconds"),
        ("demo", "--seconds", f"{text} is not between 0.05 and 3600 seconds"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, f"{option}={text}"])
        assert ended.value.code == 2
        said = capsys.readouterr().err.splitlines()[-1]
        limits = f"'{text}' is not a number of seconds" if text in ("x", "", "0x1") else limits
        assert said == f"shiftverbs {command}: error: argument {option}: {limits}"


@pytest.fixture
def rules(softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTRNIC_DIR", str(softrnic_dir))
    faults.register("a", "1")
    for share in (1.0, 0.5, THIRD, 1e-7):
        faults.drop("a/soft0", probability=share)
    faults.delay("a/soft0", 0.0015)
    faults.delay("a/soft0", THIRD)


def test_rules_of_the_software_nic(rules: None, capsys: pytest.CaptureFixture[str]) -> None:
    softrnic_command.main(["list"])
    lines = capsys.readouterr().out.splitlines()[4:]
    assert [" ".join(line.split()) for line in lines] == [
        "RULE ACTION DEVICE DIRECTION OPCODE WHICH THEN MATCHED DONE",
        "1 drop a/soft0 both any nth=1 count=1 - 0 0",
        "2 drop a/soft0 both any nth=1 count=1 probability=0.5 seed=0 - 0 0",
        "3 drop a/soft0 both any nth=1 count=1 probability=0.3 seed=0 - 0 0",
        "4 drop a/soft0 both any nth=1 count=1 probability=9.99e-08 seed=0 - 0 0",
        "5 delay 1.5ms a/soft0 both any nth=1 count=1 - 0 0",
        "6 delay 300ms a/soft0 both any nth=1 count=1 - 0 0",
    ]
    assert [rule.probability for rule in faults.status().rules] == [1.0, 0.5, 0.3, 9.98843462e-08, 1.0, 1.0]


def test_the_library_writes_no_fraction(rules: None) -> None:
    """printf would write it as the locale has it, in many with a comma, which is not JSON."""
    library, room = ctypes.CDLL(str(softrnic.library_path())), ctypes.create_string_buffer(1 << 16)
    said = ctypes.create_string_buffer(1024)
    assert library.softrnic_ctl_list(room, ctypes.c_size_t(len(room)), said, ctypes.c_size_t(len(said))) > 0
    shares = [rule["probability"] for rule in json.loads(room.value)["rules"]]
    assert shares == [4294967295, 2147483647, 1288490188, 429, 4294967295, 4294967295]


@pytest.mark.parametrize("delay_s", [math.nan, math.inf, -math.inf])
def test_no_delay(rules: None, delay_s: float, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(faults.FaultError, match=f"^a delay of {delay_s} s is none$"):
        faults.delay("a/soft0", delay_s)
    assert softrnic_command.main(["delay", "a/soft0", f"--ms={delay_s}"]) == 2
    assert capsys.readouterr().err == f"softrnic: a delay of {delay_s} s is none\n"


# ---- enumerations ----------------------------------------------------------------------------------------------------

STAGES = {
    "STARTING": "starting two hosts",
    "PLAIN": "plain pyverbs: traffic",
    "PLAIN_FAULT": "plain pyverbs: fault injected",
    "CONNECTING": "connecting",
    "PAIRING": "pairing through etcd",
    "HOME": "traffic on the default NICs",
    "FAULT": "fault injected",
    "AWAY": "traffic on the backups",
    "AGAIN": "away before the fault: once more",
    "HEALED": "healed: coming home",
    "HOME_AGAIN": "traffic on the default NICs again",
    "ACCOUNT": "every message accounted for",
}


def test_what_the_demo_does() -> None:
    out = io.StringIO()
    view = report.PlainView(out)
    for stage in scenario.Stage:
        view.phase(stage)
    assert out.getvalue().splitlines() == [f"   {text}" for text in STAGES.values()]
    assert [stage.name for stage in scenario.Stage] == list(STAGES)


def test_the_demos_story(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    told = story.Story.__new__(story.Story)
    told._say = lambda text, hang=0: said.append(text)
    told._device = "soft0"
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    told._begin()
    monkeypatch.setattr(time, "monotonic", lambda: 50 + THIRD)
    current = scenario.ScenarioResult("send", "switch", detect_ms=THIRD, fallback_ms=5.1, failback_ms=44.449)
    told._lab = SimpleNamespace(current=current)  # type: ignore[assignment]
    for stage in scenario.Stage:
        told.phase(stage)
    clock = "   0.3 s  "
    assert said == [
        f"{clock}the cable of a's soft0 is pulled",
        f"{clock}PROTECTED: on soft0, with a backup connected",
        f"{clock}the cable of a's soft0 is pulled",
        f"{clock}the stream goes on, on soft0: a gap of 5.4 ms from the cable to the first completion there (0.3 ms of "
        "it until it was noticed)",
        f"{clock}away before the fault: once more",
        f"{clock}the cable is back",
        f"{clock}home on soft0, 44.4 ms after that",
    ]


def test_states_and_inputs() -> None:
    with pytest.raises(
        state_machine.IllegalTransition, match=r"^send machine: FENCE_WR_DONE in state DEFAULT$"
    ):
        state_machine.step_send(state_machine.SendState.DEFAULT, state_machine.SendInput.FENCE_WR_DONE)
    states = [state.value for state in state_machine.SendState]
    assert states == ["DEFAULT", "FALLBACK", "WAIT_SIGNALED", "WAIT_DRAINED"]
    assert [state.value for state in state_machine.RecvState] == ["DEFAULT", "FALLBACK"]
    assert [each.value for each in events.Status] == ["UNPROTECTED", "PAIRING", "PROTECTED", "FAILED"]
    assert set(status.STATUSES) == {each.value for each in events.Status}


@pytest.mark.parametrize(
    "kind, body, said",
    [
        (codec._KIND_SYNC, 9, "9 is not a valid Phase"),
        (codec._KIND_ARM, 200, "200 is not a valid ArmStep"),
        (codec._KIND_MOVE, 77, "77 is not a valid MoveStep"),
    ],
)
def test_a_datagram_of_an_unknown_step(kind: int, body: int, said: str) -> None:
    size = codec._SIZES[kind]
    reasons = set()
    # Wherever the step stands in the message: no other byte of it is looked at before.
    for at in range(size):
        data = bytearray(size)
        data[-1] = 1  # the address's MTU
        data[at] = body
        try:
            codec._decode_body(kind, bytes(data))
        except codec.MalformedDatagram as error:
            reasons.add(str(error))
    assert said in reasons


def test_messages_and_events_in_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    assert f"{messages.Phase.READY}" == str(messages.Phase.READY) == "4"
    assert repr(messages.Phase.READY) == "<Phase.READY: 4>"
    assert json.dumps({"phase": messages.Phase.READY, "home": scenario.Stage.HOME}) == (
        '{"phase": 4, "home": "traffic on the default NICs"}'
    )
    took = {"fallback_ms": THIRD}
    event = observe.Fallback(qp_num=1, device="soft0", t_ns=5, epoch=1, target="soft1", durations=took)

    def bad_hook(_event: object) -> None:
        raise RuntimeError

    with observe.subscribe(bad_hook), caplog.at_level(logging.ERROR, "shiftverbs.observe"):
        observe.publish(event)
        assert observe.flush()
    said = caplog.messages[0].partition(" raised on ")[2]
    assert said == (
        "Fallback(qp_num=1, device='soft0', t_ns=5, epoch=1, target='soft1', "
        "durations={'fallback_ms': 0.30000000000000004}); further errors are counted"
    )


@pytest.mark.parametrize(
    "name, number",
    [
        ("LOC_LEN_ERR", 1), ("LOC_PROT_ERR", 4), ("WR_FLUSH_ERR", 5), ("REM_ACCESS_ERR", 10), ("RETRY_EXC_ERR", 12),
        ("RNR_RETRY_EXC_ERR", 13), ("GENERAL_ERR", 21),
    ],
)  # fmt: skip
def test_errors_of_completions(name: str, number: int) -> None:
    """By the number, as a WC has it, and by pyverbs' constant, in some releases a member of an enumeration."""
    verbs: Any = SimpleNamespace(e=e)
    for given in (number, getattr(e, f"IBV_WC_{name}")):
        assert Driver.wc_name(given) == name
        assert endpoint.wc_status_name(verbs, given) == name
    assert Driver.wc_name(99) == endpoint.wc_status_name(verbs, 99) == "status 99"


@pytest.mark.parametrize(
    "name, said",
    [
        ("UC", "it is a UC QP"), ("UD", "it is a UD QP"), ("RAW_PACKET", "it is a raw packet QP"),
        ("XRC_SEND", "it is an XRC QP"), ("XRC_RECV", "it is an XRC QP"), ("DRIVER", "it is a provider's QP"),
    ],
)  # fmt: skip
def test_why_a_qp_is_not_protected(name: str, said: str) -> None:
    for given in (getattr(e, f"IBV_QPT_{name}"), int(getattr(e, f"IBV_QPT_{name}"))):
        assert eligibility.plan_qp(None, QPInitAttr(qp_type=given)) == (None, said)
        assert type(init_attr(QPInitAttr(qp_type=given)).qp_type) is int


def test_masks_of_pyverbs_constants() -> None:
    mask = e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_CREATE_FLAGS
    extended = QPInitAttrEx(qp_type=e.IBV_QPT_RC, comp_mask=mask, pd=None)
    assert eligibility.plan_qp(None, extended) == (None, "it has extended attributes (comp_mask 0x5)")
    line = logging.LogRecord("x", logging.INFO, "", 0, "%s %#x", (mask, mask), None)
    assert line.getMessage() == f"{mask} {mask:#x}" == f"{mask!s} 0x5" == "5 0x5"
    assert QPInitAttrEx().mask_to_str(e.IBV_QP_INIT_ATTR_PD) == QPInitAttrEx().mask_to_str(1)
    assert json.dumps([mask, {"type": e.IBV_QPT_RC}]) == '[5, {"type": 2}]'


def test_ports_in_the_doctors_words() -> None:
    for named, number in (
        ("DOWN", e.IBV_PORT_DOWN),
        ("INIT", e.IBV_PORT_INIT),
        ("ACTIVE", e.IBV_PORT_ACTIVE),
    ):
        assert doctor.PORT_STATES[number] == doctor.PORT_STATES[int(number)] == named
    assert [doctor.RATE_MTU[mtu] for mtu in (e.IBV_MTU_256, e.IBV_MTU_1024, e.IBV_MTU_4096)] == [
        256,
        1024,
        4096,
    ]


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_where_a_process_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setenv("TMPDIR", f"/{ODD_NAME}")
    assert os.fsencode(run_dir.directory()) == b"/caf\xc3\xa9-\xff/shiftverbs-1234"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert os.fspath(run_dir.directory()) == f"{tmp_path}/shiftverbs"
    assert os.fsencode(run_dir.directory(f"/run/{ODD_NAME}")) == b"/run/caf\xc3\xa9-\xff"


def test_a_socket_in_a_directory_of_an_odd_name(tmp_path: Path) -> None:
    where = tmp_path / ODD_NAME
    told = {"pid": os.getpid(), "qps": [], "command": [ODD_NAME]}
    served = publisher.Publisher(lambda: told, "0123456789abcdef", where)
    try:
        assert os.listdir(os.fsencode(where)) == [f"{os.getpid()}-01234567.sock".encode()]
        assert reader.ask(where).processes == [told]
    finally:
        served.close()


def test_errors_name_the_path(tmp_path: Path) -> None:
    path = tmp_path / "café"
    path.write_text("")
    with pytest.raises(NotADirectoryError) as raised:
        run_dir.own_directory(path)
    assert str(raised.value) == f"[Errno 20] is not a directory: '{path}'"
    with pytest.raises(config.ConfigError) as refused:
        config._readable_file("SHIFTVERBS_ETCD_CA", f"/{ODD_NAME}")
    assert str(refused.value) == "SHIFTVERBS_ETCD_CA='/café-\\udcff': must be the path of an existing file"


def test_the_environment_of_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / ODD_NAME
    library.touch()
    monkeypatch.setenv("SOFTRNIC_LIBRARY", os.fspath(library))
    found = softrnic.environment("b", "3", tmp_path / ODD_NAME, preload=True, base={"LD_PRELOAD": "x.so"})
    assert found == {
        "SOFTRNIC_HOST": "b",
        "SOFTRNIC": "3",
        "SOFTRNIC_DIR": f"{tmp_path}/{ODD_NAME}",
        "LD_PRELOAD": f"{tmp_path.resolve()}/{ODD_NAME} x.so",
    }
    program = "import os; print(os.environb[b'SOFTRNIC_DIR'] == os.fsencode(os.environ['SOFTRNIC_DIR']))"
    said = subprocess.run([sys.executable, "-c", program], env=found, capture_output=True, check=False).stdout
    assert said == b"True\n"
    monkeypatch.setenv("PYTHONPATH", "/x:/y")
    assert start._environment()["PYTHONPATH"] == f"{ROOT}:/x:/y"


def test_what_a_broker_is_told() -> None:
    told = json.dumps(settings.settings_of(config.Config(etcd_ca=f"/run/{ODD_NAME}")), separators=(",", ":"))
    assert '"etcd_ca":"/run/caf\\u00e9-\\udcff"' in told and told.isascii()
    found = settings.config_of(json.loads(told)).etcd_ca
    assert found is not None and os.fsencode(found) == b"/run/caf\xc3\xa9-\xff"


@pytest.mark.parametrize(
    "encoding, errors, said",
    [
        ("utf-8", "strict", b"/caf\xc3\xa9-\\udcff"),
        ("utf-8", "surrogateescape", b"/caf\xc3\xa9-\xff"),
        ("iso-8859-1", "strict", b"/caf\xe9-\\udcff"),
        ("ascii", "strict", b"/caf\\xe9-\\udcff"),
    ],
)
def test_what_standard_output_cannot_write_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str, said: bytes
) -> None:
    """One process with an odd argument must not hide all others."""
    answers = reader.Answers([one_process(command=["python3", f"/{ODD_NAME}"])])
    written = written_by_status(monkeypatch, answers, "status", encoding=encoding, errors=errors)
    assert written.splitlines()[0].rstrip() == b"4711 on a  python3 " + said
    monkeypatch.setenv("SHIFTVERBS_RUN_DIR", f"/{ODD_NAME}")
    written = written_by_status(monkeypatch, reader.Answers(), "status", encoding=encoding, errors=errors)
    assert written == b"No process runs under shiftverbs with its socket in " + said + b".\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "iso-8859-1"])
def test_a_shell_gets_a_paths_bytes(tmp_path: Path, encoding: str) -> None:
    (tmp_path / ODD_NAME).mkdir(mode=0o700)
    run: Any = {
        "env": os.environ
        | {"SOFTRNIC_DIR": f"{tmp_path}/{ODD_NAME}", "PYTHONIOENCODING": encoding, "LANG": "C.UTF-8"},
        "cwd": ROOT,
        "capture_output": True,
    }
    done = subprocess.run([sys.executable, "-m", "shiftverbs.softrnic", "env"], **run)
    where = os.fsencode(tmp_path) + b"/caf\xc3\xa9-\xff"
    others = b"export SOFTRNIC=1\nexport SOFTRNIC_HOST=a\n"
    assert done.stdout == others + b"export SOFTRNIC_DIR='" + where + b"'\n", done.stderr
    done = subprocess.run([sys.executable, "-m", "shiftverbs.softrnic", "list"], **run)
    assert done.returncode == 0 and done.stdout.startswith(b"DEVICE"), done.stderr


# ---- nothing new unseen ----------------------------------------------------------------------------------------------

PACKAGE = ROOT / "shiftverbs"
# Who may make text of an address: the spelling of keys and records, a subnet's prefix, what the doctor shows, and
# what asks pyverbs for its own GID to hand it to pyverbs again.
MAY = {
    ("exchanger/records.py", "canonical_gid"),
    ("exchanger/records.py", "subnet_prefix"),
    ("commands/doctor.py", "_text"),
    ("commands/demo/endpoint.py", "_find_gid"),
    ("transport/nic.py", "_find_gid"),
}
# The spellings of ipaddress objects, and what others make of an address, each with conventions of its own.
SPELLINGS = {
    "exploded",
    "compressed",
    "reverse_pointer",
    "ipv4_mapped",
    "sixtofour",
    "inet_ntop",
    "inet_ntoa",
}
# What gives a pyverbs GID.
PYVERBS_GIDS = {"query_gid", "query_gid_ex", "query_gid_table"}


def makes_text_of_addresses(source: str, name: str) -> Iterator[str]:
    """Where a module touches ipaddress or another spelling of addresses outside the functions that may."""
    tree = ast.parse(source)
    allowed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (name, node.name) in MAY:
            allowed |= {id(inner) for inner in ast.walk(node)}
    functions = {function for module, function in MAY if module == name}
    for node in ast.walk(tree):
        if id(node) in allowed:
            continue
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.module == "ipaddress":
            yield f"{where} from ipaddress import"  # the names would not be seen below
        if isinstance(node, ast.Import) and any(alias.name == "ipaddress" for alias in node.names):
            if not functions or any(alias.asname for alias in node.names):
                yield f"{where} import ipaddress"
        if isinstance(node, ast.Name) and node.id == "ipaddress":
            yield f"{where} ipaddress"
        if isinstance(node, ast.Attribute) and node.attr in SPELLINGS:
            yield f"{where} .{node.attr}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("str", "repr", "format")
        ):
            called = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
            if called & PYVERBS_GIDS:
                yield f"{where} {node.func.id}() of a pyverbs GID"
        if isinstance(node, ast.FormattedValue):
            called = {one.attr for one in ast.walk(node.value) if isinstance(one, ast.Attribute)}
            if called & PYVERBS_GIDS:
                yield f"{where} a pyverbs GID in a text"


def test_nobody_else_makes_text_of_an_address() -> None:
    found: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        found += makes_text_of_addresses(
            path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
        )
    for pattern in ("*.pyx", "*.pxi"):
        for path in PACKAGE.rglob(pattern):
            words = path.read_text(encoding="utf-8")
            found += [f"{path.name} {word}" for word in ("ipaddress", "inet_ntop") if word in words]
    assert found == []


@pytest.mark.parametrize(
    "source, name",
    [
        ("import ipaddress\ndef f(gid):\n    return str(ipaddress.IPv6Address(gid))", "pairing.py"),
        (
            "import ipaddress as ip\ndef canonical_gid(gid): return f'{ip.ip_address(gid)}'",
            "exchanger/records.py",
        ),
        (
            "from ipaddress import IPv6Address\ndef key(gid): return f'{IPv6Address(gid)}'",
            "exchanger/records.py",
        ),
        ("import ipaddress\ndef key(gid): return '%s' % ipaddress.IPv6Address(gid)", "exchanger/records.py"),
        ("def canonical_gid(gid): import ipaddress; return ipaddress.ip_address(gid).exploded", "pairing.py"),
        ("def key(address): return address.exploded", "exchanger/records.py"),
        ("import socket\ndef f(gid): return socket.inet_ntop(socket.AF_INET6, gid)", "doctor.py"),
        ("def f(context): return f'/shiftverbs/{context.query_gid(1, 0)}'", "pairing.py"),
        ("def f(context): return str(context.query_gid(1, 0))", "demo/workload.py"),
    ],
)
def test_a_new_one_is_found(source: str, name: str) -> None:
    assert list(makes_text_of_addresses(source, name))


@pytest.mark.parametrize(
    "source, name",
    [
        (
            "import ipaddress\ndef canonical_gid(gid): return ipaddress.IPv6Address(gid).packed",
            "exchanger/records.py",
        ),
        ("def f(gid): return f'{gid}'", "pairing.py"),
    ],
)
def test_what_is_allowed_is_not(source: str, name: str) -> None:
    assert not list(makes_text_of_addresses(source, name))


def calls_with_text(tree: ast.AST) -> Iterator[ast.expr]:
    """Every expression that is put into a text: f-strings, str(), repr(), format(), arguments of log lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue):
            yield node.value
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in ("str", "repr", "format", "debug", "info", "warning", "error", "exception"):
                yield from node.args
            elif name == "log":
                yield from node.args[2:]


# Our plain enumerations: str() of a member is `Class.NAME`, which no reader is to see; `.value` is.
PLAIN = {"SendState", "RecvState", "SendInput", "RecvInput", "Step", "Status", "ArmState", "KeyState"}
PLAIN |= {"Phase", "ArmStep", "MoveStep"}


def test_no_member_of_an_enumeration_is_put_into_a_text() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for value in calls_with_text(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(value, ast.Attribute)
                and isinstance(value.value, ast.Name)
                and value.value.id in PLAIN
            ):
                found.append(f"{path.name}:{value.lineno}")
    assert found == []
