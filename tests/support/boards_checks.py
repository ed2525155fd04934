"""What a virtual board shows to others: the ports that it listens on, and the files that any of its users may read."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterable
from pathlib import PurePosixPath

from tools.virtual_board import VirtualBoard

# What a freshly booted board lets everybody read, in the folders that everybody uses.
BASE = frozenset({"/dev/shm", "/home", "/run", "/run/mount", "/run/sshd", "/run/sshd.pid", "/tmp"})
TABLES = ("tcp", "tcp6", "udp", "udp6")
# A UDP socket that takes from anybody has no other end; a TCP one that does is in the state "listen".
TAKES_FROM_ANYBODY = {"tcp": "0A", "udp": "07"}


def listening(board: VirtualBoard) -> set[tuple[str, str, int]]:
    """Protocol ("tcp" or "udp"), address and port of each socket that takes from anybody, as the board's kernel says.

    Unlike a scan of its ports, this shows those that listen to the board itself only as well.
    """
    found = set()
    for table in TABLES:
        # A board without IPv6 has no such tables.
        done = board.run(["cat", f"/proc/net/{table}"], check=not table.endswith("6"))
        for line in done.stdout.splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == TAKES_FROM_ANYBODY[table[:3]]:
                address, port = local.split(":")
                found.add((table[:3], _address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """An address as the kernel prints it: words of four bytes, each as a little-endian number."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def world_readable(board: VirtualBoard, folders: Iterable[str], *, reachable: bool = True) -> list[str]:
    """The files and folders in and below these that any user of the board may read, but for those of a fresh board.

    Args:
        board: it is on.
        folders: absolute paths on it; each has to be there.
        reachable: leave out what lies below a folder that others may not enter, whatever its own mode.
    """
    modes: dict[PurePosixPath, int] = {}
    tops = [PurePosixPath(folder) for folder in folders]
    above = {parent for top in tops for parent in top.parents}
    # Files come and go while it looks: only a folder that is not there at all is wrong.
    for paths, depth in ((tops, []), (sorted(above), ["-maxdepth", "0"])):
        done = board.run(["find", *map(str, paths), *depth, "-printf", r"%m %y %p\0"], timeout=120)
        for entry in filter(None, done.stdout.split("\0")):
            mode, kind, path = entry.split(" ", 2)
            # The mode of a symbolic link says nothing.
            modes[PurePosixPath(path)] = 0 if kind == "l" else int(mode, 8)
    missing = [str(top) for top in tops if top not in modes]
    assert not missing, f"not on the board: {missing}"
    return sorted(
        str(path)
        for path, mode in modes.items()
        if path not in above - set(tops)
        and str(path) not in BASE
        and mode & stat.S_IROTH
        and (not reachable or all(modes[parent] & stat.S_IXOTH for parent in path.parents))
    )
