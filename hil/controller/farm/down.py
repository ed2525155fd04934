"""Ending the farm of a home, from another process than the one that runs it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import filelock

from hil.controller.farm.home import LOCK, LOGS, sheet_of
from hil.controller.farm.keeping import born, end_noted
from hil.controller.farm.places import is_there
from hil.errors import FarmError

_END_S, _GONE_S = 90.0, 5.0


def end_farm(home: Path) -> bool:
    """End the farm of a home and wait until it has ended, and whatever a killed one left; whether there was one.

    Raises:
        FarmError: it does not end.
        UsageError: it is another user's.
    """
    if not is_there(home / LOCK):
        return False
    lock = filelock.FileLock(home / LOCK, thread_local=False)
    was_up = False
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        was_up = True
        sheet = sheet_of(home)
        if sheet is None:
            raise FarmError(
                f"the farm of {home} is just ending, or starting", hint="try it again in a moment"
            ) from None
        pid = int(sheet["pid"])
        this_one = born(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        try:
            lock.acquire(timeout=_END_S)
        except filelock.Timeout as error:
            raise FarmError(f"the farm of {home} does not end", hint=f"kill -9 {pid}") from error
        # It gives the lock back a moment before it is gone.
        deadline = time.monotonic() + _GONE_S
        while this_one and born(pid) == this_one and time.monotonic() < deadline:
            time.sleep(0.01)
    try:
        notes = sorted((home / LOGS).glob("*.pid"), reverse=True)
        for note in notes:
            end_noted(note)
    finally:
        lock.release()
    return was_up or bool(notes)
