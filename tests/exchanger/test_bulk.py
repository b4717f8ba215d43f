# SPDX-License-Identifier: BSD-3-Clause
"""Much to do at once: nobody's keys run out meanwhile, and nobody waits for all that others asked for."""

from __future__ import annotations

import base64
import json
import threading
import urllib.request
from collections.abc import Iterator

from harness import EtcdServer

from exchanger.conftest import GID_B, EtcdWorld, publish_qp, qp_record
from exchanger.relay import Relay
from shiftverbs.config import Config
from shiftverbs.exchanger import Connected, Found, qp_key


class Deletions:
    """Collects which keys of a job etcd deletes, from an etcd watch of the test's own. For a `with`."""

    def __init__(self, server: EtcdServer, job: str) -> None:
        self.keys: list[str] = []
        start = f"/shiftverbs/{job}/".encode()
        create = {
            "key": base64.b64encode(start).decode(),
            "range_end": base64.b64encode(start[:-1] + b"0").decode(),
            "filters": ["NOPUT"],
        }
        request = urllib.request.Request(
            f"http://{server.endpoint}/v3/watch", json.dumps({"create_request": create}).encode()
        )
        self._answer = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300)
        assert json.loads(self._answer.readline())["result"]["created"]
        threading.Thread(target=self._read, daemon=True).start()

    def _lines(self) -> Iterator[bytes]:
        try:
            yield from self._answer
        except (OSError, ValueError, AttributeError):
            return

    def _read(self) -> None:
        for line in self._lines():
            for event in json.loads(line).get("result", {}).get("events", ()):
                self.keys.append(base64.b64decode(event["kv"]["key"]).decode())


def test_leases_are_kept_while_a_slow_etcd_takes_thousands_of_puts(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    seen = Deletions(world.server, world.job)
    with Relay(world.server.port, 0.1) as relay:
        one = world.make(etcd=Config.from_environ({"SHIFTVERBS_ETCD": relay.endpoint}).etcd, lease_ttl_s=4)
        one.next(Connected)
        # 34 transactions, each of which takes more than a fifth of a second.
        keys = {publish_qp(one, world.job, qpn) for qpn in range(1, 4001)}
        one.until(lambda _: seen.keys or len(world.keys()) == len(keys), timeout_s=60)
        assert seen.keys == []
        assert set(world.keys()) == keys
        one.exchanger.close()


def test_a_neighbour_keeps_its_keys_and_its_turn_while_another_reads(
    own_etcd_world: EtcdWorld, softrnic_dir
) -> None:
    world = own_etcd_world
    seen = Deletions(world.server, world.job)
    with Relay(world.server.port, 0.03) as relay:
        etcd = Config.from_environ({"SHIFTVERBS_ETCD": relay.endpoint}).etcd
        shared = {
            "etcd": etcd,
            "broker": str(softrnic_dir / "b.sock"),
            "broker_idle_exit_s": 1,
            "lease_ttl_s": 3,
        }
        greedy, neighbour = world.make(**shared), world.make(**shared)
        first = publish_qp(neighbour, world.job, 1)
        neighbour.exchanger.want(first)
        neighbour.next(Found, key=first, value=qp_record(world.job, 1))
        wanted = [qp_key(world.job, GID_B, qpn) for qpn in range(1, 12_001)]
        for key in wanted:
            greedy.exchanger.want(key)
        greedy.next(Found)
        # 100 transactions are to come, six seconds' worth: a put does not wait for them all.
        second = publish_qp(neighbour, world.job, 2)
        greedy.until(lambda _: second in world.keys())
        answered = sum(isinstance(event, Found) for event in greedy.events)
        assert answered < len(wanted) / 2
        greedy.until(
            lambda _: sum(isinstance(event, Found) for event in greedy.events) >= len(wanted) - 1, 60
        )
        assert seen.keys == []
        greedy.exchanger.close()
        neighbour.exchanger.close()
