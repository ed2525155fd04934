"""A wrong reference never confirms a board, for any kind of error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.reference_mutants import MUTANTS, Mutant

import hil as library
from hil.controller.backends.references import Reference, table
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.core.results import Model
from hil.core.tensors import Array


@pytest.fixture(scope="module")
def board(shared_cache: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIL_CACHE_DIR", str(shared_cache))
        with library.connect("sim") as opened:
            yield opened


def some_mutants(first: int) -> list[Any]:
    """Return all mutants. Only every fourth is tested on every change."""
    return [
        pytest.param(one, id=one.name, marks=[pytest.mark.slow] * (number % 4 != first))
        for number, one in enumerate(MUTANTS)
    ]


def compute_with(model: onnx.ModelProto) -> Callable[..., None]:
    """Return a reference's `compute` that runs `model` instead of the given one."""

    def compute(given: Model, inputs: Path, outputs: Path, **work: Any) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        session = ort.InferenceSession(model.SerializeToString(), options)
        values = session.run(None, dict(load_tensors(inputs)))
        save_tensors(outputs, dict(zip([one.name for one in session.get_outputs()], values, strict=True)))

    return compute


def inputs_of(model: onnx.ModelProto) -> dict[str, Array]:
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    return {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}


def save(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("mutant", some_mutants(0))
def test_wrong_reference_never_gives_pass(
    mutant: Mutant, board: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = mutant.build(), mutant.build()
    mutant.mutate(wrong)
    entry = Reference(("onnx",), lambda: f"mutant {mutant.name}", compute_with(wrong))
    monkeypatch.setitem(table._BUILT_IN, "onnxruntime", entry)
    path = save(right, tmp_path)
    case = library.run(path, board, inputs_of(right), runtime="onnxruntime", references=["onnxruntime"])
    assert case.outcome is not None
    assert case.outcome.value in ("FAIL", "BLIND"), case.reason


@pytest.mark.slow
@pytest.mark.parametrize("mutant", some_mutants(2))
def test_right_reference_finds_wrong_program(mutant: Mutant, board: Any, tmp_path: Path) -> None:
    right, wrong = mutant.build(), mutant.build()
    mutant.mutate(wrong)
    expected = _answer(right, inputs_of(right))
    case = library.run(save(wrong, tmp_path), board, inputs_of(right), runtime="onnxruntime", expected={"y": expected})
    assert case.outcome is not None
    assert case.outcome.value in ("FAIL", "BLIND"), case.reason


@pytest.mark.parametrize("build", sorted({one.build for one in MUTANTS}, key=lambda build: build.__name__))
def test_right_reference_passes_right_program(build: Callable[[], onnx.ModelProto], board: Any, tmp_path: Path) -> None:
    model = build()
    case = library.run(save(model, tmp_path), board, inputs_of(model), runtime="onnxruntime")
    assert case, case.reason


def _answer(model: onnx.ModelProto, inputs: dict[str, Array]) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (answer,) = ort.InferenceSession(model.SerializeToString(), options).run(None, inputs)
    return np.asarray(answer)
