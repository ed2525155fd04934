"""Settings of a virtual board. The process that starts the board writes them, and the keeper reads them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hil.errors import BoardLost

_FILE = "plan.json"


@dataclass(frozen=True)
class Plan:
    """Settings of a board."""

    name: str  # host name
    arch: str  # architecture, as ``uname -m`` prints it
    disk_mb: int  # writable disk space, in MB
    netem: str  # network delay, jitter and loss in ``tc netem`` syntax, or ""
    system: bool  # True for an emulated machine with a separate kernel
    memory_mb: int  # memory of the emulated machine, in MB
    icount: bool  # True if the emulated machine's clock counts instructions
    lifeline: bool  # True if the board ends when the keeper's stdin is closed
    ip: str = ""  # IP address
    gateway: str = ""  # the host's address on the board's network
    rootfs: str = ""  # the read-only root file system below the overlay
    emulator: str = ""  # the emulator for programs, or "" if this machine can run them
    cpu: str = ""  # the emulated CPU, or ""
    # Files specific to this board, by path below the root: text, mode and owner.
    files: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Read the plan from a board's directory.

        Raises:
            BoardLost: the plan is missing, or from a different version.
        """
        try:
            return cls(**json.loads((folder / _FILE).read_text()))
        except (OSError, ValueError, TypeError):
            raise BoardLost("virtual board not running", board=folder.name) from None

    def write(self, folder: Path) -> None:
        """Write the plan to a board's directory."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))


def make_mac(ip: str) -> str:
    """Return the MAC address for an IP address.

    The address is the same at each boot, because other machines cache it.
    """
    return ":".join(f"{part:02x}" for part in (2, 0, *map(int, ip.split("."))))
