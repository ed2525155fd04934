"""A case: one model with what is wanted of it and what the stages have made of it so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil import errors
from hil.bundles.cases import Signature
from hil.controller.pipeline.capture import Capture
from hil.controller.storage.run_context import RunContext
from hil.core.artifacts import Artifact, Model
from hil.core.results import Outcome, RunResult, Stage, Timings, Verdict
from hil.core.tensors import Array
from hil.core.timeline import Span

DEFAULT_TIMEOUT_S = 60.0
COMPILE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Options:
    """How a model is to be run.

    Attributes:
        runtime: ``iree`` or ``onnxruntime``; "" is the board's own choice.
        compiler: makes the program; "" is the runtime's own.
        function: entry point; "" is the only one.
        dims: values of symbolic dimensions.
        inputs: texts of ``--input``, or name -> tensor.
        seed, input_range: of random inputs.
        references: oracles' names; empty is the default for the model's format.
        expected: texts of ``--expected``, or name -> tensor, that take the references' place.
        element_types: of each of these, IREE's element type (``si64``) that the program is to give, as iree-run-module
            compares it; "" where any will do.
        plain_model: the model as it was before it was quantised or the like: the answer is compared with its reference
            too, and that is told apart. None where there is none.
        plain_expected: name -> tensor that take that reference's place.
        min_sqnr_db: what every output must reach beside the plain model; None asks for nothing.
        rtol, atol: None is the dtype's default.
        allow_blind: patterns of names of outputs that may pass though nobody can judge them.
        replace_blind_tolerance: where rtol and atol cannot judge an output, judge within the dtype's default.
        iterations, warmup: timed and untimed runs.
        timeout: seconds for loading, for the runs together, and for each reference.
        compile_flags: added after the board's.
        debug_ir: folder for the compiler's IR.
        recompute: do not take artifacts or reference results from the cache.
        profile: run a second time under the runtime's profiler, and watch the board meanwhile.
        no_fallback: a node that runs on another device than it was told to is an error, not a note.
    """

    runtime: str = ""
    compiler: str = ""
    function: str = ""
    dims: Mapping[str, int] = field(default_factory=dict)
    inputs: Sequence[str] | Mapping[str, Array] = ()
    seed: int = 0
    input_range: tuple[float, float] | None = None
    references: tuple[str, ...] = ()
    expected: Sequence[str] | Mapping[str, Array] = ()
    element_types: tuple[str, ...] = ()
    plain_model: Path | None = None
    plain_expected: Mapping[str, Array] = field(default_factory=dict)
    min_sqnr_db: float | None = None
    rtol: float | None = None
    atol: float | None = None
    allow_blind: tuple[str, ...] = ()
    replace_blind_tolerance: bool = False
    iterations: int = 1
    warmup: int = 0
    timeout: float = DEFAULT_TIMEOUT_S
    compile_flags: tuple[str, ...] = ()
    debug_ir: Path | None = None
    recompute: bool = False
    profile: bool = False
    no_fallback: bool = False


@dataclass(frozen=True, eq=False)
class Case:
    """One model and what the stages have made of it; a stage hands on a new one. What is not made yet is None.

    Attributes:
        outcome: None until the case has ended.
        stage: the stage that began last.
        signature: what the program has to take and give, where it came with a bundle that says so.
        unanswered: the references that could not answer beside those that did, by name, each with its error.
        verdicts: one for each reference.
        spans: the stages as they took place, by the host's clock, in the order in which they ended.
        sent: (host time in ns, bytes of the upload sent until then).
        capture: the board's half of the profile, where one was asked for.
        profiles: those that were written: ``kind``, ``folder`` and ``notes`` of each.
    """

    name: str
    path: Path
    options: Options
    folder: Path
    model: Model | None = None
    artifact: Artifact | None = None
    signature: Signature | None = None
    inputs: Mapping[str, Array] | None = None
    result: RunResult | None = None
    references: tuple[RunResult, ...] = ()
    unanswered: Mapping[str, errors.StageError] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    plain_reference: RunResult | None = None
    plain_verdict: Verdict | None = None
    outcome: Outcome | None = None
    stage: str = ""
    reason: str = ""
    error: errors.HilError | None = None
    timings: Timings = field(default_factory=Timings)
    pushed_bytes: int = 0
    worker_log: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    sent: tuple[tuple[int, int], ...] = ()
    capture: Capture | None = None
    profiles: tuple[Mapping[str, Any], ...] = ()

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


Watch = Callable[[Case, Stage, str], None]


@dataclass(frozen=True)
class Workshop(RunContext):
    """What cases share beside the cache and the isolated processes: who is told of progress, and who stores what.

    Attributes:
        watch: called with (case, stage, note) whenever a stage begins or has news.
        keep: called with (case, what) when inputs, outputs or references are there, to store them.
        ended: called with a case that a stage's error has ended, perhaps long before its turn.
        logs: whether to ask the board what a program that ran well wrote to stderr; a crash tells it anyway.
    """

    watch: Watch = lambda case, stage, note: None
    keep: Callable[[Case, str], None] = lambda case, what: None
    ended: Callable[[Case], None] = lambda case: None
    logs: bool = True
