"""Weights above the (lowered) limits are copied between files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from support.layer_models import residual_cnn

from hil.controller.analysis.layers import graph as graph_module
from hil.controller.analysis.layers.graph import FoldedGraph
from hil.controller.analysis.layers.values import run
from hil.controller.models.onnx_files import onnx_model
from hil.controller.storage.tensor_files import load_tensors, save_tensors


@pytest.fixture
def heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(onnx_model, "EXTERNAL_FROM_BYTES", 100)
    monkeypatch.setattr(onnx_model, "EXTERNAL_FROM_ELEMENTS", 20)
    monkeypatch.setattr(graph_module, "_EMBEDDED_BYTES", 1000)
    path = tmp_path / "model" / "heavy.onnx"
    path.parent.mkdir()
    onnx.save(residual_cnn(), path, save_as_external_data=True, location="all.bin", size_threshold=0)
    return path


def outputs_of(path: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)


def test_save_moves_large_weights_to_data_file(heavy: Path, tmp_path: Path) -> None:
    graph = FoldedGraph(heavy, {}, {})
    block = [number for number in graph.live if graph.nodes[number].name.startswith("block/conv")]
    graph.save(block[:1], ["r1"], ["c2"], tmp_path / "conv.onnx")
    (weight,) = onnx.load(tmp_path / "conv.onnx", load_external_data=False).graph.initializer
    assert [entry.value for entry in weight.external_data] == ["conv.onnx.data", "0", str(8 * 8 * 3 * 3 * 4)]
    (head,) = (number for number in graph.live if graph.nodes[number].name == "head")
    graph.save([head], ["flat"], ["product"], tmp_path / "head.onnx")
    assert not (tmp_path / "head.onnx.data").exists()

    value = np.random.default_rng(3).standard_normal((1, 8, 8, 8)).astype(np.float32)
    onnx.save(residual_cnn(), tmp_path / "whole.onnx")
    onnx.utils.extract_model(tmp_path / "whole.onnx", tmp_path / "wanted.onnx", ["r1"], ["c2"])
    (made,), (wanted,) = (outputs_of(tmp_path / f"{name}.onnx", {"r1": value}) for name in ("conv", "wanted"))
    np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("oracle", ["onnxruntime", "onnx-reference"])
def test_activations_read_weights_from_external_file(heavy: Path, tmp_path: Path, oracle: str) -> None:
    image = np.random.default_rng(4).standard_normal((1, 3, 8, 8)).astype(np.float32)
    save_tensors(tmp_path / "in", {"image": image})
    run(str(heavy), {}, oracle, str(tmp_path / "in"), str(tmp_path / "out"))
    onnx.save(residual_cnn(), tmp_path / "whole.onnx")
    (wanted,) = outputs_of(tmp_path / "whole.onnx", {"image": image})
    np.testing.assert_allclose(load_tensors(tmp_path / "out")["scores"], wanted, rtol=1e-5)
