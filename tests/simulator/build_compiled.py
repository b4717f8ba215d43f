# SPDX-License-Identifier: BSD-3-Clause
"""Builds what a schedule runs by mypyc: `python tests/simulator/build_compiled.py` prints where.

That is build/compiled/tree: a copy of the package and of the simulator, in which the modules of COMPILED are native.
`campaign.py --compiled` runs there. The sources are the same to the letter; nothing else uses it. Built once for the
same sources; `make build` comes first.

Native code finds methods of native classes, functions and modules of the standard library without looking at their
names again: what the simulator replaces by name (world.py, the end of network.py) stays as it is, and so
does what defines Protocols, as no class that is not native would count as one of those. Structs never are native, and
are not frozen where their module is: those of events and messages are.

Compiled twice: what the first build counts in TRAINED schedules tells gcc what is frequent.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "compiled"
TREE = BUILD / "tree"
#: In a tree that is complete: the modules that are native in it, one a line.
LIST = "native_modules.txt"
CAMPAIGN = "tests/simulator/campaign.py"  # which is not compiled, and imported by nothing
COMPILED = {
    "shiftverbs": "state_machine",
    "shiftverbs/protocol": "arm codec directions ending hopeless invariants move pair path_health seal silence state"
    " switch tables timers",
    "shiftverbs/failover": "driver nic_events",
    "shiftverbs/failover/qp": "absence connection_keys drain ending pairing rebuild reports requirement"
    " watchdog",
    "shiftverbs/failover/services": "admission control_channel cq_polling directory totals",
    "shiftverbs/shadows": "qp qp_attributes",
    "tests/simulator": "application border clock host memory rnic",
}
JOBS = str(len(os.sched_getaffinity(0)))
#: Schedules whose branches are counted, from and up to which seed.
TRAINED = (61_000_000, 61_000_400)
TRAIN = "import sys; sys.path[:0] = ['tests', '.']; from simulator.campaign import chunk; chunk({}, {})"
SETTINGS = """\
[mypy]
python_version = 3.11
mypy_path = tests
explicit_package_bases = True
check_untyped_defs = True
[mypy-{others}]
# They stay Python: their types are trusted by nobody.
ignore_errors = True
[mypy-pyverbs.*,etcd3.*,grpc.*,google.protobuf.*,prometheus_client.*,torch.*]
ignore_missing_imports = True
follow_imports = skip
"""
SETUP = """\
import sys
from setuptools import setup  # first: Python 3.12 has no distutils but its
from mypyc.build import mypycify

modules = mypycify(["--config-file", "mypy.ini", *sys.argv[3:]], opt_level="3", debug_level="0", multi_file=True)
del sys.argv[3:]
sys.argv[1:] = ["-q", "build_ext", "--inplace", "--parallel", sys.argv[1]]
setup(name="compiled", packages=[], package_dir={"simulator": "tests/simulator"}, ext_modules=modules)
"""


def paths() -> list[str]:
    """The sources of the native modules, below the root."""
    return [f"{folder}/{name}.py" for folder, names in COMPILED.items() for name in names.split()]


def sources() -> dict[str, Path]:
    """All files of the tree, by name below the root."""
    found = [path for path in (ROOT / "shiftverbs").rglob("*") if path.is_file()]
    found += [
        path
        for path in (ROOT / "tests" / "simulator").iterdir()
        if path.is_file() and not path.name.startswith(("staged", "test_", "unmended"))
    ]
    return {str(path.relative_to(ROOT)): path for path in sorted(found) if "__pycache__" not in path.parts}


def others(files: dict[str, Path]) -> list[str]:
    """The simulator's modules that are not compiled."""
    compiled = set(paths())
    found = [name for name in files if name.startswith("tests/") and name.endswith(".py")]
    return [f"simulator.{Path(name).stem}" for name in found if name not in compiled]


def run(tree: Path, arguments: list[str], **environ: str) -> None:
    """Python there. Raises CalledProcessError, with the end of what it says on stderr."""
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=os.environ | environ, capture_output=True, text=True
    )
    if ran.returncode:
        sys.stderr.write(ran.stdout[-4000:] + ran.stderr[-4000:])
        ran.check_returncode()


def fill(tree: Path, files: dict[str, Path]) -> None:
    """Copy them, and compile. Raises CalledProcessError, with what the compilers say on stderr."""
    for name, path in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, tree / name)
    (tree / "mypy.ini").write_text(SETTINGS.format(others=",".join(others(files))))
    (tree / "setup.py").write_text(SETUP)
    counts = tree / "counts"
    counting = ["-fprofile-generate", f"-fprofile-dir={counts}"]
    run(tree, ["setup.py", JOBS, "--", *paths()], CFLAGS=" ".join(counting), LDFLAGS=counting[0])
    run(tree, ["-c", TRAIN.format(*TRAINED)])
    shutil.rmtree(tree / "build")  # what has not changed is not compiled anew
    counted = [f"-fprofile-use={counts}", "-fprofile-correction", "-Wno-missing-profile"]
    run(tree, ["setup.py", JOBS, "--", *paths()], CFLAGS=" ".join(counted))
    shutil.rmtree(tree / "build")
    shutil.rmtree(counts)
    (tree / LIST).write_text("".join(f"{path}\n" for path in paths()))


def build() -> Path:
    """The tree, built anew where a source has changed. Raises CalledProcessError, FileNotFoundError."""
    files = sources()
    if not any(name.startswith("shiftverbs/_core.") and name.endswith(".so") for name in files):
        raise FileNotFoundError("the package is not built: make build")
    state = hashlib.sha256(f"{sys.version} {importlib.metadata.version('mypy')}".encode())
    for name, path in files.items():
        if name != CAMPAIGN:
            state.update(f"{name}\0".encode() + path.read_bytes())
    stamp = BUILD / "stamp"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (TREE.exists() and stamp.exists() and stamp.read_text() == state.hexdigest()):
            stamp.unlink(missing_ok=True)
            shutil.rmtree(TREE, ignore_errors=True)
            fill(TREE, files)
            stamp.write_text(state.hexdigest())
        shutil.copy2(ROOT / CAMPAIGN, TREE / CAMPAIGN)
    return TREE


if __name__ == "__main__":
    print(build())
