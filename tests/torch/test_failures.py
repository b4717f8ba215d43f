# SPDX-License-Identifier: BSD-3-Clause
"""Cables pulled under training, ranks that die and ranks that are late."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest
from harness import ROOT, free_port
from ranks_env import ENV

pytestmark = pytest.mark.usefixtures("needs_torch")


def test_training_through_a_failure(ranks, faults):
    """DDP: the cable is pulled and plugged in again, and the weights are those of a run without that, bit for bit."""
    both = ranks(2, "training")
    assert both("world().wait_protected(20)") == [True, True]
    both("unused()")
    assert len(set(both("embedded()"))) == 1
    undisturbed = both("weights(60)")
    assert undisturbed[0][0] == undisturbed[1][0]
    assert both("seen()") == [["soft0"], ["soft0"]]
    (a, _) = both.hosts
    both.begin("weights(60, 0.03)")
    a.child.expect("at step 10$", 30, a._seen)
    faults.down("a/soft0")
    a.child.expect("at step 30$", 30, a._seen)
    faults.up("a/soft0")
    assert both.end() == undisturbed
    assert all("soft0" in paths and "soft1" in paths for paths in both("seen()"))


def test_a_dead_nic_takes_no_new_memory(ranks, faults):
    """What is registered goes on; a collective on other memory says why it fails, and names the rank to the others."""
    both = ranks(2, "training")
    assert both("world().wait_protected(20)") == [True, True]
    both("kept = torch.ones(200_000); dist.all_reduce(kept)")
    faults.kill("a/soft0")
    both("dist.all_reduce(kept)")
    assert both("float(kept[-1])") == [4.0, 4.0]
    both.begin("collect(lambda: dist.all_reduce(torch.ones(200_000)), 25)")
    (_, text, _), (_, theirs, _) = both.end()
    assert "takes no new memory" in text and "Errno: 5" in text, text
    assert "rank 0" in theirs, theirs


@pytest.mark.parametrize("carrier", [{}, {"SHIFTVERBS_DISABLE": "1"}], ids=["shiftverbs", "pyverbs"])
def test_a_killed_rank_is_named_by_all(ranks, carrier):
    three = ranks(3, "training", **carrier)
    three("world().wait_protected(20)")
    three("reduce_often(3)")
    victim = three.hosts.pop(1)
    three.begin("collect(lambda: reduce_often(10**9), 25)")
    victim.child.signal(signal.SIGKILL)
    for kind, text, _ in three.end():
        assert kind in ("PeerFailed", "RuntimeError") and "rank 1" in text, text
    for kind, text, took in three("collect(lambda: dist.barrier(), 5)"):
        assert "rank 1" in text and took < 1
    three("dist.destroy_process_group()")


def test_backward_with_a_killed_rank_raises(ranks):
    """In the reducer a future that fails must not crash the process."""
    both = ranks(2, "training", SHIFTVERBS_DISABLE="1")
    (a, b) = both.hosts
    both.begin("collect(lambda: weights(10**9), 40)")
    b.child.expect("at step 10$", 30, b._seen)
    b.child.signal(signal.SIGKILL)
    kind, text, _ = a.end()
    assert "rank 1" in text, text
    assert a("1 + 1") == 2


def test_a_late_rank_is_named(ranks):
    both = ranks(2, "training")
    (a, b) = both.hosts
    both("import datetime")
    both("g = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.7))")
    kind, text, took = a("collect(lambda: dist.all_reduce(torch.ones(3), group=g), 5)")
    assert "rank 1" in text and took > 0.6
    assert "rank 0" in b("collect(lambda: dist.all_reduce(torch.ones(3), group=g), 5)")[1]
    both("dist.barrier()")  # other groups do not care
    both("g = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.7))")
    kind, text, took = a("collect(lambda: dist.recv(torch.ones(3), 1, group=g), 5)")
    assert "rank 1" in text and took > 0.6


def test_sparse_tensors_of_different_shapes_are_named(ranks):
    both = ranks(2, "training", SHIFTVERBS_DISABLE="1")
    both("g = dist.new_group([0, 1])")
    both.begin("collect(lambda: dist.all_reduce(torch.eye(3 + base.RANK).to_sparse(), group=g), 5)")
    for rank, (_, text, _) in enumerate(both.end()):
        assert f"rank {1 - rank} has a sparse tensor of another shape" in text or "failed" in text, text
    both("dist.barrier()")


def run_script(network, backend: str, world: int = 2) -> list[str]:
    """The example, as a user starts it; what each rank printed last."""
    port = str(free_port())
    hosts = []
    for rank in range(world):
        env = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        script = [str(ROOT / "examples" / "train_ddp.py"), "--steps=40", f"--backend={backend}"]
        env = {**network.env, **ENV, **env}
        hosts.append(network._spawn(*script, host="ab"[rank], softrnic="2", env=env))
    return [re.findall(r"checksum of weights (\S+)", child.succeed(60))[0] for child in hosts]


def test_a_script_changes_only_the_backends_name(network):
    """Nothing is left behind that keeps it from ending, and the weights are those that gloo gives."""
    ours, gloo = run_script(network, "shift"), run_script(network, "gloo")
    assert ours[0] == ours[1]
    assert float(ours[0]) == pytest.approx(float(gloo[0]), rel=1e-4)


def test_where_there_is_no_torch_the_import_says_so():
    code = "import sys, importlib.util as u; found = u.find_spec\n"
    code += "u.find_spec = lambda name, *a: None if name == 'torch' else found(name, *a)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "import shiftverbs.torch"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1 and "python3-torch" in done.stderr
