"""JSON documents of pages, made from the values that the template of a page gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from hil.controller.records.base import Record
from hil.controller.records.pages.common import PageDocument, PageErrorDocument

# Start of the addresses of the JSON API. The number increases if a document changes incompatibly.
API = "/api/v1"
# Key of the ASGI scope that marks a request of the API.
_MARK = "hil_json"
# Field of a document -> its value: a path such as "found.sessions", or a function of all values.
Source = str | Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class DocumentRecipe:
    """Type of a page's document, and where its fields come from. Other fields have their name in the template."""

    kind: type[PageDocument]
    sources: Mapping[str, Source]

    def make(self, values: Mapping[str, Any]) -> PageDocument:
        """Return the document for the values of a template."""
        given = {name: values[name] for name in self.kind.__struct_fields__ if name in values}
        given |= {name: _find_value(values, source) for name, source in self.sources.items()}
        return msgspec.convert(given, self.kind, from_attributes=True, strict=False)


# Template -> document, for each path of a module with pages.
PageDocuments = Mapping[str, Mapping[str, DocumentRecipe]]


def describe(kind: type[PageDocument], **sources: Source) -> DocumentRecipe:
    """Return the recipe of a document."""
    return DocumentRecipe(kind, sources)


def list_numbered(kind: type[Record], name: str = "rows") -> Source:
    """Return the source of a list whose template value has pairs of index and item. ``index`` is the first field."""
    names = kind.__struct_fields__[1:]
    return lambda values: [
        {"index": index, **{one: getattr(item, one) for one in names}} for index, item in values[name]
    ]


def list_records(name: str) -> Source:
    """Return the source of a list of records that may have more fields than the document, or unset fields."""
    return lambda values: [one.to_json() for one in values[name]]


def mark_json(scope: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the ASGI scope of an API request for the page at a path."""
    headers = [(name, value) for name, value in scope["headers"] if not name.startswith(b"hx-")]
    return {**scope, "path": path, "raw_path": path.encode(), "headers": headers, _MARK: True}


def is_json(request: Request) -> bool:
    """Return True if a request wants the JSON form of a page."""
    return request.scope.get(_MARK) is True


def respond_with_document(document: PageDocument, status: int = 200) -> Response:
    """Return a document as JSON. Infinity and NaN are strings."""
    text = json.dumps(document.to_json(), ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), status, media_type="application/json")


def respond_with_error(status: int, kind: str, message: str, hint: str) -> Response:
    """Return an error as JSON."""
    return respond_with_document(PageErrorDocument(status=status, kind=kind, error=message, hint=hint), status)


def _find_value(values: Mapping[str, Any], source: Source) -> Any:
    if not isinstance(source, str):
        return source(values)
    first, *rest = source.split(".")
    found = values.get(first)
    for name in rest:
        if found is not None:
            found = found[name] if isinstance(found, Mapping) else getattr(found, name)
    return found
