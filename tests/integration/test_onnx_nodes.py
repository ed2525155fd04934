"""ONNX's own node tests through the pipeline on the simulator: a sample here, all of them with `scripts/test --all`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# One of each kind: plain, every class of dtype, zero-size, scalar, control flow, no inputs, many outputs, no tensors.
SAMPLE = [
    "add",
    "add_uint8",
    "and2d",
    "equal_string",
    "cast_FLOAT_to_FLOAT16",
    "cast_FLOAT_to_BFLOAT16",
    "cast_FLOAT_to_FLOAT8E4M3FN",
    "cast_FLOAT_to_INT4",
    "cast_UINT4_to_FLOAT",
    "constant",
    "if",
    "loop11",
    "lstm_defaults",
    "split_equal_parts_1d_opset18",
    "split_zero_size_splits_opset18",
    "reduce_sum_empty_axes_input_noop_example",
    "string_concat",
    "top_k",
    "sequence_insert_at_back",
    "optional_has_element_tensor_input",
    "reshape_allowzero_reordered",
    "nonmaxsuppression_two_classes",
    "matmul_bcast",
    "quantizelinear",
    "conv_with_strides_padding",
]


def run(environment: dict[str, str], *args: str) -> tuple[int, dict]:
    command = [sys.executable, "-m", "hil.testing.onnx_nodes", "--json", *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", ["onnxruntime", "iree"])
def test_a_sample_of_the_node_tests_ends_in_explained_outcomes(environment, runtime):
    filters = [part for name in SAMPLE for part in ("--filter", name)]
    code, document = run(environment, "--runtime", runtime, *filters)
    outcomes = {result["name"]: result["outcome"] for result in document["results"]}
    assert set(outcomes) == set(SAMPLE)
    assert [result for result in document["results"] if not result["explained"]] == []
    assert code == 0
    assert outcomes["sequence_insert_at_back"] == "IMPORT_ERROR"
    passes = {"add", "add_uint8", "and2d", "matmul_bcast", "constant"}
    assert {name for name in passes if outcomes[name] == "PASS"} == passes
    assert sum(outcome == "PASS" for outcome in outcomes.values()) >= len(SAMPLE) // 2


def test_a_filter_that_matches_nothing_is_exit_5(environment):
    command = [sys.executable, "-m", "hil.testing.onnx_nodes", "--filter", "nonesuch"]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode == 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("runtime", ["onnxruntime", "iree"])
def test_all_node_tests_end_in_explained_outcomes(environment, runtime):
    code, document = run(environment, "--runtime", runtime, "-j", str(os.cpu_count() or 1))
    assert len(document["results"]) > 1000
    assert [result for result in document["results"] if not result["explained"]] == []
    assert code == 0
