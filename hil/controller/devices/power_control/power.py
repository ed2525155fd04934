"""Power control of a board: reset a hanging board, and power-cycle it if the reset does not help."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from hil.controller.devices.ssh.errors import NoSuchHost, ProxyFailed
from hil.core.board_config import ACTIONS, Command, Power
from hil.core.bounded_command import run_bounded
from hil.core.text import TextSink
from hil.errors import BoardError, BoardLost, BoardUnreachable, UsageError

T = TypeVar("T")

_PAUSE_SECONDS = 1.0
_SHOWN = 400


def switch(power: Power, action: str, *, board: str) -> str:
    """Perform one power action, without retries, because a second reset could interrupt the boot.

    Without a hook for ``cycle``, a cycle consists of ``off``, a pause, and ``on``. Returns the output or response of
    the hook.

    Raises:
        UsageError: The config has no hook for the action, or the hook's program does not exist.
        BoardError: The hook failed.
    """
    if action == "cycle" and "cycle" not in power.hooks and power.can("cycle"):
        try:
            off = switch(power, "off", board=board)
            time.sleep(power.delay)
        except KeyboardInterrupt:  # do not leave the board switched off
            switch(power, "on", board=board)
            raise
        return "\n".join(filter(None, (off, switch(power, "on", board=board))))
    hook = power.hooks.get(action)
    if hook is None:
        raise UsageError(
            f"missing command for {action} in the board's config"
            if action in ACTIONS
            else f"unknown power action {action!r}",
            board=board,
            hint=f'add to the board\'s config: [power] {action} = ["program", "argument"], or {{ url = "http://..." }}',
        )
    if isinstance(hook, Command):
        output = run_command(hook, power.timeout_s, f"{action} command", f"[power] {action}", board)
    else:
        from hil.controller.devices.power_control.power_http import request

        output = request(hook, power.timeout_s, action, board)
    return output.strip()[:_SHOWN]


def recover(
    connect: Callable[[], T],
    power: Power,
    *,
    board: str,
    say: TextSink,
    time_boot: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> T:
    """Connect to a board. If the board does not respond, reset and then power-cycle the board, if the config has hooks.

    A board that responds but refuses the connection is left alone, because a reset would not change the refusal.

    Args:
        time_boot: Returns a block for an action, which waits for the end of the boot: see
            :meth:`hil.controller.devices.console.board_console.BoardConsole.time_boot`.

    Raises:
        BoardLost, BoardUnreachable: The board still does not respond. The message lists the attempts.
        BoardError: ``connect`` failed, and no recovery step applies.
    """
    try:
        return connect()
    except BoardError as error:
        steps = [action for action in ("reset", "cycle") if power.can(action)]
        if not steps or not is_silent(error):
            raise
        last = error
    for action in steps:
        say(f"{board} does not respond ({last.message}): {_NAMES[action]}")
        try:
            with time_boot():
                switch(power, action, board=board)
        except BoardUnreachable as silent:
            say(silent.message)
            last = silent
            continue
        except (BoardError, UsageError) as failed:
            say(f"the {_NAMES[action]} failed: {failed.message}")
            continue
        try:
            return connect_with_retry(connect, power.boot_s)
        except BoardError as error:
            last = error
            if not is_silent(error):
                raise
    tried = " and a ".join(_NAMES[action] for action in steps)
    raise type(last)(
        f"the board does not respond, and a {tried} did not help: {last.message}",
        board=board,
        hint="check the board's power, cable and storage",
        detail=last.detail,
    ) from last


_NAMES = {"reset": "reset", "cycle": "power cycle"}


def is_silent(error: BoardError) -> bool:
    """Return whether the board does not respond. A refused login or a held board is a response."""
    return isinstance(error, (BoardLost, BoardUnreachable)) and not isinstance(error, (NoSuchHost, ProxyFailed))


def connect_with_retry(connect: Callable[[], T], boot_s: float) -> T:
    """Retry connecting for ``boot_s`` seconds while the board starts. Raises the last error of ``connect``.

    Retries are safe, because no program has been started yet.
    """
    deadline = time.monotonic() + boot_s
    while True:
        try:
            return connect()
        except BoardError as error:
            if not is_silent(error) or time.monotonic() >= deadline:
                raise
        time.sleep(min(_PAUSE_SECONDS, max(deadline - time.monotonic(), 0.01)))


def run_command(hook: Command, timeout: float, what: str, place: str, board: str) -> str:
    """Run a program of a board's config on this machine. Return the first and the last part of the output.

    Args:
        what: Name of the command in errors.
        place: Location of the command in the config.

    Raises:
        UsageError: The program cannot be started.
        BoardError: The program failed or timed out.
    """
    try:
        done = run_bounded(hook.argv, timeout)
    except OSError as error:
        raise UsageError(
            f"cannot start the {what}: {error}", board=board, hint=f"check {place} in the board's config"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BoardError(f"the {what} timed out after {timeout:g} s", board=board, hint=_make_hint(hook)) from error
    if done.code:
        failed = f"the {what} failed with exit code {done.code}"
        raise BoardError(failed, board=board, hint=_make_hint(hook), detail=done.text[-_SHOWN:])
    return done.text


def _make_hint(hook: Command) -> str:
    return f"run it manually: {shlex.join(hook.argv)}"
