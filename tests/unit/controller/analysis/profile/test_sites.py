from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import DIGITS
from support.profiles import HOST, profile_iree

from hil.controller.analysis.profile.collect import iter_iree_rows
from hil.controller.analysis.profile.runtimes.iree_profile import read_ireeprof
from hil.controller.analysis.profile.sites import DispatchSite, Region, Sites, dispatch_sites, find_names
from hil.controller.models.importers import import_model
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.zoo import build_zoo_models
from hil.core.results import Artifact, Model
from hil.errors import CompileFailed, UsageError

Save = Callable[..., Path]
FLOAT = TensorProto.FLOAT


def artifact(model: Model, flags: Sequence[str] = HOST) -> Artifact:
    return Artifact("iree", "main.vmfb", {}, {}, model.function, "iree", tuple(flags))


def sites_of(path: Path, settings: dict[str, Any], flags: Sequence[str] = HOST, **dims: int) -> Sites:
    model = import_model(path, dims=dims, isolated=settings["isolated"])
    given = {name: settings[name] for name in ("cache", "isolated", "timeout", "log")}
    return dispatch_sites(model, artifact(model, flags), **given)


def flat(sites: Sites) -> list[DispatchSite]:
    return [site for region in sites.regions for site in region.sites]


def region(*sites: tuple[str, str], loop: str = "") -> Region:
    return Region(loop, tuple(DispatchSite(key, (node,)) for key, node in sites))


def nodes(matched: Sequence[Sequence[DispatchSite]]) -> list[list[tuple[str, ...]]]:
    return [[site.nodes for site in sites] for sites in matched]


def test_dispatch_names_all_fused_nodes(settings: dict[str, Any]) -> None:
    sites = sites_of(DIGITS / "digits_cnn.onnx", settings)
    assert [site.nodes for site in flat(sites)] == [
        ("conv1",),  # padding of its input
        ("conv1", "relu1"),
        ("pool1",),
        ("conv2", "relu2"),
        ("pool2",),
        ("fc1",),
    ]
    assert sites.op_types["conv1"] == "Conv"
    assert flat(sites)[-1].shapes == "1x128xf32, 10x128xf32 -> 1x10xf32"


def test_dispatch_excludes_nodes_sharing_only_a_constant(settings: dict[str, Any]) -> None:
    sites = sites_of(DIGITS / "digits_cnn_int8.onnx", settings)
    assert [site.nodes for site in flat(sites)][:3] == [
        ("image_QuantizeLinear",),
        ("conv1", "relu1.out_QuantizeLinear", "relu1.out_DequantizeLinear"),
        ("pool1", "pool1.out_QuantizeLinear"),
    ]


@pytest.mark.ci
def test_dispatch_estimates_count_fused_computation(settings: dict[str, Any]) -> None:
    conv = flat(sites_of(DIGITS / "digits_cnn.onnx", settings))[1]
    outputs = 16 * 8 * 8
    # Nine multiplications and additions each, then the bias, and the comparison and the choice of the Relu.
    assert conv.flops == outputs * (9 * 2 + 3)
    assert conv.bytes == 4 * (10 * 10 + 16 * 9 + outputs)


def test_sites_separate_calls_of_same_executable(save_onnx: Save, settings: dict[str, Any]) -> None:
    # Large enough that the compiler does not inline them into the dispatch.
    draw = np.random.default_rng(0)
    weights = [numpy_helper.from_array(draw.random((64, 64), np.float32), name) for name in ("w1", "w2", "w3")]
    calls = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="first"),
        helper.make_node("Softmax", ["a"], ["b"], name="between"),
        helper.make_node("MatMul", ["b", "w2"], ["c"], name="second"),
        helper.make_node("Softmax", ["c"], ["d"], name="again"),
        helper.make_node("MatMul", ["d", "w3"], ["y"], name="third"),
    ]
    path = save_onnx(calls, [("x", FLOAT, (4, 64))], [("y", FLOAT, (4, 64))], weights)
    sites = [site for site in flat(sites_of(path, settings)) if "matmul" in site.key]
    assert len({site.key for site in sites}) == 1
    assert [site.nodes for site in sites] == [("first",), ("second",), ("third",)]


@pytest.mark.ci
def test_sites_separate_loops(settings: dict[str, Any]) -> None:
    context = RunContext(settings["cache"], settings["isolated"])
    gru = next(model for model in build_zoo_models(context) if model.name == "gru")
    regions = sites_of(gru.path, settings).regions
    assert [{node for site in each.sites for node in site.nodes} for each in regions] == [{"GRU_1"}, {"GRU_2"}]
    assert regions[0].loop
    assert regions[1].loop
    assert regions[0].loop != regions[1].loop


def test_unnamed_nodes_are_named_by_type_and_index(save_onnx: Save, settings: dict[str, Any]) -> None:
    path = save_onnx(
        [helper.make_node("Exp", ["x"], ["a"]), helper.make_node("Softmax", ["a"], ["y"])],
        [("x", FLOAT, (4, 8))],
        [("y", FLOAT, (4, 8))],
    )
    named = {node for site in flat(sites_of(path, settings)) for node in site.nodes}
    assert named == {"Exp_0", "Softmax_1"}


def test_mlir_sites_use_locations_or_line_numbers(settings: dict[str, Any], tmp_path: Path) -> None:
    module = tmp_path / "model.mlir"
    text = """func.func @main(%a: tensor<4x8xf32>, %b: tensor<8x16xf32>) -> tensor<4x16xf32> {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
    : (tensor<4x8xf32>, tensor<8x16xf32>) -> tensor<4x16xf32>
  %1 = stablehlo.tanh %0 : tensor<4x16xf32> loc("activation")
  return %1 : tensor<4x16xf32>
}
"""
    module.write_text(text)
    (site,) = flat(sites_of(module, settings))
    assert set(site.nodes) == {"activation", "line 2"}


def test_sites_of_precompiled_or_merged_program_are_empty(settings: dict[str, Any]) -> None:
    model = import_model(DIGITS / "digits_cnn.onnx", isolated=settings["isolated"])
    given = {name: settings[name] for name in ("cache", "isolated", "timeout", "log")}
    sites = dispatch_sites(replace(model, format="vmfb"), artifact(model), **given)
    assert not sites.regions
    assert "for a precompiled program" in sites.notes[0]
    sites = dispatch_sites(model, replace(artifact(model), function="digits_cnn.7"), **given)
    assert not sites.regions
    assert "several models" in sites.notes[0]
    with pytest.raises(UsageError, match="expected an IREE program, got a program for onnxruntime"):
        dispatch_sites(model, replace(artifact(model), runtime="onnxruntime"), **given)


def test_sites_report_invalid_flag_and_refused_model(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--no-such-flag"):
        sites_of(DIGITS / "digits_cnn.onnx", settings, [*HOST, "--no-such-flag"])
    bad = tmp_path / "bad.mlir"
    bad.write_text("func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> { return %a : tensor<?xf32> }\n")
    with pytest.raises(CompileFailed):
        sites_of(bad, settings, ["--iree-hal-target-device=local"])


@pytest.mark.ci
def test_sites_are_cached(settings: dict[str, Any]) -> None:
    first = sites_of(DIGITS / "digits_cnn.onnx", settings)
    settings["log"].write_text("")
    assert sites_of(DIGITS / "digits_cnn.onnx", settings) == first
    assert settings["log"].read_text() == ""


def test_match_identifies_submission_by_dispatches() -> None:
    sites = Sites([region(("a", "A"), ("b", "B")), region(("c", "C"))], {})
    matched, doubts = sites.match([(), ("c",), ("a", "b"), ("c",)])
    assert nodes(matched) == [[], [("C",)], [("A",), ("B",)], [("C",)]]
    assert not doubts


def test_match_orders_equal_submissions_outside_loops() -> None:
    sites = Sites([region(("a", "A1")), region(("b", "B")), region(("a", "A2"))], {})
    matched, doubts = sites.match([("a",), ("b",), ("a",)])
    assert nodes(matched) == [[("A1",)], [("B",)], [("A2",)]]
    assert not doubts


def test_match_alternates_equal_submissions_in_same_loop() -> None:
    sites = Sites([region(("a", "A1"), loop="0.1"), region(("a", "A2"), loop="0.1")], {})
    matched, doubts = sites.match([("a",)] * 4)
    assert nodes(matched) == [[("A1",)], [("A2",)], [("A1",)], [("A2",)]]
    assert not doubts


def test_match_orders_equal_submissions_of_two_loops() -> None:
    sites = Sites([region(("a", "A1"), loop="0.1"), region(("a", "A2"), loop="0.3")], {})
    matched, doubts = sites.match([("a",)] * 4)
    assert nodes(matched) == [[("A1",)], [("A1",)], [("A2",)], [("A2",)]]
    assert "have equal iteration counts" in doubts[0]


def test_match_names_all_candidates_if_ambiguous() -> None:
    sites = Sites([region(("a", "A1"), loop="0.1"), region(("a", "A2"), loop="0.3")], {})
    matched, doubts = sites.match([("a",)] * 3)
    assert nodes(matched) == [[("A1", "A2")]] * 3
    assert "nodes of all call sites" in doubts[0]


def test_match_falls_back_to_dispatch_names() -> None:
    sites = Sites([region(("a", "A"), ("b", "B")), region(("b", "B2"))], {})
    matched, doubts = sites.match([("b", "a"), ("z",)])
    assert nodes(matched) == [[("B", "B2"), ("A",)], [()]]
    assert ["several call sites" in doubts[0], "no known call site" in doubts[1]] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["local-task", "local-sync"])
def test_sites_cover_every_dispatch_of_zoo_models(settings: dict[str, Any], tmp_path: Path, device: str) -> None:
    given = {name: settings[name] for name in ("isolated", "timeout", "log")}
    profiled = 0
    for model in build_zoo_models(RunContext(settings["cache"], settings["isolated"])):
        folder = tmp_path / model.name
        folder.mkdir()
        try:
            run = profile_iree(model.path, folder, settings, device=device, runs=3, **model.dims)
        except CompileFailed:
            continue  # the suite lists the models with expected compile errors
        sites = dispatch_sites(run.model, run.artifact, cache=settings["cache"], **given)
        events = read_ireeprof(run.profile, folder=folder, warmup=1, iterations=2, **given)
        notes: list[str] = list(events.notes)
        rows = [row for row in iter_iree_rows(events, sites, run="r", board="b", notes=notes) if row.kind == "compute"]
        assert rows, model.name
        assert not notes, model.name
        assert {row.iteration for row in rows} == {0, 1}, model.name
        assert not [row.op for row in rows if not row.onnx_nodes], model.name
        assert not [row.op for row in rows if "" in row.op_types], model.name
        profiled += 1
    assert profiled > 20


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ('loc("fc1")', ["fc1"]),
        ('loc(fused["conv1", "relu1", "conv1"])', ["conv1", "relu1"]),
        ('loc("layer"("model.mlir":3:5))', ["layer"]),
        ('loc("model.mlir":12:3)', ["line 12"]),
        ('loc(fused["a.mlir":2:3, "a.mlir":4:7])', ["line 2", "line 4"]),
        ('loc(callsite("inner" at "outer"))', ["inner", "outer"]),
        (r'loc("say \22hi\22 \\ there")', ['say "hi" \\ there']),
        (r'loc("\E7\95\B3\E3\81\BF")', ["畳み"]),
        ("loc(unknown)", []),
    ],
)
def test_names_in_parses_locations(location: str, expected: list[str]) -> None:
    assert find_names(location) == expected
