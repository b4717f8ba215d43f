# SPDX-License-Identifier: BSD-3-Clause
"""The stage of a soak run: two real processes, a real etcd behind relays, the software network; and who judges it."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from failover.hosts import Host
from failover.hosts import Network as Hosts
from harness import ROOT, Child, EtcdServer, child_env, python_args

from shiftverbs.softrnic import faults
from soak.plan import Plan
from soak.relay import Relay
from soak.steps import STEPS

#: Every wait ends by then. It is no promise of ours: a busy machine must not look like a defect.
DEADLINE_S = 120.0
POLL_S = 0.05
JOB = "soak"
LOG_LINES = 250
RSS_GROWTH_KIB = 24 * 1024
PRELUDE = "from soak.application import Application, usage"
SENT, CONFIRMED, RECEIVED, SIGNALED, BROKEN, STATUS, STATE, RECV_STATE, PAIR, _ = range(10)


class SoakError(AssertionError):
    """Something that must not be; the message says what."""


class Stage:
    """Everything of one round. say: told what is being done."""

    def __init__(self, plan: Plan, say: Callable[[str], None], scale: float = 1.0) -> None:
        self.plan = plan
        self.say = say
        self.scale = scale
        self.hosts: dict[str, Host] = {}
        self.relays: dict[str, Relay] = {}
        self.over: str | None = None
        self.killed: set[str] = set()
        self.restart: set[str] = set()  # hosts whose process is to be replaced when its QPs are closed
        self.messages = self.additions = self.additions_failed = 0
        self.lane_count = sum(group["lanes"] for group in plan.groups)
        self._children: list[Child] = []
        self._directory = Path(tempfile.mkdtemp(prefix="sv-soak-"))
        self._before = os.environ.get("SOFTRNIC_DIR")
        self._baseline: dict[str, dict[str, Any]] = {}
        self._rss: dict[str, int] = {}
        self._keys: list[str] = []
        self.etcd = EtcdServer()

    # -- coming and going

    def __enter__(self) -> Stage:
        os.environ["SOFTRNIC_DIR"] = str(self._directory)
        try:
            self.etcd.start()
            self._network = Hosts(self._spawn, {}, self._directory)
            for name in "ab":
                faults.register(name, str(self.plan.nics))
                self.relays[name] = Relay(self.etcd.port)
                self.start_host(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        for child in self._children:
            child.close()
        for relay in self.relays.values():
            relay.close()
        self.etcd.close()
        if self._before is None:
            os.environ.pop("SOFTRNIC_DIR", None)
        else:
            os.environ["SOFTRNIC_DIR"] = self._before
        shutil.rmtree(self._directory, ignore_errors=True)

    def _spawn(
        self, *args: str, host: str | None = "a", softrnic: str | None = "1", env: Any = None
    ) -> Child:
        child = Child(python_args(*args), child_env(self._directory, host, softrnic, env), f"host {host}")
        self._children.append(child)
        return child

    def start_host(self, name: str) -> None:
        """Start a process on a host and measure what it holds once everything was used once."""
        self.hosts[name] = self._network.host(
            name,
            nics=str(self.plan.nics),
            SHIFTVERBS_ETCD=self.relays[name].endpoint,
            SHIFTVERBS_JOB=JOB,
            SHIFTVERBS_PEER_DEADLINE_MS=str(self.plan.deadline_ms),
            PYTHONPATH=str(ROOT / "tests"),
        )
        self.hosts[name](PRELUDE)
        self.killed.discard(name)
        self._baseline.pop(name, None)
        self._rss.pop(name, None)

    def logs(self) -> str:
        """What both hosts said, without the answers to our questions."""
        parts = []
        for name, host in self.hosts.items():
            lines = [line for line in host.child.output.splitlines() if not line.startswith("=> ")]
            parts += [f"--- host {name}, the last {LOG_LINES} of {len(lines)} lines", *lines[-LOG_LINES:]]
        return "\n".join(parts)

    # -- asking

    def ask(self, source: str, timeout_s: float = DEADLINE_S) -> list[Any]:
        """Have both hosts that live carry this out; their answers in the order a, b."""
        alive = [host for name, host in sorted(self.hosts.items()) if name not in self.killed]
        for host in alive:
            host.begin(source)
        return [host.end(timeout_s) for host in alive]

    def status(self) -> list[dict[str, Any]]:
        """What both applications say; nothing that was received may ever have been wrong, nor our own state."""
        for name, host in self.hosts.items():
            if "AssertionError: invariant" in host.child.output:
                raise SoakError(f"host {name} found an invariant broken, its log says which")
        found = self.ask("app.status()")
        for status in found:
            if status["faults"] or status["trouble"]:
                raise SoakError(f"{status['faults']} {status['trouble']}")
            for demo in status["demos"]:
                wrong = [
                    demo[key]
                    for key in ("lost_of_expected", "duplicated", "reordered", "corrupt", "wc_faults")
                ]
                if any(wrong):
                    raise SoakError(f"demo traffic {demo['kind']}: {demo['first_fault']} {wrong}")
        return found

    def wait(self, condition: Callable[..., bool], what: str, timeout_s: float = DEADLINE_S) -> None:
        """Wait until condition(status of a, status of b) holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.status()
            if condition(*found):
                return
            if time.monotonic() > deadline:
                whys = self.ask("app.why()")
                raise SoakError(f"not within {timeout_s:g} s: {what}\n{whys}\n{found}")
            time.sleep(POLL_S)

    def run_for(self, seconds: float, look: bool = True) -> None:
        """Let the applications work. look: check meanwhile that they are sound."""
        end = time.monotonic() + seconds
        if look and seconds > POLL_S:
            self.status()
        time.sleep(max(0.0, end - time.monotonic()))

    def scaled(self, count: int) -> int:
        """A number of repetitions, fewer in a short run."""
        return max(1, round(count * self.scale))

    # -- what steps use

    @staticmethod
    def _qps(*found: dict[str, Any]) -> list[tuple[str | None, str, str, str, int]]:
        """(broken, status, state, recv_state, pair) of every QP on both hosts."""
        qps = [(lane[BROKEN], *lane[STATUS : PAIR + 1]) for status in found for lane in status["lanes"]]
        return qps + [(demo["broken"], *demo["shift"]) for status in found for demo in status["demos"]]

    def _no_errors(self, *found: dict[str, Any]) -> None:
        broken = sorted({qp[0] for qp in self._qps(*found) if qp[0]})
        if broken:
            raise SoakError(f"errors that nobody should have seen: {broken}\n{self.ask('app.why()')}")

    def wait_away(self) -> None:
        """Every QP has left its default NIC."""

        def away(*found: dict[str, Any]) -> bool:
            self._no_errors(*found)
            return all(state == "FALLBACK" and pair for _, _, state, _, pair in self._qps(*found))

        self.wait(away, "all QPs on a backup")

    def wait_on(self, k: int) -> None:
        """Every QP runs on pair k."""

        def there(*found: dict[str, Any]) -> bool:
            self._no_errors(*found)
            return all(state == "FALLBACK" and pair == k for _, _, state, _, pair in self._qps(*found))

        self.wait(there, f"all QPs on pair {k}")

    def wait_home(self) -> None:
        """Every QP is PROTECTED and both of its directions are at home."""

        def home(*found: dict[str, Any]) -> bool:
            self._no_errors(*found)
            return all(qp[1:] == ("PROTECTED", "DEFAULT", "DEFAULT", 0) for qp in self._qps(*found))

        self.wait(home, "all QPs PROTECTED and at home")

    def wait_preferred(self, host: str, lanes: list[int], k: int) -> None:
        """This host knows that these lanes are to be on pair k."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := self.hosts[host](f"app.preferred({lanes})")) != [k] * len(lanes):
            if time.monotonic() > deadline:
                raise SoakError(f"host {host} was not told that lanes {lanes} go to pair {k}: {found}")
            time.sleep(POLL_S)

    @staticmethod
    def _streams(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[int, int]]:
        """(sent, received) of every direction of all traffic."""
        streams = []
        for here, there in ((a, b), (b, a)):
            streams += [(x[SENT], y[RECEIVED]) for x, y in zip(here["lanes"], there["lanes"], strict=True)]
        for x, y in zip(a["demos"], b["demos"], strict=True):
            match x["kind"]:
                case "write_imm":
                    streams += [(x["sent"], y["expected"]), (y["sent"], x["expected"])]
                case "send":
                    streams.append((x["sent"], y["expected"]))
                case "read":
                    streams.append((x["sent"], x["expected"]))
        return streams

    def wait_moving(self) -> None:
        """On every lane, in every direction, a message arrives that was not yet sent when this began."""
        before = [sent for sent, _ in self._streams(*self.status())]

        def moved(a: dict[str, Any], b: dict[str, Any]) -> bool:
            self._no_errors(a, b)
            return all(got > was for was, (_, got) in zip(before, self._streams(a, b), strict=True))

        self.wait(moved, "new messages on every lane")

    def wait_settled(self) -> None:
        """All that was sent has arrived, and no signaled WR owes its WC."""

        def settled(a: dict[str, Any], b: dict[str, Any]) -> bool:
            self._no_errors(a, b)
            owed = sum(lane[SIGNALED] for status in (a, b) for lane in status["lanes"])
            owed += sum(demo["unconfirmed"] for status in (a, b) for demo in status["demos"])
            told = all(
                x.get("credits_sent") == y.get("credits") and y.get("credits_sent") == x.get("credits")
                for x, y in zip(a["demos"], b["demos"], strict=True)
            )
            return owed == 0 and told and all(sent == got for sent, got in self._streams(a, b))

        self.wait(settled, "every message arrived, every signaled WR completed")

    # -- lives of lanes

    @property
    def deadline_s(self) -> float:
        """How long anything may take."""
        return DEADLINE_S

    @staticmethod
    def error(what: str) -> SoakError:
        """What a step raises."""
        return SoakError(what)

    def end_lives(self, host: str, lanes: list[int], how: str, most: int) -> list[list[int]]:
        """Application.end on one host: the records of these lives."""
        return self.hosts[host](f"app.end({lanes}, {how!r}, {most})", DEADLINE_S)  # type: ignore[no-any-return]

    def judge_records(self, lanes: list[int], records: dict[str, list[list[int]]], drained: bool) -> None:
        """What both ends of each life counted fits. drained: both heard of all that was theirs."""
        for name, other in ("ab", "ba"):
            for lane, mine, theirs in zip(lanes, records[name], records[other], strict=True):
                if theirs[RECEIVED] > mine[SENT] or (drained and theirs[RECEIVED] < mine[CONFIRMED]):
                    told = "sent, confirmed, received"
                    raise SoakError(f"lane {lane} of {name}: {told} {mine}, its peer {theirs}")
                self.messages += theirs[RECEIVED]

    def wait_protected(self, lanes: list[int]) -> None:
        """These lanes are PROTECTED on both hosts."""

        def protected(*found: dict[str, Any]) -> bool:
            self._no_errors(*found)
            return all(status["lanes"][n][STATUS] == "PROTECTED" for status in found for n in lanes)

        self.wait(protected, f"lanes {lanes} PROTECTED again")

    def wait_keys(self) -> None:
        """A memory key is looked up when it is first used: what is new cannot be moved while etcd is away."""
        self.wait(lambda *_: all(self.ask("app.keys_known()")), "memory keys known on every lane")

    def rest(self, lanes: list[int]) -> None:
        """Nothing is outstanding on these lanes, and nothing new is sent there."""
        self.ask(f"app.rest({lanes}, True)")

        def resting(a: dict[str, Any], b: dict[str, Any]) -> bool:
            self._no_errors(a, b)
            ends = [(a["lanes"][n], b["lanes"][n]) for n in lanes]
            arrived = all(x[SENT] == y[RECEIVED] and y[SENT] == x[RECEIVED] for x, y in ends)
            return arrived and all(self.ask(f"app.resting({lanes})"))

        self.wait(resting, f"lanes {lanes} at rest")

    def rights(self, without: str | None = None) -> int:
        """IBV_ACCESS_* flags of a lane's QP; without: "WRITE" or "READ", which the peer may not do then."""
        names = [name for name in ("WRITE", "READ") if name != without]
        flags = "|".join(
            ["app.verbs.e.IBV_ACCESS_LOCAL_WRITE", *(f"app.verbs.e.IBV_ACCESS_REMOTE_{n}" for n in names)]
        )
        return int(self.hosts["a"](f"int({flags})"))

    def try_right(self, owner: str, lanes: list[int], write: bool, allowed: bool) -> None:
        """The peer of `owner` uses a right on these lanes, and it ends as it must."""
        user = "b" if owner == "a" else "a"
        self.ask(f"[app.untry(n) for n in {lanes}]")
        self.hosts[user](f"[app.try_right(n, {write}) for n in {lanes}]")
        ends: list[list[Any]] = []

        def ended(*_: dict[str, Any]) -> bool:
            ends[:] = self.hosts[user](f"[app.tried(n) for n in {lanes}]")
            return all(status is not None for status, _, _ in ends)

        self.wait(ended, "the end of WRs that use a right")
        there = [reached for _, _, reached in self.hosts[owner](f"[app.tried(n) for n in {lanes}]")]
        for lane, (status, brought, _), reached in zip(lanes, ends, there, strict=True):
            got = (status, reached if write else brought)
            if got != (("SUCCESS", True) if allowed else ("REM_INV_REQ_ERR", False)):
                what = "WRITE" if write else "READ"
                raise SoakError(
                    f"lane {lane}: a {what}, {'allowed' if allowed else 'not allowed'}, had the effect {got}"
                )

    def send(self, on: bool) -> None:
        """Both applications send messages, or no new ones."""
        self.ask(f"app.send({on})")

    def heal(self) -> None:
        """The network is whole again."""
        faults.clear()

    def kill_host(self, name: str) -> None:
        """kill -9."""
        self.hosts[name].child.signal(signal.SIGKILL)
        self.hosts[name].child.wait()
        self.killed.add(name)

    def kill_broker(self, name: str) -> None:
        """kill -9 of a host's broker, if one runs at the moment."""
        for pid in self.brokers(name):
            os.kill(pid, signal.SIGKILL)

    def brokers(self, name: str) -> list[int]:
        """The brokers that serve a host: those that were told of its relay."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                port = self.relays[name].endpoint.rpartition(":")[2].encode()
                if b"shiftverbs.exchanger.broker" in command and re.search(rb"\b" + port + rb"\b", command):
                    found.append(int(entry.name))
        return found

    # -- the round

    def play(self) -> None:
        """All steps of the plan, then the end of everything."""
        self._baselines()
        steps = list(self.plan.steps)
        while steps:
            self._open(self.plan.groups, self.plan.demo)
            while steps and self.over is None:
                name, seed = steps.pop(0)
                self._step(name, seed)
            self._close()
        self._end()
        self.say(
            f"  {self.messages} messages, {self.additions} additions, {self.additions_failed} met an error"
        )

    def _baselines(self) -> None:
        """Whoever is new uses everything once, one QP of each kind; then it is measured."""
        self._open([self.plan.groups[0] | {"lanes": 1}] if self.plan.groups else [], self.plan.demo[:1])
        self._close(measure=False)
        for name, host in self.hosts.items():
            if name not in self._baseline:
                self._baseline[name] = host("usage()")
        self._keys = self._settled_keys()

    def _settled_keys(self) -> list[str]:
        """etcd's keys of this job once no QP and no MR is among them."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            keys = self.etcd.keys(f"/shiftverbs/{JOB}/")
            if not any("/qp/" in key for key in keys):
                return keys
            if time.monotonic() > deadline:
                raise SoakError(f"keys of closed QPs and MRs stay in etcd: {keys}")
            time.sleep(POLL_S)

    def _open(self, groups: list[dict[str, Any]], demo: list[str]) -> None:
        self.over = None
        for role, name in enumerate("ab"):
            self.hosts[name].begin(
                f"app = Application({role}, {self.plan.seed}, {groups!r}, {demo!r}); app.names()"
            )
        names = [self.hosts[name].end(DEADLINE_S) for name in "ab"]
        for name, theirs in zip("ab", reversed(names), strict=True):
            self.hosts[name].begin(f"app.connect({theirs!r})")
        for name in "ab":
            self.hosts[name].end(DEADLINE_S)
        self.wait_home()
        self.send(True)
        self.wait_moving()
        self.wait_keys()

    def _step(self, name: str, seed: int) -> None:
        step = STEPS[name]
        began = time.monotonic()
        self.say(f"  {name} {seed}")
        try:
            step.body(self, random.Random(seed))
        except SoakError as error:
            # Inside a step that may be too much, an error may be met; whether it was a fair one is seen behind it.
            if step.survives or "errors that nobody should have seen" not in str(error):
                raise
        if self.killed:
            self._survivor()
        elif self.over is None:
            self.heal()
            self._recover(step.survives)
        self.say(f"  {name} {seed}: {time.monotonic() - began:.1f} s{', ' + self.over if self.over else ''}")

    def _recover(self, survives: bool) -> None:
        """All at home with traffic moving; or, where that may be, both sides of a QP got their errors."""
        if survives:
            self.wait_home()
            self.wait_moving()
            return

        # b only receives there, or only serves memory: with no path left nobody can tell it, as with plain verbs.
        silent = [False] * self.lane_count + [demo != "write_imm" for demo in self.plan.demo]

        def agreed(a: dict[str, Any], b: dict[str, Any]) -> bool:
            return all(
                (_gone(x) and (_gone(y) or passive))
                or x[1:] == y[1:] == ("PROTECTED", "DEFAULT", "DEFAULT", 0)
                for x, y, passive in zip(self._qps(a), self._qps(b), silent, strict=True)
            )

        self.wait(agreed, "on each QP both sides at home, or errors on both sides")
        a, b = self.status()
        if not any(map(_gone, self._qps(a, b))):
            self.wait_moving()
            return
        self.over = "errors on both sides"
        for here, there, name in ((a, b, "a"), (b, a, "b")):
            for i, (x, y) in enumerate(zip(here["lanes"], there["lanes"], strict=True)):
                if not y[RECEIVED] <= x[SENT] or y[RECEIVED] < x[CONFIRMED]:
                    raise SoakError(
                        f"lane {i} of {name}: sent, confirmed {x[:2]}, the peer received {y[RECEIVED]}"
                    )

    def _survivor(self) -> None:
        """The peer was killed: every QP gets its errors, and its application can go on without them."""
        self.over = "the peer was killed"
        # Who only waits for messages, or for credits, is told nothing: as with plain verbs.
        self.wait(
            lambda status: (
                all(lane[BROKEN] for lane in status["lanes"])
                and all(demo["broken"] or not demo["unconfirmed"] for demo in status["demos"])
            ),
            "errors on every QP whose peer was killed",
        )

    def _close(self, measure: bool = True) -> None:
        """Every message accounted for, threads ended, objects destroyed; nothing left behind."""
        if self.over is None:
            self.send(False)
            self.wait_settled()
            for faults_seen in self.ask("app.audit()"):
                if faults_seen:
                    raise SoakError(str(faults_seen))
        if not self.killed:
            self._check_counter()
        self.messages += sum(lane[RECEIVED] for status in self.status() for lane in status["lanes"])
        self.messages += sum(demo["checked"] for status in self.status() for demo in status["demos"])
        self.ask("app.farewell()")
        self.ask("app.wake_peer()")
        for stuck in self.ask("app.join()", DEADLINE_S + 60):
            if stuck:
                raise SoakError(f"threads that do not end: {stuck}")
        self.ask("app.close(); app = None")
        self.heal()
        for name in sorted(self.restart):
            self._leave(name)
        fresh = self.killed | self.restart
        for name in sorted(fresh):
            self.start_host(name)
        self.restart.clear()
        self._settled_keys()
        if measure:
            self._measure()
        if fresh:
            self._baselines()

    def _check_counter(self) -> None:
        """Every addition that succeeded was done once; one that ended with an error, once or not at all."""
        self.send(False)
        self.wait(
            lambda a, b: bool(a["counter"]["broken"]) or not a["counter"]["outstanding"],
            "the last addition's end",
        )
        a, b = (status["counter"] for status in self.status())
        self.additions += a["done"]
        self.additions_failed += a["broken"] is not None
        if not a["done"] <= b["value"] <= a["done"] + (a["broken"] is not None):
            raise SoakError(
                f"{a['done']} additions succeeded, then {a['broken']}; the number is {b['value']}"
            )

    def _measure(self) -> None:
        """Descriptors and threads are back where they began, memory where it was after the first connections."""
        for name, host in self.hosts.items():
            if name not in self._baseline:
                continue
            began = self._baseline[name]
            deadline = time.monotonic() + DEADLINE_S
            while True:
                now = host("usage()")
                left = {key: _more(now[key], began[key]) for key in ("fds", "threads")}
                if not any(left.values()):
                    break
                if time.monotonic() > deadline:
                    raise SoakError(f"host {name} holds more than in the beginning: {left}")
                time.sleep(POLL_S)
            first = self._rss.setdefault(name, now["rss_kib"])
            self.say("  host {}: {} descriptors, {} threads, {} KiB".format(name, *map(_size, now.values())))
            if now["rss_kib"] - first > RSS_GROWTH_KIB:
                raise SoakError(f"host {name} grew from {first} to {now['rss_kib']} KiB")
        keys = self.etcd.keys(f"/shiftverbs/{JOB}/")
        if len(keys) > len(self._keys):
            raise SoakError(f"etcd held {self._keys}, now {keys}")

    def _leave(self, name: str) -> None:
        """A host's process ends by itself."""
        child = self.hosts[name].child
        assert child.process.stdin is not None
        child.process.stdin.close()
        status = child.wait(DEADLINE_S)
        if status:
            raise SoakError(f"host {name} ended with status {status}")

    def _end(self) -> None:
        """The processes end by themselves, their brokers with them, and etcd is empty."""
        for name in self.hosts:
            self._leave(name)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            left = [*self.etcd.keys(f"/shiftverbs/{JOB}/"), *self.brokers("a"), *self.brokers("b")]
            if not left:
                return
            if time.monotonic() > deadline:
                raise SoakError(f"left behind in etcd or running: {left}")
            time.sleep(POLL_S)


def _gone(qp: tuple[str | None, str, str, str, int]) -> bool:
    """Whether failover gave up. Who only serves memory sees no completion: its QP's status tells."""
    return qp[0] is not None or qp[1] in ("FAILED", "UNPROTECTED")


def _size(value: Any) -> int:
    return value if isinstance(value, int) else len(value)


def _more(now: list[str], began: list[str]) -> list[str]:
    """What is in now and was not in began, as multisets."""
    rest = list(began)
    extra = []
    for item in now:
        if item in rest:
            rest.remove(item)
        else:
            extra.append(item)
    return extra
