"""Conversion of TensorFlow models to ONNX: outputs, names, dtypes and shapes stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hil.controller.models.conversions.tensorflow_onnx import tflite_to_onnx, to_onnx
from hil.errors import CompileFailed

tf = pytest.importorskip("tensorflow")
pytest.importorskip("tf2onnx")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # tf2onnx uses this interpreter for inner shapes.
    pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated:UserWarning"),
]

X = np.random.default_rng(0).standard_normal([2, 6, 4]).astype(np.float32)


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones([4, 3]))

    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([3]), tf.TensorSpec([5], tf.int32)])
    def predict(self, x, y, unused):
        return {"z": x @ self.weight + y, "given": (x, y), "again": x}

    @tf.function(input_signature=[tf.TensorSpec([4])])
    def train(self, x):
        self.weight.assign_add(tf.stack([x] * 3, 1))
        return x + 1

    @tf.function(input_signature=[tf.TensorSpec([4])])
    def same(self, x):
        return {"x": x + 1}

    @tf.function(input_signature=[tf.TensorSpec([4])])
    def bessel(self, x):
        return tf.math.special.bessel_i0(x)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save attention and lstm as .keras, attention as .tflite, and a tf.Module."""
    folder = tmp_path_factory.mktemp("models")
    keras, layers = tf.keras, tf.keras.layers
    keras.utils.set_random_seed(0)
    tokens = keras.Input([6, 4], name="tokens")
    attended = layers.LayerNormalization()(tokens + layers.MultiHeadAttention(2, 2)(tokens, tokens))
    model = keras.Model(tokens, layers.Dense(3, activation="gelu", name="out")(attended))
    model.save(folder / "attention.keras")
    (folder / "attention.tflite").write_bytes(tf.lite.TFLiteConverter.from_keras_model(model).convert())
    lstm = layers.Bidirectional(layers.LSTM(3))(tokens)
    keras.Model(tokens, layers.Dense(2, name="out")(lstm)).save(folder / "lstm.keras")
    tf.saved_model.save(Module(), str(folder / "module"))
    return folder


def answers(file: Path, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(str(file))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


@pytest.mark.parametrize("name", ["attention", "lstm"])
def test_keras_conversion_preserves_outputs(models, tmp_path, name):
    to_onnx(str(models / f"{name}.keras"), "call", str(tmp_path / "m.onnx"), {"batch": 2})
    expected = tf.keras.models.load_model(models / f"{name}.keras")(X).numpy()
    (answer,) = answers(tmp_path / "m.onnx", tokens=X).values()
    np.testing.assert_allclose(answer, expected, atol=1e-5)


def test_keras_conversion_unrolls_recurrent_layers(models, tmp_path):
    to_onnx(str(models / "lstm.keras"), "call", str(tmp_path / "m.onnx"), {"batch": 1})
    assert "Loop" not in {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}


@pytest.mark.parametrize("dims", [{}, {"tokens.dim0": 2}])
def test_tflite_conversion_preserves_outputs(models, tmp_path, dims):
    tflite_to_onnx(str(models / "attention.tflite"), "", str(tmp_path / "m.onnx"), dims)
    expected = tf.keras.models.load_model(models / "attention.keras")(X).numpy()
    (answer,) = answers(tmp_path / "m.onnx", tokens=X).values()
    np.testing.assert_allclose(answer, expected, atol=1e-5)


def test_conversion_preserves_function_inputs_and_outputs(models, tmp_path):
    to_onnx(str(models / "module" / "saved_model.pb"), "predict", str(tmp_path / "m.onnx"), {})
    graph = onnx.load(tmp_path / "m.onnx").graph
    dims = [[dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.input]
    assert [value.name for value in graph.input] == ["x", "y", "unused"]
    assert dims == [["x.dim0", 4], [3], [5]]
    y, unused = np.arange(3, dtype=np.float32), np.zeros(5, np.int32)
    answer = answers(tmp_path / "m.onnx", x=X[0], y=y, unused=unused)
    assert list(answer) == ["again", "given.0", "given.1", "z"]
    np.testing.assert_array_equal(answer["given.1"], y)
    np.testing.assert_allclose(answer["z"], X[0].sum(1, keepdims=True) + y, rtol=1e-5)


def test_conversion_gives_unique_node_names_without_call_ids(models, tmp_path):
    to_onnx(str(models / "module" / "saved_model.pb"), "predict", str(tmp_path / "m.onnx"), {})
    names = [node.name for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert len(names) == len(set(names))
    assert not [name for name in names if "__" in name or "PartitionedCall/" in name]


@pytest.mark.parametrize(
    ("function", "words"),
    [("train", "do not return updated variables"), ("same", "'x' is both"), ("bessel", "unsupported ops BesselI0")],
)
def test_conversion_rejects_unsupported_functions(models, tmp_path, function, words):
    with pytest.raises(CompileFailed, match=words) as raised:
        to_onnx(str(models / "module" / "saved_model.pb"), function, str(tmp_path / "m.onnx"), {})
    assert "different exporter" in raised.value.hint


@pytest.mark.parametrize("name", ["attention.keras", "attention.tflite"])
def test_layers_lists_operators_of_keras_and_tflite_models(hil, models, name):
    ended = hil("layers", models / name, "--json")
    assert ended.code == 0, ended.err
    assert "MatMul" in {layer["op"] for layer in json.loads(ended.out)["layers"]}


def test_bisect_accepts_keras_model(hil, models):
    ended = hil("bisect", models / "lstm.keras", "--dim", "batch=1", "--runtime", "onnxruntime")
    assert ended.code == 0, (ended.out, ended.err)
