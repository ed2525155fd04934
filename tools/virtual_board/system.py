"""A virtual board that is a whole machine: an aarch64 kernel, disk and network card of its own, emulated by qemu.

What the cheaper boards cannot do, this one does: it boots and really reboots, its wall clock can be set, it has a
``boot_id``, an uptime, a memory and a Cortex-A53 of its own, and a power cut takes what was not on its disk yet.
It is up to three times slower than a program under qemu-user.

Everything comes from Debian's packages, unpacked into a cache: nothing is installed, no firmware is needed, and qemu
runs with its own libraries, whatever the host's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_interface
from pathlib import Path

from hil.errors import StorageError, UsageError
from tools.virtual_board.packages import Apt, host_arch, unpack
from tools.virtual_board.places import made
from tools.virtual_board.rootfs import cached, scratch_for
from tools.virtual_board.system_initrd import in_load_order, initrd

# Never "max": what it emulates on top (pointer authentication) makes the boot five times slower.
_CPU = "cortex-a53"
_QEMU = "qemu-system-aarch64"
_QEMU_PACKAGE = "qemu-system-arm"
_LOADER = "loader"
_KERNEL = "linux-image-cloud-arm64"
# ext4 is in the kernel itself. sch_netem is here for `tc qdisc add dev eth0 root netem ...` on the board.
_MODULES = ("virtio_mmio", "virtio_blk", "virtio_net", "virtio_rng", "virtio_console", "sch_netem")
# Seconds that one of the host's tools may take.
_LIMIT = 120.0
# Tools that an ordinary user's PATH leaves out.
_SBIN = ":/usr/sbin:/sbin"


@dataclass(frozen=True)
class SystemImage:
    """What all machines share."""

    kernel: Path  # the kernel's file
    modules: tuple[Path, ...]  # the drivers, in the order to load them
    qemu: tuple[str, ...]  # how to call qemu-system-aarch64; its arguments follow


@dataclass(frozen=True)
class Machine:
    """One machine."""

    # where its ``disk``, ``initrd``, ``console.log`` and ``serial`` line lie; the line is a socket, whose name has to
    # be short.
    folder: Path
    name: str  # its host name
    address: str  # its IP address with the network's width, "10.0.0.2/24"
    tap: str  # the tap device of the host that its network card is plugged into
    gateway: str = ""  # the address of the way out, or ""
    memory_mb: int = 512  # its memory, in MB; 128 boots to sshd and leaves about 60 of them
    cores: int = 2  # how many Cortex-A53 it has

    @property
    def disk(self) -> Path:
        """The file that is its disk."""
        return self.folder / "disk"

    @property
    def initrd(self) -> Path:
        """What its kernel boots with."""
        return self.folder / "initrd"

    @property
    def console(self) -> Path:
        """What its kernel and init print."""
        return self.folder / "console.log"

    @property
    def serial(self) -> Path:
        """The socket that is the host's end of its serial line: see :mod:`tools.virtual_board.system_serial`."""
        return self.folder / "serial"


def prepare() -> SystemImage:
    """Get the kernel, its drivers and an emulator, unless this machine has one: 80 MB in the cache, some 15 s, once.

    Raises:
        UsageError: the machine has no Debian sources.
        PackagesUnavailable: a package could not be fetched or unpacked.
        StorageError: the cache cannot be written.
    """
    installed = shutil.which(_QEMU)

    def build(folder: Path) -> None:
        with scratch_for(folder) as scratch:
            _take_kernel(scratch / "board", folder)
            if not installed:
                _take_qemu(scratch / "host", folder)

    folder = cached("system", repr((_KERNEL, _MODULES, not installed)), build)
    qemu = folder / "qemu"
    carried = (str(qemu / _LOADER), "--library-path", str(qemu), str(qemu / _QEMU))
    modules = in_load_order(folder / "modules", _MODULES)
    return SystemImage(folder / "vmlinuz", tuple(modules), (installed,) if installed else carried)


def make_disk(image: SystemImage, machine: Machine, root: Path, *, size_mb: int = 2048) -> None:
    """Make a machine's disk and initrd, while its power is off.

    Args:
        image: what :func:`prepare` made.
        machine: the machine; its folder is made.
        root: what is to be on the disk, with the owners that are seen from here: a root file system whose init is
            busybox's. It is only read.
        size_mb: the disk's size, in MB. It takes up only what is written to it.

    Raises:
        UsageError: a tool is missing.
        StorageError: the disk cannot be made.
    """
    made(machine.folder)
    machine.initrd.write_bytes(initrd(root / "usr/bin/busybox", image.modules))
    machine.disk.unlink(missing_ok=True)
    _run(["mkfs.ext4", "-q", "-E", "root_owner=0:0", "-d", str(root), str(machine.disk), f"{size_mb}M"])


def start(image: SystemImage, machine: Machine) -> list[str]:
    """The command that is the machine with its power on, from now until it ends.

    SIGKILL is a power cut, SIGSTOP and SIGCONT a hang and its end. It boots in seconds, reboots without ending, and
    ends when the machine powers itself off. It belongs into the network namespace where the tap is.
    """
    words = {"name": machine.name, "address": machine.address, "gateway": machine.gateway}
    # A board reboots when its kernel fails.
    kernel = ["console=ttyAMA0", "quiet", "panic=1", *(f"hil.{key}={value}" for key, value in words.items() if value)]
    # The disk does not wait for the host's: qemu's end loses nothing that the machine wrote, only the host's end would.
    return [
        *image.qemu,
        *("-no-user-config", "-nodefaults", "-display", "none", "-monitor", "none"),
        *("-machine", "virt", "-accel", "tcg,thread=multi", "-cpu", _CPU),
        *("-smp", str(machine.cores), "-m", str(machine.memory_mb)),
        *("-kernel", str(image.kernel), "-initrd", str(machine.initrd), "-append", " ".join(kernel)),
        *("-drive", f"file={_escaped(machine.disk)},if=none,id=disk,format=raw,cache=unsafe,discard=unmap"),
        *("-device", "virtio-blk-device,drive=disk"),
        *("-netdev", f"tap,id=net,ifname={machine.tap},script=no,downscript=no"),
        *("-device", f"virtio-net-device,netdev=net,mac={_mac(machine.address)}"),
        *("-device", "virtio-rng-device"),
        *("-chardev", f"socket,id=serial,path={_escaped(machine.serial)},server=on,wait=off"),
        *("-device", "virtio-serial-device", "-device", "virtserialport,chardev=serial"),
        *("-chardev", f"file,id=console,path={_escaped(machine.console)},append=on", "-serial", "chardev:console"),
    ]


def _take_kernel(scratch: Path, folder: Path) -> None:
    apt = Apt(made(scratch), "aarch64")
    apt.update()
    # Alone, for what they depend on is needed where a kernel is installed and not where it is only booted.
    newest = _run(["dpkg-deb", "--field", str(apt.download_alone(_KERNEL)), "Depends"]).split()[0]
    unpacked = made(scratch / "unpacked")
    unpack(apt.download_alone(newest), unpacked)
    (kernel,) = unpacked.glob("boot/vmlinuz-*")
    for module in in_load_order(unpacked / "lib/modules", _MODULES):
        module.rename(made(folder / "modules") / module.name)
    kernel.rename(folder / "vmlinuz")


def _take_qemu(scratch: Path, folder: Path) -> None:
    """The emulator with the libraries that it loads, the loader and the C library among them."""
    apt = Apt(made(scratch), host_arch())
    apt.update()
    unpacked = made(scratch / "unpacked")
    for package in apt.download([_QEMU_PACKAGE]):
        unpack(package, unpacked)
    program = unpacked / "usr/bin" / _QEMU
    loader = next(path for path in unpacked.glob("**/ld-linux*.so.*") if not path.is_symlink())
    places = sorted({str(path.parent) for path in unpacked.glob("**/lib*.so.*")})
    listed = _run([str(loader), "--library-path", ":".join(places), "--list", str(program)])
    libraries = [Path(words[2]) for words in map(str.split, listed.splitlines()) if words[1:2] == ["=>"]]
    for path in [program, *libraries]:
        shutil.copy2(path, made(folder / "qemu") / path.name)
    shutil.copy2(loader, folder / "qemu" / _LOADER)


def _mac(address: str) -> str:
    """A locally administered address, of the machine's IP address."""
    return "02:00:" + ":".join(f"{part:02x}" for part in ip_interface(address).packed)


def _escaped(path: Path) -> str:
    """A path as a value among qemu's options."""
    return str(path).replace(",", ",,")


def _run(command: Sequence[str]) -> str:
    environment = {**os.environ, "LC_ALL": "C", "PATH": os.environ.get("PATH", os.defpath) + _SBIN}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LIMIT)
    except FileNotFoundError:
        raise UsageError(f"virtual boards need {command[0]}", hint="install util-linux, dpkg and e2fsprogs") from None
    if done.returncode:
        raise StorageError(f"{Path(command[0]).name} failed", detail=(done.stderr or done.stdout).strip())
    return done.stdout
