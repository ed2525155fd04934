"""SavedModels and .keras files from the command line: IREE and TFLite, on the simulator and an emulated Arm board."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tools.virtual_board import VirtualBoard

tf = pytest.importorskip("tensorflow")

# Keras warns with new versions of NumPy when it saves models.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones([4, 3]))
        self.count = tf.Variable(0)

    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([3])])
    def predict(self, x, y):
        return {"z": x @ self.weight + y, "given": (x, y)}

    @tf.function(input_signature=[tf.TensorSpec([4])])
    def train(self, x):
        self.count.assign_add(1)
        self.weight.assign_add(tf.stack([x] * 3, 1))
        return self.count.read_value()

    @tf.function(input_signature=[tf.TensorSpec([2], tf.string)])
    def echo(self, text):
        return text


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save cnn.keras and its export, two.keras with two inputs, lambda.keras, and a tf.Module."""
    folder = tmp_path_factory.mktemp("models")
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    cnn = tf.keras.Sequential(
        [tf.keras.Input([8, 8, 1], name="image"), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()]
    )
    cnn.add(layers.Flatten())
    cnn.add(layers.Dense(10, "softmax"))
    cnn.save(folder / "cnn.keras")
    cnn.export(str(folder / "cnn"), verbose=False)
    second, first = tf.keras.Input([4], name="second"), tf.keras.Input([4], name="first")
    outputs = {"sum": second + 2 * first, "both": layers.Concatenate()([second, first])}
    tf.keras.Model([second, first], outputs).save(folder / "two.keras")
    tf.keras.Sequential([tf.keras.Input([4]), layers.Lambda(lambda x: x * 2)]).save(folder / "lambda.keras")
    tf.saved_model.save(Module(), str(folder / "module"))
    return folder


@pytest.mark.parametrize("runtime", ["iree", "tflite"])
@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("cnn.keras", ["--dim", "batch=2"]),
        ("cnn", ["--dim", "image.dim0=1"]),
        ("two.keras", ["--dim", "batch=3"]),
        ("module", ["--function", "predict", "--dim", "x.dim0=2"]),
    ],
)
def test_models_pass_on_iree_and_tflite(hil, models, model, arguments, runtime):
    ended = hil("run", models / model, *arguments, "--runtime-hw-type", "sim", "--runtime", runtime, "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), (ended.out, ended.err)
    assert f"tensorflow {tf.__version__}" in ended.out


def test_tflite_preserves_open_dimensions(hil, models, tmp_path):
    np.save(tmp_path / "x.npy", np.ones([5, 4], np.float32))
    arguments = ["--function", "predict", "--input", "x=x.npy", "--runtime", "tflite"]
    ended = hil("run", models / "module", *arguments, "--runtime-hw-type", "sim", "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), (ended.out, ended.err)


def test_tflite_passes_strings(hil, models):
    arguments = ["--function", "echo", "--runtime", "tflite", "--runtime-hw-type", "sim"]
    ended = hil("run", models / "module", *arguments, "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), (ended.out, ended.err)


def test_run_compares_assigned_variables(hil, models, tmp_path):
    train = ["run", models / "module", "--function", "train", "--json"]
    ended = hil(*train, "--runtime-hw-type", "sim", "--iterations", "3")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    names = [output["name"] for output in ended.case["verdicts"][0]["outputs"]]
    assert names == ["output0", "variable Variable", "variable Variable_1"]
    faulty = '[board]\nhw_type = "sim"\n[simulator]\nfaults = ["corrupt:output={}"]\n'
    for place, name in enumerate(names):
        (tmp_path / "faulty.toml").write_text(faulty.format(place))
        ended = hil(*train, "--board", tmp_path / "faulty.toml")
        assert (ended.code, ended.case["outcome"]) == (1, "FAIL"), ended.out
        assert ended.case["reason"].startswith(f"output {name}: ")


def test_tflite_rejects_function_with_assigned_variables(hil, models):
    ended = hil("run", models / "module", "--function", "train", "--runtime", "tflite", "--json")
    assert (ended.code, ended.case["outcome"]) == (3, "COMPILE_ERROR"), ended.out
    assert "do not return updated variables: Variable" in ended.case["reason"]


def test_run_resets_tflite_state_and_notes_unchecked_state(hil, tmp_path):
    class Sum(tf.Module):
        def __init__(self):
            super().__init__()
            self.total = tf.Variable([1.0, 2.0])

        @tf.function(input_signature=[tf.TensorSpec([2])])
        def add(self, x):
            self.total.assign_add(x)
            return self.total + 0.0

    module = Sum()
    concrete = module.add.get_concrete_function()
    (tmp_path / "sum.tflite").write_bytes(tf.lite.TFLiteConverter.from_concrete_functions([concrete], module).convert())
    ended = hil("run", tmp_path / "sum.tflite", "--iterations", "3", "--warmup", "2", "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    assert "keeps state between runs (ASSIGN_VARIABLE)" in ended.case["reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["module"], "several functions"),
        (["module", "--function", "nothing"], "no function 'nothing'"),
        (["cnn.keras", "--function", "predict"], "no function 'predict'"),
        (["cnn.keras"], "--dim batch=1"),
        (["cnn.keras", "--dim", "n=1"], "no dimension 'n'"),
        (["."], "is a directory"),
    ],
)
def test_run_rejects_invalid_model_arguments(hil, models, arguments, words):
    ended = hil("run", *arguments, "--runtime-hw-type", "sim", "--json", cwd=models)
    assert ended.code == 2, (ended.out, ended.err)
    assert words in ended.err


def test_import_refuses_code_in_keras_file(hil, models):
    ended = hil("run", models / "lambda.keras", "--dim", "batch=1", "--runtime-hw-type", "sim", "--json")
    assert (ended.code, ended.case["outcome"]) == (3, "IMPORT_ERROR"), ended.out
    assert "hil does not run the code of custom layers or lambdas" in ended.out


def test_import_reports_damaged_files(hil, models, tmp_path):
    data = (models / "cnn.keras").read_bytes()
    (tmp_path / "cut.keras").write_bytes(data[: len(data) // 2])
    (tmp_path / "noise.keras").write_bytes(np.random.default_rng(0).bytes(4000))
    with zipfile.ZipFile(tmp_path / "empty.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    shutil.copytree(models / "module", tmp_path / "cut")
    graph = tmp_path / "cut" / "saved_model.pb"
    graph.write_bytes(graph.read_bytes()[:200])
    shutil.copytree(models / "module", tmp_path / "weightless")
    shutil.rmtree(tmp_path / "weightless" / "variables")
    for name in ("cut.keras", "noise.keras", "empty.keras", "cut", "weightless"):
        ended = hil("run", name, "--function", "" if "." in name else "predict", "--runtime-hw-type", "sim", "--json")
        assert (ended.code, ended.case["outcome"]) == (3, "IMPORT_ERROR"), (name, ended.out)


@pytest.mark.board
def test_keras_model_passes_on_aarch64_board(hil, models, board_aarch64: VirtualBoard):
    at = [f"root@{board_aarch64.ip}", "--identity", board_aarch64.identity, "--known-hosts", board_aarch64.known_hosts]
    for runtime in ("iree", "tflite"):
        arguments = ["--dim", "batch=1", "--runtime", runtime, "--board", *at]
        ended = hil("run", models / "cnn.keras", *arguments, "--json")
        assert (ended.code, ended.case["outcome"]) == (0, "PASS"), (ended.out, ended.err)


class Training(tf.Module):
    """A training step saved together with its TensorFlow 1 optimizer."""

    def __init__(self):
        super().__init__()
        self.weights = tf.Variable(tf.ones([4, 1]), name="weights")
        self.optimizer = tf.compat.v1.train.AdamOptimizer(0.1)

    @tf.function(input_signature=[tf.TensorSpec([2, 4], tf.float32, "x")])
    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.weights) ** 2)
        self.optimizer.apply_gradients([(tape.gradient(loss, self.weights), self.weights)])
        return {"loss": loss}


def test_import_rejects_saved_tensorflow_1_optimizer(hil, tmp_path):
    tf.saved_model.save(Training(), str(tmp_path / "training"))
    ended = hil("run", tmp_path / "training", "--function", "step", "--runtime-hw-type", "sim", "--json")
    assert (ended.code, ended.case["outcome"]) == (3, "IMPORT_ERROR")
    assert "contains a TensorFlow 1 optimizer" in ended.case["reason"]
    assert "self.state = optimizer.variables()" in ended.out
