"""Query and clean a board with a plain sh script: probe, status, logs, stop, clean and reset_fence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.devices.deploy.packages import Interpreter
from hil.errors import BoardBusy, BoardError, locate_errors

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

_SCRIPT = Path(__file__).with_name("board_side.sh")
# Timeout in seconds. A slow board needs long to start five interpreters, or to remove a thousand files from a memory
# card.
_ANSWER_SECONDS = 120.0
_KIB = 1024
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class AgentBuild:
    """Contents of an agent: ``build`` is its content id, ``recipe`` the digest of the recipe."""

    build: str = ""
    recipe: str = ""
    runtimes: tuple[str, ...] = ()
    python: str = ""
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """State of hil on a board."""

    folder: str = ""  # absolute path of hil's directory
    running: tuple[int, str] | None = None  # (PID, build) of the running agent, or None
    python: str = ""  # interpreter of a running agent that matches the request; "" without such an agent
    installed: AgentBuild | None = None
    complete: bool = False  # the installed agent has all files and matches the request
    packages: frozenset[str] = frozenset()
    # machine and system, such as ``aarch64`` and ``Linux``; "" if not requested.
    machine: str = ""
    system: str = ""
    interpreters: tuple[Interpreter, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()  # (path, output) of interpreters that failed
    free_bytes: int | None = None  # free space on the directory's disk; None if unknown
    used_bytes: int | None = None  # size of hil's directory; None if missing or not requested
    unusable: str = ""  # why the directory is not writable; "" if it is writable
    noexec: bool = False  # the file system forbids execution
    left: tuple[tuple[str, str], ...] = ()  # (path, reason) of files that clean did not remove
    busy: int = 0  # PID of an agent that continues because the device is in use, or 0
    stopped: int = 0  # PID of an agent that was stopped, or 0
    deploying: bool = False  # a deploy in progress blocked `clean`

    @property
    def agent(self) -> AgentBuild:
        """Agent that was deployed last. All fields are empty if no agent was deployed."""
        return self.installed or AgentBuild()

    @property
    def pid(self) -> int:
        """PID of the agent; 0 if it does not run."""
        return self.running[0] if self.running else 0

    @property
    def build(self) -> str:
        """Content id of the running agent, or else of the last deployed agent; "" if the board has neither."""
        return self.running[1] if self.running else self.agent.build


def ask(shell: Shell, act: str, folder: str, *arguments: str, board: str = "") -> Seen:
    """Run an action on a board: ``probe``, ``status``, ``stop``, ``clean`` or ``reset_fence``. Each is one round trip.

    Raises:
        BoardBusy: The agent does not exit because the device is in use, or a deploy is in progress. With ``force``, the
            action does not wait for either.
        BoardError: The board has no usable sh, printed an invalid response, or could not remove a file.
        BoardLost: The board did not respond.
    """
    with locate_errors(stage="deploy", board=board or shell.address):
        text = _run_probe(shell, act, folder, *arguments)
        seen = parse(text)
        if not seen.folder:
            raise _make_response_error(act, text)
        if seen.busy:
            raise BoardBusy(
                "the agent on the board is in use", hint="wait for the session to end, or stop it with --force"
            )
        if seen.deploying:
            raise BoardBusy(
                "a deploy to the board is already in progress",
                hint="retry in a moment, or use `hil board clean --force`, which does not wait",
            )
        if seen.left and act == "reset_fence":
            raise BoardError(f"cannot remove {seen.left[0][0]}: {seen.left[0][1]}")
        if seen.left:
            raise BoardError(
                f"cannot remove all of {seen.folder}",
                hint="hil does not remove unknown files; remove them manually if they are not needed",
                detail="\n".join(f"{path}: {why}" for path, why in seen.left),
            )
    return seen


def _run_probe(shell: Shell, act: str, folder: str, *arguments: str) -> str:
    command = ["sh", "-s", "--", act, folder, *arguments]
    done = shell.run(command, stdin=_SCRIPT.read_bytes(), timeout=_ANSWER_SECONDS, check=False)
    if done.code:  # the script itself always exits with 0
        raise _make_response_error(act, done.err or done.text)
    return done.out.decode(errors="replace")


def _make_response_error(act: str, answer: str) -> BoardError:
    return BoardError(
        f"unexpected response of the board to `{act}`",
        hint="hil requires a login with a POSIX sh on the board",
        detail=answer.strip()[-2000:],
    )


def parse(text: str) -> Seen:
    """Parse the script's output. Other lines, such as a login banner, are ignored."""
    found: dict[str, list[Sequence[str]]] = {}
    for line in text.splitlines():
        word, *values = line.split("\t")
        found.setdefault(word, []).append(values)

    def find_value(word: str, index: int = 0) -> str:
        values = found.get(word, [()])[-1]
        return values[index] if index < len(values) else ""

    build, recipe, runtimes, python, packages = (find_value("installed", index) for index in range(5))
    installed = AgentBuild(build, recipe, tuple(runtimes.split()), python, tuple(packages.split()))
    interpreters = {one.path: one for one in map(_parse_interpreter, found.get("python", [])) if one}
    return Seen(
        folder=find_value("folder"),
        running=(_number(find_value("up")) or 0, find_value("up", 1)) if "up" in found else None,
        python=find_value("up", 2),
        installed=installed if "installed" in found else None,
        complete="complete" in found,
        packages=frozenset(values[0] for values in found.get("package", []) if values),
        machine=find_value("machine"),
        system=find_value("machine", 1),
        interpreters=tuple(interpreters.values()),
        broken=tuple((values[0], values[-1].strip()) for values in found.get("broken", []) if values),
        free_bytes=_parse_kib(find_value("free")),
        used_bytes=_parse_kib(find_value("used")),
        unusable=find_value("unusable"),
        noexec="noexec" in found,
        left=tuple((values[0], values[-1]) for values in found.get("left", []) if values),
        busy=_number(find_value("busy")) or 0,
        stopped=_number(find_value("stopped")) or 0,
        deploying="deploying" in found,
    )


def _parse_interpreter(values: Sequence[str]) -> Interpreter | None:
    if len(values) != 5:
        return None
    version, machine, libc, path, problem = values
    major, _, minor = version.partition(".")
    numbers = _number(major), _number(minor)
    if numbers[0] is None or numbers[1] is None:
        return None
    return Interpreter(path, (numbers[0], numbers[1]), machine, libc, problem)


def _number(text: str) -> int | None:
    """Parse a decimal integer of at most 15 digits. Return None otherwise."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _parse_kib(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * _KIB


def read_status(shell: Shell, folder: str, *, board: str = "") -> Seen:
    """Return the state of hil on a board without changing it. Raises the errors of :func:`ask`."""
    return ask(shell, "status", folder, board=board)


def stop(shell: Shell, folder: str, *, board: str = "", force: bool = False) -> bool:
    """Stop the agent.

    With ``force``, also stop a hanging agent, or an agent with the device in use. Return whether an agent ran.
    """
    return bool(ask(shell, "stop", folder, _choose_manner(force), board=board).stopped)


def clean(shell: Shell, folder: str, *, board: str = "", force: bool = False) -> Seen:
    """Stop the agent and remove all of hil's files from the board. Return the previous state.

    Raises the errors of :func:`ask`.
    """
    before = read_status(shell, folder, board=board)
    ask(shell, "clean", folder, _choose_manner(force), board=board)
    return before


def reset_fence(shell: Shell, folder: str, *, board: str = "", force: bool = False) -> None:
    """Stop the agent and reset the fence counter. Raises the errors of :func:`ask`."""
    ask(shell, "reset_fence", folder, _choose_manner(force), board=board)


def read_logs(shell: Shell, folder: str, *, lines: int = 200) -> str:
    """Return the last lines of the agent's log; "" if the log is empty. Raises the errors of :func:`ask`."""
    with locate_errors(stage="deploy", board=shell.address):
        return _run_probe(shell, "logs", folder, str(lines))


def _choose_manner(force: bool) -> str:
    return "force" if force else "polite"
