"""Option ``--history``: a directory, a PostgreSQL URL, or the history of this machine's farm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.options import F

if TYPE_CHECKING:
    from hil.controller.pipeline.settings.history_settings import HistorySettings

_FARM = "farm"


def make_history_option(default: str) -> Callable[[F], F]:
    """Return the option ``--history``. Its value is the settings of the history, or None without the option.

    Args:
        default: description of the default, for the help text.
    """
    return click.option(
        "--history",
        "chosen",
        type=click.Path(file_okay=False),
        metavar="DIR|URL|farm",
        callback=_find_settings,
        help=f"History: a directory, a PostgreSQL URL, or `farm` for this machine's farm (default: {default}).",
    )


def _find_settings(_: click.Context, __: click.Parameter, value: str | None) -> HistorySettings | None:
    """Return the settings. Raises UsageError for another URL, or if this machine's farm has no history."""
    if value is None:
        return None
    if value == _FARM:
        from hil.controller.farm.local.farm_history import find_farm_history

        return find_farm_history()
    from dataclasses import replace

    from hil.controller.pipeline.settings.project import find_history
    from hil.controller.storage.history.place import HistoryPlace, is_url, parse_url

    settings = find_history(Path())
    place = parse_url(value, settings.place.folder) if is_url(value) else HistoryPlace(Path(value))
    return replace(settings, place=place)
