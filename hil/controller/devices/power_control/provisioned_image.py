"""Remember the image that `hil board provision` wrote to a board, for later records."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.records.base import make_record, read_record
from hil.controller.records.lab.board_image import ProvisionedImage
from hil.core.bounded_json import parse_json
from hil.core.config_files import get_user_folder
from hil.core.digest import digest_of
from hil.core.files import write_atomic
from hil.errors import StorageError, UsageError

_FOLDER = "images"
_MAX_BYTES = 1 << 16


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


def format_image(image: ProvisionedImage | None) -> str:
    """Return an image as text for ``[connection] image`` of a leased board; "" if the image is unknown."""
    return json.dumps(image.to_json()) if image is not None else ""


def parse_image(text: str) -> ProvisionedImage | None:
    """Return the image of :func:`format_image`; None if the text is empty or invalid."""
    try:
        return make_record(parse_json(text.encode()), ProvisionedImage) if text else None
    except (ValueError, UsageError):
        return None


def _find_file(board: str, config: Path) -> Path | None:
    base = get_user_folder()
    name = digest_of(f"{board}\0{config}".encode()).rpartition(":")[2][:32]
    return base / _FOLDER / f"{name}.json" if base else None
