"""What a virtual board is to be: written by whoever starts it, read by the process that keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hil.errors import BoardLost

_FILE = "plan.json"


@dataclass(frozen=True)
class Plan:
    """One board."""

    name: str  # its host name
    arch: str  # its architecture, as ``uname -m`` gives it
    disk_mb: int  # how much it can write, in MB
    netem: str  # delay, jitter and loss of its network, in the words of ``tc netem``, or ""
    system: bool  # whether it is a whole machine with a kernel of its own
    memory_mb: int  # the memory of such a machine, in MB
    lifeline: bool  # whether the board ends when the keeper's stdin does
    ip: str = ""  # its address
    gateway: str = ""  # the host's address on the board's network
    rootfs: str = ""  # the root file system below its own changes
    emulator: str = ""  # the program that runs its programs, or "" where this machine can by itself
    cpu: str = ""  # the CPU that the emulator is to be, or ""
    # files of its own below its root: text, mode and owner.
    files: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """The plan in a board's folder.

        Raises:
            BoardLost: there is none, or it is of another version.
        """
        try:
            return cls(**json.loads((folder / _FILE).read_text()))
        except (OSError, ValueError, TypeError):
            raise BoardLost("no such virtual board runs", board=folder.name) from None

    def write(self, folder: Path) -> None:
        """Write the plan into a board's folder."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))


def card(ip: str) -> str:
    """The address of the network card of the board with that IP address: the same at every boot, others remember it."""
    return ":".join(f"{part:02x}" for part in (2, 0, *map(int, ip.split("."))))
