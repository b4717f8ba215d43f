# SPDX-License-Identifier: BSD-3-Clause
"""Files of software NICs in /dev and /sys, as programs see them that have the library before the C library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import child_env

from shiftverbs.softrnic import faults, library_path
from softrnic.cbuild import build_plain

Run = Callable[..., str]

DEVICE = "/sys/devices/softrnic/rail0/infiniband/soft0"
FILES = {
    "/sys/class/infiniband/soft0": "link",
    f"{DEVICE}/device": "link",
    DEVICE: "directory",
    "/sys/class/infiniband/soft1/ports/1/gid_attrs": "directory",
    "/dev/infiniband/uverbs_soft0": "device",
    "/sys/class/infiniband/soft0/node_type": "file",
    "/sys/class/infiniband/soft0/device/vendor": "file",
}


@pytest.fixture
def run(network: Path) -> Run:
    """Run a command on host a with the library before the C library; its standard output, with status 0."""

    def run(
        *command: str | Path, softrnic: str | None = "1", fails: bool = False, preload: bool = True
    ) -> str:
        env = child_env(network, "a", softrnic, {"LD_PRELOAD": str(library_path()) if preload else None})
        done = subprocess.run([*command], env=env, capture_output=True, text=True, timeout=60)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that asks all functions."""
    return build_plain(tmp_path_factory.mktemp("files") / "files", "files.c")


def test_tools(run: Run) -> None:
    assert run("ls", "/dev/infiniband") == "uverbs_soft0\nuverbs_soft1\n"
    assert run("ls", "/sys/class/infiniband") == "soft0\nsoft1\n"
    assert run("stat", "-c", "%F %t:%T %A", "/dev/infiniband/uverbs_soft1") == (
        "character special file e7:c1 crw-rw-rw-\n"
    )
    assert run("readlink", "/sys/class/infiniband/soft0") == (
        "../../devices/softrnic/rail0/infiniband/soft0\n"
    )
    assert run("readlink", "-f", "/sys/class/infiniband/soft0") == f"{DEVICE}\n"
    assert run("realpath", f"{DEVICE}/device/numa_node") == "/sys/devices/softrnic/rail0/numa_node\n"
    assert run("cat", "/sys/class/infiniband/soft0/ports/1/link_layer") == "Ethernet\n"
    assert run("bash", "-c", "test -c /dev/infiniband/uverbs_soft0 -a -w /dev/infiniband/uverbs_soft0") == ""
    assert run("bash", "-c", "echo /sys/class/infiniband/*/ports/*/gid_attrs/types/3") == (
        "/sys/class/infiniband/soft0/ports/1/gid_attrs/types/3 "
        "/sys/class/infiniband/soft1/ports/1/gid_attrs/types/3\n"
    )
    for missing in (
        "/dev/infiniband/uverbs_soft2",
        "/sys/class/infiniband/soft0/nothing",
        f"{DEVICE}/x/../y",
    ):
        run("stat", missing, fails=True)


def test_everything_listed_is_there(run: Run) -> None:
    """Walked as Python walks, and each file read."""
    source = """
import json, os, sys
found = {}
for top in "/sys/class/infiniband/soft0/", "/sys/class/infiniband/soft0/device/":
    for folder, folders, files in os.walk(top):
        for name in files:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, "/sys/class/infiniband/soft0")] = open(path).read()
        for name in folders:
            assert os.path.isdir(os.path.join(folder, name))
print(json.dumps(found))
"""
    found = json.loads(run(sys.executable, "-c", source))
    assert re.fullmatch(r"([0-9a-f]{4}:){3}[0-9a-f]{4}\n", found["node_guid"])
    assert found["node_guid"] == found["sys_image_guid"]
    assert found["device/vendor"] == "0xc1de\n"
    assert found["ports/1/state"] == "4: ACTIVE\n"
    assert [found[f"ports/1/gid_attrs/types/{i}"] for i in range(4)] == ["IB/RoCE v1\n", "RoCE v2\n"] * 2
    assert [found[f"ports/1/gid_attrs/ndevs/{i}"] for i in range(4)] == ["lo\n"] * 4
    assert all(text.endswith("\n") for text in found.values())


def test_what_verbs_say(run: Run) -> None:
    """Addresses are there while the process has the device open, as verbs have them; the GUID always."""
    source = """
import pathlib, sys
from pyverbs.device import Context
device = pathlib.Path("/sys/class/infiniband/mlx5_1")
before = (device / "ports/1/gids/3").read_text()
context = Context(name="mlx5_1")
gids = [(device / f"ports/1/gids/{i}").read_text().strip() for i in range(4)]
assert gids == [str(context.query_gid(1, i)) for i in range(4)], gids
assert before == ":".join(["0000"] * 8) + "\\n", before
guid = context.query_device().node_guid.to_bytes(8, "little").hex()
assert (device / "node_guid").read_text().strip().replace(":", "") == guid, guid
context.close()
"""
    run(sys.executable, "-c", source, softrnic="mlx5_0;mlx5_1")


@pytest.mark.parametrize("opened", [False, True])
def test_state_of_a_port(run: Run, opened: bool) -> None:
    source = """
import sys
from pyverbs.device import Context
context = Context(name="soft1") if sys.argv[1] == "True" else None
print([open(f"/sys/class/infiniband/soft1/ports/1/{name}").read() for name in ("state", "phys_state")])
"""
    faults.register("a")
    faults.down("a/soft1")
    assert "1: DOWN" in run(sys.executable, "-c", source, str(opened))
    faults.up("a/soft1")
    assert "4: ACTIVE" in run(sys.executable, "-c", source, str(opened))


def answers(text: str) -> dict[str, str]:
    """By call."""
    return dict(line.split(": ", 1) for line in text.splitlines())


@pytest.mark.parametrize("path", FILES)
def test_all_functions_agree(run: Run, files: Path, path: str) -> None:
    """stat, its 64-bit twin, statx and those of older glibcs; open, fopen and what fortified programs call."""
    said = answers(run(files, path))
    kind = FILES[path]
    followed = {
        line for call, line in said.items() if "stat" in call and "NOFOLLOW" not in call and "l" not in call
    }
    as_link = {
        line
        for call, line in said.items()
        if "lstat" in call or "lxstat" in call or ("stat" in call and "NOFOLLOW" in call)
    }
    assert len(followed) == 1 and len(as_link) == 1
    modes = {"directory": "mode=40755", "device": "mode=20666", "file": "mode=100444", "link": "mode=40755"}
    assert modes[kind] in followed.pop()
    assert ("mode=120777" if kind == "link" else modes[kind]) in as_link.pop()
    real = {line for call, line in said.items() if "realpath" in call or "canonicalize" in call}
    assert len(real) == 1 and " /" in real.pop()
    targets = {line for call, line in said.items() if "readlink" in call and ", 5)" not in call}
    assert len(targets) == 1 and targets.pop().startswith("ok .." if kind == "link" else "EINVAL")
    writable = {line for call, line in said.items() if call.startswith(("euidaccess", "eaccess"))}
    assert writable == {"ok" if kind == "device" else "EACCES"}
    opened = {line for call, line in said.items() if call.endswith((", O_RDONLY)", ', "r")'))}
    assert len(opened) == 1
    if kind in ("file", "device"):
        assert opened.pop().startswith('ok "')
        assert said["open(path, O_RDONLY | O_CLOEXEC)"].startswith("ok cloexec")
        assert said["open(path, O_WRONLY)"].startswith("ok" if kind == "device" else "EACCES")
        assert said["opendir(path)"] == "ENOTDIR"
    else:
        assert said["opendir(path)"] == "ok" and said["readdir"] == said["readdir64"]
        assert said["readdir"].startswith("./4 ../4 ")


def test_no_other_path_is_touched(run: Run, files: Path, tmp_path: Path) -> None:
    """What all functions say, and errno, is what they say without the library."""
    (tmp_path / "file").write_text("some text\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("gone")
    paths = [
        *(str(tmp_path / name) for name in ("file", "folder", "link", "dangling", "gone", "file/below")),
        "/dev/null", "/dev/full", "/sys/class", "/sys/class/net", "/sys/devices", "/sys/class/infiniband_verbs",
        "/dev/infinibandx", "/dev/infiniband/uverbs0", "/sys/class/infiniband/mlx5_0/device", "relative", "", "/",
        f"/{'x' * 300}", f"/sys/class/infiniband/{'x' * 5000}",
    ]  # fmt: skip
    for path in paths:
        assert run(files, path) == run(files, path, preload=False), path


def test_modes_of_new_files(run: Run, tmp_path: Path) -> None:
    """open()'s third argument arrives."""
    source = "import os, sys; os.umask(0); os.close(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o624))"
    run(sys.executable, "-c", source, str(tmp_path / "new"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o624


@pytest.mark.parametrize("softrnic", [None, "0"])
def test_nothing_without_devices(run: Run, files: Path, softrnic: str | None) -> None:
    for path in [*FILES, "/dev/infiniband", "/sys/class/infiniband"]:
        assert run(files, path, softrnic=softrnic) == run(files, path, preload=False), path


def test_from_handlers_threads_and_children(run: Run, files: Path) -> None:
    assert run(files, "--restless", "/sys/class/infiniband/soft0") == "right\n"


def test_beside_the_systems_devices(run: Run) -> None:
    """What the system has in a directory is listed too, once, and stays what it is."""
    shell = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    if subprocess.run([*shell, "mount -t tmpfs none /dev"], capture_output=True).returncode:
        pytest.skip("no mount namespaces without privileges here")
    prepare = "mount -t tmpfs none /dev; mkdir -m 711 /dev/infiniband; cd /dev/infiniband; touch uverbs0 uverbs_soft1; "
    preloaded = f"export LD_PRELOAD={library_path()}; "
    assert run(*shell, prepare + preloaded + "ls", preload=False).split() == ["uverbs0", "uverbs_soft1"]
    listed = run(*shell, prepare + preloaded + "ls /dev/infiniband; stat -c %a:%s /dev/infiniband/*; "
                 "stat -c %a /dev/infiniband", preload=False)  # fmt: skip
    names = listed.split()
    assert names[:3] == ["uverbs0", "uverbs_soft0", "uverbs_soft1"]
    assert names[-1] == "711"


def test_paths_in_verbs(run: Run) -> None:
    """What a program takes from struct ibv_device leads to these files, and elsewhere to nothing of the system's."""
    source = """
import ctypes, sys
from shiftverbs import softrnic
softrnic.enable()
class Device(ctypes.Structure):
    _fields_ = [("ops", ctypes.c_void_p * 2), ("type", ctypes.c_int * 2), ("name", ctypes.c_char * 64),
                ("dev_name", ctypes.c_char * 64), ("paths", ctypes.c_char * 256 * 2)]
verbs = ctypes.CDLL(None)
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.POINTER(Device))
device = verbs.ibv_get_device_list(None)[0].contents
print(device.name.decode(), device.dev_name.decode(), device.paths[1].value.decode())
"""
    assert run(sys.executable, "-c", source) == "soft0 uverbs_soft0 /sys/class/infiniband/soft0\n"
    assert run(sys.executable, "-c", source, preload=False).split()[2] == "/nonexistent/softrnic/soft0"


def test_more_lists_than_there_are(run: Run) -> None:
    """Directories that a program forgets to close end in EMFILE; the system's are not concerned."""
    source = """
import errno, os
held = []
try:
    while len(held) < 100:
        held.append(os.scandir("/sys/class/infiniband/soft0"))
        next(held[-1])
except OSError as error:
    assert error.errno == errno.EMFILE, error
assert 8 <= len(held) < 100, len(held)
assert "self" in os.listdir("/proc")
held.clear()
assert "ports" in os.listdir("/sys/class/infiniband/soft0")
"""
    run(sys.executable, "-c", source)
