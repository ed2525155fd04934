from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import DIGITS
from support.profiles import profile_onnxruntime

from hil.controller.analysis.profile.collect import iter_onnxruntime_rows
from hil.controller.analysis.profile.compilation.estimate import estimate
from hil.controller.analysis.profile.runtimes.onnxruntime_profile import (
    KernelEvent,
    KernelNodes,
    OnnxRuntimeEvents,
    find_by_name,
    read_onnxruntime,
)
from hil.controller.models.importers import import_model
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.zoo import build_zoo_models
from hil.core.results import Model
from hil.errors import RunFailed, StageTimeout

Save = Callable[..., Path]
FLOAT = TensorProto.FLOAT
RUNS = 4


def read(path: Path, model: Model, settings: dict[str, Any], **options: Any) -> OnnxRuntimeEvents:
    given = {name: settings[name] for name in ("isolated", "timeout", "log")}
    return read_onnxruntime(path, model, **{**given, **options})


def profiled(path: Path, settings: dict[str, Any], folder: Path, **options: Any) -> OnnxRuntimeEvents:
    model = import_model(path, isolated=settings["isolated"])
    return read(profile_onnxruntime(path, folder, RUNS), model, settings, **options)


def first_run(events: OnnxRuntimeEvents) -> list[KernelEvent]:
    return [event for event in events.events() if event.iteration == 0]


def test_events_list_runs_and_kernels_in_order(settings: dict[str, Any], tmp_path: Path) -> None:
    events = profiled(DIGITS / "digits_cnn.onnx", settings, tmp_path)
    assert events.iterations == RUNS
    assert not events.notes
    kernels = list(events.events())
    starts = [kernel.start_ns for kernel in kernels]
    assert starts == sorted(starts)
    for number, (begin, end) in enumerate(events.windows):
        run = [kernel for kernel in kernels if kernel.iteration == number]
        assert [kernel.name for kernel in run] == [kernel.name for kernel in first_run(events)]
        assert all(begin <= kernel.start_ns for kernel in run)
        assert sum(kernel.duration_ns for kernel in run) <= end - begin


def test_fused_kernel_names_replaced_nodes(settings: dict[str, Any], tmp_path: Path) -> None:
    kernels = first_run(profiled(DIGITS / "digits_cnn.onnx", settings, tmp_path))
    computed = [kernel.nodes for kernel in kernels if kernel.computes]
    assert computed == [("conv1", "relu1"), ("pool1",), ("conv2", "relu2"), ("pool2",), ("flatten",), ("fc1",)]


def test_quantized_kernel_names_surrounding_nodes(settings: dict[str, Any], tmp_path: Path) -> None:
    kernels = first_run(profiled(DIGITS / "digits_cnn_int8.onnx", settings, tmp_path))
    conv = next(kernel for kernel in kernels if "conv1" in kernel.nodes and kernel.computes)
    assert conv.op_type == "QLinearConv"
    assert conv.nodes == ("image_DequantizeLinear", "conv1", "relu1.out_QuantizeLinear")
    assert all(kernel.nodes for kernel in kernels)


def test_pattern_kernel_names_all_fused_nodes(settings: dict[str, Any], tmp_path: Path) -> None:
    model = next(
        each
        for each in build_zoo_models(RunContext(settings["cache"], settings["isolated"]))
        if each.name == "transformer"
    )
    kernels = first_run(profiled(model.path, settings, tmp_path))
    by_nodes = {kernel.nodes: kernel for kernel in kernels if kernel.computes}
    assert ("Div_2", "Erf_1", "Add_8", "Mul_1", "Mul_2") in by_nodes  # a Gelu
    assert ("MatMul_7", "Add_7") in by_nodes
    assert all(kernel.nodes for kernel in kernels)
    # Kernels that only reorder values for the next kernel compute nothing.
    assert {kernel.op_type for kernel in kernels if not kernel.computes} <= {"Reshape", "ReorderOutput"}


def test_addition_fuses_into_preceding_convolution(settings: dict[str, Any], tmp_path: Path) -> None:
    model = next(
        each for each in build_zoo_models(RunContext(settings["cache"], settings["isolated"])) if each.name == "resnet"
    )
    kernels = first_run(profiled(model.path, settings, tmp_path))
    behind = next(kernel.nodes for kernel in kernels if kernel.computes and "Conv_7" in kernel.nodes)
    assert behind[0] == "Conv_7"  # reads the Relu_5 of a sum
    (summing,) = [kernel.nodes for kernel in kernels if kernel.computes and "Relu_5" in kernel.nodes]
    assert "Add_2" in summing


def test_unnamed_nodes_are_named_by_type_and_index(save_onnx: Save, settings: dict[str, Any], tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Identity", ["a"], ["b"]),
        helper.make_node("Softmax", ["b"], ["y"]),
    ]
    path = save_onnx(nodes, [("x", FLOAT, (4, 8))], [("y", FLOAT, (4, 8))])
    kernels = first_run(profiled(path, settings, tmp_path))
    assert [kernel.nodes[0] for kernel in kernels] == ["Exp_0", "Softmax_2"]
    assert kernels[0].shapes == "4x8xf32 -> 4x8xf32"


def test_control_flow_kernel_becomes_runtime_row(save_onnx: Save, settings: dict[str, Any], tmp_path: Path) -> None:
    def branch(op_type: str) -> Any:
        node = helper.make_node(op_type, ["x"], [f"{op_type}.y"], name=op_type.lower())
        return helper.make_graph([node], op_type, [], [helper.make_tensor_value_info(f"{op_type}.y", FLOAT, (4,))])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], name="sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["is"], name="compare"),
        helper.make_node("If", ["is"], ["y"], name="if", then_branch=branch("Exp"), else_branch=branch("Neg")),
    ]
    zero = numpy_helper.from_array(np.zeros((), np.float32), "zero")
    path = save_onnx(nodes, [("x", FLOAT, (4,))], [("y", FLOAT, (4,))], [zero])
    model = import_model(path, isolated=settings["isolated"])
    given = {name: settings[name] for name in ("isolated", "timeout", "log")}
    events = read_onnxruntime(profile_onnxruntime(path, tmp_path, 1), model, **given)
    rows = {
        row.op: row
        for row in iter_onnxruntime_rows(events, estimate(model, cache=settings["cache"], **given), run="r", board="b")
    }
    assert rows["if"].kind == "runtime"
    assert rows["if"].onnx_nodes == ()
    assert rows["exp"].kind == "compute"
    assert rows["exp"].onnx_nodes == ("exp",)
    assert rows["if"].start_ns <= rows["exp"].start_ns
    assert "neg" not in rows


def test_events_skip_warmup_and_map_clock(settings: dict[str, Any], tmp_path: Path) -> None:
    model = import_model(DIGITS / "digits_cnn.onnx", isolated=settings["isolated"])
    path = profile_onnxruntime(model.path, tmp_path, RUNS)
    every = read(path, model, settings)
    last = read(path, model, settings, warmup=1, iterations=2, clock=[(0, 5_000_000)])
    assert last.iterations == 2
    assert last.windows == [(begin + 5_000_000, end + 5_000_000) for begin, end in every.windows[1:3]]
    expected = [
        (event.iteration - 1, event.start_ns + 5_000_000) for event in every.events() if event.iteration in (1, 2)
    ]
    assert [(event.iteration, event.start_ns) for event in last.events()] == expected


def test_truncated_profile_preserves_complete_runs(settings: dict[str, Any], tmp_path: Path) -> None:
    model = import_model(DIGITS / "digits_cnn.onnx", isolated=settings["isolated"])
    path = profile_onnxruntime(model.path, tmp_path, RUNS)
    text = path.read_text()
    third = [at for at in range(len(text)) if text.startswith('"model_run"', at)][2]
    path.write_text(text[:third])
    events = read(path, model, settings, iterations=RUNS)
    assert events.iterations == 2
    assert {event.iteration for event in events.events()} == {0, 1}
    assert "truncated: 2 complete runs" in events.notes[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[\n",
        b"\x00\xff no profile",
        b'{"ts": 1}',
        b'{"name": "model_run", "cat": "", "ts": "soon", "dur": 1, "args": {}}',
    ],
)
def test_read_rejects_file_without_runs(settings: dict[str, Any], tmp_path: Path, content: bytes) -> None:
    model = import_model(DIGITS / "digits_cnn.onnx", isolated=settings["isolated"])
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(RunFailed, match="has no complete run"):
        read(path, model, settings)
    with pytest.raises(RunFailed, match=r"profile missing\.json not found"):
        read(tmp_path / "missing.json", model, settings)


def test_node_lookup_times_out(settings: dict[str, Any], tmp_path: Path) -> None:
    model = import_model(DIGITS / "digits_cnn.onnx", isolated=settings["isolated"])
    path = profile_onnxruntime(model.path, tmp_path, 1)
    # A fresh process cannot finish before the time limit is checked.
    with Isolated(1) as fresh, pytest.raises(StageTimeout, match="kernels' nodes"):
        read(path, model, settings, isolated=fresh, timeout=1e-6)


def test_kernels_fall_back_to_names_for_unoptimized_model(settings: dict[str, Any], tmp_path: Path) -> None:
    model = import_model(DIGITS / "digits_cnn.onnx", isolated=settings["isolated"])
    path = profile_onnxruntime(model.path, tmp_path, 1)
    proto = onnx.load(model.path)
    proto.graph.node.append(helper.make_node("Nowhere", ["image"], ["nothing"], domain="nowhere"))
    proto.opset_import.append(helper.make_opsetid("nowhere", 1))
    onnx.save(proto, tmp_path / "unknown.onnx")
    events = read(path, replace(model, path=tmp_path / "unknown.onnx"), settings)
    assert "matched to nodes by name only" in events.notes[0]
    assert ("fc1",) in [kernel.nodes for kernel in events.events()]


def event(name: str = "K_kernel_time", ts: int = 1, **args: Any) -> bytes:
    fields = {"op_name": "K", "node_index": "0", **args}
    return json.dumps({"name": name, "cat": "Node", "ts": ts, "dur": 1, "args": fields}).encode()


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (b'{"name":' + b"[" * 100_000, 0),
        (b"[" + b"[]," * 200_000, 0),
        (event("x" * (1 << 21)), 0),
        (event(ts=10**4000), 0),
        (event("K_" + "9" * 4400 + "_kernel_time", node_index="9" * 4400), 1),
        (event(op_name=[1], node_index=None), 1),
        (event(input_type_shape=None, output_type_shape=3), 1),
        (event(input_type_shape=[{"float": ["x", None, -5]}, 3], output_type_shape={"float": [1]}), 1),
    ],
)
def test_read_tolerates_hostile_profile(line: bytes, count: int, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    run = b'{"name":"model_run","cat":"Session","ts":0,"dur":10,"args":{}}'
    path.write_bytes(b"[\n" + line + b",\n" + run + b"\n]")
    nodes = KernelNodes({}, {}, [["n", "K"]])
    assert len(list(OnnxRuntimeEvents(path, nodes, 0, 1, [(0, 10)], [(0, 0)]).events())) == count


@pytest.mark.ci
def test_kernels_without_nodes_take_linear_time() -> None:
    # In quadratic time it does not end within the test's limit.
    run = [KernelEvent(0, "k", "K", (), False, at, 1, " -> ") for at in range(200_000)]
    last = KernelEvent(0, "k", "K", ("n",), True, len(run), 1, " -> ")
    found = list(OnnxRuntimeEvents._assign_layouts([*run, last]))
    assert found[0].nodes == found[-1].nodes == ("n",)


def test_long_kernel_names_take_linear_time() -> None:
    assert find_by_name("a" + "_1" * 1_000_000, {"a": "a"}) == []
    assert find_by_name("a" + "_1" * 2000, {"a": "node"}) == ["node"]
