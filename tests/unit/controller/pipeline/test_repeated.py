"""Repeated compilations and runs: detect different programs and judge different outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hil.bundles.cases import Signature
from hil.compare.verdict import Verdict, compare
from hil.controller.devices.board_client import ProfilePass
from hil.controller.pipeline.compilations import compile_repeatedly
from hil.controller.pipeline.repeated import add_profile_pass, run_repeatedly
from hil.controller.pipeline.stages import _make_sign_converter
from hil.controller.pipeline.verdicts.repetition import decide_instability, find_worst_answer, judge_answers
from hil.core.repetition import Answer, Repetition
from hil.core.results import Artifact, Model, Outcome, RunResult
from hil.core.tensors import TensorSpec
from hil.core.timeline import Span

RIGHT = {"y": np.float32([1, 2, 3, 4])}
WRONG = {"y": np.float32([1, 2, 3, 9])}
WORSE = {"y": np.float32([9, 9, 3, 9])}


def artifact(content: str) -> Artifact:
    return Artifact("iree", "m.vmfb", {}, {"m.vmfb": content}, "main", "iree-compile")


def answers(*outputs: Any) -> Repetition:
    found = tuple(Answer(number + 1, number, one) for number, one in enumerate(outputs))
    return Repetition(found, differing=("y",) if len(found) > 1 else ())


def judged(repetition: Repetition) -> dict[int, Verdict]:
    reference = RunResult("reference", RIGHT)
    return judge_answers(repetition, lambda outputs: compare(RunResult("board", outputs), reference))


def test_compile_repeatedly_collects_different_programs(tmp_path: Path):
    contents = iter(["one", "two", "two", "one"])

    def again(folder: Path) -> Artifact:
        folder.mkdir()
        return artifact(next(contents))

    found = compile_repeatedly(artifact("one"), 5, again, tmp_path)
    assert [one.digests["m.vmfb"] for one in found.programs] == ["two"]
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    assert found.text == "5 compilations gave 2 different programs" and found.record()["programs"] == 2


def test_compile_repeatedly_reports_equal_programs(tmp_path: Path):
    found = compile_repeatedly(artifact("one"), 3, lambda folder: artifact("one"), tmp_path)
    assert found.text == "3 compilations gave the same program" and not found.programs


def test_stable_answers_do_not_need_judgement():
    one = answers(WRONG)
    assert judged(one) == {} and decide_instability(one, {}, None, ()) == (False, "")
    assert decide_instability(None, {}, None, ()) == (False, "")


def test_instability_names_shares_and_worst_answer():
    found = answers(RIGHT, WRONG, WORSE)
    is_unstable, text = decide_instability(found, judged(found), None, ())
    assert is_unstable and find_worst_answer(judged(found)) == 2
    shares = "3 (50 %), 2 (33.3 %), 1 (16.7 %)"
    assert text.startswith(f"3 different answers in 6 iterations: {shares} for the same inputs; ")
    assert "; the first answer passes, the worst answer is wrong (output y: 3 of 4 values" in text


def test_instability_reports_wrong_first_answer():
    found = answers(WORSE, RIGHT)
    assert (
        "; the first answer is wrong (output y: 3 of 4 values" in decide_instability(found, judged(found), None, ())[1]
    )


def test_instability_reports_unjudged_answers():
    found = answers(RIGHT, WRONG)
    blind = {number: replace(one, outcome=Outcome.BLIND, reason="blind") for number, one in judged(found).items()}
    assert decide_instability(found, {**judged(found), 1: blind[1]}, None, ())[1].endswith(
        "; the first answer passes, the worst answer cannot be judged (blind)"
    )


def test_instability_without_references_has_shares():
    assert decide_instability(answers(RIGHT, WRONG), {}, None, ()) == (
        True,
        "2 different answers in 3 iterations: 1 (33.3 %), 2 (66.7 %) for the same inputs".replace(
            "1 (33.3 %), 2 (66.7 %)", "2 (66.7 %), 1 (33.3 %)"
        ),
    )


@pytest.mark.parametrize(
    ("second", "allowed", "is_unstable"),
    [
        ({"y": np.float32([1, 2, 3, 4.000001])}, ("y",), False),
        ({"y": np.float32([1, 2, 3, 4.000001])}, ("z", "[xy]"), False),
        ({"y": np.float32([1, 2, 3, 4.000001])}, ("z",), True),
        ({"y": np.float32([1, 2, 3, 4.000001])}, (), True),
        (WRONG, ("y",), True),
    ],
)
def test_allow_unstable_passes_answers_within_tolerance(second: Any, allowed: tuple[str, ...], is_unstable: bool):
    found = answers(RIGHT, second)
    assert decide_instability(found, judged(found), None, allowed)[0] is is_unstable


def test_instability_names_random_outputs():
    model = Model("m", "onnx", Path(), {}, "", producer={"random": {"nodes": ["r"], "outputs": ["y"]}})
    found = answers(RIGHT, WRONG)
    is_unstable, text = decide_instability(found, judged(found), model, ())
    assert is_unstable and "(y depends on random numbers)" in text


def test_worst_answer_compares_errors_of_equal_shares():
    found = answers(RIGHT, WRONG, {"y": np.float32([1, 2, 3, 99])})
    assert find_worst_answer(judged(found)) == 2
    assert judged(found)[0].outcome is Outcome.PASS


class FakeSession:
    """A board whose programs return prepared outputs in order."""

    def __init__(self, gives: dict[str, list[dict[str, Any]]]) -> None:
        self.gives = gives
        self.log: list[str] = []
        self.loaded: set[str] = set()
        self.board = self

    def push(self, one: Artifact) -> None:
        self.log.append(f"push {one.digests['m.vmfb']}")

    def load(self, one: Artifact, **settings: Any) -> tuple[Any, bool]:
        name = one.digests["m.vmfb"]
        if name not in self.loaded:
            self.log.append(f"load {name}")
        self.loaded.add(name)
        session = self

        class Program:
            def run(self, inputs: Any, **counts: Any) -> Any:
                outputs = session.gives[name].pop(0)
                session.log.append(f"run {name}")
                result = RunResult("board", outputs, ((0, 5),), repetition=Repetition((Answer(2, 0, outputs),)))
                from hil.controller.devices.board_client import Invocation

                return result, Invocation(outputs, ((0, 5),), 7, (0, 1))

        return Program(), True

    def unload(self, one: Artifact) -> None:
        self.log.append(f"unload {one.digests['m.vmfb']}")
        self.loaded.discard(one.digests["m.vmfb"])


def options(**settings: Any) -> Any:
    from hil.controller.pipeline.settings.options import Options

    return replace(Options(), **settings)


@pytest.mark.parametrize(
    ("fresh", "log"),
    [
        (False, ["load a", "run a", "run a", "run a"]),
        (True, ["load a", "run a", "unload a", "load a", "run a", "unload a", "load a", "run a"]),
    ],
)
def test_run_repeatedly_compares_all_runs(fresh: bool, log: list[str]):
    session: Any = FakeSession({"a": [RIGHT, RIGHT, WRONG]})
    _, result, call = run_repeatedly(session, artifact("a"), (), {}, options(repeat=3, fresh_load=fresh))
    assert session.log == log
    assert result.outputs is RIGHT and result.repetition is not None
    assert [one.iterations for one in result.repetition.answers] == [4, 2]
    assert result.iterations_ns == ((0, 5),) * 3 and call.warmup_ns == 21


def test_run_repeatedly_runs_other_programs():
    session: Any = FakeSession({"a": [RIGHT], "b": [WRONG]})
    _, result, _ = run_repeatedly(session, artifact("a"), [artifact("b")], {}, options())
    assert session.log == ["load a", "run a", "push b", "load b", "run b", "unload b"]
    assert result.repetition is not None and not result.repetition.is_stable
    assert result.iterations_ns == ((0, 5),)


def test_allow_unstable_needs_every_answer():
    close = {"y": np.float32([1, 2, 3, 4.000001])}
    found = answers(RIGHT, close, None)
    is_unstable, text = decide_instability(found, judged(found), None, ("y",))
    assert is_unstable and "1 of them were not fetched" in text


def test_with_profile_converts_answers_like_result():
    """IREE reports neither signedness nor output names; the signature of the bundle does."""
    raw = np.array([1, 200], np.uint8).view(np.int8)
    own, signed = TensorSpec("output0", "", ()), TensorSpec("y", "uint8", (2,))
    convert = _make_sign_converter([own], Signature((), (signed,)))
    outputs = convert({"y": raw})
    assert outputs["y"].tolist() == [1, 200]
    result = RunResult("board", outputs, repetition=Repetition((Answer(3, 0, outputs),)))
    passed = Repetition((Answer(2, 0, {"output0": raw}),))
    span = Span("profile", 0, 1)
    found = add_profile_pass(result, ProfilePass({}, [], span, span, 0, 2, passed), convert).repetition
    assert found is not None and found.is_stable and found.iterations == 5
