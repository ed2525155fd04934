"""Build submissions: create the jobs, upload their files, and queue them."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil.controller.farm.client.client import FarmClient, make_boards_mismatch
from hil.controller.farm.job_files import DIRTY, MODEL_PATH, JobFiles, make_affinity_key, pack_bundle, pack_run
from hil.controller.farm.messages import BoardState, JobSpec, Kind, Submission
from hil.controller.farm.selector import parse
from hil.controller.farm.telemetry import record_span
from hil.controller.models.flows.flow_registry import FLOWS_FILE, load_flows
from hil.controller.models.generation.decode import choose_importer
from hil.controller.models.importers import SAVED_MODEL, import_model
from hil.controller.models.sizing.dimensions import choose_model_sizes, own_sizes
from hil.controller.pipeline.settings.flagfiles import read_flagfile
from hil.controller.pipeline.settings.model_settings import refuse_functions
from hil.controller.pipeline.settings.options import Job
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.paths import path_exists
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.sources.origin import find_origin, is_tree_dirty
from hil.controller.workloads.bundles.flagfile import is_flagfile
from hil.controller.workloads.history.source_state import shorten_model
from hil.controller.workloads.suites.cases.model_scan import may_contain_cases, scan_models
from hil.controller.workloads.suites.cases.sources import choose_flow, make_source_hint, open_suite, place_of
from hil.controller.workloads.suites.cases.spec import CaseSpec, Suite, SuiteModel
from hil.controller.workloads.suites.request import BUILT_IN, SuiteRequest
from hil.core.files import read_text
from hil.core.text import convert_to_json
from hil.errors import HilError, StorageError, UsageError

BUNDLE_SUFFIX = ".hilb"
# Report uploads above this size, in bytes.
_LARGE = 8 << 20


@dataclass(frozen=True)
class Workload:
    """Jobs of a submission and the files that they need."""

    title: str
    specs: tuple[JobSpec, ...]
    uploads: dict[str, Path] = field(default_factory=dict)  # digest -> file

    def for_target(self, target: str) -> Workload:
        """Return a copy with the target's name appended to the titles."""
        specs = tuple(spec.replace(title=f"{spec.title} {target}") for spec in self.specs)
        return replace(self, title=f"{self.title} {target}", specs=specs)


@dataclass(frozen=True)
class SubmitReceipt:
    """Submission accepted by the farm."""

    submission: int
    jobs: list[str]
    sent: int  # number of bytes uploaded


def choose_kind(words: Sequence[str], *, suite: bool = False) -> Kind:
    """Return the job type for the arguments of `hil farm submit`.

    Raises UsageError if the arguments are unknown or mixed.
    """
    first = Path(words[0])
    named = words[0] in BUILT_IN
    folder = first.is_dir() and not (first / SAVED_MODEL).exists()
    # Sources with test cases run as suites. A .hilb bundle has a separate job type.
    cases = (
        path_exists(first) and first.suffix != BUNDLE_SUFFIX and (is_flagfile(first.name) or may_contain_cases(first))
    )
    if suite or named or folder or cases:
        if len(words) > 1:
            raise UsageError(
                "a submission can contain only one suite", hint="submit each suite separately; the farm queues them"
            )
        return Kind.SUITE
    if gone := next((word for word in words if not path_exists(word)), None):
        raise UsageError(f"suite, model, bundle or directory {gone!r} not found", hint=make_source_hint(gone))
    bundles = [word.endswith(BUNDLE_SUFFIX) for word in words]
    if any(bundles) and not all(bundles):
        raise UsageError("models and bundles cannot be in the same submission", hint="submit the bundles separately")
    return Kind.BUNDLE if all(bundles) else Kind.RUN


def load_models(job: Job) -> Workload:
    """Return one job per model.

    Raises:
        UsageError: a file cannot be read.
        ImportFailed: a file is not a valid model.
    """
    job = read_flagfile(job) if job.flagfile else job  # the flag file is not uploaded
    if not job.models:
        raise UsageError("missing argument MODEL", hint="hil farm submit MODEL, or hil farm submit --help")
    with Isolated(1) as isolated:
        context = RunContext(Cache(), isolated)
        several = len(job.models) > 1 or job.dim_ranges
        every = {**job.dims, **job.dim_ranges}
        given = choose_model_sizes(job.models, every, context, job.function) if several else [every]
        found = []
        for path, own in zip(job.models, given, strict=True):
            one = replace(job, dims=own_sizes(job.dims, own), dim_ranges=own_sizes(job.dim_ranges, own))
            work: dict[str, Any] = {"isolated": isolated, "cache": context.cache}
            found.append((one, choose_importer(job.generate)(path, function=job.function, dims=one.dims, **work)))
    return _build_workload(job, [pack_run(replace(one, models=(model.path,)), model) for one, model in found])


def load_bundles(job: Job, methods: Sequence[str], key: Path | None) -> Workload:
    """Return one job per bundle. Raises UsageError if a bundle is invalid, damaged, or lacks a trusted signature."""
    from hil.controller.workloads.bundles.program_case import open_bundle

    opened = [(path, open_bundle(path, key).program.runtime) for path in job.models]
    packed = [pack_bundle(replace(job, models=(path,)), runtime, methods, key) for path, runtime in opened]
    return _build_workload(job, packed)


def _build_workload(job: Job, packed: Sequence[tuple[JobSpec, JobFiles]]) -> Workload:
    names = [path.parent.name if path.name == SAVED_MODEL else path.stem for path in job.models]
    uploads = {digest: file for _, parcel in packed for digest, file in parcel.list_uploads().items()}
    dirty = is_tree_dirty()
    specs = tuple(
        spec.replace(title=name, options={**spec.options, DIRTY: dirty, MODEL_PATH: shorten_model(str(path))})
        for (spec, _), name, path in zip(packed, names, job.models, strict=True)
    )
    return Workload(_format_title(names), specs, uploads)


def _format_title(names: Sequence[str]) -> str:
    """Return a title for models: the name of the first, and the number of remaining models."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def count_matching_boards(farm: FarmClient, selector: str, board: str = "") -> int:
    """Return the number of boards that match and are not offline. Raises UsageError for an invalid selector."""
    wanted = parse(selector)
    return sum(
        wanted.matches(one.labels) and (not board or one.name == board) and one.state != BoardState.OFFLINE
        for one in farm.ask("boards")
    )


def submit(farm: FarmClient, load: Workload, how: dict[str, Any], *, say: Callable[[str], None]) -> SubmitReceipt:
    """Upload missing files and queue the jobs.

    Args:
        how: further fields of Submission.

    Raises:
        NoSuchBoard: no board of the farm can ever match.
        UsageError: the submission is invalid.
        VersionMismatch: an older gateway does not support multiple boards.
    """
    order = Submission(load.title, load.specs, **how)
    for request in order.requests:
        parse(request.selector)
    size = sum(file.stat().st_size for file in load.uploads.values())
    with record_span("submit", title=order.title, jobs=len(order.specs)) as stage:
        if size > _LARGE:
            say(f"uploading {size / 1e6:,.0f} MB, except files that the farm already has")
        sent = farm.upload(load.uploads)
        submission, jobs = farm.submit(order, trace=stage.traceparent)
    if order.more and len(farm.ask("job", name=jobs[0]).more) < len(order.more):
        farm.do("cancel", name=jobs[0])
        raise make_boards_mismatch()
    return SubmitReceipt(submission, jobs, sent)


# Create several parts per board, so that a slow part does not delay the suite. A part has at least this many cases,
# because each part loads its models again.
PARTS_A_BOARD, CASES_A_PART = 4, 8


def split(cases: Sequence[CaseSpec], parts: int) -> list[tuple[CaseSpec, ...]]:
    """Split cases into at most ``parts`` parts of similar size, each in the suite's order.

    Layers stay together with the model, because layers use the reference results of the whole model. If a model
    has more cases than fit in one part, the model is split.
    """
    if not cases:
        return []
    parts = max(1, min(parts, len(cases)))
    most = -(-len(cases) // parts)
    groups: dict[str, list[CaseSpec]] = {}
    for case in cases:
        groups.setdefault(case.model, []).append(case)
    pieces = [piece for group in groups.values() for piece in _split_evenly(group, -(-len(group) // most))]
    bins: list[list[CaseSpec]] = [[] for _ in range(parts)]
    for piece in sorted(pieces, key=len, reverse=True):
        min(bins, key=len).extend(piece)
    order = {case.id: number for number, case in enumerate(cases)}
    made = [tuple(sorted(one, key=lambda case: order[case.id])) for one in bins if one]
    return sorted(made, key=lambda part: order[part[0].id])


def _split_evenly(group: list[CaseSpec], pieces: int) -> list[list[CaseSpec]]:
    """Split a list into pieces of similar length."""
    ends = [len(group) * number // pieces for number in range(pieces + 1)]
    return [group[start:end] for start, end in itertools.pairwise(ends)]


def choose_parts(cases: int, boards: int) -> int:
    """Return the number of parts for a suite: at least one per board, without very small parts."""
    boards = max(1, boards)
    return min(PARTS_A_BOARD * boards, max(boards, -(-cases // CASES_A_PART)))


def load_suite(request: SuiteRequest, boards: int) -> Workload:
    """Return the jobs of a suite, split for ``boards`` boards; empty if no case is selected.

    Raises:
        UsageError: the suite or flow does not exist, or a file cannot be read.
    """
    flow = choose_flow(request)
    refuse_functions(request.settings)
    with Isolated(request.jobs) as isolated:
        context = RunContext(Cache(), isolated)
        suite = open_suite(request, flow, context)
        parcel = JobFiles()
        source = _pack_source(request, suite, context, parcel)
    options = {**convert_to_json(request.to_json()), **source, **_pack_flow(request, parcel)}
    options["origin"] = find_origin(request.settings.labels).to_json()
    options[DIRTY] = is_tree_dirty()
    typed = {
        **{"source": request.source, "flow": request.flow, "filters": list(request.filters)},
        **{"suite": suite.name, "flow_name": flow.name, "runtime": flow.runtime},
        "expected": str(suite.expected.absolute()) if suite.expected else None,
        "left_out": list(suite.left_out),
        "place": place_of(request.source),
    }
    digests = parcel.digest_files()
    warm = make_affinity_key(request.source, *sorted(digests.values()), repr(flow))
    selected = [one for one in suite.cases if request.selects(one.id)]
    chosen = split(selected, choose_parts(len(selected), boards))
    specs = [
        JobSpec(
            Kind.SUITE,
            {
                **options,
                "needs": flow.runtime,
                "filters": [f"={case.id}" for case in part],
                "cases": [[case.id, case.model, case.layer, case.op] for case in part],
                "typed": typed,
            },
            digests,
            warm,
            f"{suite.name} {flow.name}: {_format_title(list(dict.fromkeys(case.model for case in part)))}",
        )
        for part in chosen
    ]
    return Workload(f"{suite.name} {flow.name}", tuple(specs), parcel.list_uploads())


def _pack_source(request: SuiteRequest, suite: Suite, context: RunContext, parcel: JobFiles) -> dict[str, str]:
    """Add the models in a user's directory to the job.

    Their paths start with the directory's name, which is also the suite's name.
    """
    if suite.source in BUILT_IN:
        return {}
    path = Path(request.source)
    root = path if path.is_dir() else path.parent
    below = f"suite/{root.resolve().name or 'models'}"
    for model in scan_models(path).models:
        for file in (*_list_model_files(model, context), *model.beside):
            if file.is_file():
                parcel.add(file, f"{below}/{_locate_in_suite(file, root)}")
    if suite.expected and suite.expected.is_file():
        parcel.add(suite.expected, f"{below}/{suite.expected.name}")
    return {"source": below if path.is_dir() else f"{below}/{path.name}"}


def _locate_in_suite(file: Path, root: Path) -> Path:
    """Return a file's path relative to the suite's directory. The relative path is the same on the board's host."""
    hint = "import the directory as a bundle, which includes all files: hil bundle import DIR --from flagfile"
    if is_flagfile(file.name) and re.search(
        r"^--(module|parameters|input|expected_output)=(.*[=@])?/", read_text(file), re.M
    ):
        raise UsageError(f"{file} contains absolute paths, which do not exist on the board's host", hint=hint)
    here, suite = (Path(os.path.normpath(path.absolute())) for path in (file, root))
    if not here.is_relative_to(suite):
        raise UsageError(f"{file} is outside the suite's directory {root}", hint=hint)
    return here.relative_to(suite)


def _list_model_files(model: SuiteModel, context: RunContext) -> Iterable[Path]:
    """Return a model's file and the data files.

    If the import fails, return only the model's file. The case then reports the error.
    """
    if model.path.name == SAVED_MODEL:
        return [file for file in sorted(model.path.parent.rglob("*")) if file.is_file()]
    try:
        return import_model(model.path, isolated=context.isolated, cache=context.cache).files.values()
    except StorageError:
        raise
    except HilError:
        return [model.path]


def _pack_flow(request: SuiteRequest, parcel: JobFiles) -> dict[str, Any]:
    """Add a flow's file to the job.

    A flow of hil or of an installed package needs no file, because the hosts have these flows.
    """
    beside = Path(FLOWS_FILE)
    name, text = request.flow, request.flow
    if name in load_flows(Path(os.devnull)):
        return {}
    if beside.is_file() and name in load_flows():
        text = f"{beside}:{name}"
    file, found, chosen = text.rpartition(".toml:")
    path = Path(f"{file}.toml") if found else Path(text)
    at = parcel.add(path, f"flows/{path.name}")
    return {"flow": f"{at}:{chosen}" if found else at, "flow_is_file": True}
