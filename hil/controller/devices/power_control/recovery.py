"""Recover a stuck board with the steps in the table ``[recover]`` of the config. A check follows each step."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.power_control.power import is_silent, run_command, switch
from hil.controller.records.commands.boards import RecoveryStep
from hil.core.board_config import BoardCommand, Command
from hil.core.text import TextSink
from hil.errors import BoardError, HilError, UsageError

_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Recovery:
    """Result of a recovery."""

    problem: HilError | None  # error of the first check; None if the board already worked
    steps: tuple[RecoveryStep, ...] = ()
    left: HilError | None = None  # error of the last check; None if the board works

    @property
    def is_working(self) -> bool:
        """Whether the board works."""
        return self.left is None


def recover_board(choice: BoardChoice, check: Callable[[], HilError | None], *, say: TextSink) -> Recovery:
    """Try the recovery steps of a board's config in order until a check passes.

    If the board already works, no step is executed. After an action of ``[power]``, the board has ``boot_s`` seconds to
    respond.

    Args:
        check: Runs an inference on the board and returns the error, or None.
        say: Receives each step as text.
    """
    first = left = check()
    steps: list[RecoveryStep] = []
    for step in choice.config.recovery_steps:
        if left is None:
            break
        name = step_name(step)
        say(f"{choice.name} does not work ({left.message}): trying {name}")
        try:
            _do(step, choice)
        except (BoardError, UsageError) as error:
            say(f"{name} failed: {error.message}")
            steps.append(RecoveryStep(name=name, error=error.message, problem=left.message))
            continue
        left = _check_again(check, choice.config.power.boot_s if isinstance(step, str) else 0.0)
        steps.append(RecoveryStep(name=name, error="", problem=left.message if left is not None else ""))
    return Recovery(first, tuple(steps), left)


def step_name(step: str | Command | BoardCommand) -> str:
    """Return the name of a step: an action or a command."""
    if isinstance(step, str):
        return {"cycle": "power cycle"}.get(step, step)
    if isinstance(step, BoardCommand):
        return f"`{shlex.join(step.board)}` on the board"
    return f"`{shlex.join(step.argv)}` on this machine"


def _check_again(check: Callable[[], HilError | None], boot_s: float) -> HilError | None:
    """Retry the check for ``boot_s`` seconds while the board does not respond. Return the last error."""
    deadline = time.monotonic() + boot_s
    while True:
        found = check()
        if not (isinstance(found, BoardError) and is_silent(found)) or time.monotonic() >= deadline:
            return found
        time.sleep(_PAUSE_SECONDS)


def _do(step: str | Command | BoardCommand, choice: BoardChoice) -> None:
    config = choice.config
    if isinstance(step, str):
        switch(config.power, step, board=choice.name)
    elif isinstance(step, Command):
        run_command(step, config.recover.timeout_s, "recovery command", "[recover] steps", choice.name)
    else:
        _run_on_board(step, choice)


def _run_on_board(step: BoardCommand, choice: BoardChoice) -> None:
    """Run a command on a board over SSH. Raises UsageError if the board is not reached over SSH."""
    from hil.controller.devices.ssh.address import is_ssh_address
    from hil.controller.devices.ssh.connect import open_shell

    if not is_ssh_address(choice.target):
        raise UsageError(
            f"cannot run a command on {choice.name}: the board is not connected over SSH",
            board=choice.name,
            hint="use { command = [...] } in [recover] steps",
        )
    config = choice.config
    with open_shell(choice.target, config.connection, board=choice.name, base=config.path.parent) as shell:
        shell.run(list(step.board), timeout=config.recover.timeout_s)
