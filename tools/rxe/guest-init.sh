# SPDX-License-Identifier: BSD-3-Clause
# Process 1 in the guest: run /out/job.sh, leave its output in /out/job.log and its exit status in /out/job.rc.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8
hostname rxe-guest
ip link set lo up
ulimit -l unlimited
ulimit -n 65536
dmesg -n 5

# A starved emulator can make the kernel misjudge the TSC's rate at boot: its clock then runs many times too fast, and
# every time limit with it. The emulated RTC does not lie: three of its seconds must be about three of ours.
rtc() { cat /sys/class/rtc/rtc0/since_epoch; }
until_rtc() { while [ "$(rtc)" -lt "$1" ]; do sleep 0.05; done; }
if [ -e /sys/class/rtc/rtc0/since_epoch ]; then
    begin=$(($(rtc) + 1))
    until_rtc $begin
    read -r before _ </proc/uptime
    until_rtc $((begin + 3))
    read -r after _ </proc/uptime
    took=$((${after/./} - ${before/./}))
    if [ $took -lt 200 ] || [ $took -gt 450 ]; then
        echo "three seconds took $took/100 s" >/out/bad-clock
        exec /bin/busybox poweroff -f
    fi
fi

bash /out/job.sh >/out/job.log 2>&1
status=$?
dmesg >/out/dmesg.log
echo "$status" >/out/job.rc
sync
exec /bin/busybox poweroff -f
