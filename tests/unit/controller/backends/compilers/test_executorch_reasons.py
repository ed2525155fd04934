"""The reasons of ExecuTorch's partitioners belong to operators, and are never invented."""

from __future__ import annotations

import pytest

from hil.controller.backends.compilers import executorch_reasons
from hil.controller.backends.compilers.executorch_reasons import explain_nodes

NODES = [("aten_add_tensor", "aten.add.Tensor"), ("aten_add_1", "aten.add.Tensor"), ("aten_erf", "aten.erf.default")]
WHY = {"aten_add_tensor": "invalid\n dtype", "aten_mul": "of another node"}


def test_explain_nodes_groups_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executorch_reasons, "_list_known_operators", lambda backend: frozenset(["add.Tensor"]))
    assert explain_nodes(NODES, WHY, "xnnpack") == {
        "aten.add.Tensor": {"invalid dtype": 1, "reason not reported by ExecuTorch": 1},
        "aten.erf.default": {"XNNPACK's partitioner does not support this operator": 1},
    }


def test_explain_nodes_of_other_backends_only_repeats_messages() -> None:
    assert explain_nodes(NODES[:1], WHY, "vulkan") == {"aten.add.Tensor": {"invalid dtype": 1}}
    assert explain_nodes(NODES, {}, "portable") == {}
