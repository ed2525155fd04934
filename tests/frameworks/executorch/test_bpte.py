"""Bundled programs: hil runs those of stock ExecuTorch, and stock ExecuTorch verifies those of hil."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from support.executorch_programs import Conv, Linear, export, save_bpte, save_pt2, stock_verdict

import hil
from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.controller.backends.references import read_expected
from hil.controller.devices.board import Board
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.bpte import read_bpte, write_bpte
from hil.core.results import Artifact, RunResult
from hil.core.tensors import TensorSpec
from hil.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter emits many warnings

X = torch.linspace(-1, 1, 8).reshape(2, 4)
Outputs = list["torch.Tensor"]


class Mixed(torch.nn.Module):
    """Return floats and large integers."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x / 3, (x * 1e6).to(torch.int64)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    with Isolated(1) as isolated:
        yield RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture(scope="module")
def board() -> Iterator[Board]:
    with hil.connect("sim", runtime="executorch") as connected:
        yield connected


@pytest.fixture(scope="module")
def judged(context: RunContext, board: Board) -> Callable[[Bundle, Path], list[bool]]:
    """Return a function that judges each case of a bundle on the simulator."""

    def judge(bundle: Bundle, folder: Path) -> list[bool]:
        place = folder / "program"
        place.mkdir(parents=True)
        artifact = bundle.extract(place)
        board.push(artifact, lambda sent, total: None)
        verdicts = []
        (method,) = bundle.methods
        with board.load(artifact, timeout=120) as program:
            for given in method.cases:
                result, _ = program.run(given.inputs)
                expected = {"expected": dict(given.expected_outputs), "rtol": given.rtol, "atol": given.atol}
                verdicts.append(bool(_concluded(result, expected, context)))
        return verdicts

    return judge


def _concluded(result: RunResult, expected: dict[str, Any], context: RunContext) -> Case:
    references = (read_expected(expected["expected"], None),)
    case = Case("case", Path("case"), Options(**expected), Path(), result=result, references=references)
    return Runner(context).judge(case)


def test_stock_bundle_runs_and_round_trips(context, judged, tmp_path: Path):
    module = Linear()
    cases = [([x], list(module(x))) for x in (X, X * 2, -X)]
    stock = save_bpte(tmp_path / "stock.bpte", export(module, [X]), cases)
    bundle = read_bpte(stock, context=context)
    (method,) = bundle.methods
    assert (method.name, len(method.cases)) == ("forward", 3)
    assert judged(bundle, tmp_path) == [stock_verdict(stock, case) for case in range(3)] == [True] * 3
    again = tmp_path / "again.bpte"
    write_bpte(bundle, again, context=context)
    assert again.read_bytes() == stock.read_bytes()


def test_stock_executorch_verifies_hil_bundle(context, board, tmp_path: Path):
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = save_pt2(tmp_path / "conv.pt2", export(Conv(), [x]))
    case = hil.run(model, board, {"x": x.numpy()}, context=context, runtime="executorch")
    assert case, (case.reason, case.error)
    right = case.references[0].outputs
    wrong = {name: value + 1 for name, value in right.items()}
    cases = [MethodTestCase(case.inputs, right), MethodTestCase(case.inputs, wrong, name="wrong")]
    bundle = Bundle.create(case.artifact, [MethodTestSuite("forward", cases)])
    write_bpte(bundle, tmp_path / "conv.bpte", context=context)
    assert stock_verdict(tmp_path / "conv.bpte", 0, 1e-4, 1e-4)
    assert not stock_verdict(tmp_path / "conv.bpte", 1, 1e-4, 1e-4)


def test_read_bpte_handles_channels_last_cases(context, judged, tmp_path: Path):
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    with torch.no_grad():
        y = Conv()(x)
    stock = save_bpte(
        tmp_path / "last.bpte", export(Conv(), [x]), [([x], [y]), ([x], [y + 1]), ([x], [y.contiguous()])]
    )
    bundle = read_bpte(stock, context=context)
    (method,) = bundle.methods
    np.testing.assert_array_equal(method.cases[0].inputs["input0"], x.numpy())
    np.testing.assert_array_equal(method.cases[2].expected_outputs["output0"], y.numpy())
    loose = replace(method, cases=tuple(replace(case, rtol=1e-4, atol=1e-4) for case in method.cases))
    assert judged(replace(bundle, methods=(loose,)), tmp_path) == [True, False, True]


def test_verdicts_match_stock_verifier(context, judged, tmp_path: Path):
    class Third(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 3

    x = X + 3
    y = x / 3
    changed = {
        "as it is": y,
        "one element": _at(y, 0, 1.0),
        "not a number": _at(y, 0, float("nan")),
        "infinite": _at(y, 0, float("inf")),
        "within the relative tolerance": y * (1 + 0.9e-5),
        "beyond it": y * (1 + 1.2e-5),
        "all zero": y * 0,
        "other signs": -y,
    }
    stock = save_bpte(tmp_path / "third.bpte", export(Third(), [x]), [([x], [one]) for one in changed.values()])
    found = [stock_verdict(stock, case) for case in range(len(changed))]
    assert [name for name, agrees in zip(changed, found, strict=True) if agrees] == [
        "as it is",
        "within the relative tolerance",
    ]
    assert judged(read_bpte(stock, context=context), tmp_path) == found


def test_integer_mismatch_fails_in_mixed_outputs(context, judged, tmp_path: Path):
    x = X + 3
    fraction, integer = Mixed()(x)
    assert integer.abs().max() > 1e6
    stock = save_bpte(
        tmp_path / "mixed.bpte", export(Mixed(), [x]), [([x], [fraction, integer]), ([x], [fraction, integer + 1])]
    )
    assert [stock_verdict(stock, case) for case in (0, 1)] == [True, False]
    assert judged(read_bpte(stock, context=context), tmp_path) == [True, False]


def test_expected_nan_matches_nan(context, judged, tmp_path: Path):
    class Log(torch.nn.Module):
        def forward(self, x):
            return torch.log(x)

    expected = torch.log(X)
    assert expected.isnan().any()
    stock = save_bpte(tmp_path / "log.bpte", export(Log(), [X]), [([X], [expected]), ([X], [expected.nan_to_num()])])
    assert [stock_verdict(stock, case) for case in (0, 1)] == [True, False]
    assert judged(read_bpte(stock, context=context), tmp_path) == [True, False]


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        (
            [torch.zeros(4, 2)],
            lambda: list(Linear()(X)),
            "input 'input0' is 4x2 float32, but the method takes 2x4 float32",
        ),
        ([torch.zeros(2, 5)], lambda: list(Linear()(X)), "input 'input0' is 2x5 float32"),
        (
            [X],
            lambda: [Linear()(X)[0].T.contiguous(), X + 1],
            "output 'output0' is 3x2 float32, but the method returns",
        ),
        ([X], lambda: [], "0 outputs, but the method has 2"),
    ],
)
def test_read_bpte_rejects_mismatched_cases(
    context, tmp_path: Path, inputs: Outputs, outputs: Callable[[], Outputs], said: str
):
    stock = save_bpte(tmp_path / "wrong.bpte", export(Linear(), [X]), [([X], list(Linear()(X))), (inputs, outputs())])
    with pytest.raises(UsageError, match="case 1") as error:
        read_bpte(stock, context=context)
    assert said in error.value.message


def test_read_bpte_rejects_changed_constant_input(context, tmp_path: Path):
    class Scaled(torch.nn.Module):
        def forward(self, x, factor: int):
            return x * factor

    stock = save_bpte(tmp_path / "scaled.bpte", export(Scaled(), [X, 3]), [([X, 3], [X * 3]), ([X, 4], [X * 4])])
    with pytest.raises(UsageError, match="case 1: input 1 is 4, expected the constant 3"):
        read_bpte(stock, context=context)


def test_write_bpte_rejects_mismatched_methods(context, tmp_path: Path):
    stock = read_bpte(
        save_bpte(tmp_path / "a.bpte", export(Linear(), [X]), [([X], list(Linear()(X)))]), context=context
    )
    (tmp_path / "program").mkdir()
    artifact, (method,) = stock.extract(tmp_path / "program"), stock.methods
    case = MethodTestCase(method.cases[0].inputs, method.cases[0].expected_outputs)
    other = Bundle.create(artifact, [MethodTestSuite("other", [case])], signatures={"other": method.signature})
    with pytest.raises(UsageError, match="no method 'other'"):
        write_bpte(other, tmp_path / "b.bpte", context=context)
    one = Signature(method.signature.inputs, method.signature.outputs[:1])
    short = MethodTestCase(case.inputs, [method.cases[0].expected_outputs["output0"]])
    fewer = Bundle.create(artifact, [MethodTestSuite("forward", [short])], signatures={"forward": one})
    with pytest.raises(UsageError, match="has 1 inputs and 2 outputs, but the bundle has 1 and 1"):
        write_bpte(fewer, tmp_path / "b.bpte", context=context)


def test_write_bpte_rejects_other_runtimes(context, tmp_path: Path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"x")
    spec = (TensorSpec("x", "float32", (1,)),)
    artifact = Artifact("iree", file.name, {file.name: file}, {}, "main", "-", inputs=spec, outputs=spec)
    one = np.ones(1, np.float32)
    bundle = Bundle.create(artifact, [MethodTestSuite("main", [MethodTestCase([one], [one])])])
    with pytest.raises(UsageError, match="the bundle has a program for iree"):
        write_bpte(bundle, tmp_path / "a.bpte", context=context)


def _at(y: torch.Tensor, index: int, value: float) -> torch.Tensor:
    changed = y.clone()
    changed.reshape(-1)[index] = value
    return changed


def test_bpte_includes_external_weights(context, board, judged, tmp_path):
    from executorch.devtools import BundledProgram
    from executorch.devtools.bundled_program import config
    from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer
    from executorch.exir import ExecutorchBackendConfig, to_edge

    module = Linear().eval()
    exported = torch.export.export(module, (X,))
    program = to_edge(exported).to_executorch(ExecutorchBackendConfig(external_constants=True))
    program.write_tensor_data_to_file(str(tmp_path))
    suite = config.MethodTestSuite("forward", [config.MethodTestCase([X], list(module(X)))])
    path = tmp_path / "outside.bpte"
    path.write_bytes(serialize_from_bundled_program_to_flatbuffer(BundledProgram(program, [suite])))
    made = read_bpte(path, context=context)
    assert sorted(made.program.files) == ["_default_external_constant.ptd", "outside.pte"]
    assert judged(made, tmp_path / "judged") == [True]
    write_bpte(made, tmp_path / "again.bpte", context=context)
    assert (tmp_path / "again.ptd").read_bytes() == (tmp_path / "_default_external_constant.ptd").read_bytes()
    assert read_bpte(tmp_path / "again.bpte", context=context).program.files.keys() == {"again.pte", "again.ptd"}
    (tmp_path / "_default_external_constant.ptd").unlink()
    (tmp_path / "again.ptd").unlink()
    with pytest.raises(UsageError, match=r"in a \.ptd file"):
        read_bpte(path, context=context)
