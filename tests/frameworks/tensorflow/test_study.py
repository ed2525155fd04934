"""`hil study run`: the fourteen experiments, and studies with failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import referencing
from support.tfcompile_cache import TIMEOUT_S, run_hil
from support.waiting import eventually

pytest.importorskip("tensorflow")
pytest.importorskip("ziglang")
pytestmark = pytest.mark.timeout(TIMEOUT_S)

ROOT = Path(__file__).parents[3]
FOURTEEN = ROOT / "examples" / "tfcompile_study"
SCHEMAS = {name: json.loads((ROOT / "docs" / name).read_text()) for name in ("run.schema.json", "commands.schema.json")}

MODEL = """
import numpy as np
import tensorflow as tf

class Step(tf.Module):
    def __init__(self):
        super().__init__()
        self.total = tf.Variable(1.0, name="total")

    @tf.function(input_signature=[tf.TensorSpec((4,), tf.float32, "x")])
    def step(self, x):
        BODY
        return {"loss": loss}

    def batches(self, random):
        while True:
            yield [random.normal(size=4).astype(np.float32)]

def training(random):
    return Step()
"""
FINE = "loss = self.total.assign_add(tf.reduce_sum(x))"


@pytest.fixture
def hil(environment, tmp_path):
    return lambda *args: run_hil(*args, cwd=tmp_path, env=environment)


@pytest.fixture
def study(tmp_path) -> Path:
    """Create a study with failing experiments."""
    bodies = {
        "fine": FINE,
        "random": "loss = self.total + tf.random.stateless_uniform((), [tf.cast(1e6 * tf.timestamp(), tf.int32), 1])",
        "text": "loss = tf.cast(tf.strings.length(tf.strings.as_string(self.total + x[0])), tf.float32)",
        # The failure of the three RNNs of 2019: a loop without a length limit in a gradient.
        "endless": """with tf.GradientTape() as tape:
            steps = tf.cast(x[0], tf.int32)
            _, loss = tf.while_loop(lambda i, _: i < steps, lambda i, y: (i + 1, tf.tanh(y * self.total)), (0, x[1]))
        self.total.assign_sub(tape.gradient(loss, self.total, unconnected_gradients="zero"))""",
        "broken": "loss = nowhere",
    }
    folder = tmp_path / "study"
    for name, body in bodies.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "model.py").write_text(MODEL.replace("BODY", body))
    (folder / "study.toml").write_text("".join(f"[{name}]\n" for name in bodies))
    return folder


def check(document) -> None:
    """Validate a document against the schema."""
    resources = [(name, referencing.Resource.from_contents(schema)) for name, schema in SCHEMAS.items()]
    registry = referencing.Registry().with_resources(resources)
    jsonschema.Draft202012Validator({"$ref": "commands.schema.json#/$defs/study%20run"}, registry=registry).validate(
        document
    )


def test_study_matches_tensorflow_and_stores_results(hil, tmp_path):
    options = ("--experiment", "fc", "--experiment", "rnn_seq_length", "--steps", 3, "-o", "out")
    done = hil("study", "run", FOURTEEN, *options, "--json")
    assert done.code == 0, done.err
    check(done.document)
    rows = done.document["rows"]
    assert [(row["experiment"], row["toolchain"], row["outcome"], row["steps"]) for row in rows] == [
        ("fc", "tfcompile", "PASS", 3),
        ("fc", "iree", "PASS", 3),
        ("rnn_seq_length", "tfcompile", "PASS", 3),
        ("rnn_seq_length", "iree", "PASS", 3),
    ]
    for row in rows:
        assert all(stage["outcome"] == "pass" and stage["seconds"] >= 0 for stage in row["stages"])
        assert row["bytes"] > 1000 and 0 <= row["worst"]["max_abs"] < 1e-4
    assert json.loads((tmp_path / "out" / "study.json").read_text()) == done.document
    # The sources of a program are next to it, and it runs without the study.
    for row in rows:
        program = tmp_path / "out" / row["program"]
        made = {"tfcompile": ("graph.pb", "config.pbtxt", "program.h"), "iree": ("lowered/step.mlir",)}[
            row["toolchain"]
        ]
        for name in (*made, "hlo/before_optimizations.txt", "hlo/after_optimizations.dot"):
            assert (program.parent / name).stat().st_size > 0
        step = [program.with_name(f"{kind}-3.npz") for kind in ("inputs", "outputs")]
        assert hil("run", program, "--input", step[0], "--expected", step[1], "--atol", 0, "--rtol", 0).code == 0
    assert (tmp_path / "out" / "study.md").read_text().count("| PASS |") == 4
    again = hil("study", "run", FOURTEEN, *options)
    assert again.code == 2 and "already contains a study" in again.err
    # A finished study does not run again.
    began = time.monotonic()
    resumed = hil("study", "run", FOURTEEN, *options, "--resume", "--json")
    assert resumed.code == 0 and resumed.document["rows"] == rows
    assert time.monotonic() - began < 60
    # Rows outside the selection stay in the study.
    part = hil("study", "run", FOURTEEN, *options[2:], "--compiler", "iree", "--resume", "--json")
    assert part.code == 0 and part.document["rows"] == rows
    other = hil("study", "run", FOURTEEN, *options, "--resume", "--rtol", "0.01")
    assert other.code == 2 and "contains a study with different settings" in other.err
    elsewhere = hil("study", "run", FOURTEEN, *options, "--resume", "--board", "sim-small")
    assert elsewhere.code == 2 and "on a different board: sim" in elsewhere.err


def test_study_reports_failed_stage_per_experiment(hil, study):
    done = hil("study", "run", study, "--json")
    assert done.code == 3
    check(done.document)
    rows = {(row["experiment"], row["toolchain"]): row for row in done.document["rows"]}
    assert len(rows) == 10
    for way, lowering in (("tfcompile", "compile"), ("iree", "lower to StableHLO")):
        assert rows["fine", way]["outcome"] == "PASS"
        assert rows["text", way]["outcome"] == "COMPILE_ERROR"
        assert rows["text", way]["failed_stage"] == lowering
        assert "tring" in rows["text", way]["message"]
        assert rows["endless", way]["failed_stage"] == lowering
        assert "requires a fixed tensor list size" in rows["endless", way]["message"]
        after = [stage["outcome"] for stage in rows["text", way]["stages"]]
        assert after[after.index("fail") + 1 :] == ["not reached"] * (len(after) - after.index("fail") - 1)
        assert rows["broken", way]["failed_stage"] == "train in TensorFlow"
        assert "nowhere" in rows["broken", way]["message"]
        assert rows["random", way]["outcome"] in ("FAIL", "COMPILE_ERROR")
        assert rows["random", way]["failed_stage"] in ("match", lowering)


def test_study_reports_value_mismatch_as_match_failure(hil, study):
    # A tolerance of zero: the two compilers sum in different order.
    (study / "fine" / "model.py").write_text(
        MODEL.replace("BODY", "loss = self.total.assign_add(tf.reduce_sum(tf.exp(tf.sin(x * 1000.0))))")
    )
    done = hil("study", "run", study, "--experiment", "fine", "--rtol", "0", "--atol", "0", "--steps", 8, "--json")
    failed = [row for row in done.document["rows"] if row["outcome"] == "FAIL"]
    assert done.code == 1 and failed
    for row in failed:
        assert row["failed_stage"] == "match" and "step " in row["message"] and row["worst"]["max_abs"] > 0


def test_study_rejects_invalid_options_before_running(hil, tmp_path):
    for options, message in (
        ((FOURTEEN, "--compiler", "tfcompil"), "did you mean 'tfcompile'"),
        ((FOURTEEN, "--experiment", "fd"), "experiment 'fd' not found"),
        ((tmp_path,), "is not a study"),
        ((FOURTEEN, "--rtol", "2"), "rtol is 2"),
        ((FOURTEEN, "--steps", "0"), "at least 1"),
    ):
        done = hil("study", "run", *options)
        assert done.code == 2 and message in done.err, done.err
    assert not (tmp_path / "hil-study").exists()


def test_study_stores_results_on_interrupt(study, environment, tmp_path):
    command = [sys.executable, "-m", "hil.controller.cli.main", "study", "run", study, "--compiler", "iree", "--json"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    eventually((tmp_path / "hil-study" / "random").exists, process=process)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    document = json.loads(out)
    check(document)
    assert not document["finished"] and document["rows"][0]["outcome"] == "PASS"
    assert json.loads((tmp_path / "hil-study" / "study.json").read_text()) == document


@pytest.mark.board
def test_study_passes_on_arm_board(hil, board_aarch64, tmp_path):
    (tmp_path / "arm.toml").write_text(
        f"""
[board]
hw_type = "arm"

[devices]
iree = "local-sync"
xla-aot = "cpu"

[connection]
address = "root@{board_aarch64.ip}"
identity = "{board_aarch64.identity}"
known_hosts = "{board_aarch64.known_hosts}"
"""
    )
    done = hil("study", "run", FOURTEEN, "--experiment", "fc_batchnorm", "--board", "arm.toml", "--json")
    assert done.code == 0, done.err + json.dumps(done.document, indent=1)
    assert [(row["toolchain"], row["outcome"], row["relation"], row["steps"]) for row in done.document["rows"]] == [
        ("tfcompile", "PASS", "same library", 5),
        ("iree", "PASS", "independent", 5),
    ]


@pytest.mark.slow
def test_all_study_experiments_pass_with_both_compilers(environment, tmp_path):
    command = [sys.executable, "-m", "hil.controller.cli.main", "study", "run", FOURTEEN, "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    check(document)
    assert len(document["rows"]) == 36
    assert all((row["outcome"], row["steps"]) == ("PASS", 5) for row in document["rows"]), document["rows"]
    assert done.returncode == 0
