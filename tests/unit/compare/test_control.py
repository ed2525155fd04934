"""The bound of a declared arithmetic: correct outputs are within it, wrong outputs are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hil.compare.control import FACTOR, measure_control
from hil.compare.verdict import compare_output
from hil.core.tensors import Array
from hil.formats.control_json import decode_control, encode_control

RNG = np.random.default_rng(3)
EXACT = RNG.normal(size=(6, 8, 5)).astype(np.float32)
EXACT += np.arange(8, dtype=np.float32).reshape(1, 8, 1)
SIGMA = 0.01


def near(seed: int, sigma: float = SIGMA) -> Array:
    noise = np.random.default_rng(seed).normal(size=EXACT.shape)
    return (EXACT + sigma * noise).astype(np.float32)


RUNS = [near(seed) for seed in range(4)]
CONTROL = measure_control("float16", "test", EXACT, RUNS, RUNS)


def judged(answer: Array, control=CONTROL, reference: Array = EXACT, **more):
    return compare_output("y", answer, reference, control=control, **more)


def changed(change: Callable[[Array], object]) -> Array:
    answer = near(100)
    change(answer)
    return answer


def swap(answer: Array, axis: int) -> None:
    moved = np.moveaxis(answer, axis, 0)
    moved[[0, 1]] = moved[[1, 0]]


WRONG = {
    "negated": -near(100),
    "zeros": np.zeros_like(EXACT),
    "doubled": 2 * near(100),
    "another order": np.roll(near(100).ravel(), 1).reshape(EXACT.shape),
    "channel negated": changed(lambda answer: np.negative(answer[:, 2], out=answer[:, 2])),
    "channel zeroed": changed(lambda answer: answer[:, 0].fill(0)),
    "channels swapped": changed(lambda answer: swap(answer, 1)),
    "rows swapped": changed(lambda answer: swap(answer, 0)),
    "columns swapped": changed(lambda answer: swap(answer, 2)),
    "bias missing": changed(lambda answer: np.subtract(answer, 0.1, out=answer)),
    "bias of one channel missing": changed(lambda answer: np.subtract(answer[:, 3], 0.1, out=answer[:, 3])),
    "one element": changed(lambda answer: answer.__setitem__((0, 0, 0), answer[0, 0, 0] + 0.2)),
    "one element NaN": changed(lambda answer: answer.__setitem__((1, 2, 3), np.nan)),
    "one element infinite": changed(lambda answer: answer.__setitem__((1, 2, 3), np.inf)),
    "transposed": near(100).transpose(0, 2, 1).reshape(EXACT.shape),
    "scaled by 1 %": near(100) * np.float32(1.02),
    "error ten times as large": near(100, 10 * SIGMA),
    "mean instead of values": np.full_like(EXACT, EXACT.mean()),
    "last row stale": changed(lambda answer: answer.__setitem__(5, answer[4])),
    "relu missing": changed(lambda answer: np.subtract(answer, 0.5 * (EXACT < 0) * EXACT, out=answer)),
    "off by one": np.concatenate([near(100)[:, :, 1:], near(100)[:, :, -1:]], axis=2),
}


def test_control_passes_correct_outputs():
    for seed in range(200, 230):
        output = judged(near(seed))
        assert output.passed, output.reason
    assert output.control == {
        "arithmetic": "float16",
        "source": "test",
        "factor": FACTOR,
        "rmse": pytest.approx(FACTOR * SIGMA, rel=0.2),
        "max_abs": pytest.approx(FACTOR * 3.5 * SIGMA, rel=0.3),
        "jumping": 0,
    }


@pytest.mark.parametrize("name", WRONG)
def test_control_fails_wrong_outputs(name):
    output = judged(WRONG[name])
    assert (output.passed, output.blind) == (False, False), output.reason


def test_control_unused_within_default_tolerance():
    assert judged(EXACT * np.float32(1 + 1e-7)).control is None


def test_user_tolerance_overrides_control():
    assert not judged(near(5), rtol=1e-6).passed
    assert judged(near(5), rtol=1e-6, atol=0.1).passed


def test_control_lists_jumping_elements_without_wider_bound():
    exact = EXACT.copy()
    free = [run.copy() for run in RUNS]
    free[2][0, 1, 2] += 30
    control = measure_control("float16", "test", exact, RUNS, free)
    assert control.jumping == 1 and control.whole == CONTROL.whole
    right = near(7)
    assert judged(right, control).passed
    right[0, 1, 2] += 30
    output = judged(right, control)
    assert (
        output.passed
        and "1 of 240 elements change abruptly with rounding in float16, first at [0, 1, 2]" in output.notes[0]
    )
    right[0, 1, 2] += 300
    assert "not among the values of the control" in judged(right, control).reason
    elsewhere = near(7)
    elsewhere[0, 0, 0] += 30
    assert not judged(elsewhere, control).passed


def test_control_passes_run_output_if_all_elements_jump():
    free = [run + np.float32(40 * (number + 1)) for number, run in enumerate(RUNS)]
    control = measure_control("float16", "test", EXACT, RUNS, free)
    assert control.jumping == EXACT.size
    assert judged(free[0] + np.float32(0.001), control).passed
    between = judged(((free[0] + free[1]) / 2).astype(np.float32), control)
    assert between.blind and "240 of 240 elements change abruptly with rounding in float16" in between.reason
    far = judged(free[0] - np.float32(500), control)
    assert (far.passed, far.blind) == (False, False)


def test_control_ignores_overflow_as_deviation():
    runs = [run.copy() for run in RUNS]
    for run in runs:
        run[0, 0, 0] = np.inf
    control = measure_control("float16", "test", EXACT, runs, runs)
    assert control.jumping == 1 and np.isfinite(control.whole.largest)
    answer = near(9)
    answer[0, 0, 0] = np.inf
    output = judged(answer, control)
    assert output.passed and output.notes == ("1 of 240 values overflow float16",)
    assert (output.mismatches, output.nonfinite) == (0, 1)


@pytest.mark.parametrize(("count", "blind"), [(24, False), (25, True), (240, True)])
def test_control_reports_blind_if_a_tenth_overflows(count, blind):
    runs = [run.copy() for run in RUNS]
    for run in runs:
        run.reshape(-1)[:count] = np.inf
    control = measure_control("float16", "test", EXACT, runs, runs)
    answer = near(9)
    answer.reshape(-1)[:count] = np.inf
    output = judged(answer, control)
    assert output.blind is blind and output.nonfinite == count
    text = f"{count} of 240 values overflow float16"
    assert (output.reason, output.notes[:1]) == (
        (f"{text}: the model does not fit this arithmetic", ()) if blind else ("", (text,))
    )
    answer.reshape(-1)[-1] = -np.inf
    wrong = judged(answer, control)
    assert (wrong.passed, wrong.blind, wrong.nonfinite) == (False, False, min(count + 1, 240))


def test_control_counts_overflow_apart_from_jumps():
    free = [run.copy() for run in RUNS]
    free[1][0, 0, 0] = np.inf
    free[2][0, 1, 2] += 30
    control = measure_control("float16", "test", EXACT, RUNS, free)
    answer = near(7)
    answer[0, 1, 2] += 30
    assert judged(answer, control).notes == (
        "1 of 240 values overflow float16; "
        "1 of 240 elements change abruptly with rounding in float16, first at [0, 1, 2]",
    )


def test_control_of_integers_accepts_values_of_runs():
    exact = np.arange(20)
    runs = [exact.copy() for _ in range(4)]
    runs[1][3] = 7
    control = measure_control("bfloat16", "test", exact, [exact] * 4, runs)
    for value, passed in ((3, True), (7, True), (5, False)):
        answer = exact.copy()
        answer[3] = value
        assert judged(answer, control, exact).passed is passed
    answer = exact.copy()
    answer[4] += 1
    assert not judged(answer, control, exact).passed


def test_control_reports_blind_if_arithmetic_swamps_output():
    runs = [near(seed, 10.0) for seed in range(4)]
    output = judged(near(50, 5.0), measure_control("int8", "test", EXACT, runs, runs))
    assert output.blind and "the error of int8 is so large that a wrong output would pass: zeros" in output.reason
    assert judged(near(50, 5.0), measure_control("int8", "test", EXACT, runs, runs), allow_blind=["y"]).passed


def test_control_lists_clipped_weights():
    runs = [near(seed, 10.0) for seed in range(4)]
    control = replace(measure_control("float16", "test", EXACT, runs, runs), clipped=tuple("abcde"))
    text = "float16 clips out-of-range weights: a, b, c, d, ..."
    assert judged(near(50, 5.0), control).reason.endswith(text)


def test_control_lists_swamped_channels():
    exact = RNG.normal(size=(16, 8)).astype(np.float32)
    for count, blind in ((1, False), (4, True)):
        reference = exact.copy()
        reference[:, :count] *= 0.001
        runs = [
            (reference + 0.01 * np.random.default_rng(seed).normal(size=exact.shape)).astype(np.float32)
            for seed in range(5)
        ]
        output = judged(runs[4], measure_control("int8", "test", reference, runs[:4], runs[:4]), reference)
        assert output.blind is blind
        channels = ", ".join(map(str, range(count)))
        named = f"in {count} of 8 channels of axis 1, int8 deviates by as much as the values: {channels}"
        assert named in (output.reason if blind else output.notes[0])


def test_control_bounds_small_column_separately():
    reference = np.stack([RNG.uniform(100, 600, 50), RNG.uniform(1e-6, 1e-5, 50)], 1).astype(np.float32)
    runs = [
        (reference * (1 + 1e-3 * np.random.default_rng(seed).normal(size=reference.shape))).astype(np.float32)
        for seed in range(5)
    ]
    control = measure_control("float16", "test", reference, runs[:4], runs[:4])
    assert judged(runs[4], control, reference).passed
    negated = runs[4].copy()
    negated[:, 1] *= -1
    assert (judged(negated, control, reference).passed, judged(negated, control, reference).blind) == (False, False)


def test_control_of_stable_runs_returns_none():
    assert measure_control("float16", "test", EXACT, [EXACT] * 4, [EXACT] * 4) is None
    assert measure_control("float16", "test", np.array(["a"], object), [np.array(["a"], object)], []) is None


def test_control_survives_json_round_trip():
    free = [run.copy() for run in RUNS]
    free[1][0, 0, 0] = np.inf
    control = measure_control("float16", "test", EXACT, RUNS, free)
    control = replace(control, clipped=("c", "w"))
    assert decode_control(encode_control(control)) == control
    with pytest.raises(TypeError, match="clipped"):
        decode_control({**encode_control(control), "clipped": [1]})


def test_control_overflow_explains_only_infinite_values():
    exact = EXACT.copy()
    exact[0, 0, 0] = 90_000
    runs = [run.copy() for run in RUNS]
    for run in runs:
        run[0, 0, 0] = np.inf
    control = measure_control("float16", "test", exact, runs, runs)
    for value in (-7.0, 1e30, -np.inf):
        answer = near(9)
        answer[0, 0, 0] = value
        assert not judged(answer, control, exact).passed
    answer[0, 0, 0] = np.inf
    assert judged(answer, control, exact).passed


def test_control_leaves_unmoved_column_exact():
    def with_classes(boxes: Array) -> Array:
        return np.concatenate([boxes, np.arange(40).reshape(40, 1) % 7], axis=1).astype(np.float32)

    boxes = np.random.default_rng(5).uniform(0, 640, (40, 4))
    runs = [with_classes(boxes + np.random.default_rng(seed).normal(size=boxes.shape)) for seed in range(5)]
    reference = with_classes(boxes)
    control = measure_control("bfloat16", "test", reference, runs[:4], runs[:4])
    assert judged(runs[4], control, reference).passed
    wrong = runs[4].copy()
    wrong[:, 4] += 1
    assert not judged(wrong, control, reference).passed


def test_control_bounds_scores_apart_from_coordinates():
    rng = np.random.default_rng(6)
    reference = np.concatenate([rng.uniform(1, 640, (60, 4)), rng.uniform(1e-6, 2e-6, (60, 2))], axis=1)
    runs = [(reference * (1 + 5e-4 * rng.normal(size=reference.shape))).astype(np.float32) for _ in range(5)]
    reference = reference.astype(np.float32)
    control = measure_control("float16", "test", reference, runs[:4], runs[:4])
    assert judged(runs[4], control, reference).passed
    wrong = runs[4].copy()
    wrong[:, 4:] *= -1
    assert not judged(wrong, control, reference).passed


def test_control_leaves_stable_integers_exact():
    exact = np.arange(5000, 5064)
    runs = [exact.copy() for _ in range(4)]
    for run in runs:
        run[0] += 100
    control = measure_control("bfloat16", "test", exact, [exact] * 4, runs)
    assert judged(runs[0], control, exact).passed
    wrong = runs[0].copy()
    wrong[1:] += 3
    assert not judged(wrong, control, exact).passed
