"""Faults that a simulated board can be told to have.

Written ``NAME`` or ``NAME:KEY=VALUE,...``:

=============  =========================================================================================  ==========
name           what happens                                                                               times
=============  =========================================================================================  ==========
``crash``      the worker dies of ``signal`` (SIGSEGV) ``at`` run or load                                 always
``hang``       the worker never comes back ``at`` run or load                                             always
``corrupt``    ``elements`` (1) of output ``output`` (0, or a name) come back with flipped bits: in every  always
               run, in a ``share`` (1) of the runs, chosen by ``seed`` (0), or only in run ``iteration``
               since the program was loaded, from 0; and ``when``: always, on reload (every load of a
               program but its first) or in a profile pass
``drop``       every connection is cut when ``at`` (0.6) of what an upload has to bring has come          once
``slow``       the link carries ``rate`` (1 MB/s) bytes a second, ``delay`` (0) seconds late each way     always
``kill-agent`` the agent is killed with SIGKILL ``at`` run or load                                        always
``clock``      the board's clock is ``offset`` (0) seconds ahead, ``ppm`` (0) too fast, and is put         always
               forward by ``jump`` (0) seconds in the first run
``profile``    the profiling tool is ``how``: missing, or it crashes, writes half (truncate), never ends   always
``fallback``   a ``share`` (1: all) of the program's nodes is said to run on another device               always
``slowdown``   every run takes ``factor`` (1.1) times as long                                             always
``pace``       every run takes at least ``seconds`` (0.1), which the device sleeps                        always
=============  =========================================================================================  ==========

``times=N`` makes a fault happen N times and then no more; ``times=0`` is always. ``corrupt`` refuses a program that has
no such output; ``others=spare`` leaves it alone.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.core import clock
from hil.errors import UsageError

# name -> key -> default; the default's type is the value's type.
_KEYS: dict[str, dict[str, Any]] = {
    "crash": {"signal": "SIGSEGV", "at": "run", "times": 0},
    "hang": {"at": "run", "times": 0},
    "corrupt": {
        "elements": 1,
        "output": 0,
        "others": "refuse",
        "iteration": -1,
        "share": 1.0,
        "seed": 0,
        "when": "always",
        "times": 0,
    },
    "drop": {"at": 0.6, "times": 1},
    "slow": {"rate": 1e6, "delay": 0.0},
    "kill-agent": {"at": "run", "times": 0},
    "clock": {"offset": 0.0, "ppm": 0.0, "jump": 0.0},
    "profile": {"how": "missing", "times": 0},
    "fallback": {"share": 1.0, "times": 0},
    "slowdown": {"factor": 1.1},
    "pace": {"seconds": 0.1},
}
PROFILES = ("missing", "crash", "truncate", "hang")
WHEN = ("always", "reload", "profile")
# A century: what nanoseconds in 64 bits hold thrice.
_FAR_S = 3.2e9
_DAY_S = 86400.0
_END = "kill-agent"
# A simulated board's clock: the agent and its workers map one small file that holds what changes.
_CLOCK_FILE = "clock"
# When the clock started, and by how much it was put forward since, in nanoseconds.
_STATE = struct.Struct("=qq")
_STARTED, _AHEAD = range(2)
# What a key's value must be: a test, and in words.
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "at": (lambda at: at in ("run", "load"), "run or load"),
    "drop.at": (lambda at: 0 <= at <= 1, "a share of the upload, 0 to 1"),
    "signal": (lambda name: name in signal.Signals.__members__, "a signal's name"),
    "elements": (lambda count: count >= 1, "1 or more"),
    "output": (lambda which: which != "" if isinstance(which, str) else which >= 0, "an output's number or name"),
    "others": (lambda word: word in ("refuse", "spare"), "refuse or spare"),
    "iteration": (lambda number: number >= -1, "a run's number from 0, or -1 for any"),
    "seed": (lambda seed: True, "a whole number"),
    "when": (lambda when: when in WHEN, f"one of {', '.join(WHEN)}"),
    "rate": (lambda rate: rate > 0, "above 0 bytes a second"),
    "delay": (lambda delay: 0 <= delay < math.inf, "0 seconds or more"),
    "offset": (lambda offset: abs(offset) <= _FAR_S, "seconds, at most a century"),
    "ppm": (lambda ppm: abs(ppm) <= 1000, "-1000 to 1000"),
    "jump": (lambda jump: abs(jump) <= _FAR_S, "seconds, at most a century"),
    "how": (lambda how: how in PROFILES, f"one of {', '.join(PROFILES)}"),
    "share": (lambda share: 0 < share <= 1, "above 0, at most 1"),
    "factor": (lambda factor: 1 <= factor < math.inf, "1 or more"),
    "seconds": (lambda seconds: 0 < seconds <= _DAY_S, "above 0, at most a day"),
    "times": (lambda times: times >= 0, "1 or more, or 0 for always"),
}


def _number_or_name(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


# A key whose value is not simply of its default's type.
_READ: dict[str, Callable[[str], Any]] = {"output": _number_or_name}


@dataclass(frozen=True)
class Fault:
    """One fault with all its keys filled in."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}:{','.join(f'{key}={value}' for key, value in sorted(self.keys.items()))}"


def parse(text: str) -> Fault:
    """A fault from its text. Raises UsageError: the name, a key or a value is unknown."""
    name, _, rest = text.partition(":")
    if name not in _KEYS:
        raise UsageError(f"unknown fault {name!r}", hint=f"one of {', '.join(_KEYS)}")
    keys = dict(_KEYS[name])
    example = f"for example {Fault(name, keys)}"
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"fault {name}: {part!r} is not KEY=VALUE", hint=example)
        if key not in keys:
            raise UsageError(f"fault {name} has no {key!r}", hint=example)
        allowed, wanted = _LIMITS.get(f"{name}.{key}") or _LIMITS[key]
        try:
            keys[key] = _READ.get(key, type(keys[key]))(value)
            fits = allowed(keys[key])
        except ValueError:
            fits = False
        if not fits:
            raise UsageError(f"fault {name}: {key} must be {wanted}, not {value!r}", hint=example)
    return Fault(name, keys)


class Charges:
    """How often each fault may still happen: a file a charge, so that it counts over all of a board's processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def arm(self, faults: Sequence[Fault]) -> None:
        """Lay out the charges of faults that happen a limited number of times."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.iterdir():
            left.unlink()
        for fault in faults:
            for number in range(fault.keys.get("times", 0)):
                (self._folder / f"{fault.name}.{number}").touch()

    def should_fire(self, fault: Fault) -> bool:
        """Whether the fault happens now; uses up a charge."""
        times = fault.keys.get("times", 0)
        if not times:
            return True
        for number in range(times):
            with contextlib.suppress(FileNotFoundError):
                (self._folder / f"{fault.name}.{number}").unlink()
                return True
        return False

    def is_first(self, what: str) -> bool:
        """Whether this is asked for the first time since the faults were armed."""
        try:
            (self._folder / f"first.{what}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def watch_for_end(store: Path) -> None:
    """Have this process killed when :func:`end_agent` is called for the same store: a worker may send it no signal."""
    (store / _END).unlink(missing_ok=True)
    os.mkfifo(store / _END)

    def watch() -> None:
        (store / _END).read_bytes()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="kill-agent").start()


def end_agent(store: Path) -> None:
    """Have the agent killed that watches for it; comes back never."""
    (store / _END).write_bytes(b"")
    time.sleep(3600)


class SimClock:
    """The clock of a board with the fault ``clock``; :meth:`start` makes its file in the simulator's folder."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self._offset_ns: int = round(fault.keys["offset"] * 1e9)
        self._rate: float = fault.keys["ppm"] * 1e-6
        self._jump_ns: int = round(fault.keys["jump"] * 1e9)
        with (folder / _CLOCK_FILE).open("r+b") as file:
            # As whole numbers, each written at once: others read them meanwhile.
            self._shared = memoryview(mmap.mmap(file.fileno(), _STATE.size)).cast("q")
        self._started_ns: int = self._shared[_STARTED]

    @staticmethod
    def start(folder: Path) -> None:
        """Start the clock, before anybody reads it."""
        (folder / _CLOCK_FILE).write_bytes(_STATE.pack(time.monotonic_ns(), 0))

    def install(self) -> None:
        """Have this process stamp with it."""
        clock.replace_clock(self.now_ns)

    def now_ns(self) -> int:
        """What it shows."""
        now = time.monotonic_ns()
        gained = int((now - self._started_ns) * self._rate)
        return now + self._offset_ns + self._shared[_AHEAD] + gained

    def jump(self) -> None:
        """Put it forward, once and for all that read it."""
        self._shared[_AHEAD] = self._jump_ns
