"""Inputs of live programs: hil matches arguments to input names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hil.controller.models.torch_module import export_program
from hil.errors import UsageError

A, B, W = (np.full(2, value, np.float32) for value in (1, 2, 3))


class Weighted(torch.nn.Module):
    """Take a mapping, a tensor and a number."""

    def forward(self, batch: Any, w: Any, scale: float = 2.0) -> Any:
        return (batch["a"] - batch["b"] * w) * scale


@pytest.fixture(scope="module")
def program() -> Any:
    found, named = export_program(Weighted(), ({"b": B, "a": A}, W, 4.0))
    assert {name: array[0] for name, array in named.items()} == {"batch_a": 1, "batch_b": 2, "w": 3}
    return found


@pytest.mark.parametrize(
    "inputs",
    [
        ({"a": A, "b": B}, W),
        [{"b": torch.from_numpy(B), "a": A}, W, 4.0],
        {"w": W, "batch": {"a": A, "b": B}},
        {"scale": 4.0, "w": W, "batch": {"b": B, "a": A}},
        {"w": W, "batch_b": B, "batch_a": A},
    ],
    ids=["positional", "tensors", "keywords", "keywords-and-a-constant", "names"],
)
def test_exported_matches_arguments_in_any_order(program, inputs):
    _, named = export_program(program, inputs)
    assert {name: array[0] for name, array in named.items()} == {"batch_a": 1, "batch_b": 2, "w": 3}


def test_exported_accepts_module_keywords_in_any_order():
    program, named = export_program(Weighted(), {"w": W, "batch": {"b": B, "a": A}})
    assert {name: array[0] for name, array in named.items()} == {"batch_a": 1, "batch_b": 2, "w": 3}
    [value] = program.module()(w=torch.from_numpy(W), batch={"b": torch.from_numpy(B), "a": torch.from_numpy(A)})[:1]
    assert value.item() == (1 - 2 * 3) * 2


def test_exported_draws_missing_inputs_for_named_arguments(program):
    assert export_program(program, ())[1] == {} == export_program(program, {})[1]
    assert list(export_program(program, {"w": W})[1]) == ["w"]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (({"a": A, "b": B},), "missing input of the program: w"),
        (({"a": A, "b": B}, W, 4.0, W), "unknown input of the program: argument 4"),
        ({"v": W}, "unknown input of the program: v"),
        (({"a": A, "b": B}, W, 3.0), "was exported with scale = 4.0, not 3.0"),
        (({"a": A, "b": B}, 3), "expected a tensor for w, got 3"),
        ({"w": 3}, "expected a tensor for w, got 3"),
        (["w=3"], "unknown input of the program: batch"),
        ([1.0, 2.0], "unknown input of the program: batch"),
        (3, "a sequence or a mapping"),
        ("w=3", "a sequence or a mapping"),
        (W, "a sequence or a mapping"),
        (None, "a sequence or a mapping"),
    ],
)
def test_exported_rejects_unmatched_arguments(program, inputs, said):
    with pytest.raises(UsageError) as caught:
        export_program(program, inputs)
    assert said in str(caught.value)
