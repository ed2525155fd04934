"""List the kinds of config files: hil.toml, board configs and farm.toml."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from hil.controller.farm.settings import FarmSettings, UserLimits
from hil.controller.projects.config_keys import (
    ConfigKey,
    ConfigTable,
    list_board_tables,
    list_dataclass_keys,
    list_project_tables,
    make_history_table,
)
from hil.controller.projects.config_schema import ConfigFile


def _list_farm_tables() -> list[ConfigTable]:
    """Return the tables of ``farm.toml``."""
    limits = _require_positive(list_dataclass_keys(UserLimits), ("boards", "queued"))
    return [
        ConfigTable("terms", "Times, in seconds unless noted.", _require_positive(list_dataclass_keys(FarmSettings))),
        ConfigTable("limits", "Limits of each user.", limits),
        ConfigTable(
            "limits.users.NAME",
            "Limits of one user. If a key is missing, the key of `[limits]` applies.",
            tuple(replace(one, default="as `[limits]`") for one in limits),
            parent="limits",
        ),
        make_history_table(path="`history` in the farm's directory; with PostgreSQL, the farm's database"),
    ]


def _require_positive(keys: Iterable[ConfigKey], whole: Collection[str] = ()) -> tuple[ConfigKey, ...]:
    kinds = {True: {"type": "integer"}, False: {}}
    return tuple(replace(one, schema={**one.schema, **kinds[one.name in whole], "exclusiveMinimum": 0}) for one in keys)


CONFIG_FILES: Mapping[str, ConfigFile] = {
    "project": ConfigFile("hil.toml", "Project file; docs/project-file.md explains it.", list_project_tables),
    "board": ConfigFile("Board config", "Board config; docs/board-configs.md explains it.", list_board_tables),
    "farm": ConfigFile("farm.toml", "Settings of a farm; docs/farm-operation.md explains them.", _list_farm_tables),
}
