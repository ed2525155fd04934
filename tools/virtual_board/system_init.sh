#!/bin/busybox sh
# Init in the initrd of an emulated virtual board. It loads the drivers, mounts the disk and the other file systems, and
# configures the network from the kernel's command line (hil.name=, hil.address=, hil.gateway=). Then it starts the
# disk's init.
/bin/busybox --install -s /bin
export PATH=/bin

fail() {
    echo "virtual board: $*"
    poweroff -f
}

mkdir -p /proc /dev /root
mount -t proc proc /proc
mount -t devtmpfs dev /dev
for module in /modules/*; do insmod "$module" || fail "cannot load $module"; done
for word in $(cat /proc/cmdline); do
    case $word in
    hil.name=*) name=${word#*=} ;;
    hil.address=*) address=${word#*=} ;;
    hil.gateway=*) gateway=${word#*=} ;;
    esac
done

mount -t ext4 /dev/vda /root || fail 'cannot mount the disk'
cd /root
mkdir -p proc sys dev run tmp
mount -t proc proc proc
mount -t sysfs sys sys
mount -t devtmpfs dev dev
mkdir dev/pts dev/shm
mount -t devpts -o gid=5,mode=0620,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777,nosuid,nodev shm dev/shm
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr
mount -t tmpfs -o mode=0755,nosuid,nodev run run
mount -t tmpfs -o mode=1777,nosuid,nodev tmp tmp
mkdir run/sshd

hostname "$name"
ip link set lo up
ip address add "$address" dev eth0 || fail 'network card not found'
ip link set eth0 up
[ -z "$gateway" ] || ip route add default via "$gateway"

chroot . /usr/bin/busybox sh -s </serial >/dev/null 2>&1 &
exec switch_root . /sbin/init
