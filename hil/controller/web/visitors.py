"""Who looks at a farm's pages: whom a token of the farm's stands for, as the farm itself says."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hil.controller.farm.messages import Role
from hil.errors import AccessRefused, FarmUnreachable

# The farm is asked again about a token after so long; of so many the answers are kept.
TRUST_S = 60.0
_MOST_KNOWN, _LONGEST_TOKEN = 10_000, 200


@dataclass(frozen=True)
class Visitor:
    """A user of a farm."""

    user: str
    role: Role
    token: str = field(default="", repr=False)

    def may_cancel(self, owner: str) -> bool:
        """Whether this user may end a job of that user's."""
        return self.role is Role.ADMIN or (self.role.covers(Role.SUBMITTER) and owner == self.user)

    @property
    def may_hold(self) -> bool:
        """Whether this user may hold boards back, and give them back."""
        return self.role is Role.ADMIN


class Visitors:
    """Tokens that a farm was asked about.

    Args:
        ask: whom a token stands for; AccessRefused where it is none, FarmUnreachable where nobody can say.
    """

    def __init__(self, ask: Callable[[str], Visitor], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._secret = secrets.token_bytes(32)
        self._kept: dict[str, str] = {}  # what a browser keeps -> the token
        self._known: dict[str, tuple[float, Visitor | None]] = {}
        self._lock = threading.Lock()

    def keep(self, token: str) -> str:
        """What a browser keeps in place of a token, until this server ends: the token itself opens the farm."""
        name = hmac.new(self._secret, token.encode(), "sha256").hexdigest()
        with self._lock:
            if len(self._kept) >= _MOST_KNOWN:
                self._kept.clear()
            self._kept[name] = token
        return name

    def token_of(self, kept: str) -> str:
        """The token that a browser keeps something in place of; "" for none."""
        return self._kept.get(kept, "")

    def known(self, token: str) -> tuple[bool, Visitor | None]:
        """Whether the farm need not be asked now, and whom the token stands for."""
        if not token or len(token) > _LONGEST_TOKEN or not token.isascii() or not token.isprintable():
            return True, None
        asked, visitor = self._known.get(token, (-TRUST_S, None))
        return self._clock() - asked < TRUST_S, visitor

    def find(self, token: str) -> Visitor | None:
        """Whom a token stands for; None where that is nobody, or nobody can say. Waits for the farm.

        Who was let in stays in while the farm is away: then it can be asked for nothing either.
        """
        fresh, visitor = self.known(token)
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
                self._known.clear()
            self._known[token] = (self._clock(), visitor)
        return visitor
