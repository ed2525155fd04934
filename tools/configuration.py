"""Write the reference of config files and environment variables, and the JSON schemas of the files.

Run as ``python -m tools.configuration``. Tests compare the files with the types that store the values, and parse the
examples of :data:`tools.configuration_examples.EXAMPLES`, which use every key.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hil.controller.cli.project.config_files import CONFIG_FILES
from hil.controller.projects.config_keys import ConfigKey, ConfigTable
from hil.controller.projects.config_schema import make_schema
from hil.core.variables import VARIABLES, Use
from tools.configuration_examples import EXAMPLES

DOCS = Path(__file__).parents[1] / "docs"
# Page -> kinds of config files.
PAGES = {"configuration.md": ("project", "farm"), "configuration-boards.md": ("board",)}
# Kind of a config file -> name of its schema in docs.
SCHEMAS = {kind: f"{kind}-config.schema.json" for kind in ("board", "farm")} | {"project": "project.schema.json"}
_TYPES = {"string": "string", "integer": "whole number", "number": "number", "boolean": "true or false"}
_TYPES |= {"array": "list of strings", "object": "table"}

_HEADS = {
    "configuration.md": """\
# Configuration reference

This page lists all keys of `hil.toml` and `farm.toml`, and all environment variables. It is generated from the code
that reads them. [Board config reference](configuration-boards.md) lists the keys of board configs.

- [The project file](project-file.md) and [settings of a farm](farm-operation.md) explain the files.
- `hil config show --describe` prints the value of each key of `hil.toml`, its source and its meaning.
- The column *trust* shows the values that need [trust](board-trust.md#trust-board-configs) (`hil board trust DIR`).
- `hil config schema` prints a JSON schema. Editors with [taplo](https://taplo.tamasfe.dev) then complete and check
  keys:

```console
$ hil config schema > hil.schema.json
$ printf '#:schema ./hil.schema.json\\n[defaults]\\nseed = 3\\n' > hil.toml
$ hil config show | grep seed
  seed ... 3 ... hil.toml [defaults]
```""",
    "configuration-boards.md": """\
# Board config reference

This page lists all keys of a board config. It is generated from the code that reads them. [Board
configs](board-configs.md) explains where hil searches for configs.

- Unknown tables and keys are errors.
- *Trust*: in a config from a directory of other people, such as `./board_configs`, this key needs [`hil board trust
  DIR`](board-trust.md#trust-board-configs).
- `hil config schema --file board` prints a JSON schema for editors.""",
}
_TITLES = {"project": "hil.toml", "farm": "farm.toml", "board": ""}
_NOTES = {
    "farm": "The file is in the farm's directory, `HIL_FARM_HOME`. A running farm must restart to read changes. "
    "`hil config schema --file farm` prints a JSON schema.",
}
_VARIABLES: Mapping[Use, str] = {
    "read": "hil reads these variables. An option of the command line overrides its variable.",
    "set": "hil sets these variables for commands that it starts.",
}


def write_page(name: str) -> str:
    """Return a page of the reference."""
    parts = [_HEADS[name]]
    for kind in PAGES[name]:
        title = _TITLES[kind]
        if title:
            parts.append(f"## {title}")
        if note := _NOTES.get(kind):
            parts.append(note)
        for table in CONFIG_FILES[kind].list_tables():
            parts += _write_table(table, "###" if title else "##")
        parts.append(f"{'###' if title else '##'} Example{f' of {title}' if title else 's'}")
        parts += [f"```toml\n# file: {file}\n{text}```" for file, text in EXAMPLES[kind].items()]
    if name == "configuration.md":
        parts += _write_variables()
    return "\n\n".join(parts) + "\n"


def _write_table(table: ConfigTable, level: str) -> Iterator[str]:
    yield f"{level} `[{table.name}]`"
    yield table.meaning
    if table.parent:
        yield f"The keys are: {', '.join(f'`{one.name}`' for one in table.keys)}. `[{table.parent}]` describes them."
        return
    keys = (*table.keys, *((table.rest,) if table.rest else ()))
    columns = ["key", "type", "default", "trust", "meaning"]
    rows = [[f"`{one.name}`", _format_type(one), one.default, one.trust, one.meaning] for one in keys]
    yield _format_rows(columns, rows)


def _format_rows(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table without empty columns."""
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    lines = ["| " + " | ".join(columns[place] for place in kept) + " |", "|---" * len(kept) + "|"]
    lines += ["| " + " | ".join(row[place].replace("|", "\\|") for place in kept) + " |" for row in rows]
    return "\n".join(lines)


def _format_type(key: ConfigKey) -> str:
    schema = key.schema
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"] if one)
    if "pattern" in schema:
        return "size"
    if "type" not in schema:
        return "any"
    kinds = schema["type"]
    if isinstance(kinds, list):
        if "array" not in kinds:
            return " or ".join(_TYPES[one] for one in kinds)
        return "command or request" if "object" in kinds else "command"
    if kinds == "array" and isinstance(schema["items"]["type"], list) and "properties" not in schema["items"]:
        return "list of commands"
    if kinds == "array" and "properties" in schema["items"]:
        return "list of tables"
    if "minimum" in schema and schema["maximum"] < 1 << 62:
        return f"{_TYPES[kinds]} from {schema['minimum']} to {schema['maximum']:,}"
    return _TYPES[kinds] + (" above 0" if "exclusiveMinimum" in schema else "")


def _write_variables() -> Iterator[str]:
    yield "## Environment variables"
    for use, meaning in _VARIABLES.items():
        yield meaning
        rows = [
            [
                f"`{one.name}`",
                one.unset or (one.default and f"`{one.default}`"),
                f"`{one.name}={one.example}`" if one.example else "",
                one.meaning,
            ]
            for one in VARIABLES
            if one.use == use
        ]
        yield _format_rows(["variable", "default", "example", "meaning"], rows)


def main() -> None:
    """Write all pages and schemas."""
    for name in PAGES:
        (DOCS / name).write_text(write_page(name))
        print(DOCS / name, file=sys.stderr)
    for kind, name in SCHEMAS.items():
        (DOCS / name).write_text(make_schema(CONFIG_FILES[kind]))


if __name__ == "__main__":
    main()
