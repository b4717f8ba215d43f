# SPDX-License-Identifier: BSD-3-Clause
"""What a broker is told about etcd, as JSON: by whoever starts it, and by each application that connects."""

from __future__ import annotations

from typing import Any

import msgspec

from shiftverbs.config import Config, Endpoint

_FIELDS = (
    "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file",
    "lease_ttl_s", "etcd_timeout_ms", "etcd_backoff_min_ms", "etcd_backoff_max_ms",
    "broker_batch_window_us", "broker_idle_exit_s",
)  # fmt: skip


def settings_of(config: Config) -> dict[str, Any]:
    """The part of a configuration that the broker needs. Contains no secrets, only the paths of their files."""
    settings: dict[str, Any] = {name: getattr(config, name) for name in _FIELDS}
    settings["etcd"] = [msgspec.structs.astuple(endpoint) for endpoint in config.etcd]
    return settings


def config_of(settings: dict[str, Any]) -> Config:
    """The configuration that `settings_of` was given, as far as the broker is concerned."""
    endpoints = tuple(Endpoint(*endpoint) for endpoint in settings["etcd"])
    return Config(etcd=endpoints, **{name: settings[name] for name in _FIELDS})


def store_identity(config: Config) -> dict[str, Any]:
    """What must be the same for a broker and an application that share it: which etcd, and as whom."""
    return {"endpoints": sorted(endpoint.url for endpoint in config.etcd), "user": config.etcd_user}
