"""Switch a board's power, or write an image, for users of the farm, in a separate thread of the board's worker."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection

from hil.controller.devices.board import make_client
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_resolver import open_link
from hil.controller.devices.power_control.power import connect_with_retry, switch
from hil.controller.farm.messages import PROVISION
from hil.core.board_config import BoardConfig
from hil.errors import HilError
from hil.protocol.v1 import farm_pb2 as pb

_REMEMBERED = 16
# Maximum characters of the output of a failed command.
_MAX_OUTPUT = 300


class PowerSwitch:
    """Does one power action at a time, and reports each result.

    Args:
        board: name of the board.
        get_config: returns the board's config.
        list_leases: returns the running and the waiting leases.
        report: called with an action's id and the error, "" after success.
        probe: connects to a board and disconnects. Raises BoardError while the board does not respond.
        write_image: writes the image of a request to the board.
    """

    def __init__(
        self,
        board: str,
        get_config: Callable[[], BoardConfig],
        list_leases: Callable[[], Collection[int]],
        report: Callable[[str, str], None],
        probe: Callable[[BoardConfig], None] | None = None,
        write_image: Callable[[pb.SwitchPower], None] | None = None,
    ) -> None:
        self._board, self._get_config, self._list_leases, self._report = board, get_config, list_leases, report
        self._probe = probe or probe_board
        self._write_image = write_image
        self.is_writing = False  # True while the host writes an image
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._results: OrderedDict[str, str | None] = OrderedDict()  # id -> error; None while the action runs

    def handle(self, request: pb.SwitchPower) -> None:
        """Start an action. Returns immediately. A repeated request repeats the report."""
        with self._lock:
            if request.id in self._results:
                known = self._results[request.id]
                if known is not None:
                    self._report(request.id, known)
                return
            if None in self._results.values():
                self._report(request.id, "a different power action or image is running")
                return
            self._results[request.id] = None
            while len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)
        self._thread = threading.Thread(target=self._run, args=(request,), name="farm-power")
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Wait for a running action, so that the board does not stay switched off."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, request: pb.SwitchPower) -> None:
        try:
            error = self._switch(request)
        except HilError as failed:
            # The output of a power command may contain passwords. The user chose the image that the command writes.
            output = " ".join(failed.detail.split())[-_MAX_OUTPUT:] if request.action == PROVISION else ""
            error = f"{failed.message}: {output}" if output else failed.message
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        with self._lock:
            self._results[request.id] = error
        self._report(request.id, error)

    def _switch(self, request: pb.SwitchPower) -> str:
        others = set(self._list_leases()) - {request.lease}
        if others and not request.force:
            return "a job has started on the board"
        if request.action == PROVISION:
            if self._write_image is None:
                return "the host cannot write images"
            self.is_writing = True
            try:
                self._write_image(request)
            finally:
                self.is_writing = False
            return ""
        config = self._get_config()
        switch(config.power, request.action, board=self._board)
        # A user who leases the board connects to it, and a job of a different user fails in any case.
        if request.action != "off" and not request.lease and not others:
            connect_with_retry(lambda: self._probe(config), config.power.boot_s)
        return ""


def probe_board(config: BoardConfig) -> None:
    """Connect to a board's agent, or to a board without an agent, and disconnect. Raises BoardError."""
    with (
        contextlib.closing(open_link(BoardChoice(config))) as link,
        contextlib.closing(make_client(link, config.name)) as client,
    ):
        client.info()
