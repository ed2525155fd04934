"""Test the comparison of labels with selector values: numbers, units, versions, and their texts."""

from __future__ import annotations

import operator
from typing import Any

import pytest

from hil.controller.farm.selector import (
    ValueSet,
    as_text,
    compare_or_false,
    format_value,
    is_there,
    parse_quantity,
    parse_version,
)


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        ("4", 4, ""),
        ("-2.5", -2.5, ""),
        ("1e3", 1000, ""),
        ("7 B", 7, "b"),
        ("1KiB", 1 << 10, "kib"),
        ("1 MiB", 1 << 20, "mib"),
        ("1.5gib", 3 << 29, "gib"),
        ("2TiB", 2 << 40, "tib"),
        ("1kB", 10**3, "kb"),
        ("1MB", 10**6, "mb"),
        ("16 GB", 16 * 10**9, "gb"),
        ("1TB", 10**12, "tb"),
        ("1e999", float("inf"), ""),
        ("", None, ""),
        ("GiB", None, ""),
        ("1 G", None, ""),
        ("1GiBs", None, ""),
        ("6.1.0", None, ""),
        ("٣", None, ""),
        ("nan", None, ""),
    ],
)
def test_quantity_parses_number_and_unit(text: str, number: float | None, unit: str):
    assert parse_quantity(text) == (number, unit)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("6.1", (6, 1)),
        ("6.1.0-23-amd64", (6, 1)),
        ("v2.10.3", (2, 10, 3)),
        ("0", ()),
        ("10", (10,)),
        ("a53", None),
        ("", None),
        (".5", None),
    ],
)
def test_version_parses_leading_numbers(text: str, parts: tuple[float, ...] | None):
    assert parse_version(text) == parts


@pytest.mark.parametrize(
    ("value", "wanted", "is_equal"),
    [
        ("a53", "a53", True),
        ("a53", "A53", False),
        (4, "4", True),
        (4, "4.0", True),
        (4, "5", False),
        (4, "four", False),
        (1024, "1KiB", True),
        ("1 KiB", "1024", True),
        ("1024", "1KiB", True),
        ("1024B", "1KiB", True),
        ("6.1", "6.10", False),
        ("04", "4", False),
        (True, "TRUE", True),
        (True, "1", True),
        (True, "false", False),
        (False, "no", True),
        (False, "", True),
        ("true", "yes", False),
        (1, "true", False),
        (float("nan"), "nan", False),
    ],
)
def test_wanted_value_equals_label(value: Any, wanted: str, is_equal: bool):
    assert ValueSet((wanted,)).has(value) is is_equal


@pytest.mark.parametrize(
    ("value", "wanted", "order"),
    [
        (4, "3", 1),
        (4, "4", 0),
        (3.5, "4", -1),
        (1 << 30, "1GiB", 0),
        (1 << 30, "1GB", 1),
        ("512 MiB", "1GiB", -1),
        ("512MiB", "1000000", 1),
        ("1024", "1KiB", 0),
        ("6.10", "6.9", 1),
        ("6.1.0", "6.1", 0),
        ("6.1-rc2", "6.2", -1),
        (6.1, "6.1.2", -1),
        (3, "2.9.1", 1),
        (10**400, "1e999", -1),
        ("a53", "1", None),
        ("6.1.0", "1GiB", None),
        ("1GiB", "6.1.0", None),
        (True, "0", None),
        (float("nan"), "0", None),
    ],
)
def test_above_compares_numbers_units_and_versions(value: Any, wanted: str, order: int | None):
    holds = {
        one.__name__
        for one in (operator.gt, operator.ge, operator.lt, operator.le)
        if compare_or_false(value, wanted, one)
    }
    assert holds == {1: {"gt", "ge"}, 0: {"ge", "le"}, -1: {"lt", "le"}, None: set()}[order]


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], "false", "No", " 0 "])
def test_presence_check_rejects_empty_and_false_values(value: Any):
    assert is_there(value) is False


@pytest.mark.parametrize("value", [True, 1, -1, "a53", "true", [""], "off"])
def test_presence_check_accepts_other_values(value: Any):
    assert is_there(value) is True


@pytest.mark.parametrize(
    ("value", "beside", "text"),
    [
        (2 << 30, ["1GiB"], "2GiB"),
        (2 << 30, ["1"], "2147483648"),
        (3 << 29, ["1MB"], "1.5GiB"),
        (5 << 20, ["1GiB"], "5MiB"),
        (1 << 20, ["1GiB"], "1MiB"),
        (1 << 10, ["1GiB"], "1KiB"),
        (1023, ["1GiB"], "1023"),
        (3 << 40, ["1GiB"], "3TiB"),
        (10**400, ["1GiB"], str(10**400)),
        (True, ["1GiB"], "true"),
        (["iree", "onnxruntime"], ["x"], "iree and onnxruntime"),
        ([1 << 30, 2048], ["1GiB"], "1GiB and 2KiB"),
        ([], [], "empty"),
    ],
)
def test_value_text_formats_labels(value: Any, beside: list[str], text: str):
    assert format_value(value, beside) == text


def test_as_text_writes_booleans_like_toml():
    assert (as_text(True), as_text(False), as_text(1.5), as_text("x")) == ("true", "false", "1.5", "x")
