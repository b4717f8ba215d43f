# SPDX-License-Identifier: BSD-3-Clause
"""softrnic: RoCEv2 RNICs in user space, for any program that uses libibverbs.

The library `libsoftrnic.so` beside this file stands before libibverbs and adds devices `soft0`,
`soft1`, ..., or of names of your own, to those that the system has. It starts by the environment variable
`SOFTRNIC` alone, and gets in front of libibverbs in one of three ways: `enable()` before pyverbs is imported,
`import shiftverbs` with `SOFTRNIC` set, or `LD_PRELOAD` for any program.

`VARIABLES` has its environment variables.

`shiftverbs.softrnic.faults` pulls cables; `python -m shiftverbs.softrnic` does the same from a shell.
Neither this package nor those import pyverbs.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["VARIABLES", "SoftrnicError", "Variable", "enable", "environment", "is_enabled", "library_path"]

_LIBRARY_NAME = "libsoftrnic.so"
# A symbol of our library that nothing else has, and one that it shares with libibverbs.
_OWN_SYMBOL = "softrnic_ctl_list"
_VERBS_SYMBOL = "ibv_get_device_list"


class Variable(NamedTuple):
    """An environment variable, as the reference shows it: how a value is written, what it does, what holds unset."""

    form: str
    meaning: str
    default: str


#: All that the library, this package and its command line read.
VARIABLES: dict[str, Variable] = {
    "SOFTRNIC": Variable(
        "`0`, `1`, a number up to 16, `null`, `null:N`, names, or a description",
        "Which devices there are. 1: two, on two rails; 3: three; null: two (null:3 is three) that complete everything "
        "at once, without a network; names such as `mlx5_0;mlx5_1`, on rails 0, 1, …; a description such as "
        "`soft0@netdev:eth0;soft1@127.0.0.5;soft2@loopback`: one entry per device.",
        "none",
    ),
    "SOFTRNIC_HOST": Variable(
        "1 to 31 letters, digits, `-`, `_`, `.`",
        "Which host this process is on.",
        "`a`",
    ),
    "SOFTRNIC_DIR": Variable(
        "a directory of this user's alone",
        "Where processes meet: one directory is one network.",
        "`softrnic-UID` in `TMPDIR` or `/tmp`",
    ),
    "SOFTRNIC_FABRIC": Variable(
        "entries such as `rail0:rate=10G,delay=5us,buffer=1M`, or a file that begins with `/` or `.`",
        "Rails with limits, from the first device on that is opened with another value than before: see "
        "`shiftverbs.softrnic.fabric`.",
        "none",
    ),
    "SOFTRNIC_COUNTERS": Variable(
        "`1`",
        "Write what a NIC counted to standard error when it is closed.",
        "off",
    ),
    "SOFTRNIC_KEYS": Variable(
        "`reuse`",
        "The next registration has the lkey and rkey of the memory region that was deregistered last, as on some NICs.",
        "new keys each time",
    ),
    "SOFTRNIC_LIBRARY": Variable(
        "a file",
        "Another build of the library, for `enable()` and the command line.",
        "the one in the package",
    ),
}


class SoftrnicError(RuntimeError):
    """softrnic cannot do what was asked; the message says what is wrong and what there is."""


def library_path() -> Path:
    """Where the library is.

    :return: path of `libsoftrnic.so`: `SOFTRNIC_LIBRARY` if set, else the file beside this package.
    :raises SoftrnicError: there is no such file (the package is not built).
    """
    override = os.environ.get("SOFTRNIC_LIBRARY")
    path = Path(override) if override else Path(__file__).with_name(_LIBRARY_NAME)
    if not path.is_file():
        hint = "SOFTRNIC_LIBRARY names it" if override else "build the package first (make build)"
        raise SoftrnicError(f"{path} does not exist: {hint}")
    return path.resolve()


def is_enabled() -> bool:
    """Whether the library is in front of libibverbs in this process (by `enable()` or `LD_PRELOAD`)."""
    return hasattr(ctypes.CDLL(None), _OWN_SYMBOL)


def enable(config: str | None = None) -> None:
    """Put softrnic in front of libibverbs in this process. Call it before anything imports pyverbs.

    :param config: value for `SOFTRNIC`: `"1"` (two devices on two rails), `"3"` (three), `"null"`
        (two that complete everything at once, without a network), names such as `"mlx5_0;mlx5_1"` (on rails
        0, 1, ...) or a description such as `"soft0@netdev:eth0;soft1@127.0.0.5"`. None keeps what the
        environment says, `"1"` if it says nothing. It takes effect when the first device list is read.
    :raises SoftrnicError: the library is not there, or pyverbs or libibverbs was loaded before, so that
        softrnic would have no effect.
    """
    if config is not None:
        os.environ["SOFTRNIC"] = config
    else:
        os.environ.setdefault("SOFTRNIC", "1")
    if is_enabled():
        return
    loaded = sorted(name for name, module in sys.modules.items() if _is_verbs_extension(name, module))
    if loaded:
        raise SoftrnicError(
            f"softrnic must be enabled before pyverbs is imported, but {loaded[0]} is loaded already; "
            "call shiftverbs.softrnic.enable() first, or start the program with LD_PRELOAD="
            f"{library_path()}"
        )
    library = ctypes.CDLL(str(library_path()), mode=ctypes.RTLD_GLOBAL)
    if _address(ctypes.CDLL(None), _VERBS_SYMBOL) != _address(library, _VERBS_SYMBOL):
        raise SoftrnicError(
            "another library in this process defines the verbs already (libibverbs opened with RTLD_GLOBAL?, some "
            "builds of torch do that), so softrnic has no effect; import shiftverbs before anything that loads "
            f"libibverbs, or start the program with LD_PRELOAD={library_path()}"
        )


def environment(
    host: str | None = None,
    config: str | None = "1",
    directory: str | os.PathLike[str] | None = None,
    *,
    preload: bool = False,
    base: dict[str, str] | None = None,
) -> dict[str, str]:
    """The environment for a child process on one of the hosts.

    :param host: its host (`SOFTRNIC_HOST`); None leaves what `base` has.
    :param config: its devices (`SOFTRNIC`), as in `enable`; None leaves what `base` has.
    :param directory: where it meets the others (`SOFTRNIC_DIR`); None leaves what `base` has.
    :param preload: add `LD_PRELOAD`, for programs that do not enable softrnic themselves.
    :param base: what to start from; this process's environment by default.
    :return: a new complete environment, for `subprocess.Popen(env=...)`.
    :raises SoftrnicError: `preload` without a built library.
    """
    env = dict(os.environ if base is None else base)
    if host is not None:
        env["SOFTRNIC_HOST"] = host
    if config is not None:
        env["SOFTRNIC"] = config
    if directory is not None:
        env["SOFTRNIC_DIR"] = os.fspath(directory)
    if preload:
        env["LD_PRELOAD"] = " ".join([str(library_path()), *env.get("LD_PRELOAD", "").split()])
    return env


def _is_verbs_extension(name: str, module: object) -> bool:
    """Is this one of pyverbs' compiled modules, whose references to libibverbs are bound at loading?"""
    file = getattr(module, "__file__", None) or ""
    return name.startswith("pyverbs.") and file.endswith(".so")


def _address(library: ctypes.CDLL, symbol: str) -> int | None:
    if not hasattr(library, symbol):
        return None
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
