"""OpenAPI description of the JSON API."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from hil.controller.records.pages.common import PageErrorDocument
from hil.controller.web.server.json_api import HOME
from hil.controller.web.text.documents import API, DocumentRecipe

_REFERENCE = "#/components/schemas/{name}"


def describe_api(
    documents: Mapping[str, Mapping[str, DocumentRecipe]], parameters: Mapping[str, Collection[str]]
) -> dict[str, Any]:
    """Return the OpenAPI document of all pages with a document.

    Args:
        documents: path -> template -> document.
        parameters: path -> names of URL parameters.
    """
    kinds = list(dict.fromkeys(one.kind for templates in documents.values() for one in templates.values()))
    _, schemas = msgspec.json.schema_components([*kinds, PageErrorDocument], ref_template=_REFERENCE)
    paths = {
        f"{API}{HOME if path == '/' else path}": {
            "get": {
                "parameters": [_describe_parameter(name) for name in dict.fromkeys(parameters.get(path, ()))],
                "responses": {
                    "200": _describe_answer("data of the page", [one.kind.__name__ for one in templates.values()]),
                    "default": _describe_answer("error", [PageErrorDocument.__name__]),
                },
            }
        }
        for path, templates in documents.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "hil web", "version": API.rpartition("/")[2]},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _describe_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": "string"}}


def _describe_answer(text: str, names: Collection[str]) -> dict[str, Any]:
    references = [{"$ref": _REFERENCE.format(name=name)} for name in names]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
