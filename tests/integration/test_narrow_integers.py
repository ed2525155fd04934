"""A program that was compiled for 32-bit integers, on each path that runs programs."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper
from support.decoder import DECODER
from support.vulkan import needs_vulkan

FLAG = "--compile-flag=--iree-input-demote-i64-to-i32"
IREE = ("--runtime", "iree", "--runtime-hw-type", "sim", FLAG)
NOTE = "int64 inputs x were passed as int32, which the program was compiled for"


@pytest.fixture
def square(tmp_path):
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "x"], ["y"])],
        "square",
        [helper.make_tensor_value_info("x", TensorProto.INT64, [4])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [4])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    return "m.onnx"


def give(*values: int) -> tuple[str, str]:
    return "--input", f"x=4xi64={','.join(map(str, values))}"


def test_run_converts_int64_and_notes_it(hil, square):
    ended = hil("run", square, *IREE, *give(3, -4, 5, 46340), "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    assert NOTE in ended.case["provenance"]["notes"]
    assert [one["dtype"] for one in (*ended.case["inputs"], *ended.case["outputs"])] == ["int64", "int64"]


def test_result_that_exceeds_int32_fails(hil, square):
    ended = hil("run", square, *IREE, *give(100_000, 3, 4, 5), "--json")
    assert (ended.code, ended.case["outcome"]) == (1, "FAIL"), ended.out


def test_input_that_exceeds_int32_is_refused(hil, square):
    ended = hil("run", square, *IREE, *give(2**32 + 3, 3, 4, 5))
    assert ended.code == 2
    assert "input 'x': the value 4294967299 does not fit into int32" in ended.err


def test_bundle_contains_int32_values(hil, square):
    assert hil("bundle", "create", square, *IREE, *give(3, -4, 5, 6), "-o", "m.hilb").code == 0
    ended = hil("bundle", "run", "m.hilb", "--runtime-hw-type", "sim", "--json")
    assert ended.code == 0, ended.out
    ended = hil("bundle", "create", square, *IREE, *give(100_000, 3, 4, 5), "-o", "other.hilb")
    assert ended.code == 2 and "output 'y': the value 10000000000 does not fit" in ended.err


@pytest.mark.slow
def test_bench_and_profile_convert_int64(hil, square):
    ended = hil("bench", square, *IREE, "--min-time", "0.2", "--json")
    assert ended.code == 0, ended.out
    ended = hil("run", square, *IREE, "--profile", "profile", "--json")
    assert ended.case["outcome"] == "PASS", ended.out


@pytest.mark.slow
@needs_vulkan
@pytest.mark.timeout(900)
def test_decoder_generates_on_vulkan(hil, tmp_path):
    (tmp_path / "spec.toml").write_text("steps = 2\n[[prompt]]\ntokens = [84, 104, 101, 32]\nforced = [98, 111]\n")
    given = (DECODER / "decoder.onnx", "--generate", "spec.toml", "--device", "vulkan", "--timeout", 600)
    ended = hil("run", *given, *IREE, "--json")
    assert ended.case["outcome"] == "PASS", ended.out
    notes = " ".join(ended.case["provenance"]["notes"])
    assert "int64 inputs input_ids, attention_mask, position_ids were passed as int32" in notes
    assert "the cache starts with an entry that the mask hides" in notes
    caches = [one["shape"] for one in ended.case["outputs"] if one["name"].startswith("present")]
    assert caches and {shape[2] for shape in caches} == {6}  # without the hidden entry
