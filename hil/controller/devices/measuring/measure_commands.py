"""Run the commands of a board's table ``[measure]`` before and after a measurement.

The commands after a measurement restore the board, for example the governor. hil stores them in a file before it runs
the commands before the measurement. If hil is killed, the next hil command that opens the board runs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from hil.controller.devices.power_control.power import is_silent, run_command
from hil.controller.records.base import Record, read_record
from hil.core.board_config import BoardCommand, Command, MeasureCommands
from hil.core.cancellation import LOOK_SECONDS, check_cancelled
from hil.core.config_files import get_user_folder
from hil.core.digest import digest_of
from hil.core.files import write_atomic
from hil.core.text import TextSink
from hil.errors import BoardBusy, BoardError, BoardUnfit, HilError, StorageError, UsageError

if TYPE_CHECKING:
    import filelock

    from hil.controller.devices.ssh.shell import Shell

_FOLDER = "pending-measure"
_MAX_BYTES = 1 << 20
_MEASURED_BY_OTHER = "another hil command measures on this board"


class PreparedBoard(Protocol):
    """Part of a board (:class:`hil.controller.devices.board.Board`) that the commands need."""

    name: str
    measure: MeasureCommands
    config_path: Path

    @property
    def shell(self) -> Shell | None:
        """Shell on the board, or None if the board is not reached over SSH."""


class PendingCommand(Record, kw_only=True):
    """A command to run after a measurement."""

    place: Literal["host", "board"]
    argv: list[str]


class PendingCommands(Record, kw_only=True):
    """Commands that restore a board."""

    schema: Literal[1]
    board: str
    timeout_s: float
    after: list[PendingCommand]


@contextlib.contextmanager
def prepare_board(board: PreparedBoard, say: TextSink, wait_s: float = 0.0) -> Iterator[None]:
    """Run a board's commands before and after the ``with`` block, even if an error or Ctrl-C ends the block.

    If a command after the block fails, ``say`` receives a note. hil then runs the command again the next time that it
    opens the board.

    Args:
        wait_s: time limit in seconds for the measurement of another hil. Simulators with the same config share the
            commands, although each hil has a simulator.

    Raises:
        UsageError: a command before the block cannot be started, or the user has no home directory.
        BoardUnfit: a command before the block failed.
        BoardBusy: another hil measures on this board.
        BoardError: the board does not respond.
        StorageError: the file of pending commands cannot be written.
    """
    commands = board.measure
    if not (commands.before or commands.after):
        yield
        return
    pending = _PendingFile(board)
    if not pending.path:
        raise UsageError(
            "cannot store the commands in `after` of [measure]: the config directory is unknown",
            hint="set HOME or XDG_CONFIG_HOME",
        )
    with pending.lock(wait_s, lambda: say(f"{board.name}: {_MEASURED_BY_OTHER}")) as is_locked:
        if not is_locked:
            raise BoardBusy(_MEASURED_BY_OTHER, board=board.name, hint="increase --wait")
        pending.run_stored(say)
        pending.store()
        try:
            _run_before(board)
            yield
        finally:
            if _run_all(commands.after, board, commands.timeout_s, say):
                pending.remove()


def restore_board(board: PreparedBoard, say: TextSink) -> None:
    """Run the pending commands of a killed measurement, if any. Errors are reported to ``say``."""
    pending = _PendingFile(board)
    if pending.path and pending.path.exists():
        with pending.lock() as is_locked:
            if is_locked:  # if another process has the lock, the measurement still runs
                pending.run_stored(say)


@dataclass(frozen=True)
class _PendingFile:
    """File of a board's pending commands."""

    board: PreparedBoard

    @property
    def path(self) -> Path | None:
        """Path of the file; None without a home directory."""
        base = get_user_folder()
        name = digest_of(f"{self.board.name}\0{self.board.config_path}".encode()).rpartition(":")[2][:32]
        return base / _FOLDER / f"{name}.json" if base else None

    @contextlib.contextmanager
    def lock(self, wait_s: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
        """Lock the file during the block. Yield False if a living process has locked it.

        Args:
            wait_s: time limit in seconds.
            on_wait: called once if the lock is not free.
        """
        import filelock

        assert self.path
        lock = filelock.FileLock(self.path.with_suffix(".lock"), thread_local=False)
        deadline, is_waiting = time.monotonic() + wait_s, False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            while not _try_lock(lock):
                if time.monotonic() >= deadline:
                    yield False
                    return
                if not is_waiting:
                    on_wait()
                is_waiting = True
                check_cancelled()
                time.sleep(LOOK_SECONDS)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be locked: {error.strerror or error}") from error
        try:
            yield True
        finally:
            lock.release()

    def store(self) -> None:
        """Store the commands. Raises StorageError if this fails."""
        assert self.path
        measure = self.board.measure
        after = [
            PendingCommand(place="board", argv=list(step.board))
            if isinstance(step, BoardCommand)
            else PendingCommand(place="host", argv=list(step.argv))
            for step in measure.after
        ]
        record = PendingCommands(schema=1, board=self.board.name, timeout_s=measure.timeout_s, after=after)
        try:
            write_atomic(self.path, json.dumps(record.to_json(), indent=1) + "\n", mode=0o600)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def remove(self) -> None:
        """Remove the file."""
        assert self.path
        self.path.unlink(missing_ok=True)

    def run_stored(self, say: TextSink) -> None:
        """Run the stored commands once, if any. Keep the file only if the board does not respond.

        Raises UsageError if other users may write the file.
        """
        assert self.path
        try:
            status = self.path.stat()
        except OSError:
            return
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise UsageError(f"{self.path} is writable by other users", hint="inspect the file, then remove it")
        try:
            found = read_record(self.path, PendingCommands, _MAX_BYTES)
        except UsageError as error:
            say(f"the commands that restore {self.board.name} are lost: {error.message}")
            self.remove()
            return
        say(f"restoring {self.board.name}: the last measurement did not end normally")
        steps = [
            BoardCommand(tuple(one.argv)) if one.place == "board" else Command(tuple(one.argv)) for one in found.after
        ]
        if _run_all(steps, self.board, found.timeout_s, say, keeps_failed=False):
            self.remove()


def _try_lock(lock: filelock.BaseFileLock) -> bool:
    """Return False if another process has the lock."""
    import filelock

    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    return True


def _run_before(board: PreparedBoard) -> None:
    """Run the commands before a measurement until a command fails."""
    try:
        for step in board.measure.before:
            _run_step(step, board, board.measure.timeout_s, "[measure] before")
    except BoardError as error:
        if is_silent(error):
            raise
        raise BoardUnfit(error.message, board=board.name, hint=error.hint, detail=error.detail) from error


def _run_all(
    steps: Sequence[Command | BoardCommand],
    board: PreparedBoard,
    timeout_s: float,
    say: TextSink,
    *,
    keeps_failed: bool = True,
) -> bool:
    """Run commands after a measurement, each even if others fail. Return False to run them again later."""
    is_done, is_lost = True, False
    for step in steps:
        if is_lost and isinstance(step, BoardCommand):
            continue  # each command would wait for its time limit
        try:
            _run_step(step, board, timeout_s, "[measure] after")
        except HilError as error:
            say(f"{board.name} may not be restored: {error.message}")
            is_lost |= isinstance(error, BoardError) and is_silent(error)
            is_done &= not (keeps_failed or is_lost)
    return is_done


def _run_step(step: Command | BoardCommand, board: PreparedBoard, timeout_s: float, where: str) -> None:
    """Run a command. Raises BoardError if it fails, and UsageError if it cannot be started."""
    if isinstance(step, Command):
        run_command(step, timeout_s, f"command of {where}", where, board.name)
        return
    if board.shell is None:
        raise UsageError(
            f"cannot run a command on {board.name}: the board is not connected over SSH",
            board=board.name,
            hint=f"use {{ command = [...] }} in {where}",
        )
    try:
        board.shell.run(list(step.board), timeout=timeout_s)
    except BoardError as error:
        error.hint = error.hint or f"run it on the board: {shlex.join(step.board)}"
        raise
