"""Error for a URL parameter that is unknown or has an invalid value."""

from __future__ import annotations

from collections.abc import Iterable

from hil.core.text import escape_controls
from hil.errors import UsageError, did_you_mean

_MAX_CHARS = 80


class InvalidParameter(UsageError):
    """A URL parameter is unknown or has an invalid value. Pages answer with status 400."""

    @classmethod
    def choose(cls, name: str, given: str, valid: Iterable[str]) -> InvalidParameter:
        """Return the error for a value that is not valid.

        Args:
            name: the parameter as text, such as "session order".
            valid: all valid values.
        """
        known = [one for one in valid if one]
        text = f"invalid {name} '{escape_controls(given[:_MAX_CHARS])}'"
        return cls(text, hint=f"{did_you_mean(given[:_MAX_CHARS], known)}valid values: {', '.join(known)}")
