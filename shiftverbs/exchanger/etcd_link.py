# SPDX-License-Identifier: BSD-3-Clause
"""The broker's side towards etcd: one thread that logs in, keeps leases alive, and runs batched transactions.

Only the broker's process imports this module: it brings gRPC and protobuf with it.

What each owner (a client of the broker) wants to stand in etcd is kept as a dict, and the thread brings etcd to
that state. So nothing special happens after a reconnect or a lost lease: everything is simply due again.

What happened is handed to `post`, a function that may be called from any thread, as the events of link_events.py.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import etcd3
import etcd3.etcdrpc as rpc
import grpc

from ..config import Config, Endpoint
from .etcd_watch import WatchStream
from .link_events import Down, Dropped, Got, Refused, Up

# etcd refuses more than 128 (--max-txn-ops), counting for a guarded delete its nested transaction as well.
MAX_TXN_OPS = 120
# etcd refuses requests above 1.5 MiB.
MAX_TXN_BYTES = 1 << 20
# How many batching windows to wait when one batch of at least so many operations follows the other.
BUSY_WINDOWS = 5
BUSY_OPS = 3
STABLE_S = 5.0


@dataclass
class _Owner:
    lease: int | None = None
    desired: dict[str, str] = field(default_factory=dict)
    # Keys under which etcd may have something else than `desired`, in the order they changed.
    dirty: dict[str, None] = field(default_factory=dict)


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
        self._to_get: dict[str, None] = {}
        self._dropping: list[int] = []
        # Leases of gone owners: lease id -> when it has run out by itself.
        self._to_revoke: dict[int, float] = {}
        self._spare_lease: int | None = None
        # A key that could not be read: the next session has to show first that it can.
        self._unread: str | None = None
        self._session = 0
        self._stub: Any = None
        self._client: Any = None
        self._attempt = 0
        self._timeout_s = config.etcd_timeout_ms / 1000

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
            state.dirty[key] = None
            self._wake.notify()

    def delete(self, owner: int, key: str) -> None:
        """`owner` takes `key` back."""
        with self._wake:
            state = self._owners[owner]
            if state.desired.pop(key, None) is not None:
                state.dirty[key] = None
                self._wake.notify()

    def get(self, keys: Iterable[str]) -> None:
        """Read `keys`; the answer comes as Got. Forgotten when the session ends."""
        with self._wake:
            self._to_get.update(dict.fromkeys(keys))
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
            try:
                self._open(endpoint)
                self._serve()
            except (grpc.RpcError, etcd3.Etcd3Exception, SessionLost, OSError, ValueError) as error:
                reason = f"etcd at {endpoint.url}: {describe(error)}"
            finally:
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

    def _open(self, endpoint: Endpoint) -> None:
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
        # A lease goes through the cluster's consensus: once it is granted, etcd is fit to work.
        self._renew(time.monotonic())
        with self._wake:
            proven = self._spare_lease is not None or any(owner.lease for owner in self._owners.values())
        if not proven:
            self._spare_lease = self._grant()
        # Nor is a session one that may not read and write (no login, no rights): it would end at once, to no end.
        self._drop_and_revoke()
        self._write()
        if self._unread is not None:
            self._transact([_read_operation(self._unread)])
            self._unread = None
        self._session += 1
        watch = WatchStream(rpc.WatchStub(self._client.channel), self._client.metadata, self._post, self._session)
        with self._wake:
            self._to_get.clear()
        self._post(Up(self._session, watch))

    def _close(self) -> None:
        client, self._client, self._stub = self._client, None, None
        if client is not None:
            client.close()

    def _pause(self) -> None:
        """Wait before the next endpoint: back-off once all were tried, but drop clients meanwhile."""
        config = self._config
        rounds = (self._attempt - 1) // len(config.etcd)
        pause_ms = min(config.etcd_backoff_min_ms * 2 ** min(rounds, 20), config.etcd_backoff_max_ms)
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

    def _serve(self) -> None:
        period_s = self._config.lease_ttl_s / 3
        window_s = self._config.broker_batch_window_us / 1e6
        busy = False
        renew_at = time.monotonic() + period_s
        while True:
            with self._wake:
                while not self._has_work() and time.monotonic() < renew_at:
                    self._wake.wait(max(0.0, renew_at - time.monotonic()))
                has_work = self._has_work()
                pause_s = window_s * (BUSY_WINDOWS if busy else 1)
            if time.monotonic() >= renew_at:
                self._renew(time.monotonic())
                renew_at = time.monotonic() + period_s
            if has_work:
                # A program creates its QPs one after the other: a moment's wait makes one transaction of many,
                # and where they keep coming, a longer one makes fewer transactions still.
                time.sleep(pause_s)
                self._drop_and_revoke()
                count = self._write() + self._read()
                with self._wake:
                    busy = count >= BUSY_OPS and self._wake.wait_for(self._has_work, window_s)

    def _has_work(self) -> bool:
        return bool(
            self._dropping or self._to_get or self._to_revoke or any(one.dirty for one in self._owners.values())
        )

    # Leases

    def _grant(self) -> int:
        stub = self._client.leasestub
        answer = stub.LeaseGrant(
            rpc.LeaseGrantRequest(TTL=self._config.lease_ttl_s), self._timeout_s, metadata=self._client.metadata
        )
        return answer.ID

    def _renew(self, now_s: float) -> None:
        """Keep all leases alive in one stream; where one is lost, all its keys are due again."""
        with self._wake:
            leases = {owner.lease: owner for owner in self._owners.values() if owner.lease is not None}
        ids = [*leases, *([self._spare_lease] if self._spare_lease is not None else [])]
        if not ids:
            return
        requests = [rpc.LeaseKeepAliveRequest(ID=lease) for lease in ids]
        call = self._client.leasestub.LeaseKeepAlive(
            iter(requests), self._timeout_s, metadata=self._client.metadata
        )
        alive = set()
        for _ in ids:
            answer = next(call, None)
            if answer is None:
                break
            if answer.TTL > 0:
                alive.add(answer.ID)
        call.cancel()
        if self._spare_lease not in alive:
            self._spare_lease = None
        with self._wake:
            for lease, owner in leases.items():
                if lease not in alive:
                    owner.lease = None
                    owner.dirty.update(dict.fromkeys(owner.desired))

    def _forget(self, number: int) -> None:
        owner = self._owners.pop(number, None)
        if owner is not None and owner.lease is not None:
            self._to_revoke[owner.lease] = time.monotonic() + self._config.lease_ttl_s

    def _drop_and_revoke(self) -> None:
        with self._wake:
            dropping, self._dropping = self._dropping, []
            for number in dropping:
                self._forget(number)
        try:
            for lease, expired_at in list(self._to_revoke.items()):
                if time.monotonic() < expired_at:
                    try:
                        self._client.leasestub.LeaseRevoke(
                            rpc.LeaseRevokeRequest(ID=lease), self._timeout_s, metadata=self._client.metadata
                        )
                    except grpc.RpcError as error:
                        if error.code() != grpc.StatusCode.NOT_FOUND:
                            raise
                del self._to_revoke[lease]
        finally:
            for number in dropping:
                self._post(Dropped(number))

    # Transactions

    def _next_writes(self) -> list[tuple[int, _Owner, str, str | None]]:
        """What one transaction can take: no key twice, within etcd's limits of number and size."""
        with self._wake:
            batch: dict[str, tuple[int, _Owner, str, str | None]] = {}
            size = 0
            for number, owner in self._owners.items():
                for key in owner.dirty:
                    text = owner.desired.get(key)
                    size += 2 * len(key) + len(text or "") + 64
                    if key in batch or len(batch) == MAX_TXN_OPS or (size > MAX_TXN_BYTES and batch):
                        return list(batch.values())
                    batch[key] = (number, owner, key, text)
            return list(batch.values())

    def _write(self) -> int:
        """Carry out what is due. Returns the number of operations."""
        done = 0
        # Not without end: leases have to be renewed in between.
        for _ in range(32):
            batch = self._next_writes()
            if not batch:
                break
            done += len(batch)
            for _, owner, _, text in batch:
                if owner.lease is None and text is not None:
                    owner.lease, self._spare_lease = self._spare_lease or self._grant(), None
            try:
                self._write_some(batch)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise
                # "requested lease not found": it ran out before the next keep-alive could tell.
                self._renew(time.monotonic())
            if self._dropping:
                self._drop_and_revoke()
        return done

    def _write_some(self, batch: list[tuple[int, _Owner, str, str | None]]) -> None:
        operations = [_write_operation(owner, key, text) for _, owner, key, text in batch]
        try:
            self._transact(operations)
        except grpc.RpcError as error:
            if not _is_about_the_request(error):
                raise
            if len(batch) > 1:
                self._write_some(batch[: len(batch) // 2])
                self._write_some(batch[len(batch) // 2 :])
                return
            number, _, key, _ = batch[0]
            self._post(Refused(number, key, describe(error)))
        with self._wake:
            for _, owner, key, text in batch:
                if owner.desired.get(key) == text:
                    owner.dirty.pop(key, None)

    def _read(self) -> int:
        """Read what is wanted. Returns the number of keys."""
        with self._wake:
            keys = list(self._to_get)
            self._to_get.clear()
        for start in range(0, len(keys), MAX_TXN_OPS):
            self._read_some(keys[start : start + MAX_TXN_OPS])
        return len(keys)

    def _read_some(self, keys: list[str]) -> None:
        operations = [_read_operation(key) for key in keys]
        self._unread = keys[0]
        try:
            answer = self._transact(operations)
        except grpc.RpcError as error:
            if not _is_about_the_request(error):
                raise
            if len(keys) > 1:
                # Somebody put megabytes there: find out who.
                self._read_some(keys[: len(keys) // 2])
                self._read_some(keys[len(keys) // 2 :])
                return
            request = rpc.RangeRequest(key=keys[0].encode(), keys_only=True)
            found = self._stub.Range(request, self._timeout_s, metadata=self._client.metadata)
            self._unread = None
            self._post(Got(self._session, found.header.revision, {keys[0]: MAX_TXN_BYTES if found.kvs else None}))
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


def _read_operation(key: str) -> Any:
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode()))


def _write_operation(owner: _Owner, key: str, text: str | None) -> Any:
    name = key.encode()
    if text is not None:
        return rpc.RequestOp(request_put=rpc.PutRequest(key=name, value=text.encode(), lease=owner.lease))
    # Only if the key is still ours: a QPN may have been taken over by another process since.
    ours = rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.LEASE, key=name, lease=owner.lease or -1)
    delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=name))
    return rpc.RequestOp(request_txn=rpc.TxnRequest(compare=[ours], success=[delete]))


def _is_about_the_request(error: grpc.RpcError) -> bool:
    """Whether a smaller request could succeed, in the same session."""
    details = (error.details() or "").lower()
    return error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED) and any(
        words in details
        for words in ("too many operations", "too large", "larger than max", "duplicate key")
    )


def describe(error: BaseException) -> str:
    """An error in one line, without gRPC's debug dump."""
    if isinstance(error, grpc.RpcError):
        details = (error.details() or "").splitlines()
        return f"{error.code().name}: {details[0][:200] if details else 'no details'}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
