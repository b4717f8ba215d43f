# SPDX-License-Identifier: BSD-3-Clause
"""The broker's side towards etcd: one thread that logs in and runs batched transactions, one that keeps leases alive.

Only the broker's process imports this module: it brings gRPC and protobuf with it.

What each owner (a client of the broker) wants to stand in etcd is kept as a dict, and the thread brings etcd to
that state. So nothing special happens after a reconnect or a lost lease: everything is simply due again.

Clients share the session with etcd, and none may take it from the others. So what etcd denies is denied to that key
alone and tried again at times; where etcd takes no puts for want of space, reads, watches and deletions go on; and
leases are renewed at their own pace, however much there is to do besides.

What happened is handed to `post`, a function that may be called from any thread, as the events of link_events.py.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import etcd3
import etcd3.etcdrpc as rpc
import grpc
from msgspec import Struct

from shiftverbs.config import Config, Endpoint
from shiftverbs.exchanger.etcd_watch import WatchStream
from shiftverbs.exchanger.link_events import Denied, Down, Dropped, Got, Held, PutsTaken, Refused, Up

logger = logging.getLogger("shiftverbs.exchanger.broker")

# etcd refuses more than 128 (--max-txn-ops), counting for a guarded delete its nested transaction as well.
MAX_TXN_OPS = 120
# etcd refuses requests above 1.5 MiB.
MAX_TXN_BYTES = 1 << 20
# How many batching windows to wait when one batch of at least so many operations follows the other.
BUSY_WINDOWS = 5
BUSY_OPS = 3
STABLE_S = 5.0
# How many transactions one kind of work gets before it is the other kinds' turn.
TURN_TXNS = 8
# How many keys at a time of a client to which etcd denied keys: each may take a transaction of its own.
SUSPECT_KEYS = 8


class _Owner(Struct):
    lease: int | None = None
    desired: dict[str, str] = {}
    # Keys under which etcd may have something else than `desired`, in the order they changed: to put, to delete.
    dirty: dict[str, None] = {}
    doomed: dict[str, None] = {}
    # Keys of `desired` that etcd denies to us, the next one to try first; when, and after how many failures.
    denied: dict[str, None] = {}
    probe_at: float = 0.0
    probes: int = 0

    def lose_lease(self) -> None:
        """The lease ran out, and with it all that was stored."""
        self.lease = None
        self.doomed.clear()
        self.dirty.update((key, None) for key in self.desired if key not in self.denied)


class _Write(Struct, frozen=True):
    """One key to be put (text) or deleted (None)."""

    number: int
    owner: _Owner
    key: str
    text: str | None
    lease: int | None = None


class SessionLost(Exception):
    """The session with etcd cannot go on; the message says why."""


class EtcdLink(threading.Thread):
    """The thread that talks to etcd for all clients of a broker."""

    def __init__(self, config: Config, post: Callable[[object], None]):
        super().__init__(name="shiftverbs-etcd", daemon=True)
        self._config = config
        self._post = post
        self._wake = threading.Condition()
        self._owners: dict[int, _Owner] = {}
        # What to read; and, a few at a time, what to read of jobs of which etcd denied keys.
        self._to_get: dict[str, None] = {}
        self._to_try: dict[str, None] = {}
        self._denied_jobs: set[str] = set()
        self._dropping: list[int] = []
        # Leases of gone owners: lease id -> when it has run out by itself.
        self._to_revoke: dict[int, float] = {}
        self._spare_lease: int | None = None
        # A key that could not be read: the next session has to read it first.
        self._unread: str | None = None
        self._session = 0
        self._stub: Any = None
        self._client: Any = None
        self._attempt = 0
        self._timeout_s = config.etcd_timeout_ms / 1000
        # Why leases cannot be kept alive any more: the session is over.
        self._lost: str | None = None
        # While etcd takes no puts: when they are tried again, and which owners know why.
        self._puts_at = 0.0
        self._puts_failed = 0
        self._held: dict[int, str] = {}
        self._why_held = ""
        self._is_up = False
        self._traced: str | None = None

    # Called by the broker's main thread

    def add(self, owner: int) -> None:
        """A client came."""
        with self._wake:
            self._owners[owner] = _Owner()

    def put(self, owner: int, key: str, text: str) -> None:
        """`text` shall stand under `key` as long as `owner` lives."""
        with self._wake:
            state = self._owners[owner]
            state.desired[key] = text
            state.doomed.pop(key, None)
            if key not in state.denied:
                state.dirty[key] = None
                self._wake.notify()

    def delete(self, owner: int, key: str) -> None:
        """`owner` takes `key` back."""
        with self._wake:
            state = self._owners[owner]
            if state.desired.pop(key, None) is not None:
                state.dirty.pop(key, None)
                state.denied.pop(key, None)
                state.doomed[key] = None
                self._wake.notify()

    def get(self, keys: Iterable[str]) -> None:
        """Read `keys`; the answer comes as Got or Denied. Forgotten when the session ends."""
        with self._wake:
            for key in keys:
                (self._to_try if _job(key) in self._denied_jobs else self._to_get)[key] = None
            self._wake.notify()

    def drop(self, owner: int) -> None:
        """`owner` is gone: everything it published goes with its lease."""
        with self._wake:
            self._dropping.append(owner)
            self._wake.notify()

    # The thread

    def run(self) -> None:
        """Sessions, one after the other, for ever."""
        reasons: dict[str, str] = {}
        while True:
            endpoint = self._config.etcd[self._attempt % len(self._config.etcd)]
            began, session = time.monotonic(), self._session
            over = threading.Event()
            try:
                self._open(endpoint, over)
                self._serve()
            except Exception as error:
                reason = f"etcd at {endpoint.url}: {describe(error)}"
                if not isinstance(error, _EXPECTED):
                    self._trace(error)
            finally:
                over.set()
                self._close()
            # A session that failed soon did not prove that the next one is worth hurrying for.
            self._attempt = self._attempt + 1 if time.monotonic() - began < STABLE_S else 1
            if session != self._session:
                reasons.clear()
                self._post(Down(reason))
            else:
                # Not until all were tried, and then in one order: the same outage reads the same each time.
                reasons[endpoint.url] = reason
                if len(reasons) == len(self._config.etcd):
                    self._post(Down("; ".join(reasons[one.url] for one in self._config.etcd)))
            self._pause()

    def _trace(self, error: Exception) -> None:
        """A mistake of ours: its traceback is logged once. The session ends, and the next one may fare better."""
        if repr(error) != self._traced:
            self._traced = repr(error)
            logger.error("the link to etcd failed", exc_info=error)

    def _open(self, endpoint: Endpoint, over: threading.Event) -> None:
        config = self._config
        login = {}
        if config.etcd_user is not None and config.etcd_password_file is not None:
            # Read anew each time: passwords are changed while processes run.
            with open(config.etcd_password_file, encoding="utf-8") as file:
                login = {"user": config.etcd_user, "password": file.read().rstrip("\r\n")}
        tls = {}
        if endpoint.tls:
            tls = {"ca_cert": config.etcd_ca, "cert_cert": config.etcd_cert, "cert_key": config.etcd_key}
        self._client = etcd3.client(
            host=f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host,
            port=endpoint.port,
            timeout=self._timeout_s,
            grpc_options=[
                # Channels to the same address would share a connection and its growing back-off.
                ("grpc.use_local_subchannel_pool", 1),
                # http_proxy is meant for the web, and would catch etcd on localhost as well.
                ("grpc.enable_http_proxy", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
            ],
            **login,
            **tls,
        )
        self._stub = self._client.kvstub
        self._lost, self._puts_at, self._puts_failed, self._is_up = None, 0.0, 0, False
        self._held.clear()
        # A lease goes through the cluster's consensus: once it is granted, etcd is fit to work.
        self._renew(self._client)
        with self._wake:
            proven = self._spare_lease is not None or any(owner.lease for owner in self._owners.values())
        if not proven:
            try:
                self._spare_lease = self._grant(1)[0]
            except grpc.RpcError as error:
                if not _is_about_space(error):
                    raise
                self._hold_puts(error)
        threading.Thread(
            target=self._keep_alive, args=(self._client, over), name="shiftverbs-etcd-leases", daemon=True
        ).start()
        # A session that may not read and write (no login) is none either: it would end at once, again and again.
        self._drop_and_revoke()
        self._write()
        if self._unread is not None:
            self._read_some([self._unread], {})
            self._unread = None
        self._session += 1
        watch = WatchStream(
            rpc.WatchStub(self._client.channel), self._client.metadata, self._post, self._session
        )
        with self._wake:
            self._to_get.clear()
            self._to_try.clear()
            self._denied_jobs.clear()
        self._is_up = True
        self._post(Up(self._session, watch, dict(self._held)))

    def _close(self) -> None:
        client, self._client, self._stub = self._client, None, None
        if client is not None:
            client.close()

    def _pause(self) -> None:
        """Wait before the next endpoint: back-off once all were tried, but drop clients meanwhile."""
        config = self._config
        rounds = (self._attempt - 1) // len(config.etcd)
        pause_ms = self._back_off_s(rounds) * 1000
        if self._attempt % len(config.etcd):
            pause_ms = min(pause_ms, config.etcd_backoff_min_ms)
        # Spread over the hosts of a cluster that all lost etcd at one moment.
        until = time.monotonic() + pause_ms / 1000 * random.uniform(0.5, 1.0)
        with self._wake:
            while True:
                for number in self._dropping:
                    self._forget(number)
                    self._post(Dropped(number))
                self._dropping.clear()
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._wake.wait(left)

    def _back_off_s(self, failures: int) -> float:
        """A pause after this many failures; no lease runs out in it, nor in two."""
        config = self._config
        most_ms = min(config.etcd_backoff_max_ms, config.lease_ttl_s * 250)
        return min(config.etcd_backoff_min_ms * 2 ** min(failures, 20), most_ms) / 1000

    def _serve(self) -> None:
        window_s = self._config.broker_batch_window_us / 1e6
        busy = False
        while True:
            with self._wake:
                while not self._has_work():
                    self._wake.wait(self._next_due_s())
                pause_s = window_s * (BUSY_WINDOWS if busy else 1)
            # A program creates its QPs one after the other: a moment's wait makes one transaction of many,
            # and where they keep coming, a longer one makes fewer transactions still.
            time.sleep(pause_s)
            self._check()
            self._drop_and_revoke()
            count = self._write() + self._read()
            with self._wake:
                busy = count >= BUSY_OPS and self._wake.wait_for(self._has_work, window_s)

    def _has_work(self) -> bool:
        """Whether there is something to do now. Under the lock."""
        if self._lost is not None or self._dropping or self._to_get or self._to_try or self._to_revoke:
            return True
        now = time.monotonic()
        puts_due = now >= self._puts_at
        return any(
            one.doomed
            or (one.dirty and (puts_due or number not in self._held))
            or (one.denied and now >= one.probe_at and puts_due)
            for number, one in self._owners.items()
        )

    def _next_due_s(self) -> float | None:
        """Seconds until what failed is tried again, None when nothing is. Under the lock."""
        times = [max(one.probe_at, self._puts_at) for one in self._owners.values() if one.denied]
        if any(one.dirty for one in self._owners.values()):
            times.append(self._puts_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _check(self) -> None:
        """Give the session up when leases cannot be kept alive in it."""
        if self._lost is not None:
            raise SessionLost(self._lost)

    # Leases

    def _grant(self, count: int) -> list[int]:
        """New leases, all asked for at once."""
        stub = self._client.leasestub
        calls = [
            stub.LeaseGrant.future(
                rpc.LeaseGrantRequest(TTL=self._config.lease_ttl_s),
                self._timeout_s,
                metadata=self._client.metadata,
            )
            for _ in range(count)
        ]
        return [call.result().ID for call in calls]

    def _keep_alive(self, client: Any, over: threading.Event) -> None:
        """Renew all leases in time until `over`. A thread of its own: nothing else that is done may hold it up."""
        while not over.wait(self._config.lease_ttl_s / 3):
            try:
                self._renew(client)
            except Exception as error:
                with self._wake:
                    if not over.is_set():
                        self._lost = describe(error)
                        self._wake.notify()
                return

    def _renew(self, client: Any) -> None:
        """Keep all leases alive in one stream; where one is lost, all its keys are due again."""
        with self._wake:
            leases = {owner.lease: owner for owner in self._owners.values() if owner.lease is not None}
            spare = self._spare_lease
        ids = [*leases, *([spare] if spare is not None else [])]
        if not ids:
            return
        requests = [rpc.LeaseKeepAliveRequest(ID=lease) for lease in ids]
        call = client.leasestub.LeaseKeepAlive(iter(requests), self._timeout_s, metadata=client.metadata)
        alive = set()
        for _ in ids:
            answer = next(call, None)
            if answer is None:
                break
            if answer.TTL > 0:
                alive.add(answer.ID)
        call.cancel()
        with self._wake:
            # What was lost may have been replaced meanwhile, by the other thread.
            if spare not in alive and self._spare_lease == spare:
                self._spare_lease = None
            for lease, owner in leases.items():
                if lease not in alive and owner.lease == lease:
                    owner.lose_lease()
                    self._wake.notify()

    def _forget(self, number: int) -> None:
        owner = self._owners.pop(number, None)
        self._held.pop(number, None)
        if owner is not None and owner.lease is not None:
            self._to_revoke[owner.lease] = time.monotonic() + self._config.lease_ttl_s

    def _drop_and_revoke(self) -> None:
        with self._wake:
            dropping, self._dropping = self._dropping, []
            for number in dropping:
                self._forget(number)
        try:
            now = time.monotonic()
            for lease in [lease for lease, expired_at in self._to_revoke.items() if expired_at <= now]:
                del self._to_revoke[lease]
            # All at once, as they are granted: where a large job ends the others need not wait for each of its leases.
            stub = self._client.leasestub
            calls = {
                lease: stub.LeaseRevoke.future(
                    rpc.LeaseRevokeRequest(ID=lease), self._timeout_s, metadata=self._client.metadata
                )
                for lease in self._to_revoke
            }
            for lease, call in calls.items():
                try:
                    call.result()
                except grpc.RpcError as error:
                    # Denied where our rights to one of its keys were taken: then it runs out by itself.
                    if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED):
                        raise
                del self._to_revoke[lease]
        finally:
            for number in dropping:
                self._post(Dropped(number))

    # Transactions

    def _next_writes(self, suspects: bool) -> list[_Write]:
        """What one transaction can take: no key twice, within etcd's limits of number and size, all owners alike.

        suspects: of those alone to whom etcd denied keys; else of the others.
        """
        with self._wake:
            puts = time.monotonic() >= self._puts_at
            waiting = [
                (number, owner)
                for number, owner in self._owners.items()
                if bool(owner.denied) == suspects and (owner.doomed or (puts and owner.dirty))
            ]
            most = SUSPECT_KEYS if suspects else MAX_TXN_OPS
            batch: dict[str, _Write] = {}
            size = 0
            for share in (max(1, most // max(1, len(waiting))), most):
                for number, owner in waiting:
                    keys = [*islice(owner.doomed, share), *islice(owner.dirty if puts else (), share)]
                    for key in keys[:share]:
                        if key in batch:
                            if batch[key].owner is owner:
                                continue
                            break
                        text = owner.desired.get(key)
                        size += 2 * len(key) + len(text or "") + 64
                        if len(batch) == most or (size > MAX_TXN_BYTES and batch):
                            return list(batch.values())
                        batch[key] = _Write(number, owner, key, text)
            return list(batch.values())

    def _write(self) -> int:
        """Carry out what is due, for a turn. Returns the number of operations."""
        done = 0
        # Those to whom etcd denies keys come last, and once.
        for suspects in [False] * TURN_TXNS + [True]:
            batch = self._next_writes(suspects)
            if not batch:
                continue
            self._check()
            done += len(batch)
            self._write_batch(batch)
            if self._dropping:
                self._drop_and_revoke()
        self._probe()
        self._tell_held()
        return done

    def _write_batch(self, batch: list[_Write]) -> None:
        try:
            self._write_some(self._with_leases(batch))
        except grpc.RpcError as error:
            if _is_about_space(error):
                self._hold_puts(error)
            elif error.code() == grpc.StatusCode.NOT_FOUND:
                # "requested lease not found": it ran out before the next keep-alive could tell.
                self._renew(self._client)
            else:
                raise
        else:
            if any(write.text is not None for write in batch):
                self._puts_failed = 0
                if self._held:
                    self._held.clear()
                    if self._is_up:
                        self._post(PutsTaken())

    def _with_leases(self, batch: list[_Write]) -> list[_Write]:
        """The same, each with its owner's lease, which is asked for where there is none."""
        needed = list({write.number: write.owner for write in batch if write.text is not None}.values())
        with self._wake:
            needed = [owner for owner in needed if owner.lease is None]
            if needed and self._spare_lease is not None:
                needed.pop().lease, self._spare_lease = self._spare_lease, None
        for owner, lease in zip(needed, self._grant(len(needed)), strict=True):
            owner.lease = lease
        with self._wake:
            leased = [_Write(one.number, one.owner, one.key, one.text, one.owner.lease) for one in batch]
        # Without one: it was lost again just now. A key put without a lease would stay for ever.
        return [one for one in leased if one.text is None or one.lease is not None]

    def _write_some(self, batch: Sequence[_Write]) -> None:
        if not batch:
            return
        operations = [_write_operation(write) for write in batch]
        try:
            self._transact(operations)
        except grpc.RpcError as error:
            denied = _is_denied(error)
            if not denied and not _is_about_the_request(error):
                raise
            if len(batch) > 1:
                self._write_some(batch[: len(batch) // 2])
                self._write_some(batch[len(batch) // 2 :])
                return
            if batch[0].text is not None:
                self._refused(batch[0], error, again=denied)
        with self._wake:
            for write in batch:
                owner = write.owner
                if write.text is None:
                    if write.key not in owner.desired:
                        owner.doomed.pop(write.key, None)
                elif owner.desired.get(write.key) == write.text and owner.lease == write.lease:
                    owner.dirty.pop(write.key, None)

    def _refused(self, write: _Write, error: grpc.RpcError, again: bool) -> None:
        """etcd does not take this key. again: it may, some day: its rights may be changed."""
        with self._wake:
            owner = write.owner
            if again and write.key in owner.desired:
                if not owner.denied:
                    owner.probes = 0
                    owner.probe_at = time.monotonic() + self._back_off_s(0)
                owner.denied[write.key] = None
                owner.dirty.pop(write.key, None)
        reason = f"etcd refuses what this process publishes there: {describe(error)}"
        self._post(Refused(write.number, write.key, reason))

    def _probe(self) -> None:
        """Try one of the keys that etcd denied to an owner; if it takes it now, all of them are due again."""
        now = time.monotonic()
        with self._wake:
            due = [
                (number, owner, next(iter(owner.denied)))
                for number, owner in self._owners.items()
                if owner.denied and now >= max(owner.probe_at, self._puts_at)
            ]
        for number, owner, key in due[:SUSPECT_KEYS]:
            self._check()
            try:
                for write in self._with_leases([_Write(number, owner, key, owner.desired[key])]):
                    self._transact([_write_operation(write)])
            except grpc.RpcError as error:
                if _is_about_space(error):
                    self._hold_puts(error)
                    return
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    self._renew(self._client)
                elif not _is_denied(error):
                    raise
                with self._wake:
                    owner.probes += 1
                    owner.probe_at = time.monotonic() + self._back_off_s(owner.probes)
                    if owner.denied.pop(key, 0) is None:
                        owner.denied[key] = None
            else:
                with self._wake:
                    owner.dirty.update(owner.denied)
                    owner.denied.clear()

    # Space

    def _hold_puts(self, error: grpc.RpcError) -> None:
        """etcd has no room: try puts again later. All else goes on."""
        self._puts_at = time.monotonic() + self._back_off_s(self._puts_failed)
        self._puts_failed += 1
        self._why_held = f"etcd takes nothing new: {describe(error)}"

    def _tell_held(self) -> None:
        """Whose puts wait for room hears of it."""
        if not self._puts_failed or time.monotonic() >= self._puts_at:
            return
        with self._wake:
            news = [
                number for number, owner in self._owners.items() if owner.dirty and number not in self._held
            ]
            self._held.update(dict.fromkeys(news, self._why_held))
        if self._is_up:
            for number in news:
                self._post(Held(number, self._why_held))

    # Reads

    def _read(self) -> int:
        """Read what is wanted, for a turn. Returns the number of keys."""
        with self._wake:
            keys = list(islice(self._to_get, TURN_TXNS * MAX_TXN_OPS))
            tried = list(islice(self._to_try, SUSPECT_KEYS))
            for key in keys:
                del self._to_get[key]
            for key in tried:
                del self._to_try[key]
        denied: dict[str, str] = {}
        for start in range(0, len(keys), MAX_TXN_OPS):
            self._check()
            self._read_some(keys[start : start + MAX_TXN_OPS], denied)
        if tried:
            self._read_some(tried, denied)
        if denied:
            self._post(Denied(self._session, denied))
            with self._wake:
                news = {_job(key) for key in denied} - self._denied_jobs
                if news:
                    self._denied_jobs |= news
                    moved = [key for key in self._to_get if _job(key) in news]
                    for key in moved:
                        del self._to_get[key]
                        self._to_try[key] = None
        elif tried and self._denied_jobs:
            with self._wake:
                # The rights have come.
                self._denied_jobs -= {_job(key) for key in tried}
                if not self._denied_jobs:
                    self._to_get.update(self._to_try)
                    self._to_try.clear()
        return len(keys) + len(tried)

    def _read_some(self, keys: list[str], denied: dict[str, str]) -> None:
        operations = [_read_operation(key) for key in keys]
        self._unread = keys[0]
        try:
            answer = self._transact(operations)
        except grpc.RpcError as error:
            if not _is_denied(error) and not _is_about_the_request(error):
                raise
            if len(keys) > 1:
                # Somebody put megabytes there, or may not read there: find out who.
                self._read_some(keys[: len(keys) // 2], denied)
                self._read_some(keys[len(keys) // 2 :], denied)
                return
            self._unread = None
            if _is_denied(error):
                denied[keys[0]] = f"etcd refuses to read it: {describe(error)}"
                return
            request = rpc.RangeRequest(key=keys[0].encode(), keys_only=True)
            found = self._stub.Range(request, self._timeout_s, metadata=self._client.metadata)
            self._post(
                Got(self._session, found.header.revision, {keys[0]: MAX_TXN_BYTES if found.kvs else None})
            )
            return
        self._unread = None
        values = {
            key: response.response_range.kvs[0].value if response.response_range.kvs else None
            for key, response in zip(keys, answer.responses, strict=True)
        }
        self._post(Got(self._session, answer.header.revision, values))

    def _transact(self, operations: list[Any]) -> Any:
        request = rpc.TxnRequest(success=operations)
        return self._stub.Txn(request, self._timeout_s, metadata=self._client.metadata)


def _job(key: str) -> str:
    """The job of a key, for which etcd's rights are given as a rule."""
    return key.split("/", 3)[2]


def _read_operation(key: str) -> Any:
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode()))


def _write_operation(write: _Write) -> Any:
    name = write.key.encode()
    if write.text is not None:
        return rpc.RequestOp(
            request_put=rpc.PutRequest(key=name, value=write.text.encode(), lease=write.lease)
        )
    # Only if the key is still ours: a QPN may have been taken over by another process since.
    ours = rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.LEASE, key=name, lease=write.lease or -1)
    delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=name))
    return rpc.RequestOp(request_txn=rpc.TxnRequest(compare=[ours], success=[delete]))


def _is_denied(error: grpc.RpcError) -> bool:
    """Whether etcd's rights do not allow it: a matter of the keys in a request, not of the session."""
    return error.code() == grpc.StatusCode.PERMISSION_DENIED


def _is_about_space(error: grpc.RpcError) -> bool:
    """Whether etcd takes nothing new for now, but answers."""
    return error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and not _is_about_the_request(error)


def _is_about_the_request(error: grpc.RpcError) -> bool:
    """Whether a smaller request could succeed, in the same session."""
    details = (error.details() or "").lower()
    return error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED) and any(
        words in details for words in ("too many operations", "too large", "larger than max", "duplicate key")
    )


# What the way to etcd may raise.
_EXPECTED = (grpc.RpcError, etcd3.Etcd3Exception, SessionLost, OSError, ValueError)


def describe(error: BaseException) -> str:
    """An error in one line, without gRPC's debug dump."""
    if isinstance(error, grpc.RpcError):
        details = (error.details() or "").splitlines()
        return f"{error.code().name}: {details[0][:200] if details else 'no details'}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
