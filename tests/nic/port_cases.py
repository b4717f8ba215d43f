# SPDX-License-Identifier: BSD-3-Clause
"""Cases of ControlPort, on the software RNIC (host "a")."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import select
import threading
import weakref
from collections.abc import Callable
from typing import Any

from fakes import fds, in_child, library, modify_qp, until

from shiftverbs import _nic
from shiftverbs.softrnic import faults

ERR = 6


class Bench:
    """An open device with one control port that can talk to itself."""

    def __init__(self, device: str = "soft0", depth: int = 64) -> None:
        self.ctx = _nic.open_device(device)
        self.gid = _nic.query_gid(self.ctx, 1, 0)
        self.port = _nic.ControlPort(self.ctx, 1, 0, depth=depth)
        self.ah = self.port.create_ah(dgid=self.gid)

    def to_self(self, message: bytes) -> bool:
        """Send a datagram to the own port."""
        return self.port.send(self.ah, self.port.qpn, self.port.qkey, message)

    def take(self, n: int) -> list[tuple[bytes, int, bytes | None]]:
        """Receive n datagrams, asleep on the descriptor in between, as the control thread does."""
        return take(self.port, n)


def take(port: _nic.ControlPort, n: int) -> list[tuple[bytes, int, bytes | None]]:
    """Receive n datagrams."""
    messages = port.recv()
    while len(messages) < n:
        assert select.select([port.fd], [], [], 30)[0], f"only {len(messages)} of {n} messages"
        port.rearm()
        messages += port.recv()
    return messages


def raises(kind: type[BaseException], action: Callable[[], Any]) -> BaseException:
    """The action raises this."""
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def case_messages_come_as_they_were_sent() -> None:
    bench = Bench()
    port = bench.port
    assert port.state == "ready" and port.max_message == _nic.CONTROL_MESSAGE_BYTES == 1024
    assert 0 < port.qkey < 1 << 31 and port.qpn > 1
    rng = random.Random(11)
    for length in (0, 1, 40, 255, 1023, 1024):
        message = rng.randbytes(length)
        assert bench.to_self(message)
        assert bench.take(1) == [(message, port.qpn, bench.gid)]
    raises(ValueError, lambda: bench.to_self(b"x" * 1025))
    raises(TypeError, lambda: bench.to_self("text"))  # type: ignore[arg-type]
    raises(TypeError, lambda: bench.to_self(None))  # type: ignore[arg-type]
    assert port.recv() == [] and port.state == "ready"
    assert (port.sent, port.received, port.dropped, port.malformed) == (6, 6, 0, 0)
    port.close()
    _nic.close_device(bench.ctx)


def case_more_messages_than_buffers() -> None:
    """Buffers and slots are used again and again; what finds none is lost, and nothing else is."""
    bench = Bench(depth=8)
    for number in range(100):
        assert bench.to_self(b"%d" % number)
        assert bench.take(1)[0][0] == b"%d" % number
    sender = _nic.ControlPort(bench.ctx, 1, 0, depth=64)
    ah = sender.create_ah(dgid=bench.gid)
    for number in range(50):
        while not sender.send(ah, bench.port.qpn, bench.port.qkey, b"%d" % number):
            pass  # its queue is full
    got = bench.take(8)
    assert [m[0] for m in got[:8]] == [b"%d" % n for n in range(8)]
    assert bench.port.state == "ready" and sender.state == "ready"
    # What is still on its way may take the buffers before this does.
    until(lambda: bench.to_self(b"still works") and b"still works" in [m[0] for m in bench.port.recv()])
    numbers = [int(m[0]) for m in got]
    assert numbers == sorted(set(numbers))


def case_full_send_queue_drops_and_counts() -> None:
    bench = Bench(depth=4)
    library.fake_poll(bench.ctx, 1)  # the NIC completes nothing
    assert [bench.to_self(b"m") for _ in range(6)] == [True] * 4 + [False] * 2
    assert (bench.port.sent, bench.port.dropped) == (4, 2)
    assert bench.port.recv() == [] and bench.port.state == "ready"
    library.fake_poll(bench.ctx, 0)
    assert len(bench.take(4)) == 4
    assert until(lambda: bench.to_self(b"again"))
    assert bench.take(1)[0][0] == b"again"


def case_post_that_fails() -> None:
    bench = Bench()
    library.fake_post_send(bench.ctx, errno.ENOMEM)
    assert not bench.to_self(b"m")
    assert bench.port.state == "ready" and bench.port.dropped == 1 and bench.port.send_errors == 0
    library.fake_post_send(bench.ctx, errno.EIO)
    assert not bench.to_self(b"m")
    assert bench.port.state == "error" and bench.port.send_errors == 1
    library.fake_post_send(bench.ctx, 0)
    assert not bench.to_self(b"m"), "a broken port takes nothing until it is made again"
    bench.port.revive()
    assert bench.port.state == "ready" and bench.port.revived == 1
    assert bench.to_self(b"m") and bench.take(1)[0][0] == b"m"


def case_lengths_that_cannot_be_are_counted() -> None:
    bench = Bench()
    for byte_len, good in (
        (0, False),
        (39, False),
        (40, True),
        (1065, False),
        (2**31 - 1, False),
        (1064, True),
    ):
        library.fake_byte_len(bench.ctx, byte_len)
        before = bench.port.malformed
        assert bench.to_self(b"abc")
        got: list[Any] = []
        until(
            lambda got=got, before=before: (
                got.extend(bench.port.recv())
                or got  # type: ignore[misc, func-returns-value]
                or bench.port.malformed > before
            )
        )
        assert (len(got) == 1) == good and (bench.port.malformed == before) == good
        if good:
            assert len(got[0][0]) == byte_len - 40
    assert bench.port.malformed == 4 and bench.port.state == "ready"
    library.fake_byte_len(bench.ctx, -1)
    for _ in range(100):  # the buffers went back
        assert until(lambda: bench.to_self(b"fine"))
        assert bench.take(1)[0][0] == b"fine"


def case_poll_that_fails() -> None:
    bench = Bench()
    library.fake_poll(bench.ctx, 2)
    assert bench.port.recv() == []
    assert bench.port.state == "error" and bench.port.recv_errors == 1
    assert not bench.to_self(b"m")
    library.fake_poll(bench.ctx, 0)
    bench.port.revive()
    assert bench.to_self(b"m") and bench.take(1)[0][0] == b"m"


def case_wrong_qkey_and_foreign_handles() -> None:
    bench = Bench()
    assert bench.port.send(bench.ah, bench.port.qpn, bench.port.qkey ^ 1, b"secret")
    assert bench.to_self(b"marker")
    assert [m[0] for m in bench.take(1)] == [b"marker"]
    other = _nic.ControlPort(bench.ctx, 1, 0)
    assert other.qkey != bench.port.qkey and other.qpn != bench.port.qpn
    theirs = other.create_ah(dgid=bench.gid)
    for ah in (0, theirs, 12345):
        raises(ValueError, lambda ah=ah: bench.port.send(ah, 1, 1, b""))  # type: ignore[misc]
    bench.port.destroy_ah(theirs)  # not ours: ignored
    assert other.send(theirs, bench.port.qpn, bench.port.qkey, b"hi")
    assert bench.take(1)[0][:2] == (b"hi", other.qpn)
    bench.port.destroy_ah(bench.ah)
    bench.port.destroy_ah(bench.ah)
    raises(ValueError, lambda: bench.to_self(b"gone"))
    raises(ValueError, lambda: bench.port.create_ah(dgid=b"short"))
    raises(TypeError, lambda: bench.port.create_ah(sgid=bench.gid))


def case_broken_qp_is_made_again() -> None:
    bench = Bench(depth=8)
    port = bench.port
    identity = (port.qpn, port.qkey, port.fd)
    assert bench.to_self(b"before") and bench.take(1)
    modify_qp(port.qp, _nic.ModifySteps().add(state=ERR))
    until(lambda: port.recv() == [] and port.recv_errors == 8)  # all buffers are flushed
    assert port.state == "error"
    assert not bench.to_self(b"m") and port.recv() == []
    port.rearm()
    for round_ in range(3):
        port.revive()
        assert port.state == "ready" and (port.qpn, port.qkey, port.fd) == identity
        for number in range(20):
            assert until(lambda: bench.to_self(b"again"))
            assert bench.take(1) == [(b"again", port.qpn, bench.gid)], (round_, number)
    assert port.revived == 3


def case_revive_does_not_let_others_in() -> None:
    bench = Bench()
    library.fake_hold_ah(0)
    worker = _nic.NicWorker("soft0")
    # Many revivals in the NIC's thread, while this one sends and receives all the time.
    jobs = [worker.call(bench.port.revive) for _ in range(100)]
    while not jobs[-1].done():
        bench.to_self(b"x")
        bench.port.recv()
        bench.port.rearm()
        assert bench.port.state in ("ready", "busy", "error")
    assert all(job.failure is None for job in jobs)
    assert bench.port.revived == 100
    if bench.port.state != "ready":
        bench.port.revive()
    bench.port.recv()
    assert until(lambda: bench.to_self(b"end"))
    while b"end" not in [m[0] for m in bench.take(1)]:
        pass
    assert worker.stop()


def case_dead_device() -> None:
    bench = Bench()
    faults.kill("a/soft0")
    until(lambda: not bench.to_self(b"m") or bench.port.recv() or bench.port.state == "error")
    raises(OSError, bench.port.revive)
    assert bench.port.state == "error"
    assert bench.port.recv() == [] and not bench.to_self(b"m")
    bench.port.rearm()
    try:
        bench.port.close()
    except OSError as error:
        print("close said", error)
    assert bench.port.state == "closed"
    raises(OSError, lambda: _nic.ControlPort(bench.ctx, 1, 0))


def case_waiter_sees_messages() -> None:
    bench = Bench()
    flag = ctypes.c_int(0)
    waiter = _nic.Waiter(ctypes.addressof(flag))
    waiter.add(bench.port.fd)
    for number in range(5):
        assert bench.to_self(b"%d" % number)
        assert waiter.wait(timeout_ms=30_000, grace_us=0) == [bench.port.fd]
        assert flag.value == 1
        flag.value = 0
        bench.port.rearm()
        got = bench.port.recv()
        while not got:
            waiter.wait(timeout_ms=30_000, grace_us=0)
            bench.port.rearm()
            got = bench.port.recv()
        assert got[0][0] == b"%d" % number
        flag.value = 0
    waiter.remove(bench.port.fd)
    bench.port.close()


def case_inline_driver_run_needs_only_recv() -> None:
    """recv() in an application thread makes the descriptor unreadable: the control thread sleeps on."""
    bench = Bench()
    flag = ctypes.c_int(0)
    waiter = _nic.Waiter(ctypes.addressof(flag))
    waiter.add(bench.port.fd)
    returned: list[list[int]] = []
    thread = threading.Thread(target=lambda: returned.append(waiter.wait(-1, 20_000_000)), daemon=True)
    thread.start()

    def readable() -> bool:
        return bool(select.select([bench.port.fd], [], [], 0)[0])

    cleared = 0

    def run() -> list[Any]:
        """What the driver does: clear the flag, then take what is there."""
        nonlocal cleared
        if flag.value:
            cleared += 1
            flag.value = 0
        return bench.port.recv()

    for number in range(20):
        assert until(lambda: bench.to_self(b"m"))
        # The waiter may still be watching the run before this one: it does not set the flag then.
        until(lambda number=number: flag.value or (number and readable()))  # type: ignore[misc]
        got: list[Any] = []
        until(lambda got=got: got.extend(run()) or got)  # type: ignore[misc, func-returns-value]
        # A completion may be there before its event: then this run asks for one more.
        while flag.value or readable():
            run()
        until(lambda: flag.value or readable() or waiter.answered_inline == cleared)
    while flag.value or readable() or waiter.answered_inline < cleared:
        run()
    assert 1 <= cleared == waiter.answered_inline
    assert returned == [] and not select.select([bench.port.fd], [], [], 0)[0]
    waiter.close()
    thread.join(30)
    assert returned == [[]]


def case_flood_is_received_in_bounded_pieces_and_to_the_end() -> None:
    """What one recv() leaves is announced by the descriptor: nothing waits for the next datagram."""
    bench = Bench(depth=16)
    sender = _nic.ControlPort(bench.ctx, 1, 0, depth=64)
    ah = sender.create_ah(dgid=bench.gid)
    arrived = 0
    for _ in range(30):
        sent = 0
        while sent < 16:
            sent += sender.send(ah, bench.port.qpn, bench.port.qkey, b"f")
        arrived += len(bench.take(16))
    assert arrived == 30 * 16 and bench.port.recv() == []


def case_a_bounded_recv_tells_what_it_left() -> None:
    """What came before the CQ was armed makes no event: who reads a part must be told that there is more."""
    bench = Bench()
    told = 0
    for count in (1, 16, 40, 64):
        for _ in range(count):
            until(lambda: bench.to_self(b"f"))
        got = 0
        while got < count:
            assert bench.port.more or select.select([bench.port.fd], [], [], 30)[0], (
                "neither told nor announced"
            )
            part = len(bench.port.recv(8))
            assert part < 8 + 16, "a batch too many at most"
            assert bench.port.more == (part >= 8)
            told += bench.port.more
            got += part
        assert got == count
        bench.port.recv(8)
        assert not bench.port.more
    assert told


def case_close_in_any_order_and_twice() -> None:
    _nic.close_device(_nic.open_device("soft0"))  # what the software RNIC keeps for ever is there now
    before = fds()
    bench = Bench()
    port = bench.port
    port.close()
    port.close()
    assert (port.state, port.fd, port.qpn, port.pd, port.qp) == ("closed", -1, 0, 0, 0)
    assert not bench.to_self(b"m") and port.recv() == [] and port.dropped == 1
    port.rearm()
    port.destroy_ah(bench.ah)
    for action in (port.revive, lambda: port.create_ah(dgid=bench.gid)):
        assert raises(OSError, action).errno == errno.ENODEV  # type: ignore[attr-defined]
    # The context goes first: it takes its ports along.
    second = _nic.ControlPort(bench.ctx, 1, 0)
    second.create_ah(dgid=bench.gid)
    _nic.close_device(bench.ctx)
    assert second.state == "closed"
    second.close()
    second = port = bench.port = None  # type: ignore[assignment]
    # Left to the collector, in a cycle.
    third = Bench()
    third.self = third  # type: ignore[attr-defined]
    gone = weakref.ref(third.port)
    ctx = third.ctx
    del third
    gc.collect()
    assert gone() is None
    _nic.close_device(ctx)
    assert fds() == before


def case_ports_come_and_go_without_traces() -> None:
    ctx = _nic.open_device("soft0")
    gid = _nic.query_gid(ctx, 1, 0)
    _nic.ControlPort(ctx, 1, 0).close()
    before = fds()

    def mapped_kb() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * 4

    mapped_before = mapped_kb()
    for number in range(60):
        port = _nic.ControlPort(ctx, 1, 0, depth=256)
        port.create_ah(dgid=gid)
        if number % 2:
            port.close()
    del port
    gc.collect()
    assert fds() == before
    assert mapped_kb() - mapped_before < 60 * 500 / 2, "half a MiB each: not all were unmapped"
    _nic.close_device(ctx)


def case_close_while_a_handle_is_being_made() -> None:
    bench = Bench()
    library.fake_hold_ah(1)
    errors: list[BaseException] = []

    def make() -> None:
        try:
            bench.port.create_ah(dgid=bench.gid)
        except OSError as error:
            errors.append(error)

    before = library.fake_ah_entered()
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    until(lambda: library.fake_ah_entered() > before)
    assert bench.port.state == "ready" and bench.to_self(b"meanwhile") and bench.take(1)
    bench.port.close()  # does not wait for it, and takes nothing away from under it
    assert bench.port.state == "closed" and not bench.to_self(b"m") and thread.is_alive()
    library.fake_hold_ah(0)
    thread.join(30)
    assert [error.errno for error in errors] == [errno.ENODEV]  # type: ignore[attr-defined]
    assert bench.port.pd == 0
    _nic.close_device(bench.ctx)


def case_arguments_are_checked() -> None:
    ctx = _nic.open_device("soft0")
    before = fds()
    for arguments in (
        (0, 1, 0),
        (ctx, 0, 0),
        (ctx, 1, -1),
        (ctx, 1, 0, 0),
        (ctx, 1, 0, 100000),
        (ctx, 1, 0, 8, -1),
    ):
        raises(ValueError, lambda a=arguments: _nic.ControlPort(*a))  # type: ignore[misc]
    error = raises(OSError, lambda: _nic.ControlPort(ctx, 9, 0))
    assert "ibv_query_port" in str(error)
    error = raises(OSError, lambda: _nic.ControlPort(ctx, 1, 0, pkey_index=999))
    assert "ibv_modify_qp" in str(error)
    assert fds() == before
    _nic.close_device(ctx)


def case_source_gid() -> None:
    gid = bytes(range(100, 116))
    ipv6 = b"\x60\0\0\0" + b"\0\x10\x1b\x40" + gid + bytes(16)
    assert len(ipv6) == 40
    assert _nic.source_gid(ipv6) == gid
    assert _nic.source_gid(bytes(40)) is None
    header = bytearray(bytes.fromhex("45000054abcd40004011") + b"\0\0" + bytes([10, 1, 2, 3, 10, 1, 2, 4]))
    total = sum(int.from_bytes(header[i : i + 2], "big") for i in range(0, 20, 2))
    total = (total & 0xFFFF) + (total >> 16)
    header[10:12] = (~total & 0xFFFF).to_bytes(2, "big")
    mapped = bytes(10) + b"\xff\xff" + bytes([10, 1, 2, 3])
    assert _nic.source_gid(bytes(20) + header) == mapped
    assert _nic.source_gid(b"\xff" * 20 + header) == mapped
    # The undefined bytes look like IPv6: the IPv4 checksum decides.
    assert _nic.source_gid(b"\x60" + bytes(19) + header) == mapped
    header[10] ^= 1
    assert _nic.source_gid(ipv6[:20] + header) == ipv6[8:20] + header[:4]
    for wrong in (b"", bytes(39), bytes(41)):
        raises(ValueError, lambda w=wrong: _nic.source_gid(w))  # type: ignore[misc]


def case_forked_child_finds_it_dead() -> None:
    bench = Bench()
    assert bench.to_self(b"before") and bench.take(1)

    def child() -> None:
        port = bench.port
        for action in (
            lambda: bench.to_self(b"m"),
            port.recv,
            port.rearm,
            port.revive,
            lambda: port.create_ah(dgid=bench.gid),
        ):
            assert "dead" in str(raises(RuntimeError, action))
        assert port.state == "closed" and port.fd == -1 and port.qpn == 0
        port.destroy_ah(bench.ah)
        port.close()
        port = bench.port = None  # type: ignore[assignment]
        gc.collect()
        own = Bench("soft1")
        assert own.to_self(b"own") and own.take(1)[0][0] == b"own"
        own.port.close()
        _nic.close_device(own.ctx)

    in_child(child)
    for number in range(100):
        assert until(lambda: bench.to_self(b"after"))
        assert bench.take(1)[0][0] == b"after", number


def case_exit_without_close() -> None:
    bench = Bench()
    assert bench.to_self(b"unread")
    bench.self = bench  # type: ignore[attr-defined]
    globals()["kept"] = bench


def case_exit_with_a_port_on_a_dead_device() -> None:
    bench = Bench()
    faults.kill("a/soft0")
    globals()["kept"] = bench


def peer_main() -> None:
    """One of two processes: says who it is, is told who the other is, and exchanges messages with it."""
    seed = int(os.environ.get("SEED", "5"))
    rng = random.Random(seed)
    bench = Bench()
    port = bench.port
    print(f"me {bench.gid.hex()} {port.qpn} {port.qkey}", flush=True)
    gid, qpn, qkey = (int(x, 16) if i == 0 else int(x) for i, x in enumerate(input().split()))
    peer = gid.to_bytes(16, "big")
    ah = port.create_ah(dgid=peer)
    print("ready", flush=True)
    assert input() == "go"
    messages = [b"%d " % n + rng.randbytes(rng.randrange(0, 1000)) for n in range(200)]
    expected = list(messages)
    # A window of 16 each way, so that no buffer is missing: the other side has as many messages as this one.
    sent = received = 0
    while received < len(messages) or sent < len(messages):
        while sent < len(messages) and sent - received < 16:
            if not port.send(ah, qpn, qkey, messages[sent]):
                break
            sent += 1
        for message, source_qpn, source in port.recv():
            assert message == expected[received], (seed, received)
            assert source_qpn == qpn and source == peer
            received += 1
        if received == len(messages):
            continue
        # Sends that complete wake nobody, so look again soon while there are some to post.
        ready = select.select([port.fd], [], [], 0.01 if sent < len(messages) else 30)[0]
        assert ready or sent < len(messages), (seed, sent, received)
        port.rearm()
    assert port.state == "ready"
    print(f"exchanged {received}", flush=True)
    assert input() == "end"
    port.close()
    _nic.close_device(bench.ctx)
