"""The ExecuTorch compiler: programs, delegation counts and errors."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from rich.console import Console
from support.executorch_programs import NETS, Residual, export, save_pt2

import hil
from hil.controller.backends.compilers import compile_model
from hil.controller.backends.compilers.executorch import count_delegated
from hil.controller.backends.compilers.executorch_reasons import PartitionReasons
from hil.controller.models.importers import import_model
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.print_case import print_case
from hil.controller.pipeline.records.record import record_case
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.core.results import Artifact, Outcome
from hil.errors import CompileFailed, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter emits many warnings


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    with Isolated(1) as isolated:
        yield RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return save_pt2(folder / "residual.pt2", export(Residual(), [torch.zeros(NETS["residual"][1])]))


@pytest.fixture
def compiled(context: RunContext, tmp_path: Path) -> Callable[..., Artifact]:
    """Return a function that compiles a program: compiled(path, *flags, **more)."""

    def call(path: Path, *flags: str, **more: Any) -> Artifact:
        model = import_model(path, isolated=context.isolated, cache=context.cache)
        settings = {"runtime": "executorch", "recompute": False, "debug_ir": None, **more}
        return compile_model(
            model,
            compiler="executorch",
            flags=flags,
            cache=context.cache,
            isolated=context.isolated,
            timeout=600,
            log=tmp_path / "log",
            **settings,
        )

    return call


def test_compiled_program_passes_and_reports_delegation(context: RunContext, residual: Path):
    with hil.connect("sim") as board:
        case = hil.run(residual, board, context=context, runtime="executorch")
    assert case, (case.reason, case.error)
    assert case.references[0].source.startswith("torch-eager")
    notes = case.artifact.notes
    assert notes["delegation"]["backends"] == ["XnnpackBackend"]
    assert notes["delegation"]["delegated"]["aten.convolution.default"] == 3
    assert notes["program_bytes"] == case.artifact.files["main.pte"].stat().st_size
    assert notes["lower_s"] > 0
    record = record_case(case, {})
    assert record.artifact.notes == notes
    shown = io.StringIO()
    print_case(Console(file=shown, width=200), record)
    assert f"compiled     {notes['text']}" in shown.getvalue()


def test_delegation_counts_match_executorch_tool(compiled, residual: Path):
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.devtools.backend_debug import get_delegation_info
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(torch.export.load(residual), partitioner=[XnnpackPartitioner()])
    stock = get_delegation_info(edge.exported_program().graph_module)
    moved = stock.delegation_by_operator["getitem"]  # not counted as work
    counts = compiled(residual).notes["delegation"]
    assert sum(counts["delegated"].values()) == stock.num_delegated_nodes - moved.delegated
    assert sum(counts["undelegated"].values()) == stock.num_non_delegated_nodes - moved.non_delegated


class Refused(torch.nn.Module):
    """Operators that XNNPACK does not take, for different reasons."""

    def forward(self, x: Any) -> Any:
        return torch.erf(torch.softmax(torch.relu(x), 0)), x.to(torch.int64) + 1


def test_run_reports_why_nodes_were_not_delegated(context: RunContext, tmp_path: Path):
    path = save_pt2(tmp_path / "refused.pt2", export(Refused(), [torch.ones(3, 4)]))
    with hil.connect("sim") as board:
        case = hil.run(path, board, context=context, runtime="executorch")
        assert case.outcome is Outcome.PASS
        (delegated, portable) = case.result.provenance["placement"]
        assert delegated["reasons"] == []
        reasons = {reason["text"]: (reason["nodes"], reason["names"]) for reason in portable["reasons"]}
        assert reasons.pop("dim must be the last dim, got dim = 0 for tensor of rank 2") == (1, ["aten::_softmax.out"])
        assert reasons.pop("XNNPACK's partitioner does not support this operator") == (1, ["aten::erf.out"])
        assert reasons.pop("invalid dtype")[0] == 2
        assert not reasons
        # A program that hil did not compile contains no reasons.
        program = case.artifact.files["main.pte"]
        expected = dict(zip(("output0", "output1"), case.result.outputs.values(), strict=True))
        alone = hil.run(program, board, context=context, runtime="executorch", expected=expected)
        assert all(part["reasons"] == [] for part in alone.result.provenance["placement"])


def test_partition_reasons_reads_messages_of_vulkan(caplog):
    caplog.set_level(logging.INFO)  # the partitioner sets this level of the root logger
    with PartitionReasons() as reasons:
        line = "[Vulkan Partitioner] Due to [no operator implementation], skipping aten_erf_default: F32 = erf( ...)"
        logging.getLogger().info(line)
    logging.getLogger().warning(line.replace("erf_default", "other"))
    assert reasons.by_node == {"aten_erf_default": "no operator implementation"}


def test_delegation_counts_include_operator_namespace():
    from executorch.exir.dialects._ops import ops

    graph = torch.fx.Graph()
    graph.call_function(torch.ops.aten.scalar_tensor.default, (1.0,))
    graph.call_function(ops.edge.aten.add.Tensor, (1.0, 2.0))
    counts = count_delegated(torch.fx.GraphModule(torch.nn.Module(), graph))
    assert counts["undelegated"] == {"aten.add.Tensor": 1, "aten.scalar_tensor.default": 1}


def test_portable_backend_caches_notes_without_delegation(compiled, residual: Path, tmp_path: Path):
    first = compiled(residual, "--backend=portable", debug_ir=tmp_path / "ir")
    assert first.notes["delegation"]["backends"] == []
    assert first.notes["text"].startswith("delegated 0 of ")
    assert "aten_convolution_default" in (tmp_path / "ir" / "lowered.txt").read_text()
    again = compiled(residual, "--backend=portable")
    assert again.cached
    assert again.notes == first.notes
    assert again.digests == first.digests


def test_compiler_excludes_mutated_inputs_from_outputs(context: RunContext, tmp_path: Path):
    """ExecuTorch returns a mutated input in place of the first output; PyTorch does not."""

    class Changing(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            x.add_(y)
            y.mul_(2)
            return {"a": x * 2, "b": y + 1}

    path = save_pt2(tmp_path / "changing.pt2", export(Changing(), [torch.zeros(2, 3), torch.zeros(2, 3)]))
    with hil.connect("sim") as board:
        for backend in ("xnnpack", "portable"):
            flags = (f"--backend={backend}",)
            case = hil.run(path, board, context=context, runtime="executorch", compile_flags=flags, iterations=3)
            assert case, (case.reason, case.error)


class Erf(torch.nn.Module):
    """XNNPACK takes the operators around erf, or none."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.alone = alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.erf(x if self.alone else torch.sigmoid(x * 2) + x)


def test_run_reports_unused_backend_as_fallback(context: RunContext, tmp_path: Path):
    alone, within = (
        save_pt2(tmp_path / f"{name}.pt2", export(Erf(alone=name == "alone"), [torch.ones(4)]))
        for name in ("alone", "within")
    )
    with hil.connect("sim") as board:

        def run(path: Path, *flags: str, **more: Any) -> Case:
            return hil.run(path, board, context=context, runtime="executorch", compile_flags=flags, **more)

        case = run(alone, "--backend=xnnpack")
        assert case.outcome is Outcome.FALLBACK
        assert case.reason == "1 of 1 node ran on portable, not on XnnpackBackend"
        assert [part["device"] for part in case.result.provenance["placement"]] == ["portable"]
        for flags in ((), ("--backend=xnnpack,portable",), ("--backend=portable",)):
            assert run(alone, *flags).outcome is Outcome.PASS
        assert run(alone, no_fallback=True).outcome is Outcome.FALLBACK
        case = run(within, "--backend=xnnpack")
        assert case.outcome is Outcome.PASS
        assert "ran on portable, not on XnnpackBackend" in case.result.provenance["elsewhere"]
        assert "aten::erf.out" in case.result.provenance["elsewhere"]
        assert run(within, "--backend=xnnpack", no_fallback=True).outcome is Outcome.FALLBACK


def test_compiler_explains_lowering_failure(compiled, tmp_path: Path):
    class Complex(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.view_as_real(torch.view_as_complex(x) * 1j)

    path = save_pt2(tmp_path / "complex.pt2", export(Complex(), [torch.ones(3, 2)]))
    with pytest.raises(CompileFailed, match=r"ExecuTorch cannot lower complex\.pt2: ") as error:
        compiled(path)
    assert error.value.detail


@pytest.mark.parametrize(
    ("flags", "more", "said", "hint"),
    [
        (["--backend=xnnpak"], {}, "backend 'xnnpak' not found", "did you mean 'xnnpack'?"),
        (["--quantize=int8"], {}, "unsupported flag '--quantize=int8'", "expected --backend=NAME"),
        ([], {"runtime": "iree"}, "requires a .pt2 file and the runtime executorch, got pt2 and", "torch.export.save"),
    ],
)
def test_compiler_rejects_invalid_flags_and_runtime(
    compiled, residual: Path, flags: list[str], more: dict[str, Any], said: str, hint: str
):
    with pytest.raises(UsageError) as error:
        compiled(residual, *flags, **more)
    assert said in error.value.message
    assert hint in error.value.hint
