"""Samples of large outputs: whole rows, deterministic, with the extremes."""

from __future__ import annotations

import numpy as np
import pytest

from hil.compare.criteria import parse_accept
from hil.compare.sampling import LARGE, SAMPLE, sample_of
from hil.compare.verdict import compare_output
from hil.core.tensors import Array

RNG = np.random.default_rng(1)
LARGE_OUTPUT = RNG.standard_normal((8, 500, 64, 9), dtype=np.float32)
LARGE_OUTPUT[3, 77, 5, 2], LARGE_OUTPUT[7, 1, 60, 8] = 90, -90
LARGE_OUTPUT[0, 0, 0, :2] = np.nan, np.inf


@pytest.mark.ci
@pytest.mark.parametrize("axes", [(), (3,), (1,), (2, 3), (0, 2)])
def test_sample_contains_whole_rows_and_extremes(axes: tuple[int, ...]) -> None:
    sample = sample_of(LARGE_OUTPUT, axes)
    assert sample is not None and sample.ndim == 4 and SAMPLE / 2 < sample.size < LARGE_OUTPUT.size / 4
    assert [sample.shape[axis] for axis in axes] == [LARGE_OUTPUT.shape[axis] for axis in axes]
    assert {-90, 90} <= set(sample.reshape(-1).tolist())

    def rows(array: Array) -> set[bytes]:
        moved = np.moveaxis(array, axes, range(-len(axes), 0))
        return {row.tobytes() for row in moved.reshape(-1, *(LARGE_OUTPUT.shape[axis] for axis in axes))}

    assert rows(sample) <= rows(LARGE_OUTPUT)
    again = sample_of(LARGE_OUTPUT, axes)
    assert again is not None and again.tobytes() == sample.tobytes()


def test_sample_absent_for_small_outputs_and_few_rows() -> None:
    assert sample_of(np.ones(LARGE), ()) is None
    assert sample_of(np.ones((2, LARGE)), (1,)) is None
    assert sample_of(np.ones((2, LARGE), np.complex64), ()) is not None


def verdict(text: str, reference: Array, function=None) -> str:
    found = compare_output("y", reference, reference, accept=parse_accept([text], function and (lambda *_: function)))
    return "PASS" if found.passed else "BLIND" if found.blind else "FAIL"


def test_sample_never_makes_output_blind() -> None:
    """A wrong output that the sample misses is rejected by the full comparison."""
    reference = np.zeros((1100, 1000), np.float32)
    reference[:3, :] = np.arange(3000).reshape(3, 1000)
    assert verdict("mismatches<=500", reference) == "PASS"
    assert verdict("mismatches<=4000", reference) == "BLIND"
    assert verdict("lsb<=1", reference) == "PASS", "too few values of a sample are on the grid"


def test_large_outputs_judged_like_small_outputs() -> None:
    reference = RNG.standard_normal((1100, 1000), dtype=np.float32)
    for text in ("top1>=0.9", "argmax(axis=0)", "kl<=0.1", "sqnr>=10", "mismatches<=1000", "max_abs<=0.5"):
        assert verdict(text, reference) == "PASS", text
    for text in ("kl<=1000", "sqnr>=-10", "max_abs<=100", "top900>=0.5"):
        assert verdict(text, reference) == "BLIND", text


def test_function_criterion_gets_few_whole_outputs() -> None:
    reference, shapes = RNG.standard_normal((1100, 1000), dtype=np.float32), []

    def near(actual: Array, wanted: Array) -> bool:
        shapes.append(actual.shape)
        return bool(np.abs(actual - wanted).max() < 1)

    assert verdict("python:f.py:f", reference, near) == "PASS"
    assert set(shapes) == {(1100, 1000)} and len(shapes) == 6
    shapes.clear()
    assert verdict("max_abs<=1, python:f.py:f", reference, near) == "PASS"
    assert len(shapes) == 1, "the sample is rejected by the other criterion"
