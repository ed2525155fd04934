"""The server's one connection to a farm: kept up by a thread of its own, so that no page ever waits for a farm that is
away.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hil.controller.farm.client import FarmClient
from hil.controller.farm.messages import Role
from hil.controller.farm.paths import FarmAddress
from hil.controller.web.farm_past import FarmPast
from hil.controller.web.visitors import Visitor, Visitors
from hil.errors import AccessRefused, FarmError, FarmUnreachable, HilError

# How often the farm is asked whether anything happened, and called while it is away.
LOOK_S, _AGAIN_S = 1.0, 2.0
T = TypeVar("T")
# Charts are made anew at most so often, and so many are kept.
_LATELY_S, _MOST_LATELY = 15.0, 100
# A page waits for an answer at most so long.
_CALL_S = 10.0
# What reading an answer may come to that lacks what it should have, or has something else there.
ILL_FORMED = (LookupError, TypeError, ValueError, AttributeError)


class FarmLink:
    """The connection. A context manager: inside it a thread keeps it up.

    Args:
        address: where the farm is; asked before each try, for a farm of this machine may not be there yet.
        connect: makes the connection.
    """

    def __init__(
        self, address: Callable[[], FarmAddress], connect: Callable[[FarmAddress], FarmClient] | None = None
    ) -> None:
        self.own = Visitor("", Role.VIEWER)  # whose token the server has
        self.trouble, self.hint = "It was not called yet.", ""  # why it is away; "" while it is there
        self.runs: Path | None = None  # where what its jobs made is kept: see `farm_mirror.py`
        self.past = FarmPast()
        self.generation = 0  # grows with each change at the farm, and when it goes or comes back
        self._changed = threading.Condition()
        self._address, self._connect = address, connect or _connected
        self._client: FarmClient | None = None
        self._newest = -1
        self._lately: dict[str, tuple[float, Any]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hil-farm", daemon=True)

    def __enter__(self) -> FarmLink:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._tell()
        # It may be in a call that takes its time to fail.
        self._thread.join(LOOK_S)
        self._drop()

    def wait(self, seen: int) -> int:
        """Wait until something is other than it was at a generation; returns the new one."""
        with self._changed:
            self._changed.wait_for(lambda: self.over or self.generation != seen)
            return self.generation

    @property
    def over(self) -> bool:
        """Whether the server ends."""
        return self._over.is_set()

    def ask(self, what: str, token: str = "", **arguments: Any) -> Any:
        """Read something, as whoever has the token; "" is the server's own.

        Raises:
            FarmUnreachable: the farm is away.
            AccessRefused: the token does not let us.
            UsageError: there is no such thing.
        """
        return self.client(token).ask(what, **arguments)

    def lately(self, key: str, make: Callable[[], T]) -> T:
        """What was made within the last seconds under this name, or is made now: a chart is drawn of much."""
        made, found = self._lately.get(key, (-_LATELY_S, None))
        if time.monotonic() - made >= _LATELY_S:
            found = make()
            if len(self._lately) >= _MOST_LATELY:
                self._lately.clear()
            self._lately[key] = (time.monotonic(), found)
        kept: T = found
        return kept

    def do(self, action: str, token: str, **arguments: Any) -> Any:
        """Change something, as whoever has the token; errors are those of :meth:`ask`."""
        answer = self.client(token).do(action, **arguments)
        self._tell()
        return answer

    def download(self, digest: str, to: Path) -> None:
        """Fetch a file of the farm's store."""
        self.client().download(digest, to)

    def client(self, token: str = "") -> FarmClient:
        """The connection as it is now, for whoever has the token; FarmUnreachable while the farm is away."""
        client = self._client
        if client is None:
            raise FarmUnreachable(f"the farm is away: {self.trouble}", hint=self.hint)
        return client.as_bearer(token) if token else client

    def visitors(self) -> Visitors:
        """Who knows whom the farm's tokens stand for."""
        return Visitors(lambda token: visitor_of(self.client(token), token))

    def _watch(self) -> None:
        while not self._over.is_set():
            wait_s = LOOK_S if (error := self._looked()) is None else _AGAIN_S
            if error is not None:
                self._drop()
                self._newest = -1
                if self.trouble != error.message:
                    self.trouble, self.hint = error.message, error.hint
                    self._tell()
            self._over.wait(wait_s)

    def _looked(self) -> HilError | None:
        """Look at the farm; why it counts as away, None where it is there."""
        try:
            self._look()
        except HilError as error:
            return error
        except ILL_FORMED:
            return FarmError("the farm answers what this hil does not know", hint="is it of this release?")
        return None

    def _look(self) -> None:
        if self._client is None:
            client = self._connect(self._address())
            try:
                self.own = visitor_of(client, client.address.token)
            except BaseException:
                client.close()
                raise
            self._client = client
            self.trouble = self.hint = ""
            self._tell()
            with contextlib.suppress(HilError):
                self.past.prepare(client.ask)
        newest = max((event["id"] for event in self._client.ask("events", limit=1)), default=0)
        if newest != self._newest:
            self._newest = newest
            self._tell()

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(HilError):
                client.close()

    def _tell(self) -> None:
        with self._changed:
            self.generation += 1
            self._changed.notify_all()


def _connected(address: FarmAddress) -> FarmClient:
    return FarmClient(address, patience_s=0, call_s=_CALL_S)


def visitor_of(client: FarmClient, token: str) -> Visitor:
    """Whom a client's token stands for; AccessRefused where the farm does not know it."""
    said = client.ask("me")
    try:
        return Visitor(said["user"], Role(said["role"]), token)
    except ILL_FORMED as error:
        raise AccessRefused("the farm does not say who that is", hint="is it of this release?") from error
