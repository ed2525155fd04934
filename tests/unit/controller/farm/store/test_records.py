"""Test the conversion of documents to PostgreSQL's jsonb."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.farm.store.records import as_json, make_storable

TEXTS = st.text(st.characters(exclude_categories=[]))  # includes surrogates and NUL
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda some: st.lists(some) | st.dictionaries(TEXTS, some),
    max_leaves=20,
)


@given(VALUES)
def test_as_json_stores_storable_form_of_document(value: object):
    text = as_json(value)
    assert text.encode() and json.loads(text, parse_constant=pytest.fail) == json.loads(
        json.dumps(make_storable(value))
    )


@pytest.mark.parametrize("text", ["a\x00b", "\\u0000", "\ud800", "\\\x00"])
def test_as_json_replaces_text_rejected_by_jsonb(text: str):
    assert json.loads(as_json([text])) == [make_storable(text)]
    assert "\x00" not in make_storable(text)
