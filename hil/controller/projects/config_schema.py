"""Make the JSON schemas of config files, for editors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hil.controller.projects.config_keys import ConfigKey, ConfigTable
from hil.core.config_keys import remove_links


@dataclass(frozen=True)
class ConfigFile:
    """A kind of config file."""

    title: str
    meaning: str
    list_tables: Callable[[], list[ConfigTable]]


# Part of a table's header that stands for a name: PATTERN, NAME.
_VARIABLE = re.compile(r'"?[A-Z]+"?')


def make_schema(file: ConfigFile) -> str:
    """Return the JSON schema of a kind of config file as text."""
    root: dict[str, Any] = {"type": "object", "description": file.meaning, "properties": {}}
    root["additionalProperties"] = False
    for table in file.list_tables():
        _add_table(root, table)
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": file.title, **root}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _add_table(root: dict[str, Any], table: ConfigTable) -> None:
    """Add a table to the schema, with the tables that contain it."""
    place = root
    for part in table.name.split("."):
        new: dict[str, Any] = {"type": "object"}
        if _VARIABLE.fullmatch(part):
            if not isinstance(place.get("additionalProperties"), dict):
                place["additionalProperties"] = new
            place = place["additionalProperties"]
        else:
            place = place.setdefault("properties", {}).setdefault(part, new)
    place["description"] = remove_links(table.meaning)
    if table.keys:
        place["properties"] = {one.name: _describe_key(one) for one in table.keys}
    place["additionalProperties"] = _describe_key(table.rest) if table.rest else False


def _describe_key(key: ConfigKey) -> dict[str, Any]:
    default = f" Default: {key.default}." if key.default else ""
    return {**key.schema, "description": remove_links(key.meaning) + default}
