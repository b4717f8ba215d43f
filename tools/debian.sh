#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# Run make in a bare Debian of another release: debootstrap's smallest system with git, make and ca-certificates, so
# that all else is set up by the Makefile, as on a user's machine. The bare system is kept in
# $XDG_CACHE_HOME/shiftverbs/debian; each run works on a copy of it (kept as RELEASE.set-up for the next, so packages
# are fetched once; REFRESH=1 begins from the bare one).
# DEBIAN_ARCHIVE=URL: another archive than debootstrap's own choice.
# usage: debian.sh RELEASE COMMAND...       e.g. debian.sh trixie make demo
# Exit status: the command's; 3 if the system could not be made here (not root, no debootstrap, no archive).
set -euo pipefail

release=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/shiftverbs/debian
bare=$cache/$release
system=$cache/$release.set-up

if [[ ! $release =~ ^[a-z]+$ ]]; then
    echo "debian: not a name of a Debian release: $release" >&2
    exit 2
fi
if ((EUID != 0)); then
    echo "debian: a chroot needs root" >&2
    exit 3
fi
if ! unshare --mount --propagation private true; then
    echo "debian: this machine allows no mount namespace" >&2
    exit 3
fi
"$root/tools/apt_packages.sh" debootstrap || exit 3

mkdir -p "$cache"
exec 9>"$cache/$release.lock"
flock 9
if [[ ! -e $bare/.ready ]]; then
    echo "debian: making a bare $release in $bare"
    rm -rf "$bare"
    if ! debootstrap --variant=minbase --include=git,make,ca-certificates \
        "$release" "$bare" ${DEBIAN_ARCHIVE:+"$DEBIAN_ARCHIVE"} >"$cache/$release.log" 2>&1; then
        tail -n 20 "$cache/$release.log" >&2
        exit 3
    fi
    touch "$bare/.ready"
fi
if [[ -n ${REFRESH:-} || ! -d $system ]]; then
    rm -rf "$system" "$system.new"
    cp -a "$bare" "$system.new"
    mv "$system.new" "$system"
fi

# What the network around here asks for is the host's, as the resolver is: certificates, an index of one's own.
cp /etc/resolv.conf "$system/etc/resolv.conf"
cp /etc/ssl/certs/ca-certificates.crt "$system/etc/ssl/certs/ca-certificates.crt"
[[ ! -e /etc/pip.conf ]] || cp /etc/pip.conf "$system/etc/pip.conf"
# A snapshot of an archive may be older than its promise; the signature is checked all the same.
echo 'Acquire::Check-Valid-Until "false";' >"$system/etc/apt/apt.conf.d/90shiftverbs"

# The tree as it is here, uncommitted files too, in a repository of its own as a clone would be; what was built there
# before stays, as in any checkout.
checkout=$system/root/shiftverbs
mkdir -p "$checkout"
git -C "$root" ls-files -z --cached --others --exclude-standard |
    (cd "$root" && xargs -0 ls -d 2>/dev/null) >"$cache/$release.files"
if [[ -d $checkout/.git ]]; then
    (cd "$checkout" && git ls-files -z | xargs -0 -r rm -f)
fi
tar -C "$root" -cf - -T "$cache/$release.files" | tar -C "$checkout" -xf -
git -C "$checkout" init -q
git -C "$checkout" add -A

# A mount namespace of its own: nothing stays mounted, however this ends.
exec unshare --mount --propagation private bash -c '
    system=$1
    shift
    for directory in proc sys dev; do mount --rbind "/$directory" "$system/$directory"; done
    exec env -i HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-60}" \
        PYTEST_ARGS="${PYTEST_ARGS:-}" chroot "$system" bash -c "cd /root/shiftverbs && exec \"\$@\"" - "$@"
' - "$system" "$@"
