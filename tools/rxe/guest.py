# SPDX-License-Identifier: BSD-3-Clause
"""A guest with Debian's stock kernel under QEMU, without KVM, for one job and one time limit.

The guest sees this machine's file system read-only under an overlay of its own, and one directory of ours as /out.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["HERE", "Result", "Unavailable", "prepare", "run"]

HERE = Path(__file__).resolve().parent
UNAVAILABLE = 77
MEMORY_MIB = 3072
# One: between two the packets of one QP overtake each other, rxe (6.1) resends for it, and its resending is broken.
CPUS = 1

# A CPU that is stuck for a minute ends the guest, and says where it was stuck.
KERNEL_OPTIONS = (
    "console=ttyS0 quiet panic=-1 watchdog_thresh=30 softlockup_panic=1"
    " mitigations=off tsc=reliable no_timer_check nokaslr audit=0"
)


class Unavailable(RuntimeError):
    """No guest can be had here; the message says why."""


@dataclass(frozen=True)
class Result:
    """What a guest did. status: its job's exit status; None where the guest hung, panicked or never started."""

    status: int | None
    seconds: float
    log: str
    console: str

    @property
    def infrastructure_failed(self) -> bool:
        """Whether this says nothing about what was to be tested."""
        return self.status is None


def prepare() -> Path:
    """Return the directory of kernel, modules and initrd, made on first use. Raises Unavailable."""
    done = subprocess.run([HERE / "prepare.sh"], stdout=subprocess.PIPE, text=True)
    if done.returncode == UNAVAILABLE:
        raise Unavailable("see above")
    if done.returncode:
        raise RuntimeError(f"prepare.sh ended with {done.returncode}")
    return Path(done.stdout.strip().splitlines()[-1])


def run(kernel: Path, job: str, out: Path, limit_s: float) -> Result:
    """Boot a guest, run a shell script in it, wait for its end at most limit_s seconds.

    A guest that finds its own clock wrong (see guest-init.sh) has run nothing: another one is booted, twice at most.

    kernel: what prepare() returned; job: the script's text; out: a directory that the guest sees as /out, made if
    missing. Whatever the guest does, it is gone when this returns.
    """
    started = time.monotonic()
    for _ in range(3):
        result = _boot(kernel, job, out, started + limit_s - time.monotonic())
        if not (out / "bad-clock").exists():
            break
    return replace(result, seconds=time.monotonic() - started)


def _boot(kernel: Path, job: str, out: Path, limit_s: float) -> Result:
    out.mkdir(parents=True, exist_ok=True)
    for name in ("job.rc", "job.log", "dmesg.log", "bad-clock"):
        (out / name).unlink(missing_ok=True)
    shutil.copy(HERE / "guest-init.sh", out / "init.sh")
    (out / "job.sh").write_text(job)

    def share(name: str, path: Path, *options: str) -> list[str]:
        description = ",".join([f"local,id={name}", f"path={path}", "security_model=none", *options])
        return ["-fsdev", description, "-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]

    command = [
        "setpriv", "--pdeathsig", "KILL",  # no guest outlives whoever started it
        "qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-smp", str(CPUS),
        "-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
        "-serial", "stdio", "-kernel", str(kernel / "vmlinuz"), "-initrd", str(kernel / "initrd.gz"),
        "-append", KERNEL_OPTIONS,
        *share("hostroot", Path("/"), "readonly=on", "multidevs=remap"),
        *share("kmods", (kernel / "modules").resolve(), "readonly=on"),
        *share("out", out),
    ]  # fmt: skip
    started = time.monotonic()
    with (
        (out / "console.log").open("wb") as console,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT
        ) as guest,
    ):
        try:
            guest.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            guest.kill()
        except BaseException:
            guest.kill()
            raise
    seconds = time.monotonic() - started

    def text(name: str) -> str:
        path = out / name
        return path.read_text(errors="replace") if path.exists() else ""

    status = text("job.rc").strip()
    return Result(int(status) if status else None, seconds, text("job.log"), text("console.log"))
