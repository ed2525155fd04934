"""Write an image to a board with the command in ``[provision]``."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.console.board_console import BoardConsole
from hil.controller.devices.power_control.power import run_command
from hil.controller.devices.power_control.provisioned_image import forget_image
from hil.controller.records.lab.board_image import ProvisionedImage
from hil.core.board_config import Command
from hil.core.console_config import IMAGE
from hil.core.files import digest_file
from hil.core.text import TextSink
from hil.errors import BoardError, ProvisionFailed, UsageError


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
