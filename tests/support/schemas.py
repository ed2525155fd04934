"""Validation of documents against the JSON schemas in docs/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
from referencing import Registry, Resource

DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = {path.name: json.loads(path.read_text()) for path in DOCS.glob("*.schema.json")}
_REGISTRY = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in SCHEMAS.items())


def check_document(document: Any, definition: str = "", file: str = "commands") -> None:
    """Validate a document.

    Args:
        definition: a name in ``$defs``; "" for the whole schema.
        file: ``docs/FILE.schema.json``.
    """
    reference = f"{file}.schema.json" + (f"#/$defs/{quote(definition)}" if definition else "")
    jsonschema.Draft202012Validator({"$ref": reference}, registry=_REGISTRY).validate(document)
