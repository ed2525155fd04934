"""`hil run --generate` on an ExecuTorch program that keeps its cache in a buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from support.executorch_programs import export, save_pte
from support.step_programs import _HEAD, _TABLE, _TURN, save_summing_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter emits many warnings

SPEC = """
steps = 6
reference = "decoder.onnx"
[[prompt]]
tokens = [1, 4, 2]
forced = [5, 0, 3, 2, 6, 1]
"""


class Summing(torch.nn.Module):
    """The decoder of support.step_programs, one token per call."""

    def __init__(self) -> None:
        super().__init__()
        for name, array in (("table", _TABLE), ("head", _HEAD), ("turn", _TURN)):
            self.register_buffer(name, torch.from_numpy(array))
        self.register_buffer("cache", torch.zeros(16, 4))

    def forward(self, tokens: Any, input_pos: Any) -> Any:
        entry = self.table[tokens[0]] + (input_pos % 5).float()[:, None] * self.turn
        self.cache[input_pos] = entry
        seen = (torch.arange(16) <= input_pos).float()
        return seen[None] @ self.cache @ self.head


@pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [
        ("", "PASS", ""),
        ("argmax:position=5", "FAIL", "sampler, step 3, position 5: token "),
        ("rope:position=5", "FAIL", "logits, step 3, position 5, logits: at position 5 KL"),
    ],
)
def test_generation_names_fault_on_executorch(hil, tmp_path: Path, fault: str, outcome: str, reason: str):
    save_summing_model(tmp_path / "decoder.onnx")
    (tmp_path / "spec.toml").write_text(SPEC)
    examples = [torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)]
    model = save_pte(tmp_path / "decoder.pte", export(Summing(), examples))
    given = ["--fault", fault] if fault else []
    case = hil("run", model, "--generate", tmp_path / "spec.toml", "--runtime-hw-type", "sim", *given, "--json").case
    assert case["outcome"] == outcome and case["reason"].startswith(reason), case["reason"]
