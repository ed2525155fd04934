"""Putting hil's agent on a board that is reached by a shell only, and taking it away again.

On the board everything lies in one folder that only its owner may read::

    packages/NAME-VERSION-DIGEST/   a wheel's files, or hil's own; never changed, shared by the agents
    agents/BUILD, agents/current    what an agent consists of, and which was started last
    run/                            agent.sock, agent.pid, agent.log, deploy.lock
    store/                          the agent's blobs and programs
    hil.txt                         says that all this is hil's; without it nothing there is used or removed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hil.controller.devices.deploy.ensure import AgentPlace, ensure_agent
from hil.controller.devices.deploy.errors import STAGE, NoAgentHere, NoPython, NoWheels
from hil.controller.devices.deploy.probe import Seen, ask, ask_text
from hil.errors import BoardBusy, BoardError

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

__all__ = [
    "AgentPlace",
    "AgentStatus",
    "NoAgentHere",
    "NoPython",
    "NoWheels",
    "clean",
    "ensure_agent",
    "logs",
    "reset_fence",
    "status",
    "stop",
]


@dataclass(frozen=True)
class AgentStatus:
    """What hil has on a board.

    Attributes:
        folder: hil's folder there.
        pid: the agent's process; 0 where none runs.
        build: the content id of the agent that runs, or else of the one that was deployed last; "" without either.
        runtimes: what that one was given, such as ``iree=3.13.0``.
        packages: the packages it consists of.
        python: the interpreter on the board that it runs on.
        used_bytes: what the folder takes; 0 where there is none.
        free_bytes: what its disk has left; None where that could not be told.
    """

    folder: str
    pid: int
    build: str
    runtimes: tuple[str, ...]
    packages: tuple[str, ...]
    python: str
    used_bytes: int
    free_bytes: int | None


def status(shell: Shell, folder: str, *, board: str = "") -> AgentStatus:
    """What hil has on a board, without changing anything.

    Raises:
        BoardError: the board cannot be asked.
    """
    seen = ask(shell, "status", folder, board=board or shell.address)
    was = seen.installed
    pid, build = seen.running or (0, was.build if was else "")
    return AgentStatus(
        seen.folder,
        pid,
        build,
        was.runtimes if was else (),
        was.packages if was else (),
        was.python if was else "",
        seen.used_bytes or 0,
        seen.free_bytes,
    )


def stop(shell: Shell, folder: str, *, board: str = "", force: bool = False) -> bool:
    """End the agent; returns whether one ran.

    Args:
        shell, folder, board: as for :func:`ensure_agent`.
        force: end it even if somebody has the device, or if it does not answer any more.

    Raises:
        BoardBusy: somebody has the device; the agent leaves once that session has ended.
        BoardError: the board cannot be asked.
    """
    seen = ask(shell, "stop", folder, _manner(force), board=board or shell.address)
    _refuse_if_busy(seen, board or shell.address)
    return bool(seen.stopped)


def clean(shell: Shell, folder: str, *, board: str = "", force: bool = False) -> bool:
    """End the agent and remove all that hil put on the board; returns whether there was anything.

    Raises:
        BoardBusy: somebody has the device, and ``force`` was not given.
        BoardError: something could not be removed, or the board cannot be asked.
    """
    name = board or shell.address
    before = ask(shell, "status", folder, board=name)
    seen = ask(shell, "clean", folder, _manner(force), board=name)
    _refuse_if_busy(seen, name)
    if seen.left:
        raise BoardError(
            f"not all of {seen.folder} could be removed",
            board=name,
            stage=STAGE,
            hint="what is none of hil's stays; remove it by hand if it is not needed",
            detail="\n".join(f"{path}: {why}" for path, why in seen.left),
        )
    return before.used_bytes is not None


def reset_fence(shell: Shell, folder: str, *, board: str = "", force: bool = False) -> str:
    """End the agent and let its count of fences begin anew; returns hil's folder on the board.

    Raises:
        BoardBusy: somebody has the device, and ``force`` was not given.
        BoardError: the file could not be removed, or the board cannot be asked.
    """
    name = board or shell.address
    seen = ask(shell, "reset_fence", folder, _manner(force), board=name)
    _refuse_if_busy(seen, name)
    if seen.left:
        raise BoardError(f"{seen.left[0][0]} could not be removed: {seen.left[0][1]}", board=name, stage=STAGE)
    return seen.folder


def logs(shell: Shell, folder: str, *, lines: int = 200) -> str:
    """The last lines that the agent wrote; "" where there are none.

    Raises:
        BoardError: the board cannot be asked.
    """
    return ask_text(shell, "logs", folder, str(lines), board=shell.address)


def _manner(force: bool) -> str:
    return "force" if force else "polite"


def _refuse_if_busy(seen: Seen, board: str) -> None:
    if seen.busy:
        raise BoardBusy(
            "somebody uses the agent on the board",
            board=board,
            stage=STAGE,
            hint="it leaves once that session ends; --force ends it now",
        )
    if seen.deploying:
        raise BoardBusy(
            "somebody puts an agent on the board just now",
            board=board,
            stage=STAGE,
            hint="try again in a moment; `hil board clean --force` does not wait for them",
        )
