"""Write an image to a board with the command in ``[provision]``, and remember the image for later records."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Annotated, Literal

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.console.board_console import BoardConsole
from hil.controller.devices.power_control.power import run_command
from hil.controller.records.base import Record, note, read_record
from hil.core.board_config import Command
from hil.core.config_files import get_user_folder
from hil.core.console_config import IMAGE
from hil.core.digest import digest_of
from hil.core.files import digest_file, write_atomic
from hil.core.text import TextSink
from hil.errors import BoardError, ProvisionFailed, StorageError, UsageError

_FOLDER = "images"
_MAX_BYTES = 1 << 16


class ProvisionedImage(Record, kw_only=True):
    """Image that `hil board provision` wrote to a board."""

    schema: Literal[1] = 1
    file: Annotated[str, note("name of the file")]
    sha256: Annotated[str, note("digest of the file, in hex")]
    time_s: Annotated[float, note("seconds since the epoch")]
    board_id: Annotated[str, note("board's id after the command; empty if unknown")] = ""


def digest_image(path: Path) -> str:
    """Return the SHA-256 of an image in hex. Raises UsageError if the file cannot be read."""
    try:
        return digest_file(path, "sha256").partition(":")[2]
    except FileNotFoundError as error:
        raise UsageError(f"image not found: {path}", hint="specify a file with --image") from error
    except OSError as error:
        raise UsageError(f"image {path} cannot be read: {error.strerror or error}") from error


def provision_board(choice: BoardChoice, image: Path, console: BoardConsole | None, say: TextSink) -> ProvisionedImage:
    """Run the command of ``[provision]`` with an image. With ``[console] boot``, wait for the end of the boot.

    The remembered image is removed first, because a failed command leaves the board in an unknown state.

    Raises:
        UsageError: the config has no command, the command cannot be started, or the image cannot be read.
        ProvisionFailed: the command failed or timed out.
        BoardUnreachable: the board did not boot in time.
    """
    settings = choice.config.provision
    if not settings.command:
        raise UsageError(
            "missing command in the board's config",
            board=choice.name,
            hint=f'add to the board\'s config: [provision] command = ["program", "{IMAGE}"]',
        )
    digest = digest_image(image)
    forget_image(choice)
    command = Command(tuple(word.replace(IMAGE, str(image.absolute())) for word in settings.command))
    say(f"writing {image.name} (sha256 {digest[:12]}) to {choice.name}")
    try:
        with contextlib.nullcontext() if console is None else console.time_boot():
            run_command(command, settings.timeout_s, "provision command", "[provision] command", choice.name)
    except BoardError as error:
        if console is not None:
            console.explain(error)
        if type(error) is BoardError:  # of the command
            raise error.as_kind(ProvisionFailed) from error
        raise
    return ProvisionedImage(file=image.name, sha256=digest, time_s=time.time())


def remember_image(choice: BoardChoice, image: ProvisionedImage) -> None:
    """Store a board's image for later records.

    Raises:
        UsageError: the user has no config directory.
        StorageError: the file cannot be written.
    """
    path = _find_file(choice.config.name, choice.config.path)
    if path is None:
        raise UsageError("cannot store the image: missing home directory", hint="set HOME or XDG_CONFIG_HOME")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps(image.to_json(), indent=1) + "\n", mode=0o600)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


def forget_image(choice: BoardChoice) -> None:
    """Remove a board's stored image. Raises StorageError if the file cannot be removed."""
    path = _find_file(choice.config.name, choice.config.path)
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path} cannot be removed: {error.strerror or error}") from error


def read_image(board: str, config: Path, board_id: str) -> ProvisionedImage | None:
    """Return the image that hil wrote to a board, or None.

    The image is unknown if another board answers, or if another user could have written the file.
    """
    path = _find_file(board, config)
    if path is None or not path.exists():
        return None
    try:
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return None
        found = read_record(path, ProvisionedImage, _MAX_BYTES)
    except (OSError, UsageError):
        return None
    return found if not found.board_id or found.board_id == board_id else None


def _find_file(board: str, config: Path) -> Path | None:
    base = get_user_folder()
    name = digest_of(f"{board}\0{config}".encode()).rpartition(":")[2][:32]
    return base / _FOLDER / f"{name}.json" if base else None
