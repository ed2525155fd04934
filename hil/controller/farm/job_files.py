"""What a job needs of its submitter's files: gathered under paths of its own, and found again on the board's host.

A spec's options say under ``needs`` which runtime the board's agent must have, where that is known.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

from hil.controller.farm.messages import JobSpec, Kind
from hil.controller.pipeline.flagfiles import parse_flagfile
from hil.controller.pipeline.model_settings import for_model, refuse_functions
from hil.controller.pipeline.options import Job
from hil.controller.storage.origin import origin_of
from hil.controller.storage.paths import is_file
from hil.controller.storage.runs import safe_name
from hil.controller.workloads.bundles.flagfile import is_flagfile
from hil.controller.workloads.suites.request import Request
from hil.controller.workloads.suites.sources import BUILT_IN
from hil.core.digest import digest_file, digest_of
from hil.core.results import Model
from hil.core.runtimes import runtime_for
from hil.core.text import jsonable
from hil.errors import UsageError

# Fields of a job that mean nothing on another machine, or that its host says itself.
_IR: dict[str, Any] = {"debug_ir": None, "debug_ir_passes": False}
_LOCAL = (
    "board",
    "hw_type",
    "identity",
    "known_hosts",
    "accept_new_host_key",
    *_IR,
    "flagfile",
    "out",
    "wait_s",
    "per_model",
)
_PROFILES = ("profile", "compile_time_profile")
_KEYED = re.compile(r"(.*\.npz)(:[^/]*)", re.S)
_AFTER = re.compile(r"(:[^/]*)?")
_TENSOR_FILES = (".npy", ".npz", ".pb")


@dataclass
class JobFiles:
    """The files of a job: path below the job's folder -> file here."""

    files: dict[str, Path] = field(default_factory=dict)
    _known: dict[Path, str] = field(default_factory=dict)

    def add(self, file: Path, at: str) -> str:
        """Take a file along; returns its path below the job's folder; UsageError where it cannot be read."""
        if not is_file(file):
            raise UsageError(f"no such file: {file}")
        self.files[at] = file
        return at

    def add_model(self, model: Model, below: str) -> str:
        """Take a model along with its external data."""
        for name, file in model.files.items():
            self.add(file, f"{below}/{name}")
        return f"{below}/{model.path.name}"

    def add_tensor(self, text: str, below: str) -> list[str]:
        """Take along the file that ``--input`` or ``--expected`` names, if any; UsageError where it is not there.

        Returns:
            What stands before the path, the path below the job's folder and what follows it; or the text alone.
        """
        found = _KEYED.fullmatch(text)
        body, key = (found[1], found[2]) if found else (text, "")
        starts = [0, *(spot.end() for spot in re.finditer("[=@]", body))]
        for start in starts:
            name = body[start:]
            if name and is_file(name):
                at = f"{below}/{len(self.files)}-{safe_name(Path(name).stem)}{Path(name).suffix}"
                return [body[:start], self.add(Path(name), at), key]
        if body.endswith(_TENSOR_FILES) or "@" in body:
            raise UsageError(f"no such file: {body[starts[-1] :]}")
        return [text]

    def digests(self) -> dict[str, str]:
        """Path below the job's folder -> digest of the file; UsageError where one cannot be read."""
        try:
            return {at: self._known.setdefault(file, digest_file(file)) for at, file in self.files.items()}
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error

    def uploads(self) -> dict[str, Path]:
        """Digest -> file, as :meth:`hil.controller.farm.client.FarmClient.upload` takes them."""
        return {digest: self.files[at] for at, digest in self.digests().items()}


def packed_run(job: Job, model: Model) -> tuple[JobSpec, JobFiles]:
    """One model's job, as `hil run` has it, without a flag file."""
    parcel = JobFiles()
    job = for_model(job, model.path)
    main = parcel.add_model(model, "model")
    options = {
        **_plain(job),
        "needs": runtime_for(model.format, job.runtime),
        "models": [main],
        "inputs": [parcel.add_tensor(text, "inputs") for text in job.inputs],
        "expected": [parcel.add_tensor(text, "expected") for text in job.expected],
    }
    digests = parcel.digests()
    return JobSpec(Kind.RUN, options, digests, affinity(model.digest, job.runtime, *job.compile_flags)), parcel


def packed_bundle(job: Job, runtime: str, methods: Sequence[str], key: Path | None) -> tuple[JobSpec, JobFiles]:
    """A bundle's job, as `hil bundle run` has it; its one model is the bundle, and no ``methods`` are all of them."""
    parcel = JobFiles()
    (path,) = job.models
    job = for_model(job, path)
    main = parcel.add(path, f"bundle/{path.name}")
    options = {**_plain(job), "models": [main], "inputs": [], "expected": [], "methods": list(methods)}
    options["needs"] = runtime
    options["key"] = parcel.add(key, f"key/{key.name}") if key else ""
    digests = parcel.digests()
    return JobSpec(Kind.BUNDLE, options, digests, affinity(digests[main])), parcel


def affinity(*parts: str) -> str:
    """What a board is warm for once it ran what these tell."""
    return digest_of("\0".join(parts).encode())


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        hint = "is the submitter's hil of another version?"
        raise UsageError(f"this is no {what} of a farm: {error}", hint=hint) from error


def job_of(options: Mapping[str, Any], folder: Path) -> Job:
    """The job that a spec's options tell, on the host that has its files."""
    known = {one.name for one in fields(Job)} - {*_LOCAL, *_PROFILES}
    with _reading("job"):
        job = Job.of_record({name: value for name, value in options.items() if name in known})
        refuse_functions(job)
        return replace(
            job,
            models=tuple(inside(folder, path) for path in options["models"]),
            inputs=tuple(_placed(parts, folder) for parts in options.get("inputs", ())),
            expected=tuple(_placed(parts, folder) for parts in options.get("expected", ())),
        )


def key_of(options: Mapping[str, Any], folder: Path) -> Path | None:
    """The file of keys, one of which must have signed the bundle; UsageError where it did not come with the job."""
    return inside(folder, str(options["key"])) if options.get("key") else None


def inside(folder: Path, path: str) -> Path:
    """A job's file in the job's folder; UsageError where the path leads elsewhere, to one of the host's own files."""
    below = PurePosixPath(path)
    if below.is_absolute() or ".." in below.parts:
        raise UsageError(f"the job's file {path!r} would lie outside of its folder")
    return folder / below


def typed_request(options: Mapping[str, Any]) -> Request:
    """The suite's part that a spec's options tell, with files as the host knows them."""
    known = {one.name for one in fields(Request)}
    return Request.of_json({name: value for name, value in options.items() if name in known})


def request_of(options: Mapping[str, Any], folder: Path) -> Request:
    """The suite's part that a spec's options tell, on the host that has its files."""
    with _reading("suite"):
        request = typed_request(options)
        refuse_functions(request.settings)
    source = request.source if request.source in BUILT_IN else str(inside(folder, request.source))
    if not options.get("flow_is_file") and ".toml" in request.flow:
        raise UsageError(f"the flow {request.flow!r} did not come with the job")
    _check_flagfiles(folder)
    flow = str(inside(folder, request.flow)) if options.get("flow_is_file") else request.flow
    return replace(request, source=source, flow=flow, settings=replace(request.settings, **_IR), profiles={})


def _check_flagfiles(folder: Path) -> None:
    """Refuse flag files among a job's files that name others: a suite's cases would be read from those."""
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if not (is_flagfile(path.name) and path.is_file()):
            continue
        try:
            flags = parse_flagfile(path)
        except UsageError:  # its case runs into it again, and tells
            continue
        named = [*flags.modules, *flags.parameters]
        for text in (*flags.inputs, *flags.expected):
            before, at, name = text.partition("@")
            if Path(text).suffix in _TENSOR_FILES and not (at and before[-1:] in ("", "=")):
                raise UsageError(f"the tensor {text[:80]!r} of {path.name} did not come with the job")
            named += [Path(name)] if at else []
        for file in named:
            if not file.resolve().is_relative_to(root):
                raise UsageError(f"{str(file)[:80]!r}, which {path.name} names, did not come with the job")


def _plain(job: Job) -> dict[str, Any]:
    """The fields of a job that hold on any machine."""
    left_out = (*_LOCAL, *_PROFILES, "models", "inputs", "expected")
    refuse_functions(job)
    plain = {name: value for name, value in jsonable(asdict(job)).items() if name not in left_out}
    return plain | {"origin": origin_of(job.labels)}


def _placed(parts: Sequence[str], folder: Path) -> str:
    """A text of ``--input`` again, from what :meth:`Parcel.add_tensor` made of it."""
    if len(parts) == 1:
        before, file, after = parts[0], "", ""
        # As a path, for `x.npy/.` is the file x.npy too.
        fits = "@" not in before and Path(before).suffix not in _TENSOR_FILES
    else:
        before, path, after = parts
        file = str(inside(folder, path))
        fits = "@" not in before[:-1] and before[-1:] in ("", "=", "@") and bool(_AFTER.fullmatch(after))
    if not fits or ".npz:" in before:
        raise UsageError(f"the tensor {''.join(parts)!r} did not come with the job")
    return f"{before}{file}{after}"
