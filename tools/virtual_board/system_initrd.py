"""Build the initrd of an emulated virtual board: an archive with busybox, drivers and scripts."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_SCRIPTS = {"init": Path(__file__).with_name("system_init.sh"), "serial": Path(__file__).with_name("system_serial.sh")}
_END = ("TRAILER!!!", 0, b"")


def build_initrd(busybox: Path, modules: Sequence[Path]) -> bytes:
    """Return an initrd that loads the modules in order, and boots from the disk."""
    return build_cpio(
        [
            ("bin", stat.S_IFDIR | 0o755, b""),
            ("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()),
            *((name, stat.S_IFREG | 0o755, script.read_bytes()) for name, script in _SCRIPTS.items()),
            ("modules", stat.S_IFDIR | 0o755, b""),
            *(
                (f"modules/{place:02}-{module.name}", stat.S_IFREG | 0o644, module.read_bytes())
                for place, module in enumerate(modules)
            ),
        ]
    )


def build_cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Return a cpio archive ("newc", which Linux unpacks at boot) of names, modes and contents."""
    parts = []
    for number, (name, mode, data) in enumerate([*entries, _END], start=1):
        path = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        parts += [_pad(b"070701" + b"".join(b"%08X" % field for field in fields) + path), _pad(data)]
    return b"".join(parts)


def _pad(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def sort_modules(folder: Path, wanted: Iterable[str]) -> list[Path]:
    """Return the wanted kernel modules and their dependencies, in load order.

    Args:
        folder: a kernel's ``lib/modules``; uncompressed, as Debian's are.
        wanted: names, with ``_`` in place of ``-``.

    Raises:
        KeyError: a module is missing.
    """
    files = {path.stem.replace("-", "_"): path for path in folder.rglob("*.ko")}
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name not in ordered:
            for needed in _needs(files[name]):
                add(needed)
            ordered[name] = files[name]

    for name in wanted:
        add(name)
    return list(ordered.values())


def _needs(module: Path) -> Iterator[str]:
    """Yield the dependencies listed in a module. (``modules.dep`` exists only after ``depmod``.)"""
    found = re.search(rb"\0depends=([^\0]+)\0", module.read_bytes())
    return (name.replace("-", "_") for name in found[1].decode().split(",")) if found else iter(())
