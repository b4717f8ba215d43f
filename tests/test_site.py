# SPDX-License-Identifier: BSD-3-Clause
"""The site that `make docs` builds: no warnings, every link right, nothing loaded from elsewhere, nothing left out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from harness import ROOT

VARIABLE = re.compile(r"\b(?:SHIFTVERBS|SOFTRNIC)(?:_[A-Z]+)*\b")
#: Where Markdown of other readers would begin a list, a table or a fence, and Python-Markdown saw none.
NOT_RENDERED = re.compile(r"^(?:[-*] |\d+\. |\||```|:param|<!-- (?:variables|help) of)", re.MULTILINE)


class Page(HTMLParser):
    """What the tests look at of a page: its anchors, links, what it loads, its paragraphs, its tables' cells."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.paragraphs: list[str] = []
        self.cells: list[str] = []
        self._inside: list[list[str]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe") and "src" in given:
            self.loads.append(given["src"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given["href"])
        elif tag in ("p", "td"):
            self._inside = [self.paragraphs if tag == "p" else self.cells]
            self._inside[0].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "td"):
            self._inside = []

    def handle_data(self, data: str) -> None:
        for kind in self._inside:
            kind[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages, built as `make docs` builds them, but into a directory of our own."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 30
    return pages


def is_local(link: str) -> bool:
    parts = urlsplit(link)
    return not parts.scheme and not parts.netloc


@pytest.mark.slow
def test_links_and_anchors_are_there(site: dict[Path, Page]) -> None:
    wrong = []
    for path, page in site.items():
        for link in page.links + page.loads:
            if not is_local(link):
                continue
            name, anchor = urldefrag(link)
            target = (path.parent / unquote(urlsplit(name).path)).resolve() if name else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                wrong.append(f"{path.name}: {link}")
            elif anchor and target in site and unquote(anchor) not in site[target].anchors:
                wrong.append(f"{path.name}: {link} (no such anchor)")
    assert wrong == []


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Page]) -> None:
    assert [load for page in site.values() for load in page.loads if not is_local(load)] == []


def test_all_markup_is_rendered(site: dict[Path, Page]) -> None:
    """GitHub's Markdown sees a list behind a line of text, Python-Markdown wants an empty line between."""
    left = [text for page in site.values() for text in page.paragraphs if NOT_RENDERED.search(text)]
    assert left == []


def read_by_the_code() -> set[str]:
    """The variables that the package's sources name in quotes, which is how a variable is read."""
    found: set[str] = set()
    for path in (ROOT / "shiftverbs").rglob("*"):
        if path.suffix in (".py", ".pyx", ".pxi", ".c", ".h"):
            found |= {
                quoted for quoted in re.findall(r'"(\w+)"', path.read_text()) if VARIABLE.fullmatch(quoted)
            }
    return found - {"SHIFTVERBS"}


def test_the_reference_lists_every_variable_that_is_read(site: dict[Path, Page]) -> None:
    page = next(page for path, page in site.items() if path.name == "environment.html")
    listed = {cell for cell in page.cells if VARIABLE.fullmatch(cell)}
    assert listed == read_by_the_code()
    assert listed <= page.anchors


def test_the_reference_has_every_event_and_command(site: dict[Path, Page]) -> None:
    from shiftverbs import observe
    from shiftverbs.commands import cli

    pages = {path.relative_to(path.parents[1]).as_posix(): page for path, page in site.items()}
    events = {name for name in observe.__all__ if name != "publish"}
    anchors = pages["reference/observe.html"].anchors
    assert {f"shiftverbs.observe.{name}" for name in events} <= anchors
    commands = set(re.findall(r"^    (\w+) ", cli._parser().format_help(), re.MULTILINE))
    assert commands and commands <= pages["reference/command_line.html"].anchors


def test_every_variable_that_a_page_names_exists() -> None:
    """In docs and README; what only tests read (SHIFTVERBS_MODEL_…) stands in testing.md."""
    known = read_by_the_code()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if page.name != "testing.md":
            named = set(VARIABLE.findall(page.read_text())) - {"SHIFTVERBS", "SOFTRNIC"}
            assert named <= known, f"{page.name} names {named - known}"


def test_the_readme_has_no_link_that_a_package_index_cannot_follow() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if is_local(link) and not link.startswith("#")] == []
