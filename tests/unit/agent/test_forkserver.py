"""How a worker executes orders: every run, including profile runs, gets the original inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.step_programs import SummingProgram, logits_of, plan_of

from hil.agent.forkserver import _ForkedWorker
from hil.agent.ipc import Arena, lay_out
from hil.core.stepped_program import SteppedProgram
from hil.core.steps import StepsPlan
from hil.core.tensors import Array, TensorSpec, from_bytes
from hil.errors import RunFailed, UsageError

GIVEN = np.array([1, 2], np.float32)


class CountingProgram:
    """Returns its input, and adds 1 to it in its second run; its profile reports ``reported`` runs."""

    inputs = (TensorSpec("x", "float32", (2,)),)
    outputs = (TensorSpec("y", "float32", (2,)),)
    function = "main"

    def __init__(self, reported: int = 0) -> None:
        self.reported = reported
        self.number = 0

    def bind(self, inputs: list[Array]) -> None:
        (self.x,) = inputs

    def run(self) -> None:
        self.y = self.x.copy()
        self.number += 1
        if self.number == 2:
            self.x += 1

    def fetch(self) -> list[Array]:
        return [self.y]

    def profile(
        self, warmup: int, iterations: int, folder: Path, tool: Path | None, check: Callable[[Sequence[Array]], None]
    ) -> list[Path]:
        for number in range(warmup + iterations):
            self.run()
            if number < self.reported:
                check(self.fetch())
        return []


def generate(program: SummingProgram, inputs: Sequence[Array], plan: dict[str, Any]) -> tuple[list[Array], list[int]]:
    """Run a decoder twice. Return the outputs, and the numbers of the calls in the second run."""
    given, made = Arena(), Arena()
    names = ("prompt", "forced", "other_prompt")
    entries, size = lay_out(given, zip(names, inputs, strict=True))
    worker = _ForkedWorker(given, made)
    worker.program = program
    found = worker.do_generate({"inputs": entries, "bytes": size, "warmup": 1, "iterations": 1, "steps": plan})
    assert [(runs, first) for runs, first, _ in found["answers"]] == [(2, 0)]
    view = made.view(max(one["at"] + one["bytes"] for one in found["outputs"]), grow=False)
    arrays = [
        from_bytes(view[one["at"] : one["at"] + one["bytes"]], one["dtype"], one["shape"]) for one in found["outputs"]
    ]
    return arrays, worker.numbers[5:]


IDS = [np.array(one, np.int64) for one in ([1, 4, 2], [3, 5], [6, 6])]


def test_worker_generates_tokens():
    program = SummingProgram()
    (logits, positions, tokens, _), calls = generate(program, IDS, plan_of(program, 9).to_json())
    np.testing.assert_array_equal(logits, logits_of([1, 4, 2, 3, 5]))
    assert positions.tolist() == [0, 1, 2, 3, 4] and len(tokens) == 3
    assert calls[::3] == [3, 1, 1], "the calls of the timed run, without warm-up and other prompt"
    assert all(start <= end for start, end in zip(calls[1::3], calls[2::3], strict=True))


def test_worker_lets_program_replace_its_steps():
    class Faulty(SummingProgram):
        def stepped(self, plan: StepsPlan) -> SteppedProgram:
            class Other(SteppedProgram):
                def pick_token(self, row: Array, position: int) -> int:
                    return 0

            return Other(self, plan)

    program = Faulty()
    assert generate(program, IDS, plan_of(program, 9).to_json())[0][2].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": 9}, "invalid steps: outputs"),
        ({"rules": [[0, "tokens"], [9, "mask"]]}, "invalid steps: inputs"),
        ({"rules": [[0, "x"]]}, "invalid steps"),
        ({"steps": 1 << 20}, "1048576 steps"),
        ({"bound": 4}, "5 tokens exceed the cache of 4 tokens"),
    ],
)
def test_worker_rejects_invalid_steps(change: dict[str, Any], message: str):
    program = SummingProgram()
    with pytest.raises(UsageError, match=message):
        generate(program, IDS, plan_of(program, 9).to_json() | change)


@pytest.mark.parametrize(
    "inputs", [IDS[:2], [*IDS, IDS[0]], [np.zeros((1, 2), np.int64), *IDS[1:]], [np.float32([1]), *IDS[1:]]]
)
def test_worker_rejects_invalid_prompts(inputs: list[Array]):
    program = SummingProgram()
    given = Arena()
    entries, size = lay_out(given, ((str(number), array) for number, array in enumerate(inputs)))
    worker = _ForkedWorker(given, Arena())
    worker.program = program
    order = {"inputs": entries, "bytes": size, "warmup": 0, "iterations": 1, "steps": plan_of(program, 9).to_json()}
    with pytest.raises(UsageError):
        worker.do_generate(order)


def answer(program: CountingProgram, op: str, tmp_path: Path) -> dict[str, Any]:
    given = Arena()
    entries, size = lay_out(given, [("x", GIVEN)])
    worker = _ForkedWorker(given, Arena())
    worker.program, worker._folder = program, tmp_path
    order = {"inputs": entries, "bytes": size, "warmup": 1, "iterations": 4, "tool": "", "limit": 1 << 20}
    found: dict[str, Any] = getattr(worker, f"do_{op}")(order)
    return {**found, "peak": worker.numbers[2]}


@pytest.mark.parametrize("op", ["invoke", "profile"])
def test_worker_restores_inputs_changed_by_a_run(op: str, tmp_path: Path):
    found = answer(CountingProgram(reported=5), op, tmp_path)
    assert [(runs, first) for runs, first, _ in found["answers"]] == [(5, 0)]


def test_worker_accepts_profile_without_reported_outputs(tmp_path: Path):
    assert answer(CountingProgram(), "profile", tmp_path)["answers"] == []


@pytest.mark.parametrize("reported", [1, 4])
def test_worker_rejects_profile_with_outputs_of_some_runs(reported: int, tmp_path: Path):
    with pytest.raises(RunFailed, match=f"reported the outputs of {reported} runs, expected 5"):
        answer(CountingProgram(reported), "profile", tmp_path)


@pytest.mark.parametrize("op", ["invoke", "profile"])
def test_worker_reports_peak_memory_of_device(op: str, tmp_path: Path):
    class Device(CountingProgram):
        def get_peak_memory(self) -> int:
            return 1234

    class Faulty(CountingProgram):
        def get_peak_memory(self) -> int:
            raise RuntimeError("no statistics")

    programs = (CountingProgram(), Device(), Faulty())
    own, device, unknown = (answer(program, op, tmp_path)["peak"] for program in programs)
    assert (device, unknown) == (1234, 0) and own > 1 << 20
