# SPDX-License-Identifier: BSD-3-Clause
"""Runs a setting: starts the ranks, breaks the network where it is due, and starts them anew where they end early."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.perftest.exchange import BANNER
from benchmarks.suite.lab import ROOT, Lab, SuiteError, written
from benchmarks.train.record import Life, Run, Step
from benchmarks.train.settings import FAILS_AT, FLAP_S, SLOW, Setting, break_network, heal, quicken
from shiftverbs.commands.demo.etcd_server import free_port

#: How long nothing may happen.
SILENCE_S = 120.0
#: How long a perftest server may take until it listens.
LISTENS_S = 60.0
#: How long ranks may take to end once one has.
END_S = 20.0
#: More often than that a job is not started.
LIVES = 3


@dataclass(frozen=True)
class Job:
    """What is trained.

    :param flap_s: how long the NIC is away where it comes back by itself, in seconds; longer where the backup has not
        carried a step by then
    :param fabric: limits of the rails, as SOFTRNIC_FABRIC takes them; "": none
    """

    model: str = "small"
    ranks: int = 2
    epochs: int = 4
    epoch_steps: int = 40
    seed: int = 1
    flap_s: float = FLAP_S
    fabric: str = ""

    @property
    def last_step(self) -> int:
        """How many steps there are."""
        return self.epochs * self.epoch_steps

    @property
    def fails_at(self) -> int:
        """The step behind which the failure is."""
        return round(FAILS_AT * self.epoch_steps)


#: Told of each step: its number, loss, milliseconds, path.
Progress = Callable[[int, float, float, str], None]


class Ranks:
    """The job's processes, from a start to their end."""

    def __init__(self, job: Job, env: Callable[[str], dict[str, str]], directory: Path, stops: bool) -> None:
        self.events: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._logs: list[IO[str]] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        port = str(free_port())
        numbers = {"ranks": job.ranks, "epochs": job.epochs, "steps": job.epoch_steps, "seed": job.seed}
        for rank in range(job.ranks):
            command = [sys.executable, "-m", "benchmarks.train.rank", "--json", "--model", job.model]
            command += [f"--{name}={value}" for name, value in numbers.items()]
            command += [f"--rank={rank}", f"--port={port}", f"--checkpoints={directory}"]
            log = tempfile.TemporaryFile("w+", errors="replace")
            self._logs.append(log)
            process = subprocess.Popen(
                command + ["--stop"] * stops,
                env=env("ab"[rank * 2 // job.ranks]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            self._processes.append(process)
            reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    self.events.put((rank, json.loads(line)))
        self.events.put((rank, None))

    def wait(self, for_s: float) -> list[int]:
        """The exit statuses, once all have ended; who has not by then is killed."""
        deadline = time.monotonic() + for_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [process.returncode for process in self._processes]

    def log(self) -> str:
        """The ends of what they wrote to standard error."""
        found = []
        for rank, log in enumerate(self._logs):
            found.append(f"rank {rank}:\n{written(log)[-1500:]}")
        return "\n".join(found)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(5)
        for log in self._logs:
            log.close()


class Supervisor:
    """One run of a setting.

    :param lab: its network and etcd
    :param fault: one of settings.FAULTS, or settings.SLOW
    """

    def __init__(self, lab: Lab, setting: Setting, job: Job, fault: str, progress: Progress) -> None:
        self._lab, self._setting, self._job, self._progress = lab, setting, job, progress
        self._fault = fault if setting.fails else ""
        self.run = Run(setting.number, setting.name, self._fault, job.epoch_steps)
        self._namespace = lab.job()
        self._heal_at: float | None = None

    def _environment(self, host: str) -> dict[str, str]:
        package = "shiftverbs" if self._setting.is_protected else "pyverbs"
        env = self._lab.environment(host, package, f"{self._namespace}-{len(self.run.lives)}")
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if not self._setting.is_protected:
            env["SHIFTVERBS_DISABLE"] = "1"
        if self._job.fabric:
            env["SOFTRNIC_FABRIC"] = self._job.fabric
        if self._setting.straggler:
            env["SHIFTVERBS_STRAGGLER"] = self._setting.straggler
        return env

    def supervise(self) -> Run:
        """Until the training is done.

        :raises SuiteError: it does not come to its end, or not the way that is asked for
        """
        with (
            tempfile.TemporaryDirectory(prefix="shiftverbs-train-") as directory,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(heal)
            if self._fault == SLOW:
                stack.callback(quicken, self._job.fabric)
            if self._setting.is_busy:
                stack.enter_context(busy_backup(self._lab, self._job.fabric))
            for _ in range(LIVES):
                life = Life()
                self.run.lives.append(life)
                self._live(life, Path(directory))
                if life.end == "done":
                    self._check_paths()
                    return self.run
                # What has failed is mended, or the job is moved, before it is started anew.
                self._heal()
        raise SuiteError(f"{self._setting.name} did not come to its end in {LIVES} starts")

    def _live(self, life: Life, directory: Path) -> None:
        ranks = Ranks(self._job, self._environment, directory, self._setting.stops)
        try:
            ended = 0
            last_at = time.monotonic()
            while ended < self._job.ranks:
                now = time.monotonic()
                wait_s = SILENCE_S
                if self._heal_at is not None and len(self.run.paths) > 1:
                    if now >= self._heal_at:
                        self._heal()
                    else:
                        wait_s = self._heal_at - now
                try:
                    rank, event = ranks.events.get(timeout=wait_s)
                except queue.Empty:
                    if time.monotonic() - last_at > SILENCE_S:
                        raise SuiteError(f"{self._setting.name}: nothing happens\n{ranks.log()}") from None
                    continue
                last_at = time.monotonic()
                if event is None:
                    ended += 1
                    if not life.end:
                        life.end = "died"
                    if life.end == "died":
                        break  # the others wait in vain, or have failed of it
                else:
                    self._take(life, rank, event)
            statuses = ranks.wait(0.0 if life.end == "died" else END_S)
            expected = life.end == "died" and not self._setting.is_protected and self.run.failed is not None
            if not expected and (life.end == "died" or any(statuses)):
                raise SuiteError(f"{self._setting.name}: ranks ended with {statuses}\n{ranks.log()}")
        finally:
            ranks.close()

    def _take(self, life: Life, rank: int, event: dict[str, Any]) -> None:
        kind, t = event["kind"], event["t"]
        if kind == "done":
            self.run.digests.append(event["digest"])
        elif kind == "protected" and not event["protected"]:
            raise SuiteError(f"{self._setting.name}: rank {rank} is not protected: {event['why']}")
        if rank:
            return
        if kind == "begin":
            life.began, life.resumed_at = t, event["step"]
            life.ended = t
        elif kind == "step":
            step = Step(event["step"], t, event["loss"], tuple(event["paths"]))
            life.steps.append(step)
            life.ended = t
            self._progress(step.number, step.loss, event["ms"], "+".join(step.paths))
            if self._fault and self.run.failed is None and step.number >= self._job.fails_at:
                self._fail()
        elif kind == "checkpoint":
            life.checkpoints.append((event["step"], t))
            life.ended = t
        elif kind == "pause":
            life.pauses.append({name: event[name] for name in ("step", "saved", "s", "why")})
        elif kind in ("done", "stopped"):
            life.end = kind

    def _check_paths(self) -> None:
        """That weights are the same says nothing where no failure was met."""
        paths = self.run.paths
        if not (self._setting.fails and self._setting.is_protected):
            return
        if self._setting.straggler == "observe":
            if len(paths) > 1:
                raise SuiteError(f"{self._setting.name}: it was moved: {' → '.join(paths)}")
            return
        if len(paths) < 2:
            raise SuiteError(f"{self._setting.name}, {self._fault}: it never ran on its backup")
        if not self._setting.is_fatal and paths[-1] != paths[0]:
            raise SuiteError(
                f"{self._setting.name}, {self._fault}: it did not come home: {' → '.join(paths)}"
            )

    def _fail(self) -> None:
        break_network(self._fault)
        self.run.failed = time.monotonic()
        if not self._setting.is_fatal:
            self._heal_at = self.run.failed + self._job.flap_s

    def _heal(self) -> None:
        self._heal_at = None
        if self.run.failed is not None and self.run.healed is None:
            heal()
            self.run.healed = time.monotonic()


def await_listening(process: subprocess.Popen[str], log: IO[str]) -> None:
    """Until a perftest server is about to listen: with the lowest priority it comes to that late, and a client waits a
    few seconds only. Raises SuiteError where it does not."""
    deadline = time.monotonic() + LISTENS_S
    while True:
        said = written(log)
        if BANNER in said:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SuiteError(f"the traffic on the backup does not begin: {said[-1000:]}")
        time.sleep(0.02)


@contextlib.contextmanager
def busy_backup(lab: Lab, fabric: str) -> Iterator[None]:
    """ib_write_bw on the backup's rail, from host a to host b, while the block runs.

    It has the lowest priority: without a bandwidth of the rail it is to take the processors' idle time, not the
    training's. Raises SuiteError where it does not start.
    """
    port = str(free_port())
    script = [
        "nice",
        "-n",
        "19",
        sys.executable,
        str(ROOT / "benchmarks" / "ib_write_bw.py"),
        "--module=pyverbs",
        "-d",
        "soft1",
    ]
    script += ["-s", "65536", "-D", "100000", "-u", "20", "-p", port]
    with contextlib.ExitStack() as stack:
        processes: list[tuple[subprocess.Popen[str], IO[str]]] = []
        try:
            for host, server in (("b", []), ("a", ["127.0.0.1"])):
                env = lab.environment(host, "pyverbs", "") | {"PYTHONPATH": str(ROOT)}
                if fabric:
                    env["SOFTRNIC_FABRIC"] = fabric
                log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
                process = subprocess.Popen(
                    script + server,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                processes.append((process, log))
                if not server:
                    await_listening(process, log)
            yield
            for process, output in processes:
                if process.poll() is not None:
                    raise SuiteError(f"the traffic on the backup ended early: {written(output)[-1000:]}")
        finally:
            for process, _ in processes:
                process.kill()
                process.wait()
