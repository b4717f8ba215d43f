# SPDX-License-Identifier: BSD-3-Clause
"""The tutorial and the how-tos, typed into terminals as they stand there: each prints what its page says."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import ROOT, free_port
from terminal import Terminal, blocks

DOCS = ROOT / "docs"
#: What the how-tos on software hosts begin with.
TERMINALS = DOCS / "howto" / "terminals.md"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "howto").glob("*.md"))]
PORTS = ("2379", "9400", "9401", "18515", "7000", "7001")
#: Examples whose port stands on the page, or is their own.
THEIR_PORT = ("7000", "7001")
#: How the page on real hosts is played: the software host that each terminal is on, and the names that it writes.
REAL_HOSTS = {"node1": "a", "node2": "b"}
REAL_NAMES = {"mlx5_": "soft", "node1": "127.0.0.1", "node2": "127.0.0.1"}
#: Done already, where tests run.
SET_UP = ("make build", ". .venv/bin/activate")
#: What stands in a `text` has come by then; a training run on a busy machine takes its time.
TEXT_S, TRAINING_S = 60.0, 240.0
EXAMPLE = re.compile(r"examples/\w+\.py")


@pytest.fixture
def terminal(tmp_path: Path, softrnic_dir: Path) -> Iterator[Callable[[str], Terminal]]:
    """The terminal of a name, as a reader has it, but for ports and folders that are ours alone."""
    ports = {port: str(free_port()) for port in PORTS}
    client, peer = f"http://127.0.0.1:{ports['2379']}", f"http://127.0.0.1:{free_port()}"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SOFTRNIC", "SHIFTVERBS", "ETCD"))}
    env |= {
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        "PS1": "",
        "TERM": "dumb",
        "COLUMNS": "120",
        "TMPDIR": str(tmp_path),
        "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(softrnic_dir),  # short: sockets are in it
        "SOFTRNIC_DIR": str(softrnic_dir),
        "ETCD_LISTEN_CLIENT_URLS": client,
        "ETCD_ADVERTISE_CLIENT_URLS": client,
        "ETCD_LISTEN_PEER_URLS": peer,
        "ETCD_INITIAL_ADVERTISE_PEER_URLS": peer,
        "ETCD_INITIAL_CLUSTER": f"default={peer}",
    }
    if "PYTHONSAFEPATH" in env:  # then a program's own folder is not on the path, where endpoint.py lies
        env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{ROOT / 'examples'}"
    opened: dict[str, Terminal] = {}

    class Ours(Terminal):
        def type(self, line: str) -> None:
            if not any(port in line for port in THEIR_PORT):
                line = EXAMPLE.sub(rf"\g<0> --port {ports['18515']}", line)
            for port, ours in ports.items():
                line = re.sub(
                    rf":{port}\b" if port in THEIR_PORT else rf"\b{port}\b",
                    f":{ours}" if port in THEIR_PORT else ours,
                    line,
                )
            if "--listen-client-urls" in line:  # etcd refuses to be told twice
                line = f"env -u ETCD_LISTEN_CLIENT_URLS -u ETCD_ADVERTISE_CLIENT_URLS {line}"
            super().type(line)

    def get(name: str) -> Terminal:
        if name not in opened:
            host = {"SOFTRNIC": "1", "SOFTRNIC_HOST": REAL_HOSTS[name]} if name in REAL_HOSTS else {}
            opened[name] = Ours(name, env | host)
        return opened[name]

    yield get
    for each in opened.values():
        each.close()
        print(f"---- {each.name}\n{each.output}")  # shown where the test failed


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, terminal: Callable[[str], Terminal]) -> None:
    steps = blocks(page)
    assert steps
    torch = importlib.util.find_spec("torch")
    if page.stem == "training" and (torch is None or torch.origin is None):
        pytest.skip("torch is not there: apt-get install python3-torch libopenblas0-pthread")
    if page.parent == TERMINALS.parent and not any(step.terminal == "etcd" for step in steps):
        steps = blocks(TERMINALS) + steps
    for step in steps:
        lines = [line for line in step.lines if line not in SET_UP]
        for name, ours in REAL_NAMES.items():
            lines = [line.replace(name, ours) for line in lines]
        if step.kind == "text":
            terminal(step.terminal).expect(lines, TRAINING_S if page.stem == "training" else TEXT_S)
        for line in lines if step.kind == "sh" else ():
            terminal(step.terminal).type(line)


def test_every_program_has_a_page_that_runs_it() -> None:
    typed = "\n".join(
        line for page in PAGES for step in blocks(page) if step.kind == "sh" for line in step.lines
    )
    shown = "\n".join(page.read_text() for page in PAGES)
    for program in (ROOT / "examples").glob("*.py"):
        name = f"examples/{program.name}"
        assert name in typed or program.name == "endpoint.py", f"no page runs {name}"
        assert f'--8<-- "{name}"' in shown, f"no page shows {name}"
