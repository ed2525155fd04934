"""Run virtual boards as emulated machines: qemu emulates an aarch64 CPU with a kernel, a disk and a network card.

Unlike a board in namespaces, such a board really boots and reboots, and its wall clock can be set. The board has a
separate ``boot_id``, uptime, memory and Cortex-A53. A power cut loses data that was not yet written to the disk.
Programs are up to three times slower than under qemu-user.

All files are from Debian packages, unpacked into a cache. No package is installed and no firmware is needed. qemu runs
with packaged libraries, independent of the host's.
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
from tools.virtual_board.packages import Apt, get_host_arch, unpack
from tools.virtual_board.places import make_private
from tools.virtual_board.rootfs import get_cached, make_scratch
from tools.virtual_board.system_initrd import build_initrd, sort_modules

# Do not use "max": additional features (pointer authentication) make the boot five times slower.
_CPU = "cortex-a53"
_QEMU = "qemu-system-aarch64"
_QEMU_PACKAGE = "qemu-system-arm"
_LOADER = "loader"
_KERNEL = "linux-image-cloud-arm64"
# Drivers to load. ext4 is built into the kernel. sch_netem is for `tc qdisc add dev eth0 root netem ...` on the board.
_MODULES = ("virtio_mmio", "virtio_blk", "virtio_net", "virtio_rng", "virtio_console", "sch_netem")
# Timeout for the host's tools, in seconds.
_LIMIT = 120.0
# Directories that an ordinary user's PATH lacks.
_SBIN = ":/usr/sbin:/sbin"


@dataclass(frozen=True)
class SystemImage:
    """Files that all machines share."""

    kernel: Path  # the kernel's file
    modules: tuple[Path, ...]  # the drivers, in load order
    qemu: tuple[str, ...]  # qemu-system-aarch64 command, without arguments


@dataclass(frozen=True)
class Machine:
    """An emulated machine."""

    # Directory for ``disk``, ``initrd``, ``console.log`` and the ``serial`` socket. Socket paths must be short.
    folder: Path
    name: str  # host name
    address: str  # IP address with the prefix length, "10.0.0.2/24"
    tap: str  # tap device on the host to which the network card is connected
    gateway: str = ""  # default gateway address, or ""
    memory_mb: int = 512  # memory, in MB; with 128, the board boots to sshd and has about 60 free
    cores: int = 2  # Cortex-A53 cores
    icount: bool = False  # whether the clock counts instructions: an instruction takes 1 ns

    @property
    def disk(self) -> Path:
        """The disk image."""
        return self.folder / "disk"

    @property
    def initrd(self) -> Path:
        """The initial RAM disk."""
        return self.folder / "initrd"

    @property
    def console(self) -> Path:
        """Output of the kernel and init."""
        return self.folder / "console.log"

    @property
    def serial(self) -> Path:
        """Socket of the serial line on the host: see :mod:`tools.virtual_board.system_serial`."""
        return self.folder / "serial"


def prepare() -> SystemImage:
    """Fetch the kernel and drivers, and an emulator unless this machine has one.

    The first call takes about 15 s and caches 80 MB.

    Raises:
        UsageError: the machine has no Debian sources.
        PackagesUnavailable: a package could not be fetched or unpacked.
        StorageError: the cache cannot be written.
    """
    installed = shutil.which(_QEMU)

    def build(folder: Path) -> None:
        with make_scratch(folder) as scratch:
            _take_kernel(scratch / "board", folder)
            if not installed:
                _take_qemu(scratch / "host", folder)

    folder = get_cached("system", repr((_KERNEL, _MODULES, not installed)), build)
    qemu = folder / "qemu"
    carried = (str(qemu / _LOADER), "--library-path", str(qemu), str(qemu / _QEMU))
    modules = sort_modules(folder / "modules", _MODULES)
    return SystemImage(folder / "vmlinuz", tuple(modules), (installed,) if installed else carried)


def make_disk(image: SystemImage, machine: Machine, root: Path, *, size_mb: int = 2048) -> None:
    """Create a machine's disk and initrd while the power is off.

    Args:
        image: result of :func:`prepare`.
        machine: the machine. The directory is created.
        root: content of the disk: a root file system with busybox's init. Owners are as this process sees them. The
            content is only read.
        size_mb: the disk's size, in MB. The image is sparse.

    Raises:
        UsageError: a tool is missing.
        StorageError: the disk cannot be created.
    """
    make_private(machine.folder)
    machine.initrd.write_bytes(build_initrd(root / "usr/bin/busybox", image.modules))
    machine.disk.unlink(missing_ok=True)
    _run(["mkfs.ext4", "-q", "-E", "root_owner=0:0", "-d", str(root), str(machine.disk), f"{size_mb}M"])


def start(image: SystemImage, machine: Machine) -> list[str]:
    """Return the command that runs the machine with the power on.

    SIGKILL is a power cut; SIGSTOP and SIGCONT begin and end a hang. The machine boots in seconds. The command
    continues after a reboot, and exits when the machine powers itself off. Run the command in the network namespace of
    the tap.
    """
    words = {"name": machine.name, "address": machine.address, "gateway": machine.gateway}
    # panic=1: the board reboots on a kernel panic.
    kernel = ["console=ttyAMA0", "quiet", "panic=1", *(f"hil.{key}={value}" for key, value in words.items() if value)]
    # Do not flush to the host's disk. If qemu ends, writes are safe in the host's cache. Only a crash of the host loses
    # them.
    return [
        *image.qemu,
        *("-no-user-config", "-nodefaults", "-display", "none", "-monitor", "none"),
        *("-machine", "virt", "-accel", f"tcg,thread={'single' if machine.icount else 'multi'}", "-cpu", _CPU),
        *(("-icount", "shift=0") if machine.icount else ()),
        *("-smp", str(machine.cores), "-m", str(machine.memory_mb)),
        *("-kernel", str(image.kernel), "-initrd", str(machine.initrd), "-append", " ".join(kernel)),
        *("-drive", f"file={_escape_path(machine.disk)},if=none,id=disk,format=raw,cache=unsafe,discard=unmap"),
        *("-device", "virtio-blk-device,drive=disk"),
        *("-netdev", f"tap,id=net,ifname={machine.tap},script=no,downscript=no"),
        *("-device", f"virtio-net-device,netdev=net,mac={_make_mac(machine.address)}"),
        *("-device", "virtio-rng-device"),
        *("-chardev", f"socket,id=serial,path={_escape_path(machine.serial)},server=on,wait=off"),
        *("-device", "virtio-serial-device", "-device", "virtserialport,chardev=serial"),
        *("-chardev", f"file,id=console,path={_escape_path(machine.console)},append=on", "-serial", "chardev:console"),
    ]


def _take_kernel(scratch: Path, folder: Path) -> None:
    apt = Apt(make_private(scratch), "aarch64")
    apt.update()
    # Fetch packages without dependencies, because only the installation of a kernel needs them.
    newest = _run(["dpkg-deb", "--field", str(apt.download_alone(_KERNEL)), "Depends"]).split()[0]
    unpacked = make_private(scratch / "unpacked")
    unpack(apt.download_alone(newest), unpacked)
    (kernel,) = unpacked.glob("boot/vmlinuz-*")
    for module in sort_modules(unpacked / "lib/modules", _MODULES):
        module.rename(make_private(folder / "modules") / module.name)
    kernel.rename(folder / "vmlinuz")


def _take_qemu(scratch: Path, folder: Path) -> None:
    """Fetch the emulator with libraries, including the loader and the C library."""
    apt = Apt(make_private(scratch), get_host_arch())
    apt.update()
    unpacked = make_private(scratch / "unpacked")
    for package in apt.download([_QEMU_PACKAGE]):
        unpack(package, unpacked)
    program = unpacked / "usr/bin" / _QEMU
    loader = next(path for path in unpacked.glob("**/ld-linux*.so.*") if not path.is_symlink())
    places = sorted({str(path.parent) for path in unpacked.glob("**/lib*.so.*")})
    listed = _run([str(loader), "--library-path", ":".join(places), "--list", str(program)])
    libraries = [Path(words[2]) for words in map(str.split, listed.splitlines()) if words[1:2] == ["=>"]]
    for path in [program, *libraries]:
        shutil.copy2(path, make_private(folder / "qemu") / path.name)
    shutil.copy2(loader, folder / "qemu" / _LOADER)


def _make_mac(address: str) -> str:
    """Return a locally administered MAC address for an IP address."""
    return "02:00:" + ":".join(f"{part:02x}" for part in ip_interface(address).packed)


def _escape_path(path: Path) -> str:
    """Escape a path for a qemu option."""
    return str(path).replace(",", ",,")


def _run(command: Sequence[str]) -> str:
    environment = {**os.environ, "LC_ALL": "C", "PATH": os.environ.get("PATH", os.defpath) + _SBIN}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LIMIT)
    except FileNotFoundError:
        raise UsageError(
            f"virtual boards require {command[0]}", hint="install util-linux, dpkg and e2fsprogs"
        ) from None
    if done.returncode:
        raise StorageError(f"{Path(command[0]).name} failed", detail=(done.stderr or done.stdout).strip())
    return done.stdout
