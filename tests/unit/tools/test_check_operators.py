"""When a result of hil and a manual result count as equal."""

from __future__ import annotations

import numpy as np
import pytest

from tools.by_hand import describe_arrays
from tools.check_operators import CRASHED, EQUAL, REFUSED, find_equality

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def ran(*arrays):
    return {"end": "ran", "crashed": False, "message": "", "outputs": describe_arrays(arrays)}


def ended(step, crashed=False):
    return {"end": step, "crashed": crashed, "message": "why", "outputs": []}


def test_same_accepts_equal_bits():
    assert find_equality(ran(VALUES), ran(VALUES.copy())) == EQUAL


@pytest.mark.parametrize(
    "other",
    [
        np.nextafter(VALUES, np.float32(9)),
        VALUES.reshape(3, 2),
        VALUES.view(np.int32),
        np.where(VALUES == 0, np.float32(-0.0), VALUES),
    ],
    ids=["a last bit", "another shape", "another dtype", "the sign of a zero"],
)
def test_same_rejects_any_other_array(other):
    assert find_equality(ran(VALUES), ran(other)) == ""


def test_same_rejects_extra_output():
    assert find_equality(ran(VALUES), ran(VALUES, VALUES)) == ""


def test_same_ignores_missing_dtype_or_shape():
    raw = {**ran(VALUES), "outputs": [["float32", None, describe_arrays([VALUES])[0][2]]]}
    assert find_equality(ran(VALUES), raw) == EQUAL
    nameless = {**ran(VALUES), "outputs": [["", [2, 3], describe_arrays([VALUES])[0][2]]]}
    assert find_equality(nameless, ran(VALUES)) == EQUAL
    assert find_equality(nameless, ran(VALUES + 1)) == ""


def test_same_requires_refusal_or_crash_at_equal_step():
    assert find_equality(ended("load"), ended("load")) == REFUSED
    assert (
        find_equality(ended("import"), ended("compile")) == REFUSED
    )  # hil's importer reads what the compiler would refuse
    assert find_equality(ended("load"), ended("run")) == ""
    assert find_equality(ended("compile", True), ended("compile", True)) == CRASHED
    assert find_equality(ended("compile", True), ended("compile")) == ""
    assert find_equality(ended("run"), ran(VALUES)) == ""
