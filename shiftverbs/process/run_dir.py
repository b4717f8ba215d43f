# SPDX-License-Identifier: BSD-3-Clause
"""The directory of one user's sockets: the shared broker's, and those that show a process's state."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


def directory(named: str | None = None) -> Path:
    """Where this user's processes have their sockets. named: SHIFTVERBS_RUN_DIR; None: the session's, or in TMPDIR."""
    if named is not None:
        return Path(named)
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and os.path.isdir(session):
        return Path(session) / "shiftverbs"
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"shiftverbs-{os.geteuid()}"


def own_directory(path: Path) -> None:
    """Make the directory, for this user only. Raises OSError where it is, or can be, somebody else's."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=False)
        if path.lstat().st_mode & 0o700 != 0o700:
            path.chmod(0o700)  # a umask took rights from the user: others of this user's processes come, too
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is not a directory", str(path))
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others may write there", str(path))
