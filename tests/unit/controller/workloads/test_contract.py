"""Behaviour of every workload for lost boards, failing programs, Ctrl-C and late usage errors.

Each workload runs through its library function, with fake boards, importers, compilers and references.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_boards import FakeBoards, FakeProgram, X, Y, fake_boards, fake_choice, lost
from support.step_programs import SummingProgram, run_summing

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.controller.analysis.bench import job as bench_job
from hil.controller.analysis.bisect import find as bisection
from hil.controller.analysis.profile import collect
from hil.controller.backends import compilers, references
from hil.controller.backends.references import generation as reference_generation
from hil.controller.farm.client import submitting
from hil.controller.farm.client.results import fetch_targets
from hil.controller.farm.host.jobs import job_attempt
from hil.controller.farm.messages import JobResult, JobSpec, JobState, Kind
from hil.controller.models import importers
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import CaseSettings, Job, Options, flag_of, list_specs
from hil.controller.pipeline.stages import choose_board
from hil.controller.records.base import make_record
from hil.controller.records.decisions.bisect import BisectFindings
from hil.controller.records.lab.farm import JobResultRow
from hil.controller.records.outputs import ProfileDirectory
from hil.controller.storage.cache import Cache
from hil.controller.storage.history.store import HistoryStore
from hil.controller.storage.isolation import isolated as isolated_module
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.board_checks import check_board
from hil.controller.workloads.bundles.formats import write_format
from hil.controller.workloads.bundles.run import run_bundle
from hil.controller.workloads.gate.programs import ProgramRestorer
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.controller.workloads.gate.stored_cases import CaseMissing, CaseOpener
from hil.controller.workloads.gate.suite_cases import StoredSuiteCases
from hil.controller.workloads.history.automatic import add_results
from hil.controller.workloads.history.collect import Collector
from hil.controller.workloads.history.source_state import SourceOptions
from hil.controller.workloads.matrix.report import MatrixReport, load_matrix
from hil.controller.workloads.matrix.targets import combine_targets
from hil.controller.workloads.matrix.workloads import (
    resume_job_matrix,
    resume_suite_matrix,
    run_bundle_matrix,
    run_job_matrix,
    run_suite_matrix,
    trace_matrix,
)
from hil.controller.workloads.run_job import run_job
from hil.controller.workloads.study import run as study_run
from hil.controller.workloads.study.record import Asked, Experiment
from hil.controller.workloads.study.toolchains import Making, StepProgram, Toolchain
from hil.controller.workloads.suites.job import resume_suite, run_suite
from hil.controller.workloads.suites.request import Settings, SuiteRequest
from hil.controller.workloads.traces.run import run_trace
from hil.controller.workloads.traces.trace import CallProgram, ModuleCall, Trace
from hil.core.digest import digest_of
from hil.core.files import digest_file
from hil.core.results import Artifact, Model, Outcome, RunResult
from hil.core.steps import OUTPUTS
from hil.errors import (
    EXIT_BOARD,
    EXIT_INTERRUPTED,
    EXIT_NOTHING_RAN,
    EXIT_STAGE,
    BoardLost,
    BoardUnfit,
    BoardUnreachable,
    CompileCrashed,
    HilError,
    NotRun,
    ReferenceFailed,
    RunFailed,
    StageTimeout,
    UsageError,
)
from hil.testing.pytest_plugin import reporting
from hil.testing.traces.backends import Backend
from hil.testing.traces.target import BoardTarget

__all__ = ["fake_boards"]
pytest_plugins = "pytester"
A, B = "unix:/fake/a", "unix:/fake/b"
ONE = np.ones(2, np.float32)
# Start of the file of a decoder.
DECODER = b"decoder"
SPEC = """
steps = 3
[[prompt]]
name = "p"
tokens = [1, 4, 2]
[roles.cache]
cache = "new_cache"
"""


class FakeIsolated:
    """Fake for unused isolated processes."""

    workers = 1

    def __init__(self, workers: int | None = None) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeIsolated:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Quiet:
    """A screen that ignores progress."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def import_model(path: Path, *, function: str = "", **_: Any) -> Model:
    """Return a model with one input and one output, or a decoder, named after its file."""
    is_decoder = path.exists() and path.read_bytes().startswith(DECODER)
    inputs, outputs = (SummingProgram().inputs, SummingProgram().outputs) if is_decoder else ((X,), (Y,))
    digest = digest_of(path.read_bytes() if is_decoder else path.stem.encode())
    return Model(path.stem, "onnx", path, {path.name: path}, digest, function, inputs, outputs)


def compile_model(model: Model, *, runtime: str, **_: Any) -> Artifact:
    """Return a program named after its model."""
    digests = {"p": digest_of(model.name.encode())}
    return Artifact(runtime, "p", {}, digests, model.name, "none", inputs=(X,), outputs=(Y,))


def run_reference(model: Model, inputs: Any, **_: Any) -> RunResult:
    """Twice the input, as the fake boards compute."""
    return RunResult("fake", {"y": inputs["x"] * 2})


def run_generation(model: Model, inputs: Any, plan: Any, arithmetic: str = "float64", **_: Any) -> RunResult:
    """Return the outputs of the decoder, which are exact in every arithmetic."""
    return RunResult(arithmetic, dict(zip((*OUTPUTS, "new_cache"), run_summing(plan, inputs), strict=True)))


def refer_each(names: Any, model: Model, inputs: Any, **_: Any) -> tuple[list[RunResult], dict[str, Any]]:
    """Return 2x or 3x the input, or a failure, depending on the reference's name."""
    factors = {"onnxruntime": 2, "onnx-reference": 3}
    answers = [RunResult(name, {"y": inputs["x"] * factors[name]}) for name in names if name in factors]
    return answers, {name: ReferenceFailed("not today") for name in names if name not in factors}


def places_of(thing: Any) -> list[tuple[Any, str]]:
    """Return the hil modules that contain an object, with its name there."""
    modules = [module for name, module in sys.modules.items() if name.startswith("hil")]
    return [(module, name) for module in modules for name, value in vars(module).items() if value is thing]


FAKES = {
    importers.import_model: import_model,
    compilers.compile_model: compile_model,
    references.run_reference_with_fallback: lambda *given, **work: (run_reference(*given, **work), {}),
    references.refer_each: refer_each,
    reference_generation.run_generation: run_generation,
    references.measure_noise: lambda *_, **__: {},
    isolated_module.Isolated: FakeIsolated,
}


@pytest.fixture(autouse=True)
def _objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for original, fake in FAKES.items():
        for module, name in places_of(original):
            monkeypatch.setattr(module, name, fake)
    yield
    # Modules imported during the test also hold the fake.
    for original, fake in FAKES.items():
        for module, name in places_of(fake):
            if module.__name__ != __name__:
                setattr(module, name, original)


def models(folder: Path, names: str = "abc") -> tuple[Path, ...]:
    """Create model files that no test reads."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.onnx").write_bytes(name.encode())
    return tuple(folder / f"{name}.onnx" for name in names)


def by_run(place: Path, **how: Any) -> dict[str, str]:
    return by_job(Job(models=models(place / "models"), board=A, runtime="onnxruntime", out=place / "runs", **how))


def by_job(job: Job) -> dict[str, str]:
    record = run_job(job, screen=Quiet()).to_json()
    return {case["name"]: case["outcome"] for case in record["cases"]}


def decoders(place: Path) -> tuple[Path, ...]:
    """Create decoders, each with a specification that suites find."""
    files = models(place / "models")
    for file in files:
        file.write_bytes(DECODER + file.stem.encode())
        file.with_suffix(".generate.toml").write_text(SPEC)
    return files


def by_generation(place: Path) -> dict[str, str]:
    spec = decoders(place)[0].with_suffix(".generate.toml")
    found = by_job(Job(models=decoders(place), generate=spec, board=A, runtime="onnxruntime", out=place / "runs"))
    return {name.partition("-")[0]: outcome for name, outcome in found.items()}


def by_suite_generation(place: Path) -> dict[str, str]:
    decoders(place)
    return by_suite(place)


def bundle(place: Path) -> Bundle:
    """A program of three methods with a case each."""
    program = place / "main.bin"
    program.write_bytes(b"program")
    artifact = Artifact("onnxruntime", "main.bin", {"main.bin": program}, {}, "a", "none", (), (X,), (Y,))
    case = MethodTestCase([ONE], [ONE * 2], name="ones")
    suites, signatures = [MethodTestSuite(name, [case]) for name in "abc"], dict.fromkeys("abc", Signature((X,), (Y,)))
    return Bundle.create(artifact, suites, signatures=signatures)


def three_methods(place: Path) -> Path:
    """Save the bundle; return its path."""
    bundle(place).save(place / "three.hilb")
    return place / "three.hilb"


def by_bundle(place: Path, **how: Any) -> dict[str, str]:
    job = Job(models=(three_methods(place),), board=A, out=place / "runs", **how)
    record = run_bundle(job, (), None, screen=Quiet()).to_json()
    return {case["name"].partition("-")[0]: case["outcome"] for case in record["cases"]}


def asked(place: Path, *boards: str, **how: Any) -> SuiteRequest:
    """Return a suite request for a directory; create three models if it is missing."""
    if not (place / "models").exists():
        models(place / "models")
    settings = Settings(**how)
    return SuiteRequest(str(place / "models"), "onnxruntime", boards or (A,), layers=False, settings=settings)


def by_suite(place: Path, *boards: str, **how: Any) -> dict[str, str]:
    request = asked(place, *boards, **how)
    run = run_suite(request, out=place / "suite", screen=Quiet())
    return {record.model: record.outcome for record in run.read_records()}


def by_bench(place: Path, **how: Any) -> dict[str, str]:
    job = Job(models=models(place / "models", "b"), board=A, runtime="onnxruntime", out=place / "runs", **how)
    folder = bench_job.run_bench(bench_job.BenchJob(job), screen=Quiet()).folder
    record = json.loads((Path(folder) / "run.json").read_text())
    return {case["name"]: case["outcome"] for case in record["cases"]}


def by_bisect(place: Path) -> dict[str, str]:
    found: dict[str, str] = {}

    def look(bench: Any, ways: Any) -> tuple[BisectFindings, list[str]]:
        trials = [bench.start_trial(path.stem, path, Options(runtime="onnxruntime"), None, ()) for path in files]
        found.update({name: one.outcome for name, one in bench.run(trials).items()})
        return BisectFindings(layers=[], whole=None, exposed=None), []

    files = models(place / "models")
    activations = SimpleNamespace(source="fake")
    subject = SimpleNamespace(
        model=import_model(files[0]), options=Options(), activations=activations, digest=digest_file(files[0])
    )
    context = RunContext(Cache(place / "cache"), FakeIsolated())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bisection, "open_subject", lambda *_, **__: subject)
        patch.setattr(bisection, "_run_trials", look)
        options = Options(runtime="onnxruntime")
        bisection.bisect(files[0], fake_choice(), context=context, screen=Quiet(), options=options)
    return found


def by_traces(place: Path) -> dict[str, str]:
    context = RunContext(Cache(place / "cache"), FakeIsolated())
    target = BoardTarget(Backend("board:a", "a", "onnxruntime", fake_choice()), context, place)
    ended: dict[str, str] = {}
    try:
        for name in "abc":
            artifact = compile_model(import_model(Path(f"{name}.onnx")), runtime="onnxruntime")
            try:
                answer = target.run(artifact, name, [ONE], [Y])
                ended[name] = "PASS" if np.array_equal(answer.returned[0], ONE * 2) else "FAIL"
            except UsageError:
                raise
            except HilError as error:
                ended[name] = error.outcome or "RUN_ERROR"
    finally:
        target.close()
    return ended


def three_calls(place: Path) -> Path:
    """Save a trace that calls three programs once each."""
    module = place / "Net"
    module.mkdir(parents=True)
    files = models(module)
    calls = [
        ModuleCall(file.stem, (ONE,), (ONE * 2,), program=CallProgram(file, file.stem, "onnxruntime")) for file in files
    ]
    return Trace("Net", "fake", "all", calls=calls).save(module / "fake" / "traces" / "all")


def by_trace_run(place: Path, **how: Any) -> dict[str, str]:
    job = Job(models=(three_calls(place),), board=A, out=place / "runs", **how)
    record = run_trace(job, screen=Quiet()).to_json()
    return {case["name"].rpartition("_")[2]: case["outcome"] for case in record["cases"]}


def by_check(place: Path) -> dict[str, str]:
    (found,) = [one for one in check_board(fake_choice(), runtime="onnxruntime") if one.name == "program"]
    return {"tiny": {"pass": "PASS", "skip": "SKIP"}.get(found.state, found.found.partition(":")[0])}


def by_pytest(place: Path, **how: Any) -> dict[str, str]:
    pytester = by_pytest.pytester
    if not (place / "models").exists():
        models(place / "models")
    pytester.makeini(f"[pytest]\nhil_models = {place / 'models'}\n")
    typed = [(name, one) for name, value in how.items() for one in (value if isinstance(value, tuple) else [value])]
    words = [f"--hil-{flag_of(name, list_specs(CaseSettings)[name])[2:]}={value}" for name, value in typed]
    words += ["--hil-no-layers", f"--hil-out={place / 'out'}"]
    pytester.inline_run("--hil-board", A, "--hil-flow", "onnxruntime", *words)
    lines = (next((place / "out").glob("**/results.jsonl"))).read_text().splitlines()
    return {record["model"]: record["outcome"] for record in map(json.loads, lines)}


def by_study(place: Path, toolchains: tuple[str, ...] = ("fake",)) -> dict[str, str]:
    def make(making: Making) -> StepProgram:
        artifact = compile_model(import_model(Path(f"{making.folder.parent.name}.onnx")), runtime="onnxruntime")
        return StepProgram(artifact, ("x",), ("y",), {})

    experiments = [Experiment(name, name, "", place / name) for name in "abc"]
    judging = {"rtol": 1e-5, "atol": None, "allow_blind": (), "accept": ()}
    fake = Toolchain(make, lambda: "fake 1", "onnxruntime", ())
    settings = {"steps": 1, "seed": 0, "no_fallback": False, **judging}
    asked = Asked(experiments, toolchains, timeout=60.0, out=place / "study", resume=False, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_run, "TOOLCHAINS", dict.fromkeys(toolchains, fake))
        patch.setattr(study_run, "require_version", lambda *_: "1")
        # TensorFlow's training normally runs in a separate process; its results are read step by step.
        patch.setattr(study_run, "call", lambda *_, **__: None)
        stored = {"batch": {"x": ONE}, "result": {"y": ONE * 2}, "noise": {}}
        patch.setattr(study_run, "load_tensors", lambda path: stored[path.name.partition("-")[0]])
        study = study_run.run_study(asked, fake_choice(), wait_s=0.0, screen=Quiet())
    if study.exit_code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return {row.experiment: row.outcome.value for row in study.rows if row.outcome}


def by_farm(place: Path, work: submitting.Workload) -> dict[str, str]:
    """Run the jobs of an order like a board's host."""
    ended: dict[str, str] = {}
    for number, spec in enumerate(work.specs):
        job = make_record(json.loads(json.dumps(spec.to_json())), JobSpec)
        files = place / f"host{number}"
        for at, digest in job.files.items():
            (files / at).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(work.uploads[digest], files / at)
        grant = SimpleNamespace(spec=job)
        told: dict[str, str] = {}
        attempt: Any = SimpleNamespace(
            grant=grant,
            board=fake_choice(),
            print=lambda text: None,
            case_ended=lambda name, outcome, reason, told=told: told.update({name: outcome}),
            isolated=None,
        )
        ran, _ = job_attempt._execute_job(attempt, files, place / f"out{number}")
        outcomes = {case.get("name") or case["id"]: case["outcome"] for case in ran.to_json()["cases"]}
        assert told == outcomes, "each is told as it ends"
        ended |= outcomes
    return ended


@dataclass(frozen=True)
class Workload:
    """Entry point of a workload and its differences from the contract.

    Attributes:
        run: runs the workload; returns case name -> outcome. Takes case settings if the workload does.
        case: the case (and program) that an event affects.
        all: the names of all cases.
        runs_again: whether a case runs again after its board was lost.
        usage: outcome of a late usage error; "" means that the error is raised.
    """

    run: Callable[..., dict[str, str]]
    case: str = "b"
    all: str = "abc"
    runs_again: bool = False
    usage: str = ""

    def wanted(self, outcome: str) -> dict[str, str]:
        """Return the expected outcomes if only the affected case ends with this one."""
        names = [self.case] if len(self.all) == 1 or self.case == "tiny" else list(self.all)
        return {name: outcome if name == self.case else "PASS" for name in names}


WORKLOADS = {
    "run": Workload(by_run),
    "generation": Workload(by_generation),
    "suite generation": Workload(by_suite_generation, runs_again=True, usage="RUN_ERROR"),
    "bundle run": Workload(by_bundle),
    "suite": Workload(by_suite, runs_again=True, usage="RUN_ERROR"),
    "bench": Workload(by_bench, all="b"),
    "bisect": Workload(by_bisect),
    "traces": Workload(by_traces),
    "trace run": Workload(by_trace_run),
    "check": Workload(by_check, case="tiny", usage="not that way"),
    "pytest": Workload(by_pytest, usage="RUN_ERROR"),
    "study": Workload(by_study),
}


# Event -> stage, error, and outcome of the affected case.
EVENTS = {
    "a board lost while loading": ("load", lost, "BOARD_LOST"),
    "a board lost in the run": ("run", lost, "BOARD_LOST"),
    "a board without room": ("push", lambda: BoardUnfit("the disk is full"), "BOARD_UNFIT"),
    "a board without memory": ("run", lambda: BoardUnfit("no memory"), "BOARD_UNFIT"),
    "a program that fails": ("run", lambda: RunFailed("no"), "RUN_ERROR"),
    "a program that hangs": ("run", lambda: StageTimeout("late"), "TIMEOUT"),
    "a program that a board lacks something for": ("load", lambda: NotRun("no such delegate"), "SKIP"),
}


@pytest.fixture(params=WORKLOADS)
def workload(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workload]:
    """Each workload in turn."""
    if request.param == "pytest":
        monkeypatch.setattr(by_pytest, "pytester", request.getfixturevalue("pytester"), raising=False)
    if request.param == "bench":
        # The measurement after the trial is not part of the contract.
        monkeypatch.setattr(bench_job, "measure", lambda *_: None)
        monkeypatch.setattr(
            bench_job._BenchRun, "_finish_run", lambda bench, run, _: SimpleNamespace(folder=str(run.folder))
        )
    return WORKLOADS[request.param]


@pytest.mark.parametrize("event", EVENTS)
def test_board_event_ends_only_affected_case(
    fake_boards: FakeBoards, workload: Workload, event: str, tmp_path: Path
) -> None:
    stage, error, outcome = EVENTS[event]
    fake_boards.scripts[A] = {(stage, workload.case): error()}
    again = workload.runs_again and outcome == "BOARD_LOST"
    assert workload.run(tmp_path) == workload.wanted("PASS" if again else outcome)
    assert fake_boards.did.count(f"{stage} {workload.case}") == 1 + again
    assert all(board.closed for board in fake_boards.opened)


def test_bench_skips_measurement_after_failed_load(
    fake_boards: FakeBoards, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_boards.scripts[A] = {("load", "b"): NotRun("no such delegate")}
    monkeypatch.setattr(bench_job, "measure", lambda *_: pytest.fail("nothing was loaded"))
    job = Job(models=models(tmp_path / "models", "b"), board=A, runtime="onnxruntime", out=tmp_path / "runs")
    record = bench_job.run_bench(bench_job.BenchJob(job), screen=Quiet())
    assert (record.sides[0].outcome, record.exit_code) == (Outcome.SKIP, EXIT_NOTHING_RAN)


def test_pytest_skips_unsupported_program_with_reason(fake_boards: FakeBoards, pytester: pytest.Pytester) -> None:
    models(pytester.path / "models")
    fake_boards.scripts[A] = {("load", "b"): NotRun("no such delegate")}
    pytester.makeini("[pytest]\nhil_models = models\n")
    words = ("-rs", f"--hil-board={A}", "--hil-flow=onnxruntime", "--hil-no-layers", "--junitxml=junit.xml")
    ended = pytester.runpytest_inprocess(*words)
    ended.assert_outcomes(passed=2, skipped=1)
    ended.stdout.fnmatch_lines(["SKIPPED*models/b.onnx*no such delegate"])
    assert '"hil_outcome" value="SKIP"' in (pytester.path / "junit.xml").read_text()


def test_workload_passes_and_releases_board(fake_boards: FakeBoards, workload: Workload, tmp_path: Path) -> None:
    assert workload.run(tmp_path) == workload.wanted("PASS")
    assert len(fake_boards.opened) == 1 and fake_boards.opened[0].closed


@pytest.mark.ci
@pytest.mark.parametrize("stage", ["load", "run"])
def test_ctrl_c_ends_workload_and_releases_board(
    fake_boards: FakeBoards, workload: Workload, stage: str, tmp_path: Path
) -> None:
    fake_boards.scripts[A] = {(stage, workload.case): KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        workload.run(tmp_path)
    assert all(board.closed for board in fake_boards.opened) and f"{stage} c" not in fake_boards.did


def test_late_usage_error_raises_or_becomes_outcome(
    fake_boards: FakeBoards, workload: Workload, tmp_path: Path
) -> None:
    fake_boards.scripts[A] = {("load", workload.case): UsageError("not that way")}
    if workload.usage:
        assert workload.run(tmp_path) == workload.wanted(workload.usage)
    else:
        with pytest.raises(UsageError, match="not that way"):
            workload.run(tmp_path)
    assert all(board.closed for board in fake_boards.opened)


def test_resumed_run_does_not_repeat_finished_cases(fake_boards: FakeBoards, tmp_path: Path) -> None:
    fake_boards.scripts[A] = {("run", "b"): KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        by_run(tmp_path)
    (stored,) = (one.name for one in (tmp_path / "runs").iterdir() if (one / "run.json").exists())
    record = run_job(Job(out=tmp_path / "runs"), resume=stored, screen=Quiet())
    assert [case.outcome for case in record.cases] == [Outcome.PASS] * 3
    assert [fake_boards.did.count(f"run {name}") for name in "abc"] == [1, 2, 1]


def change(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


# Change of the files of a generation -> whether the finished case runs again.
GENERATION_CHANGES: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "nothing": (lambda folder: None, False),
    "steps": (lambda folder: change(folder / "a.generate.toml", "steps = 3", "steps = 4"), True),
    "tokens": (lambda folder: change(folder / "a.generate.toml", "[1, 4, 2]", "[1, 4, 3]"), True),
    "reference": (lambda folder: change(folder / "c.onnx", "decoder", "decoder of another digest"), True),
    "other prompt": (
        lambda folder: change(folder / "a.generate.toml", "[roles", "[[prompt]]\ntokens=[1]\n[roles"),
        False,
    ),
}


@pytest.mark.parametrize("what", GENERATION_CHANGES)
def test_resumed_generation_repeats_changed_cases(fake_boards: FakeBoards, what: str, tmp_path: Path) -> None:
    alter, is_changed = GENERATION_CHANGES[what]
    a, b, _ = decoders(tmp_path)
    spec = tmp_path / "models" / "a.generate.toml"
    change(spec, "steps = 3", 'steps = 3\nreference = "c.onnx"')
    fake_boards.scripts[A] = {("run", "b"): KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        by_job(Job(models=(a, b), generate=spec, board=A, runtime="onnxruntime", out=tmp_path / "runs"))
    alter(tmp_path / "models")
    (run,) = (one.name for one in (tmp_path / "runs").iterdir() if (one / "run.json").exists())
    record = run_job(Job(out=tmp_path / "runs"), resume=run, screen=Quiet())
    assert {case.outcome for case in record.cases} == {Outcome.PASS}
    assert fake_boards.did.count("run a") == 1 + is_changed + (what == "other prompt")


def test_resumed_generation_forgets_searched_lengths_of_changed_prompt(fake_boards: FakeBoards, tmp_path: Path) -> None:
    a, *_ = decoders(tmp_path)
    spec = a.with_suffix(".generate.toml")
    change(spec, "steps = 3", "steps = 3\nlengths = [1]")
    fake_boards.scripts[A] = {("run", "a"): RunFailed("broken")}
    job = Job(models=(a,), generate=spec, board=A, runtime="onnxruntime", out=tmp_path / "runs")
    before = run_job(job, screen=Quiet()).to_json()
    assert [case["name"] for case in before["cases"]] == ["a-p", "a-p-1", "a-p-2"] and before["smallest_failing"]
    fake_boards.scripts.clear()
    change(spec, "[1, 4, 2]", "[1, 4, 3]")
    after = run_job(Job(out=tmp_path / "runs"), resume=before["id"], screen=Quiet()).to_json()
    found = {case["name"]: case["outcome"] for case in after["cases"]}
    assert found == {"a-p": "PASS", "a-p-1": "PASS"} and "smallest_failing" not in after


def test_resumed_generation_refuses_invalid_specification(fake_boards: FakeBoards, tmp_path: Path) -> None:
    fake_boards.scripts[A] = {("run", "b"): KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        by_generation(tmp_path)
    (run,) = (one.name for one in (tmp_path / "runs").iterdir() if (one / "run.json").exists())
    change(tmp_path / "models" / "a.generate.toml", "new_cache", "newer_cache")
    with pytest.raises(UsageError, match="no output 'newer_cache'"):
        run_job(Job(out=tmp_path / "runs"), resume=run, screen=Quiet())


def test_filter_without_match_adds_note(fake_boards: FakeBoards, tmp_path: Path) -> None:
    class Says(Quiet):
        def note(self, text: str) -> None:
            said.append(text)

    said: list[str] = []
    request = replace(asked(tmp_path), filters=("a_*", "nothing*", "=b"))
    run = run_suite(request, out=tmp_path / "suite", screen=Says())
    assert [record.outcome for record in run.read_records()] == ["PASS"]
    told = [line for line in said if line.startswith("--filter")]
    assert told == [f"--filter {one}: no case matches" for one in ("nothing*", "=b")]


def test_unconfirmed_failure_stays_failure_with_profiles(
    fake_boards: FakeBoards, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(program: FakeProgram, *given: Any, **how: Any) -> Any:
        runs.append(program.artifact.function)
        monkeypatch.setattr(FakeProgram, "factor", 3 if runs == ["a"] else 2)
        return answer(program, *given, **how)

    def write_profiles(case: Any, folders: dict[str, Path], **_: Any) -> Iterator[Any]:
        written.append((case.name, case.outcome.value))
        yield [ProfileDirectory(kind=kind, folder=str(folder), notes=[]) for kind, folder in folders.items()]

    runs: list[str] = []
    written: list[tuple[str, str]] = []
    answer = FakeProgram.run
    monkeypatch.setattr(FakeProgram, "run", run)
    monkeypatch.setattr(collect, "write_profiles", write_profiles)
    models(tmp_path / "models", "a")
    request = replace(asked(tmp_path), confirm=2, profiles={"run": str(tmp_path / "profiles")})
    (record,) = run_suite(request, out=tmp_path / "suite", screen=Quiet()).read_records()
    assert (record.outcome, record.confirmed, written) == ("FAIL", "flaky", [("a_full_model", "FAIL")])


def test_suite_on_given_board_uses_device_of_flow(fake_boards: FakeBoards, tmp_path: Path) -> None:
    flows = tmp_path / "flows.toml"
    flows.write_text('[gpu]\nruntime = "onnxruntime"\ndevice = "cuda"\n')
    request = replace(asked(tmp_path), flow=f"{flows}:gpu")
    run_suite(request, out=tmp_path / "suite", screen=Quiet(), choices=[fake_choice()])
    assert [board.config.devices for board in fake_boards.opened] == [{"onnxruntime": "cuda"}]


def test_resumed_suite_runs_remaining_cases(fake_boards: FakeBoards, tmp_path: Path) -> None:
    fake_boards.scripts[A] = {("run", "b"): KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        by_suite(tmp_path)
    run = resume_suite(tmp_path / "suite", screen=Quiet())
    assert sorted(record.outcome for record in run.read_records()) == ["PASS"] * 3
    before = [board.did.count("run a") for board in fake_boards.opened]
    assert sum(before) == 1


def test_study_row_names_cause_after_lost_board(fake_boards: FakeBoards, tmp_path: Path) -> None:
    def gone(message: str) -> BoardLost:
        fake_boards.refuse[A] = [BoardUnreachable(message)]
        return lost()

    class Dies(dict[tuple[str, str], BaseException]):
        def pop(self, key: Any, default: Any = None) -> Any:
            return gone("no answer") if key == ("load", "a") and len(fake_boards.opened) == 1 else default

    fake_boards.scripts[A] = Dies()
    by_study(tmp_path, ("fake", "other"))
    first, second, *others = json.loads((tmp_path / "study" / "study.json").read_text())["rows"]
    assert (first["outcome"], first["failed_stage"]) == ("BOARD_LOST", "load")
    assert (second["outcome"], second["message"]) == ("BOARD_UNREACHABLE", "no answer") and second["failed_stage"]
    assert {row["outcome"] for row in others} == {"PASS"}


def test_remaining_board_runs_cases_of_lost_board(fake_boards: FakeBoards, tmp_path: Path) -> None:
    class Dies(dict[tuple[str, str], BaseException]):
        def pop(self, key: Any, default: Any = None) -> Any:
            if key[0] == "run":
                fake_boards.refuse[A] = [BoardUnreachable("gone for good")]
                return lost()
            return default

    fake_boards.scripts[A] = Dies()
    assert by_suite(tmp_path, A, B) == dict.fromkeys("abc", "PASS")
    assert all(board.closed for board in fake_boards.opened)


def stored(place: Path) -> list[dict[str, Any]]:
    """Return the case records that a workload stored in a directory."""
    lines = [line for file in place.rglob("results.jsonl") for line in file.read_text().splitlines()]
    runs = [json.loads(file.read_text()) for file in place.rglob("run.json")]
    return [*map(json.loads, lines), *(case for run in runs for case in run["cases"])]


# Workloads that compare cases with references. Bundles, traces, studies and board checks bring expected outputs; hil
# bisect uses one reference for all layers.
REFERRED = ["run", "suite", "bench", "pytest"]


@pytest.mark.parametrize("workload", REFERRED, indirect=True)
def test_workload_uses_chosen_references_and_notes_dispute(
    fake_boards: FakeBoards, workload: Workload, tmp_path: Path
) -> None:
    named = ("onnx-reference", "onnxruntime", "iree-llvm-cpu")
    assert workload.run(tmp_path, references=named) == workload.wanted("PASS")
    dispute = "onnx-reference vs onnxruntime on output y"
    records = stored(tmp_path)
    assert records
    for record in records:
        assert record["disagreement"] == dispute
        reason = record.get("reason", record.get("message"))
        assert f"the references disagree: {dispute}; the board agrees with onnxruntime" in reason
        assert "reference iree-llvm-cpu failed: not today" in reason


@pytest.mark.parametrize("workload", REFERRED, indirect=True)
def test_chosen_reference_decides_outcome(fake_boards: FakeBoards, workload: Workload, tmp_path: Path) -> None:
    found = workload.run(tmp_path, references=("onnx-reference",))
    assert set(found.values()) == {"FAIL"}


@pytest.mark.parametrize(("expected", "outcome"), [("2 4", "PASS"), ("9 9", "FAIL")])
def test_expected_outputs_decide_and_references_add_notes(
    fake_boards: FakeBoards, tmp_path: Path, expected: str, outcome: str
) -> None:
    given = {
        "inputs": ("2xf32=1 2",),
        "expected": (f"2xf32={expected}",),
        "references": ("onnxruntime", "iree-llvm-cpu"),
    }
    assert set(by_run(tmp_path, **given).values()) == {outcome}
    records = stored(tmp_path)
    assert records
    for record in records:
        assert [verdict["outcome"] for verdict in record["verdicts"]] == [outcome, "PASS"]
        assert "reference iree-llvm-cpu failed: not today" in record["reason"]
        assert ("the references disagree: expected" in record["reason"]) == (outcome == "FAIL")


def test_bundle_run_notes_unusable_reference(fake_boards: FakeBoards, tmp_path: Path) -> None:
    assert set(by_bundle(tmp_path, references=("onnxruntime",)).values()) == {"PASS"}
    (told,) = {case["reason"] for case in stored(tmp_path)}
    assert "reference onnxruntime failed: the case contains a compiled program" in told


def test_single_iterations_need_no_preparation(fake_boards: FakeBoards, tmp_path: Path) -> None:
    by_run(tmp_path)
    assert not any(board.prepared for board in fake_boards.opened)


@pytest.mark.parametrize("workload", ["run", "bundle run", "trace run", "suite", "pytest"], indirect=True)
def test_records_count_and_grade_iterations(fake_boards: FakeBoards, workload: Workload, tmp_path: Path) -> None:
    assert workload.run(tmp_path, iterations=4, warmup=2) == workload.wanted("PASS")
    assert {one for board in fake_boards.opened for one in board.counts} == {(4, 2)}
    assert {(record.get("device") or record)["iterations"] for record in stored(tmp_path)} == {4}
    reasons = {tuple(record["grade"]["reasons"]) for record in stored(tmp_path)}
    assert reasons == {("only 4 iterations, expected at least 10",)}
    assert {record["conditions"]["missing"] for record in stored(tmp_path)} == {"no counters"}
    assert all(board.prepared for board in fake_boards.opened)


def test_history_gets_results_of_each_workload(
    fake_boards: FakeBoards, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pytest uses the same directory in each session; the history keeps the results of both sessions."""
    (pytester.path / "hil.toml").write_text("[history]\nauto = true\n")
    monkeypatch.setattr(by_pytest, "pytester", pytester, raising=False)
    for number in range(2):
        monkeypatch.setattr(reporting, "time", SimpleNamespace(time=lambda number=number: 1e9 + number))
        by_pytest(tmp_path, compile_flags=("-O3",))
    for name, enter in (("b", by_bundle), ("t", by_trace_run)):
        (tmp_path / name).mkdir()
        assert set(enter(tmp_path / name).values()) == {"PASS"}
    notes: list[str] = []
    runs = [file.parent for file in tmp_path.rglob("run.json")]
    add_results(runs, notes.append, start=pytester.path)
    with HistoryStore.open(pytester.path / "hil-runs/history") as store:
        entries = list(store.entries())
    assert {entry.outcome for entry in entries} == {"PASS"}
    assert sorted(entry.key.kind for entry in entries) == ["run"] * 6 + ["suite"] * 6
    assert notes == [f"added to the history {pytester.path}/hil-runs/history: 6 of 6 cases"]
    assert {entry.key.flags for entry in entries if entry.key.kind == "suite"} == {("-O3",)}


@pytest.mark.parametrize("workload", ["run", "bundle run", "trace run", "suite", "pytest"], indirect=True)
def test_gate_restores_case_of_each_workload(fake_boards: FakeBoards, workload: Workload, tmp_path: Path) -> None:
    assert set(workload.run(tmp_path).values()) == {"PASS"}
    collector = Collector(SourceOptions())
    for place in {file.parent for name in ("run.json", "suite.json") for file in tmp_path.rglob(name)}:
        collector.collect(place)
    runner = Runner(RunContext(Cache(tmp_path / "cache"), FakeIsolated()))
    opener = CaseOpener(lambda run, board: StoredSuiteCases(run, board, runner, tmp_path / "again"))
    restorer = ProgramRestorer(SimpleNamespace(), Job(()), opener)
    again = Remeasurer(restorer, runner, SimpleNamespace(), 0.02, Quiet(), SimpleNamespace())
    functions = set()
    for entry in collector.found.entries:
        cases = opener.open(entry)
        program = Artifact("onnxruntime", "p", {}, {"p": "blake3:p"}, "of another case", "none")
        case = cases.restore(entry.case, cases.job, cases.adapt(entry.case, program))
        fake_boards.opened.clear()
        with BoardPool("again") as pool:
            found = again.run_once(case, pool.session(choose_board(restorer.choose_job(cases))))
        assert found.outcome is Outcome.PASS and found.verdicts
        assert fake_boards.opened[0].name == A
        functions.add(found.artifact.function)
        with pytest.raises(CaseMissing):
            cases.restore("absent", cases.job, program)
    assert functions == set("abc")


BOTH = combine_targets({"board": (A, B)})


def matrix_of_run(place: Path) -> MatrixReport:
    job = Job(models=models(place / "models"), runtime="onnxruntime", out=place / "runs")
    return run_job_matrix(job, BOTH, screen=Quiet())[1]


def matrix_of_bundle(place: Path) -> MatrixReport:
    return run_bundle_matrix(Job(models=(three_methods(place),), out=place / "runs"), BOTH, (), None, screen=Quiet())[1]


def matrix_of_trace(place: Path) -> MatrixReport:
    return trace_matrix(Job(models=(three_calls(place),), out=place / "runs"), BOTH, None, screen=Quiet())[1]


def matrix_of_suite(place: Path) -> MatrixReport:
    models(place / "models")
    request = SuiteRequest(str(place / "models"), "onnxruntime", layers=False)
    return run_suite_matrix(request, BOTH, out=place / "suite", screen=Quiet())[1]


def matrix_of_pytest(place: Path) -> MatrixReport:
    pytester = by_pytest.pytester
    models(pytester.path / "models")
    pytester.makeini("[pytest]\nhil_models = models\n")
    boards = ("--hil-board", A, "--hil-board", B, "--hil-each-board")
    pytester.inline_run(*boards, "--hil-flow", "onnxruntime", "--hil-no-layers", f"--hil-out={place / 'out'}")
    return load_matrix(place / "out" / "models")


def matrix_of_farm(place: Path) -> MatrixReport:
    spec = JobSpec(Kind.RUN, {}).to_json()
    rows = {}
    for board in (A, B):
        job = Job(models=models(place / "models"), board=board, runtime="onnxruntime", out=place / "runs")
        record = run_job(job, screen=Quiet()).to_json()
        ended = JobResult(record["exit_code"], record["outcome"], record=record).to_json()
        rows[board] = [make_record({"name": "1", "state": JobState.DONE.value, "spec": spec, **ended}, JobResultRow)]
    farm = SimpleNamespace(ask=lambda verb, name, specs: rows[name])
    _, report = fetch_targets(farm, {target.name: target.options["board"] for target in BOTH}, None)
    return report


MATRICES = {
    "run": matrix_of_run,
    "bundle run": matrix_of_bundle,
    "trace run": matrix_of_trace,
    "suite": matrix_of_suite,
}


def marked(report: MatrixReport) -> dict[str, list[str]]:
    """Return the outcomes of each case by target, with a final mark if they differ."""
    rows = {
        re.sub("call_._", "", row.id)[:1]: [cell.word for cell in row.cells] + ["*"] * row.differs
        for row in report.rows
    }
    assert [target.name for target in report.targets] == ["unix__fake_a", "unix__fake_b"]
    return rows


@pytest.mark.parametrize(
    ("workload", "make"),
    [*MATRICES.items(), ("pytest", matrix_of_pytest), ("run", matrix_of_farm)],
    indirect=["workload"],
)
def test_matrix_has_row_per_case_and_column_per_target(
    fake_boards: FakeBoards, workload: Workload, make: Callable[[Path], MatrixReport], tmp_path: Path
) -> None:
    fake_boards.scripts[B] = {("run", "b"): RunFailed("no")}
    report = make(tmp_path)
    assert marked(report) == {"a": ["PASS", "PASS"], "b": ["PASS", "RUN_ERROR", "*"], "c": ["PASS", "PASS"]}
    assert report.exit_code == EXIT_STAGE
    assert all(board.closed for board in fake_boards.opened)


@pytest.mark.parametrize("kind", MATRICES)
def test_unreachable_target_does_not_stop_others(fake_boards: FakeBoards, kind: str, tmp_path: Path) -> None:
    fake_boards.refuse[A] = [BoardUnreachable("no answer")]
    report = MATRICES[kind](tmp_path)
    assert marked(report) == {key: ["BOARD_UNREACHABLE", "PASS", "*"] for key in "abc"}
    assert report.exit_code == EXIT_BOARD and report.notes == ["unix__fake_a: no answer"]


def test_trace_matrix_compares_with_run_named_by_id(fake_boards: FakeBoards, tmp_path: Path) -> None:
    job = Job(models=(three_calls(tmp_path),), out=tmp_path / "runs")
    first = run_trace(replace(job, board=A), screen=Quiet())
    report = trace_matrix(job, BOTH, Path(first.id), screen=Quiet())[1]
    assert marked(report) == {key: ["PASS", "PASS"] for key in "abc"}


@pytest.mark.parametrize("kind", MATRICES)
def test_matrix_without_reachable_target_removes_directory(fake_boards: FakeBoards, kind: str, tmp_path: Path) -> None:
    fake_boards.refuse |= {board: [BoardUnreachable(f"{board} is off")] for board in (A, B)}
    with pytest.raises(BoardUnreachable, match="a is off"):
        MATRICES[kind](tmp_path)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "suite").exists()


@pytest.mark.parametrize("kind", ["run", "suite"])
def test_resumed_matrix_continues_after_ctrl_c(fake_boards: FakeBoards, kind: str, tmp_path: Path) -> None:
    fake_boards.scripts[A] = {("run", "b"): KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        MATRICES[kind](tmp_path)
    (folder,) = (path.parent for path in tmp_path.rglob("matrix.json"))
    assert load_matrix(folder).exit_code == EXIT_INTERRUPTED
    resume = {"run": resume_job_matrix, "suite": resume_suite_matrix}[kind]
    assert marked(resume(folder, screen=Quiet())[1]) == {key: ["PASS", "PASS"] for key in "abc"}
    assert fake_boards.did.count("run a") == 2


@pytest.mark.parametrize("kind", ["models", "suite"])
def test_farm_jobs_use_references_and_iterations(fake_boards: FakeBoards, tmp_path: Path, kind: str) -> None:
    how: dict[str, Any] = {"references": ("onnx-reference", "onnxruntime"), "iterations": 4, "warmup": 2}
    if kind == "suite":
        work = submitting.load_suite(asked(tmp_path, **how), boards=1)
    else:
        work = submitting.load_models(Job(models=models(tmp_path / "models"), runtime="onnxruntime", **how))
    assert set(by_farm(tmp_path, work).values()) == {"PASS"}
    assert {one for board in fake_boards.opened for one in board.counts} == {(4, 2)}
    assert [one["disagreement"] for one in stored(tmp_path)] == ["onnx-reference vs onnxruntime on output y"] * 3


def by_suite_job(place: Path) -> dict[str, str]:
    return by_farm(place, submitting.load_suite(asked(place), boards=1))


def by_bundle_job(place: Path) -> dict[str, str]:
    return by_farm(place, submitting.load_bundles(Job(models=(place / "models/three.hilb",)), (), None))


@pytest.mark.parametrize("enter", [by_suite, by_pytest, by_suite_job, by_bundle_job])
def test_workloads_run_cases_stored_in_files(
    fake_boards: FakeBoards,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    enter: Callable[[Path], dict[str, str]],
) -> None:
    monkeypatch.setattr(by_pytest, "pytester", pytester, raising=False)
    made, context = bundle(tmp_path), RunContext(Cache(tmp_path / "cache"), FakeIsolated())
    (tmp_path / "models").mkdir()
    made.save(tmp_path / "models/three.hilb")
    write_format("golden", made, tmp_path / "models/gold", context=context)
    enter(tmp_path)
    found = {case.get("name") or case["id"]: case["outcome"] for case in stored(tmp_path)}
    if enter is by_bundle_job:
        assert found == dict.fromkeys([f"{method}-ones" for method in "abc"], "PASS")
    else:
        names = [f"{file}_{method}_ones" for file in ("gold", "three") for method in "abc"]
        assert found == dict.fromkeys(names, "PASS")


@pytest.mark.parametrize("workload", ["run", "bundle run", "trace run", "suite", "bench", "pytest"], indirect=True)
def test_record_points_to_files_of_failing_case(
    fake_boards: FakeBoards, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProgram, "factor", 5)
    assert set(workload.run(tmp_path).values()) == {"FAIL"}
    places = [file.parent for name in ("results.jsonl", "run.json") for file in tmp_path.rglob(name)]
    records = [(one, record) for one in places for record in stored(one)]
    assert records
    for place, record in records:
        folder = place / record.get("folder", record.get("name"))
        assert list(folder.glob("outputs/*.npy")) and list(folder.glob("reference*/*.npy"))
        for report in place.glob("summary.md"):
            assert f"[outputs]({record['folder']}/outputs)" in report.read_text()


def dying_compiler(model: Model, *, failure: Path, **_: Any) -> Artifact:
    """A fake compiler that crashes and writes a reproducer."""
    failure.mkdir(parents=True)
    (failure / "reproduce.sh").touch()
    hint = f"reproduce it: sh {failure / 'reproduce.sh'}"
    raise CompileCrashed("it died", hint=hint, detail="phase: input\npass: CanonicalizerPass")


def by_model_jobs(place: Path) -> dict[str, str]:
    work = submitting.load_models(Job(models=models(place / "models"), runtime="onnxruntime"))
    return by_farm(place, work)


@pytest.mark.parametrize("enter", [by_run, by_trace_run, by_suite, by_bench, by_pytest, by_suite_job, by_model_jobs])
def test_record_points_to_compiler_reproducer(
    fake_boards: FakeBoards,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    enter: Callable[[Path], dict[str, str]],
) -> None:
    monkeypatch.setattr(by_pytest, "pytester", pytester, raising=False)
    for module, name in places_of(compile_model):
        monkeypatch.setattr(module, name, dying_compiler)
    assert set(enter(tmp_path).values()) == {"COMPILE_CRASH"}
    records = stored(tmp_path)
    assert records
    for record in records:
        told = record.get("error") or record
        assert told["detail"].startswith("phase: input\npass: CanonicalizerPass")
        script = Path(told["hint"].removeprefix("reproduce it: sh "))
        assert script.exists() and script.parts[-3:] == ("logs", "compile-failure", "reproduce.sh")


def test_study_writes_matrix_of_compilers(fake_boards: FakeBoards, tmp_path: Path) -> None:
    fake_boards.scripts[A] = {("run", "b"): RunFailed("no")}
    by_study(tmp_path, ("one", "two"))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "study" / "matrix.csv").read_text())))
    assert [(row["id"], row["differs"]) for row in rows] == [("a", "no"), ("b", "yes"), ("c", "no")]
    assert sorted((rows[1]["one"], rows[1]["two"])) == ["PASS", "RUN_ERROR"]
    assert (tmp_path / "study" / "junit.xml").exists()


FLOWS = ("--hil-flow=onnxruntime", "--hil-flow=iree")


@pytest.mark.parametrize(
    ("ini", "typed", "targets"),
    [
        ("", [], ["sim"]),
        ("", ["--runtime-hw-type=sim", "--runtime-hw-type=sim-f16"], ["sim", "sim-f16"]),
        ("", FLOWS, ["onnxruntime-sim", "iree-sim"]),
        (
            "",
            [*FLOWS, "--hil-board=sim", "--hil-board=sim-f16"],
            [f"{f}-{k}" for f in ("onnxruntime", "iree") for k in ("sim", "sim-f16")],
        ),
        ("", [f"--hil-board={A}", f"--hil-board={B}"], ["generic"]),
        ("", [f"--hil-board={A}", f"--hil-board={B}", "--hil-each-board"], ["unix__fake_a", "unix__fake_b"]),
        # Typed options override the ini file.
        ("addopts = --hil-flow=iree --runtime-hw-type=sim-f16", ["--hil-flow=onnxruntime"], ["sim-f16"]),
        ("addopts = --hil-seed=3 --runtime-hw-type=sim", ["--hil-seed=4", "--runtime-hw-type=sim-f16"], ["sim-f16"]),
    ],
)
def test_pytest_test_name_contains_target(
    pytester: pytest.Pytester, ini: str, typed: list[str], targets: list[str]
) -> None:
    models(pytester.path / "models", "a")
    pytester.makeini(f"[pytest]\nhil_models = models\n{ini}\n")
    items, _ = pytester.inline_genitems("--hil-no-layers", *typed)
    assert [item.name for item in items] == [f"a_full_model-{target}" for target in targets]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--hil-seed=1", "--hil-seed=1"], "--hil-seed is specified 2 times"),
        (["--debug-ir=x", "--hil-debug-ir=y"], "--hil-debug-ir is specified 2 times"),
        (["--runtime-hw-type=sim", "--hil-runtime-hw-type=sim"], "duplicate --hil-runtime-hw-type sim"),
    ],
)
def test_pytest_rejects_repeated_option(pytester: pytest.Pytester, typed: list[str], said: str) -> None:
    models(pytester.path / "models", "a")
    pytester.makeini("[pytest]\nhil_models = models\n")
    ended = pytester.runpytest_inprocess("--collect-only", *typed)
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    assert said in ended.stderr.str()
