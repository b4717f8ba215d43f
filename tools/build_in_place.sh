#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# Build the extensions and the software RNIC and put them into the source tree. With sanitizers, which only a process
# prepared for them can load, they go into a copy of the package instead: BUILD_DIR/tree.
# usage: build_in_place.sh VENV BUILD_DIR [SANITIZERS]
#
# Safe against concurrent runs (one lock per build directory), and against running programs: a library is
# replaced by rename, so whoever has the old one mapped keeps it.
set -euo pipefail

venv=$(realpath "$1")
build=$2
sanitize=${3:-}
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
mkdir -p "$build"

exec 9>"$build/.lock"
flock 9

export PATH="$venv/bin:$PATH"
if ! grep -q '^WERROR:BOOL=ON' "$build/CMakeCache.txt" 2>/dev/null; then
    cmake -S . -B "$build" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DPython_EXECUTABLE="$venv/bin/python" -DSANITIZE="$sanitize" -DWERROR=ON
fi
# Quiet when nothing is to do; all of a failing compiler's output otherwise. What can be built is put in place
# even if something else fails.
status=0
cmake --build "$build" -- --quiet -k 0 || status=$?

target=.
if [[ -n "$sanitize" ]]; then
    target="$build/tree"
    mkdir -p "$target"
    git ls-files -z --cached --others --exclude-standard -- 'shiftverbs/*.py' | xargs -0 cp --parents -u -t "$target"
fi

place() {
    local built=$1 placed=$target/$2
    [[ -f "$built" ]] || return 0
    if ! cmp -s "$built" "$placed"; then
        cp "$built" "$placed.new.$$"
        mv -f "$placed.new.$$" "$placed"
        echo "built ${placed#./}"
    fi
}
for built in "$build"/_*.so; do
    place "$built" "shiftverbs/$(basename "$built")"
done
place "$build/libsoftrnic.so" shiftverbs/softrnic/libsoftrnic.so
exit "$status"
