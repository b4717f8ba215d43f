# SPDX-License-Identifier: BSD-3-Clause
"""Write the diagrams of docs/protocol.md anew: `python tools/protocol_diagrams.py`. A test compares them.

Each stands between two comments, and comes from the tables that the code itself runs by.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shiftverbs import state_machine  # noqa: E402  (found through the line above)
from shiftverbs.protocol import tables  # noqa: E402

PAGE = ROOT / "docs" / "protocol.md"
#: What is in the comments, and where the diagrams come from.
DIAGRAMS: dict[str, Callable[[], str]] = {"state": state_machine.mermaid, "procedure": tables.mermaid}


def filled(text: str, name: str) -> str:
    """Return the page with that diagram as the code has it now. Raises ValueError where it has no place for it."""
    begin, end = f"<!-- {name} diagram: generated, do not edit -->\n", f"<!-- end of the {name} diagram -->"
    blocks = [block.strip() for block in DIAGRAMS[name]().split("\n\n") if block.strip()]
    drawn = "\n\n".join(f"```mermaid\n{block}\n```" for block in blocks)
    first = text.index(begin) + len(begin)
    return f"{text[:first]}{drawn}\n{text[text.index(end, first) :]}"


def main() -> None:
    """Fill the page."""
    text = PAGE.read_text()
    for name in DIAGRAMS:
        text = filled(text, name)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
