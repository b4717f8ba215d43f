# SPDX-License-Identifier: BSD-3-Clause
"""The engine under sanitizers: the tests that go deepest once more, and a stress test with threads.

A finding ends the process, which fails the test and shows the report.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import child_env

from softrnic import (
    test_congestion,
    test_cq,
    test_errors,
    test_extended,
    test_fabric,
    test_faults,
    test_gids,
    test_gone_memory,
    test_late_packets,
    test_pfc,
    test_raw_peer,
    test_rc,
    test_srq,
    test_standstill,
    test_uc,
    test_ud,
    test_windows,
)
from softrnic.cbuild import SANITIZERS, build, build_library, runtime_libraries

# The same functions under the same names; only the fixture host_env is another here.
REPEATED = {
    test_congestion: "cnp_on_the_wire data_is_right_under_control marks_lead_to_a_lower_rate "
    "unreliable_connections_are_paced_too what_a_sender_makes_of_cnps",
    test_cq: "overrun_is_an_error_of_the_queue resize_keeps_what_is_in_it",
    test_errors: "bad_local_key flush_order receive_with_bad_local_key reuse_many_times rnr_then_receive",
    test_faults: "death null_devices_complete_at_once random_loss",
    test_fabric: "rules_and_limits full_buffer_drops cable_pulled_under_way death_under_way",
    test_gids: "addresses_that_an_index_does_not_reach datagrams headers_that_lead_nowhere",
    test_gone_memory: "datagram local_memory local_memory_ends_within_the_message memory_comes_and_goes receive "
    "remote_atomic remote_memory sent_again unreliable_connection",
    test_pfc: "cable_pulled_under_flow_control priorities_between_processes storm_between_processes "
    "a_pause_without_end_ends_in_an_error "
    "switched_on_and_off_under_way traffic_class_on_the_wire what_nics_count whoever_caused_a_pause_dies",
    test_raw_peer: "duplicates random_packets read_response_that_does_not_fit strangers_and_garbage_change_nothing "
    "wrong_requests_are_refused",
    test_rc: "atomics inline_data_is_copied_at_post_time large_message order_of_mixed_operations read scatter_gather "
    "send shared_cq_and_many_qps write_with_imm",
    test_ud: "datagram receive_too_small",
    test_uc: "a_lost_packet_costs_its_message send_and_write",
    test_srq: "first_come message_under_way_is_flushed resize",
    test_windows: "a_region_with_windows_stays a_window_opens_its_part binds_are_in_order_with_what_is_around_them",
    test_extended: "abort_and_begin_anew all_or_nothing every_operation",
    test_late_packets: "a_late_packet_meets_a_cut_cable everything_twice",
    test_standstill: "stall_and_go_on stalled_nic_does_not_even_flush kill_ends_the_waiting",
}
globals().update(
    {
        f"test_{name}": getattr(module, f"test_{name}")
        for module, names in REPEATED.items()
        for name in names.split()
    }
)
peer, ends, shared, index = test_raw_peer.peer, test_ud.ends, test_srq.shared, test_gids.index
hosts_known, marking, three_known = test_fabric.hosts_known, test_congestion.marking, test_pfc.three_known


@pytest.fixture(scope="session")
def sanitized_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The software NIC, built with sanitizers."""
    return str(build_library(tmp_path_factory.mktemp("sanitized") / "libsoftrnic.so"))


@pytest.fixture
def host_env(sanitized_library: str) -> dict[str, str]:
    """Hosts use the sanitized build."""
    return {
        "SOFTRNIC_LIBRARY": sanitized_library,
        "LD_PRELOAD": runtime_libraries(),
        # Python itself leaks at exit; pyverbs 44 leaks every SGE and WR.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def test_hosts_use_the_sanitized_build(hosts: Callable[..., Any], sanitized_library: str) -> None:
    host = hosts("a")
    with open(f"/proc/{host.pid}/maps", encoding="utf-8") as maps:
        mapped = maps.read()
    assert sanitized_library in mapped and "libasan" in mapped


@pytest.mark.parametrize("sanitizers", ["thread", SANITIZERS])
def test_stress(sanitizers: str, tmp_path: Path, softrnic_dir: Path) -> None:
    """c/stress.c: races, deadlocks, memory errors and, with AddressSanitizer, leaks."""
    program = build(tmp_path / "stress", "stress.c", None, sanitizers)
    env = child_env(softrnic_dir, "a", "1", {"TSAN_OPTIONS": "second_deadlock_stack=1"})
    done = subprocess.run([str(program), "2"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    counts = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", done.stdout)}
    assert all(counts[name] > 10 for name in ("completions", "lives", "faults")), counts


@pytest.mark.parametrize("sanitizers", ["thread", SANITIZERS])
def test_nothing_is_written_after_the_end(sanitizers: str, tmp_path: Path, softrnic_dir: Path) -> None:
    """c/quiet.c: when ERR, RESET, destroy_qp or dereg_mr has returned, the memory is the program's again."""
    program = build(tmp_path / "quiet", "quiet.c", None, sanitizers)
    env = child_env(softrnic_dir, "a", "1")
    done = subprocess.run([str(program), "3"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    counts = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", done.stdout)}
    assert (
        all(counts[name] >= 5 for name in ("err", "reset", "destroy", "deregister")) and counts["busy"] >= 10
    ), counts
