"""ExecuTorch backends: lookup, rejected flags, and boards without a required backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hil.controller.devices.board import Board
from hil.controller.models.executorch_backends import check_recipe_inputs, load_executorch_backends, pick_backend
from hil.controller.models.flows.flow_registry import check_flow, load_flows
from hil.core.results import Artifact
from hil.errors import ErrorCode, NotRun, PartMissing, StageError, UsageError


def test_executorch_flows_use_valid_backend_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNN_SDK_ROOT", "/opt/qnn")
    for name, flow in load_flows().items():
        if flow.runtime != "executorch":
            continue
        check_flow(flow, name)
        (backend,) = [flag.removeprefix("--backend=") for flag in flow.compile_flags if flag.startswith("--backend=")]
        backend = backend.partition(",")[0]
        options = dict(flag[2:].split("=", 1) for flag in flow.compile_flags if not flag.startswith("--backend="))
        pick_backend(backend).given(backend, options)
        if flow.recipe:
            assert flow.settings.get("backend", "xnnpack") == backend
            assert pick_backend(backend).quantizer is not None


def test_backend_rejects_unknown_flags_and_missing_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    with pytest.raises(UsageError, match="did you mean 'vulkan'"):
        pick_backend("vulcan")
    with pytest.raises(UsageError, match="unsupported flag '--devise=GPU'"):
        pick_backend("openvino").given("openvino", {"devise": "GPU"})
    with pytest.raises(UsageError, match="QNN_SDK_ROOT is not set"):
        pick_backend("qnn").given("qnn", {})
    with pytest.raises(UsageError, match="webgpu has no quantizer"):
        check_recipe_inputs({"backend": "webgpu", "options": {}})
    with pytest.raises(UsageError, match="expected strings, got "):
        check_recipe_inputs({"backend": "xnnpack", "options": {"bits": 8}})
    assert {"xnnpack", "portable"} <= load_executorch_backends().keys()


@pytest.mark.parametrize(
    ("needs", "code", "raised"),
    [
        (["VulkanBackend"], ErrorCode.BACKEND_MISSING, NotRun),
        (["VulkanBackend"], ErrorCode.NONE, PartMissing),  # operators are missing
        ([], ErrorCode.BACKEND_MISSING, PartMissing),
    ],
)
def test_load_skips_program_for_other_backend(needs: list[str], code: ErrorCode, raised: type[StageError]) -> None:
    def load_program(*_: object, **__: object) -> None:
        raise PartMissing("main.pte delegates to VulkanBackend, which this board's ExecuTorch lacks", code=code)

    board = SimpleNamespace(config=SimpleNamespace(devices={}), client=SimpleNamespace(load_program=load_program))
    artifact = Artifact("executorch", "main.pte", {}, {}, "", "executorch 1", notes={"needs": needs})
    with pytest.raises(StageError) as error:
        Board.load(board, artifact)
    assert type(error.value) is raised
    assert error.value.outcome == ("SKIP" if raised is NotRun else "LOAD_ERROR")
