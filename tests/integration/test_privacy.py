"""hil and its dependencies open no connections and write only to hil's directories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.side_effects import PYTHON, side_effects

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits" / "digits_cnn.onnx"
LEAK = """\
import contextlib, pathlib, socket
with contextlib.suppress(OSError):
    socket.create_connection(("203.0.113.1", 9), timeout=0.1)
with contextlib.suppress(OSError):
    socket.getaddrinfo("telemetry.example", 443)
pathlib.Path.home().joinpath("id").touch()
pathlib.Path(r"{outside}").touch()
"""

COMMANDS = {"onnxruntime": [("run", DIGITS, "--runtime", "onnxruntime"), ("runs", "list")]}
LONG = (pytest.mark.slow, pytest.mark.timeout(3600))
SLOW_COMMANDS = {
    "iree": [
        ("run", DIGITS, "--runtime-hw-type", "sim", "--profile", "times"),
        ("compare", "a.npy", "a.npy", "--plot", "differences.png"),
    ],
    "tflite": [("run", EXAMPLES / "tflite" / "digits.tflite")],
    "bench": [("bench", DIGITS, "--iterations", "10")],
    "suite": [("suite", "run", EXAMPLES / "digits", "--filter", "digits_cnn_full_model")],
    "bundle": [
        ("bundle", "create", DIGITS),
        ("bundle", "run", "digits_cnn.hilb"),
        ("bundle", "verifier", "-o", "verify"),
    ],
    "farm": [
        ("farm", "up", "--sim", "1", "--detach"),
        ("farm", "submit", DIGITS, "--wait"),
        ("farm", "down"),
    ],
}


def test_leak_detection_finds_connections_and_files(tmp_path, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "file"
    found = side_effects((PYTHON, "-c", LEAK.format(outside=outside)), cwd=tmp_path)
    assert any("203.0.113.1" in line for line in found.connections)
    assert {Path(path).name for path in found.files} == {"id", "file"}


@pytest.mark.parametrize("name", [*COMMANDS, *(pytest.param(one, marks=LONG) for one in SLOW_COMMANDS)])
def test_command_stays_offline_and_in_hil_directories(name, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6, dtype=np.float32))
    found = side_effects(*(COMMANDS | SLOW_COMMANDS)[name], cwd=tmp_path)
    assert found.connections == ()
    assert found.files == ()
