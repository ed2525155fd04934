"""Each runtime reports where a program ran, even if the library used another device than requested."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from support.agents import Program
from support.models import DIGITS, save_model

from hil.agent.forkserver import _ForkedWorker
from hil.agent.runtimes import executorch, onnxruntime
from hil.agent.runtimes.onnxruntime import OnnxRuntime
from hil.agent.runtimes.onnxruntime_log import ProviderLog
from hil.core.placement_reasons import PlacementReason
from hil.core.results import Part
from hil.errors import ErrorCode, LoadFailed
from hil.formats.executorch_file import map_program, read_methods

CPU = "CPUExecutionProvider"
# A provider in every wheel that supports no node of these models.
NOTHING = "AzureExecutionProvider"
PTE = Path(__file__).parents[1] / "executorch_files"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model with two nodes, one without a name."""
    nodes = [helper.make_node("Relu", ["x"], ["t"], "relu"), helper.make_node("Neg", ["t"], ["y"])]
    return save_model(tmp_path / "m.onnx", nodes, [("x", TensorProto.FLOAT, [4])], [("y", TensorProto.FLOAT, [4])])


def loaded(model: Path, provider: str) -> Any:
    program = OnnxRuntime({}).load(model.parent, model.name, provider, "")
    program.bind([np.ones(4, np.float32)])
    program.run()
    return program


# ---- ONNX Runtime


@pytest.mark.parametrize("provider", ["", CPU])
def test_onnxruntime_placement_on_cpu_skips_query(model, provider, monkeypatch):
    asked = []
    monkeypatch.setattr(
        ort.SessionOptions, "add_session_config_entry", lambda self, *entry: asked.append(entry), raising=False
    )
    program = loaded(model, provider)
    assert program.placement() == (Part(CPU),)
    assert program.placement() is program.placement()
    assert not asked


@pytest.mark.parametrize("by_profile", [False, True], ids=["by assignment", "by profile"])
def test_onnxruntime_placement_reports_provider_without_nodes(model, by_profile):
    program = loaded(model, NOTHING)
    if by_profile:
        # As before ONNX Runtime 1.24.
        session = program._session
        program._session = SimpleNamespace(get_providers=session.get_providers, _sess=session._sess)
    (part,) = program.placement()
    assert (part.device, part.nodes, part.elsewhere) == (CPU, 2, True)
    assert part.names[0] == "relu (Relu)" and "Neg" in part.names[1]


def test_onnxruntime_placement_lists_nodes_outside_provider(model):
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


def test_onnxruntime_placement_reports_reasons_of_log(model, monkeypatch):
    program = loaded(model, NOTHING)
    log = ProviderLog({("relu", "Relu"): "no kernel", ("", "Neg"): "Cannot get shape", ("x", "Neg"): "other node"})
    monkeypatch.setattr(onnxruntime, "read_provider_log", lambda path, provider, folder: log)
    (part,) = program.placement()
    assert part.reasons == (
        PlacementReason("no kernel", 1, ("relu (Relu)",)),
        PlacementReason("Cannot get shape", 1, (part.names[1],)),
    )


def test_onnxruntime_load_fails_if_provider_is_missing_in_session(model, monkeypatch):
    """For example CUDA without its libraries: ONNX Runtime only logs the error, and uses the CPU."""
    monkeypatch.setattr(
        onnxruntime, "open_session", lambda path, provider, options: ort.InferenceSession(str(path), providers=[CPU])
    )
    errors = ["Failed to load library libonnxruntime_providers_cuda.so with error: libcublasLt.so.13: cannot open"]
    monkeypatch.setattr(onnxruntime, "read_provider_log", lambda *_: ProviderLog(errors=errors))
    with pytest.raises(LoadFailed, match=rf"cannot open {NOTHING}: Failed to load library .*libcublasLt.so.13"):
        loaded(model, NOTHING)


def test_onnxruntime_load_accepts_short_names(model):
    assert loaded(model, "azure").placement() == loaded(model, NOTHING).placement()
    assert loaded(model, "cpu").placement() == (Part(CPU),)
    with pytest.raises(LoadFailed, match="lacks execution provider 'cud'"):
        loaded(model, "cud")


def test_onnxruntime_placement_reports_unrequested_provider(model):
    program = loaded(model, NOTHING)
    program._session = SimpleNamespace(get_providers=lambda: [CPU])
    assert program.placement() == (Part(CPU, elsewhere=True),)


def test_onnxruntime_load_fails_without_cpu_fallback(model, monkeypatch, capfd):
    """For example WebGPU without a GPU: the library would fall back to a CPU session."""
    make = ort.InferenceSession._create_inference_session

    def refusing(self: Any, providers: list[str], *rest: Any) -> None:
        if any(name == NOTHING for name, _ in providers):
            raise RuntimeError("Failed to get a WebGPU adapter: No supported adapters")
        make(self, providers, *rest)

    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", refusing)
    with pytest.raises(LoadFailed, match=f"on {NOTHING}: Failed to get a WebGPU adapter"):
        loaded(model, NOTHING)
    assert "Falling back" not in capfd.readouterr().out


def test_onnxruntime_load_rejects_missing_provider(model):
    with pytest.raises(LoadFailed, match="lacks execution provider 'CUDAExecutionProvider'"):
        loaded(model, "CUDAExecutionProvider")


# ---- IREE


@pytest.mark.parametrize("device", ["local-task", "local-sync", "local-task://", ""])
def test_iree_placement_reports_opened_device(add_programs, device):
    from hil.agent.runtimes.iree import IreeRuntime

    add: Program = add_programs["iree"]
    program = IreeRuntime({}).load(add.path.parent, add.path.name, device, "")
    assert program.placement() == (Part(device.split("://")[0] or "local-task"),)


def test_iree_placement_reports_device_of_other_driver(add_programs, monkeypatch):
    from hil.agent.runtimes import iree

    real = iree.rt.get_device
    monkeypatch.setattr(iree.rt, "get_device", lambda name, cache: real("local-sync", cache=cache))
    add: Program = add_programs["iree"]
    program = iree.IreeRuntime({}).load(add.path.parent, add.path.name, "local-task", "")
    assert program.placement() == (Part("local-sync", elsewhere=True),)


@pytest.mark.parametrize("device", ["local-task", "local-sync", ""])
def test_iree_reports_program_for_other_cpu(add_programs_for, device):
    from hil.agent.runtimes.iree import IreeRuntime

    add: Program = add_programs_for("x86_64" if platform.machine() == "aarch64" else "aarch64")["iree"]
    with pytest.raises(LoadFailed, match=r"IREE cannot load add.vmfb") as caught:
        IreeRuntime({}).load(add.path.parent, add.path.name, device, "")
    # With this code, the controller compares the program's CPU with the board's.
    assert caught.value.code is ErrorCode.WRONG_TARGET and "different CPU" in caught.value.hint


def test_iree_placement_accepts_vendor_device_name():
    from hil.agent.runtimes import iree

    assert iree._describe_device("torq-v2 (rev 3)", "torq") == Part("torq")


# ---- TFLite


def litert(file: str, kernels: str) -> Any:
    pytest.importorskip("ai_edge_litert")
    from hil.agent.runtimes.tflite import TfLiteRuntime

    program = TfLiteRuntime({}).load(DIGITS.parent / "tflite", file, kernels, "")
    (spec,) = program.inputs
    program.bind([np.zeros([dim if isinstance(dim, int) else 1 for dim in spec.shape], spec.dtype)])
    program.run()
    return program


def test_tflite_placement_lists_delegated_nodes():
    assert litert("digits.tflite", "xnnpack").placement() == (
        Part("xnnpack", 5, ("CONV_2D", "MAX_POOL_2D", "RESHAPE", "FULLY_CONNECTED", "SOFTMAX")),
    )


def test_tflite_placement_lists_nodes_outside_delegate():
    for kernels in ("xnnpack", ""):
        there, elsewhere = litert("digits_int8.tflite", kernels).placement()
        assert there == Part("xnnpack", 4, ("CONV_2D", "MAX_POOL_2D", "RESHAPE", "FULLY_CONNECTED"))
        fact = "reason not reported by LiteRT; its inputs are 1x10 int8"
        assert elsewhere == Part("builtin", 1, ("SOFTMAX",), True, (PlacementReason(fact, 1, ("SOFTMAX",)),))


@pytest.mark.parametrize("kernels", ["builtin", "reference"])
def test_tflite_placement_without_delegate_covers_all_nodes(kernels):
    (part,) = litert("digits_int8.tflite", kernels).placement()
    assert (part.device, part.nodes, part.elsewhere) == (kernels, 5, False)


def test_tflite_placement_reports_delegate_without_nodes(monkeypatch):
    pytest.importorskip("ai_edge_litert")
    from hil.formats import litert as module

    # As a LiteRT that was built without XNNPACK.
    monkeypatch.setattr(module, "KERNELS", {"xnnpack": "BUILTIN_WITHOUT_DEFAULT_DELEGATES"})
    (part,) = litert("digits.tflite", "xnnpack").placement()
    assert (part.device, part.nodes, part.elsewhere) == ("builtin", 5, True)


def test_tflite_load_rejects_missing_device():
    with pytest.raises(LoadFailed, match="unsupported LiteRT device 'gpu'"):
        litert("digits.tflite", "gpu")


# ---- ExecuTorch


def test_executorch_placement_lists_delegated_and_other_nodes():
    (method,) = read_methods(map_program(PTE / "linear.pte")).values()
    there, elsewhere = executorch._read_placement(method)
    assert there == Part("XnnpackBackend", 1)
    assert (elsewhere.device, elsewhere.elsewhere) == ("portable", True)
    assert set(elsewhere.names) == {"dim_order_ops::_to_dim_order_copy.out"}


def test_executorch_placement_reports_missing_delegation():
    (method,) = read_methods(map_program(PTE / "numbers.pte")).values()
    (part,) = executorch._read_placement(method)
    assert (part.device, part.elsewhere) == ("portable", False)
    assert part.nodes == len(part.names) > 0


# ---- any runtime


def test_worker_sends_placement_first_and_on_change():
    worker = _ForkedWorker.__new__(_ForkedWorker)
    worker._placed = None
    placements = [(Part("a"),), (Part("a"),), (Part("b"),)]
    worker.program = SimpleNamespace(placement=lambda: placements.pop(0))
    told = [worker._find_new_placement() for _ in range(3)]
    assert json.loads(json.dumps(told)) == [[Part("a").to_json()], None, [Part("b").to_json()]]


def test_worker_ignores_placement_error(capfd):
    worker = _ForkedWorker.__new__(_ForkedWorker)
    worker._placed = None
    worker.program = SimpleNamespace()
    assert worker._find_new_placement() is None
    worker.program = SimpleNamespace(placement=lambda: 1 // 0)
    assert worker._find_new_placement() is None
    assert "ZeroDivisionError" in capfd.readouterr().err
