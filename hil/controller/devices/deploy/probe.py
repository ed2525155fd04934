"""What a board is asked by plain sh, and its answers: what hil has there, its log; end the agent, clean up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.devices.deploy.packages import Interpreter
from hil.errors import BoardBusy, BoardError, locating

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

_SCRIPT = Path(__file__).with_name("board_side.sh")
# Starting five interpreters on a slow board takes its time; so does removing a thousand files from a memory card.
_ANSWER_S = 120.0
_KIB = 1024
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class AgentBuild:
    """What an agent is made of and runs on: ``build`` is its content id, ``recipe`` what it was made to."""

    build: str = ""
    recipe: str = ""
    runtimes: tuple[str, ...] = ()
    python: str = ""
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """What is on a board."""

    folder: str = ""  # hil's folder there, absolute
    running: tuple[int, str] | None = None  # (process, build) of the agent that runs, or None
    python: str = ""  # the interpreter that an agent runs on which is as it was asked for; "" without one
    installed: AgentBuild | None = None
    complete: bool = False  # nothing of that agent is missing, and it is what was asked for
    packages: frozenset[str] = frozenset()
    # machine, system: ``aarch64``, ``Linux``; "" where they were not asked for.
    machine: str = ""
    system: str = ""
    interpreters: tuple[Interpreter, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()  # (path, what it said) of those that did not
    free_bytes: int | None = None  # what the folder's disk has left; None where it could not be told
    used_bytes: int | None = None  # what hil's folder takes; None where there is none, or it was not asked for
    unusable: str = ""  # why the folder cannot be written; "" where it can
    noexec: bool = False  # nothing can be run from it
    left: tuple[tuple[str, str], ...] = ()  # (path, why) of what cleaning left behind
    busy: int = 0  # the process of an agent that did not leave because somebody has the device, or 0
    stopped: int = 0  # the process of an agent that was ended, or 0
    deploying: bool = False  # somebody puts an agent there just now, which kept `clean` out

    @property
    def agent(self) -> AgentBuild:
        """The agent that was deployed last; its texts are empty where none was."""
        return self.installed or AgentBuild()

    @property
    def pid(self) -> int:
        """The agent's process; 0 where none runs."""
        return self.running[0] if self.running else 0

    @property
    def build(self) -> str:
        """The content id of the agent that runs, or else of the one that was deployed last; "" without either."""
        return self.running[1] if self.running else self.agent.build


def ask(shell: Shell, act: str, folder: str, *arguments: str, board: str = "") -> Seen:
    """Ask a board something: ``probe``, ``status``, ``stop``, ``clean`` or ``reset_fence``, each in one round trip.

    Raises:
        BoardBusy: somebody has the device and the agent does not leave before that session ends, or somebody puts an
            agent there; what ``force`` ends is not waited for.
        BoardError: it has no usable sh, or answered something else, or something could not be removed.
        BoardLost: it did not answer.
    """
    with locating(stage="deploy", board=board or shell.address):
        text = _output_of(shell, act, folder, *arguments)
        seen = parse(text)
        if not seen.folder:
            raise _strange(act, text)
        if seen.busy:
            raise BoardBusy(
                "somebody uses the agent on the board", hint="it leaves once that session ends; --force ends it now"
            )
        if seen.deploying:
            raise BoardBusy(
                "somebody puts an agent on the board just now",
                hint="try again in a moment; `hil board clean --force` does not wait for them",
            )
        if seen.left and act == "reset_fence":
            raise BoardError(f"{seen.left[0][0]} could not be removed: {seen.left[0][1]}")
        if seen.left:
            raise BoardError(
                f"not all of {seen.folder} could be removed",
                hint="what is none of hil's stays; remove it by hand if it is not needed",
                detail="\n".join(f"{path}: {why}" for path, why in seen.left),
            )
    return seen


def _output_of(shell: Shell, act: str, folder: str, *arguments: str) -> str:
    command = ["sh", "-s", "--", act, folder, *arguments]
    done = shell.run(command, stdin=_SCRIPT.read_bytes(), timeout=_ANSWER_S, check=False)
    if done.code:  # the script itself ends with 0 whatever it finds
        raise _strange(act, done.err or done.text)
    return done.out.decode(errors="replace")


def _strange(act: str, answer: str) -> BoardError:
    return BoardError(
        f"the board did not answer `{act}` as a Unix system would",
        hint="hil needs a login with a POSIX sh on the board",
        detail=answer.strip()[-2000:],
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

    build, recipe, runtimes, python, packages = (one("installed", index) for index in range(5))
    installed = AgentBuild(build, recipe, tuple(runtimes.split()), python, tuple(packages.split()))
    interpreters = {one.path: one for one in map(_interpreter, found.get("python", [])) if one}
    return Seen(
        folder=one("folder"),
        running=(_number(one("up")) or 0, one("up", 1)) if "up" in found else None,
        python=one("up", 2),
        installed=installed if "installed" in found else None,
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


def status(shell: Shell, folder: str, *, board: str = "") -> Seen:
    """What hil has on a board, without changing anything; raises as :func:`ask`."""
    return ask(shell, "status", folder, board=board)


def stop(shell: Shell, folder: str, *, board: str = "", force: bool = False) -> bool:
    """End the agent, by ``force`` even if somebody has the device or it is silent; returns whether one ran."""
    return bool(ask(shell, "stop", folder, _manner(force), board=board).stopped)


def clean(shell: Shell, folder: str, *, board: str = "", force: bool = False) -> Seen:
    """End the agent and remove all that hil put on the board; returns what there was. Raises as :func:`ask`."""
    before = status(shell, folder, board=board)
    ask(shell, "clean", folder, _manner(force), board=board)
    return before


def reset_fence(shell: Shell, folder: str, *, board: str = "", force: bool = False) -> None:
    """End the agent and let its count of fences begin anew; raises as :func:`ask`."""
    ask(shell, "reset_fence", folder, _manner(force), board=board)


def logs(shell: Shell, folder: str, *, lines: int = 200) -> str:
    """The last lines that the agent wrote; "" where there are none; raises as :func:`ask`."""
    with locating(stage="deploy", board=shell.address):
        return _output_of(shell, "logs", folder, str(lines))


def _manner(force: bool) -> str:
    return "force" if force else "polite"
