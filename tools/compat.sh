#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# The tests that pyverbs' release could matter to, on a newer one than Debian's: built from PyPI's source distribution
# with its own libraries, once, in a cache outside the checkout.
# usage: compat.sh VENV [pytest argument ...]
set -euo pipefail

# It carries all of rdma-core, and builds with this Cython (newer ones find a syntax error in it).
release=59.0
hash=sha256:b30d56bb620b3d3b4301876f9a04c964be1c76cc6553a451e1465f1c6ac9f20e
cython=3.0.12

cd "$(dirname "$0")/.."
bin=$(realpath "$1")/bin
shift
tools/apt_packages.sh gcc libc6-dev python3-dev pkg-config libnl-3-dev libnl-route-3-dev

cache=${XDG_CACHE_HOME:-$HOME/.cache}/shiftverbs/pyverbs
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
built=$cache/$release-cython-$cython
if [[ ! -e $built/ready ]]; then
    echo "compat: building pyverbs $release in $built"
    # What an interrupted build left is gone on with.
    mkdir -p "$built"
    /usr/bin/python3 -m venv "$built/venv"
    "$built/venv/bin/pip" install --quiet --disable-pip-version-check "cython==$cython"
    if [[ ! -d $built/pyverbs-$release ]]; then
        "$bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary pyverbs --require-hashes \
            --dest "$built" --requirement <(echo "pyverbs==$release --hash=$hash")
        mkdir -p "$built/unpacked"
        tar -xf "$built/pyverbs-$release.tar.gz" -C "$built/unpacked"
        mv "$built/unpacked/pyverbs-$release" "$built"
    fi
    if ! (
        PATH=$built/venv/bin:$bin:$PATH
        cmake -G Ninja -S "$built/pyverbs-$release/rdma-core" -B "$built/build" -DCMAKE_BUILD_TYPE=Release \
            -DNO_MAN_PAGES=1 -DNO_PYVERBS=0 "-DPYTHON_EXECUTABLE=$built/venv/bin/python"
        ninja -C "$built/build" pyverbs/all
    ) >"$built/log" 2>&1; then
        tail -n 30 "$built/log" >&2
        echo "compat: pyverbs $release does not build, see $built/log" >&2
        exit 1
    fi
    touch "$built/ready"
fi
flock -u 9

export PYTHONPATH=$built/build/python LD_LIBRARY_PATH=$built/build/lib
export RDMA_CORE_TESTS=$built/pyverbs-$release/rdma-core/tests
found=$("$bin/python" -c 'import pyverbs.device; print(pyverbs.__file__)')
if [[ $found != "$built"/* ]]; then
    echo "compat: $found is imported instead of $built" >&2
    exit 1
fi
# Two kinds of test choose by themselves what is imported, and are about our C alone: sanitizers, counted instructions.
"$bin/python" -m pytest -p no:cacheprovider tests/core tests/driver tests/mirror tests/failover tests/differential/test_same_behaviour.py \
    --ignore=tests/core/test_sanitized.py --ignore=tests/core/test_instructions.py "$@"
"$bin/python" tests/conformance/compare.py
