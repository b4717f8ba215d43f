# SPDX-License-Identifier: BSD-3-Clause
"""Programs written for pyverbs, each in its own manner, unchanged under `python -m shiftverbs run`: they survive a
pulled cable on either host and come home."""

import re
from pathlib import Path

import pytest
from harness import ROOT, free_port

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def hosts(spawn, shared_etcd, job):
    """Start a program on hosts b (server) and a (client)."""

    def start(*server, client):
        env = {"SHIFTVERBS_ETCD": shared_etcd.endpoint, "SHIFTVERBS_JOB": job}
        b = spawn("-m", "shiftverbs", "run", *server, host="b", env=env)
        b.expect("listening|waiting")
        a = spawn("-m", "shiftverbs", "run", *client, host="a", env=env)
        return a, b

    return start


def softrnic(spawn, *command):
    spawn("-m", "shiftverbs.softrnic", *command, host=None, softrnic=None).succeed()


def through_a_failure(spawn, a, b, pattern, victim):
    """Both report from soft0, then, the victim's port down, from soft1, then from soft0 again.

    pattern: what a line with progress begins with.
    """

    def both_on(device):
        starts = len(a.lines), len(b.lines)
        for host, start in zip((a, b), starts, strict=True):
            host.expect(rf"{pattern}, PROTECTED on {device}", start=start)

    # A fault before the QPs are protected would end the program, as it would with pyverbs.
    both_on("soft0")
    softrnic(spawn, "down", f"{victim}/soft0")
    both_on("soft1")
    both_on("soft1")
    softrnic(spawn, "up", f"{victim}/soft0")
    both_on("soft0")
    both_on("soft0")
    assert a.process.poll() is None and b.process.poll() is None


def test_every_style_of_import_is_among_the_programs():
    """Those of programs for older releases and for newer ones, whose constants have another module."""
    text = "\n".join(path.read_text() for path in PROGRAMS.glob("*.py"))
    for style in (
        r"^import pyverbs\.qp$",
        r"^import pyverbs\.\w+ as \w+$",
        r"^from pyverbs import \w+",
        r"^from pyverbs\.\w+ import \w+",
        r"^import pyverbs\.enums as e$",
        r"^from pyverbs\.enums import \*",
        r"^import pyverbs\.libibverbs_enums as e$",
        r"^from pyverbs\.libibverbs_enums import ibv_",
    ):
        assert re.search(style, text, re.MULTILINE), style


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize(
    "program",
    [
        *(
            "pingpong_events.py",
            "threads_busy.py",
            "many_reads.py",
            "ring_credits.py",
            "short_connections.py",
        ),
        "write_window.py",
    ],
)
def test_program(spawn, hosts, program, victim):
    port = str(free_port())
    path = str(PROGRAMS / program)
    a, b = hosts(path, port, client=(path, port, "127.0.0.1"))
    through_a_failure(spawn, a, b, r" [1-9]\d*", victim)


def test_example_unchanged(spawn, hosts):
    port = str(free_port())
    path = str(ROOT / "examples" / "rc_stream.py")
    a, b = hosts(path, "--port", port, client=(path, "--port", port, "127.0.0.1"))
    through_a_failure(spawn, a, b, r" [1-9]\d* messages, [1-9]\d* MB/s", "a")
