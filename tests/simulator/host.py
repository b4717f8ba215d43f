# SPDX-License-Identifier: BSD-3-Clause
"""One simulated process: the production `Runtime` on virtual NICs, and QPs and MRs as a program has them.

`OwnMr`, and `Endpoint` in endpoint.py, do what mr.py and qp.py do around the verbs: they call the same production
objects at the same places. They decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulator.border import Verbs, VirtualExchanger, VirtualMachine
from simulator.clock import MS, US
from simulator.memory import WORD, Memory
from simulator.rnic import Nic

from shiftverbs import _core
from shiftverbs.config import Config
from shiftverbs.failover.runtime import Domain, Runtime
from shiftverbs.native.ibv import ReregMrFlag
from shiftverbs.shadows.cq import ShadowCQ
from shiftverbs.shadows.mr import ShadowMR
from shiftverbs.shadows.pd import ShadowPD

if TYPE_CHECKING:
    from simulator.endpoint import Endpoint
    from simulator.network import Network

ALL_RIGHTS = 15
# The control thread waits so long for the application to do its work (runtime.GRACE_US).
GRACE_NS = 300 * US


class Device:
    """A NIC that a program has opened, with a PD. name: "a" or "b", of the host that its rails go to.

    hardware: it, and those that back it up; memory: the program's for what goes there.
    """

    def __init__(self, host: Host, name: str, hardware: list[Nic], memory: Memory) -> None:
        self.host = host
        self.name = name
        self.hardware = hardware
        self.memory = memory
        verbs = host.verbs
        device = hardware[0].name
        if host.plain:
            self.keymap = _core.KeyMap(None)
        else:
            runtime = host.runtime
            nic, backups = runtime.nics.for_device(device, {device: [other.name for other in hardware[1:]]})
            self.domain = Domain(runtime, nic, backups, None)  # type: ignore[arg-type]
            self.keymap = self.domain.keymap
            for each in (nic, *backups):
                runtime.driver.nic_events.watch_nic(each)
        self.ctx = verbs.open_device(device)
        self.pd = verbs.alloc_pd(self.ctx)
        if not host.plain:
            self.shadow_pd = ShadowPD(self.domain, self.pd)


class Cq:
    """A CQ of the application's. apps: those whose QPs complete there, by the number of their QP."""

    def __init__(self, device: Device, depth: int) -> None:
        self.device = device
        self.apps: dict[int, Any] = {}
        with device.host:
            self.pointer, _ = device.host.verbs.create_cq(device.ctx, depth)
            self.core = _core.CQCore(self.pointer, None)
            self.shadow: Any = None
            if not device.host.plain:
                self.shadow = ShadowCQ(device.domain, self.pointer, self.core, depth, None, 0)


class Host:
    """One process. devices: what it opens, by name, with the NICs and the memory of each.

    plain: without failover, as with pyverbs; invariants: the protocol's are looked at; straggler: what is done about
    slow paths.
    """

    def __init__(
        self,
        net: Network,
        devices: dict[str, tuple[list[Nic], Memory]],
        plain: bool,
        invariants: bool,
        peer_deadline_ms: int,
        straggler: str,
    ) -> None:
        self.net = net
        self.hardware = [nic for nics, _ in devices.values() for nic in nics]
        self.plain = plain
        self.attention = 0
        self.events: list[Any] = []
        self.events_lost = False
        self.samples: list[Any] = []
        self.run_inline: Callable[[], object] | None = None
        self.watched: set[int] = set()
        self.thread = 1
        self.lag_ns = 2 * US
        self.grace_ns = GRACE_NS
        self.frozen_until_ns = 0
        self.gone = False  # nothing of it runs any more
        self.reading_ns = 0  # what a datagram costs
        self.exchanger: VirtualExchanger
        self.endpoints: list[Endpoint] = []
        self._run_at: int | None = None
        self._deadline: int | None = None
        self._before: list[Host | None] = []
        self.verbs = Verbs(self)
        self.booting = True
        with self:
            if not plain:
                self.machine = VirtualMachine(self)
                self.runtime = Runtime(
                    Config(invariants=invariants, peer_deadline_ms=peer_deadline_ms, straggler=straggler),
                    self.machine,
                )
            self.devices = {name: Device(self, name, *has) for name, has in devices.items()}
        self.booting = False

    def nic(self, name: str) -> Nic:
        """The hardware of that name."""
        return next(nic for nic in self.hardware if nic.name == name)

    # ---- which process runs -----------------------------------------------------------------------------------------

    def __enter__(self) -> Host:
        net = self.net
        before = net.running
        self._before.append(before)
        if before is not self:
            if before is not None:
                before.suspend()
            net.running = self
            net.flag.value = self.attention
        return self

    def __exit__(self, *error: object) -> None:
        before = self._before.pop()
        if before is not self:
            self.suspend()
            self.net.running = before
            if before is not None:
                self.net.flag.value = before.attention
            if self.attention:
                self.notice()

    def suspend(self) -> None:
        """Another process is next: what the data path has for this one is kept."""
        self.attention = self.net.flag.value
        self.net.flag.value = 0
        self.park()

    def park(self) -> None:
        """Keep what the data path has said."""
        if not self.plain:
            self.events += _core.take_events()
            self.events_lost |= _core.events_overflowed()
            self.samples += _core.ended_samples()

    # ---- when its driver runs ---------------------------------------------------------------------------------------

    def wake(self) -> None:
        """The control thread has something to do."""
        self._run_within(self.lag_ns)

    def notice(self) -> None:
        """The attention flag is set, and nobody may run the driver inline."""
        self._run_within(self.lag_ns + self.grace_ns)

    def set_deadline(self, at_ns: int) -> None:
        """The control thread's timer; 0: none."""
        if at_ns == self._deadline and at_ns > self.net.clock.now:
            return  # it is set already
        self._deadline = at_ns or None
        if at_ns:
            self.net.clock.later(max(0, at_ns - self.net.clock.now) + self.lag_ns, self._due, at_ns)

    def _due(self, at_ns: int) -> None:
        if self._deadline == at_ns:
            self._deadline = None
            self._run_within(0)

    def _run_within(self, ns: int) -> None:
        if self.booting or self.plain:
            return
        at = self.net.clock.now + ns
        if self._run_at is None or at < self._run_at:
            self._run_at = at
            self.net.clock.later(ns, self._run, at)

    def _run(self, at: int) -> None:
        if at != self._run_at or self.gone:
            return
        self._run_at = None
        late = self.frozen_until_ns - self.net.clock.now
        if late > 0:
            self._run_within(late)
            return
        with self:
            self.runtime.driver.run()
        for endpoint in self.endpoints:
            if not endpoint.closed and endpoint.buffered:
                endpoint.look()

    def look(self) -> None:
        """A NIC has written a completion."""
        for endpoint in self.endpoints:
            endpoint.look()

    # ---- waits of the application's thread --------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Let time pass in the middle of a verb, for everybody but this application."""
        net = self.net
        if done():
            return True
        net.deliver()
        until = net.clock.now + (math.ceil(timeout_s * 1e9) if timeout_s is not None else 600_000 * MS)
        assert net.running is self
        self.suspend()
        net.running = None
        blocked = [endpoint for endpoint in self.endpoints if not endpoint.blocked]
        for endpoint in blocked:
            endpoint.blocked = True
        try:
            return net.clock.run(until, done, each=1)
        finally:
            for endpoint in blocked:
                endpoint.blocked = False
            net.running = self
            net.flag.value = self.attention


class OwnMr:
    """An MR of the application's."""

    def __init__(
        self, device: Device, address: int, words: int, access: int, iova: int | None = None
    ) -> None:
        host = self.host = device.host
        self.device = device
        self.words = words
        iova = address if iova is None else iova
        self.region = (address, words * WORD, iova, access)
        with host:
            self.handle, self.lkey, self.rkey = host.verbs.reg_mr(device.pd, *self.region)
            self.shadow = None
            if not host.plain:
                self.shadow = ShadowMR(device.shadow_pd, self.handle, self.region, self.lkey, self.rkey)
                host.runtime.await_peers(self.shadow)
        self.closed = False

    def rereg(self, takes_s: float) -> None:
        """ibv_rereg_mr, as mr.py has it: other rights, and in the end the same again. It takes so long."""
        assert self.shadow is not None
        host, old = self.host, self.shadow
        address, length, iova, access = self.region
        flags = int(ReregMrFlag.CHANGE_ACCESS)
        with host:
            former = old.hand_over()
            try:
                host.wait(lambda: False, takes_s)
                host.verbs.rereg_mr(self.handle, flags, self.device.pd, address, length, access)
                self.shadow = ShadowMR(
                    self.device.shadow_pd,
                    self.handle,
                    self.region,
                    self.lkey,
                    self.rkey,
                    "",
                    former,
                    flags,
                    old,
                )
                host.runtime.await_peers(self.shadow)
            finally:
                old.handed_over()
            old.wait()

    def close(self) -> None:
        """ibv_dereg_mr, as mr.py has it: the backups' registrations go first."""
        if self.closed:
            return
        self.closed = True
        with self.host:
            if self.shadow is not None:
                self.shadow.close()
            self.host.verbs.dereg_mr(self.handle)
