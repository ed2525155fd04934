"""Live view of a board's console: server-sent events with the lines that the board's host sends."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import AsyncIterator
from datetime import datetime, timezone

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.farm.client.console import FarmConsole
from hil.controller.web.live import ALIVE_SECONDS
from hil.controller.web.pages.farm.farm_events import check_stream_limits, count_stream
from hil.controller.web.pages.farm.view import FarmView, view_of
from hil.core.text import escape_controls
from hil.errors import AccessRefused, FarmUnreachable, HilError, UsageError

router = APIRouter()
# A new view also shows the lines of the last minutes.
_EARLIER_SECONDS = 600.0
_POLL_SECONDS = 0.25
# Lines that wait for a slow browser, and maximum lines per event.
_MAX_WAITING, _MAX_LINES = 20_000, 1000
_ID_DIGITS = 18
_MAX_TIME_S = 1e11  # a hostile host sends any number
_RETRY = "retry: 3000\n\n"


@router.get("/board/console")
async def board_console(request: Request) -> Response:
    """Stream the lines of a board's console that contain a text. The view is read-only.

    Raises AccessRefused if the visitor may not read consoles.
    """
    farm, name = view_of(request), request.query_params.get("name", "")
    if not farm.may_read_console:
        raise AccessRefused("the console of a board requires the role submitter", hint="open ?token=TOKEN")
    if not name:
        raise UsageError("no board specified", hint="see the list of boards")
    if refusal := check_stream_limits(farm.visitor.user):
        return refusal
    given = request.headers.get("last-event-id", "")
    resumes = given.isdecimal() and len(given) < _ID_DIGITS
    since_s = int(given) / 1e6 if resumes else time.time() - _EARLIER_SECONDS
    lines = _ConsoleLines(farm, name, since_s, request.query_params.get("q", ""))
    return StreamingResponse(_stream_lines(request, farm, lines), media_type="text/event-stream")


class _ConsoleLines:
    """Lines of a console, read by a thread because the connection to the host blocks."""

    def __init__(self, farm: FarmView, board: str, since_s: float, wanted: str) -> None:
        self._since_s, self._wanted = since_s, wanted.casefold()
        self._lines: queue.Queue[ConsoleLine] = queue.Queue(_MAX_WAITING)
        self._console = FarmConsole(farm.link.client(farm.visitor.token), board, since_s, None, None)
        self._thread = threading.Thread(target=self._read, name="hil-console", daemon=True)
        self.error: HilError | None = None

    def start(self) -> None:
        """Start to read."""
        self._thread.start()

    def stop(self) -> None:
        """Close the connection to the host. The thread then ends."""
        self._console.stop()

    @property
    def has_ended(self) -> bool:
        """True if no more lines come."""
        return not self._thread.is_alive()

    def take(self) -> list[ConsoleLine]:
        """Return the lines that have come since the last call."""
        found: list[ConsoleLine] = []
        while len(found) < _MAX_LINES:
            try:
                found.append(self._lines.get_nowait())
            except queue.Empty:
                break
        return found

    def _read(self) -> None:
        try:
            for line in self._console.iter_lines():
                if self._since_s < line.time_s < _MAX_TIME_S and self._wanted in line.text.casefold():
                    try:
                        self._lines.put_nowait(line)
                    except queue.Full:
                        continue  # a slow browser loses lines
        except HilError as error:
            self.error = error


async def _stream_lines(request: Request, farm: FarmView, lines: _ConsoleLines) -> AsyncIterator[str]:
    # Check again, because many requests can pass the first check before their streams start.
    if refusal := check_stream_limits(farm.visitor.user):
        yield _format_end(bytes(refusal.body).decode())
        return
    with count_stream(farm.visitor.user):
        lines.start()
        try:
            yield _RETRY
            quiet_s = 0.0
            while not (farm.link.over or await request.is_disconnected()):
                has_ended = lines.has_ended  # before taking lines, so that none is lost
                if found := lines.take():
                    quiet_s = 0.0
                    text = "".join(map(_format_line, found))
                    yield f"id: {int(found[-1].time_s * 1e6)}\ndata: {json.dumps(text)}\n\n"
                elif has_ended:
                    if not isinstance(lines.error, FarmUnreachable):  # the browser reconnects
                        yield _format_end(_describe_end(lines.error))
                    return
                elif quiet_s >= ALIVE_SECONDS:
                    quiet_s = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(_POLL_SECONDS)
                quiet_s += _POLL_SECONDS
        finally:
            lines.stop()


def _format_line(line: ConsoleLine) -> str:
    """Return a line with the time of its arrival in UTC."""
    at = datetime.fromtimestamp(line.time_s, timezone.utc).strftime("%H:%M:%S.%f")[:-3]
    return f"{at} {'' if line.kind == 'output' else '-- '}{escape_controls(line.text)}\n"


def _describe_end(error: HilError | None) -> str:
    if error is None:
        return "The console has ended."
    return f"{error.message}: {error.hint}" if error.hint else error.message


def _format_end(text: str) -> str:
    return f"event: over\ndata: {json.dumps(text)}\n\n"


# URL parameters by path.
PARAMETERS = {"/board/console": ("name", "q")}
