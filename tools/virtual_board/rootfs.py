"""Build root file systems for virtual boards.

Debian packages are unpacked into a cache that all boards of a user share.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hil.errors import UsageError
from tools.virtual_board import packages
from tools.virtual_board.places import cache_folder, make_private

# This release's qemu shows the emulated CPU in /proc/cpuinfo. The qemu in the boards' release shows this machine's CPU.
_EMULATOR_RELEASE = "trixie"
_PACKAGES = (
    "base-files base-passwd bash busybox-static coreutils dash findutils grep gzip hostname iproute2 libc-bin "
    "libstdc++6 login mawk mount openssh-server openssh-sftp-server procps python3 python3-minimal sed tar util-linux"
).split()
# Dependencies to leave out, because only package scripts need them, which never run here.
_LEFT_OUT = (
    "adduser debconf init-system-helpers libperl5.36 perl perl-base perl-modules-5.36 runit-helper ucf usrmerge".split()
)
_EXCLUDED = tuple(
    f"--exclude=./usr/{place}/*"
    for place in ("share/doc", "share/man", "share/locale", "share/i18n", "share/lintian", "share/bash-completion")
)
_MERGED = ("bin", "sbin", "lib", "lib64")
_EMPTY = (
    "dev",
    "proc",
    "sys",
    "run",
    "tmp",
    "mnt",
    "old-root",
    "root/.ssh",
    "home/tester/.ssh",
    "etc/ssh",
    "var/empty",
)
SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
AllowStreamLocalForwarding yes
UsePAM no
UseDNS no
PrintMotd no
Subsystem sftp /usr/lib/openssh/sftp-server
"""
# Hash of the password, which is equal to the login.
_HASH = "$6$hil.virtual.brd$K6ZXQKQh31ME5qqpVXynBwtBwjU0tBYHrhHxUC6dUF/0zEiNdGdX1IsL9.n5dQdLnIbi.pLM2OxsktdTfhcWl."
_FILES = {
    "etc/passwd": """\
root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
sshd:x:100:65534::/run/sshd:/usr/sbin/nologin
tester:x:1000:1000::/home/tester:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
""",
    "etc/group": "root:x:0:\ndaemon:x:1:\ntty:x:5:\ntester:x:1000:\nnogroup:x:65534:\n",
    "etc/shadow": f"root:*:20000::::::\nsshd:*:20000::::::\ntester:{_HASH}:20000::::::\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
    # init restarts sshd after its end, like a service manager.
    "etc/inittab": "::respawn:/usr/sbin/sshd -D -e\n",
}
_LINKS = {
    "usr/bin/awk": "mawk",
    "usr/bin/which": "which.debianutils",
    "usr/sbin/init": "../bin/busybox",
    "usr/sbin/reboot": "../bin/busybox",
    "usr/sbin/poweroff": "../bin/busybox",
    "usr/sbin/halt": "../bin/busybox",
}
_PRIVATE = {"etc/shadow": 0o640, "root": 0o700, "root/.ssh": 0o700, "home/tester": 0o700, "home/tester/.ssh": 0o700}
_TESTER = ("home/tester", "home/tester/.ssh")

Builder = Callable[[Path], None]


def get_root_filesystem(arch: str) -> Path:
    """Return the root file system for an architecture, built on the first call (about 20 s). Never write to it.

    Raises:
        UsageError: the architecture is unsupported, or this machine cannot build it.
        PackagesUnavailable: the packages could not be fetched.
    """
    if arch not in packages.DEBIAN:
        raise UsageError(f"unsupported architecture {arch!r} for virtual boards", hint="use x86_64 or aarch64")
    recipe = repr((_PACKAGES, _LEFT_OUT, _EXCLUDED, _EMPTY, _FILES, _LINKS, _PRIVATE))
    return get_cached(f"rootfs-{arch}", recipe, lambda folder: _build(folder, arch))


def get_emulator(arch: str) -> Path:
    """Return a static emulator for programs of an architecture, fetched on the first call.

    Raises:
        PackagesUnavailable: the emulator could not be fetched.
    """

    def build(folder: Path) -> None:
        with make_scratch(folder) as scratch:
            apt = packages.Apt(scratch / "apt", packages.get_host_arch(), _EMULATOR_RELEASE)
            apt.update()
            packages.unpack(apt.download_alone("qemu-user"), make_private(scratch / "root"), f"./usr/bin/qemu-{arch}")
            (scratch / "root/usr/bin" / f"qemu-{arch}").rename(folder / f"qemu-{arch}")

    return get_cached(f"qemu-user-{arch}", _EMULATOR_RELEASE, build) / f"qemu-{arch}"


def get_cached(name: str, recipe: str, build: Builder) -> Path:
    """Return a cached directory. The first call builds it, atomically and with a lock.

    Args:
        name: name of the content.
        recipe: all inputs that determine the content.
        build: fills the given empty directory.
    """
    from filelock import FileLock

    cache = make_private(cache_folder())
    folder = cache / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    with FileLock(cache / f"{name}.lock"):
        if not folder.is_dir():
            for stale in cache.glob(f"{name}-*.part"):
                shutil.rmtree(stale)
            print(f"hil: building {name} for virtual boards (once)", file=sys.stderr)
            part = make_private(folder.with_name(f"{folder.name}.part"))
            build(part)
            part.rename(folder)
    return folder


@contextmanager
def make_scratch(folder: Path) -> Iterator[Path]:
    """Yield a temporary directory for a builder of :func:`get_cached`.

    If the process is killed, the next build removes the directory.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.stem}-", suffix=".part") as scratch:
        yield Path(scratch)


def _build(root: Path, arch: str) -> None:
    with make_scratch(root) as scratch:
        apt = packages.Apt(scratch, arch)
        apt.update()
        root.chmod(0o755)
        for place in _MERGED:
            (root / "usr" / place).mkdir(parents=True)
            (root / place).symlink_to(f"usr/{place}")
        for deb in apt.download(_PACKAGES):
            if deb.name.split("_")[0] not in _LEFT_OUT:
                packages.unpack(deb, root, *_EXCLUDED)
    for place in _EMPTY:
        (root / place).mkdir(parents=True, exist_ok=True)
    for path, text in _FILES.items():
        (root / path).write_text(text)
    for path, target in _LINKS.items():
        (root / path).unlink(missing_ok=True)
        (root / path).symlink_to(target)
    for path, mode in _PRIVATE.items():
        (root / path).chmod(mode)
    (root / "tmp").chmod(0o1777)
    for path in _TESTER:
        shutil.chown(root / path, 1000, 1000)
