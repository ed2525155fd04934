"""Find the history of this machine's farm."""

from __future__ import annotations

import os

from hil.controller.farm.database.embedded_database import EmbeddedDatabase
from hil.controller.farm.local.local_farm import DATABASE
from hil.controller.farm.paths import DB_VARIABLE, get_farm_home
from hil.controller.farm.settings import load_history
from hil.controller.pipeline.settings.history_settings import HistorySettings
from hil.errors import UsageError


def find_farm_history() -> HistorySettings:
    """Return the settings of the history of this machine's farm.

    The database is that of ``HIL_FARM_DB``, or the embedded database, which must run.

    Raises:
        UsageError: the farm has no history, or its settings are invalid.
    """
    home = get_farm_home()
    url = os.environ.get(DB_VARIABLE, "") or EmbeddedDatabase(home / DATABASE).url
    settings = load_history(home / "farm.toml", url)
    if settings is None:
        raise UsageError(
            f"the farm of this machine, in {home}, has no history",
            hint=f"set auto = true in the table [history] of {home / 'farm.toml'}",
        )
    return settings
