"""Log lines about QPs: what is to be said of many QPs at once is said in one line, when there is time for it."""

from __future__ import annotations

import logging

logger = logging.getLogger("shiftverbs.driver")

#: So many QPs are named in one line.
MOST_NAMED = 8


def _names(qp_nums: list[int]) -> str:
    if len(qp_nums) == 1:
        return f"QP {qp_nums[0]:#x}"
    named = ", ".join(f"{number:#x}" for number in qp_nums[:MOST_NAMED])
    if len(qp_nums) <= MOST_NAMED:
        return f"QPs {named}"
    return f"{len(qp_nums)} QPs ({named}, ...)"


class Announcements:
    """What is still to be said. Everything here runs under the driver's lock.

    A thousand QPs leave a port together: each line would cost its system call, and let go of the GIL.
    """

    def __init__(self) -> None:
        self._said: dict[tuple[int, str], list[int]] = {}

    def say(self, level: int, qp_num: int, text: str) -> None:
        """Have `text` logged about this QP. level: as in logging."""
        if logger.isEnabledFor(level):
            self._said.setdefault((level, text), []).append(qp_num)

    def flush(self) -> None:
        """Log what was said since the last time."""
        said, self._said = self._said, {}
        for (level, text), qp_nums in said.items():
            logger.log(level, "%s: %s", _names(qp_nums), text)
