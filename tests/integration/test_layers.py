"""`hil layers`: its list, and runs of saved layers."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.layer_models import dynamic_batch, noisy, repeated
from support.models import DIGITS


@pytest.mark.daily
def test_layers_lists_layers_of_digits_model(hil):
    ended = hil("layers", DIGITS / "digits_cnn.onnx")
    assert ended.code == 0, ended.err
    lines = [line.split() for line in ended.out.splitlines()]
    assert lines[0] == ["depth", "layer", "op", "inputs", "outputs", "x"]
    assert lines[2] == ["1", "Relu_relu1", "Relu", "1x16x8x8", "float32", "1x16x8x8", "float32", "1"]
    assert lines[-1] == ["8", "layers"]
    assert "Conv+Relu_conv1" in hil("layers", DIGITS / "digits_cnn.onnx", "--group", "fused").out


def test_layers_groups_equal_layers_in_text_only(hil, tmp_path):
    onnx.save(repeated(), tmp_path / "repeated.onnx")
    lines = hil("layers", "repeated.onnx").out.splitlines()
    (row,) = (line.split() for line in lines if "MatMul_MatMul_0" in line)
    assert row[-1] == "3" and not any("MatMul_MatMul_2" in line for line in lines)
    assert lines[-1] == "10 layers of 6 signatures"
    rows = hil("layers", "repeated.onnx", "--json").document["layers"]
    assert [row["same_as"] for row in rows if row["name"] == "MatMul_MatMul_4"] == ["MatMul_MatMul_0"]
    assert rows[0]["inputs"] == [{"name": "x", "dtype": "float32", "shape": [2, 4]}]


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        ("digits_cnn", "MaxPool_pool1"),
        ("digits_cnn_int8", "DequantizeLinear+Conv+QuantizeLinear_conv2"),
    ],
)
def test_saved_layer_passes_with_printed_command(hil, simulator, tmp_path, model, layer):
    np.save(tmp_path / "image.npy", np.load(DIGITS / "digits_test.npz")["image"][:1])
    options = ("--input", "image=image.npy", "--save", "saved")
    ended = hil("layers", DIGITS / f"{model}.onnx", *options, "--json")
    assert ended.code == 0, ended.err
    rows = {row["name"]: row["saved"] for row in ended.document["layers"]}
    assert all(Path(tmp_path, saved["model"]).exists() for saved in rows.values())
    program, *words = shlex.split(rows[layer]["run"])
    assert program == "hil" and words[-2:] == ["--expected", rows[layer]["outputs"][0]]
    place = words.index("--runtime-hw-type")
    words[place : place + 2] = ["--board", simulator]
    # The quantized layer returns int8, compared exactly: ONNX Runtime must match itself.
    assert hil(*words, "--runtime", "onnxruntime", "--json").case["outcome"] == "PASS"
    printed = hil("layers", DIGITS / f"{model}.onnx", *options).out
    assert next(iter(rows.values()))["run"] in printed


def test_layers_saves_and_runs_part_of_model(hil, simulator, tmp_path):
    ended = hil("layers", DIGITS / "digits_cnn.onnx", "--from", "conv2", "--to", "flatten.out", "--save", "part")
    assert ended.code == 0, ended.err
    command = shlex.split(ended.out.splitlines()[-1])
    assert command[:3] == ["hil", "run", "part/cut_conv2_to_flatten.out.onnx"]
    inputs, expected = (command[command.index(option) + 1] for option in ("--input", "--expected"))
    case = hil("run", command[2], "--board", simulator, "--input", inputs, "--expected", expected, "--json").case
    assert case["outcome"] == "PASS" and case["verdicts"][0]["against"].startswith("expected")
    assert np.load(tmp_path / inputs).shape == (1, 16, 4, 4)


def test_layers_notes_random_layers(hil, tmp_path):
    onnx.save(noisy(), tmp_path / "noisy.onnx")
    told = [line for line in hil("layers", "noisy.onnx").out.splitlines() if line.startswith("note: ")]
    assert told[0] == "note: RandomNormalLike_noise generates random numbers: runs give different values"
    rows = hil("layers", "noisy.onnx", "--json").document["layers"]
    assert sum(row["by_chance"] for row in rows) == len(told) == 3


@pytest.mark.slow
def test_layers_seed_determines_saved_values(hil, tmp_path):
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        hil("layers", DIGITS / "digits_cnn.onnx", "--save", folder, "--seed", seed)
    a, b, c = (np.load(tmp_path / folder / "Gemm_fc1" / "output_0.npy") for folder in "abc")
    assert np.array_equal(a, b) and not np.array_equal(a, c)


@pytest.mark.slow
def test_layers_handles_open_dimensions(hil, tmp_path):
    onnx.save(dynamic_batch(), tmp_path / "batch.onnx")
    assert "Nx3x4 float32" in hil("layers", "batch.onnx").out
    fixed = hil("layers", "batch.onnx", "--dim", "N=5")
    assert "5x3x4 float32" in fixed.out and "Gather" not in fixed.out
    asked = hil("layers", "batch.onnx", "--save", "saved")
    assert asked.code == 2 and "--dim N=1" in asked.err
    np.save(tmp_path / "x.npy", np.zeros((7, 3, 4), np.float32))
    assert "7x12 float32" in hil("layers", "batch.onnx", "--input", "x.npy").out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("nothing.onnx",), "no such file"),
        ((DIGITS / "digits_cnn.onnx", "--group", "each"), "expected one of"),
        ((DIGITS / "digits_cnn.onnx", "--from", "conv3"), "did you mean 'conv"),
        ((DIGITS / "digits_cnn.onnx", "--from", "conv2", "--to", "conv1"), "'conv1' does not depend on 'conv2'"),
        ((DIGITS / "digits_cnn.onnx", "--save", "/proc/no"), "cannot write to"),
        ((DIGITS / "digits_cnn.onnx", "--input", "picture=x.npy"), "unknown or duplicate tensor 'picture'"),
    ],
)
def test_layers_rejects_invalid_arguments(hil, arguments, word):
    ended = hil("layers", *arguments)
    assert ended.code == 2 and word in ended.err
