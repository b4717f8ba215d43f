# SPDX-License-Identifier: BSD-3-Clause
"""NICs, connections, ports and peers that only remember what they were told."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

from pyverbs.pyverbs_error import PyverbsRDMAError
from typed_doubles import Double, double

from shiftverbs import _core, _nic
from shiftverbs.exchanger.records import ControlEndpoint, QpRecord
from shiftverbs.failover.driver import Driver
from shiftverbs.failover.qp.connection import Connection as RealConnection
from shiftverbs.failover.qp.evidence import Evidence
from shiftverbs.failover.qp.watchdog import WATCH_PERIOD_NS, Watchdog
from shiftverbs.failover.runtime import Domain
from shiftverbs.failover.services.control_channel import ControlChannel
from shiftverbs.protocol import codec
from shiftverbs.protocol.codec import Entry
from shiftverbs.protocol.pair import PairProtocol
from shiftverbs.protocol.seal import Seals
from shiftverbs.shadows.nic import Nic
from shiftverbs.shadows.qp import ShadowQP

GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"
PEER_SECRET = "5e" * 16  # of the control port of a peer


class Worker(Double, real=_nic.NicWorker, own=("jobs", "submitted", "finished", "under_way", "work")):
    """A NIC's thread that does what it is told when `work` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Any] = []
        self.submitted: list[Any] = []
        self.finished: list[tuple[Any, int, int, int]] = []
        self.under_way = 0

    def call(self, fn: Any, *args: Any) -> None:
        self.jobs.append((fn, args))

    def work(self) -> None:
        jobs, self.jobs = self.jobs, []
        for fn, args in jobs:
            fn(*args)

    def submit(self, tag: Any, qp: int, steps: Any) -> None:
        self.submitted.append(tag)

    def pending(self, qp: int) -> int:
        return self.under_way

    def results(self) -> list[tuple[Any, int, int, int]]:
        found, self.finished = self.finished, []
        return found


def make_nic(name: str = "nic0") -> Any:
    return double(
        Nic, name=name, ctx=1, port=1, gid_index=0, dead=False, uses_grh=True, worker=Worker(),
        registrar=Worker(), is_registering=lambda: False,
        look_again=lambda then=None: None, verbs=_nic,
    )  # fmt: skip


class Connection(Double, real=RealConnection, own=("bug", "told", "nic_", "port_", "hears", "path_failed")):
    """Remembers what it was told; raises where `bug` is set."""

    def __init__(self, nic: Any, bug: bool = False, port: int = 1) -> None:
        super().__init__()
        self.shadow = double(ShadowQP, qp_num=1, handle=lambda k: 1)
        self.protocol: Any = double(PairProtocol)
        self.closed = False
        self.n_pairs = 1
        self.paths: list[Any] = []
        self.superseded = 0
        self.bug = bug
        self.why = None
        self.told: list[str] = []
        self.nic_ = nic
        self.port_ = port
        self.evidence = double(
            Evidence,
            path_failed=lambda *args: self.path_failed(*args),
            nic_dead=lambda *args: self.hears("nic_dead"),
            path_changed=lambda path: self.hears("path_changed"),
        )
        self.watchdog = double(
            Watchdog,
            watch=lambda now_ns: self.hears("watch"),
            pings_ns=None,
            again_ns=WATCH_PERIOD_NS,
            is_old=False,
        )

    def path_failed(self, *args: Any) -> None:
        self.hears("path_failed")

    def port(self, k: int) -> int:
        return self.port_

    def nic(self, k: int) -> Any:
        return self.nic_

    def hears(self, name: str) -> None:
        self.told.append(name)
        if self.bug and name != "give_up":
            raise RuntimeError("a bug")

    def __getattr__(self, name: str) -> Any:
        """What the real one has as a method, and is not given here, is told."""
        if not callable(getattr(RealConnection, name, None)):
            raise AttributeError(f"{name} was not given to this Connection")
        return self._checked(name, lambda *args, **kwargs: self.hears(name))


def add(driver: Driver, connection: Connection) -> Connection:
    driver.connections[connection] = connection  # type: ignore[assignment]
    return connection


class Queue(Double, real=_core.CQCore, own=("looks", "dead", "holds")):
    """A CQCore: counts the looks at it."""

    def __init__(self, dead: bool = False) -> None:
        super().__init__()
        self.looks: list[int] = []
        self.dead = dead
        self.holds: list[int] = []

    def drain(self, k: int) -> int:
        self.looks.append(k)
        if self.dead:
            raise PyverbsRDMAError("Failed to poll CQ", errno.EIO)
        return self.holds.pop() if self.holds else 0


class Peer:
    """The process at the other end of our control ports: what it says, and what it makes of what we say."""

    def __init__(self, driver: Driver, nic: Any, secret: str = PEER_SECRET) -> None:
        self.seals = Seals(bytes.fromhex(secret), driver.channel.secret(nic))

    def says(self, *entries: Entry) -> list[Any]:
        """What arrives at our port."""
        return arrived(*codec.encode(entries, self.seals, 4096))

    def hears(self, *datagrams: bytes) -> list[Entry]:
        """What we said."""
        return [entry for data in datagrams for entry in codec.decode(data, self.seals)]


def arrived(*datagrams: bytes) -> list[Any]:
    """Datagrams as a port gives them."""
    return [(data, 7, bytes.fromhex(GID.replace(":", ""))) for data in datagrams]


def heard_of(driver: Driver, nic: Any) -> tuple[Any, list[Any], Callable[..., None]]:
    """A connection (its life is 11) with a peer (22): it, what it hears, and arrive(sender, *messages)."""
    port = with_port(driver.channel, nic)
    path = driver.channel.open_path(
        nic, ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), lambda path: None
    )
    nic.worker.work()
    driver.run()
    heard: list[Any] = []
    one: Any = add(driver, Connection(nic))
    one.peer = peer_of(22)
    one.paths = [path]
    one.handle_message = heard.append
    driver.by_life[11] = one
    peer = Peer(driver, nic)

    def arrive(sender: int, *messages: Any) -> None:
        port.inbox = peer.says(*(Entry(11, sender, message) for message in messages))

    return one, heard, arrive


class Port(Double, real=_nic.ControlPort, own=("ah", "inbox", "gone")):
    """A control port: `ah` is what the next create_ah gives, 0 an error; sent: what it was given, in order."""

    state, max_message, fd, qpn, qkey = "ready", 4096, 5, 7, 9

    def __init__(self) -> None:
        super().__init__()
        self.ah = 1
        self.sent: list[bytes] = []
        self.inbox: list[Any] = []
        self.gone: list[int] = []
        self.more = False

    def create_ah(self, **attrs: Any) -> int:
        if not self.ah:
            raise OSError(errno.ETIMEDOUT, "no neighbour")
        return self.ah

    def destroy_ah(self, ah: int) -> None:
        self.gone.append(ah)

    def send(self, ah: int, qpn: int, qkey: int, message: bytes) -> bool:
        self.sent.append(message)
        return True

    def recv(self, most: int) -> list[Any]:
        found, self.inbox = self.inbox[:most], self.inbox[most:]
        self.more = bool(self.inbox)
        return found


def with_port(channel: ControlChannel, nic: Any) -> Port:
    port = channel._ports[nic.name] = Port()
    return port


def peer_of(life: int) -> Any:
    """A peer's entry, of which only the life of its QP matters."""
    return double(QpRecord, life=f"{life:016x}")


def shadow_qp(nic: Any, **attributes: Any) -> Any:
    """A ShadowQP of a QP on nic, which has no backups."""
    attributes.setdefault("disposed", False)
    return double(ShadowQP, qp_num=1, domain=double(Domain, nic=nic, backups=[]), **attributes)


def as_the_collector(driver: Driver) -> Any:
    """What a finalizer that closes a QP does, wherever its thread is: takes the driver's lock. And if it began."""
    began = threading.Event()

    def collect() -> None:
        began.set()
        with driver.locked():
            pass

    return collect, began


def ends(call: Any) -> bool:
    """Whether a call returns in another thread."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()
