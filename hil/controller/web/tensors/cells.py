"""Describe the cell under the pointer in a tensor's map."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hil.controller.analysis.tensors.elements import NONFINITE, NONFINITE_ALONE
from hil.controller.analysis.tensors.maps import Map, find_edges, make_error_map, make_nonfinite_map
from hil.controller.analysis.tensors.planes import Window
from hil.controller.analysis.tensors.worst import Element, format_exact, read_element
from hil.controller.web.tensors.view import TensorView
from hil.core.text import escape_controls
from hil.errors import UsageError


def describe_cell(shown: TensorView, row: int, column: int) -> Mapping[str, Any]:
    """Return the text for a map cell, and the index of the described element.

    Raises:
        UsageError: the cell does not exist, or the tensor contains strings and has no map.
    """
    if shown.is_text:
        raise UsageError(f"map unavailable for {shown.subject.name}: the elements are strings")
    part = _find_cell_window(shown.window, row, column)
    plane, array = shown.plane, shown.arrays[0]
    first = plane.index_of(part.top, part.left)
    if first is None:
        return {"text": "No element: the last row is shorter.", "index": None}
    many = part.rows * part.columns > 1
    if shown.pair is None:
        value = format_exact(array, first)
        more = (
            _count_elements(part) + _describe_nonfinite(make_nonfinite_map(array, plane, part), NONFINITE_ALONE)
            if many
            else ""
        )
        return {"text": f"{_format_index(first)}: {value}{more}", "index": list(first)}
    if many:
        worst = shown.find_worst_element(part)
        if worst is None:
            return {
                "text": f"{_format_index(first)}: {format_exact(array, first)}{_count_elements(part)}, all equal",
                "index": list(first),
            }
        text = f"Worst of {part.rows} x {part.columns} elements, {format_element(worst, shown)}"
        errors = make_error_map(*shown.pair, plane, part, part=shown.query.part)
        text += _describe_nonfinite(errors, NONFINITE)
        if any(errors.counts[code] for code in NONFINITE) and errors.ends is not None:
            text += f"; worst finite difference: {errors.ends[1]:.6g}"
        return {"text": text, "index": list(worst.index)}
    return {"text": format_element(read_element(*shown.pair, first, shown.tolerance_now), shown), "index": list(first)}


def format_element(one: Element, shown: TensorView) -> str:
    """Format an element: index, both values, the difference, and the tolerance if it is known."""
    values = [format_exact(array, one.index) for array in shown.arrays]
    names = [side.title for side in shown.subject.sides]
    apart = "equal" if one.difference == 0 else f"difference {one.difference:.6g}"
    ulp = f", {one.ulp} ULP" if one.ulp else ""
    first, second = (f"{escape_controls(name)} {value}" for name, value in zip(names, values, strict=True))
    limit = _format_limit(one) if shown.is_tolerance_known else ""
    return f"{_format_index(one.index)}: {first}, {second}, {apart}{ulp}{limit}"


def _format_limit(one: Element) -> str:
    if not math.isfinite(one.limit):
        return ""
    times = (
        f", error ÷ tolerance {one.difference / one.limit:.3g}"
        if one.difference and one.limit and math.isfinite(one.difference)
        else ""
    )
    return f", tolerance {one.limit:.3g}{times}"


def _find_cell_window(window: Window, row: int, column: int) -> Window:
    rows, columns = find_edges(window)
    if row + 1 >= rows.size or column + 1 >= columns.size:
        raise UsageError(f"cell {row}, {column} does not exist")
    return Window(
        window.top + int(rows[row]),
        window.left + int(columns[column]),
        window.top + int(rows[row + 1]),
        window.left + int(columns[column + 1]),
    )


def _count_elements(part: Window) -> str:
    return f", first of {part.rows} x {part.columns} elements"


def _describe_nonfinite(map: Map, words: Mapping[int, str]) -> str:
    return "".join(
        f"; {map.counts[code]} of {map.elements} are {text}" for code, text in words.items() if map.counts[code]
    )


def _format_index(index: tuple[int, ...]) -> str:
    return escape_controls(str(list(index))) if index else "Single element"
