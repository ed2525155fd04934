"""`hil.connect` and `hil.run` from Python: invalid arguments raise usage errors with the expected form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import DIGITS

import hil
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.core.results import Outcome
from hil.errors import UsageError

pytestmark = pytest.mark.daily

X = np.array([1, 2, 3, 4], np.float32)


@pytest.fixture(scope="module")
def board(simulator: str, shared_cache: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch, hil.connect(simulator) as connected:
        patch.setenv("HIL_CACHE_DIR", str(shared_cache))
        yield connected


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ({"itrations": 3}, "unknown hil.run option 'itrations'", "did you mean 'iterations'?"),
        ({"inputs": [X]}, "inputs must be arrays by name, or a sequence of strings", "{'x': array}"),
        ({"inputs": X}, "inputs must be arrays by name, .* got a ndarray", "{'x': array}"),
        ({"inputs": "x=x.npy"}, "inputs must be arrays by name, .* got 'x=x.npy'", "['x=x.npy']"),
        ({"inputs": None}, "inputs must be arrays by name, .* got None", ""),
        ({"inputs": {0: X}}, "inputs must be arrays by name, .* got a dict", ""),
        ({"inputs": {"x": [[1.0], [1.0, 2.0]]}}, "cannot convert input 'x' to an array", "numpy array"),
        ({"inputs": {"x": X.astype(np.float64)}}, "input 'x': expected 4.*float32", "does not convert inputs"),
        ({"expected": [X]}, "expected must be arrays by name, .* got a list of ndarray", "{'y': array}"),
        ({"expected": "y.npy"}, "expected must be arrays by name", "['y=y.npy']"),
        (
            {"references": "onnxruntime"},
            "references must be a sequence of strings, got 'onnxruntime'",
            "['onnxruntime']",
        ),
        ({"compile_flags": "--x"}, "compile_flags must be a sequence of strings, got '--x'", ""),
        ({"iterations": "3"}, "iterations must be a whole number from 1 to 1,000,000, got '3'", ""),
        ({"iterations": 2.5}, "iterations must be a whole number from 1 to 1,000,000, got 2.5", ""),
        ({"iterations": True}, "iterations must be a whole number from 1 to 1,000,000, got True", ""),
        ({"iterations": 0}, "iterations must be a whole number from 1 to", ""),
        ({"seed": "x"}, "seed must be a whole number", ""),
        ({"rtol": "x"}, "rtol must be a number or None, got 'x'", ""),
        ({"rtol": 2}, "zeros would agree with every reference", ""),
        ({"timeout": "1"}, "timeout must be a number of seconds", ""),
        ({"timeout": float("inf")}, "timeout must be a number of seconds", ""),
        ({"dims": [("N", 1)]}, "dims must be sizes by name", ""),
        ({"dims": {"N": "1"}}, "dims must be sizes by name", ""),
        ({"input_range": 1}, "input_range must be two numbers", ""),
        ({"input_range": (1, 0)}, "input_range must be two numbers in ascending order", ""),
        ({"runtime": None}, "runtime must be a string, got None", ""),
        ({"runtime": "nonesuch"}, "'nonesuch'", "one of executorch, iree"),
        ({"debug_ir": 1}, "debug_ir must be a path or None", ""),
        ({"recompute": "no"}, "recompute must be True or False, got 'no'", ""),
        ({"model": None}, "model must be the path of a model's file, got None", ""),
        ({"model": b"x.onnx"}, "model must be the path of a model's file", ""),
        ({"model": "nowhere.onnx"}, "no such file", ""),
        ({"board": Path("sim")}, "board must be the result of hil.connect, got PosixPath", "with hil.connect"),
        ({"board": "sim"}, "board must be the result of hil.connect, got 'sim'", "with hil.connect"),
        ({"context": "x"}, "context must be", ""),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_run_rejects_invalid_arguments_with_expected_form(board, doubling, arguments, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        hil.run(**{"model": doubling, "board": board, **arguments})
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"board": 3}, "board must be a board's name, address or config file, got 3"),
        ({"board": None}, "board must be a board's name"),
        ({"board": Path("nowhere.toml")}, "board config not found: nowhere.toml"),
        ({"board": "smi"}, "unknown board 'smi'"),
        ({"hw_type": 1}, "hw_type must be a string"),
        ({"faults": "crash"}, "faults must be a sequence of strings, got 'crash'"),
        ({"wait_s": "5"}, "wait_s must be a number of seconds"),
        ({"wait_s": float("nan")}, "wait_s must be a number of seconds"),
        ({"runtime": ["iree"]}, "runtime must be a string, got a list of str"),
    ],
)
def test_connect_rejects_invalid_arguments_with_expected_form(arguments, message):
    with pytest.raises(UsageError, match=message):
        hil.connect(**arguments)


def test_run_accepts_equivalent_python_types(board, doubling, tmp_path):
    case = hil.run(
        str(doubling),
        board,
        {"x": [np.float32(value) for value in range(4)]},
        iterations=np.int64(2),
        rtol=np.float32(0.1),
        references=["onnxruntime"],
        compile_flags=["--iree-opt-level=O1"],
        dims={},
        debug_ir=str(tmp_path / "ir"),
        input_range=[0, 1],
    )
    assert case and len(case.result.device_ns) == 2 and case.options.iterations == 2
    assert (tmp_path / "ir" / "imported.mlir").exists()


def test_connect_accepts_path_to_board_config(tmp_path):
    with hil.connect(DIGITS.parents[1] / "board_configs" / "sim.toml") as connected:
        assert connected.config.hw_type == "sim"


def test_run_recomputes_with_shared_context(board, doubling, tmp_path):
    with Isolated(1) as isolated:
        context = RunContext(Cache(tmp_path / "cache"), isolated)
        cached = [
            hil.run(doubling, board, {"x": X}, context=context, recompute=recompute).artifact.cached
            for recompute in (False, False, True, True)
        ]
    assert cached == [False, True, False, False]


def test_open_context_is_shared_by_runs(board, doubling):
    with hil.open_context(1) as context:
        cached = [hil.run(doubling, board, {"x": X}, context=context).artifact.cached for _ in range(2)]
    assert cached[1]
    with pytest.raises(UsageError, match=r"context must be the result of hil.open_context or None"):
        hil.run(doubling, board, {"x": X}, context=context.cache)


def test_run_rejects_closed_board(doubling):
    with hil.connect("sim") as board:
        pass
    with pytest.raises(UsageError, match="sim was released"):
        hil.run(doubling, board)


def test_missing_device_does_not_hide_an_unreadable_model(board: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.onnx"
    wrong.write_bytes(b"no model")
    assert hil.run(wrong, board, runtime="iree", device="hip").outcome is Outcome.IMPORT_ERROR
    assert hil.run(DIGITS / "digits_cnn.onnx", board, runtime="iree", device="hip").outcome is Outcome.BOARD_UNFIT
