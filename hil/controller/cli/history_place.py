"""Option ``--history``: a directory or a PostgreSQL URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.options import F

if TYPE_CHECKING:
    from hil.controller.storage.history.place import HistoryPlace


def make_history_option(default: str) -> Callable[[F], F]:
    """Return the option ``--history``.

    Args:
        default: description of the default, for the help text.
    """
    return click.option(
        "--history",
        "place",
        type=click.Path(file_okay=False),
        metavar="DIR|URL",
        callback=_parse_place,
        help=f"Directory or PostgreSQL URL of the history (default: {default}).",
    )


def _parse_place(_: click.Context, __: click.Parameter, value: str | None) -> HistoryPlace | None:
    """Return the place, or None without the option. Raises UsageError for another URL."""
    from hil.controller.pipeline.settings.project import find_history
    from hil.controller.storage.history.place import HistoryPlace, is_url, parse_url

    if value is None:
        return None
    return parse_url(value, find_history(Path()).place.folder) if is_url(value) else HistoryPlace(Path(value))
