"""Search for the wrong call of a generation: options of the prompts, and the call to bisect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.contexts import context_without_workers
from support.step_programs import logits_of, save_summing_model

from hil.compare.generation.results import FaultKind, GenerationFault, GenerationVerdict
from hil.controller.analysis.bisect import generation
from hil.controller.analysis.bisect.generation import find_wrong_call
from hil.controller.models.importers.onnx import make_value_spec
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.decoding.generation import begin_generation
from hil.controller.pipeline.settings.options import Options
from hil.core.results import Model, Outcome
from hil.core.steps import OUTPUTS

SPEC = """
steps = 2
[[prompt]]
name = "one"
tokens = [1, 4, 2]
forced = [5, 0]
[[prompt]]
name = "two"
tokens = [3, 3]
forced = [5, 0]
"""


class FakeRunner:
    """Runs prompts with the outcomes and faults of ``verdicts``."""

    def __init__(self, folder: Path, verdicts: dict[str, GenerationVerdict]) -> None:
        import onnx

        self.context = context_without_workers(folder / "cache")
        self.verdicts = verdicts
        path = save_summing_model(folder / "m.onnx")
        graph = onnx.load(path).graph
        inputs, outputs = (tuple(map(make_value_spec, values)) for values in (graph.input, graph.output))
        self.model = Model("m", "onnx", path, {"m.onnx": path}, "digest", inputs=inputs, outputs=outputs)

    def begin(self, path: Path, options: Options, folder: Path, *, name: str) -> Case:
        return begin_generation(Case(name, path, options, folder, model=self.model), self.context)

    def run(self, cases: Sequence[Case], *_: Any, **__: Any) -> Iterator[Case]:
        (case,) = cases
        assert case.inputs is not None
        tokens = [*case.inputs["prompt"], *case.inputs["forced"]]
        chosen = [5, 0, 1]
        values = (logits_of(tokens), range(len(tokens)), chosen)
        judged = self.verdicts.get(case.name, GenerationVerdict(Outcome.PASS, "", (), 0.0, 0.0))
        result: Any = SimpleNamespace(outputs=dict(zip(OUTPUTS, values, strict=True)))
        yield replace(case, result=result, generation=judged, outcome=judged.outcome, reason=judged.reason)


def find_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verdicts: dict[str, GenerationVerdict], **options: Any
) -> tuple[Any, str]:
    """Return the first position of the call to bisect, and its description."""
    monkeypatch.setattr(generation, "make_call_inputs", lambda case, call, context, log: call.begin)
    (folder / "spec.toml").write_text(SPEC)
    runner: Any = FakeRunner(folder, verdicts)
    nothing: Any = SimpleNamespace()
    chosen = Options(generate=folder / "spec.toml", **options)
    return find_wrong_call(runner.model.path, chosen, folder, runner, nothing, nothing, ())


def fail(reason: str, fault: GenerationFault | None = None, outcome: Outcome = Outcome.FAIL) -> GenerationVerdict:
    return GenerationVerdict(outcome, reason, (), 0.0, 0.0, fault)


def test_prompts_run_without_tolerances_and_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = {"rtol": 0.1, "atol": 0.1, "references": ("onnxruntime",), "allow_unstable": ("x",)}
    assert find_call(tmp_path, monkeypatch, {}, **options)[0] == 3


def test_right_prompts_give_last_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = find_call(tmp_path, monkeypatch, {})
    assert found == (3, "all prompts passed; hil bisects the last call of prompt two, position 3")


def test_fault_gives_call_of_its_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fault = GenerationFault(FaultKind.LAYER, 1, 0)
    found = find_call(tmp_path, monkeypatch, {"one": fail("layer 0", fault), "two": fail("other")})
    assert found == (0, "hil bisects the call of prompt one at positions 0 to 2: layer 0")


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.UNSTABLE])
def test_failure_without_fault_gives_last_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome):
    found = find_call(tmp_path, monkeypatch, {"one": fail("top1 0.2 is below 0.9", outcome=outcome)})
    text = "prompt one has no wrong position; hil bisects the last call, position 4: top1 0.2 is below 0.9"
    assert found == (4, text)
