"""Create bundles: sources of cases and rejected requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import save_model
from support.step_programs import VOCABULARY, save_summing_model

from hil.bundles import Bundle
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.create import Request, create_bundle
from hil.errors import ImportFailed, StageTimeout, UsageError

F32 = np.float32
FLOAT = TensorProto.FLOAT


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Iterator[RunContext]:
    with Isolated(1) as isolated:
        yield RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Save the model sum = x + y with any number of rows, and files with cases."""
    values = [(name, FLOAT, ["N", 4]) for name in ("x", "y", "sum")]
    x, y = np.ones((2, 4), F32), np.full((2, 4), 2, F32)
    np.savez(tmp_path / "whole.npz", x=x, y=y, sum=x + y)
    np.savez(tmp_path / "asks.npz", x=x, y=y)
    np.savez(tmp_path / "wrong.npz", x=x, y=y, sum=x)
    np.savez(tmp_path / "uneven.npz", x=x, y=np.ones((3, 4), F32))
    np.savez(tmp_path / "half.npz", x=x, sum=x)
    np.savez(tmp_path / "f64.npz", x=x.astype(float), y=y)
    np.savez(tmp_path / "other.npz", x=x, z=x)
    folder = tmp_path / "folder"
    folder.mkdir()
    np.save(folder / "input_0.npy", x)
    (folder / "input_1.pb").write_bytes(numpy_helper.from_array(y).SerializeToString())
    return save_model(tmp_path / "add.onnx", [helper.make_node("Add", ["x", "y"], ["sum"])], values[:2], values[2:])


@pytest.fixture
def create(model: Path, context: RunContext, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bundle]:
    monkeypatch.chdir(model.parent)

    def call(*cases: str, random: int | None = None, functions: tuple[str, ...] = (), **options: Any) -> Bundle:
        request = Request(model, functions, Options(**{"runtime": "onnxruntime", **options}), cases, random)
        return create_bundle(request, choose(), context, connect=lambda: pytest.fail("no board is needed"))

    return call


@pytest.mark.ci
def test_bundle_case_uses_given_outputs_or_reference(create):
    (method,) = create("whole.npz", "asks.npz", "wrong.npz", "folder", rtol=1e-3).methods
    sources = {case.name: case.source for case in method.cases}
    assert sources["whole"] == sources["wrong"] == "given with the case"
    assert sources["asks"].startswith("onnx reference evaluator ") and sources["folder"] == sources["asks"]
    assert [case.expected_outputs["sum"][0, 0] for case in method.cases] == [3, 3, 1, 3]
    assert {(case.rtol, case.atol) for case in method.cases} == {(1e-3, None)}


def test_random_cases_use_consecutive_seeds(create):
    one, other = (create(random=count, seed=7, dims={"N": 3}).methods[0].cases for count in (2, 3))
    assert [case.name for case in other] == ["seed7", "seed8", "seed9"]
    assert [case.inputs["x"].tobytes() for case in one] == [case.inputs["x"].tobytes() for case in other[:2]]
    assert len({case.inputs["x"].tobytes() for case in other}) == 3


def test_range_of_sizes_makes_case_of_every_edge(create):
    (method,) = create(dims={"N": "1..3"}).methods
    assert [case.name for case in method.cases] == ["seed0_N-1", "seed0_N-2", "seed0_N-3"]
    assert [case.inputs["x"].shape for case in method.cases] == [(1, 4), (2, 4), (3, 4)]
    with pytest.raises(UsageError, match=r"--dim M: dimension not found in method '"):
        create(dims={"M": "1..3"})


def test_typed_inputs_make_single_case(create):
    (case,) = create(inputs=("1x4xf32=1", "1x4xf32=2 3 4 5"), expected=("1x4xf32=3 4 5 6",)).methods[0].cases
    assert (case.name, case.source) == ("given", "expected (1x4xf32=3 4 5 6)")
    assert (
        create(inputs=("1x4xf32=1", "1x4xf32=2 3 4 5"))
        .methods[0]
        .cases[0]
        .source.startswith("onnx reference evaluator ")
    )


def test_signature_preserves_symbolic_dimensions(create):
    signature = create("whole.npz").methods[0].signature
    assert [spec.shape for spec in signature.inputs] == [("N", 4), ("N", 4)]


def test_bundle_records_origin_reproducibly(create):
    made = create("whole.npz").made
    assert made["model"]["name"] == "add.onnx" and made["target"] == "sim"
    assert create("whole.npz").digest == create("whole.npz").digest


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("uneven.npz", "input 'y' has size 3 in dimension 'N', but input 'x' has size 2"),
        ("half.npz", "input 'y' is missing"),
        ("f64.npz", "input 'x' is 2x4 float64, but the method takes N x 4 float32"),
        ("other.npz", "unknown tensor"),
        ("missing.npz", "no such file"),
        ("add.onnx", "unsupported case file"),
        ("sub=whole.npz", "method 'sub' not found"),
    ],
)
def test_create_rejects_mismatched_case(create, case, message):
    with pytest.raises(UsageError) as caught:
        create("whole.npz", case)
    assert message.replace("N x 4", "Nx4") in caught.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "missing size for dimension 'N'"),
        ({"random": 0}, "no test cases"),
        ({"functions": ("sub",)}, "no function 'sub'"),
        ({"functions": ("test", "main_graph")}, "is compiled separately"),
        ({"rtol": 2.0}, "rtol is 2"),
        ({"references": ("oracle",), "dims": {"N": 1}}, "reference 'oracle' not found"),
        ({"dims": {"M": 1}}, "no dimension 'M'"),
        ({"inputs": ("z=x.npy",)}, "unknown or duplicate tensor 'z'"),
    ],
)
def test_create_rejects_invalid_options(create, options, message):
    with pytest.raises(UsageError) as caught:
        create(**options)
    assert message in caught.value.message


def test_reference_timeout_stops_create(create):
    with pytest.raises(StageTimeout):
        create(inputs=("1x4xf32=1", "1x4xf32=1"), references=("iree-llvm-cpu",), timeout=1e-6)


def test_create_rejects_incomplete_case_directory(create, tmp_path):
    (tmp_path / "folder" / "input_0.npy").rename(tmp_path / "folder" / "input_2.npy")
    with pytest.raises(UsageError, match="missing input_0"):
        create("folder")
    np.save(tmp_path / "folder" / "input_1.npy", np.ones(1))
    with pytest.raises(UsageError, match="duplicate input 1"):
        create("folder")


METHODS = Path(__file__).parents[3] / "executorch_files" / "methods.pte"


@pytest.fixture
def create_of_two(tmp_path: Path, context: RunContext, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bundle]:
    """Makes bundles of a program of two methods; cases of them are both.npz and forward.npz."""
    monkeypatch.chdir(tmp_path)
    x, image = np.ones(3, F32), np.ones((2, 4), F32)
    np.savez(tmp_path / "both.npz", input0=x, input1=x, output0=x + x, output1=x)
    np.savez(tmp_path / "forward.npz", input0=image, output0=np.ones((2, 3), F32))

    def call(*cases: str, **more: Any) -> Bundle:
        request = Request(METHODS, more.pop("functions", ()), Options(runtime="executorch", **more), cases)
        return create_bundle(request, choose(), context, connect=lambda: pytest.fail("no board is needed"))

    return call


def cases_of(made: Bundle) -> dict[str, list[str]]:
    return {method.name: [case.name for case in method.cases] for method in made.methods}


def test_bundle_contains_every_method(create_of_two):
    made = create_of_two("both=both.npz", "forward=forward.npz")
    assert cases_of(made) == {"both": ["both"], "forward": ["forward"]}
    # No reference can run the other method: it has no case and needs none.
    assert cases_of(create_of_two("both=both.npz")) == {"both": ["both"], "forward": []}
    assert cases_of(create_of_two("both=both.npz", functions=("both",))) == {"both": ["both"]}
    with pytest.raises(UsageError, match="method 'half' not found"):
        create_of_two("half=both.npz")


def test_unnamed_case_belongs_to_main_method(create_of_two):
    assert cases_of(create_of_two("forward.npz")) == {"forward": ["forward"]}
    given = {"inputs": ("2x4xf32=1",), "expected": ("2x3xf32=1",)}
    assert cases_of(create_of_two(**given)) == {"forward": ["given"]}


@pytest.mark.parametrize("text", ["module {}", "func.func private @a() { return }"])
def test_create_rejects_module_without_functions(context: RunContext, tmp_path: Path, text: str) -> None:
    (tmp_path / "none.mlir").write_text(text)
    with pytest.raises(ImportFailed, match=r"none\.mlir has no public function"):
        create_bundle(Request(tmp_path / "none.mlir", (), Options()), choose(), context, connect=pytest.fail)


def refuse(*_: Any, **__: Any) -> None:
    raise ImportFailed("the converter changed output sum", stage="import")


@pytest.mark.ci
@pytest.mark.parametrize("case", ["whole.npz", "asks.npz"])
def test_wrong_rewrite_stops_create(create, monkeypatch, case):
    monkeypatch.setattr("hil.controller.workloads.bundles.create.check_rewrites", refuse)
    assert create(case).methods
    with pytest.raises(ImportFailed, match="the converter changed output sum"):
        create(case, runtime="iree", dims={"N": 2})


@pytest.mark.parametrize("given", [{"rtol": 1e-3}, {"atol": 1e-3}, {"accept": ("cosine>=0.9",)}])
def test_given_tolerance_skips_control_measurement(create, monkeypatch, given):
    monkeypatch.setattr("hil.controller.workloads.bundles.create.measure_control", refuse)
    assert not create("asks.npz", arithmetic="float16", **given).methods[0].cases[0].control
    for others in ({}, {"accept": ("other: cosine>=0.9",)}):
        with pytest.raises(ImportFailed):
            create("asks.npz", arithmetic="float16", **others)


@pytest.fixture
def decoder(tmp_path: Path) -> dict[str, Any]:
    """Save a decoder that adds a constant input to its logits. Return the options to generate tokens with it."""
    model = onnx.load(save_summing_model(tmp_path / "add.onnx"))
    model.graph.node[-1].output[0] = "plain"
    model.graph.node.append(helper.make_node("Add", ["plain", "bias"], ["logits"]))
    model.graph.input.append(helper.make_tensor_value_info("bias", FLOAT, [VOCABULARY]))
    onnx.save(model, tmp_path / "add.onnx")
    np.save(tmp_path / "bias.npy", np.arange(VOCABULARY, dtype=F32))
    (tmp_path / "spec.toml").write_text("steps = 1\n[[prompt]]\nname = 'one'\ntokens = [1, 2]\nforced = [3]\n")
    return {"generate": tmp_path / "spec.toml", "inputs": ("bias=bias.npy",)}


def test_calls_of_decoder_have_given_constant_inputs(create, decoder):
    (method,) = create(**decoder).methods
    assert [case.name for case in method.cases] == ["one-prompt-0", "one-step-1"]
    assert all(case.inputs["bias"].tolist() == list(range(VOCABULARY)) for case in method.cases)


def test_calls_of_decoder_refuse_expected_outputs(create, decoder):
    with pytest.raises(UsageError, match="--generate does not support --expected"):
        create(**decoder, expected=("bias.npy",))
