"""Inspect what a virtual board exposes: its listening ports, and the files that all of its users can read."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterable
from pathlib import PurePosixPath

from tools.virtual_board import VirtualBoard

# Paths in shared directories that all users of a newly booted board can read.
BASE = frozenset({"/dev/shm", "/home", "/run", "/run/mount", "/run/sshd", "/run/sshd.pid", "/tmp"})
TABLES = ("tcp", "tcp6", "udp", "udp6")
# State of sockets that accept data from any address: an unconnected UDP socket, and a listening TCP socket.
TAKES_FROM_ANYBODY = {"tcp": "0A", "udp": "07"}


def listening(board: VirtualBoard) -> set[tuple[str, str, int]]:
    """Return the protocol ("tcp" or "udp"), address and port of each listening socket, as the board's kernel reports
    them.

    Unlike a port scan, the result includes sockets that only the board itself can reach.
    """
    found = set()
    for table in TABLES:
        # A board without IPv6 does not have these tables.
        done = board.run(["cat", f"/proc/net/{table}"], check=not table.endswith("6"))
        for line in done.stdout.splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == TAKES_FROM_ANYBODY[table[:3]]:
                address, port = local.split(":")
                found.add((table[:3], _address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """Convert an address in the kernel's format: words of four bytes, each as a little-endian number."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def world_readable(board: VirtualBoard, folders: Iterable[str], *, reachable: bool = True) -> list[str]:
    """Return the files and directories that all users of the board can read, except those of a newly booted board.

    Args:
        board: a running board.
        folders: absolute paths on the board. All of them must exist.
        reachable: leave out files below a directory that other users cannot enter, regardless of the mode of the file.
    """
    modes: dict[PurePosixPath, int] = {}
    tops = [PurePosixPath(folder) for folder in folders]
    above = {parent for top in tops for parent in top.parents}
    # Files can appear and disappear during the search. Only a missing top directory is an error.
    for paths, depth in ((tops, []), (sorted(above), ["-maxdepth", "0"])):
        done = board.run(["find", *map(str, paths), *depth, "-printf", r"%m %y %p\0"], timeout=120)
        for entry in filter(None, done.stdout.split("\0")):
            mode, kind, path = entry.split(" ", 2)
            # The mode of a symbolic link is not relevant.
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
