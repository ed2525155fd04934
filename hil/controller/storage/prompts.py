"""Questions to whoever sits at the terminal: one at a time, from any thread, and nothing else is shown meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from hil.core.text import visible

_LOOK_S = 0.1
_CTRL_C = b"\x03"
_displays: list[Callable[[], AbstractContextManager[object]]] = []
# Held while somebody is asked. Who has something to show waits for it.
_asking = threading.RLock()
_interrupts = 0


@contextlib.contextmanager
def pausing(pause: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Have something that uses the terminal step aside, in the context that it gives, whenever somebody is asked."""
    _displays.append(pause)
    try:
        yield
    finally:
        _displays.remove(pause)


def between_questions() -> AbstractContextManager[object]:
    """A context in which nobody is asked: for lines that would end up in the middle of a prompt."""
    return _asking


def ask(prompt: str, *, echo: bool = False) -> str:
    """Ask for a line; "" where nobody is there to type, or who is there has no answer.

    Raises:
        KeyboardInterrupt: Ctrl-C, also in a thread that is not the main one, or :func:`interrupt`.
    """
    before = _interrupts
    with _terminal() as terminal:
        if before != _interrupts:
            raise KeyboardInterrupt
        return _answer(terminal, prompt, echo, before) if terminal is not None else ""


def can_ask() -> bool:
    """Whether somebody is there to type."""
    with _terminal() as terminal:
        return terminal is not None


def interrupt() -> None:
    """End the questions that are open, in whatever thread, as Ctrl-C would."""
    global _interrupts
    _interrupts += 1


@contextlib.contextmanager
def _terminal() -> Iterator[int | None]:
    """The terminal, with nothing else on it; None where nobody sits at it."""
    with _asking, contextlib.ExitStack() as kept:
        for pause in reversed(_displays):
            kept.enter_context(pause())
        terminal = None
        # Only stdin tells whether a person started this: tests and jobs have the terminal of whoever started them.
        if sys.stdin and sys.stdin.isatty():
            with contextlib.suppress(OSError):
                terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
                kept.callback(os.close, terminal)
        yield terminal


def _answer(terminal: int, prompt: str, echo: bool, before: int) -> str:
    usual = termios.tcgetattr(terminal)
    own = termios.tcgetattr(terminal)
    # Ctrl-C's signal goes to the main thread, which may not be the one that asks: here it is the end of a line.
    own[3] &= ~(termios.ISIG | (0 if echo else termios.ECHO))
    own[6][termios.VEOL] = _CTRL_C
    termios.tcsetattr(terminal, termios.TCSAFLUSH, own)
    try:
        os.write(terminal, visible(prompt).encode())
        while not select.select([terminal], [], [], _LOOK_S)[0]:
            if before != _interrupts:
                raise KeyboardInterrupt
        line = os.read(terminal, 1 << 12)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, usual)
        os.write(terminal, b"\n")
    if line.endswith(_CTRL_C):
        raise KeyboardInterrupt
    return line.rstrip(b"\r\n").decode(errors="surrogateescape")
