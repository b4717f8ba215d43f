# SPDX-License-Identifier: BSD-3-Clause
"""Network namespaces for tests, without privileges: two networks that nothing else is in."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from harness import wait_until


@dataclass
class Namespace:
    """A network namespace, held by a process that does nothing."""

    holder: subprocess.Popen[bytes]

    @property
    def prefix(self) -> list[str]:
        """Command that runs another command there."""
        return ["nsenter", "-t", str(self.holder.pid), "-U", "-n", "--preserve-credentials"]

    def ip(self, command: str) -> str:
        """Run an ip command there."""
        done = subprocess.run([*self.prefix, "ip", *command.split()], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_up(self, device: str, up: bool = True) -> None:
        """Wait until the kernel has noticed carrier or no carrier, which it does some time after the fact."""
        wait_until(
            lambda: (self.ip(f"-br link show {device}").split()[1] == "UP") == up, what=f"{device} is {up}"
        )


def open_namespace(prefix: list[str], options: list[str]) -> Namespace:
    """Start the holder and wait until it is in a namespace of its own."""
    holder = subprocess.Popen([*prefix, "unshare", *options, "--net", "cat"], stdin=subprocess.PIPE)

    def name(pid: int | str) -> str:
        try:
            return os.readlink(f"/proc/{pid}/ns/net") + open(f"/proc/{pid}/comm", encoding="utf-8").read()
        except OSError:
            return ""

    own = os.readlink("/proc/self/ns/net")
    wait_until(
        lambda: holder.poll() is not None or (own not in name(holder.pid) and "cat" in name(holder.pid))
    )
    assert holder.poll() is None, "unshare failed"
    return Namespace(holder)


@contextmanager
def spaces_or_skip() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces with nothing but loopback; skips where this machine does not allow them."""
    assert shutil.which("ip") and shutil.which("nsenter"), "iproute2 and util-linux are needed"
    allowed = subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True)
    if allowed.returncode != 0:
        pytest.skip("this machine does not allow network namespaces")
    made: list[Namespace] = []
    try:
        made.append(open_namespace([], ["--user", "--map-root-user"]))
        made.append(open_namespace(made[0].prefix, []))
        for space in made:
            space.ip("link set lo up")
        yield made[0], made[1]
    finally:
        for space in made:
            space.holder.kill()
            space.holder.wait()
            assert space.holder.stdin is not None
            space.holder.stdin.close()
