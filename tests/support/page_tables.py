"""Read the tables of a page, and the values of their texts, without code of hil."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser

import pytest

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "%": 1.0, "dB": 1.0}
_UNITS |= {"x": 1.0, "": 1.0, "op/s": 1.0, "B/s": 1.0, "op": 1.0}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_NUMBER = re.compile(r"([+\u2212-]?\d[\d,.]*(?:e[+-]?\d+)?|inf|nan) ?([%a-zA-Z/]*)")


class PageTables(HTMLParser):
    """Tables of a page.

    Attributes:
        found: label of the region -> rows, each a mapping from the column's title to the text of the cell.
        numeric: labels of the tables with columns of numbers.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: dict[str, list[dict[str, str]]] = {}
        self.numeric: set[str] = set()
        self._label, self._heads, self._cells = "", list[str](), list[str]()
        self._text: list[str] | None = None
        self._in_head = self._in_table = False
        self.feed(text)
        self.close()

    def __getitem__(self, label: str) -> list[dict[str, str]]:
        return self.found[label]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("br", "p", "div"):
            self.handle_data(" ")
        if values.get("role") == "region":
            self._label = values.get("aria-label") or ""
        elif tag == "table":
            self._in_table = True
            self.found[self._label], self._heads = [], []
        elif tag == "thead":
            self._in_head = True
        elif tag in ("td", "th") and self._in_table:
            self._text = []
            if self._in_head and "number" in (values.get("class") or ""):
                self.numeric.add(self._label)

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._text is not None:
            text = " ".join("".join(self._text).split())
            (self._heads if self._in_head else self._cells).append(text)
            self._text = None
        elif tag == "thead":
            self._in_head = False
        elif tag == "tr" and self._cells:
            if len(self._cells) == len(self._heads):
                self.found[self._label].append(dict(zip(self._heads, self._cells, strict=True)))
            self._cells = []
        elif tag == "table":
            self._in_table = False


def value_of(text: str) -> float:
    """Return the first number of a text in its basic unit: seconds, bytes, percent, or a factor."""
    minutes = re.match(r"(\d+) min (\d+) s", text)
    if minutes:
        return 60.0 * int(minutes[1]) + int(minutes[2])
    found = _NUMBER.search(text)
    assert found is not None, f"no number in {text!r}"
    number, unit = float(found[1].replace(",", "").replace("\u2212", "-")), found[2]
    if unit in _UNITS:
        return number * _UNITS[unit]
    return number * (_PREFIXES[unit[0]] * _UNITS[unit[1:]] if unit[1:] in _UNITS and unit[0] in _PREFIXES else 1.0)


def near(value: float | None) -> object:
    """Return a value that equals a number shown with three digits."""
    assert value is not None
    return pytest.approx(value, rel=5e-3, abs=1e-15)


def check_columns(row: Mapping[str, str], expected: Mapping[str, float | str | None]) -> None:
    """Compare cells with expected values. Numbers are shown with three digits, and None as an empty cell."""
    for title, value in expected.items():
        shown = row[title]
        if value is None or isinstance(value, str):
            assert shown == (value or ""), (title, row)
        else:
            assert value_of(shown) == near(value), (title, value, row)
