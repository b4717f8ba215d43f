#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# Create or update the development environment: the system interpreter's packages (Debian's pyverbs), what
# pyproject.toml names, and this checkout on its path.
# usage: make_venv.sh PYTHON VENV
set -euo pipefail

python=$1
venv=$2
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$venv"
exec 9>"$venv/.lock"
flock 9

if [[ ! -x "$venv/bin/pip" ]]; then
    "$python" -m venv --system-site-packages "$venv"
fi
requirements=$("$venv/bin/python" "$root/tools/requirements.py")
mapfile -t wanted <<<"$requirements"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"

# The checkout itself instead of an installed copy: edits count at once, and `shiftverbs` works anywhere.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$root" >"$site/shiftverbs-checkout.pth"
cat >"$venv/bin/shiftverbs.new" <<SCRIPT
#!$(realpath "$venv")/bin/python
import sys

from shiftverbs.commands.cli import main

sys.exit(main())
SCRIPT
chmod +x "$venv/bin/shiftverbs.new"
mv -f "$venv/bin/shiftverbs.new" "$venv/bin/shiftverbs"
