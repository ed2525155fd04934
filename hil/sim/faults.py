"""Faults that a simulated board can have.

Write a fault as ``NAME`` or ``NAME:KEY=VALUE,...``:

===============  =========================================================================================  ==========
name             effect                                                                                     times
===============  =========================================================================================  ==========
``crash``        the worker dies of ``signal`` (SIGSEGV) ``at`` run or load; with ``position`` (-1: any),   always
                 only in the call of a generation for this position
``hang``         the worker hangs ``at`` run or load; ``position`` as for ``crash``                         always
``corrupt``      flips bits in ``elements`` (1) of output ``output`` (0, or a name). Runs: all; a           always
                 ``share`` (1) of the runs, chosen by ``seed`` (0); or only run ``iteration`` since the
                 program was loaded, from 0. Loads (``when``): always; reload (every load of a program
                 except the first); or profile (a profile pass)
``drop``         cuts every connection when ``at`` (0.6) of an upload has arrived                           once
``slow``         limits the link to ``rate`` (1 MB/s) bytes per second, with ``delay`` (0) seconds latency  always
``kill-agent``   kills the agent with SIGKILL ``at`` run or load; ``position`` as for ``crash``             always
``clock``        the board's clock is ``offset`` (0) seconds ahead, runs ``ppm`` (0) too fast, and jumps    always
                 forward by ``jump`` (0) seconds in the first run
``profile``      the profiling tool fails; ``how``: missing, crash, truncate (half of the output) or hang   always
``fallback``     reports a ``share`` (1: all) of the program's nodes on a different device                  always
``slowdown``     every run takes ``factor`` (1.1) times as long                                             always
``pace``         every run takes at least ``seconds`` (0.1); the device sleeps for the rest                 always
``wedge``        from run ``after`` (0) since the simulator's start, every run fails or hangs (``how``),    always
                 until the file ``reset`` exists
``throttle``     ``after`` (1) seconds after the first run, the device is throttled for ``lasts`` seconds   always
                 (0: forever): runs take ``factor`` (2) times as long, and the readings show throttling
``noise``        every run takes longer by a random share: half-normal with the standard deviation          always
                 ``share`` (0.1), from ``seed`` (0)
``load``         other programs use ``cores`` (1) cores; half of the runs, chosen by ``seed`` (0), take     always
                 ``factor`` (1.5) times as long
``counter``      with --instructions, a run counts ``each`` (1000) instructions per byte of the main file,  always
                 times the factor of ``slowdown``, varied at random by ``share`` (0), from ``seed`` (0)
``kv_slot``      from ``position`` (40), each step writes its cache entry one slot early: the previous      always
                 entry is lost, and the step's slot stays zero
``mask``         the mask is wrong; ``how``: hide-newest hides each token from itself, show-next shows      always
                 each token the next token of the call
``rope``         from ``position`` (48), the positions are one too small                                    always
``stale_cache``  a run that follows another prompt continues in the cache of that prompt                    always
``overflow``     from ``position`` (56), the logits, and the cache entries of the layers above ``layer``    always
                 (2), are NaN
``wrong_layer``  from ``position`` (50), steps return wrong logits, and wrong cache entries in the          always
                 layers above ``layer`` (2)
``argmax``       from ``position`` (30), the next token is the token with the second largest logit          always
``slow_token``   the call for ``position`` (0) sleeps for ``seconds`` (0.1)                                 always
===============  =========================================================================================  ==========

Faults from ``kv_slot`` on affect only generations (:mod:`hil.sim.steps`). Each call of a generation counts as a run.

``needs=TEXT`` limits a fault to programs with this text in their main file, for example the
name of a node in an ONNX model. ``times=N`` limits a fault to N occurrences; ``times=0`` is unlimited. ``corrupt``
rejects a program without that output; ``others=spare`` ignores such programs.

``stack=PART@VERSION`` limits a fault to boards whose table ``[stack]`` has this part with this version.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.core import clock
from hil.core.files import open_file
from hil.core.stack_config import StackValue
from hil.errors import UsageError, did_you_mean

# Name of a fault -> key -> default. A value has the type of the default.
FAULTS: dict[str, dict[str, Any]] = {
    "crash": {"signal": "SIGSEGV", "at": "run", "position": -1, "needs": "", "times": 0},
    "hang": {"at": "run", "position": -1, "needs": "", "times": 0},
    "corrupt": {
        "elements": 1,
        "output": 0,
        "others": "refuse",
        "iteration": -1,
        "share": 1.0,
        "seed": 0,
        "when": "always",
        "needs": "",
        "times": 0,
    },
    "drop": {"at": 0.6, "times": 1},
    "slow": {"rate": 1e6, "delay": 0.0},
    "kill-agent": {"at": "run", "position": -1, "times": 0},
    "clock": {"offset": 0.0, "ppm": 0.0, "jump": 0.0},
    "profile": {"how": "missing", "times": 0},
    "fallback": {"share": 1.0, "times": 0},
    "slowdown": {"factor": 1.1, "needs": ""},
    "pace": {"seconds": 0.1, "needs": ""},
    "wedge": {"after": 0, "how": "fail", "reset": ""},
    "throttle": {"after": 1.0, "lasts": 0.0, "factor": 2.0},
    "noise": {"share": 0.1, "seed": 0},
    "load": {"cores": 1.0, "factor": 1.5, "seed": 0},
    "counter": {"each": 1000, "share": 0.0, "seed": 0},
    "kv_slot": {"position": 40},
    "mask": {"how": "hide-newest"},
    "rope": {"position": 48},
    "stale_cache": {},
    "overflow": {"position": 56, "layer": 2},
    "wrong_layer": {"position": 50, "layer": 2},
    "argmax": {"position": 30},
    "slow_token": {"position": 0, "seconds": 0.1},
}
PROFILES = ("missing", "crash", "truncate", "hang")
WEDGES = ("fail", "hang")
MASKS = ("hide-newest", "show-next")
WHEN = ("always", "reload", "profile")
# Largest clock offset: a century, a third of the range for 64-bit nanoseconds.
_FAR_SECONDS = 3.2e9
_DAY_SECONDS = 86400.0
_COUNT_MOST = 1_000_000
_END = "kill-agent"
_STACK, _STACK_PART = "stack", re.compile(r"[^@]+@.+")
# State of a simulated board's clock. The agent and the workers map this file.
_CLOCK_FILE = "clock"
# Start of the clock, and the total forward jump since then, in nanoseconds.
_STATE = struct.Struct("=qq")
_STARTED, _AHEAD = range(2)
# Key -> check of the value, and description for messages.
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "at": (lambda at: at in ("run", "load"), "run or load"),
    "drop.at": (lambda at: 0 <= at <= 1, "a fraction of the upload, 0 to 1"),
    "signal": (lambda name: name in signal.Signals.__members__, "a signal's name"),
    "elements": (lambda count: count >= 1, "1 or more"),
    "output": (lambda which: which != "" if isinstance(which, str) else which >= 0, "an output number or name"),
    "others": (lambda word: word in ("refuse", "spare"), "refuse or spare"),
    "iteration": (lambda number: number >= -1, "a run number from 0, or -1 for any"),
    "seed": (lambda seed: True, "a whole number"),
    "when": (lambda when: when in WHEN, f"one of {', '.join(WHEN)}"),
    "rate": (lambda rate: rate > 0, "above 0 bytes per second"),
    "delay": (lambda delay: 0 <= delay < math.inf, "0 seconds or more"),
    "offset": (lambda offset: abs(offset) <= _FAR_SECONDS, "seconds, at most a century"),
    "ppm": (lambda ppm: abs(ppm) <= 1000, "-1000 to 1000"),
    "jump": (lambda jump: abs(jump) <= _FAR_SECONDS, "seconds, at most a century"),
    "how": (lambda how: how in PROFILES, f"one of {', '.join(PROFILES)}"),
    "wedge.how": (lambda how: how in WEDGES, f"one of {', '.join(WEDGES)}"),
    "mask.how": (lambda how: how in MASKS, f"one of {', '.join(MASKS)}"),
    "needs": (lambda text: True, "a text"),
    _STACK: (lambda text: bool(_STACK_PART.fullmatch(text)), "PART@VERSION"),
    "position": (lambda position: position >= 0, "a position from 0"),
    **{
        f"{name}.position": (lambda position: position >= -1, "a position from 0, or -1 for any")
        for name in ("crash", "hang", "kill-agent")
    },
    "layer": (lambda layer: layer >= 0, "a layer from 0"),
    "after": (lambda number: number >= 0, "a run number from 0"),
    "throttle.after": (lambda seconds: 0 <= seconds <= _DAY_SECONDS, "0 seconds to a day"),
    "lasts": (lambda seconds: 0 <= seconds <= _DAY_SECONDS, "0 seconds to a day"),
    "each": (lambda each: 1 <= each <= _COUNT_MOST, f"1 to {_COUNT_MOST}"),
    "counter.share": (lambda share: 0 <= share <= 1, "0 to 1"),
    "cores": (lambda cores: 0 < cores < math.inf, "above 0"),
    "reset": (lambda path: not path or Path(path).is_absolute(), "an absolute path"),
    "share": (lambda share: 0 < share <= 1, "above 0, at most 1"),
    "factor": (lambda factor: 1 <= factor < math.inf, "1 or more"),
    "seconds": (lambda seconds: 0 < seconds <= _DAY_SECONDS, "above 0, at most a day"),
    "times": (lambda times: times >= 0, "1 or more, or 0 for always"),
}


def _number_or_name(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


# Parsers for keys whose value type is not the type of the default.
_READ: dict[str, Callable[[str], Any]] = {"output": _number_or_name}


@dataclass(frozen=True)
class Fault:
    """Fault with all keys set."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}:{','.join(f'{key}={value}' for key, value in sorted(self.keys.items()))}"


def parse(text: str) -> Fault:
    """Parse a fault. Raises UsageError for an unknown name or key, or an invalid value."""
    name, _, rest = text.partition(":")
    if name not in FAULTS:
        hint = f"{did_you_mean(name, FAULTS)}expected one of {', '.join(FAULTS)}"
        raise UsageError(f"unknown fault {name!r}", hint=hint)
    keys, known = dict(FAULTS[name]), {**FAULTS[name], _STACK: ""}
    example = f"for example {Fault(name, keys)}"
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"fault {name}: expected KEY=VALUE, got {part!r}", hint=example)
        if key not in known:
            raise UsageError(f"fault {name}: unknown key {key!r}", hint=f"{did_you_mean(key, known)}{example}")
        allowed, wanted = _LIMITS.get(f"{name}.{key}") or _LIMITS[key]
        try:
            keys[key] = _READ.get(key, type(known[key]))(value)
            fits = allowed(keys[key])
        except ValueError:
            fits = False
        if not fits:
            raise UsageError(f"fault {name}: {key} must be {wanted}, got {value!r}", hint=example)
    return Fault(name, keys)


def has_required_stack(fault: Fault, stack: Mapping[str, StackValue]) -> bool:
    """Return False if the fault needs a part of the stack that a board's config does not declare as text."""
    name, _, version = str(fault.keys.get(_STACK, "")).partition("@")
    return not name or (name in stack and stack[name].text == version)


def is_affecting(fault: Fault, program: Path) -> bool:
    """Return True if a fault affects a program: the main file contains the text of the key ``needs``."""
    text = str(fault.keys.get("needs", "")).encode()
    if not text:
        return True
    with open_file(program) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(text) >= 0


class Charges:
    """Remaining occurrences of faults. One file per occurrence makes the count visible to all processes of a board."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def arm(self, faults: Sequence[Fault]) -> None:
        """Create the files for faults with a limited number of occurrences."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.iterdir():
            left.unlink()
        for fault in faults:
            for number in range(fault.keys.get("times", 0)):
                (self._folder / f"{fault.name}.{number}").touch()

    def should_fire(self, fault: Fault) -> bool:
        """Return True if the fault occurs now. Each occurrence decrements the remaining count."""
        times = fault.keys.get("times", 0)
        if not times:
            return True
        for number in range(times):
            with contextlib.suppress(FileNotFoundError):
                (self._folder / f"{fault.name}.{number}").unlink()
                return True
        return False

    def is_wedged(self, fault: Fault) -> bool:
        """Count a run. Return True if the ``wedge`` fault applies to this run."""
        with (self._folder / "wedge.runs").open("ab") as file:
            runs = file.tell()
            file.write(b".")
        return runs >= fault.keys["after"] and not (fault.keys["reset"] and Path(fault.keys["reset"]).exists())

    def is_first(self, what: str) -> bool:
        """Return True for the first call with this name after :meth:`arm`."""
        try:
            (self._folder / f"first.{what}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def watch_for_end(store: Path) -> None:
    """Kill this process when :func:`end_agent` is called for the store.

    This indirection is necessary because workers cannot send signals to the agent.
    """
    (store / _END).unlink(missing_ok=True)
    os.mkfifo(store / _END)

    def watch() -> None:
        (store / _END).read_bytes()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="kill-agent").start()


def end_agent(store: Path) -> None:
    """Kill the agent that watches the store. Never returns."""
    (store / _END).write_bytes(b"")
    time.sleep(3600)


class SimClock:
    """Clock of a board with the ``clock`` fault.

    :meth:`start` creates the clock's file in the simulator's directory.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        self._offset_ns: int = round(fault.keys["offset"] * 1e9)
        self._rate: float = fault.keys["ppm"] * 1e-6
        self._jump_ns: int = round(fault.keys["jump"] * 1e9)
        with (folder / _CLOCK_FILE).open("r+b") as file:
            # Use aligned integers, so that concurrent readers never see a partial write.
            self._shared = memoryview(mmap.mmap(file.fileno(), _STATE.size)).cast("q")
        self._started_ns: int = self._shared[_STARTED]

    @staticmethod
    def start(folder: Path) -> None:
        """Start the clock. Call this before any process reads it."""
        (folder / _CLOCK_FILE).write_bytes(_STATE.pack(time.monotonic_ns(), 0))

    def install(self) -> None:
        """Use this clock for all timestamps of the process."""
        clock.replace_clock(self.now_ns)

    def now_ns(self) -> int:
        """Return the clock's time in nanoseconds."""
        now = time.monotonic_ns()
        gained = int((now - self._started_ns) * self._rate)
        return now + self._offset_ns + self._shared[_AHEAD] + gained

    def jump(self) -> None:
        """Jump forward, at most once, in all processes."""
        self._shared[_AHEAD] = self._jump_ns
