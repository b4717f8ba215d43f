# SPDX-License-Identifier: BSD-3-Clause
"""The wheel for the Python that runs this, built and installed as a user would, outside the checkout.

`make test-debian` does the same with the Python of another Debian.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from harness import ROOT, EtcdServer

# A wheel is compiled and installed before the first test here: minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*args: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command, return its output, fail with all of it."""
    result = subprocess.run(
        [str(a) for a in args], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert result.returncode == 0, f"{args} ended with {result.returncode}:\n{result.stdout}"
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel built from that (not from the checkout)."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment: the system's packages and the wheel, none of the checkout."""
    venv = tmp_path_factory.mktemp("venv")
    run("/usr/bin/python3", "-m", "venv", "--system-site-packages", venv, cwd=venv)
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"{built[1]}[demo]", cwd=venv)
    return python


def clean_env() -> dict[str, str]:
    """This environment without anything that leads to the checkout or configures us."""
    dropped = ("SOFTRNIC", "SHIFTVERBS", "PYTHON", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)}


def test_contents(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux_" in wheel.name, "for the Python that runs this"
    names = zipfile.ZipFile(wheel).namelist()
    assert [n for n in names if n.startswith("shiftverbs/_core.") and n.endswith(".so")]
    assert [n for n in names if n.startswith("shiftverbs/_nic.") and n.endswith(".so")]
    assert "shiftverbs/softrnic/libsoftrnic.so" in names
    assert "shiftverbs/__init__.py" in names
    assert not [
        n for n in names if n.endswith((".c", ".h", ".pyx")) or n.startswith(("tests/", "benchmarks/"))
    ]
    with tarfile.open(sdist) as archive:
        sources = [name.partition("/")[2] for name in archive.getnames()]
    in_the_tree = [*ROOT.glob("examples/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "mkdocs.yml"]
    assert {path.relative_to(ROOT).as_posix() for path in in_the_tree} <= set(sources)
    assert {"CMakeLists.txt", "LICENSE", "README.md", "shiftverbs/_core.pyx", "tests/conftest.py"} <= set(
        sources
    )
    assert not [n for n in sources if n.endswith(".so")]


def test_installed_wheel_imports(installed: Path, tmp_path: Path) -> None:
    source = (
        "import importlib.metadata, shiftverbs, shiftverbs._core, shiftverbs._nic, shiftverbs.qp\n"
        "print(shiftverbs.__file__); print(importlib.metadata.version('shiftverbs'))"
    )
    path, version = run(installed, "-c", source, cwd=tmp_path, env=clean_env()).splitlines()
    assert Path(path).is_relative_to(installed.parent.parent)
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_installed_command_line(installed: Path, tmp_path: Path) -> None:
    assert "demo" in run(installed.parent / "shiftverbs", "--help", cwd=tmp_path, env=clean_env())
    env = clean_env() | {"SOFTRNIC_DIR": str(tmp_path / "nic")}
    run(installed, "-m", "shiftverbs.softrnic", "list", cwd=tmp_path, env=env)


def test_doctor_of_the_installed_wheel(
    installed: Path, tmp_path: Path, shared_etcd: EtcdServer, job: str
) -> None:
    env = clean_env() | {
        "SOFTRNIC": "1", "SOFTRNIC_DIR": str(tmp_path / "nic"),
        "SHIFTVERBS_ETCD": shared_etcd.endpoint, "SHIFTVERBS_JOB": job,
    }  # fmt: skip
    said = run(installed.parent / "shiftverbs", "doctor", "--json", cwd=tmp_path, env=env)
    found = json.loads(said[said.index("{") :])
    assert found["ok"], found
    assert "traffic soft0 to soft1 and back" in {check["name"] for check in found["checks"]}


def test_failover_from_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run(
        *(
            installed.parent / "shiftverbs",
            "demo",
            "--quick",
            "--traffic",
            "send",
            "--fault",
            "initiator_port",
        ),
        *("--json", report),
        cwd=tmp_path,
        env=clean_env(),
    )
    (scenario,) = json.loads(report.read_text())["scenarios"]
    assert scenario["ok"] and scenario["messages"] > 0
    assert scenario["states"] == ["DEFAULT", "FALLBACK", "WAIT_SIGNALED", "WAIT_DRAINED", "DEFAULT"]
