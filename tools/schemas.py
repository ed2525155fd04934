"""Write the JSON schemas in docs/ from the types of documents.

Run as ``python -m tools.schemas``. A test compares the files with the types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hil.controller.records.base import Record
from hil.controller.records.commands import ErrorDocument
from hil.controller.records.run import RunRecord
from hil.controller.records.suite import CaseRecord

DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class SchemaFile:
    """A schema file: named documents, and the alternatives for the whole file."""

    title: str
    documents: Mapping[str, type[Record]]
    whole: Sequence[type[Record]] = field(default=())


FILES = {
    "run": SchemaFile(
        "hil run --json, hil runs show --json, run.json and lines of results.jsonl",
        {"run": RunRecord, "suite case": CaseRecord, "error": ErrorDocument},
        (RunRecord, ErrorDocument),
    ),
}


def write_schema(name: str) -> str:
    """Return the text of a schema file."""
    file = FILES[name]
    _, definitions = msgspec.json.schema_components(
        list(file.documents.values()), ref_template="#/$defs/{name}", schema_hook=_describe_unknown
    )
    named = {title: {"$ref": f"#/$defs/{kind.__name__}"} for title, kind in file.documents.items()}
    document: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{name}.schema.json",
        "title": file.title,
        **({"oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in file.whole]} if file.whole else {}),
        "$defs": {**named, **{title: _close(one) for title, one in definitions.items()}},
    }
    return json.dumps(document, indent=1) + "\n"


def _describe_unknown(kind: type) -> dict[str, Any]:
    raise TypeError(f"no schema for {kind}")


def _close(definition: dict[str, Any]) -> dict[str, Any]:
    """Reject unknown fields. Readers ignore them, but hil does not write any."""
    return {**definition, "additionalProperties": False} if "properties" in definition else definition


def main() -> None:
    """Write all schema files."""
    for name in FILES:
        (DOCS / f"{name}.schema.json").write_text(write_schema(name))


if __name__ == "__main__":
    main()
