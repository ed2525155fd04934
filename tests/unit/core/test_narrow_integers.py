from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hil.core.narrow_integers import NARROW_FLAG, Narrowing, is_narrowed, narrow_value
from hil.core.results import Artifact
from hil.core.steps import StepRule, StepsPlan
from hil.core.tensors import TensorSpec
from hil.errors import UsageError

MODEL_INPUTS = (TensorSpec("ids", "int64", (4,)), TensorSpec("x", "float32", (4,)), TensorSpec("n", "int32", (4,)))
MODEL_OUTPUTS = (TensorSpec("y", "int64", (4,)), TensorSpec("count", "int32", (4,)))
PROGRAM_INPUTS = (TensorSpec("ids", "int32", (4,)), *MODEL_INPUTS[1:])
PROGRAM_OUTPUTS = (TensorSpec("y", "int32", (4,)), MODEL_OUTPUTS[1])


def make_artifact(*flags: str) -> Artifact:
    main = {"main.vmfb": Path("main.vmfb")}
    return Artifact("iree", "main.vmfb", main, {}, "f", "iree", flags, MODEL_INPUTS, MODEL_OUTPUTS)


def find_narrowing(*flags: str) -> Narrowing:
    return Narrowing.of(make_artifact(*flags), PROGRAM_INPUTS, PROGRAM_OUTPUTS)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], False),
        ([NARROW_FLAG], True),
        ([f"{NARROW_FLAG}=true"], True),
        ([NARROW_FLAG[1:]], True),
        ([f"{NARROW_FLAG}=false"], False),
        ([NARROW_FLAG, f"{NARROW_FLAG}=0"], False),
        (["--iree-input-demote-f64-to-f32"], False),
    ],
)
def test_last_flag_decides_whether_program_is_narrowed(flags: list[str], expected: bool):
    assert is_narrowed(flags) is expected


def test_values_convert_only_where_model_has_int64():
    narrowing = find_narrowing(NARROW_FLAG)
    given = {"ids": np.array([1, -2, 2**31 - 1, -(2**31)]), "x": np.ones(4, np.float32), "n": np.ones(4, np.int32)}
    passed = narrowing.narrow_inputs(given)
    assert [array.dtype.name for array in passed.values()] == ["int32", "float32", "int32"]
    np.testing.assert_array_equal(passed["ids"], given["ids"])
    returned = narrowing.widen_outputs({"y": np.array([-5, 7, 0, 1], np.int32), "count": np.ones(4, np.int32)})
    assert [array.dtype.name for array in returned.values()] == ["int64", "int32"]
    assert returned["y"].tolist() == [-5, 7, 0, 1]
    assert narrowing.widen_specs(PROGRAM_INPUTS, PROGRAM_OUTPUTS) == (MODEL_INPUTS, MODEL_OUTPUTS)


def test_notes_name_converted_inputs_and_outputs():
    first, second = find_narrowing(NARROW_FLAG).describe(MODEL_INPUTS, MODEL_OUTPUTS)
    assert first == "int64 inputs ids were passed as int32, which the program was compiled for"
    assert second == "int64 outputs y were computed as int32, which the program was compiled for"


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32 + 5])
def test_value_that_does_not_fit_is_refused(value: int):
    with pytest.raises(UsageError, match=f"input 'ids': the value {value} does not fit into int32"):
        narrow_value("input 'ids'", np.array([0, value]))


def test_program_without_flag_is_not_converted():
    """A program that returns int32 without the flag is wrong. Converted outputs would hide the error."""
    narrowing = find_narrowing()
    assert narrowing.widen_specs(PROGRAM_INPUTS, PROGRAM_OUTPUTS) == (PROGRAM_INPUTS, PROGRAM_OUTPUTS)
    assert narrowing.widen_outputs({"y": np.ones(4, np.int32)})["y"].dtype == np.int32
    assert narrowing.describe(MODEL_INPUTS, MODEL_OUTPUTS) == []


def test_steps_convert_constant_inputs_but_not_prompts():
    plan = StepsPlan(((1, StepRule.TOKENS),), ((2, 0),), logits=1, steps=1, shapes=((0,),))
    long = np.array([1, 2])
    given = {"prompt": long, "forced": long, "other_prompt": long, "ids": long}
    passed = find_narrowing(NARROW_FLAG).narrow_inputs(given, plan)
    assert [array.dtype.name for array in passed.values()] == ["int64", "int64", "int64", "int32"]
    returned = {"logits": np.ones(2), "positions": long, "tokens": long, "y": long.astype(np.int32)}
    assert find_narrowing(NARROW_FLAG).widen_outputs(returned, plan)["y"].dtype == np.int64
