"""What a board is asked by plain sh, and its answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.devices.deploy.errors import STAGE
from hil.controller.devices.deploy.wheels import Interpreter
from hil.errors import BoardError

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

_SCRIPT = Path(__file__).with_name("board_side.sh")
# Starting five interpreters on a slow board takes its time; so does removing a thousand files from a memory card.
_ANSWER_S = 120.0
_KIB = 1024
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class Installed:
    """The agent that was deployed last.

    Attributes:
        build: its content id.
        recipe: what it was made to.
        runtimes: the runtimes it was given.
        python: the interpreter that it runs on.
        packages: its packages' names.
    """

    build: str
    recipe: str
    runtimes: tuple[str, ...]
    python: str
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """What is on a board.

    Attributes:
        folder: hil's folder there, absolute.
        running: (process, build) of the agent that runs, or None.
        python: the interpreter that an agent runs on which is as it was asked for; "" without one.
        installed: the agent that was deployed last, or None.
        complete: nothing of that agent is missing, and it is what was asked for.
        packages: the packages that are there.
        machine, system: ``aarch64``, ``Linux``; "" where they were not asked for.
        interpreters: the Pythons that answered.
        broken: (path, what it said) of those that did not.
        free_bytes: what the folder's disk has left; None where it could not be told.
        used_bytes: what hil's folder takes; None where it was not asked for.
        unusable: why the folder cannot be written; "" where it can.
        noexec: nothing can be run from it.
        left: (path, why) of what cleaning left behind.
        busy: the process of an agent that did not leave because somebody has the device, or 0.
        stopped: the process of an agent that was ended, or 0.
        deploying: somebody puts an agent there just now, which kept `clean` out.
    """

    folder: str = ""
    running: tuple[int, str] | None = None
    python: str = ""
    installed: Installed | None = None
    complete: bool = False
    packages: frozenset[str] = frozenset()
    machine: str = ""
    system: str = ""
    interpreters: tuple[Interpreter, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()
    free_bytes: int | None = None
    used_bytes: int | None = None
    unusable: str = ""
    noexec: bool = False
    left: tuple[tuple[str, str], ...] = ()
    busy: int = 0
    stopped: int = 0
    deploying: bool = False


def ask(shell: Shell, act: str, folder: str, *arguments: str, board: str) -> Seen:
    """Ask a board something: ``probe``, ``status``, ``stop``, ``clean`` or ``reset_fence``, each in one round trip.

    Raises:
        BoardError: it has no usable sh, or answered something else.
        BoardLost: it did not answer.
    """
    text = ask_text(shell, act, folder, *arguments, board=board)
    seen = parse(text)
    if not seen.folder:
        raise _strange(act, text, board)
    return seen


def ask_text(shell: Shell, act: str, folder: str, *arguments: str, board: str) -> str:
    """The bare answer to a question; raises as :func:`ask`."""
    command = ["sh", "-s", "--", act, folder, *arguments]
    done = shell.run(command, stdin=_SCRIPT.read_bytes(), timeout=_ANSWER_S, check=False)
    if done.code:  # the script itself ends with 0 whatever it finds
        raise _strange(act, done.err or done.text, board)
    return done.out.decode(errors="replace")


def _strange(act: str, said: str, board: str) -> BoardError:
    return BoardError(
        f"the board did not answer `{act}` as a Unix system would",
        board=board,
        stage=STAGE,
        hint="hil needs a login with a POSIX sh on the board",
        detail=said.strip()[-2000:],
    )


def parse(text: str) -> Seen:
    """Read a board's answers; lines that are none, a login's greeting say, are left out."""
    found: dict[str, list[Sequence[str]]] = {}
    for line in text.splitlines():
        word, *values = line.split("\t")
        found.setdefault(word, []).append(values)

    def one(word: str, index: int = 0) -> str:
        values = found.get(word, [()])[-1]
        return values[index] if index < len(values) else ""

    installed = None
    if "installed" in found:
        build, recipe, runtimes, python, packages = (one("installed", index) for index in range(5))
        installed = Installed(build, recipe, tuple(runtimes.split()), python, tuple(packages.split()))
    interpreters = {one.path: one for one in map(_interpreter, found.get("python", [])) if one}
    return Seen(
        folder=one("folder"),
        running=(_number(one("up")) or 0, one("up", 1)) if "up" in found else None,
        python=one("up", 2),
        installed=installed,
        complete="complete" in found,
        packages=frozenset(values[0] for values in found.get("package", []) if values),
        machine=one("machine"),
        system=one("machine", 1),
        interpreters=tuple(interpreters.values()),
        broken=tuple((values[0], values[-1].strip()) for values in found.get("broken", []) if values),
        free_bytes=_kib(one("free")),
        used_bytes=_kib(one("used")),
        unusable=one("unusable"),
        noexec="noexec" in found,
        left=tuple((values[0], values[-1]) for values in found.get("left", []) if values),
        busy=_number(one("busy")) or 0,
        stopped=_number(one("stopped")) or 0,
        deploying="deploying" in found,
    )


def _interpreter(values: Sequence[str]) -> Interpreter | None:
    if len(values) != 5:
        return None
    version, machine, libc, path, problem = values
    major, _, minor = version.partition(".")
    numbers = _number(major), _number(minor)
    if numbers[0] is None or numbers[1] is None:
        return None
    return Interpreter(path, (numbers[0], numbers[1]), machine, libc, problem)


def _number(text: str) -> int | None:
    """A whole number that a board told; None for what no board has, such as one of 6,000 digits."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _kib(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * _KIB
