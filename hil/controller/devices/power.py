"""Switching a board: a reset where it hangs, a power cycle where that does not help."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

from hil.core.board_config import ACTIONS, Command, Power
from hil.core.processes import signal_group
from hil.core.text import TextSink
from hil.errors import BoardError, BoardLost, BoardUnreachable, UsageError

T = TypeVar("T")

_PAUSE_S = 1.0
_SHOWN = 400


def switch(power: Power, action: str, *, board: str) -> str:
    """Do one action, once: nothing here is tried again, since a reset done twice is another thing.

    A cycle without a hook is off, a pause, on. Returns what the hook printed or answered.

    Raises:
        UsageError: the config has no hook for it, or its program is not there.
        BoardError: the hook failed.
    """
    if action == "cycle" and "cycle" not in power.hooks and power.can("cycle"):
        try:
            off = switch(power, "off", board=board)
            time.sleep(power.delay)
        except KeyboardInterrupt:  # nobody leaves a board without power by that
            switch(power, "on", board=board)
            raise
        return "\n".join(filter(None, (off, switch(power, "on", board=board))))
    hook = power.hooks.get(action)
    if hook is None:
        raise UsageError(
            f"the board's config says nothing of how to do a {action}"
            if action in ACTIONS
            else f"{action!r} is no action",
            board=board,
            hint=f'add to its config: [power] {action} = ["program", "argument"], or {{ url = "http://..." }}',
        )
    if isinstance(hook, Command):
        output = _command(hook, power.timeout_s, action, board)
    else:
        from hil.controller.devices.power_http import request

        output = request(hook, power.timeout_s, action, board)
    return output.strip()[:_SHOWN]


def recover(connect: Callable[[], T], power: Power, *, board: str, say: TextSink) -> T:
    """Connect to a board; one that does not answer is reset, then its power is cycled, as far as there are hooks.

    A board that answers but refuses us is left alone: a reset would not change its mind.

    Raises:
        BoardLost, BoardUnreachable: it does not answer after all that; the message says what was tried.
        BoardError: what ``connect`` raised, where there is nothing to try.
    """
    try:
        return connect()
    except BoardError as error:
        steps = [action for action in ("reset", "cycle") if power.can(action)]
        if not steps or not is_silent(error):
            raise
        last = error
    for action in steps:
        say(f"{board} does not answer ({last.message}): {_NAMES[action]}")
        try:
            switch(power, action, board=board)
        except (BoardError, UsageError) as failed:
            say(f"the {_NAMES[action]} failed: {failed.message}")
            continue
        try:
            return answering(connect, power.boot_s)
        except BoardError as error:
            last = error
            if not is_silent(error):
                raise
    tried = " and a ".join(_NAMES[action] for action in steps)
    raise type(last)(
        f"the board does not answer, and a {tried} did not help: {last.message}",
        board=board,
        hint="look at the board itself: power, cable, storage",
        detail=last.detail,
    ) from last


_NAMES = {"reset": "reset", "cycle": "power cycle"}


def is_silent(error: BoardError) -> bool:
    """Whether an error says that the board does not answer; one that refuses us, or that somebody else has, does."""
    return type(error) in (BoardLost, BoardUnreachable)


def answering(connect: Callable[[], T], boot_s: float) -> T:
    """Connect as soon as a board is up again, within so many seconds; raises what ``connect`` raised last.

    Only connecting is tried again; nothing has run there yet.
    """
    deadline = time.monotonic() + boot_s
    while True:
        try:
            return connect()
        except BoardError as error:
            if not is_silent(error) or time.monotonic() >= deadline:
                raise
        time.sleep(min(_PAUSE_S, max(deadline - time.monotonic(), 0.01)))


def _command(hook: Command, timeout: float, action: str, board: str) -> str:
    try:
        process = subprocess.Popen(
            hook.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(
            f"the {action} command cannot be started: {error}", board=board, hint=f"see [power] {action} in its config"
        ) from error
    try:
        output = process.communicate(timeout=timeout)[0]
    except BaseException as error:
        signal_group(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):  # what it left behind elsewhere may hold its output open
            process.communicate(timeout=1)
        if isinstance(error, subprocess.TimeoutExpired):
            raise BoardError(f"the {action} command took over {timeout:g} s", board=board, hint=_hint(hook)) from error
        raise
    if process.returncode:
        what = f"the {action} command ended with {process.returncode}"
        raise BoardError(what, board=board, hint=_hint(hook), detail=output[-_SHOWN:])
    return output


def _hint(hook: Command) -> str:
    return f"try it by hand: {shlex.join(hook.argv)}"
