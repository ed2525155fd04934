"""Each runtime tells where a program ran, also where a library answers from another device than it was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from support.agents import Program
from support.models import DIGITS, save_model

from hil.agent.forkserver import _Worker
from hil.agent.runtimes import executorch
from hil.agent.runtimes.onnxruntime import OnnxRuntime
from hil.core.results import Part
from hil.errors import LoadFailed
from hil.formats.executorch_file import mapped, read_methods

CPU = "CPUExecutionProvider"
# A provider of every wheel that is there and takes no node of such models.
NOTHING = "AzureExecutionProvider"
PTE = Path(__file__).parents[1] / "executorch_files"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two nodes, one of which has no name."""
    nodes = [helper.make_node("Relu", ["x"], ["t"], "relu"), helper.make_node("Neg", ["t"], ["y"])]
    return save_model(tmp_path / "m.onnx", nodes, [("x", TensorProto.FLOAT, [4])], [("y", TensorProto.FLOAT, [4])])


def loaded(model: Path, provider: str) -> Any:
    program = OnnxRuntime({}).load(model.parent, model.name, provider, "")
    program.bind([np.ones(4, np.float32)])
    program.run()
    return program


# ---- ONNX Runtime


@pytest.mark.parametrize("provider", ["", CPU])
def test_onnxruntime_on_the_cpu_has_nothing_to_ask(model, provider, monkeypatch):
    asked = []
    monkeypatch.setattr(
        ort.SessionOptions, "add_session_config_entry", lambda self, *entry: asked.append(entry), raising=False
    )
    program = loaded(model, provider)
    assert program.placement() == (Part(CPU),)
    assert program.placement() is program.placement()
    assert not asked


@pytest.mark.parametrize("by_profile", [False, True], ids=["by assignment", "by profile"])
def test_onnxruntime_tells_that_a_provider_took_nothing(model, by_profile):
    program = loaded(model, NOTHING)
    if by_profile:
        # As before ONNX Runtime 1.24.
        session = program._session
        program._session = SimpleNamespace(get_providers=session.get_providers, _sess=session._sess)
    (part,) = program.placement()
    assert (part.device, part.nodes, part.elsewhere) == (CPU, 2, True)
    assert part.names[0] == "relu (Relu)" and "Neg" in part.names[1]


def test_onnxruntime_tells_which_nodes_a_provider_left(model):
    program = loaded(model, NOTHING)
    graph = [
        SimpleNamespace(ep_name=name, get_nodes=lambda node=node: [SimpleNamespace(name=node[0], op_type=node[1])])
        for name, node in ((CPU, ("relu", "Relu")), (NOTHING, ("", "Neg")))
    ]
    program._session = SimpleNamespace(
        get_providers=lambda: [NOTHING, CPU], get_provider_graph_assignment_info=lambda: graph
    )
    there, elsewhere = program.placement()
    assert there == Part(NOTHING, 1, ("Neg",))
    assert elsewhere == Part(CPU, 1, ("relu (Relu)",), elsewhere=True)


def test_onnxruntime_tells_of_a_session_that_has_another_provider_than_was_asked_for(model):
    program = loaded(model, NOTHING)
    program._session = SimpleNamespace(get_providers=lambda: [CPU])
    assert program.placement() == (Part(CPU, elsewhere=True),)


def test_onnxruntime_does_not_go_on_on_the_cpu_where_a_provider_cannot_be_opened(model, monkeypatch, capfd):
    """As WebGPU's does without a GPU: the library itself would make another session and answer from that."""
    make = ort.InferenceSession._create_inference_session

    def refusing(self: Any, providers: list[str], *rest: Any) -> None:
        if NOTHING in providers:
            raise RuntimeError("Failed to get a WebGPU adapter: No supported adapters")
        make(self, providers, *rest)

    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", refusing)
    with pytest.raises(LoadFailed, match=f"on {NOTHING}: Failed to get a WebGPU adapter"):
        loaded(model, NOTHING)
    assert "Falling back" not in capfd.readouterr().out


def test_a_provider_that_is_not_there_is_refused(model):
    with pytest.raises(LoadFailed, match="no execution provider 'CUDAExecutionProvider'"):
        loaded(model, "CUDAExecutionProvider")


# ---- IREE


@pytest.mark.parametrize("device", ["local-task", "local-sync", "local-task://", ""])
def test_iree_tells_the_device_that_it_opened(add_programs, device):
    from hil.agent.runtimes.iree import IreeRuntime

    add: Program = add_programs["iree"]
    program = IreeRuntime({}).load(add.path.parent, add.path.name, device, "")
    assert program.placement() == (Part(device.split("://")[0] or "local-task"),)


def test_iree_tells_of_a_device_of_another_driver_than_was_asked_for(add_programs, monkeypatch):
    from hil.agent.runtimes import iree

    real = iree.rt.get_device
    monkeypatch.setattr(iree.rt, "get_device", lambda name, cache: real("local-sync", cache=cache))
    add: Program = add_programs["iree"]
    program = iree.IreeRuntime({}).load(add.path.parent, add.path.name, "local-task", "")
    assert program.placement() == (Part("local-sync", elsewhere=True),)


def test_a_vendors_iree_device_may_call_itself_as_it_likes():
    from hil.agent.runtimes import iree

    assert iree._part("torq-v2 (rev 3)", "torq") == Part("torq")


# ---- TFLite


def litert(file: str, kernels: str) -> Any:
    pytest.importorskip("ai_edge_litert")
    from hil.agent.runtimes.tflite import TfLiteRuntime

    program = TfLiteRuntime({}).load(DIGITS.parent / "tflite", file, kernels, "")
    (spec,) = program.inputs
    program.bind([np.zeros([dim if isinstance(dim, int) else 1 for dim in spec.shape], spec.dtype)])
    program.run()
    return program


def test_tflite_tells_what_the_delegate_took():
    assert litert("digits.tflite", "xnnpack").placement() == (
        Part("xnnpack", 5, ("CONV_2D", "MAX_POOL_2D", "RESHAPE", "FULLY_CONNECTED", "SOFTMAX")),
    )


def test_tflite_tells_what_the_delegate_left():
    for kernels in ("xnnpack", ""):
        there, elsewhere = litert("digits_int8.tflite", kernels).placement()
        assert there == Part("xnnpack", 4, ("CONV_2D", "MAX_POOL_2D", "RESHAPE", "FULLY_CONNECTED"))
        assert elsewhere == Part("builtin", 1, ("SOFTMAX",), elsewhere=True)


@pytest.mark.parametrize("kernels", ["builtin", "reference"])
def test_tflite_without_a_delegate_leaves_nothing(kernels):
    (part,) = litert("digits_int8.tflite", kernels).placement()
    assert (part.device, part.nodes, part.elsewhere) == (kernels, 5, False)


def test_tflite_tells_that_the_delegate_took_nothing(monkeypatch):
    pytest.importorskip("ai_edge_litert")
    from hil.formats import litert as module

    # As a LiteRT that was built without XNNPACK.
    monkeypatch.setattr(module, "KERNELS", {"xnnpack": "BUILTIN_WITHOUT_DEFAULT_DELEGATES"})
    (part,) = litert("digits.tflite", "xnnpack").placement()
    assert (part.device, part.nodes, part.elsewhere) == ("builtin", 5, True)


def test_a_tflite_device_that_is_not_there_is_refused():
    with pytest.raises(LoadFailed, match="no device 'gpu'"):
        litert("digits.tflite", "gpu")


# ---- ExecuTorch


def test_executorch_tells_what_was_delegated_and_what_was_not():
    (method,) = read_methods(mapped(PTE / "linear.pte")).values()
    there, elsewhere = executorch._placement(method)
    assert there == Part("XnnpackBackend", 1)
    assert (elsewhere.device, elsewhere.elsewhere) == ("portable", True)
    assert set(elsewhere.names) == {"dim_order_ops::_to_dim_order_copy.out"}


def test_executorch_tells_that_nothing_was_delegated():
    (method,) = read_methods(mapped(PTE / "numbers.pte")).values()
    (part,) = executorch._placement(method)
    assert (part.device, part.elsewhere) == ("portable", False)
    assert part.nodes == len(part.names) > 0


# ---- whatever runtime


def test_a_worker_tells_the_placement_once_and_when_it_changes():
    worker = _Worker.__new__(_Worker)
    worker._placed = None
    placements = [(Part("a"),), (Part("a"),), (Part("b"),)]
    worker.program = SimpleNamespace(placement=lambda: placements.pop(0))
    told = [worker._news_of_placement() for _ in range(3)]
    assert json.loads(json.dumps(told)) == [[Part("a").to_json()], None, [Part("b").to_json()]]


def test_a_runtime_that_cannot_tell_costs_no_answer(capfd):
    worker = _Worker.__new__(_Worker)
    worker._placed = None
    worker.program = SimpleNamespace()
    assert worker._news_of_placement() is None
    worker.program = SimpleNamespace(placement=lambda: 1 // 0)
    assert worker._news_of_placement() is None
    assert "ZeroDivisionError" in capfd.readouterr().err
