# SPDX-License-Identifier: BSD-3-Clause
"""What those below ask of those above them: of the driver, and of the connection that they are a part of.

The driver knows the connections and a connection its parts, but not the other way round: what a part asks is written
down here, and in its own file where it alone asks it. `Driver` and `Connection` fit that; nothing asks at run time
whether they do. Everything here is called under the driver's lock, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVarTuple

from msgspec import Struct

if TYPE_CHECKING:
    from shiftverbs._core import QPCore
    from shiftverbs._nic import ModifySteps
    from shiftverbs.config import Config
    from shiftverbs.exchanger.records import QpRecord
    from shiftverbs.failover.services.admission import Turns
    from shiftverbs.failover.services.control_channel import ControlChannel, Path
    from shiftverbs.failover.services.cq_polling import Looks
    from shiftverbs.failover.services.directory import Directory
    from shiftverbs.failover.services.machine import Machine
    from shiftverbs.failover.services.memory_keys import KeyBook
    from shiftverbs.failover.services.totals import Totals
    from shiftverbs.process.log_lines import Announcements
    from shiftverbs.protocol import events as ev
    from shiftverbs.protocol.events import Status
    from shiftverbs.protocol.messages import Keys, Message, Sync, WantKeys
    from shiftverbs.protocol.pair import PairProtocol, ProtocolConfig
    from shiftverbs.shadows.nic import Nic
    from shiftverbs.shadows.qp import ShadowQP


# What is called later, and is given then.
Args = TypeVarTuple("Args")
# The same where it is kept: only whoever keeps it knows that the two belong together.
AnyCall = Callable[..., None]  # type: ignore[explicit-any]


class LocalPort(Struct, frozen=True):
    """Where one of our QPs is reached: port number, GID index, GID (16 bytes), active MTU (enum ibv_mtu), LID."""

    port: int
    gid_index: int
    gid: bytes
    mtu: int
    lid: int


class Ports(Protocol):
    """Which ports are down."""

    def port_ok(self, nic: Nic, port: int) -> bool:
        """Whether that port of `nic` is active, as far as events told; False where the NIC is dead."""


class HostedQp(Protocol):
    """What the driver asks of a connection: to hear its messages, and to be called when its time has come.

    timer_ns: when `on_time` is due, or None; superseded: messages of its peer that a newer one took the place of.
    """

    timer_ns: int | None
    superseded: int

    @property
    def shadow(self) -> ShadowQP:
        """The QP's ShadowQP."""

    @property
    def closed(self) -> bool:
        """Whether the QP is gone, or going: nothing is done to it any more."""

    @property
    def protocol(self) -> PairProtocol | None:
        """The protocol with its peer; None before it is paired."""

    @property
    def peer(self) -> QpRecord | None:
        """The peer's entry; None before it is paired."""

    @property
    def paths(self) -> list[Path]:
        """The control paths to the peer, by pair."""

    def nic(self, k: int) -> Nic:
        """Our handle on the NIC of pair k."""

    def on_time(self, now_ns: int) -> None:
        """What was scheduled is due."""

    def handle_message(self, message: Message | WantKeys | Keys) -> None:
        """A control message from its peer."""

    def give_up(self, reason: str) -> None:
        """Something of ours failed: the QP is a plain one again."""


class Measures(Protocol):
    """Who measures how long sends take."""

    def joined(self, connection: MeasuredQp) -> None:
        """A connection is protected from now on."""


class Host(Protocol):
    """What connections ask of the process that they are in: the clock, the NICs, the other connections, the peers."""

    @property
    def config(self) -> Config:
        """What the user configured."""

    @property
    def protocol_config(self) -> ProtocolConfig:
        """The deadlines and intervals of every PairProtocol."""

    @property
    def machine(self) -> Machine:
        """What all this stands on."""

    @property
    def is_in(self) -> Callable[[], bool]:
        """Tells whether the calling thread has the driver's lock."""

    @property
    def instance(self) -> str:
        """This process's id, 16 hex digits."""

    @property
    def by_life(self) -> dict[int, HostedQp]:
        """Who is meant by a message: the connections that were published, by the life of their QP."""

    @property
    def channel(self) -> ControlChannel:
        """Our control ports, and the paths to peers."""

    @property
    def directory(self) -> Directory:
        """Our side of the exchanger."""

    @property
    def keys(self) -> KeyBook:
        """All keys of this process."""

    @property
    def nic_events(self) -> Ports:
        """What is known of ports."""

    @property
    def turns(self) -> Turns[HostedQp]:
        """Who may begin what is not urgent."""

    @property
    def looks(self) -> Looks:
        """Which CQs are looked at."""

    @property
    def measures(self) -> Measures | None:
        """Who measures how long sends take; None where nobody does."""

    @property
    def announcements(self) -> Announcements:
        """Log lines, one for many QPs."""

    @property
    def totals(self) -> Totals:
        """Counts that outlive QPs."""

    @property
    def now_ns(self) -> Callable[[], int]:
        """The clock: CLOCK_MONOTONIC in nanoseconds."""

    def wc_name(self, status: int) -> str:
        """Name of an enum ibv_wc_status, without its prefix."""

    def run(self) -> None:
        """Handle what is there, without the lock; returns at once where another thread is at it."""

    def locked(self, quietly: bool = False) -> AbstractContextManager[None]:
        """The driver's lock, for threads of the application; quietly: what handlers raise meanwhile is raised later."""

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run under the lock, soon; from any thread."""

    def later(self, connection: HostedQp | None, call: Callable[[*Args], None], *args: *Args) -> None:
        """Put at the end of what is to be handled."""

    def schedule(self, connection: HostedQp, due_ns: int) -> None:
        """Call `connection.on_time` at due_ns; an earlier appointment stands."""

    def command(
        self, connection: HostedQp, k: int, steps: ModifySteps, done: Callable[[int, int], None]
    ) -> None:
        """Have pair k's NIC carry out steps on its QP; done(errno, step) is called, unless the pairing is over then."""

    def safely(self, connection: HostedQp, call: Callable[[*Args], None], *args: *Args) -> None:
        """Call into one connection; what it raises costs that QP its protection, and nobody else anything."""

    def hurry(self, now_ns: int) -> None:
        """A SWITCH begins: what it does not need waits a moment."""

    def aside(self, call: Callable[[], object]) -> None:
        """Have `call` run in its turn: at once, or when nothing is in a hurry."""

    def drop_backlog(self, connection: HostedQp) -> None:
        """What has come for this connection, and is not handled yet, was about a life of its QP that is over."""

    def life_ended(self, life: int, bye: Sync) -> None:
        """A QP of ours has said `bye`, and is forgotten: whoever did not hear it is told the same."""


class PathEvidence(Protocol):
    """What is seen of a connection's paths."""

    def path_failed(self, k: int, reason: str, t_ns: int, advisory: bool = False) -> None:
        """Evidence, or a hint, that pair k is broken. t_ns: when it was seen."""

    def path_changed(self, path: Path) -> None:
        """Health of one of its paths."""

    def nic_dead(self, nic: Nic, t_ns: int) -> None:
        """DEVICE_FATAL on `nic`."""


class ProtectedQp(HostedQp, Protocol):
    """What the parts of a connection ask of it, and of the process behind it."""

    @property
    def driver(self) -> Host:
        """The process behind it."""

    @property
    def core(self) -> QPCore:
        """Its part in the data path."""

    @property
    def evidence(self) -> PathEvidence:
        """What is seen of its paths."""

    @property
    def status(self) -> Status:
        """As `qp.shift` shows it."""

    @property
    def why(self) -> str | None:
        """Why it is not protected, as `qp.shift` shows it."""

    @property
    def n_pairs(self) -> int:
        """How many pairs both sides have; 1 before it is paired."""

    @property
    def send_pair(self) -> int:
        """The pair that carries sends."""

    @property
    def recv_pair(self) -> int:
        """The pair that carries receives."""

    def device(self, k: int) -> str:
        """Name of the device of pair k."""

    def port(self, k: int) -> int:
        """The port number that our QP of pair k was last connected on."""

    def local_port(self, k: int) -> LocalPort:
        """Where our QP of pair k is reached, as its NIC was when last looked at. Raises OSError."""

    def drain(self, k: int) -> None:
        """Take what pair k's CQs hold; the application gets its part at its next poll."""

    def feed(self, event: ev.Event) -> None:
        """Give one event to the protocol and carry out what it says."""

    def wake_up(self) -> None:
        """Something is due earlier than before."""

    def set_why(self, why: str) -> None:
        """Say what pairing waits for."""

    def set_status(self, status: Status, why: str | None, what: str = "") -> None:
        """Change what `qp.shift` shows. what: for the log, what is so where status is FAILED."""


class MeasuredQp(ProtectedQp, Protocol):
    """A connection whose sends are measured, and which may be moved."""

    @property
    def preferred(self) -> int:
        """The pair that traffic should be on while all is well."""
