"""Ensure that an agent runs on a board: probe the board, send missing packages, and start the agent.

Sending and starting are one command on the board; see board_side.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.devices.deploy import packages as packing
from hil.controller.devices.deploy.packages import File, Interpreter, NoAgentHere, NoWheels, Package, format_megabytes
from hil.controller.devices.deploy.probe import AgentBuild, Seen, ask
from hil.controller.devices.deploy.vendor_packages import MARK, VendorPackage
from hil.controller.devices.deploy.wheels import WheelGroup, fetch_packages, make_agent_group, make_runtime_group
from hil.controller.storage.cache import Cache
from hil.core import scratch
from hil.core.disk_faults import FULL, make_disk_error
from hil.core.files import open_file
from hil.core.scratch import make_temporary_folder
from hil.core.text import TextSink
from hil.errors import BoardBusy, BoardError, BoardLost, BoardUnfit, locate_errors
from hil.protocol.local_socket import MAX_PATH_LENGTH

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell


_BOARD_SIDE = Path(__file__).with_name("board_side.py")
# Idle timeout of the agent in seconds. The next run restarts the agent within one or two seconds.
IDLE_EXIT_SECONDS = 900
# Time limit of a push: start time on a slow board plus transfer time on the slowest supported link.
_BASE_SECONDS = 180.0
# Optional text fields of the response.
_TEXTS = ("status", "socket", "why", "log")
_MIN_BYTES_PER_SECOND = 50_000
# Program that reads and runs the script, and leaves the rest of stdin unread. It is short, because small SSH servers
# limit command lengths.
_LOADER = (
    "import sys; exec(compile(sys.stdin.buffer.read({size}), 'board_side.py', 'exec'), {{'__name__': '__main__'}})"
)


def install(
    shell: Shell, folder: str, agent: AgentBuild, pushed: Sequence[Package], *, say: TextSink = lambda text: None
) -> dict[str, Any]:
    """Send packages to hil's directory on a board and start the agent. Return the board's response (see board_side.py).

    ``say`` is called with the progress of a long transfer. An OSError is an error of this machine, not of the board.
    """
    script = _BOARD_SIDE.read_bytes()
    order = {
        "folder": folder,
        "build": agent.build,
        "recipe": agent.recipe,
        "runtimes": agent.runtimes,
        "packages": agent.packages,
        "options": [f"--idle-exit={IDLE_EXIT_SECONDS}", "--claim-board"],
        "frames": [{"id": one.id, "size": one.size, "sha256": one.sha256} for one in pushed],
    }
    command = [agent.python, "-I", "-S", "-B", "-c", _LOADER.format(size=len(script))]
    with tempfile.NamedTemporaryFile(prefix="hil-push-", dir=scratch.place()) as stream:
        stream.write(script)
        stream.write(json.dumps(order).encode() + b"\n")
        for package in pushed:
            with open_file(package.path) as source:
                shutil.copyfileobj(source, stream, 1 << 20)
        stream.flush()
        total = stream.tell()
        progress = packing.ProgressPrinter(say, "pushing")
        timeout = _BASE_SECONDS + total / _MIN_BYTES_PER_SECOND
        count: dict[str, Any] = {"progress": lambda size: progress.add_progress(size, total)}
        done = shell.run(command, stdin=Path(stream.name), timeout=timeout, check=False, **count)
    for line in reversed(done.text.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            answer: dict[str, Any] = json.loads(line)
            if _is_answer(answer):
                return answer
    raise BoardError(
        f"installing the agent on the board failed with exit code {done.code}",
        hint="see the board's output below",
        detail=(done.err or done.text).strip()[-4000:],
    )


def _is_answer(answer: Any) -> bool:
    """Return whether a JSON value is a response of board_side.py, and not other output."""
    if not isinstance(answer, dict) or not all(isinstance(answer.get(key, ""), str) for key in _TEXTS):
        return False
    return bool(answer.get("socket") if answer.get("status") == "ok" else answer.get("status"))


_OLDEST_PYTHON = (3, 10)
_TRIED_PYTHON = (3, 13)
_NEWEST_PYTHON = (3, 14)
# Space in addition to the packages: bytecode, the log, and a first program.
_MARGIN_BYTES = 16 << 20
_POLL_SECONDS = 0.5
# Status -> maximum wait in seconds, for a concurrent deploy over a slow link or for a session of a different agent.
_WAIT_SECONDS = {"locked": 600.0, "busy": 60.0, "missing": 60.0}
_WAITING = {
    "locked": "waiting until another deploy to this board finishes",
    "busy": "waiting for the board: an agent of a different version is in use",
}
_MAX_LISTED = 3


@dataclass(frozen=True)
class AgentPlace:
    """Running agent on a board."""

    socket: str
    folder: str
    build: str  # content id, same as in Describe
    python: str
    pushed_bytes: int


@dataclass(frozen=True)
class AgentRecipe:
    """Contents of an agent for any board: hil's files, the agent's packages, and the requested runtimes."""

    files: dict[str, File]
    agent: WheelGroup
    runtimes: tuple[WheelGroup, ...]
    vendors: tuple[VendorPackage, ...] = ()
    kept: tuple[str, ...] = ()  # markers of vendors' packages that are already on the board

    @staticmethod
    def of(runtimes: Sequence[str], vendors: Sequence[VendorPackage] = ()) -> AgentRecipe:
        """Return the recipe of this hil with these runtimes, and with vendors' packages and their runtimes."""
        names = (*runtimes, *(name for vendor in vendors for name in vendor.runtimes))
        groups = tuple(map(make_runtime_group, dict.fromkeys(names)))
        return AgentRecipe(packing.own_files(), make_agent_group(), groups, tuple(vendors))

    @property
    def digest(self) -> str:
        """Digest of hil's files and the agent's packages.

        Agents with the same digest are interchangeable, except for runtimes.
        """
        own = hashlib.sha256(packing.archive_files(self.files)).hexdigest()
        parts = [str(packing.FORMAT), packing.make_package_id(packing.own_title(), own)]
        parts += sorted(one.loose for one in self.agent.wanted)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def runtime_names(self) -> tuple[str, ...]:
        """Names of the runtimes, with the version if it is pinned: ``iree=3.13.0``; and markers of packages."""
        markers = (*(vendor.marker for vendor in self.vendors), *self.kept)
        return tuple(sorted((*(group.name for group in self.runtimes), *markers)))

    def add_runtimes(self, others: Sequence[str]) -> AgentRecipe:
        """Return the recipe with the runtimes on the board added, so that users do not remove each other's runtimes.

        Vendors' packages on the board are kept, unless the recipe has another version.
        """
        have = {name.partition("=")[0] for name in self.runtime_names}
        new = [name for name in others if name.partition("=")[0] not in have]
        kept = tuple(name for name in new if name.startswith(MARK))
        groups = tuple(make_runtime_group(name.partition("=")[0]) for name in new if not name.startswith(MARK))
        return replace(self, runtimes=self.runtimes + groups, kept=self.kept + kept)

    def drop_missing(self, packages: Collection[str]) -> AgentRecipe:
        """Return the recipe without kept packages that are no longer on the board."""
        return replace(self, kept=tuple(one for one in self.kept if one.partition("=")[2] in packages))


def ensure_agent(shell: Shell, recipe: AgentRecipe, *, folder: str, board: str, say: TextSink) -> AgentPlace:
    """Ensure that an agent of a recipe runs on a board. If the agent already runs, the call takes one round trip.

    Args:
        recipe: Contents of the agent. Runtimes that the board already has are added.
        folder: hil's directory on the board, relative to the home directory; "" means ``.hil``.

    Raises:
        NoAgentHere: The board cannot run an agent: Python (NoPython) or wheels (NoWheels) are missing.
        BoardBusy: An agent of a different build stays in use.
        BoardUnfit: The directory is unusable, the disk is full or read-only, or the agent does not start.
        BoardError: The board's Python did not execute the order.
        BoardLost: The board stopped responding.
        StorageError: This machine lacks space for the packages.
    """
    with locate_errors(stage="deploy", board=board):
        return _put(shell, recipe, folder=folder, board=board, say=say)


def _put(shell: Shell, recipe: AgentRecipe, *, folder: str, board: str, say: TextSink) -> AgentPlace:
    # Status -> start time of the wait. The times are never reset, because two statuses may alternate.
    since: dict[str, float] = {}
    pushed_bytes = 0
    status = ""
    while True:
        seen = ask(shell, "probe", folder, recipe.digest, *recipe.runtime_names, board=board)
        if seen.running:
            return AgentPlace(f"{seen.folder}/run/agent.sock", seen.folder, seen.running[1], seen.python, pushed_bytes)
        with packing.translate_storage_errors(), make_temporary_folder("hil-own-") as place:
            agent, packages = _plan(seen, recipe, Path(place), say)
            missing = [package for package in packages if package.id not in seen.packages]
            # The other deploy may be sending the same packages, so check first whether it has finished.
            sent = [] if status == "locked" else missing
            if sent:
                _check_room(seen, sent)
                say(f"pushing {_name_packages(sent)}")
            if status == "":
                say("starting the agent")
            answer = install(shell, seen.folder, agent, sent, say=say)
        if answer["status"] == "ok":
            pushed_bytes += sum(package.size for package in sent)
            return AgentPlace(answer["socket"], seen.folder, agent.build, agent.python, pushed_bytes)
        if answer["status"] not in _WAIT_SECONDS:
            raise _make_deploy_error(answer, seen)
        status = answer["status"]
        _wait(status, since, say)


def _wait(status: str, since: dict[str, float], say: TextSink) -> None:
    if status not in since and status in _WAITING:
        say(_WAITING[status])
    if time.monotonic() - since.setdefault(status, time.monotonic()) > _WAIT_SECONDS[status]:
        used = "an agent of a different version on the board is in use"
        what = used if status == "busy" else "the running deploy to the board did not finish"
        raise BoardBusy(what, hint="retry later, or stop the other deploy with `hil board clean --force`")
    time.sleep(_POLL_SECONDS)


def _plan(seen: Seen, recipe: AgentRecipe, own: Path, say: TextSink) -> tuple[AgentBuild, list[Package]]:
    """Return the agent to install and the packages. The packages are empty if everything is installed."""
    _check_folder(seen)
    if seen.complete and seen.installed:
        return seen.installed, []
    if seen.installed:
        recipe = recipe.add_runtimes(seen.installed.runtimes).drop_missing(seen.packages)
    interpreter, packages = _choose(seen, recipe, say)
    packages = [packing.write_package(packing.own_title(), recipe.files, own), *packages]
    packages += [vendor.package for vendor in recipe.vendors]
    names = (*(package.id for package in packages), *(one.partition("=")[2] for one in recipe.kept))
    build = hashlib.sha256("\n".join([interpreter.path, *sorted(names)]).encode()).hexdigest()[:16]
    return AgentBuild(build, recipe.digest, recipe.runtime_names, interpreter.path, names), packages


def _choose(seen: Seen, recipe: AgentRecipe, say: TextSink) -> tuple[Interpreter, list[Package]]:
    """Return the board's best Python with available packages, and these packages."""
    groups = (recipe.agent, *recipe.runtimes)
    refused: list[NoWheels] = []
    interpreters = list_usable_interpreters(seen)
    if recipe.kept:
        # Compiled code of kept packages may run only on the Python of the installed agent.
        interpreters.sort(key=lambda one: one.path != seen.agent.python)
    for interpreter in interpreters:
        try:
            for vendor in recipe.vendors:
                vendor.check_platform(interpreter)
            return interpreter, fetch_packages(interpreter, groups, say=say, cache=Cache())
        except NoWheels as error:
            refused.append(error)
    raise refused[0]


def find_interpreter(shell: Shell, folder: str, board: str) -> Interpreter:
    """Return the best Python of a board. Raises NoAgentHere if no Python can run an agent."""
    # No agent has an empty recipe, so the board lists its interpreters.
    return list_usable_interpreters(ask(shell, "probe", folder, "", board=board))[0]


def list_usable_interpreters(seen: Seen) -> list[Interpreter]:
    """Return a board's Pythons that can run an agent, the best first. Raises NoAgentHere if no Python can."""
    if seen.system not in ("", "Linux"):
        raise NoAgentHere(f"the agent requires Linux, but the board runs {seen.system}")
    good = [one for one in seen.interpreters if _OLDEST_PYTHON <= one.version <= _NEWEST_PYTHON and not one.problem]
    if not good:
        lines = [f"{one.text}, {one.path}" + (f": {one.problem}" if one.problem else "") for one in seen.interpreters]
        lines += [f"{path}: {words}" for path, words in seen.broken]
        raise packing.NoPython(
            "the agent requires Python 3.10 or newer, which was not found on the board",
            hint=f"install python3 with the standard library, or: {packing.COMMAND_HINT}",
            detail="\n".join(lines),
        )
    here = tuple(sys.version_info[:2])
    # Prefer this machine's version of Python, because the installed packages are published for this version.
    return sorted(good, key=lambda one: (one.version != here, one.version > _TRIED_PYTHON, -one.version[1]))


def _check_folder(seen: Seen) -> None:
    hint = 'set a different directory in the board\'s config: [connection] folder = "/..."'
    problem = ""
    if seen.unusable:
        problem = f"is unusable: {seen.unusable}"
    elif seen.noexec:
        problem = "is on a file system mounted noexec"
    elif len(f"{seen.folder}/run/agent.sock".encode()) > MAX_PATH_LENGTH:
        problem = "exceeds the maximum length of a Unix socket path"
    elif ":" in seen.folder or not seen.folder.isprintable():
        problem = "contains a character that is invalid in a path list"
    if problem:
        raise BoardUnfit(f"hil's directory on the board, {seen.folder}, {problem}", hint=hint)


def _check_room(seen: Seen, packages: Sequence[Package]) -> None:
    needed = sum(package.disk_bytes for package in packages) + _MARGIN_BYTES
    if seen.free_bytes is not None and seen.free_bytes < needed:
        have = format_megabytes(seen.free_bytes)
        raise BoardUnfit(
            f"the agent needs {format_megabytes(needed)} in {seen.folder} on the board, but only {have} are free",
            hint='free disk space, or set a different directory in the board\'s config: [connection] folder = "/..."',
        )


def _make_deploy_error(answer: dict[str, Any], seen: Seen) -> BoardError:
    number = answer.get("errno")
    if number in {*FULL, errno.EROFS}:
        return make_disk_error(OSError(number, os.strerror(number)), Path(seen.folder), is_here=False)
    return (BoardLost if number == errno.EPIPE else BoardUnfit)(
        f"installing the agent failed: {answer.get('why')}",
        hint="remove the old files with `hil board clean`; the next run installs the agent",
        detail=answer.get("log", ""),
    )


def _name_packages(packages: Sequence[Package]) -> str:
    ordered = sorted(packages, key=lambda package: -package.size)
    names = ", ".join(f"{package.title} ({format_megabytes(package.size)})" for package in ordered[:_MAX_LISTED])
    more = f" and {len(ordered) - _MAX_LISTED} more" if len(ordered) > _MAX_LISTED else ""
    return f"{names}{more}, {format_megabytes(sum(package.size for package in packages))}"
