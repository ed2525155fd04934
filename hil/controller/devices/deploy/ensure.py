"""Having an agent on a board: what is there is asked, what is missing is sent, and it is started.

Sending and starting are one command on the board, see board_side.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.devices.deploy import packages as packing
from hil.controller.devices.deploy.packages import File, Interpreter, NoAgentHere, NoWheels, Package, megabytes
from hil.controller.devices.deploy.probe import AgentBuild, Seen, ask
from hil.controller.devices.deploy.wheels import Group, agent_group, packages_for, runtime_group
from hil.controller.storage.cache import Cache
from hil.core import scratch
from hil.core.scratch import temporary_folder
from hil.core.text import TextSink
from hil.errors import BoardBusy, BoardError, locating

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell


_BOARD_SIDE = Path(__file__).with_name("board_side.py")
# An agent that nobody has used for so long leaves; the next run starts it again within a second or two.
IDLE_EXIT_S = 900
# The limit of one push: what starting takes on a slow board, and the slowest link that is worth waiting for.
_BASE_S = 180.0
# Of the answer, where it has them.
_TEXTS = ("status", "socket", "why", "log")
_SLOWEST_BYTES_S = 50_000
# Reads the script and runs it, the rest of stdin still unread. Short: a small SSH server takes no long command.
_LOADER = (
    "import sys; exec(compile(sys.stdin.buffer.read({size}), 'board_side.py', 'exec'), {{'__name__': '__main__'}})"
)


def install(
    shell: Shell, folder: str, agent: AgentBuild, pushed: Sequence[Package], *, say: TextSink = lambda text: None
) -> dict[str, Any]:
    """Send packages to hil's folder on a board, have that agent run; returns the board's answer (see board_side.py).

    ``say`` is told how far the sending has come, where it takes long. OSError is of this machine.
    """
    script = _BOARD_SIDE.read_bytes()
    order = {
        "folder": folder,
        "build": agent.build,
        "recipe": agent.recipe,
        "runtimes": agent.runtimes,
        "packages": agent.packages,
        "options": [f"--idle-exit={IDLE_EXIT_S}"],
        "frames": [{"id": one.id, "size": one.size, "sha256": one.sha256} for one in pushed],
    }
    command = [agent.python, "-I", "-S", "-B", "-c", _LOADER.format(size=len(script))]
    with tempfile.NamedTemporaryFile(prefix="hil-push-", dir=scratch.place()) as stream:
        stream.write(script)
        stream.write(json.dumps(order).encode() + b"\n")
        for package in pushed:
            with package.path.open("rb") as source:
                shutil.copyfileobj(source, stream, 1 << 20)
        stream.flush()
        total = stream.tell()
        progress = packing.Progress(say, "pushing")
        timeout = _BASE_S + total / _SLOWEST_BYTES_S
        count: dict[str, Any] = {"progress": lambda size: progress.more(size, total)}
        done = shell.run(command, stdin=Path(stream.name), timeout=timeout, check=False, **count)
    for line in reversed(done.text.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            answer: dict[str, Any] = json.loads(line)
            if _is_answer(answer):
                return answer
    raise BoardError(
        f"putting the agent on the board failed with exit code {done.code}",
        hint="the board's own words are below",
        detail=(done.err or done.text).strip()[-4000:],
    )


def _is_answer(answer: Any) -> bool:
    """Whether it is what board_side.py answers, and not another line that is JSON."""
    if not isinstance(answer, dict) or not all(isinstance(answer.get(key, ""), str) for key in _TEXTS):
        return False
    return bool(answer.get("socket") if answer.get("status") == "ok" else answer.get("status"))


_OLDEST_PYTHON = (3, 10)
_TRIED_PYTHON = (3, 13)
_NEWEST_PYTHON = (3, 14)
# Beside the packages: bytecode, the log, and room for a first program.
_MARGIN_BYTES = 16 << 20
# A Unix socket's path, by Linux's own limit.
_LONGEST_SOCKET = 107
_POLL_S = 0.5
# Somebody else's deploy over a slow link, and somebody else's session with another agent.
_WAIT_S = {"locked": 600.0, "busy": 60.0, "missing": 60.0}
_WAITING = {
    "locked": "another deploy to this board is under way; waiting for it",
    "busy": "the agent of another version on this board is in use; waiting for its session to end",
}
_NAMED = 3


@dataclass(frozen=True)
class AgentPlace:
    """An agent that runs on a board."""

    socket: str
    folder: str
    build: str  # its content id, which Describe tells too
    python: str
    pushed_bytes: int


@dataclass(frozen=True)
class Recipe:
    """What an agent is to be made of, wherever it will run: hil's own files, its packages, the runtimes asked for."""

    files: dict[str, File]
    agent: Group
    runtimes: tuple[Group, ...]

    @staticmethod
    def of(runtimes: Sequence[str]) -> Recipe:
        """The recipe of this hil, with these runtimes."""
        groups = tuple(map(runtime_group, dict.fromkeys(runtimes)))
        return Recipe(packing.own_files(), agent_group(), groups)

    @property
    def digest(self) -> str:
        """What two agents have in common that may stand for each other, their runtimes aside."""
        own = hashlib.sha256(packing.archive_of(self.files)).hexdigest()
        parts = [str(packing.FORMAT), packing.package_id(packing.own_title(), own)]
        parts += sorted(one.loose for one in self.agent.wanted)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def runtime_names(self) -> tuple[str, ...]:
        """The runtimes, with the version where only one will do: ``iree=3.13.0``."""
        return tuple(sorted(group.name for group in self.runtimes))

    def joined(self, others: Sequence[str]) -> Recipe:
        """With the runtimes too that a board has already: two users must not take each other's away."""
        have = {group.name.partition("=")[0] for group in self.runtimes}
        names = [name for name in (one.partition("=")[0] for one in others) if name not in have]
        return replace(self, runtimes=self.runtimes + tuple(runtime_group(name) for name in names))


def ensure_agent(shell: Shell, recipe: Recipe, *, folder: str, board: str, say: TextSink) -> AgentPlace:
    """Have an agent of a recipe run on a board: one round trip where it does already.

    Args:
        recipe: what it is made of. It keeps the runtimes that it was given before, too.
        folder: hil's folder there; "" is ``.hil`` in the login's home, as relative ones lie there too.

    Raises:
        NoAgentHere: no agent can run there: no Python (NoPython), or no wheels for it (NoWheels).
        BoardBusy: an agent of another build is there, and somebody goes on using it.
        BoardError: the folder cannot be used, the disk is full, the agent does not start.
        BoardLost: the board stopped answering.
        StorageError: there is no room here for what is to be sent.
    """
    with locating(stage="deploy", board=board):
        return _put(shell, recipe, folder=folder, board=board, say=say)


def _put(shell: Shell, recipe: Recipe, *, folder: str, board: str, say: TextSink) -> AgentPlace:
    # When the deploy began to wait for each thing. Not set back: two things may go on taking turns.
    since: dict[str, float] = {}
    pushed_bytes = 0
    status = ""
    while True:
        seen = ask(shell, "probe", folder, recipe.digest, *recipe.runtime_names, board=board)
        if seen.running:
            return AgentPlace(f"{seen.folder}/run/agent.sock", seen.folder, seen.running[1], seen.python, pushed_bytes)
        with packing.at_home(), temporary_folder("hil-own-") as place:
            agent, packages = _plan(seen, recipe, Path(place), say)
            missing = [package for package in packages if package.id not in seen.packages]
            # While another deploy is at work it sends what we would: ask first whether it is done.
            sent = [] if status == "locked" else missing
            if sent:
                _check_room(seen, sent)
                say(f"pushing {_named(sent)}")
            if status == "":
                say("starting the agent")
            answer = install(shell, seen.folder, agent, sent, say=say)
        if answer["status"] == "ok":
            pushed_bytes += sum(package.size for package in sent)
            return AgentPlace(answer["socket"], seen.folder, agent.build, agent.python, pushed_bytes)
        if answer["status"] not in _WAIT_S:
            raise _failed(answer, seen)
        status = answer["status"]
        _wait(status, since, say)


def _wait(status: str, since: dict[str, float], say: TextSink) -> None:
    if status not in since and status in _WAITING:
        say(_WAITING[status])
    if time.monotonic() - since.setdefault(status, time.monotonic()) > _WAIT_S[status]:
        used = "an agent of another version is on the board, and somebody uses it"
        what = used if status == "busy" else "another deploy to the board does not end"
        raise BoardBusy(what, hint="try again once they are done; `hil board clean --force` ends what runs there")
    time.sleep(_POLL_S)


def _plan(seen: Seen, recipe: Recipe, own: Path, say: TextSink) -> tuple[AgentBuild, list[Package]]:
    """What to install, and the packages that it is made of; none where all of it is there already."""
    if seen.complete and seen.installed:
        return seen.installed, []
    _check_folder(seen)
    if seen.installed:
        recipe = recipe.joined(seen.installed.runtimes)
    interpreter, packages = _choose(seen, recipe, say)
    packages = [packing.write_package(packing.own_title(), recipe.files, own), *packages]
    names = tuple(package.id for package in packages)
    build = hashlib.sha256("\n".join([interpreter.path, *sorted(names)]).encode()).hexdigest()[:16]
    return AgentBuild(build, recipe.digest, recipe.runtime_names, interpreter.path, names), packages


def _choose(seen: Seen, recipe: Recipe, say: TextSink) -> tuple[Interpreter, list[Package]]:
    """The board's best Python for which there are packages, and these."""
    groups = (recipe.agent, *recipe.runtimes)
    refused: list[NoWheels] = []
    for interpreter in usable_interpreters(seen):
        try:
            return interpreter, packages_for(interpreter, groups, say=say, cache=Cache())
        except NoWheels as error:
            refused.append(error)
    raise refused[0]


def usable_interpreters(seen: Seen) -> list[Interpreter]:
    """The Pythons of a board that can run an agent, the best first; raises NoAgentHere where there is none."""
    if seen.system not in ("", "Linux"):
        raise NoAgentHere(f"the agent needs Linux, and the board runs {seen.system}")
    good = [one for one in seen.interpreters if _OLDEST_PYTHON <= one.version <= _NEWEST_PYTHON and not one.problem]
    if not good:
        lines = [f"{one.text}, {one.path}" + (f": {one.problem}" if one.problem else "") for one in seen.interpreters]
        lines += [f"{path}: {words}" for path, words in seen.broken]
        raise packing.NoPython(
            "the board has no Python 3.10 or newer that the agent could run on",
            hint=f"install one (python3 and its standard library), or: {packing.COMMAND_HINT}",
            detail="\n".join(lines),
        )
    here = tuple(sys.version_info[:2])
    # This machine's own version first: what is installed here is sure to be published for it.
    return sorted(good, key=lambda one: (one.version != here, one.version > _TRIED_PYTHON, -one.version[1]))


def _check_folder(seen: Seen) -> None:
    hint = 'name a folder that will do in the board\'s config: [connection] folder = "/..."'
    problem = ""
    if seen.unusable:
        problem = f"cannot be used: {seen.unusable}"
    elif seen.noexec:
        problem = "is on a file system from which nothing can be run (noexec)"
    elif len(f"{seen.folder}/run/agent.sock".encode()) > _LONGEST_SOCKET:
        problem = "has too long a path for a Unix socket in it"
    elif ":" in seen.folder or not seen.folder.isprintable():
        problem = "has a name that cannot be used in a path list"
    if problem:
        raise BoardError(f"hil's folder on the board, {seen.folder}, {problem}", hint=hint)


def _check_room(seen: Seen, packages: Sequence[Package]) -> None:
    needed = sum(package.disk_bytes for package in packages) + _MARGIN_BYTES
    if seen.free_bytes is not None and seen.free_bytes < needed:
        have = megabytes(seen.free_bytes)
        raise BoardError(
            f"the agent needs {megabytes(needed)} in {seen.folder} on the board, which has {have} left",
            hint='make room there, or name another folder in the board\'s config: [connection] folder = "/..."',
        )


def _failed(answer: dict[str, Any], seen: Seen) -> BoardError:
    what = f"putting the agent there failed: {answer.get('why')}"
    hint = "`hil board clean` removes what is there; the next run puts it there anew"
    if answer.get("errno") in (errno.ENOSPC, errno.EDQUOT):
        what, hint = f"the board's disk is full: {seen.folder}", "make room there; what has arrived is kept"
    return BoardError(what, hint=hint, detail=answer.get("log", ""))


def _named(packages: Sequence[Package]) -> str:
    ordered = sorted(packages, key=lambda package: -package.size)
    names = ", ".join(f"{package.title} ({megabytes(package.size)})" for package in ordered[:_NAMED])
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return f"{names}{more}, {megabytes(sum(package.size for package in packages))}"
