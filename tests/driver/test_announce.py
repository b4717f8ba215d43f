# SPDX-License-Identifier: BSD-3-Clause
"""Log lines about many QPs."""

from __future__ import annotations

import logging

import pytest

from shiftverbs.process.log_lines import Announcements


def test_what_is_said_of_many_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shiftverbs.driver")
    said = Announcements()
    said.say(logging.INFO, 0x10, "home on soft0")
    for number in range(3):
        said.say(logging.WARNING, number, "leaving soft0 for soft1: PORT_ERR")
    for number in range(1000):
        said.say(logging.INFO, number, "home on soft2")
    assert caplog.messages == []
    said.flush()
    said.flush()
    assert caplog.messages == [
        "QP 0x10: home on soft0",
        "QPs 0x0, 0x1, 0x2: leaving soft0 for soft1: PORT_ERR",
        "1000 QPs (0x0, 0x1, 0x2, 0x3, 0x4, 0x5, 0x6, 0x7, ...): home on soft2",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]


def test_what_nobody_logs_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "shiftverbs.driver")
    said = Announcements()
    said.say(logging.INFO, 1, "home on soft0")
    caplog.set_level(logging.INFO, "shiftverbs.driver")
    said.flush()
    assert caplog.messages == []
