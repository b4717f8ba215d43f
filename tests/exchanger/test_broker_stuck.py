# SPDX-License-Identifier: BSD-3-Clause
"""A broker that gets stuck on its way gives way to a new one, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exchanger.around import running, wait_until
from exchanger.conftest import EtcdWorld, Watched
from shiftverbs.exchanger import Connected, Unavailable
from shiftverbs.exchanger import start as start_module
from shiftverbs.exchanger.etcd import EtcdExchanger

# Run in every broker that a test starts: the import of a module never ends, and takes no processor time.
HANG = """
import os, sys, threading, time
class Hang:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and not os.path.exists({file!r}):
            coming = sys.modules.get("shiftverbs.exchanger.coming_link")
            if coming:
                coming.STUCK_S = 1.0
            threading.Event().wait()
if "shiftverbs.exchanger.broker" in sys.orig_argv:
    sys.meta_path.insert(0, Hang())
"""


Hang = Callable[[str], Callable[[], object]]


@pytest.fixture
def hang(softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Hang:
    """Have a module's import hang in brokers that are started before the result is called."""

    def begin(module: str) -> Callable[[], object]:
        file = softrnic_dir / "fine-again"
        (softrnic_dir / "sitecustomize.py").write_text(HANG.format(module=module, file=str(file)))
        monkeypatch.setenv("PYTHONPATH", str(softrnic_dir))
        return file.touch

    return begin


def pid_of(one: Watched) -> int:
    """An exchanger's broker, 0 while it has none."""
    one.poll()
    assert isinstance(one.exchanger, EtcdExchanger)
    return one.exchanger.broker_pid or 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_broker_that_gets_stuck_in_loading_is_replaced(
    etcd_world: EtcdWorld, softrnic_dir: Path, hang: Hang, shared: bool
) -> None:
    end = hang("etcd3")
    changes: dict[str, Any] = (
        {"broker": str(softrnic_dir / "b.sock"), "broker_idle_exit_s": 1} if shared else {}
    )
    ones = [etcd_world.make(**changes) for _ in range(2)]
    wait_until(lambda: all(pid_of(one) for one in ones), what="hello")
    pids = [pid_of(one) for one in ones]
    for one in ones:
        assert "gRPC and etcd3 are not loaded" in one.next(Unavailable).reason
    end()
    for one in ones:
        one.next(Connected)
    wait_until(lambda: not any(running(pid) for pid in pids), what="the stuck ones end")


def brokers_of(directory: Path) -> set[int]:
    """The brokers there are that have `directory` in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"shiftverbs.exchanger.broker" in (entry / "cmdline").read_bytes():
                if str(directory).encode() in (entry / "environ").read_bytes() and running(int(entry.name)):
                    found.add(int(entry.name))
    return found


@pytest.mark.parametrize("how", ["import", "stop"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_broker_that_gets_stuck_before_its_hello_is_ended(
    etcd_world: EtcdWorld,
    softrnic_dir: Path,
    hang: Hang,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
    how: str,
) -> None:
    """It would never notice that nobody waits for it any more, and a shared one keeps the socket from its successor."""
    monkeypatch.setattr(start_module, "START_TIMEOUT_S", 3.0)
    end = hang("shiftverbs" if how == "import" else "nothing")
    if how == "stop":
        (softrnic_dir / "sitecustomize.py").write_text(
            "import os, signal, sys\n"
            "broker = 'shiftverbs.exchanger.broker' in sys.orig_argv\n"
            f"if broker and not os.path.exists({str(softrnic_dir / 'fine-again')!r}):\n"
            "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        )
    changes: dict[str, Any] = (
        {"broker": str(softrnic_dir / "b.sock"), "broker_idle_exit_s": 1} if shared else {}
    )
    ones = [etcd_world.make(**changes) for _ in range(2)]
    for one in ones:
        assert "the broker does not say hello in 3 s" in one.next(Unavailable).reason
    end()
    for one in ones:
        one.next(Connected, timeout_s=60)
    now = {pid_of(one) for one in ones}
    wait_until(lambda: brokers_of(softrnic_dir) == now, what="no other one is left")
