"""Find the first layer with a wrong output, isolated and within the whole model."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.compare.verdict import compare_output
from hil.controller.analysis.bisect.generation import find_wrong_call
from hil.controller.analysis.bisect.result import (
    WAYS,
    describe_verdict,
    find_exit_code,
    find_first_wrong,
    make_finding,
)
from hil.controller.analysis.bisect.subject import BisectSubject, apply_flow, expose_tensors, open_subject
from hil.controller.analysis.layers import Layer, select_layer_inputs, select_layer_outputs
from hil.controller.backends.compilers.iree_group import compile_together
from hil.controller.backends.gpu_targets import combine_flags
from hil.controller.backends.references.independence import find_relation
from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice, knows_target, use_device
from hil.controller.models.flows import quanta
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.quanta import compute_quantum_atol
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.records.record import record_comparison, record_verdict
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.given_inputs import add_inputs_file, describe_inputs_file
from hil.controller.pipeline.settings.model_settings import apply_model_settings
from hil.controller.pipeline.settings.options import COMPILE_TIMEOUT_SECONDS, DEFAULT_TIMEOUT_SECONDS, Options
from hil.controller.pipeline.stages import check_options
from hil.controller.pipeline.verdicts.accepting import load_rules
from hil.controller.records.base import make_record
from hil.controller.records.decisions.bisect import BisectFinding, BisectFindings, BisectRecord, BisectWay, LayerFinding
from hil.controller.records.outputs import StoredComparison
from hil.controller.records.run import StoredProvenance
from hil.controller.storage.isolation.isolated import IsolatedError
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import convert_write_errors, store_tensors, write_json
from hil.controller.storage.sources.origin import find_origin, get_typed_command
from hil.core.files import copy_file
from hil.core.results import BOARD_OUTCOMES, WRONG, Outcome, Stage
from hil.core.scratch import make_temporary_folder
from hil.errors import BoardRefused, BoardUnreachable, ImportFailed, StageError, UsageError

_WHOLE, _EXPOSED = "whole", "exposed"


def bisect(
    model: Path,
    choice: BoardChoice,
    *,
    context: RunContext,
    screen: Progress,
    options: Options | None = None,
    flow: Flow | None = None,
    artifact_model: Path | None = None,
    ways: Collection[BisectWay] = WAYS,
    group: str = "node",
    faults: tuple[str, ...] = (),
    wait_s: float = 60.0,
    out: Path | None = None,
) -> BisectRecord:
    """Find a model's first layer that is wrong on a board.

    *Isolated*: each layer is compiled separately and receives the reference's activations. So any error is caused by
    this layer.

    *Cumulative*: the model is compiled and run once, with its intermediates as additional outputs. Each intermediate is
    compared with the reference's. The unchanged model also runs, because additional outputs prevent the compiler from
    fusing operations. Tensors that depend on random numbers are computed but not judged.

    Args:
        model: an ONNX model; the reference outputs are considered correct.
        choice: the board. The board is opened once for all programs.
        options: inputs, tolerance, flags and so on, as for a run; None means all defaults.
        artifact_model: the file to compile instead of ``model``. It must have the same layers; its weights may differ.
        group: how nodes form layers: ``node`` or ``fused``.
        out: directory for ``bisect.json``, logs, and wrong layers' models and tensors; None disables storage.

    With ``options.generate``, the bisection uses the inputs of the first wrong call of the first wrong prompt.

    Raises:
        UsageError: an option is invalid or unsupported, or the two models have different layers.
        ImportFailed, ReferenceFailed, StageTimeout: the layers or their reference values cannot be computed.
        BoardRefused, BoardUnreachable: the board was never reached.
        StorageError: the directory cannot be written.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    given, begun = apply_model_settings(options or Options(), model), time.time()
    asked = add_inputs_file(given, model)
    if note := describe_inputs_file(given, asked, model):
        screen.note(note)
    chosen = apply_flow(asked, flow)
    choice = use_device(choice, chosen.runtime, chosen.device)
    check_options(chosen, choice)

    used = choice.name, choice.config.hw_type

    def note_board(board: Board) -> None:
        nonlocal used
        used = board.name, board.config.hw_type

    purpose = f"hil bisect {model.name}"
    with (
        make_temporary_folder("hil-bisect-") as scratch,
        BoardPool(purpose, wait_s=wait_s, say=screen.note, opened=note_board, record_folder=out) as pool,
    ):
        calls: list[str] = []
        if asked.generate is not None:
            screen.begin(model.stem, 1)
            screen.stage(model.stem, 0, "running the prompts")
            prompts = (artifact_model or model, chosen, Path(scratch), Runner(context), pool, choice, faults)
            try:
                inputs, call = find_wrong_call(*prompts)
            finally:
                screen.end(model.stem)
            calls.append(call)
            asked = replace(asked, generate=None, inputs=inputs)
            chosen = apply_flow(asked, flow)
        screen.begin(model.stem, 1)
        screen.stage(model.stem, 0, "splitting into layers")
        try:
            subject = open_subject(
                model,
                asked,
                flow=flow,
                artifact_model=artifact_model,
                group=group,
                context=context,
                folder=out or Path(scratch),
            )
        finally:
            screen.end(model.stem)
        folder = out or Path(scratch)
        bench = _TrialRunner(
            subject, flow, pool, choice, chosen.runtime, faults, context, screen, folder, keep=out is not None
        )
        found, notes = _run_trials(bench, ways)
        consoles = pool.save_consoles(is_last=True)
    source, runtime = subject.activations.source, chosen.runtime or choice.config.runtime
    first_isolated, first_cumulative = find_first_wrong(found, "isolated"), find_first_wrong(found, "cumulative")
    record = BisectRecord(
        schema=1,
        model=str(model),
        artifact_model=str(artifact_model or model),
        board=used[0],
        hw_type=used[1],
        runtime=runtime,
        flow=flow.name if flow else "",
        against=find_relation(runtime, source.partition(" ")[0]).named(source),
        layers=found.layers,
        whole=found.whole,
        exposed=found.exposed,
        notes=[*calls, *notes],
        folder=str(out or ""),
        consoles=consoles,
        created=begun,
        origin=find_origin(asked.labels),
        command=get_typed_command(),
        model_digest=subject.digest,
        first_isolated=first_isolated.name if first_isolated else None,
        first_cumulative=first_cumulative.name if first_cumulative else None,
        verdict=describe_verdict(found),
        exit_code=find_exit_code(found),
    )
    if out is not None:
        write_json(out / "bisect.json", record.to_json())
    return record


@dataclass(frozen=True)
class _TrialRunner:
    """Runs cases on the board and returns their findings."""

    subject: BisectSubject
    flow: Flow | None
    pool: BoardPool
    choice: BoardChoice
    runtime: str
    faults: tuple[str, ...]
    context: RunContext
    screen: Progress
    folder: Path
    keep: bool

    @property
    def log(self) -> Path:
        """Log for steps outside any case."""
        return self.folder / "logs" / "bisect.log"

    def run(self, trials: list[_Trial]) -> dict[str, BisectFinding]:
        """Run the trials and return case name -> finding, in completion order. Empties the list."""
        ended: dict[str, BisectFinding] = {}
        label = self.subject.model.name
        self.screen.begin(label, len(trials))

        def watch(case: Case, stage: Stage, note: str) -> None:
            self.screen.stage(label, len(ended), f"{case.name}: {stage.value} {note}".strip())

        runner = Runner(self.context, sink=ProgressSink(watch), lasting=self.keep)
        judged = {trial.case.name: (trial.atol, trial.by_chance) for trial in trials}
        cases = [trial.case for trial in trials]
        # Free judged cases, because there may be hundreds of layers.
        trials.clear()
        try:
            for case in runner.run(cases, self.pool, self.choice, runtimes=(self.runtime,), faults=self.faults):
                cases.clear()
                if not ended and isinstance(case.error, (BoardRefused, BoardUnreachable)):
                    raise case.error
                found = judge_case(case, self.subject.options.rtol, *judged[case.name])
                provenance = make_record(case.result.provenance if case.result else {}, StoredProvenance)
                found.placement, found.elsewhere = provenance.placement or None, provenance.elsewhere or ""
                ended[case.name] = found
                if self.keep:
                    keep_case(self.folder, case, found)
        finally:
            self.screen.end(label)
        return ended

    def start_trial(self, name: str, path: Path, options: Options, atol: Atol, by_chance: Collection[str]) -> _Trial:
        """Start a case with a separate directory."""
        folder = self.folder / name
        with convert_write_errors(folder):
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        # The pipeline compares with default tolerances, which are suitable for any tensor. judge_case applies the
        # requested tolerances.
        debug_ir = options.debug_ir / name if options.debug_ir else None
        options = replace(options, rtol=None, atol=None, debug_ir=debug_ir, references=())
        return _Trial(Runner(self.context).begin(path, options, folder, name=name), atol, by_chance)

    def choose_atol(self, path: Path) -> float | None:
        """Return the user's absolute tolerance, or the tolerance from the flow's quantisation steps, or None."""
        if self.subject.options.atol is not None or self.flow is None:
            return self.subject.options.atol
        return compute_quantum_atol(self.flow, path, self.context, self.log)


@dataclass(frozen=True)
class _Trial:
    """A case, the absolute tolerance for the outputs, and the names of outputs that depend on random numbers."""

    case: Case
    atol: Atol
    by_chance: Collection[str]


def _run_trials(bench: _TrialRunner, ways: Collection[BisectWay]) -> tuple[BisectFindings, list[str]]:
    """Return the findings and notes."""
    subject = bench.subject
    missing = {layer.name: subject.missing(layer) for layer in subject.layers}
    there = [layer for layer in subject.layers if not missing[layer.name]]
    trials: list[_Trial] = []
    if "cumulative" in ways:
        trials += [_start_model_trial(bench), _start_exposed_trial(bench, there)]
    if "isolated" in ways:
        alone = _start_layer_trials(bench, [layer for layer in there if layer.name not in subject.changed])
        _compile_together(bench, alone)
        trials += alone
        del alone
    ended = bench.run(trials)
    exposed = seen = ended.get(_EXPOSED)
    notes = [
        f"{name} ran partly on a different device: {one.elsewhere}" for name, one in ended.items() if one.elsewhere
    ]
    if seen is not None and is_model_error(seen):
        rest = drop_failed(subject.layers, {name for name, one in ended.items() if is_model_error(one)})
        left = [layer for layer in there if layer in rest]
        if len(rest) < len(subject.layers) and left:
            notes.append(
                f"the whole model with intermediate outputs ended in {seen.outcome.value}: the cumulative results "
                "exclude the failed layers and the layers that depend on them"
            )
            seen = bench.run([_start_exposed_trial(bench, left, only=True)])[_EXPOSED]
    layers = []
    for layer in subject.layers:
        skipped = make_finding(Outcome.SKIP, missing[layer.name]) if missing[layer.name] else None
        changed = subject.changed.get(layer.name)
        wrong = make_finding(Outcome.IMPORT_ERROR, changed, stage=Stage.IMPORT.value) if changed else None
        isolated = (skipped or wrong or ended[layer.name]) if "isolated" in ways else None
        cumulative = (skipped or extract_finding(layer, seen)) if seen is not None else None
        layers.append(
            LayerFinding(
                name=layer.name,
                op=layer.op,
                nodes=list(layer.nodes),
                depth=layer.depth,
                tensors=list(layer.outputs),
                isolated=isolated,
                cumulative=cumulative,
            )
        )
    return BisectFindings(layers=layers, whole=ended.get(_WHOLE), exposed=exposed), notes


def _start_layer_trials(bench: _TrialRunner, layers: Sequence[Layer]) -> list[_Trial]:
    """Return a trial per layer, which is compiled separately and gets the reference's activations as inputs."""
    subject = bench.subject
    twins = dict(zip((layer.name for layer in subject.layers), subject.twins, strict=True))

    def make(layer: Layer) -> _Trial:
        inputs, expected = (
            values(layer, subject.activations) for values in (select_layer_inputs, select_layer_outputs)
        )
        options = replace(subject.options, function="", dims={}, inputs=inputs, expected=expected)
        path = twins[layer.name].path
        return bench.start_trial(
            layer.name, path, options, bench.choose_atol(path), layer.outputs if layer.by_chance else ()
        )

    with ThreadPoolExecutor(bench.context.isolated.workers, thread_name_prefix="begin") as pool:
        return list(pool.map(make, layers))


def _compile_together(bench: _TrialRunner, trials: Sequence[_Trial]) -> None:
    """Compile the layers in batches, so that each program is in the cache before it is requested."""
    options, config = bench.subject.options, bench.choice.config
    iree = (options.compiler or options.runtime or config.runtime) == "iree"
    if not iree or options.debug_ir is not None or not knows_target(config, options.runtime):
        return
    label = bench.subject.model.name
    bench.screen.begin(label, 1)
    bench.screen.stage(label, 0, f"compiling {len(trials)} layers")
    # Ignore errors: a layer that fails here is compiled separately later, and reports the error then.
    with contextlib.suppress(StageError, UsageError):
        compile_together(
            [trial.case.model for trial in trials if trial.case.model is not None],
            flags=combine_flags(config.compile_flags.get("iree", ()), options.compile_flags),
            cache=bench.context.cache,
            isolated=bench.context.isolated,
            recompute=options.recompute,
            timeout=COMPILE_TIMEOUT_SECONDS,
            log_folder=bench.log.parent,
        )
    bench.screen.end(label)


def _start_model_trial(bench: _TrialRunner) -> _Trial:
    """Return a trial for the unchanged model."""
    subject, path = bench.subject, bench.subject.compiled.path
    expected = {name: subject.activations[name] for name in subject.activations.outputs}
    options = replace(subject.options, inputs=subject.inputs, expected=expected)
    return bench.start_trial(_WHOLE, path, options, bench.choose_atol(path), subject.by_chance)


def _start_exposed_trial(bench: _TrialRunner, layers: Sequence[Layer], *, only: bool = False) -> _Trial:
    """Return a trial for the model with these layers' tensors as additional outputs.

    If ``only`` is set, these tensors are the only outputs, and nodes that they do not need are removed.
    """
    subject = bench.subject
    names = list(dict.fromkeys(name for layer in layers for name in layer.outputs))
    own = [name for name in subject.activations.outputs if not only or name in names]
    path = expose_tensors(
        subject.compiled,
        [subject.activations.get_spec(name) for name in names],
        only=only,
        cache=bench.context.cache,
        isolated=bench.context.isolated,
        timeout=max(subject.options.timeout, DEFAULT_TIMEOUT_SECONDS),
        log=bench.log,
    )
    expected = {name: subject.activations[name] for name in [*own, *names]}
    options = replace(subject.options, inputs=subject.inputs, expected=expected)
    atol: Atol = subject.options.atol
    if atol is None and bench.flow is not None and bench.flow.quanta is not None:
        atol = read_quantum_atols(bench.flow.quanta, path, bench.context, bench.log)
    return bench.start_trial(_EXPOSED, path, options, atol, subject.by_chance)


def keep_case(folder: Path, case: Case, finding: BisectFinding) -> None:
    """Store a case that did not pass: the model files, and ``inputs/``, ``outputs/`` and ``references/`` as .npy."""
    if finding.outcome in (Outcome.PASS, Outcome.SKIP):
        return
    with convert_write_errors(folder / case.name):
        for name, path in case.model.files.items() if case.model else ():
            target = folder / case.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_file(path, target)
    outputs = case.result.outputs if case.result else None
    for kind, named in (("inputs", case.inputs), ("outputs", outputs), ("references", case.options.expected)):
        if isinstance(named, dict):
            store_tensors(folder, case.name, kind, named)


def repeat_command(folder: Path, name: str, board: list[str]) -> str:
    """Return the command that repeats a stored layer; ``board`` is the options for board and compiler."""
    (model,) = (path for path in (folder / name).iterdir() if path.suffix in (".onnx", ".mlir"))
    command = ["hil", "run", str(model), *board]
    for kind, option in (("inputs", "--input"), ("references", "--expected")):
        files = sorted((folder / name / kind).glob("*.npy"), key=lambda path: int(path.name.split("-", 1)[0]))
        command += [part for path in files for part in (option, str(path))]
    return shlex.join(command)


_TIMEOUT_SECONDS = 600.0


def read_quantum_atols(quantum: float, path: Path, context: RunContext, log: Path) -> dict[str, float]:
    """Return output -> absolute tolerance, from a flow's ``quanta`` and the model's quantisation steps.

    Outputs without quantisation are left out; see :func:`hil.controller.models.flows.quanta.compute_quantum_atol`.

    Raises:
        ImportFailed: the model cannot be read.
    """
    arguments = {"path": str(path.absolute())}
    try:
        steps: list[dict[str, Any]] = context.isolated.call(
            quanta.find_onnx, arguments, timeout=_TIMEOUT_SECONDS, log=log
        )
    except IsolatedError as error:
        raise ImportFailed(f"cannot read {path.name}: {error.message}", stage="import", detail=error.detail) from error
    return {one["name"]: one["step"] * min(quantum, one["roundings"]) for one in steps}


_BY_CHANCE = "depends on random numbers, so runs differ"

# A tolerance for all tensors, or a mapping from tensor names to tolerances. None, and a missing name, select the
# dtype's default.
Atol = float | Mapping[str, float] | None


def judge_case(case: Case, rtol: float | None, atol: Atol, by_chance: Collection[str] = ()) -> BisectFinding:
    """Return a case's finding, with every output judged within these tolerances.

    The case itself was compared within the default tolerances. A tolerance that is suitable for a model's outputs may
    exceed every value in an inner tensor. Such a comparison could never fail, so the tensor is not judged. Tensors in
    ``by_chance`` depend on random numbers and are not judged either.
    """
    outcome = case.outcome or Outcome.SKIP
    if case.error is not None:
        return make_finding(outcome, case.reason, stage=case.stage, hint=case.error.hint)
    if case.result is None or not case.references:
        return make_finding(outcome, case.reason)
    (verdict,) = case.verdicts
    if outcome is Outcome.UNSTABLE or not verdict.outputs or (rtol is None and atol is None and not by_chance):
        return make_finding(outcome, case.reason, outputs=record_verdict(verdict).outputs)
    judged: list[StoredComparison] = []
    unjudged: dict[str, str] = {}
    given, wanted = case.result.outputs, case.references[0].outputs
    if given.keys() != wanted.keys():  # the program has no output names: outputs are in the model's order
        given = dict(zip(wanted, given.values(), strict=True))
    for name, reference in wanted.items():
        if name in by_chance:
            unjudged[name] = _BY_CHANCE
            continue
        own = atol.get(name) if isinstance(atol, Mapping) else atol
        noise = case.references[0].noise.get(name)
        may = case.options
        named: dict[str, Any] = {"allow_blind": may.allow_blind, "allow_flush": may.allow_flush}
        named |= {"accept": load_rules(may.accept), "control": case.references[0].control.get(name)}
        try:
            found = compare_output(name, given[name], reference, rtol=rtol, atol=own, noise=noise, **named)
            judged.append(record_comparison(found))
        except UsageError as error:
            unjudged[name] = error.message
    return _judge_outputs(judged, unjudged)


def extract_finding(layer: Layer, whole: BisectFinding) -> BisectFinding:
    """Return a layer's finding, from a whole-model run with the layer's tensors as outputs."""
    names = set(layer.outputs)
    outputs = [one for one in whole.outputs if one.name in names]
    unjudged = {name: why for name, why in whole.unjudged.items() if name in names}
    if len(outputs) + len(unjudged) == len(names):
        return _judge_outputs(outputs, unjudged)
    if whole.outputs:
        return make_finding(Outcome.SKIP, "the layer failed, or depends on a failed layer")
    return make_finding(Outcome.SKIP, f"the whole model ended in {whole.outcome.value}: {whole.reason}")


def is_model_error(finding: BisectFinding) -> bool:
    """Return True if the finding is an error of the model, not a wrong output and not a board error."""
    return finding.outcome not in {*WRONG, Outcome.PASS, Outcome.SKIP, *BOARD_OUTCOMES}


def drop_failed(layers: Sequence[Layer], failed: Collection[str]) -> list[Layer]:
    """Return the layers that did not fail and do not depend on a failed layer."""
    lost: set[str] = set()
    rest = []
    for layer in layers:
        if layer.name in failed or not lost.isdisjoint(layer.inputs):
            lost.update(layer.outputs)
        else:
            rest.append(layer)
    return rest


def _judge_outputs(judged: Sequence[StoredComparison], unjudged: Mapping[str, str]) -> BisectFinding:
    blind = [one for one in judged if not one.passed and one.blind]
    wrong = [one for one in judged if not one.passed and not one.blind]
    outcome = Outcome.FAIL if wrong else Outcome.BLIND if blind else Outcome.PASS if judged else Outcome.SKIP
    first = next(iter(wrong or blind), None)
    reason = f"output {first.name}: {first.reason}" if first else next(iter(unjudged.values()), "")
    return make_finding(outcome, reason, outputs=judged, unjudged=unjudged)
