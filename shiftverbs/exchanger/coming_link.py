# SPDX-License-Identifier: BSD-3-Clause
"""What stands for the broker's link to etcd until that is loaded: gRPC and etcd3 are most of a broker's start.

On a busy host, or an emulated one, they take half a minute. Whoever started the broker hears its hello before, and
what he publishes meanwhile waits here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..config import Config
from .link_events import Dropped, Loaded, NotLoaded

if TYPE_CHECKING:
    from .etcd_link import EtcdLink


class ComingLink:
    """As EtcdLink, for the broker's main thread, until `hand_over`."""

    def __init__(self, config: Config, post: Callable[[object], None]):
        self._config = config
        self._post = post
        self._owners: dict[int, dict[str, str]] = {}

    def start(self) -> None:
        """Load the module in a thread; Loaded or NotLoaded tells when that is over."""
        threading.Thread(target=self._load, name="shiftverbs-etcd-load", daemon=True).start()

    def _load(self) -> None:
        try:
            from .etcd_link import EtcdLink

            link = EtcdLink(self._config, self._post)
        except Exception as error:
            self._post(NotLoaded(f"the broker cannot start: {type(error).__name__}: {error}"))
        else:
            self._post(Loaded(link))

    def hand_over(self, link: EtcdLink) -> None:
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
        """`owner` is gone, and nothing of it stands anywhere."""
        self._owners.pop(owner, None)
        self._post(Dropped(owner))
