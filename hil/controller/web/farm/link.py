"""The web server's connection to a farm.

A separate thread maintains the connection, so that pages never wait for an unreachable farm.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.messages import Role
from hil.controller.farm.paths import FarmAddress
from hil.controller.records.lab.farm import FarmUser
from hil.controller.web.access.visitors import Visitor, Visitors
from hil.controller.web.farm.past import FarmPast
from hil.errors import AccessRefused, FarmUnreachable, HilError

# Seconds between polls for new events, and between connection attempts.
LOOK_S, _AGAIN_S = 1.0, 2.0
# Seconds to wait for the thread on exit.
_END_SECONDS = 0.2
T = TypeVar("T")
# Seconds to cache charts, and maximum cached charts.
_LATELY_S, _MOST_LATELY = 15.0, 100
# Farm call timeout, in seconds.
_CALL_SECONDS = 10.0


class FarmLink:
    """Connection to a farm, maintained by a thread inside the context manager.

    Args:
        address: returns the farm's address. Called before every attempt, because a local farm may not exist yet.
        connect: creates the client.
    """

    def __init__(
        self, address: Callable[[], FarmAddress], connect: Callable[[FarmAddress], FarmClient] | None = None
    ) -> None:
        self.own = Visitor("", Role.VIEWER)  # the visitor for the server's token
        self.trouble, self.hint = "not connected yet", ""  # reason for a failed connection; "" while connected
        self.runs: Path | None = None  # directory with the fetched results, see `mirror.py`
        self.past = FarmPast()
        self.generation = 0  # increments after farm events, connects and disconnects
        self._changed = threading.Condition()
        self._address, self._connect = address, connect or _open_client
        self._client: FarmClient | None = None
        self._newest = -1
        self._lately: dict[str, tuple[float, Any]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll_until_closed, name="hil-farm", daemon=True)

    def __enter__(self) -> FarmLink:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._notify_waiters()
        # Wait only for a short time, because the thread may be in a call that fails slowly.
        self._thread.join(_END_SECONDS)
        self._close_client()

    def wait(self, seen: int) -> int:
        """Wait for a generation other than ``seen``, or for the server's end. Return the current generation."""
        with self._changed:
            self._changed.wait_for(lambda: self.over or self.generation != seen)
            return self.generation

    @property
    def over(self) -> bool:
        """True if the server is shutting down."""
        return self._over.is_set()

    def ask(self, what: str, token: str = "", **arguments: Any) -> Any:
        """Query the farm with a token. "" is the server's token.

        Raises:
            FarmUnreachable: the farm is not connected.
            AccessRefused: the token lacks permission.
            UsageError: the farm does not know the object.
        """
        return self.client(token).ask(what, **arguments)

    def get_recent(self, key: str, make: Callable[[], T]) -> T:
        """Return a cached result up to :data:`_LATELY_S` seconds old, or compute it.

        The cache is for charts, which read many records for every request.
        """
        made, found = self._lately.get(key, (-_LATELY_S, None))
        if time.monotonic() - made >= _LATELY_S:
            found = make()
            if len(self._lately) >= _MOST_LATELY:
                self._lately.clear()
            self._lately[key] = (time.monotonic(), found)
        kept: T = found
        return kept

    def do(self, action: str, token: str, **arguments: Any) -> Any:
        """Change something at the farm with a token. Raises the errors of :meth:`ask`."""
        answer = self.client(token).do(action, **arguments)
        self._notify_waiters()
        return answer

    def download(self, digest: str, to: Path, on_bytes: Callable[[int], None]) -> None:
        """Download a file from the farm's store; see :meth:`.FarmClient.download`."""
        self.client().download(digest, to, on_bytes=on_bytes)

    def client(self, token: str = "") -> FarmClient:
        """Return the current client for a token. Raises FarmUnreachable if the farm is not connected."""
        client = self._client
        if client is None:
            raise FarmUnreachable(f"farm unreachable: {self.trouble}", hint=self.hint)
        return client.with_token(token) if token else client

    def make_visitors(self) -> Visitors:
        """Return a lookup from farm tokens to visitors."""
        return Visitors(lambda token: find_visitor(self.client(token), token))

    def _poll_until_closed(self) -> None:
        while not self._over.is_set():
            wait_s = LOOK_S if (error := self._try_poll()) is None else _AGAIN_S
            if error is not None:
                self._close_client()
                self._newest = -1
                if self.trouble != error.message:
                    self.trouble, self.hint = error.message, error.hint
                    self._notify_waiters()
            self._over.wait(wait_s)

    def _try_poll(self) -> HilError | None:
        """Poll the farm. Return the error if it is unreachable."""
        try:
            self._poll_farm()
        except HilError as error:
            return error
        return None

    def _poll_farm(self) -> None:
        if self._client is None:
            client = self._connect(self._address())
            try:
                self.own = find_visitor(client, client.address.token)
            except BaseException:
                client.close()
                raise
            self._client = client
            self.trouble = self.hint = ""
            self._notify_waiters()
            with contextlib.suppress(HilError):
                self.past.prepare(client.ask)
        newest = max((event.id for event in self._client.ask("events", limit=1)), default=0)
        if newest != self._newest:
            self._newest = newest
            self._notify_waiters()

    def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(HilError):
                client.close()

    def _notify_waiters(self) -> None:
        with self._changed:
            self.generation += 1
            self._changed.notify_all()


def _open_client(address: FarmAddress) -> FarmClient:
    return FarmClient(address, patience_s=0, call_s=_CALL_SECONDS)


def find_visitor(client: FarmClient, token: str) -> Visitor:
    """Return the user and role for a token. Raises AccessRefused if the farm does not know the token."""
    user: FarmUser = client.ask("me")
    try:
        return Visitor(user.user, Role(user.role), token, frozenset(user.rights))
    except ValueError as error:
        raise AccessRefused(
            "the farm response does not name the user", hint="run the same hil release on the farm"
        ) from error
