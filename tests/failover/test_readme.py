# SPDX-License-Identifier: BSD-3-Clause
"""The README's failover example, line by line as it is printed there, in a shell."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from harness import ROOT, free_port

MARK = "<!-- failover example: tests/failover/test_readme.py runs it -->"


class Shell:
    """A bash that reads lines from us, and everything that it and its children print."""

    def __init__(self, env):
        self.output = ""
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"], env=env, cwd=ROOT, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        while data := os.read(self._process.stdout.fileno(), 65536):
            with self._changed:
                self.output += data.decode(errors="replace")
                self._changed.notify_all()

    def type(self, line):
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def expect(self, pattern, start=0, timeout_s=30):
        """Wait until the output behind position start matches; return the match's end."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                match = re.search(pattern, self.output[start:])
                if match:
                    return start + match.end()
                left = deadline - time.monotonic()
                assert left > 0, f"no {pattern!r} within {timeout_s} s; the shell's output:\n{self.output}"
                self._changed.wait(left)

    def close(self):
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def example(readme):
    """Return the lines of the block behind the mark, continued lines joined."""
    text = readme.split(MARK, 1)[1]
    block = re.search(r"```(?:sh|shell|bash)?\n(.*?)```", text, re.DOTALL).group(1)
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


@pytest.fixture
def shell(tmp_path, softrnic_dir):
    """A shell as the README's reader has it, but for ports and folders that are ours alone."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SOFTRNIC", "SHIFTVERBS", "ETCD"))}
    env |= {
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        "TMPDIR": str(tmp_path),
        "SOFTRNIC_DIR": str(softrnic_dir),
        "ETCD_LISTEN_CLIENT_URLS": client,
        "ETCD_ADVERTISE_CLIENT_URLS": client,
        "ETCD_LISTEN_PEER_URLS": peer,
        "ETCD_INITIAL_ADVERTISE_PEER_URLS": peer,
        "ETCD_INITIAL_CLUSTER": f"default={peer}",
    }
    shell = Shell(env)
    shell.etcd = client.removeprefix("http://")
    shell.tcp_port = free_port()
    yield shell
    shell.close()


def test_the_readme_example_survives_and_comes_home(shell):
    lines = example((ROOT / "README.md").read_text())
    text = "\n".join(lines)
    assert "sed" in text and "softrnic down a/soft0" in text and "softrnic up a/soft0" in text
    at = 0
    for line in lines:
        if line.startswith((". .venv", "source ")):
            continue  # this interpreter's environment is in force already
        line = re.sub(r"^sleep \d+; ", "", line)  # conditions are waited for instead
        line = line.replace("127.0.0.1:2379", shell.etcd)
        if "SOFTRNIC_HOST" in line:
            assert '"$program"' in line
            line = line.replace('"$program"', f'"$program" --port {shell.tcp_port}')
        shell.type(line)
        if "SOFTRNIC_HOST=a" in line:
            at = shell.expect(r"sent \d+ messages, [1-9]\d* MB/s, PROTECTED on soft0", at)
            at = shell.expect(r"received \d+ messages, [1-9]\d* MB/s, PROTECTED on soft0", at)
        elif "softrnic down a/soft0" in line:
            at = shell.expect(r"sent \d+ messages, [1-9]\d* MB/s, PROTECTED on soft1", at)
            at = shell.expect(r"received \d+ messages, [1-9]\d* MB/s, PROTECTED on soft1", at)
            at = shell.expect(r"sent \d+ messages, [1-9]\d* MB/s, PROTECTED on soft1", at)
        elif "softrnic up a/soft0" in line:
            at = shell.expect(r"sent \d+ messages, [1-9]\d* MB/s, PROTECTED on soft0", at)
            at = shell.expect(r"received \d+ messages, [1-9]\d* MB/s, PROTECTED on soft0", at)
            at = shell.expect(r"sent \d+ messages, [1-9]\d* MB/s, PROTECTED on soft0", at)
    # etcd's own log, a JSON object or gRPC's words a line, comes to the same terminal.
    said = [
        line for line in shell.output.splitlines() if not re.match(r'\{"level"|\w+: \d{4}/\d\d/\d\d ', line)
    ]
    assert not [line for line in said if "error" in line or "was due" in line], shell.output
    shell.type("echo the-end")
    shell.expect("the-end", at)
