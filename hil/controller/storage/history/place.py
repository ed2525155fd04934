"""Place of a history: a directory, or a PostgreSQL database with a directory for the programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hil.errors import UsageError

FILE = "history.sqlite"
_SCHEMES = ("postgresql://", "postgres://")


@dataclass(frozen=True)
class HistoryPlace:
    """Place of a history."""

    folder: Path  # directory of the programs, and of the SQLite database
    url: str = ""  # PostgreSQL database; "" uses SQLite

    def __str__(self) -> str:
        """Return the directory, or the URL without the user's name and password."""
        return _hide_login(self.url) if self.url else str(self.folder)

    def may_exist(self) -> bool:
        """Return False if the history does not exist. A PostgreSQL database is not asked."""
        return bool(self.url) or (self.folder / FILE).is_file()


def is_url(text: str) -> bool:
    """Return True for a URL, and False for a directory."""
    return "://" in text


def parse_url(url: str, folder: Path) -> HistoryPlace:
    """Return the place of a history in PostgreSQL.

    Args:
        folder: directory of the programs.

    Raises:
        UsageError: the URL is not a PostgreSQL URL.
    """
    if not url.startswith(_SCHEMES):
        raise UsageError(
            f"invalid history {_hide_login(url)!r}: expected a directory or a PostgreSQL URL",
            hint="postgresql://USER@HOST:PORT/DATABASE",
        )
    return HistoryPlace(folder, url)


def _hide_login(url: str) -> str:
    """Return a URL without login and parameters, which may contain passwords."""
    scheme, _, rest = url.partition("://")
    place, _, parameters = rest.partition("?")
    if "@" in parameters:
        return f"{scheme}://..."  # the `?` may be a character of a password that is not quoted
    return f"{scheme}://{place.rpartition('@')[2]}"
