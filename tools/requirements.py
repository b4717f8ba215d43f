# SPDX-License-Identifier: BSD-3-Clause
"""Print, one per line, what the development environment installs: all that pyproject.toml names.

Standard library only: it runs before anything is installed.
"""

import tomllib
from pathlib import Path


def requirements(pyproject: Path) -> list[str]:
    """Return the build, run-time, optional and development requirements of a pyproject file, sorted."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = table["project"]
    found = set(table["build-system"]["requires"]) | set(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        found.update(extra)
    for group in table["dependency-groups"].values():
        found.update(group)
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(requirements(Path(__file__).resolve().parent.parent / "pyproject.toml")))
