#!/bin/busybox sh
# SPDX-License-Identifier: BSD-3-Clause
# First program in the guest: put a writable overlay over the host's file system, and go there.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /m/*.ko; do
    insmod "$module" || echo "initrd: $module cannot be loaded"
done
options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o ro,$options,cache=loose hostroot /lower || poweroff -f
mount -t tmpfs -o size=2g tmpfs /up
mkdir /up/upper /up/work
mount -t overlay -o lowerdir=/lower,upperdir=/up/upper,workdir=/up/work overlay /new || poweroff -f
for each in proc sys dev; do mkdir -p /new/$each; done
mount -t proc proc /new/proc
mount -t sysfs sys /new/sys
mount -t devtmpfs dev /new/dev
mkdir -p /new/dev/shm /new/dev/pts
mount -t tmpfs tmpfs /new/dev/shm
mount -t devpts devpts /new/dev/pts
mount -t tmpfs tmpfs /new/run
mkdir -p /new/run/lock /new/usr/lib/modules /new/out
mount -t 9p -o ro,$options kmods /new/usr/lib/modules
mount -t 9p -o rw,$options,cache=none out /new/out
umount /proc
umount /sys
exec switch_root /new /bin/bash /out/init.sh
