# SPDX-License-Identifier: BSD-3-Clause
"""A hook of mkdocs and an extension of griffe: what pages take from the code itself.

`<!-- variables of FILE -->` in a page becomes the table of VARIABLES in shiftverbs/FILE, the one that is read;
`<!-- help of ARGUMENTS -->` what `python -m ARGUMENTS --help` prints.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
_VARIABLES = re.compile(r"^<!-- variables of (\S+) -->$", re.MULTILINE)
_HELP = re.compile(r"^<!-- help of (.+) -->$", re.MULTILINE)


class PublicParameters(griffe.Extension):
    """Leave parameters out of signatures that are ours alone: a name with an underscore is bound early, not passed."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """griffe's event: a function was read."""
        for parameter in [each for each in func.parameters if each.name.startswith("_")]:
            del func.parameters[parameter.name]


def _default(module: dict[str, Any], variable: Any) -> str:
    """What holds where the variable is not set."""
    if hasattr(variable, "default"):
        return str(variable.default)
    value = getattr(module["Config"](), variable.field)
    if value is None or value == ():
        return "not set"
    return f"`{int(value) if isinstance(value, bool) else value}`"


def table(file: str) -> str:
    """The variables of one file as a Markdown table. file: below shiftverbs, standard library only."""
    module = runpy.run_path(str(ROOT / "shiftverbs" / file), run_name="shiftverbs_variables")
    lines = ["| variable | value | default | meaning |", "|---|---|---|---|"]
    for name, variable in module["VARIABLES"].items():
        # An anchor for each, so that pages and people can point at it.
        cells = [
            f'<span id="{name}"></span>`{name}`',
            variable.form,
            _default(module, variable),
            variable.meaning,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def usage(arguments: str) -> str:
    """What a command line of ours says of itself, as a block. arguments: behind `python -m`."""
    command = [sys.executable, "-m", *arguments.split(), "--help"]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SHIFTVERBS", "SOFTRNIC"))}
    done = subprocess.run(
        command, cwd=ROOT, env={**env, "COLUMNS": "100"}, capture_output=True, text=True, check=True
    )
    return f"```text\n{done.stdout}```"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs' event: a page's Markdown before it is rendered. Returns it with these in place."""
    return _HELP.sub(lambda place: usage(place[1]), _VARIABLES.sub(lambda place: table(place[1]), markdown))
