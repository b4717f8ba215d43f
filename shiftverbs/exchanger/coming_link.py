# SPDX-License-Identifier: BSD-3-Clause
"""What stands for the broker's link to etcd until that is loaded: gRPC and etcd3 are most of a broker's start.

On a busy host, or an emulated one, they take half a minute. Whoever started the broker hears its hello before, and
what he publishes meanwhile waits here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from shiftverbs.config import Config
from shiftverbs.exchanger.link_events import Dropped, Link, Loaded, NotLoaded

# Loading that got no processor time for this long is stuck: on a starved host it gets some.
STUCK_S = 60.0
_LOOKS = 60


class ComingLink:
    """As EtcdLink, for the broker's main thread, until `hand_over`."""

    def __init__(self, config: Config, post: Callable[[object], None]):
        self._config = config
        self._post = post
        self._owners: dict[int, dict[str, str]] = {}
        # The loading thread's own clock, of the processor time it has had.
        self._clock: int | None = None

    def start(self) -> None:
        """Load the module in a thread; Loaded or NotLoaded tells when that is over."""
        loading = threading.Thread(target=self._load, name="shiftverbs-etcd-load", daemon=True)
        loading.start()
        watching = threading.Thread(
            target=self._watch, args=(loading,), name="shiftverbs-etcd-wait", daemon=True
        )
        watching.start()

    def _load(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            from shiftverbs.exchanger.etcd_link import EtcdLink

            link = EtcdLink(self._config, self._post)
        except BaseException as error:  # also a module's SystemExit: nobody else would tell
            self._post(NotLoaded(f"the broker cannot start: {type(error).__name__}: {error}"))
        else:
            self._post(Loaded(link))

    def _watch(self, loading: threading.Thread) -> None:
        """Tell when loading is stuck. Counts looks, not seconds: a process that was stopped meanwhile made none."""
        stood, before = 0, None
        while stood < _LOOKS:
            loading.join(STUCK_S / _LOOKS)
            if not loading.is_alive():
                return
            now = self._had_s()
            stood = stood + 1 if now == before else 0
            before = now
        self._post(
            NotLoaded(f"the broker is stuck: gRPC and etcd3 are not loaded, nothing moved for {STUCK_S:g} s")
        )

    def _had_s(self) -> float | None:
        """Seconds of a processor that the loading thread has had."""
        try:
            return None if self._clock is None else time.clock_gettime(self._clock)
        except OSError:  # it has ended in this moment
            return None

    def hand_over(self, link: Link) -> None:
        """Tell `link` everything that holds now."""
        for owner, keys in self._owners.items():
            link.add(owner)
            for key, text in keys.items():
                link.put(owner, key, text)

    def add(self, owner: int) -> None:
        """A client came."""
        self._owners[owner] = {}

    def put(self, owner: int, key: str, text: str) -> None:
        """`text` shall stand under `key` as long as `owner` lives."""
        self._owners[owner][key] = text

    def delete(self, owner: int, key: str) -> None:
        """`owner` takes `key` back."""
        self._owners[owner].pop(key, None)

    def get(self, keys: Iterable[str]) -> None:
        """Nothing can be read: with the first session all that is wanted is read in any case."""

    def drop(self, owner: int) -> None:
        """`owner` is gone, and nothing of it is stored anywhere."""
        self._owners.pop(owner, None)
        self._post(Dropped(owner))
