"""TensorFlow functions compiled with tfcompile on simulated and emulated boards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tfcompile_cache import TIMEOUT_S, run_hil

pytest.importorskip("tensorflow")
pytest.importorskip("ziglang")
pytestmark = pytest.mark.timeout(TIMEOUT_S)

ARM = "--target-triple=aarch64-unknown-linux-gnu"
# A step that assigns a variable, reads another, and has an unused input.
MODELS = """
import sys
import tensorflow as tf

class Model(tf.Module):
    def __init__(self):
        super().__init__(name="model")
        with tf.name_scope("scope/inner"):
            self.kernel = tf.Variable(tf.ones((4, 3)), name="kernel")
            self.scale = tf.Variable(2.0, trainable=False, name="scale")
            self.count = tf.Variable(tf.constant(7, tf.int64), trainable=False, name="count")

    @tf.function(input_signature=[tf.TensorSpec((2, 4), tf.float32, "x"), tf.TensorSpec((2,), tf.int32, "unused")])
    def step(self, x, unused):
        y = self.scale * (x @ self.kernel)
        self.kernel.assign_sub(tf.fill((4, 3), tf.reduce_mean(y)))
        self.count.assign_add(1)
        return {"y": y, "norm": tf.reduce_sum(self.kernel * self.kernel), "count": self.count.read_value()}

    @tf.function(input_signature=[tf.TensorSpec((6,), tf.float32, "x")])
    def pick(self, x):
        return {"picked": tf.sort(x)[::2]}

    @tf.function(input_signature=[tf.TensorSpec((6,), tf.float32, "x")])
    def text(self, x):
        return {"size": tf.strings.length(tf.strings.as_string(x))}

    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, "x")])
    def open(self, x):
        return {"y": x + 1}

model = Model()
names = ("step", "pick", "text", "open")
tf.saved_model.save(model, sys.argv[1], signatures={name: getattr(model, name) for name in names})
"""


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """Save a SavedModel with several functions."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "make.py").write_text(MODELS)
    subprocess.run([sys.executable, "make.py", "model"], cwd=folder, check=True, capture_output=True)
    return folder / "model" / "saved_model.pb"


@pytest.fixture
def hil(environment, tmp_path):
    return lambda *args: run_hil(*args, cwd=tmp_path, env=environment)


@pytest.fixture
def compiled(hil, saved) -> Callable[..., Path]:
    """Return a function that compiles with `--debug-ir` and returns that directory."""

    def call(function: str, *options: str) -> Path:
        done = hil("compile", saved, "--function", function, "--runtime", "xla-aot", "--debug-ir", "ir", *options)
        assert done.code == 0, done.err
        return Path("ir")

    return call


def test_tfcompile_generates_config_from_graph(compiled, tmp_path):
    folder = tmp_path / compiled("step", "-o", "step.so")
    ports = json.loads((folder / "ports.json").read_text())
    assert {port["spec"]["name"] for port in ports["feeds"]} == {"x", "unused"}
    assert {port["spec"]["name"] for port in ports["fetches"]} == {"y", "norm", "count"}
    variables = {port["spec"]["name"]: (port["name"], port["read_only"]) for port in ports["variables"]}
    assert variables == {
        "scope/inner/kernel": ("param_scope_inner_kernel", False),
        "scope/inner/scale": ("param_scope_inner_scale", True),
        "scope/inner/count": ("param_scope_inner_count", False),
    }
    config = (folder / "config.pbtxt").read_text()
    scale = re.search(r'variable \{\s+node_name: "scope/inner/scale".*?\n\}', config, re.S)
    assert scale and "readonly: true" in scale[0] and config.count("readonly: true") == 1


def test_tfcompile_step_matches_tensorflow_over_iterations(hil, saved):
    done = hil("run", saved, "--function", "step", "--runtime", "xla-aot", "--iterations", 3, "--json")
    assert done.code == 0, done.err
    case = done.case
    assert case["outcome"] == "PASS" and case["verdicts"][0]["against"].startswith("tensorflow")
    names = {output["name"] for output in case["verdicts"][0]["outputs"]}
    assert names == {"y", "norm", "count", "variable scope/inner/kernel", "variable scope/inner/count"}


def test_tfcompile_feeds_outside_variables_with_model_values(hil, saved):
    outside = ("--function", "step", "--runtime", "xla-aot", "--compile-flag=--variables=outside")
    done = hil("run", saved, *outside, "--iterations", 3, "--json")
    assert done.code == 0, done.err
    names = {output["name"] for output in done.case["verdicts"][0]["outputs"]}
    assert names == {"y", "norm", "count", "variable scope/inner/kernel", "variable scope/inner/count"}
    assert hil("bundle", "create", saved, *outside, "-o", "step.hilb").code == 0
    done = hil("bundle", "run", "step.hilb")
    assert done.code == 0, done.out


def test_compile_writes_variables_file_per_program(hil, saved, tmp_path):
    step = ("--function", "step", "--runtime", "xla-aot")
    assert hil("compile", saved, *step, "-o", "step.so").code == 0
    assert hil("compile", "step.so", "-o", "again.so").code == 0
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert {"step.so", "step.variables.bin", "again.so", "again.variables.bin"} <= files
    assert "variables.bin" not in files
    # A program without variables removes the variables file of its predecessor.
    assert hil("compile", saved, *step, "--compile-flag=--variables=outside", "-o", "again.so").code == 0
    assert not (tmp_path / "again.variables.bin").exists()


def test_tfcompile_links_xla_sort(hil, saved):
    assert hil("run", saved, "--function", "pick", "--runtime", "xla-aot").code == 0


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("text", 3, r"compile: tfcompile: .*(String|DT_STRING|string)"),
        ("open", 2, "missing size for dimension 'x.dim0' of input 'x'"),
        ("nothing", 2, "no function 'nothing'"),
    ],
)
def test_tfcompile_reports_stage_of_failure(hil, saved, function, code, message):
    done = hil("compile", saved, "--function", function, "--runtime", "xla-aot", "-o", "x.so")
    assert done.code == code
    assert re.search(message, done.err), done.err


def test_load_rejects_program_for_other_cpu_architecture(hil, saved):
    options = ("--function", "step", "--runtime", "xla-aot", "--compile-flag", ARM, "--json")
    done = hil("run", saved, *options)
    assert done.code == 3
    assert done.case["outcome"] == "LOAD_ERROR"
    assert "compiled for aarch64, but this board is" in done.case["reason"]


def test_tfcompile_rejects_unknown_flags(hil, saved):
    done = hil("run", saved, "--function", "step", "--runtime", "xla-aot", "--compile-flag=--O9")
    assert done.code == 2 and "unsupported tfcompile flag --O9" in done.err


@pytest.mark.parametrize("options", [(), ("--compile-flag", ARM)])
def test_tfcompile_rejects_unknown_target_cpu(hil, saved, options):
    done = hil(
        *("compile", saved, "--function", "pick", "--runtime", "xla-aot", "-o", "x.so", *options),
        "--compile-flag=--target-cpu=cortex-z1",
    )
    assert done.code == 3
    assert "unknown CPU 'cortex-z1' for" in done.err


@pytest.mark.board
def test_arm_board_runs_tfcompile_program_without_tensorflow(hil, saved, board_aarch64, tmp_path):
    (tmp_path / "arm.toml").write_text(
        f"""
[board]
hw_type = "arm"

[devices]
xla-aot = "cpu"

[compile_flags]
tfcompile = ["{ARM}"]

[connection]
address = "root@{board_aarch64.ip}"
identity = "{board_aarch64.identity}"
known_hosts = "{board_aarch64.known_hosts}"
"""
    )
    done = hil("run", saved, "--function", "step", "--runtime", "xla-aot", "--board", "arm.toml", "--json")
    assert done.code == 0, done.err
    assert done.case["outcome"] == "PASS"
