"""What is to be run becomes an order: jobs, and the files that they need, uploaded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil.controller.farm.client import FarmClient
from hil.controller.farm.packing import Parcel, packed_bundle, packed_run, unfolded
from hil.controller.farm.selector import parse
from hil.controller.farm.suites import plan_suite
from hil.controller.farm.telemetry import span
from hil.controller.farm.words import BoardState, Kind, Order, Spec
from hil.controller.models.importers import SAVED_MODEL, import_model
from hil.controller.pipeline.options import Job
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.paths import exists
from hil.controller.workloads.suites.request import Request
from hil.controller.workloads.suites.sources import BUILT_IN
from hil.errors import UsageError

BUNDLE_SUFFIX = ".hilb"
# So much to upload is told.
_LARGE = 8 << 20


@dataclass(frozen=True)
class Load:
    """What an order consists of.

    Attributes:
        title: for people.
        specs: the jobs.
        uploads: digest -> file.
    """

    title: str
    specs: tuple[Spec, ...]
    uploads: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Submitted:
    """An order that the farm has.

    Attributes:
        submission: its number.
        jobs: their names.
        sent: bytes that had to be uploaded.
    """

    submission: int
    jobs: list[str]
    sent: int


def kind_of(words: Sequence[str], *, suite: bool = False) -> Kind:
    """What the arguments of `hil farm submit` are.

    Args:
        words: models, bundles, or one suite.
        suite: whether it was said that they are one.

    Raises:
        UsageError: they cannot be told, or do not go together.
    """
    first = Path(words[0])
    named = words[0] in BUILT_IN and not exists(first)
    folder = first.is_dir() and not (first / SAVED_MODEL).exists()
    if suite or named or folder:
        if len(words) > 1:
            raise UsageError("one suite at a time", hint="submit them one after another: the farm queues them")
        return Kind.SUITE
    if gone := next((word for word in words if not exists(word)), None):
        raise UsageError(
            f"no such file: {gone}", hint=f"a model, a bundle, a folder of models, or one of {', '.join(BUILT_IN)}"
        )
    bundles = [word.endswith(BUNDLE_SUFFIX) for word in words]
    if any(bundles) and not all(bundles):
        raise UsageError("models and bundles are two kinds of jobs", hint="submit the bundles by themselves")
    return Kind.BUNDLE if all(bundles) else Kind.RUN


def load_models(job: Job) -> Load:
    """A job for each model.

    Raises:
        UsageError: a file cannot be read.
        ImportFailed: one is no model.
    """
    job = unfolded(job)
    if not job.models:
        raise UsageError("no MODEL was named", hint="hil farm submit MODEL, or hil farm submit --help")
    with Isolated(1) as isolated:
        cache = Cache()
        models = [
            import_model(path, function=job.function, dims=job.dims, isolated=isolated, cache=cache)
            for path in job.models
        ]
    return _loaded(job, [packed_run(replace(job, models=(model.path,)), model) for model in models])


def load_bundles(job: Job, methods: Sequence[str], key: Path | None) -> Load:
    """A job for each bundle.

    Raises:
        UsageError: one is no bundle, damaged, or signed by nobody that is trusted.
    """
    from hil.controller.workloads.bundles.program_case import open_bundle

    opened = [(path, open_bundle(path, key).program.runtime) for path in job.models]
    packed = [packed_bundle(replace(job, models=(path,)), runtime, methods, key) for path, runtime in opened]
    return _loaded(job, packed)


def _loaded(job: Job, packed: Sequence[tuple[Spec, Parcel]]) -> Load:
    names = [path.parent.name if path.name == SAVED_MODEL else path.stem for path in job.models]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    uploads = {digest: file for _, parcel in packed for digest, file in parcel.uploads().items()}
    return Load(f"{names[0]}{more}", tuple(spec for spec, _ in packed), uploads)


def load_suite(request: Request, boards: int) -> Load:
    """A suite's parts; none where no case was chosen.

    Args:
        request: as `hil suite run` has it.
        boards: how many can take part.

    Raises:
        UsageError: there is no such suite or flow, or a file cannot be read.
    """
    plan = plan_suite(request, boards)
    return Load(plan.title, plan.specs, plan.parcel.uploads())


def matching(farm: FarmClient, selector: str, board: str = "") -> int:
    """How many boards can be given what this selects, now or later.

    Raises:
        UsageError: the selector cannot be read.
    """
    wanted = parse(selector)
    return sum(
        wanted.matches(one["labels"]) and (not board or one["name"] == board) and one["state"] != BoardState.OFFLINE
        for one in farm.ask("boards")
    )


def submit(farm: FarmClient, load: Load, how: dict[str, Any], *, say: Callable[[str], None]) -> Submitted:
    """Upload what the farm lacks, and queue the jobs.

    Args:
        farm: the connection.
        load: what to run.
        how: further fields of :class:`~hil.controller.farm.words.Order`.
        say: told of what takes long.

    Raises:
        NoSuchBoard: no board of the farm can ever match, or it does not answer.
        UsageError: something was asked for that cannot be.
    """
    order = Order(load.title, load.specs, **how)
    parse(order.selector)
    size = sum(file.stat().st_size for file in load.uploads.values())
    with span("submit", title=order.title, jobs=len(order.specs)) as stage:
        if size > _LARGE:
            say(f"uploading {size / 1e6:,.0f} MB, as far as the farm has them not")
        sent = farm.upload(load.uploads)
        submission, jobs = farm.submit(order, trace=stage.traceparent)
    return Submitted(submission, jobs, sent)
