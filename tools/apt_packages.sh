#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# Make sure the Debian packages named as arguments are installed: install what is missing where root or a
# password-less sudo allows it, else say which ones are needed and fail.
set -euo pipefail

if ! command -v dpkg-query >/dev/null; then
    echo "setup: this is not a Debian system; install the equivalents of: $*" >&2
    exit 0
fi

missing=()
for package in "$@"; do
    # shellcheck disable=SC2016  # the format is dpkg's, not the shell's
    if [[ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]]; then
        missing+=("$package")
    fi
done
if ((${#missing[@]} == 0)); then
    exit 0
fi

as_root=()
if ((EUID != 0)); then
    if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
        echo "setup: these packages are missing, and neither root nor a password-less sudo is available." >&2
        echo "setup: run as root:  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo -n env)
else
    as_root=(env)
fi
echo "setup: installing ${missing[*]}"
"${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get update -q
"${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
