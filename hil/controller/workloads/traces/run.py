"""Replay a stored trace on any board: all calls in order, with the state from the board's earlier calls."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from hil.controller.devices.board_choice import BoardChoice, use_device
from hil.controller.models.tensorflow.graphs import iter_leaves, name_new_value, replace_leaves
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Job
from hil.controller.pipeline.stages import choose_board
from hil.controller.records.run import RunRecord
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, lend_pool
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import RunStore, make_safe_name
from hil.controller.storage.sources.origin import get_typed_command
from hil.controller.workloads.run_job import run_cases
from hil.controller.workloads.traces.stored import OF_RUN, load_one
from hil.controller.workloads.traces.trace import MAX_LOADED, ModuleCall, Trace, list_arrays, reinterpret_bits
from hil.core.results import RunResult, Stage
from hil.core.tensors import Array, TensorSpec, get_dtype_name
from hil.core.text import convert_to_json
from hil.errors import NotRun, RunFailed, UsageError


def run_trace(
    job: Job,
    against: Path | None = None,
    *,
    run_id: str = "",
    screen: Progress,
    isolated: Isolated | None = None,
    choice: BoardChoice | None = None,
) -> RunRecord:
    """Replay the calls of a trace, storing results as they arrive. The resulting trace is stored too.

    Args:
        job: the board and the run settings. The only model is the trace's directory. The job's tolerances override the
            tolerances of the calls.
        against: the trace with the expected outputs. None selects the trace's stored reference, or the trace itself.
        run_id, isolated, choice: see :func:`hil.controller.workloads.run_job.run_job`.

    Returns:
        The run's record (the schema of docs/run.schema.json) with a case per call, and ``folder``, the run's directory.

    Raises:
        UsageError: the directory is not a trace, calls lack programs, or the traces' calls differ; nothing was run.
        KeyboardInterrupt: Ctrl-C; partial results are stored.
    """
    trace, folder = load_one(job.models[0], job.out)
    wanted, place = _load_expected(trace, folder, against, job.out)
    replay = Replay(trace, wanted)
    runtimes = sorted({call.program.runtime for call in trace.calls if call.program})
    if not runtimes or not all(call.program for call in trace.calls):
        raise UsageError(
            f"{folder} cannot be replayed: {trace.backend} has calls without a program", hint=_make_hint(folder)
        )
    job = replace(job, models=(folder,), runtime=runtimes[0])
    choice = use_device(choice, job.runtime, job.device) if choice else choose_board(job)
    with lend_pool(isolated, 1) as workers:
        context = RunContext(Cache(), workers)
        cases = replay.make_cases(job, context)
        typed = get_typed_command()
        run = RunStore(job.out).create(
            make_safe_name(f"{trace.module_name}-{trace.name}"), convert_to_json(asdict(job)), run_id, command=typed
        )
        record = run_cases(
            run,
            job,
            choice,
            cases,
            context,
            screen,
            runtimes=(job.runtime,),
            purpose=f"hil trace run {run.id}",
            most_loaded=MAX_LOADED,
            after=replay.store_call,
        )
    if record.folder:
        made = Trace(trace.module_name, choice.name, trace.name, trace.source, replay.ran_by, replay.made)
        made.reference, made.error, made.command = place, replay.error, typed
        made.save(run.folder / OF_RUN)
    return record


def _load_expected(trace: Trace, folder: Path, against: Path | None, out: Path | None) -> tuple[Trace, Path]:
    if against is not None:
        return load_one(against, out)
    if trace.reference is not None and trace.reference.is_dir():
        return load_one(trace.reference)
    return trace, folder


def _make_hint(folder: Path) -> str:
    module = Path(os.path.normpath(folder.absolute() / ".." / ".." / ".."))  # the root if the path is shallower
    able = [one for one in sorted(module.glob(f"*/traces/{glob.escape(folder.name)}")) if _has_programs(one)]
    return (
        f"use a trace with programs: {', '.join(map(str, able))}" if able else "use a trace of a backend with programs"
    )


def _has_programs(folder: Path) -> bool:
    try:
        return any(call.program for call in Trace.load(folder))
    except UsageError:  # damaged, or not a trace
        return False


@dataclass
class Replay:
    """Replay of a trace: the calls as cases, run in order."""

    trace: Trace
    wanted: Trace  # the trace with the expected outputs
    made: list[ModuleCall] = field(default_factory=list)  # calls replayed on this board so far
    ran_by: str = ""
    error: str = ""  # cause for the first call without a result; ``made`` ends before that call
    # state: current values of variables and constants. lost: variable without its new value -> call that should have
    # assigned the value.
    state: dict[str, Array] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def make_cases(self, job: Job, context: RunContext) -> list[Case]:
        """Import the calls as cases. Raises UsageError if the calls of the two traces differ."""
        self.state = dict(self.trace.initial)
        runner, known = Runner(context), dict(self.trace.initial)
        cases = []
        if len(self.trace.calls) != len(self.wanted.calls) or not self.trace.calls:
            counts = (
                f"{len(self.trace.calls)} on {self.trace.backend}, {len(self.wanted.calls)} on {self.wanted.backend}"
            )
            raise UsageError(f"traces require the same number of calls, at least 1: {counts}")
        for number, (call, other) in enumerate(zip(self.trace.calls, self.wanted.calls, strict=True)):
            assert call.program is not None
            known |= other.state
            expected = list_arrays(other.outputs)
            if other.method != call.method or expected.keys() != list_arrays(call.outputs).keys():
                raise UsageError(
                    f"call {number} ({call.method}): the trace on {self.wanted.backend} has a different method or"
                    " different output names"
                )
            if lacking := [name for name in call.program.assigned if name not in known]:
                raise UsageError(f"call {number}: {self.wanted.backend} has no new value of variable {lacking[0]}")
            expected |= {name_new_value(name): known[name] for name in call.program.assigned}
            options = replace(
                job.make_options(),
                function=call.program.function,
                rtol=call.rtol if job.rtol is None else job.rtol,
                atol=call.atol if job.atol is None else job.atol,
                # The call's tolerance is meant for the outputs. For variables that it cannot judge, use the default of
                # the dtype.
                replace_blind_tolerance=job.rtol is None and job.atol is None,
            )
            name = f"call_{number}_{make_safe_name(call.method)}"
            case = runner.begin(call.program.model, options, Path(), name=name, want_inputs=False)
            reference = RunResult(self.wanted.backend, expected)
            cases.append(replace(case, references=(reference,), make_inputs=_Bound(self, call)))
        return cases

    def store_call(self, case: Case) -> Iterator[Case]:
        """Store the assigned variables of a finished call, and append the call to the new trace."""
        number = int(case.name.split("_")[1])
        call = self.trace.calls[number]
        assert call.program is not None
        outputs = list(case.result.outputs.values()) if case.result is not None else []
        own = list_arrays(call.outputs)
        if case.result is None or len(outputs) != len(own) + len(call.program.assigned):
            self.lost |= dict.fromkeys(call.program.assigned, case.name)
            self.error = self.error or f"{case.name}: {case.reason}"
            return
        self.ran_by = self.ran_by or case.result.source
        arrays = [
            reinterpret_bits(get_dtype_name(one.dtype), array)
            for one, array in zip(own.values(), outputs, strict=False)
        ]
        news = {
            name: reinterpret_bits(get_dtype_name(self.state[name].dtype), array) if name in self.state else array
            for name, array in zip(call.program.assigned, outputs[len(own) :], strict=True)
        }
        self.state |= news
        self.lost = {name: at for name, at in self.lost.items() if name not in news}
        given = iter(arrays)
        returned = replace_leaves(call.outputs, lambda leaf: next(given) if isinstance(leaf, np.ndarray) else leaf)
        assigned = tuple(news)
        if not self.error:
            self.made.append(replace(call, outputs=returned, state=news, assigned=assigned, program=None))
        yield from ()


@dataclass(frozen=True)
class _Bound:
    """Function that creates the inputs of a call: the arguments, and the current values of the captured variables.

    The function is called when the program is loaded. All earlier calls have run by then and set the variables.
    """

    replay: Replay
    call: ModuleCall

    def __call__(self, specs: Sequence[TensorSpec]) -> Mapping[str, Array]:
        program = self.call.program
        assert program is not None
        for name in program.captured:
            if at := self.replay.lost.get(name):
                raise NotRun(f"variable {name} has no value: {at} did not return a value", stage=Stage.RUN.value)
            if name not in self.replay.state:
                raise RunFailed(f"the trace has no initial value of {name}", stage=Stage.RUN.value)
        own = [np.asarray(leaf) for _, leaf in iter_leaves(self.call.inputs) if hasattr(leaf, "dtype")]
        arrays = [*own, *(self.replay.state[name] for name in program.captured)]
        if len(arrays) != len(specs):
            what = f"the program takes {len(specs)} inputs, the call has {len(arrays)}"
            raise RunFailed(what, stage=Stage.RUN.value)
        return {spec.name: reinterpret_bits(spec.dtype, array) for spec, array in zip(specs, arrays, strict=True)}
