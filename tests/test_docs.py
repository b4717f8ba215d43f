# SPDX-License-Identifier: BSD-3-Clause
"""The documents agree with the tree and with each other."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from harness import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MAP = (ROOT / "docs" / "map.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "shiftverbs"
#: A room is a folder of the package. Of the demonstration and the software RNIC others tell the files.
ROOMS = sorted(
    path.relative_to(PACKAGE).as_posix()
    for path in [PACKAGE, *PACKAGE.rglob("*")]
    if (path / "__init__.py").is_file() and path.name not in ("demo", "softrnic")
)


def sources(folder: str) -> list[Path]:
    """The files that someone who reads the map must find there."""
    found = [
        path for suffix in ("py", "pyx", "pxd", "pxi") for path in (PACKAGE / folder).glob(f"*.{suffix}")
    ]
    return [path for path in sorted(found) if path.name not in ("__init__.py", "__main__.py")]


def is_on_the_map(path: Path) -> bool:
    """True if the file's name, or a pattern such as `_nic_*.pxi` that covers it, stands in map.md."""
    for quoted in re.findall(r"`([^`\n]+)`", MAP):
        if any(path.match(word) for word in quoted.split()):
            return True
    return False


@pytest.mark.parametrize("folder", ROOMS)
def test_every_module_is_on_the_map(folder: str) -> None:
    missing = [path.name for path in sources(folder) if not is_on_the_map(path)]
    assert not missing, f"docs/map.md does not mention {missing}"


def test_everything_on_the_map_exists() -> None:
    present = {path.name for path in PACKAGE.rglob("*") if not path.name.endswith(".so")}
    words = {word for quoted in re.findall(r"`([^`\n]+)`", MAP + ARCHITECTURE) for word in quoted.split()}
    named = {word for word in words if re.fullmatch(r"[\w/]+\.(py|pyx|pxd|pxi|c|h)", word)}
    assert named
    gone = {
        word
        for word in named
        if not ((PACKAGE / word).exists() if "/" in word else word in present) and not (ROOT / word).exists()
    }
    assert not gone, f"the documents mention {gone}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    assert [path.name for path in sorted(folder.glob("[0-9]*.md")) if path.name not in index] == []


def test_every_source_names_its_license() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    paths = [ROOT / name for name in tracked] or [*PACKAGE.rglob("*"), *(ROOT / "tests").rglob("*")]
    code = [
        path for path in paths if path.suffix in (".py", ".pyx", ".pxd", ".pxi", ".pyi", ".c", ".h", ".sh")
    ]
    lacking = [
        path.name for path in code if "SPDX-License-Identifier: BSD-3-Clause" not in path.read_text()[:200]
    ]
    assert code and not lacking


def test_make_help_lists_the_targets() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    for target in set(phony.group(1).split()) - {"help"}:
        assert re.search(rf"\b{target}\b", shown), f"make help does not mention {target}"


def test_one_version() -> None:
    import shiftverbs

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert shiftverbs.__version__ == project["version"]
