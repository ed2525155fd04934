#!/bin/sh
# Boots a virtual board, as the first process in separate namespaces. Arguments: name, IP address, gateway, MAC address,
# root file system, file with the boot_id, bridge for the network cable, state of the cable (up or down), CPU for the
# emulator.
set -eu
name=$1 address=$2 gateway=$3 card=$4 root=$5 boot_id=$6 bridge=$7 cable=$8 cpu=$9

# The bridge is in the network namespace of the keeper, which has process id 1 outside.
keeper=/proc/1/ns/net
ip link add name eth0 address "$card" type veth peer name port netns "$keeper"
nsenter --net="$keeper" ip link set port master "$bridge" "$cable"
ip link set lo up
ip address add "$address/30" dev eth0
ip link set eth0 up
ip route add default via "$gateway"

cd "$root"
mount -t proc proc proc
echo "$name" >proc/sys/kernel/hostname
mount --bind "$boot_id" proc/sys/kernel/random/boot_id
# Some containers do not allow a separate /sys.
mount -t sysfs -o ro sys sys || :
mount -t tmpfs -o mode=0755,nosuid dev dev
for device in null zero full random urandom tty; do
    : >"dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,gid=5,mode=0620,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o size=256m,mode=1777,nosuid,nodev shm dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr
mount -t tmpfs -o size=64m,mode=0755,nosuid,nodev run run
mount -t tmpfs -o size=256m,mode=1777,nosuid,nodev tmp tmp
mkdir -m 0755 run/sshd

# After this, the board cannot see this machine's files.
pivot_root . old-root
cd /
exec /usr/bin/env -i PATH=/usr/sbin:/usr/bin HOME=/ QEMU_CPU="$cpu" \
    /bin/sh -c 'umount -l /old-root && exec /usr/sbin/init' </dev/null
