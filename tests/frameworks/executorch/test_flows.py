"""ExecuTorch flows against the given program and the original model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from support.executorch_programs import NETS, export, save_pt2

import hil
from hil.controller.devices.board import Board
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.flow_registry import load_flow, load_flows
from hil.controller.models.flows.quanta import compute_quantum_atol
from hil.controller.models.flows.recipe import apply_recipe
from hil.controller.models.importers import import_model
from hil.controller.pipeline.case import Case
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.core.results import Outcome
from hil.errors import ImportFailed, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter emits many warnings

STATIC = "xnnpack-static-int8-per-channel"


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    with Isolated(1) as isolated:
        yield RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture(scope="module")
def board() -> Iterator[Board]:
    with hil.connect("sim") as connected:
        yield connected


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("nets")
    return {
        name: save_pt2(folder / f"{name}.pt2", export(module(), [torch.zeros(shape)]))
        for name, (module, shape) in NETS.items()
    }


@pytest.fixture
def take(context: RunContext, board: Board, tmp_path: Path) -> Callable[[Flow, Path], Case]:
    """Return a function that runs a model in a flow and returns the finished case."""

    def call(flow: Flow, model: Path) -> Case:
        log = tmp_path / "log"
        path = apply_recipe(flow, model, [], context, log)
        atol = flow.atol if flow.quanta is None else compute_quantum_atol(flow, path, context, log)
        return hil.run(
            path,
            board,
            context=context,
            runtime=flow.runtime,
            compile_flags=flow.compile_flags,
            plain_model=model if path != model else None,
            min_sqnr_db=flow.min_sqnr_db,
            rtol=flow.rtol,
            atol=atol,
        )

    return call


@pytest.mark.parametrize(
    ("name", "net"),
    [
        *((name, "mlp") for name in load_flows() if name.startswith(("executorch-", "xnnpack"))),
        (STATIC, "residual"),
        (STATIC, "attention"),
    ],
)
def test_flow_passes_against_both_models(take, nets, name: str, net: str):
    flow = load_flow(name)
    case = take(flow, nets[net])
    assert case, (case.reason, case.error, case.error and case.error.detail)
    notes = case.artifact.notes
    assert bool(notes["delegation"]["backends"]) is (name != "executorch-portable")
    if not flow.recipe:
        assert "quantise_s" not in notes
        return
    assert notes["quantise_s"] > 0
    assert any("quantize" in name for name in notes["delegation"]["delegated"])
    (beside_plain,) = case.plain_verdict.outputs
    assert flow.min_sqnr_db < beside_plain.sqnr_db < 100  # near the plain model but different


ELSEWHERE = {
    "vulkan": "VulkanBackend",
    "vulkan-static-int8-per-channel": "VulkanBackend",
    "webgpu": "VulkanBackend",
    "coreml": "CoreMLBackend",
    "arm-tosa-fp": "TOSABackend",
    "arm-tosa-int": "TOSABackend",
    "arm-ethos-u55": "EthosUBackend",
    "arm-ethos-u85": "EthosUBackend",
    "cortex-m": "cortex_m::",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_flow_for_other_hardware_compiles_and_skips_run(take, nets, name: str):
    if name.startswith(("arm-", "cortex-m")):
        pytest.importorskip("tosa_serializer")
    case = take(load_flow(name), nets["mlp"])
    assert case.outcome is Outcome.SKIP, (case.reason, case.error)
    assert ELSEWHERE[name] in case.error.message
    assert "compiled, but not run" in case.error.message
    notes = case.artifact.notes
    assert notes["program_bytes"] > 0
    assert notes["lower_s"] > 0
    if name != "cortex-m":  # cortex-m uses kernels, not a delegate
        assert notes["delegation"]["backends"] == [ELSEWHERE[name]]
        assert sum(notes["delegation"]["delegated"].values()) > sum(notes["delegation"]["undelegated"].values())


@pytest.mark.parametrize("name", ["openvino", "openvino-int8"])
def test_openvino_flow_passes_with_openvino_installed(take, nets, name: str):
    pytest.importorskip("openvino")
    case = take(load_flow(name), nets["residual"])
    assert case, (case.reason, case.error, case.error and case.error.detail)
    assert case.result.provenance["placement"][0]["device"] == "OpenvinoBackend"


def test_flow_reports_missing_vendor_sdk(take, nets, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    with pytest.raises(UsageError, match="QNN_SDK_ROOT is not set"):
        take(load_flow("qnn-8a8w"), nets["mlp"])


def test_quantized_program_preserves_signature_and_open_dims(context, tmp_path: Path):
    module, shape = NETS["residual"]
    dim = torch.export.Dim("n", min=1, max=8)
    path = save_pt2(tmp_path / "open.pt2", export(module(), [torch.zeros(2, *shape[1:])], ({0: dim},)))
    made = apply_recipe(load_flow(STATIC), path, [], context, tmp_path / "log", dims={"image.dim0": 2})
    before, after = (import_model(one, isolated=context.isolated) for one in (path, made))
    assert (after.inputs, after.outputs) == (before.inputs, before.outputs)
    assert after.producer["dims"] == before.producer["dims"]


def test_quantization_explains_failure(context, nets, tmp_path: Path):
    class Plain(torch.nn.Module):
        def forward(self, x):
            return torch.sin(x)

    path = save_pt2(tmp_path / "plain.pt2", export(Plain(), [torch.zeros(4)]))
    with pytest.raises(ImportFailed, match=r"no operators to quantize; operators: aten\.sin"):
        apply_recipe(load_flow(STATIC), path, [], context, tmp_path / "log")
    once = apply_recipe(load_flow(STATIC), nets["mlp"], [], context, tmp_path / "log")
    with pytest.raises(ImportFailed, match="the model is already quantized"):
        apply_recipe(load_flow(STATIC), once, [], context, tmp_path / "log")
