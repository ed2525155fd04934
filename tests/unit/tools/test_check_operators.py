"""When a result of hil and a manual result count as equal."""

from __future__ import annotations

import numpy as np
import pytest

from tools.by_hand import described
from tools.check_operators import CRASHED, EQUAL, REFUSED, same

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def ran(*arrays):
    return {"end": "ran", "crashed": False, "message": "", "outputs": described(arrays)}


def ended(step, crashed=False):
    return {"end": step, "crashed": crashed, "message": "why", "outputs": []}


def test_same_accepts_equal_bits():
    assert same(ran(VALUES), ran(VALUES.copy())) == EQUAL


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
    assert same(ran(VALUES), ran(other)) == ""


def test_same_rejects_extra_output():
    assert same(ran(VALUES), ran(VALUES, VALUES)) == ""


def test_same_ignores_missing_dtype_or_shape():
    raw = {**ran(VALUES), "outputs": [["float32", None, described([VALUES])[0][2]]]}
    assert same(ran(VALUES), raw) == EQUAL
    nameless = {**ran(VALUES), "outputs": [["", [2, 3], described([VALUES])[0][2]]]}
    assert same(nameless, ran(VALUES)) == EQUAL
    assert same(nameless, ran(VALUES + 1)) == ""


def test_same_requires_refusal_or_crash_at_equal_step():
    assert same(ended("load"), ended("load")) == REFUSED
    assert same(ended("import"), ended("compile")) == REFUSED  # hil's importer reads what the compiler would refuse
    assert same(ended("load"), ended("run")) == ""
    assert same(ended("compile", True), ended("compile", True)) == CRASHED
    assert same(ended("compile", True), ended("compile")) == ""
    assert same(ended("run"), ran(VALUES)) == ""
