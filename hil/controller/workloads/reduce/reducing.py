"""Reduce a failing model: nodes first, then sizes, constants and attributes."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hil.controller.analysis.layers import Activations, compute_activations
from hil.controller.devices.board import Board
from hil.controller.models.conversions import can_convert, convert_to_onnx
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_random_tensor
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Job
from hil.controller.pipeline.stages import choose_board
from hil.controller.records.base import read_record
from hil.controller.records.decisions.reduce import ReduceRecord
from hil.controller.storage.isolation.isolated import IsolatedError
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import check_seal, convert_write_errors, make_id, seal
from hil.controller.storage.session_folders import DEFAULT_ROOT
from hil.controller.storage.sources.origin import find_origin, get_typed_command
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.workloads.reduce.candidates.mlir_parts import MLIR_MODEL, write_mlir_base, write_mlir_part
from hil.controller.workloads.reduce.candidates.parts import MODEL, write_base, write_part
from hil.controller.workloads.reduce.candidates.simplify import Change, apply_change, list_changes
from hil.controller.workloads.reduce.result import write_result
from hil.controller.workloads.reduce.search import Items, find_window, minimise
from hil.controller.workloads.reduce.trials import RECORD, Candidate, RunsSpent, Trials
from hil.core.digest import digest_of
from hil.core.results import Model
from hil.core.tensors import Array, TensorSpec
from hil.core.text import convert_to_json
from hil.errors import (
    BoardError,
    CompileCrashed,
    CompileFailed,
    ImportFailed,
    ReferenceFailed,
    StageTimeout,
    UsageError,
)

MAX_RUNS = 64
SLOW_ITERATIONS = 10
_LOG = "reduce.log"
# Key of the final run in the journal.
_RESULT = "result"
_TIMEOUT_SECONDS = 600.0


def reduce_model(
    job: Job,
    *,
    context: RunContext,
    screen: Progress,
    max_runs: int = MAX_RUNS,
    slow: float | None = None,
    resume: Path | None = None,
    signing_key: Path | None = None,
) -> ReduceRecord:
    """Find a small model that fails like the job's model, and write a report.

    Each smaller model runs on the board. A model that fails in the same way replaces the smallest model so far. The
    same way means: the same outcome and stage, and the same kind of difference or error message. With ``slow``, it
    means: at least this share of the time of the whole model.

    Args:
        job: one model with options as for a run. With ``resume``, only ``out`` is used.
        max_runs: maximum number of runs, including the runs of the whole model and of the result.
        slow: share of the time, above 0 and at most 1; None to reduce a failure. Without ``job.iterations``, each
            model runs :data:`SLOW_ITERATIONS` times.
        resume: directory of an interrupted reduction. For a finished reduction, the function returns the stored record.
        signing_key: private key that signs the bundle; None writes an unsigned bundle.

    Raises:
        UsageError: an option is invalid, the model does not fail, or its format cannot be reduced.
        ImportFailed: the model cannot be split.
        BoardError: the board failed repeatedly; the reduction can be resumed.
        StorageError: the directory cannot be written.
        KeyboardInterrupt: Ctrl-C; the smallest model so far is stored.
    """
    if resume is not None:
        record = read_record(resume / RECORD, ReduceRecord)
        check_seal(resume, record.request)
        if record.finished:
            return record
        # Forget the final run: a killed process may have run the result without writing the files.
        record.trials = [trial for trial in record.trials if trial.key != _RESULT]
        job = Job.from_record(record.request)
        folder = resume
    elif slow is not None and job.iterations == 1:
        job = replace(job, iterations=SLOW_ITERATIONS, warmup=max(job.warmup, 1))
    (path,) = job.models
    choice = choose_board(job)
    with convert_write_errors(job.out or DEFAULT_ROOT):
        if resume is None:
            folder = (job.out or DEFAULT_ROOT) / make_id(f"reduce-{path.stem}")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    case = Runner(context).begin(path, job.make_options(), folder, name=path.stem)
    if case.error is not None:
        raise case.error
    assert case.model is not None
    _check_format(case.model)
    if resume is None:
        request = convert_to_json(asdict(job))
        record = ReduceRecord(
            schema=1,
            id=folder.name,
            created=time.time(),
            origin=find_origin(job.labels),
            command=get_typed_command(),
            request=request,
            model=str(path),
            model_digest=case.model.digest,
            board=choice.name,
            hw_type=choice.config.hw_type,
            runtime=case.options.runtime or choice.config.runtime,
            max_runs=max_runs,
            slow=slow,
            folder=str(folder),
        )
        seal(folder, request)
    elif record.model_digest != case.model.digest:
        raise UsageError(f"{path} has changed since the reduction started", hint="start a new reduction")

    def note_board(board: Board) -> None:
        record.board = board.name

    screen.begin(record.model, max_runs)
    try:
        purpose = f"hil reduce {record.id}"
        with BoardPool(purpose, wait_s=job.wait_s, say=screen.note, opened=note_board, record_folder=folder) as pool:
            trials = Trials(record, folder, case.options, choice, job.faults, pool, context, screen)
            trials.save()
            try:
                _Reduction(trials, case).run(signing_key)
            finally:
                trials.save(is_last=True)
    finally:
        screen.end(record.model)
    return record


def _check_format(model: Model) -> None:
    if model.format not in ("onnx", "mlir") and not can_convert(model.format, "onnx"):
        raise UsageError(
            f"cannot reduce {model.path.name}: {model.format} models are not supported",
            hint="pass the ONNX or MLIR model that was converted to this format",
        )


@dataclass(frozen=True)
class _Base:
    """Copy of the model, from which the search takes parts.

    Attributes:
        parts: node numbers of each part.
        values: values of all tensors; None without a reference.
        text: description of a model with all parts.
        function: function of an MLIR module; "" for ONNX.
    """

    folder: Path
    parts: Sequence[Sequence[int]]
    values: Activations | None
    text: str
    function: str

    @property
    def path(self) -> Path:
        """The model's file."""
        return self.folder / (MLIR_MODEL if self.function else MODEL)


@dataclass
class _Reduction:
    """Steps of a reduction."""

    trials: Trials
    case: Case  # the whole model, imported

    def run(self, signing_key: Path | None) -> None:
        """Run all steps. Writes the smallest model so far, even if an error ends the search."""
        trials, record = self.trials, self.trials.record
        try:
            trials.run_model(self.case)
            try:
                if self._search_nodes() and not self._is_mlir:
                    self._simplify()
            except RunsSpent:
                trials.add_note(f"stopped after {record.max_runs} runs: --max-runs allows more")
            final = self._run_smallest()
            record.finished = True
            record.exit_code = record.failure.outcome.exit_code if record.failure else 0
            write_result(trials, final, signing_key)
            for name in ("base", "work"):
                shutil.rmtree(trials.folder / name, ignore_errors=True)
        except BoardError as error:
            self._keep_smallest()
            error.hint = "; ".join(filter(None, (f"resume with: {self._resume_command}", error.hint)))
            raise
        except KeyboardInterrupt:
            self._keep_smallest()
            trials.screen.interrupt(self._resume_command)
            raise

    def _keep_smallest(self) -> None:
        """Write the smallest model of an interrupted reduction, which can be resumed."""
        self.trials.record.finished, self.trials.record.exit_code = False, None
        write_result(self.trials, None, None)

    @property
    def _is_mlir(self) -> bool:
        return self.case.model is not None and self.case.model.format == "mlir"

    @property
    def _resume_command(self) -> str:
        return shlex.join(["hil", "reduce", "--resume", str(self.trials.folder)])

    @property
    def _log(self) -> Path:
        return self.trials.folder / "logs" / _LOG

    def _call(self, function: Any, arguments: Mapping[str, Any], what: str) -> Any:
        """Call a function in an isolated process. Raises ImportFailed."""
        isolated = self.trials.context.isolated
        try:
            return isolated.call(function, arguments, timeout=_TIMEOUT_SECONDS, log=self._log)
        except IsolatedError as error:
            raise ImportFailed(f"{what}: {error.message}", stage="import", detail=error.detail) from error

    def _search_nodes(self) -> bool:
        """Remove nodes. Return False if the failure does not occur in a model with the same nodes."""
        for base in self._bases():
            if self._test_parts(base, tuple(range(len(base.parts))), base.text):
                break
        else:
            what = "the failure does not occur in" if self.trials.record.slow is None else "the time is shorter for"
            note = f"{what} a copy of the model with fixed sizes: the model was not reduced"
            self.trials.add_note(note)
            return False
        fails = partial(self._is_failing, base)
        minimise(find_window(len(base.parts), fails), fails)
        return True

    def _bases(self) -> Iterator[_Base]:
        """Yield copies of the model for the search."""
        if self._is_mlir:
            assert self.case.model is not None
            self.trials.add_note("inputs of inner operations are random: hil has no reference for parts of MLIR")
            model = self.case.model
            yield self._write_base(model, "plain", "all operations", None, write_mlir_base, function=model.function)
            return
        model, values = self._convert()
        observed = {spec.name: [spec.dtype, list(spec.shape)] for spec in values.iter_specs()} if values else {}
        for folding, text in ((True, "all nodes"), (False, "all nodes and constants")):
            name = "folded" if folding else "plain"
            more: dict[str, Any] = {"dims": dict(model.dims), "observed": observed, "folding": folding}
            yield self._write_base(model, name, text, values, write_base, **more)

    def _write_base(
        self, model: Model, name: str, text: str, values: Activations | None, write: Any, **arguments: Any
    ) -> _Base:
        folder = self.trials.folder / "base" / name
        with convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        arguments |= {"path": str(model.path.absolute()), "folder": str(folder.absolute())}
        found = self._call(write, arguments, f"cannot split {model.path.name}")
        self.trials.record.nodes_before = self.trials.record.nodes_before or found["nodes"]
        return _Base(folder, found["parts"], values, text, found.get("function", ""))

    def _is_failing(self, base: _Base, chosen: Items) -> bool:
        return self._test_parts(base, chosen, f"parts {_format_ranges(chosen)} of {len(base.parts)}")

    def _test_parts(self, base: _Base, chosen: Items, text: str) -> bool:
        numbers = sorted({number for part in chosen for number in base.parts[part]})

        def make(folder: Path) -> Candidate | None:
            arguments = {"base": str(base.path.absolute()), "numbers": numbers, "folder": str(folder.absolute())}
            write: Any = write_part
            if base.function:
                write, arguments["function"] = write_mlir_part, base.function
            found = self._call(write, arguments, "cannot write a part of the model")
            if not found["nodes"]:
                return None
            inputs = {name: self._make_value(name, dtype, shape, base.values) for name, dtype, shape in found["inputs"]}
            return Candidate(folder / base.path.name, inputs, found["nodes"])

        return self.trials.test(f"{base.folder.name} {_format_ranges(chosen)}", text, make)

    def _make_value(self, name: str, dtype: str, shape: Sequence[Any], values: Activations | None) -> Array:
        """Return the values of a tensor in the whole model. Without a reference, return random values."""
        given = self.case.inputs or {}
        if name in given:
            return given[name]
        if values is not None and name in values:
            return values[name]
        sizes = [size if isinstance(size, int) else 1 for size in shape]
        return make_random_tensor(TensorSpec(name, dtype, tuple(sizes)), sizes, seed=self.case.options.seed)

    def _convert(self) -> tuple[Model, Activations | None]:
        """Return the model as ONNX, and the reference's values of all tensors (None without a reference)."""
        model, inputs, context = self.case.model, self.case.inputs, self.trials.context
        assert model is not None and inputs is not None
        if model.format != "onnx":
            file = convert_to_onnx(model, cache=context.cache, isolated=context.isolated, log=self._log).path
            model = import_model(file, dims={}, isolated=context.isolated, cache=context.cache)
        options = self.case.options
        references = [name for name in options.references if name in ("onnxruntime", "onnx-reference")]
        work: dict[str, Any] = {"cache": context.cache, "isolated": context.isolated, "log": self._log}
        work |= {"recompute": options.recompute, "timeout": options.timeout}
        try:
            return model, compute_activations(model, inputs, references=references, **work)
        except (ReferenceFailed, StageTimeout, CompileFailed, CompileCrashed, ImportFailed, UsageError) as error:
            self.trials.add_note(f"inputs of inner layers are random, because the reference failed: {error.message}")
            return model, None

    def _simplify(self) -> None:
        """Reduce sizes, replace constants, and remove attributes of the smallest model."""
        best = self.trials.best
        assert best is not None
        folder = self.trials.folder / "work" / "inputs"
        save_tensors(folder, best.inputs)
        groups: list[list[Change]] = self._call(
            list_changes,
            {"model": str(best.model.absolute()), "inputs": str(folder.absolute())},
            "cannot read the part",
        )
        applied: list[str] = []
        for group in groups:
            for change in group:
                key = digest_of("\n".join([str(best.nodes), *applied, change["text"]]).encode())
                if self.trials.test(key, change["text"], partial(self._change, change)):
                    applied.append(change["text"])
                    break

    def _change(self, change: Change, folder: Path) -> Candidate | None:
        best = self.trials.best
        assert best is not None
        inputs = folder / "given"
        save_tensors(inputs, best.inputs)
        arguments: dict[str, Any] = {"model": str(best.model.absolute()), "inputs": str(inputs.absolute())}
        arguments |= {"change": change, "folder": str(folder.absolute())}
        if not self._call(apply_change, arguments, "cannot change the part"):
            return None
        return Candidate(folder / MODEL, load_tensors(folder / "inputs"), best.nodes)

    def _run_smallest(self) -> Case | None:
        """Run the smallest model again, for the outputs of the board and the reference.

        Return None if nothing was reduced.
        """
        best = self.trials.best
        if best is None:
            return None
        return self.trials.run(_RESULT, "the smallest model again", best, is_final=True)


def _format_ranges(numbers: Items) -> str:
    """Return numbers in ascending order as ranges: ``0-4,7``."""
    ends = [place for place, (one, two) in enumerate(pairwise(numbers)) if two != one + 1]
    starts = [0, *(place + 1 for place in ends)]
    spans = zip(starts, [*ends, len(numbers) - 1], strict=True)
    return ",".join(f"{numbers[a]}-{numbers[b]}" if a < b else str(numbers[a]) for a, b in spans)
