"""Define a case: a model with its options and the results of the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hil import errors
from hil.bundles.cases import Signature
from hil.compare.verdict import Verdict
from hil.controller.devices.board_client import ProfilePass
from hil.controller.pipeline.compilations import Compilations
from hil.controller.pipeline.settings.options import Options
from hil.controller.records.measurements.conditions import Conditions, MeasurementGrade
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.controller.records.outputs import ProfileDirectory
from hil.core.clock import ClockFit
from hil.core.results import Artifact, Model, Outcome, RunResult, Stage, Timings
from hil.core.steps import FORCED, StepCall
from hil.core.tensors import Array, TensorSpec
from hil.core.timeline import InvokeTiming, Sample, Span

if TYPE_CHECKING:
    from hil.compare.generation.results import GenerationVerdict
    from hil.controller.models.generation.roles import Decoder


@dataclass(eq=False)
class Capture:
    """The board's part of a profile, recorded during the run."""

    board: str
    # the timed and the profiled run, if they ran and the board's clock is readable.
    calls: list[InvokeTiming] = field(default_factory=list)
    transfers: list[Span] = field(default_factory=list)  # transfers over the link for these runs, host clock
    taken: ProfilePass | None = None  # result of the profiled pass; None if it did not run
    counters: Sequence[Sample] = ()  # counter samples that the board reported
    clock: ClockFit | None = None  # the board's clock relative to the host's; None if not readable
    console: Sequence[Span] = ()  # lines of the board's console, host clock
    notes: list[str] = field(default_factory=list)  # problems, one per line
    icount_shift: int = -1  # as in BoardConfig; from 0: the board's clock counts instructions, so it has no times


@dataclass(frozen=True, eq=False)
class ReferenceDecoder:
    """ONNX model that defines the right results of a generation, with its plan."""

    model: Model
    decoder: Decoder


@dataclass(frozen=True, eq=False, repr=False)
class Case:
    """Model with the results of its stages so far. Each stage returns a new case. Missing results are None."""

    name: str
    path: Path
    options: Options
    folder: Path
    model: Model | None = None
    artifact: Artifact | None = None
    # required inputs and outputs of the program, if a bundle specifies them.
    signature: Signature | None = None
    inputs: Mapping[str, Array] | None = None
    # makes the inputs from the loaded program's input specs, for inputs that depend on earlier runs.
    make_inputs: Callable[[Sequence[TensorSpec]], Mapping[str, Array]] | None = None
    result: RunResult | None = None
    # conditions of the board during the run, and the grade of the times; None if the run did not measure times.
    conditions: Conditions | None = None
    grade: MeasurementGrade | None = None
    energy: EnergyMeasurement | None = None  # with --energy
    # for a generation (--generate): the decoder's plan, its calls, and a run with all tokens as the prompt.
    decoder: Decoder | None = None
    reference_decoder: ReferenceDecoder | None = None
    calls: tuple[StepCall, ...] = ()
    link_ns: int = 0  # time that the link took in the call, in nanoseconds; 0 if unknown
    prefill: RunResult | None = None
    generation: GenerationVerdict | None = None
    text_file: str = ""  # file with the prompt's tokens
    references: tuple[RunResult, ...] = ()
    # references that failed while others succeeded: name -> error.
    unanswered: Mapping[str, errors.StageError] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()  # verdict of each reference
    compilations: Compilations | None = None  # set if the model was compiled repeatedly
    # for outputs that differ between iterations: index in ``Repetition.answers`` -> verdict against the first
    # reference.
    answer_verdicts: Mapping[int, Verdict] = field(default_factory=dict)
    disagreement: str = ""  # disagreements between references; "" if none
    plain_reference: RunResult | None = None
    plain_verdict: Verdict | None = None
    outcome: Outcome | None = None  # None until the case has ended
    stage: str = ""  # the stage that started last
    reason: str = ""
    error: errors.HilError | None = None
    timings: Timings = field(default_factory=Timings)
    pushed_bytes: int = 0
    worker_log: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()  # stage times on the host clock, ordered by end
    sent: tuple[tuple[int, int], ...] = ()  # (host time in ns, bytes uploaded so far)
    capture: Capture | None = None  # the board's part of the profile, if requested

    profiles: tuple[ProfileDirectory, ...] = ()  # written profiles

    @property
    def needs_result(self) -> bool:
        """True if the reference needs the board's result: the board chooses the tokens of a decoder."""
        chooses = self.decoder is not None and self.inputs is not None and not len(self.inputs[FORCED])
        return chooses and self.result is None

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def __repr__(self) -> str:
        ended = f"{self.outcome.value}, {self.reason}" if self.reason and self.outcome else self._status
        return f"<Case {self.name}: {ended}>"

    def _repr_html_(self) -> str:
        from statistics import median

        from hil.core.html_table import make_html_table

        result = self.result
        facts = [("outcome", self._status), ("reason", self.reason), ("stage", self.stage)]
        if result is not None and result.device_ns:
            facts.append(("device time (ms), median", f"{median(result.device_ns) / 1e6:.4g}"))
        facts += [
            (f"{name.removesuffix('_s')} (s)", f"{seconds:.3g}")
            for name, seconds in vars(self.timings).items()
            if seconds
        ]
        tables = [make_html_table(self.name, ("", ""), [fact for fact in facts if fact[1]])]
        return "".join([*tables, *(verdict._repr_html_() for verdict in self.verdicts)])

    @property
    def _status(self) -> str:
        return self.outcome.value if self.outcome else "not finished"

    def with_error(self, error: errors.HilError, stage: Stage) -> Case:
        """Return the case with an error as its end.

        ``stage`` is used only if the error does not name a stage.
        """
        error.locate(stage=stage.value)
        return replace(
            self,
            error=error,
            result=error.result if isinstance(error, errors.RanElsewhere) else self.result,
            stage=error.stage,
            outcome=Outcome(error.outcome or Outcome.RUN_ERROR),
            reason=error.message,
        )

    def with_timings(self, **seconds: float | None) -> Case:
        """Return the case with updated timings, in seconds."""
        return replace(self, timings=replace(self.timings, **seconds))


@dataclass(frozen=True)
class ProgressSink:
    """Callbacks that receive progress and store results. Multiple threads may call them."""

    # called with (case, stage, note) when a stage starts or reports progress.
    stage: Callable[[Case, Stage, str], None] = lambda case, stage, note: None
    # called with (case, name) to store inputs, outputs or references.
    keep: Callable[[Case, str], None] = lambda case, what: None
    # called immediately with a case that an error ended. The case's result follows in order, which may be much later.
    ended: Callable[[Case], None] = lambda case: None
