"""Faults that a simulated board can be told to have.

Written ``NAME`` or ``NAME:KEY=VALUE,...``:

=============  =========================================================================================  ==========
name           what happens                                                                               times
=============  =========================================================================================  ==========
``crash``      the worker dies of ``signal`` (SIGSEGV) ``at`` run or load                                 always
``hang``       the worker never comes back ``at`` run or load                                             always
``corrupt``    ``elements`` (1) of output ``output`` (0) come back with flipped bits                      always
``drop``       every connection is cut when ``at`` (0.6) of what an upload has to bring has come          once
``slow``       the link carries ``rate`` (1 MB/s) bytes a second, ``delay`` (0) seconds late each way     always
``kill-agent`` the agent is killed with SIGKILL ``at`` run or load                                        always
=============  =========================================================================================  ==========

``times=N`` makes a fault strike N times and then no more; ``times=0`` is always.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.errors import UsageError

_WHERE = ("run", "load")
# name -> key -> default; the default's type is the value's type.
_KEYS: dict[str, dict[str, Any]] = {
    "crash": {"signal": "SIGSEGV", "at": "run", "times": 0},
    "hang": {"at": "run", "times": 0},
    "corrupt": {"elements": 1, "output": 0, "times": 0},
    "drop": {"at": 0.6, "times": 1},
    "slow": {"rate": 1e6, "delay": 0.0},
    "kill-agent": {"at": "run", "times": 0},
}


@dataclass(frozen=True)
class Fault:
    """One fault with all its keys filled in."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}:{','.join(f'{key}={value}' for key, value in sorted(self.keys.items()))}"


def parse(text: str) -> Fault:
    """A fault from its text.

    Raises:
        UsageError: the name, a key or a value is unknown.
    """
    name, _, rest = text.partition(":")
    if name not in _KEYS:
        raise UsageError(f"unknown fault {name!r}", hint=f"one of {', '.join(_KEYS)}")
    keys = dict(_KEYS[name])
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in keys or not equals:
            raise UsageError(f"fault {name} has no {key!r}", hint=f"it takes {', '.join(keys)}")
        try:
            keys[key] = type(keys[key])(value)
        except ValueError as error:
            raise UsageError(f"fault {name}: {key} cannot be {value!r}") from error
    if name in ("crash", "hang", "kill-agent") and keys["at"] not in _WHERE:
        raise UsageError(f"fault {name} strikes at {' or '.join(_WHERE)}, not {keys['at']!r}")
    if name == "crash" and keys["signal"] not in signal.Signals.__members__:
        raise UsageError(f"there is no signal {keys['signal']!r}")
    if name == "drop" and not 0 <= keys["at"] <= 1:
        raise UsageError("fault drop: at is a share of the upload, 0 to 1")
    if name == "slow" and (keys["rate"] <= 0 or keys["delay"] < 0):
        raise UsageError("fault slow: rate must be above 0 and delay not below")
    if keys.get("times", 0) < 0:
        raise UsageError(f"fault {name}: times cannot be negative")
    return Fault(name, keys)


class Charges:
    """How often each fault may still strike: a file a charge, so that it counts over all of a board's processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def arm(self, faults: Sequence[Fault]) -> None:
        """Lay out the charges of faults that strike a limited number of times."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.iterdir():
            left.unlink()
        for fault in faults:
            for number in range(fault.keys.get("times", 0)):
                (self._folder / f"{fault.name}.{number}").touch()

    def strike(self, fault: Fault) -> bool:
        """Whether the fault strikes now; uses up a charge."""
        times = fault.keys.get("times", 0)
        if not times:
            return True
        for number in range(times):
            with contextlib.suppress(FileNotFoundError):
                (self._folder / f"{fault.name}.{number}").unlink()
                return True
        return False
