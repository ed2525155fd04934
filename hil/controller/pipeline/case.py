"""A case: one model with what is wanted of it and what the stages have made of it so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil import errors
from hil.bundles.cases import Signature
from hil.compare.verdict import Verdict
from hil.controller.pipeline.capture import Capture
from hil.controller.pipeline.options import Options
from hil.controller.pipeline.repeated import Compilations
from hil.core.results import Artifact, Model, Outcome, RunResult, Stage, Timings
from hil.core.tensors import Array, TensorSpec
from hil.core.timeline import Span


@dataclass(frozen=True, eq=False)
class Case:
    """One model and what the stages have made of it; a stage hands on a new one. What is not made yet is None."""

    name: str
    path: Path
    options: Options
    folder: Path
    model: Model | None = None
    artifact: Artifact | None = None
    # what the program has to take and give, where it came with a bundle that says so.
    signature: Signature | None = None
    inputs: Mapping[str, Array] | None = None
    # makes them once the program is loaded, of what it takes: where they depend on what ran before.
    make_inputs: Callable[[Sequence[TensorSpec]], Mapping[str, Array]] | None = None
    result: RunResult | None = None
    references: tuple[RunResult, ...] = ()
    # the references that could not answer beside those that did, by name, each with its error.
    unanswered: Mapping[str, errors.StageError] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()  # one for each reference
    compilations: Compilations | None = None  # where the model was compiled several times
    # of answers that differ between iterations, by their number: a verdict beside the first reference.
    answer_verdicts: Mapping[int, Verdict] = field(default_factory=dict)
    disagreement: str = ""  # which references disagree on what; "" where none do
    plain_reference: RunResult | None = None
    plain_verdict: Verdict | None = None
    outcome: Outcome | None = None  # None until the case has ended
    stage: str = ""  # the stage that began last
    reason: str = ""
    error: errors.HilError | None = None
    timings: Timings = field(default_factory=Timings)
    pushed_bytes: int = 0
    worker_log: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()  # the stages as they took place, by the host's clock, in the order in which they ended
    sent: tuple[tuple[int, int], ...] = ()  # (host time in ns, bytes of the upload sent until then)
    capture: Capture | None = None  # the board's half of the profile, where one was asked for
    profiles: tuple[Mapping[str, Any], ...] = ()  # those that were written: ``kind``, ``folder`` and ``notes`` of each

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def ended(self, error: errors.HilError, stage: Stage) -> Case:
        """The case, ended by an error; ``stage`` is where that happened, unless the error knows better."""
        error.located(stage=stage.value)
        return replace(
            self,
            error=error,
            result=error.result if isinstance(error, errors.RanElsewhere) else self.result,
            stage=error.stage,
            outcome=Outcome(error.outcome or Outcome.RUN_ERROR),
            reason=error.message,
        )

    def timed(self, **seconds: float | None) -> Case:
        """The case with these of its timings set, in seconds."""
        return replace(self, timings=replace(self.timings, **seconds))


@dataclass(frozen=True)
class ProgressSink:
    """Who is told how cases go on, and who stores what they make; called from several threads."""

    # called with (case, stage, note) whenever a stage begins or has news.
    stage: Callable[[Case, Stage, str], None] = lambda case, stage, note: None
    # called with (case, what) when inputs, outputs or references are there, to store them.
    keep: Callable[[Case, str], None] = lambda case, what: None
    # called with a case that a stage's error has ended, perhaps long before its turn.
    ended: Callable[[Case], None] = lambda case: None
