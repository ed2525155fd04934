"""Compare traces of a module on multiple backends, and store them in the artifacts directory."""

from __future__ import annotations

import contextlib
import inspect
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.backends.references import measure_noise
from hil.controller.models.importers import import_model
from hil.controller.models.tensorflow.graphs import name_new_value
from hil.controller.pipeline.records.record import record_comparison
from hil.controller.pipeline.settings.flagfiles import ATOLS, FlagFile, write_flagfile
from hil.controller.pipeline.settings.options import make_case_settings
from hil.controller.pipeline.verdicts.accepting import load_rules
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import convert_write_errors
from hil.controller.workloads.suites.expected import Expectations
from hil.controller.workloads.traces.comparing import CallComparison, Judging, compare_traces, judge_trace
from hil.controller.workloads.traces.report import write_report
from hil.controller.workloads.traces.stored import TraceComparison, make_title
from hil.controller.workloads.traces.trace import LOG, ModuleCall, Trace, call_name, list_arrays, reinterpret_bits
from hil.core.results import Outcome, RunResult, Stage
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import NUMPY_DTYPES, Array, make_spec
from hil.errors import NotRun, UsageError
from hil.formats.iree_command import give
from hil.testing.traces.backends import (
    ALL,
    Backend,
    TraceOptions,
    find_relation,
    parse_reference,
    parse_targets,
)
from hil.testing.traces.folders import choose_module_name, claim_folder, identify_owner
from hil.testing.traces.model_files import FileSubject, ModelFile
from hil.testing.traces.runners import BackendRunner, ProgramResult, make_content_name
from hil.testing.traces.traced import TraceFunction, TraceResult, run_trace, trace_name

if TYPE_CHECKING:
    from hil.testing.traces.tensorflow_module import TfSubject

FLAGFILE = "flagfile"
TENSORS = "tensors"
# IREE device that the agent uses by default.
DEFAULT_DEVICE = "local-task"


@dataclass(frozen=True)
class TargetResult:
    """Result of a trace on a target backend."""

    record: CaseRecord  # record with the outcome, including expected failures
    comparisons: tuple[CallComparison, ...]  # comparisons of all calls with the reference's calls
    folder: Path
    backend_id: str = ""  # the backend's name, with a number if requested several times

    @property
    def outcome(self) -> Outcome:
        """PASS, FAIL, a stage's error, XFAIL or XPASS."""
        return Outcome(self.record.outcome)

    def lines(self, *, failed_only: bool = True) -> list[str]:
        """Return readable lines: the outcome and the failed calls and outputs, or all calls and outputs."""
        record = self.record
        lines = [f"{record.flow}: {record.outcome}{record.message and f': {record.message}'}"]
        if note := record.notes.get("text"):
            lines.append(f"  note: {note}")
        if record.hint and record.outcome != Outcome.PASS.value:
            lines.append(f"  hint: {record.hint}")
        for comparison in self.comparisons:
            if not (comparison and failed_only):
                lines += [f"  {line}" for line in comparison.lines(failed_only=failed_only)]
        return [*lines, f"  trace: {self.folder}"] if self.folder.is_dir() else lines


class ModuleTraces:
    """Module class on a reference backend and multiple targets. Context manager: boards are released at the end.

    Args:
        module_class: A tf.Module or Keras model class (or a callable that returns a module), or a class with
            :class:`hil.testing.ModelFile` attributes.
        exported_names: Methods to export; None is all.
        options: Backends, artifacts directory, and settings to run and judge programs.
        expected: File with expected failures, or None.
        name: The module's name, instead of the class name; ``ResNet50/cifar10`` creates a subdirectory.
        owner: Owner of the traces, such as a test case. Owners do not share directories. None is the class.

    Raises:
        UsageError: unknown backend, or the backend does not support such modules.
    """

    def __init__(
        self,
        module_class: Callable[[], Any],
        exported_names: Sequence[str] | None = None,
        *,
        options: TraceOptions,
        expected: Path | None = None,
        name: str = "",
        owner: Any = None,
    ) -> None:
        self._subject = make_subject(module_class, exported_names, name)
        names = self._subject.references
        self.reference: Backend = parse_reference(options.reference_backend or self._subject.reference, names)
        self.targets: tuple[Backend, ...] = parse_targets(options.target_backends or ALL, names)
        artifacts = options.artifacts_dir.absolute()
        self.folder = claim_folder(artifacts, self._subject.name, identify_owner(owner or module_class, artifacts))
        self._settings = options.settings
        self._expectations = Expectations.load(expected)
        self._isolated = Isolated()
        self._context = RunContext(Cache(), self._isolated)
        self._runners: dict[str, BackendRunner] = {}
        self._traced: dict[str, str] = {}
        # Unavailable backends: id -> reason. Availability is checked once.
        self._absent: dict[str, NotRun] = {}

    def compare(self, function: TraceFunction, command: str = "") -> list[TargetResult]:
        """Trace a function on the reference and all targets, store the traces, compare and judge them.

        Args:
            function: Called with a :class:`TracedModule`, once for each backend.
            command: Command that repeats the test, stored in the traces; "" if unknown.

        Raises:
            UsageError: an invalid call, or a different trace function with this name exists.
            HilError: the reference failed.
        """
        name = trace_name(function)
        origin = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', name)}"
        if self._traced.setdefault(name, origin) != origin:
            raise UsageError(
                f"duplicate trace function name {name} in {self._subject.name}: {self._traced[name]} and {origin}",
                hint="rename a function: traces are stored by function name",
            )
        wanted = self._trace_backend(function, self.reference, command)
        save_traced(wanted, self._trace_folder(self.reference, name))
        if isinstance(wanted.error, NotRun):
            raise UsageError(f"reference not available: {wanted.error.message}", hint=wanted.error.hint)
        if wanted.error is not None:
            raise wanted.raised or wanted.error
        if not wanted.trace.calls:
            raise UsageError(f"{name} called no methods", hint="call methods of the module argument")
        traces = []
        for target in self.targets:
            traced = self._trace_backend(function, target, command)
            if not isinstance(traced.error, NotRun):
                traced.trace.reference = self._trace_folder(self.reference, name)
                save_traced(traced, self._trace_folder(target, name), wanted=wanted.trace)
            traces.append(traced)
        results = [
            self._judge_target(target, wanted, traced) for target, traced in zip(self.targets, traces, strict=True)
        ]
        write_report(self.folder, self._trace_folder(self.reference, name), [result.record for result in results])
        return results

    def close(self) -> None:
        """Release boards and end processes."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self._isolated.close()

    def __enter__(self) -> ModuleTraces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _trace_backend(self, function: TraceFunction, backend: Backend, command: str) -> TraceResult:
        if backend.id in self._absent:
            trace = Trace(self._subject.name, backend.name, trace_name(function))
            return TraceResult(trace, error=self._absent[backend.id])
        start = time.monotonic()
        runner = self._runners.get(backend.id)
        if runner is None:
            runner = self._subject.make_runner(backend, self._context, self.folder, self._settings)
            self._runners[backend.id] = runner
        traced = run_trace(
            function, runner, self._subject.name, lambda: self._subject.methods, backend.name, self._settings.seed
        )
        traced.seconds, traced.trace.command = time.monotonic() - start, command
        if isinstance(traced.error, NotRun):
            self._absent[backend.id] = traced.error
        if self._is_shared(backend):
            runner.close()  # another backend needs the same board
        return traced

    def _is_shared(self, backend: Backend) -> bool:
        """Return True if another backend uses the same board. Backends do not share simulators."""
        everyone = (self.reference, *self.targets)
        return backend.is_real and sum(other.is_real and other.board == backend.board for other in everyone) > 1

    def _trace_folder(self, backend: Backend, name: str) -> Path:
        return self.folder / backend.id / "traces" / name

    def _judge_target(self, target: Backend, wanted: TraceResult, traced: TraceResult) -> TargetResult:
        folder = self._trace_folder(target, traced.trace.name)
        settings = self._settings
        noise = partial(self._measure_noise, traced)
        accept = load_rules(settings.accept)
        judging = Judging(settings.rtol, settings.atol, settings.allow_blind, settings.allow_flush, accept, noise)
        comparisons = tuple(compare_traces(wanted.trace, traced.trace, judging))
        if traced.error is not None:
            # Do not report calls that are missing because of the error.
            comparisons = comparisons[: len(traced.trace.calls)]
        found = self._make_record(target, wanted, traced, comparisons)
        record = self._expectations.judge(found)
        if record.outcome == Outcome.XPASS.value:
            hints = (f"remove it from {self._expectations.path}", self._expectations.other_versions)
            record = record.replace(hint="; ".join(filter(None, hints)))
        result = TargetResult(record, comparisons, folder, target.id)
        if isinstance(traced.error, NotRun):
            return result  # files in the directory are from an earlier run
        title = make_title(traced.trace, wanted.trace)
        TraceComparison(title, Outcome(found.outcome), found.message, comparisons).save(folder)
        with (folder / LOG).open("a") as log:
            log.write(
                "\n".join(
                    [
                        "",
                        f"Compared with {find_relation(target, self.reference).named(self.reference.name)}",
                        *result.lines(failed_only=False),
                        "",
                    ]
                )
            )
        return result

    def _measure_noise(self, traced: TraceResult, number: int) -> dict[str, Array]:
        """Measure the noise of a call's outputs by running the program's model on the host."""
        answer, call = traced.answers[number], traced.trace.calls[number]
        if answer is None:
            return {}
        work: dict[str, Any] = {"isolated": self._context.isolated, "cache": self._context.cache}
        model = import_model(answer.program.model, function=answer.program.function, **work)
        names = [*list_arrays(call.outputs), *map(name_new_value, answer.program.assigned)]
        takes, gives = model.inputs or (), model.outputs or ()
        if len(takes) != len(answer.given) or len(gives) != len(names):
            return {}
        given = {
            spec.name: reinterpret_bits(spec.dtype, array) for spec, array in zip(takes, answer.given, strict=True)
        }
        with make_temporary_folder("hil-noise-") as folder:
            work |= {"recompute": False, "timeout": self._settings.timeout, "log": Path(folder) / "log"}
            found = measure_noise(model, given, RunResult("", {}), **work)
        return {name: found[spec.name] for name, spec in zip(names, gives, strict=True) if spec.name in found}

    def _make_record(
        self, target: Backend, wanted: TraceResult, traced: TraceResult, comparisons: Sequence[CallComparison]
    ) -> CaseRecord:
        error, stage = traced.error, Stage.COMPARE.value
        relation = find_relation(target, self.reference)
        outcome, reason = judge_trace(comparisons, ended_early=error is not None)
        message = reason
        if error is not None:
            outcome, stage = Outcome(error.outcome or Outcome.RUN_ERROR), error.stage
            if outcome is Outcome.SKIP:
                reason = ""
            made = len(traced.trace.calls)
            after = f"after {made} call{'s' if made > 1 else ''}: " if made else ""
            message = "; ".join(filter(None, (f"{after}{error.message}", reason)))
        return CaseRecord(
            id=f"{self._subject.name}/{traced.trace.name}",
            model=self._subject.name,
            suite="traces",
            flow=target.name,
            runtime=target.runtime,
            outcome=outcome.value,
            ended=outcome.value,
            board=target.board,
            hw_type=target.hw_type,
            stage=stage,
            message=message,
            hint=error.hint if error is not None else "",
            detail=error.detail if error is not None else "",
            notes={"text": self._subject.unseen} if self._subject.unseen else {},
            timings={"run_s": traced.seconds},
            outputs=[record_comparison(output) for one in comparisons for output in one.outputs],
            against=wanted.trace.ran_by,
            relation=relation.value,
            decided_by=relation.named(wanted.trace.ran_by) if outcome is Outcome.PASS else "",
            folder=self._trace_folder(target, traced.trace.name).relative_to(self.folder).as_posix(),
        )


def compare_backends(
    trace_function: TraceFunction,
    module_class: Callable[[], Any],
    *,
    exported_names: Sequence[str] | None = None,
    reference_backend: str = "",
    target_backends: str | Sequence[str] = "iree_llvmcpu",
    artifacts_dir: str | Path | None = None,
    expected: str | Path | None = None,
    name: str = "",
    **settings: Any,
) -> list[TargetResult]:
    """Trace a function on a reference and on target backends and compare, outside of test cases.

    Args:
        trace_function: Called with a :class:`TracedModule`, once for every backend.
        module_class: See :class:`ModuleTraces`.
        exported_names: See :class:`ModuleTraces`.
        reference_backend: The reference's name; "" is the module's default: ``tf``.
        target_backends: Names, or a comma-separated text; ``all`` is all backends of this machine.
        artifacts_dir: Artifacts directory; None is ``hil-traces``.
        expected: File with expected failures, or None.
        name: The module's name: see :class:`ModuleTraces`.
        settings: Settings to compile, run and judge programs, as in :func:`hil.run`: ``no_fallback``, ``rtol``, ...

    Returns:
        A result for every target. Failed targets do not raise.

    Raises:
        UsageError: invalid request.
        HilError: the reference failed.
    """
    names = target_backends if isinstance(target_backends, str) else ",".join(target_backends)
    options = TraceOptions.of(names, reference_backend, artifacts_dir, make_case_settings(settings))
    path = Path(expected) if expected is not None else None
    opened = ModuleTraces(module_class, exported_names, options=options, expected=path, name=name)
    with contextlib.closing(opened) as traces:
        return traces.compare(trace_function, make_script_command(getattr(trace_function, "__module__", "")))


def make_script_command(module: str) -> str:
    """Return the command that repeats the current script if ``module`` is ``__main__``, else ""."""
    is_script = module == "__main__" and hasattr(sys.modules["__main__"], "__file__")
    return shlex.join(["python", *sys.argv]) if is_script else ""


def summarize_results(results: Sequence[TargetResult], reference: str) -> str:
    """Return a readable summary of results. Passed targets have a single line."""
    bad = sum(result.outcome.exit_code != 0 for result in results)
    head = f"{results[0].record.id}: {bad} of {len(results)} backends failed, compared with {reference}"
    return "\n".join([head, *(f"  {line}" for result in results for line in result.lines())])


def save_traced(traced: TraceResult, folder: Path, *, wanted: Trace | None = None) -> None:
    """Store a trace, with a flag file for each call of an IREE program.

    ``flagfile_call_N`` is the file of call N. ``flagfile`` equals the file of the first call. The expected values in a
    file are the reference's outputs and new values of variables. A file has no expected values if the reference lacks
    the call.

    Args:
        wanted: The reference's trace; None for the reference itself.

    Raises:
        StorageError: the trace cannot be written.
    """
    traced.trace.save(folder)
    references = traced.trace.calls if wanted is None else wanted.calls
    for number, (call, answer) in enumerate(zip(traced.trace.calls, traced.answers, strict=True)):
        if answer is None or answer.artifact.runtime != "iree":
            continue
        expected = _select_expected(answer, call, references[number]) if number < len(references) else ()
        flags = _make_flags(answer, expected, call, folder / TENSORS)
        write_flagfile(folder / f"{FLAGFILE}_{call_name(number)}", flags)
        if number == 0:
            write_flagfile(folder / FLAGFILE, flags)


def _select_expected(answer: ProgramResult, call: ModuleCall, reference: ModuleCall) -> Sequence[Array]:
    """Return the reference's values for a program's outputs: first the call's outputs, then new values of variables."""
    wanted = list_arrays(reference.outputs)
    alike = reference.method == call.method and wanted.keys() == list_arrays(call.outputs).keys()
    assigned = answer.program.assigned
    if not alike or not reference.state.keys() >= set(assigned):
        return ()
    expected = [*wanted.values(), *(reference.state[name] for name in assigned)]
    return [reinterpret_bits(dtype, array) for dtype, array in zip(answer.dtypes, expected, strict=True)]


def _make_flags(answer: ProgramResult, expected: Sequence[Array], call: ModuleCall, folder: Path) -> FlagFile:
    """Return a call's flags. Tensors are in a directory shared by all calls, because most variables do not change."""
    artifact = answer.artifact
    with convert_write_errors(folder):
        folder.mkdir(exist_ok=True)
        return FlagFile(
            modules=(artifact.files[artifact.main],),
            function=artifact.function,
            device=answer.device or DEFAULT_DEVICE,
            inputs=tuple(_write_tensor(array, folder) for array in answer.given),
            expected=tuple(
                _write_tensor(array, folder, signed=one) for array, one in zip(expected, answer.unsigned, strict=False)
            ),
            parameters=tuple(path for path in artifact.files.values() if path.suffix == ".irpa"),
            rtol=call.rtol,
            atols={} if call.atol is None else dict.fromkeys(ATOLS, call.atol),
        )


def _write_tensor(array: Array, folder: Path, *, signed: bool = False) -> str:
    """Write a tensor for IREE's tools, and return the flag's value."""
    spec = make_spec("", array)
    # Use .npy only for floats and complex numbers. The tools read integers in .npy files as signed, which never equal
    # the signless integers of IREE's programs.
    kind = "npy" if array.dtype.kind in "fc" and spec.dtype in NUMPY_DTYPES else "bin"
    return give(
        spec, array, make_content_name(array), folder, str(folder.absolute()), tensors=kind, signed=signed
    ).value


def make_subject(
    module_class: Callable[[], Any], exported_names: Sequence[str] | None = None, name: str = ""
) -> FileSubject | TfSubject:
    """Return the module class as a subject for traces.

    Raises:
        UsageError: TensorFlow is not installed, no method is exported, or the class has no name.
    """
    name = choose_module_name(module_class, name)
    members = vars(module_class) if inspect.isclass(module_class) else {}
    if files := {name: value for name, value in members.items() if isinstance(value, ModelFile)}:
        return FileSubject(module_class, files, exported_names, name)
    from hil.testing.traces.tensorflow_module import TfSubject

    return TfSubject(module_class, exported_names, name)
