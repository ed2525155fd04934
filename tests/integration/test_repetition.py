"""A fault in a few iterations, after a reload, in a bench or in a profile pass never passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.commands import Ended
from support.slow import slow_except

ORT = ("--runtime-hw-type", "sim", "--runtime", "onnxruntime")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one Add with a 32-byte output."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", values[:1], values[1:])
    path = tmp_path_factory.mktemp("model") / "double.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize(
    ("options", "counts"),
    slow_except(
        [
            (("--iterations", "300", "--fault", "corrupt:share=0.01"), (300, 2)),
            (("--iterations", "20", "--fault", "corrupt:iteration=13"), (20, 2)),
            (("--warmup", "3", "--iterations", "2", "--fault", "corrupt:iteration=1"), (5, 2)),
            (("--iterations", "5", "--fault", "corrupt:times=1"), (5, 2)),
            (("--repeat", "3", "--fresh-load", "--fault", "corrupt:when=reload"), (3, 2)),
            (("--repeat", "40", "--fault", "corrupt:iteration=30"), (40, 2)),
            (("--profile", "prof", "--fault", "corrupt:when=profile"), (24, 2)),
        ],
        0,
        4,
    ),
)
def test_intermittent_fault_makes_run_unstable(
    hil: Callable[..., Ended], model: Path, options: tuple[str, ...], counts: tuple[int, int]
):
    ended = hil("run", model, *ORT, *options, "--json")
    (case,) = ended.document["cases"]
    found = case["repetition"]
    assert (ended.code, case["outcome"]) == (1, "UNSTABLE"), case["reason"]
    assert (found["iterations"], found["distinct"]) == counts
    assert found["differing"] == ["y"] and sum(one["iterations"] for one in found["answers"]) == counts[0]
    assert {one["verdict"]["outcome"] for one in found["answers"]} == {"PASS", "FAIL"}
    assert found["answers"][found["worst"]]["verdict"]["outcome"] == "FAIL"
    assert case["reason"].startswith(found["text"])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["corrupt:when=reload", "corrupt:iteration=150", "corrupt:share=0.01"])
def test_intermittent_fault_makes_bench_unstable(hil: Callable[..., Ended], model: Path, fault: str):
    ended = hil("bench", model, *ORT, "--iterations", "300", "--fault", fault, "--json")
    (side,) = ended.document["sides"]
    assert (ended.code, side["outcome"]) == (1, "UNSTABLE")
    assert side["repetition"]["distinct"] == 2 and side["repetition"]["iterations"] > 300


def test_report_counts_equal_answers(hil: Callable[..., Ended], model: Path):
    ended = hil("run", model, *ORT, "--iterations", "200", "--warmup", "2")
    assert ended.code == 0 and "202 of 202 iterations gave the same answer" in ended.out
    bench = hil("bench", model, *ORT, "--iterations", "100", "--json")
    assert bench.code == 0 and bench.document["sides"][0]["repetition"]["distinct"] == 1


@pytest.mark.slow
def test_run_rejects_profile_fault_without_profiled_outputs(hil: Callable[..., Ended], model: Path):
    ended = hil("run", model, "--runtime-hw-type", "sim", "--profile", "p", "--fault", "corrupt:when=profile")
    assert ended.code == 2 and "when=profile needs a runtime with a profiler that returns outputs" in ended.err


@pytest.mark.slow
def test_recompile_compares_programs_and_answers(hil: Callable[..., Ended], model: Path):
    ended = hil("run", model, "--runtime-hw-type", "sim", "--recompile", "2", "--iterations", "2", "--json")
    (case,) = ended.document["cases"]
    programs = case["compilations"]["programs"]
    assert (ended.code, case["compilations"]["count"]) == (0, 2)
    assert case["repetition"]["iterations"] == 2 * programs and case["repetition"]["distinct"] == 1


@pytest.mark.parametrize(
    "options", [("--repeat", "0"), ("--recompile", "0"), ("--fresh-load",)], ids=lambda options: options[0]
)
def test_run_rejects_meaningless_counts(hil: Callable[..., Ended], model: Path, options: tuple[str, ...]):
    assert hil("run", model, *ORT, *options).code == 2


def test_allow_unstable_accepts_named_output(hil: Callable[..., Ended], model: Path):
    fault = ("--iterations", "4", "--fault", "corrupt:iteration=2")
    wide = ("--atol", "1e30", "--allow-blind", "y", "--allow-unstable", "y")
    ended = hil("run", model, *ORT, *fault, *wide, "--json")
    (case,) = ended.document["cases"]
    assert (ended.code, case["outcome"]) == (0, "PASS")
    assert case["repetition"]["distinct"] == 2
    assert np.isclose(case["repetition"]["answers"][0]["share"], 0.75)
