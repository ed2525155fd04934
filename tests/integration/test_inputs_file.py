"""Inputs in MODEL.inputs.npz and in Python functions, with the verbs that run a model."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from support.models import DIGITS
from support.slow import slow_except

ONES = np.ones((2, 1, 8, 8), np.float32)


@pytest.fixture
def model(tmp_path):
    """A model with a symbolic dimension, and a file with inputs for it."""
    np.savez(tmp_path / "net.inputs.npz", image=ONES)
    return shutil.copy(DIGITS / "digits_cnn_batch.onnx", tmp_path / "net.onnx")


def stored_inputs(ended, tmp_path):
    run = json.loads(ended.out)
    return np.load(tmp_path / run["folder"] / run["cases"][0]["inputs"][0]["file"])


def test_run_uses_inputs_next_to_model(hil, model, tmp_path):
    ended = hil("run", model, "--runtime", "onnxruntime", "--json")
    assert ended.code == 0, ended.err
    assert "net.onnx: inputs from net.inputs.npz" in ended.err
    assert (stored_inputs(ended, tmp_path) == ONES).all()


def test_function_replaces_inputs_next_to_model(hil, model, tmp_path):
    (tmp_path / "load.py").write_text(
        "import numpy as np\ndef make():\n    yield {'image': np.zeros((1, 1, 8, 8), np.float32)}\n"
    )
    ended = hil("run", model, "--runtime", "onnxruntime", "--input", "load.py:make", "--json")
    assert ended.code == 0, ended.err
    assert "inputs from" not in ended.err
    assert stored_inputs(ended, tmp_path).shape == (1, 1, 8, 8)
    (tmp_path / "load.py").unlink()
    assert hil("run", "--resume", "latest", "--json").code == 0


WORDS = ["bench --min-time 0.01 --no-check", "bisect", "bundle create -o net.hilb", "layers --save layers"]


@pytest.mark.parametrize("words", slow_except(WORDS, 2))
def test_verbs_use_inputs_next_to_model(hil, model, words):
    """Without the file, all of them need --dim."""
    verb, *options = words.split()
    at = 1 if verb == "bundle" else 0
    runtime = () if verb == "layers" else ("--runtime", "onnxruntime")
    ended = hil(verb, *options[:at], model, *options[at:], *runtime)
    assert ended.code == 0, ended.out + ended.err
