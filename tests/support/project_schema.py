"""Generate the schema of hil.toml from the options: `python tests/support/project_schema.py` writes it to docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hil.controller.pipeline.settings.command_keys import COMMAND_KEYS
from hil.controller.pipeline.settings.options import RunSettings, Spec, list_specs

PATH = Path(__file__).parents[2] / "docs" / "project.schema.json"
_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}


def _type_of(spec: Spec, default: Any) -> dict[str, Any]:
    if spec.repeats:
        return _TEXTS
    if isinstance(default, bool):
        return {"type": "boolean"}
    if spec.bounds is not None:
        return {"type": "integer", "minimum": spec.bounds[0], "maximum": spec.bounds[1]}
    if isinstance(default, int):
        return {"type": "integer"}
    is_number = isinstance(default, float) or (default is None and spec.metavar is None)
    return {"type": "number" if is_number else "string"}


def _table(properties: dict[str, Any], description: str) -> dict[str, Any]:
    return {"type": "object", "description": description, "properties": properties, "additionalProperties": False}


def schema() -> dict[str, Any]:
    """Return the schema of the project file."""
    usual = RunSettings()
    specs = {
        name: spec for name, spec in list_specs(RunSettings).items() if spec.help and name not in ("inputs", "expected")
    }
    keys = {
        name: {**_type_of(spec, getattr(usual, name)), "description": spec.help or name} for name, spec in specs.items()
    }
    of_model = {name: key for name, key in keys.items() if specs[name].decides}
    output = _table({"accept": _TEXTS}, "criteria of an output")
    outputs = {"type": "object", "description": "criteria of single outputs, by name", "additionalProperties": output}
    model = _table({**of_model, "outputs": outputs}, "options of a model")
    models = {
        "type": "object",
        "description": "options of the models whose file name or path matches the pattern; later tables win",
        "additionalProperties": model,
    }
    history = _table(
        {
            "path": {
                "type": "string",
                "description": "directory or PostgreSQL URL of the history (default: hil-runs/history)",
            },
            "quota": {"type": "string", "pattern": "^[0-9]{1,12} ?(MiB|GiB)$", "description": "size of the programs"},
            "auto": {"type": "boolean", "description": "add each run, bench and suite run"},
            "baseline": {"type": "string", "description": "branch whose last good programs are kept (default: main)"},
        },
        "history of measurements; docs/history.md explains it",
    )
    of_commands = {name: {"type": "string", "minLength": 1, "description": text} for name, text in COMMAND_KEYS.items()}
    defaults = _table({**of_commands, **keys}, "options that the command line does not give")
    top = _table({"defaults": defaults, "models": models, "history": history}, "")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hil.toml",
        **top,
        "description": "the project file; docs/project-file.md explains it",
    }


def text() -> str:
    """Return the schema as it is in docs."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
