"""Sending packages to a board and having its agent started: one command on the board, see board_side.py."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.devices.deploy.packages import Package
from hil.controller.devices.deploy.progress import Progress
from hil.controller.devices.deploy.trouble import STAGE
from hil.core import scratch
from hil.errors import BoardError

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

_SCRIPT = Path(__file__).with_name("board_side.py")
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


@dataclass(frozen=True)
class Plan:
    """An agent to be: what it is made of and what it runs on.

    Attributes:
        folder: hil's folder on the board, absolute.
        build: the agent's content id.
        recipe: what it was made to.
        runtimes: the runtimes that it has.
        python: the interpreter on the board.
        packages: its packages' names.
    """

    folder: str
    build: str
    recipe: str
    runtimes: tuple[str, ...]
    python: str
    packages: tuple[str, ...]


def install(
    shell: Shell, plan: Plan, pushed: Sequence[Package], *, board: str, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Send packages, have an agent of that plan run; returns the board's answer (see board_side.py).

    ``say`` is told how far the sending has come, where it takes long.

    Raises:
        BoardError: the command itself failed on the board.
        BoardLost: the board stopped answering.
        OSError: there is no room here for what is to be sent.
    """
    script = _SCRIPT.read_bytes()
    order = {
        "folder": plan.folder,
        "build": plan.build,
        "recipe": plan.recipe,
        "runtimes": plan.runtimes,
        "packages": plan.packages,
        "options": [f"--idle-exit={IDLE_EXIT_S}"],
        "frames": [{"id": one.id, "size": one.size, "sha256": one.sha256} for one in pushed],
    }
    command = [plan.python, "-I", "-S", "-B", "-c", _LOADER.format(size=len(script))]
    with tempfile.NamedTemporaryFile(prefix="hil-push-", dir=scratch.place()) as stream:
        stream.write(script)
        stream.write(json.dumps(order).encode() + b"\n")
        for package in pushed:
            with package.path.open("rb") as source:
                shutil.copyfileobj(source, stream, 1 << 20)
        stream.flush()
        total, sent = stream.tell(), 0
        told = Progress(say, "pushing")

        def count(size: int) -> None:
            nonlocal sent
            sent += size
            told.at(sent, total)

        timeout = _BASE_S + total / _SLOWEST_BYTES_S
        done = shell.run(command, stdin=Path(stream.name), timeout=timeout, check=False, progress=count)
    for line in reversed(done.text.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if _is_answer(answer):
                return answer  # type: ignore[no-any-return]
    raise BoardError(
        f"putting the agent on the board failed with exit code {done.code}",
        board=board,
        stage=STAGE,
        hint="the board's own words are below",
        detail=(done.err or done.text).strip()[-4000:],
    )


def _is_answer(answer: Any) -> bool:
    """Whether it is what board_side.py answers, and not another line that is JSON."""
    if not isinstance(answer, dict) or not all(isinstance(answer.get(key, ""), str) for key in _TEXTS):
        return False
    return bool(answer.get("socket") if answer.get("status") == "ok" else answer.get("status"))
