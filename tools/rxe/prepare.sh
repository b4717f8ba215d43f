#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# Make ready what a guest with the kernel's soft-RoCE needs: QEMU, Debian's stock kernel package (unpacked, not
# installed) and a small initrd, in a cache outside the checkout. Prints the kernel's directory on standard output.
#
# Exit status: 0 ready; 77 cannot be had here (the reason is on standard error); anything else is a bug.
set -euo pipefail

here=$(dirname "$(readlink -f "$0")")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/shiftverbs/rxe
packages=(qemu-system-x86 seabios busybox-static cpio kmod xz-utils zstd
    python3-pyverbs ibverbs-providers rdma-core ibverbs-utils iproute2 tshark python3-scapy)

unavailable() {
    echo "$*" >&2
    exit 77
}

[[ $(uname -sm) == "Linux x86_64" ]] || unavailable "the guest's kernel package is for x86-64, this is $(uname -sm)"
command -v dpkg >/dev/null || unavailable "this is not a Debian system"
"$here/../apt_packages.sh" "${packages[@]}" >&2 || unavailable "some of these packages cannot be installed: ${packages[*]}"

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
# What made it is part of the name: a changed recipe makes another one.
recipe=$(cat "$0" "$here/initrd-init.sh" | sha256sum | cut -c1-12)
kernel=$cache/kernel-$recipe
if [[ ! -e $kernel/ready ]]; then
    rm -rf "$kernel" "$kernel.new"
    mkdir -p "$kernel.new/root" "$kernel.new/deb"
    package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-/{print $2; exit}')
    [[ -n $package ]] || unavailable "apt knows no linux-image-amd64"
    # apt drops its privileges for downloads and cannot write everywhere; the file arrives all the same.
    (cd "$kernel.new/deb" && apt-get download -q "$package") >&2 ||
        unavailable "the kernel package $package cannot be downloaded"
    dpkg -x "$kernel.new/deb/"*.deb "$kernel.new/root"
    rm -r "$kernel.new/deb"

    modules=$kernel.new/root/usr/lib/modules
    [[ -d $modules ]] || modules=$kernel.new/root/lib/modules
    version=$(ls "$modules")
    base=$(dirname "$(dirname "$modules")")
    depmod -b "$base" "$version"
    initrd=$kernel.new/initrd
    mkdir -p "$initrd"/{bin,dev,proc,sys,m,lower,up,new}
    cp /bin/busybox "$initrd/bin/busybox"
    number=10
    for module in virtio_pci 9pnet_virtio 9p overlay; do
        modprobe -d "$base" -S "$version" --show-depends "$module" 2>/dev/null || true
    done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' | while read -r file; do
        copy=$initrd/m/$number-$(basename "$file")
        number=$((number + 1))
        cp "$file" "$copy"
        case $copy in
        *.xz) xz -d "$copy" ;;
        *.zst) zstd -q -d --rm "$copy" ;;
        esac
    done
    install -m 755 "$here/initrd-init.sh" "$initrd/init"
    (cd "$initrd" && find . | cpio -o -H newc --quiet | gzip -1) >"$kernel.new/initrd.gz"
    rm -r "$initrd"
    ln -s "${modules#"$kernel.new"/}" "$kernel.new/modules"
    ln -s "root/boot/vmlinuz-$version" "$kernel.new/vmlinuz"
    echo "$version" >"$kernel.new/ready"
    mv "$kernel.new" "$kernel"
fi
echo "$kernel"
