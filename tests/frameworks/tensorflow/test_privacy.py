"""Keras models: hil makes no connections and writes only to its directories."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("keras")

from support.side_effects import side_effects

MODEL = "import keras; keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).save('dense.keras')"


@pytest.mark.parametrize("runtime", ["iree", "tflite", "onnxruntime"])
def test_run_stays_offline_and_writes_only_hil_files(runtime, tmp_path):
    subprocess.run([sys.executable, "-c", MODEL], cwd=tmp_path, check=True, capture_output=True)
    found = side_effects(("run", "dense.keras", "--dim", "batch=1", "--runtime", runtime), cwd=tmp_path)
    assert found.connections == ()
    assert found.files == ()
