"""Look up farm users by token."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from anyio import CapacityLimiter, to_thread

from hil.controller.farm.messages import Right, Role
from hil.errors import AccessRefused, FarmUnreachable

# Cache limits: seconds before a token is checked again, number of tokens, and characters per token.
TRUST_SECONDS = 60.0
_MOST_KNOWN, _LONGEST_TOKEN = 10_000, 200
# Threads for checking tokens that were valid before. The same number of threads checks other tokens.
_THREADS = 2
# Maximum different tokens that wait for a check, per client and in total. Tokens that were valid before do not count.
_MOST_WAITING_OF_CLIENT, _MOST_WAITING = 4, 32


@dataclass(frozen=True)
class Visitor:
    """Farm user who views a page."""

    user: str
    role: Role
    token: str = field(default="", repr=False)
    rights: frozenset[str] = frozenset()  # permissions in addition to those of the role

    def may_cancel(self, owner: str) -> bool:
        """Return True if this user may cancel jobs of the user ``owner``."""
        return self.role is Role.ADMIN or (self.role.covers(Role.SUBMITTER) and owner == self.user)

    @property
    def may_hold(self) -> bool:
        """True if this user may take boards out of service."""
        return self.role is Role.ADMIN

    @property
    def may_switch_power(self) -> bool:
        """True if this user may switch the power of free boards."""
        return Right.POWER.value in self.rights


class Visitors:
    """Cache of farm tokens and their users.

    Args:
        ask: returns the user for a token. Raises AccessRefused for an unknown token, FarmUnreachable without a
            connection.
    """

    def __init__(self, ask: Callable[[str], Visitor], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._secret = secrets.token_bytes(32)
        self._kept: dict[str, tuple[str, str]] = {}  # cookie value -> the token and the user who logged in
        self._known: dict[str, tuple[float, Visitor | None]] = {}
        self._lock = threading.Lock()

    def keep(self, token: str, user: str) -> str:
        """Return a cookie value that replaces a token until the server ends.

        The token itself would give access to the farm.

        Args:
            user: user from :class:`.Peer`. The cookie is only valid for this user's connections.
        """
        name = hmac.new(self._secret, f"{user} {token}".encode(), "sha256").hexdigest()
        with self._lock:
            if len(self._kept) >= _MOST_KNOWN:
                self._kept.clear()
            self._kept[name] = token, user
        return name

    def find_token(self, kept: str, user: str) -> str:
        """Return the token for a user's cookie value, or ""."""
        token, owner = self._kept.get(kept, ("", user))
        return token if owner == user else ""

    def get_cached(self, token: str) -> tuple[bool, Visitor | None]:
        """Return True if the cached result for a token is current, and the cached user."""
        if not token or len(token) > _LONGEST_TOKEN or not token.isascii() or not token.isprintable():
            return True, None
        asked, visitor = self._known.get(token, (-TRUST_SECONDS, None))
        return self._clock() - asked < TRUST_SECONDS, visitor

    def find(self, token: str) -> Visitor | None:
        """Return the user for a token, or None if it is unknown. Waits for the farm.

        If the farm is unreachable, the last result stays valid. This is safe, because no token gives access to an
        unreachable farm.
        """
        fresh, visitor = self.get_cached(token)
        if fresh:
            return visitor
        try:
            visitor = self._ask(token)
        except FarmUnreachable:
            return visitor
        except AccessRefused:
            visitor = None
        with self._lock:
            if len(self._known) >= _MOST_KNOWN:
                # Delete refused tokens first, so that they do not displace valid tokens.
                self._known = {kept: found for kept, found in self._known.items() if found[1] is not None}
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[token] = (self._clock(), visitor)
        return visitor


class VisitorLookup:
    """Asynchronous lookup of visitors, in separate threads.

    Unknown tokens cannot delay pages or known users, and a client cannot use all lookups.
    """

    def __init__(self, visitors: Visitors) -> None:
        self._visitors = visitors
        self._known_threads, self._unknown_threads = CapacityLimiter(_THREADS), CapacityLimiter(_THREADS)
        self._waiting: Counter[tuple[str, str]] = Counter()  # requests per client and unknown token

    async def find(self, token: str, client: str) -> Visitor | None:
        """Return the user for a client's token, or None if it is unknown.

        Raises AccessRefused if too many tokens wait for a check.
        """
        is_current, visitor = self._visitors.get_cached(token)
        if is_current:
            return visitor
        if visitor is not None:
            return await to_thread.run_sync(self._visitors.find, token, limiter=self._known_threads)
        key = client, token
        if key not in self._waiting and self._is_full(client):
            raise AccessRefused("too many unknown tokens are being checked; retry in a few seconds")
        self._waiting[key] += 1
        try:
            return await to_thread.run_sync(self._visitors.find, token, limiter=self._unknown_threads)
        finally:
            self._waiting[key] -= 1
            self._waiting += Counter()  # deletes entries without requests

    def _is_full(self, client: str) -> bool:
        of_client = sum(name == client for name, _ in self._waiting)
        return of_client >= _MOST_WAITING_OF_CLIENT or len(self._waiting) >= _MOST_WAITING
