"""Write an image from the farm's store to a board, for users of the farm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from hil.controller.devices.board import make_client
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_resolver import open_link
from hil.controller.devices.console.board_console import use_console
from hil.controller.devices.power_control.power import connect_with_retry
from hil.controller.devices.power_control.provision import provision_board
from hil.controller.devices.power_control.provisioned_image import remember_image
from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.host.inventory import HostInfo
from hil.controller.farm.host.jobs.job_transfer import FileCache
from hil.controller.farm.rpc import is_image_name
from hil.core.board_config import BoardConfig
from hil.core.scratch import remove_tree
from hil.core.text import TextSink
from hil.errors import UsageError
from hil.protocol.v1 import farm_pb2 as pb

_PATIENCE_SECONDS = 60.0


class ImageWriter:
    """Writes images with the command in ``[provision]`` of a board's config.

    Args:
        folder: the board's private directory.
        get_config: returns the board's config.
        say: receives notes for the operator of the host.
        on_end: called after each attempt: the board has a new system, or an unknown state.
    """

    def __init__(
        self,
        site: HostInfo,
        folder: Path,
        get_config: Callable[[], BoardConfig],
        say: TextSink,
        on_end: Callable[[], None],
    ) -> None:
        self._site, self._folder, self._get_config, self._say, self._on_end = site, folder, get_config, say, on_end

    def write(self, request: pb.SwitchPower) -> None:
        """Fetch an image, write the image, and wait until the board responds.

        Raises:
            UsageError: the config has no command, or the request is invalid.
            FarmError: the image cannot be fetched.
            ProvisionFailed: the command failed.
            BoardError: the board does not respond after the command.
        """
        if not is_image_name(request.file):
            raise UsageError(f"invalid name of an image: {request.file[:100]!r}")
        choice = BoardChoice(self._get_config())
        with self._make_folder() as folder:
            image = folder / request.file
            with FarmClient(self._site.farm, patience_s=_PATIENCE_SECONDS) as farm:
                FileCache(self._site.files).fetch(request.image, image, farm)
            try:
                self._write_file(choice, image)
            finally:
                self._on_end()

    @contextlib.contextmanager
    def _make_folder(self) -> Iterator[Path]:
        """Create a directory for an image. Remove the image that a killed worker left, because images are large."""
        folder = self._folder / "image"
        remove_tree(folder)
        folder.mkdir(parents=True, mode=0o700)
        try:
            yield folder
        finally:
            remove_tree(folder)

    def _write_file(self, choice: BoardChoice, image: Path) -> None:
        with use_console(choice.config, self._say) as console:
            done = provision_board(choice, image, console, self._say)
        board_id = connect_with_retry(lambda: read_board_id(choice.config), choice.config.provision.boot_s)
        remember_image(choice, done.replace(board_id=board_id))
        self._say(f"wrote {done.file} (sha256 {done.sha256[:12]})")


def read_board_id(config: BoardConfig) -> str:
    """Connect to a board, and return its id; "" if the board does not report it. Raises BoardError."""
    with (
        contextlib.closing(open_link(BoardChoice(config))) as link,
        contextlib.closing(make_client(link, config.name)) as client,
    ):
        return str(client.info().get("board_id", ""))
