"""Show prompts on the terminal, one at a time, from any thread. Other output pauses during a prompt."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from hil.core.text import escape_controls

_LOOK_SECONDS = 0.1
_CTRL_C = b"\x03"
_displays: list[Callable[[], AbstractContextManager[object]]] = []
# Locked during a prompt. Code that prints waits for it.
_asking = threading.RLock()
_interrupts = 0


@contextlib.contextmanager
def pause_during_prompts(pause: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Pause a display during prompts: each prompt runs in the context that ``pause`` returns."""
    _displays.append(pause)
    try:
        yield
    finally:
        _displays.remove(pause)


def block_prompts() -> AbstractContextManager[object]:
    """Return a context manager that blocks prompts, so that printed lines do not interrupt a prompt."""
    return _asking


def ask(prompt: str, *, echo: bool = False) -> str:
    """Prompt for a line. Returns "" without a terminal, or for an empty line.

    Raises:
        KeyboardInterrupt: Ctrl-C (in any thread), or :func:`interrupt`.
    """
    before = _interrupts
    with _open_terminal() as terminal:
        if before != _interrupts:
            raise KeyboardInterrupt
        return _read_answer(terminal, prompt, echo, before) if terminal is not None else ""


def notify(text: str) -> None:
    """Print a line on the terminal, if available."""
    with _open_terminal() as terminal:
        if terminal is not None:
            os.write(terminal, escape_controls(text).encode() + b"\n")


def can_ask() -> bool:
    """Return True if a user can answer prompts on a terminal."""
    with _open_terminal() as terminal:
        return terminal is not None


def interrupt() -> None:
    """Cancel open prompts in all threads, as Ctrl-C does."""
    global _interrupts
    _interrupts += 1


@contextlib.contextmanager
def _open_terminal() -> Iterator[int | None]:
    """Yield the terminal's descriptor with all displays paused; None without a terminal."""
    with _asking, contextlib.ExitStack() as kept:
        for pause in reversed(_displays):
            kept.enter_context(pause())
        terminal = None
        # Only a terminal on stdin shows that a user started this process: tests and jobs also inherit their parent's
        # terminal.
        if sys.stdin and sys.stdin.isatty():
            with contextlib.suppress(OSError):
                terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
                kept.callback(os.close, terminal)
        yield terminal


def _read_answer(terminal: int, prompt: str, echo: bool, before: int) -> str:
    usual = termios.tcgetattr(terminal)
    own = termios.tcgetattr(terminal)
    # Ctrl-C sends a signal to the main thread, but another thread may show the prompt. So disable the signal and read
    # Ctrl-C as an end of line.
    own[3] &= ~(termios.ISIG | (0 if echo else termios.ECHO))
    own[6][termios.VEOL] = _CTRL_C
    termios.tcsetattr(terminal, termios.TCSAFLUSH, own)
    try:
        os.write(terminal, escape_controls(prompt).encode())
        while not select.select([terminal], [], [], _LOOK_SECONDS)[0]:
            if before != _interrupts:
                raise KeyboardInterrupt
        line = os.read(terminal, 1 << 12)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, usual)
        os.write(terminal, b"\n")
    if line.endswith(_CTRL_C):
        raise KeyboardInterrupt
    return line.rstrip(b"\r\n").decode(errors="surrogateescape")
