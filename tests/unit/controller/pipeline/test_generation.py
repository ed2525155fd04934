"""Generations in the pipeline: inputs of a case, checks of the board's outputs, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contexts import context_without_workers
from support.step_programs import SummingProgram, logits_of, save_summing_model

from hil.compare.generation.results import GenerationVerdict
from hil.controller.models.generation.spec import GenerateSpec, Prompt, Roles
from hil.controller.models.importers.onnx import make_value_spec
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.decoding import generation
from hil.controller.pipeline.decoding.generation import begin_generation, check_generation
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Options
from hil.core.repetition import Answer, Repetition
from hil.core.results import Model, Outcome, RunResult
from hil.core.stepped_program import SteppedProgram
from hil.core.steps import TURN_END, StepRule, StepsPlan
from hil.core.tensors import TensorSpec
from hil.errors import ProtocolBroken, ReferenceFailed, RunFailed, UsageError

SPEC = """
steps = 3
[[prompt]]
name = "free"
tokens = [1, 4, 2]
[[prompt]]
name = "forced"
tokens = [1, 4, 2]
forced = [5, 0]
"""


def begin(folder: Path, prompt: str = "free", spec: str = SPEC, **options: Any) -> Case:
    import onnx

    (folder / "spec.toml").write_text(spec)
    loaded = onnx.load(save_summing_model(folder / "m.onnx"))
    inputs, outputs = (tuple(map(make_value_spec, values)) for values in (loaded.graph.input, loaded.graph.output))
    path = folder / "m.onnx"
    model = Model("m", "onnx", path, {"m.onnx": path}, "digest", inputs=inputs, outputs=outputs)
    settings = Options(generate=folder / "spec.toml", prompt=prompt, **options)
    context = context_without_workers(folder / "cache")
    return begin_generation(Case("m", path, settings, folder, model=model), context)


def ran(case: Case) -> Case:
    """Return the case with the outputs of a right board."""
    assert case.decoder is not None and case.inputs is not None
    stepped = SteppedProgram(SummingProgram(), case.decoder.plan)
    stepped.bind(list(case.inputs.values()))
    stepped.run()
    names = ("logits", "positions", "tokens", "present.0.key")
    return replace(case, result=RunResult("board", dict(zip(names, stepped.fetch(), strict=True))))


@pytest.mark.parametrize(("prompt", "forced"), [("free", []), ("forced", [5, 0])])
def test_begin_generation_sets_prompts(tmp_path: Path, prompt: str, forced: list[int]):
    case = begin(tmp_path, prompt)
    assert case.inputs is not None
    assert case.inputs["prompt"].tolist() == [1, 4, 2] and case.inputs["forced"].tolist() == forced
    other = case.inputs["other_prompt"].tolist()
    assert other and other != [1, 4, 2]
    assert case.needs_result is (prompt == "free")


def test_begin_generation_uses_only_prompt_without_name(tmp_path: Path):
    case = begin(tmp_path, "", "[[prompt]]\ntokens = [3]\n")
    assert case.inputs is not None and case.inputs["prompt"].tolist() == [3]
    with pytest.raises(UsageError, match="has 2 prompts") as caught:
        begin(tmp_path, "")
    assert caught.value.hint == "set prompt to one of: free, forced"


@pytest.mark.parametrize(
    ("option", "value"),
    [("allow_unstable", ("x",)), ("profile", True), ("rtol", 0.1), ("references", ("onnxruntime",))],
)
def test_begin_generation_rejects_options_without_effect(tmp_path: Path, option: str, value: Any):
    with pytest.raises(UsageError, match="--generate does not support"):
        begin(tmp_path, **{option: value})


def test_begin_generation_rejects_criteria_of_other_outputs(tmp_path: Path):
    assert begin(tmp_path, accept=("logits: top1>=0.5",)).decoder is not None
    with pytest.raises(UsageError, match="unknown output 'present"):
        begin(tmp_path, accept=("present.0.key: sqnr>=40",))


def test_begin_generation_rejects_tokens_outside_vocabulary(tmp_path: Path):
    with pytest.raises(UsageError, match="has token 99999, but the model's vocabulary has"):
        begin(tmp_path, "a", "[[prompt]]\nname = 'a'\ntokens = [99999]\n")


def test_check_generation_names_sampler_that_chooses_unknown_token(tmp_path: Path):
    case = ran(begin(tmp_path))
    assert case.result is not None
    tokens = case.result.outputs["tokens"].copy()
    tokens[1] = 99999
    wrong = replace(case.result, outputs={**case.result.outputs, "tokens": tokens})
    with pytest.raises(RunFailed, match="sampler, step 1: the board chose token 99999"):
        check_generation(replace(case, result=wrong))


@pytest.mark.parametrize(("number", "step"), [(3, 3), (4, 0), (6, 5)])
def test_check_generation_counts_steps_of_all_turns(tmp_path: Path, number: int, step: int):
    """Tokens 0 and 4 are the first of their turns, chosen after the prompt."""
    case = ran(begin(tmp_path, "a", "steps = 3\n[[prompt]]\nname = 'a'\ntokens = [1, 4]\nturn = [{tokens = [2]}]\n"))
    assert case.result is not None
    check_generation(case)
    tokens = case.result.outputs["tokens"].copy()
    tokens[np.flatnonzero(tokens != TURN_END)[number]] = 99999
    wrong = replace(case.result, outputs={**case.result.outputs, "tokens": tokens})
    with pytest.raises(RunFailed, match=f"sampler, step {step}: the board chose token 99999"):
        check_generation(replace(case, result=wrong))


@pytest.mark.parametrize("tokens", [[0], [3], [2, 2], [1, 2, 1]])
def test_begin_generation_makes_different_other_prompt(tmp_path: Path, tokens: list[int]):
    case = begin(tmp_path, "a", f"[[prompt]]\nname = 'a'\ntokens = {tokens}\n")
    assert case.inputs is not None
    other = case.inputs["other_prompt"].tolist()
    assert other and other != tokens and min(other) >= 0


def test_begin_generation_rejects_unknown_prompt(tmp_path: Path):
    with pytest.raises(UsageError, match="has no prompt 'x'") as caught:
        begin(tmp_path, "x")
    assert caught.value.hint == "set prompt to one of: free, forced"


@pytest.mark.parametrize(("steps", "forced", "total"), [(4, [], 0), (9, [1, 2], 0), (5, [], 8), (9, [1] * 5, 8)])
def test_begin_generation_rejects_prompts_longer_than_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, forced: list[int], total: int
):
    found = generation.detect_roles

    def bounded(*arguments: Any) -> Any:
        decoder = found(*arguments)
        return replace(decoder, plan=replace(decoder.plan, bound=7))

    monkeypatch.setattr(generation, "detect_roles", bounded)
    spec = f"steps = {steps}\n[[prompt]]\nname = 'a'\ntokens = [1, 4, 2]\nforced = {forced}\n"
    if not total:
        begin(tmp_path, "a", spec)
        return
    with pytest.raises(UsageError, match="prompt 'a' with its steps needs 8 tokens, but the model's cache has only 7"):
        begin(tmp_path, "a", spec)


@pytest.mark.parametrize("prompt", ["free", "forced"])
def test_check_generation_accepts_right_outputs(tmp_path: Path, prompt: str):
    case = ran(begin(tmp_path, prompt))
    check_generation(case)
    assert case.result is not None
    logits = case.result.outputs["logits"]
    np.testing.assert_array_equal(logits[:3], logits_of([1, 4, 2]))
    last = {"logits": logits[2:], "positions": case.result.outputs["positions"][2:]}
    check_generation(replace(case, result=replace(case.result, outputs={**case.result.outputs, **last})))


def test_check_generation_accepts_end_at_stop_token(tmp_path: Path):
    first = int(np.argmax(logits_of([1, 4, 2])[-1]))
    case = ran(begin(tmp_path, spec=f"stop = [{first}]\n{SPEC}"))
    assert case.result is not None and case.result.outputs["tokens"].tolist() == [first]
    check_generation(case)


@pytest.mark.parametrize("prompt", ["free", "forced"])
def test_check_generation_rejects_missing_steps(tmp_path: Path, prompt: str):
    case = ran(begin(tmp_path, prompt))
    assert case.result is not None
    outputs = {name: array[:-1] if name != "present.0.key" else array for name, array in case.result.outputs.items()}
    with pytest.raises(ProtocolBroken, match=r"for a prompt of 3 tokens and [23] steps"):
        check_generation(replace(case, result=replace(case.result, outputs=outputs)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("logits", lambda array: array[:-1]),
        ("logits", lambda array: array[..., :-1]),
        ("logits", lambda array: array[None]),
        ("logits", lambda array: array.astype(np.complex64)),
        ("logits", lambda array: array.astype(object)),
        ("positions", lambda array: array[:-1]),
        ("positions", lambda array: array + 1),
        ("positions", lambda array: array - 1),
        ("positions", lambda array: array[::-1].copy()),
        ("positions", lambda array: np.zeros_like(array)),
        ("positions", lambda array: array.astype(np.float64)),
        ("positions", lambda array: array[:0]),
        ("tokens", lambda array: array[:0]),
        ("tokens", lambda array: array[:-1]),
        ("tokens", lambda array: np.resize(array, 9)),
        ("tokens", lambda array: array[None]),
        ("present.0.key", lambda array: array[0]),
        ("present.0.key", lambda array: array[..., :-1]),
        ("present.0.key", lambda array: None),
    ],
)
def test_check_generation_rejects_outputs_that_do_not_fit(tmp_path: Path, name: str, change: Any):
    case = ran(begin(tmp_path))
    assert case.result is not None
    outputs = {**case.result.outputs, name: change(case.result.outputs[name])}
    outputs = {name: array for name, array in outputs.items() if array is not None}
    with pytest.raises(ProtocolBroken, match="the board returned"):
        check_generation(replace(case, result=replace(case.result, outputs=outputs)))


@pytest.mark.parametrize("change", [lambda array: array[..., :-1], lambda array: array[..., None]])
def test_check_reference_rejects_other_vocabulary(tmp_path: Path, change: Any):
    result = ran(begin(tmp_path)).result
    assert result is not None
    other = replace(result, outputs={**result.outputs, "logits": change(result.outputs["logits"])})
    with pytest.raises(ReferenceFailed, match="logits of the reference, 6x7 of the board"):
        generation._check_reference(result, other)


def test_check_reference_rejects_missing_positions(tmp_path: Path):
    result = ran(begin(tmp_path)).result
    assert result is not None
    last = {name: result.outputs[name][2:] for name in ("logits", "positions")}
    part = replace(result, outputs={**result.outputs, **last})
    generation._check_reference(part, result)
    with pytest.raises(ReferenceFailed, match="4x7 logits of the reference, 6x7 of the board"):
        generation._check_reference(result, part)


@pytest.mark.parametrize(
    ("shape", "bound", "expected"),
    [((1, 128, 2, 16), 128, (128, 1)), ((1, 2, 256, 128), 128, (256, 2)), ((1, 2, 64, 16), 128, (64, 2))],
)
def test_make_reference_keeps_bound_of_roles(
    tmp_path: Path, shape: tuple[int, ...], bound: int, expected: tuple[int, int]
):
    cache = TensorSpec("past.0.key", "float32", shape)
    inputs, outputs = (TensorSpec("input_ids", "int64", (1, 1)), cache), (TensorSpec("logits", "float32", (1, 1, 7)),)
    model = Model(
        "r", "onnx", tmp_path, {}, "", inputs=inputs, outputs=(*outputs, replace(cache, name="present.0.key"))
    )
    spec = GenerateSpec(prompt=[Prompt(tokens=[1])], roles=Roles(bound=bound))
    context = context_without_workers(tmp_path)
    decoder = generation._make_reference(model, spec, Options(), context).decoder
    assert (decoder.plan.bound, decoder.cache[0].axis) == expected


def test_check_bound_names_reference():
    plan = StepsPlan(((0, StepRule.TOKENS),), (), 0, 2, bound=4)
    generation._check_bound(Prompt(name="a", tokens=[1, 2]), plan, "reference")
    with pytest.raises(
        UsageError, match="prompt 'a' with its steps needs 5 tokens, but the reference's cache has only 4"
    ):
        generation._check_bound(Prompt(name="a", tokens=[1, 2, 3]), plan, "reference")


def test_judge_repetition_keeps_verdict_of_first_run(tmp_path: Path):
    case = ran(begin(tmp_path))
    assert case.result is not None
    first = case.result.outputs
    longer = {**first, **{name: np.concatenate([first[name]] * 2) for name in ("logits", "positions", "tokens")}}
    longer["logits"][0] += 1
    repetition = Repetition((Answer(1, 0, first), Answer(1, 1, longer)), differing=("logits",))
    judged = GenerationVerdict(outcome=Outcome.PASS, reason="", rows=(), kl_bound=1.0, error_bound=1.0)
    reference = RunResult("reference", {})
    case = replace(case, generation=judged, references=(reference,), outcome=Outcome.PASS)
    case = replace(case, result=replace(case.result, repetition=repetition))
    found = Runner(context_without_workers(tmp_path)).judge_repetition(case)
    assert (found.outcome, found.error) == (Outcome.UNSTABLE, None)
    assert "the prompt returned different logits when it ran after another prompt" in found.reason
