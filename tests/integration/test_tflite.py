"""TFLite models on the command line: on the simulator, on an emulated Arm board, and unsupported models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.models import DIGITS

from tools.virtual_board import VirtualBoard

pytest.importorskip("ai_edge_litert")

MODELS = DIGITS.parent / "tflite"
FLOAT, INT8, SCALER = MODELS / "digits.tflite", MODELS / "digits_int8.tflite", MODELS / "scaler.tflite"


def outputs_of(folder: Path) -> dict[str, np.ndarray]:
    """Return the board's outputs of the newest run in a directory, by name."""
    newest = max((folder / "hil-runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)
    return {file.stem.partition("-")[2]: np.load(file) for file in sorted(newest.glob("*/outputs/*.npy"))}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """One test image for the float model and the int8 model: (x / scale) - 128, scale 1 / 255."""
    digits = np.load(DIGITS / "digits_test.npz")
    image = digits["image"][:1].transpose(0, 2, 3, 1)
    np.save(tmp_path / "float.npy", image)
    np.save(tmp_path / "int8.npy", (np.round(image * 255) - 128).astype(np.int8))
    np.save(tmp_path / "label.npy", digits["label"][:1])
    return tmp_path


@pytest.mark.daily
@pytest.mark.parametrize(("model", "file"), [(FLOAT, "float.npy"), (INT8, "int8.npy")])
def test_run_recognizes_digit_in_float_and_int8(hil, simulator, pictures, model, file):
    # Kernels may round a quantized value differently.
    ended = hil(
        "run", model, "--board", simulator, "--input", file, *(["--atol", "1"] if model == INT8 else []), "--json"
    )
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    assert "reference kernels" in ended.out
    (scores,) = outputs_of(pictures).values()
    assert scores.dtype == np.load(pictures / file).dtype
    assert scores.argmax() == np.load(pictures / "label.npy")[0]


def test_run_accepts_models_of_different_runtimes(hil, simulator):
    # Only the board knows the target of the second runtime.
    ended = hil("run", FLOAT, DIGITS / "digits_cnn.onnx", "--board", simulator, "--json")
    cases = {case["name"]: (case["artifact"]["runtime"], case["outcome"]) for case in ended.document["cases"]}
    assert cases == {"digits": ("tflite", "PASS"), "digits_cnn": ("iree", "PASS")}, ended.err
    assert ended.code == 0
    flags = ended.document["cases"][1]["artifact"]["flags"]
    assert any("target-cpu" in flag for flag in flags), flags


def test_run_rejects_device_of_other_runtime_before_the_first_model(hil, tmp_path):
    ended = hil("run", DIGITS / "digits_cnn.onnx", FLOAT, "--device", "local-sync")
    assert ended.code == 2
    assert "--device local-sync does not apply to the runtime tflite of digits.tflite" in ended.err
    assert not (tmp_path / "hil-runs").exists()


@pytest.mark.parametrize("which", ["inputs", "outputs"])
def test_run_rejects_duplicate_tensor_names_without_signature(hil, simulator, tmp_path, which):
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(FLOAT.read_bytes(), 0)
    model.signatureDefs = []
    graph = model.subgraphs[0]
    if which == "inputs":
        graph.inputs = [*graph.inputs, *graph.inputs]
    else:
        graph.outputs = [*graph.outputs, graph.operators[-1].inputs[0]]
        graph.tensors[graph.outputs[1]].name = graph.tensors[graph.outputs[0]].name
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    (tmp_path / "twins.tflite").write_bytes(builder.Output())
    ended = hil("run", "twins.tflite", "--board", simulator, "--json")
    assert (ended.code, ended.case["outcome"]) == (3, "IMPORT_ERROR"), ended.out
    assert f"2 {which} have the same name" in ended.case["reason"]


def test_signature_function_takes_dimension_from_input(hil, simulator, tmp_path):
    x = np.arange(5, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    ended = hil(
        "run", SCALER, "--board", simulator, "--function", "scale", "--input", "x=x.npy", "--input", "by=3", "--json"
    )
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    outputs = outputs_of(tmp_path)
    np.testing.assert_allclose(outputs["scaled"], x * 3)
    np.testing.assert_allclose(outputs["total"], x.sum() * 3)


@pytest.mark.parametrize("device", ["xnnpack", "builtin", "reference"])
def test_board_config_selects_kernels(hil, simulator, tmp_path, device):
    (tmp_path / "bench.toml").write_text(
        f'[board]\nhw_type = "bench"\nruntime = "tflite"\n[devices]\ntflite = "{device}"\n'
        f'[connection]\naddress = "{simulator}"\n'
    )
    ended = hil("run", FLOAT, "--board", "./bench.toml", "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out


def test_corrupted_output_fails(hil):
    ended = hil("run", FLOAT, "--runtime-hw-type", "sim", "--fault", "corrupt", "--json")
    assert (ended.code, ended.case["outcome"]) == (1, "FAIL"), ended.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([SCALER], "multiple functions"),
        ([SCALER, "--function", "triple"], "function 'triple' not found in"),
        ([SCALER, "--function", "double", "--dim", "n=3"], "x.dim0"),
        ([SCALER, "--function", "double"], "--dim x.dim0"),
        ([INT8, "--input", "float.npy"], "1x8x8x1 int8"),
        # IREE needs the model as ONNX, which TensorFlow converts.
        ([FLOAT, "--runtime", "iree"], "[tensorflow]'"),
        ([FLOAT, "--reference", "onnxruntime"], "tflite"),
    ],
)
def test_run_rejects_invalid_arguments_before_running(hil, simulator, pictures, arguments, words):
    ended = hil("run", *arguments, "--board", simulator, "--json")
    assert ended.code == 2, (ended.out, ended.err)
    assert words in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99])
def test_truncated_model_gives_import_error(hil, simulator, tmp_path, share):
    data = FLOAT.read_bytes()
    (tmp_path / "cut.tflite").write_bytes(data[: int(len(data) * share)])
    ended = hil("run", "cut.tflite", "--board", simulator, "--json")
    assert (ended.code, ended.case["outcome"]) == (3, "IMPORT_ERROR"), ended.out
    assert "cut.tflite" in ended.case["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_damaged_model_ends_with_outcome(hil, simulator, tmp_path, seed):
    data = np.frombuffer(FLOAT.read_bytes(), np.uint8).copy()
    rng = np.random.default_rng(seed)
    data[rng.integers(8, data.size, 40)] = rng.integers(0, 256, 40)
    (tmp_path / "damaged.tflite").write_bytes(data.tobytes())
    ended = hil("run", "damaged.tflite", "--board", simulator, "--timeout", "30", "--json")
    assert ended.code in (0, 1, 2, 3), ended.out


def test_random_bytes_give_import_error(hil, simulator, tmp_path):
    (tmp_path / "noise.tflite").write_bytes(np.random.default_rng(0).bytes(5000))
    ended = hil("run", "noise.tflite", "--board", simulator, "--json")
    assert (ended.code, ended.case["outcome"]) == (3, "IMPORT_ERROR"), ended.out
    assert "is not a TFLite model" in ended.case["reason"]


@pytest.mark.slow
@pytest.mark.board
def test_models_run_on_aarch64_board(hil, board_aarch64: VirtualBoard, pictures):
    at = [f"root@{board_aarch64.ip}", "--identity", board_aarch64.identity, "--known-hosts", board_aarch64.known_hosts]
    assert "aarch64" in hil("board", "info", "--board", *at, "--json").out
    for model, file in ((FLOAT, "float.npy"), (INT8, "int8.npy")):
        ended = hil(
            "run", model, "--board", *at, "--input", file, "--atol", "1e-3" if model == FLOAT else "1", "--json"
        )
        assert (ended.code, ended.case["outcome"]) == (0, "PASS"), (ended.out, ended.err)
        (scores,) = outputs_of(pictures).values()
        assert scores.argmax() == np.load(pictures / "label.npy")[0]
