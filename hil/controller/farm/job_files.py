"""Collect the submitter's files that a job needs, and locate them on the board's host.

The option ``needs`` of a job spec names the runtime that the board's agent must have. It is missing if the runtime is
unknown.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

from hil.controller.farm.messages import JobSpec, Kind
from hil.controller.models.generation.spec import GENERATE, read_file_names
from hil.controller.models.importers import import_model
from hil.controller.pipeline.settings.flagfiles import parse_flagfile
from hil.controller.pipeline.settings.given_inputs import add_inputs_file
from hil.controller.pipeline.settings.model_settings import apply_model_settings, refuse_functions
from hil.controller.pipeline.settings.options import Job
from hil.controller.storage.paths import is_file
from hil.controller.storage.runs import make_safe_name
from hil.controller.storage.sources.origin import find_origin
from hil.controller.workloads.bundles.flagfile import is_flagfile
from hil.controller.workloads.suites.request import BUILT_IN, SuiteRequest
from hil.core.digest import digest_of
from hil.core.field_types import check_fields
from hil.core.files import digest_file
from hil.core.results import Model
from hil.core.runtimes import choose_runtime
from hil.core.text import convert_to_json
from hil.errors import UsageError

# Job fields that have no meaning on other machines, or that the host sets.
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
# Kind of profile -> field of the run's directory, which is part of the result for a job of a farm.
_PROFILES = {"run": "profile", "compile": "compile_time_profile"}
# Option of a run: kinds of the profiles that the host adds to the result.
PROFILES = "profiles"
# Options for the farm's history: the model's path relative to the repository, whether the working tree has uncommitted
# changes, and whether the host uploads the programs, to this subdirectory of the run.
MODEL_PATH, DIRTY, KEEP_PROGRAMS, ORIGIN = "model_path", "dirty", "keep_programs", "origin"
PROGRAMS = ".programs"
_KEYED = re.compile(r"(.*\.npz)(:[^/]*)", re.S)
_AFTER = re.compile(r"(:[^/]*)?")
_TENSOR_FILES = (".npy", ".npz", ".pb")


@dataclass
class JobFiles:
    """Files of a job: path below the job's directory -> local file."""

    files: dict[str, Path] = field(default_factory=dict)
    _known: dict[Path, str] = field(default_factory=dict)

    def add(self, file: Path, at: str) -> str:
        """Add a file and return the path below the job's directory. Raises UsageError if the file does not exist."""
        if not is_file(file):
            raise UsageError(f"no such file: {file}")
        self.files[at] = file
        return at

    def add_model(self, model: Model, below: str) -> str:
        """Add a model with external data. Returns the path of the main file."""
        for name, file in model.files.items():
            self.add(file, f"{below}/{name}")
        return f"{below}/{model.path.name}"

    def add_tensor(self, text: str, below: str) -> list[str]:
        """Add the file named by a ``--input`` or ``--expected`` argument, if any.

        Returns:
            The text before the path, the path below the job's directory, and the text after the path. Without a file,
            only the text.

        Raises:
            UsageError: the file does not exist.
        """
        found = _KEYED.fullmatch(text)
        body, key = (found[1], found[2]) if found else (text, "")
        starts = [0, *(spot.end() for spot in re.finditer("[=@]", body))]
        for start in starts:
            name = body[start:]
            if name and is_file(name):
                at = f"{below}/{len(self.files)}-{make_safe_name(Path(name).stem)}{Path(name).suffix}"
                return [body[:start], self.add(Path(name), at), key]
        if body.endswith(_TENSOR_FILES) or "@" in body:
            raise UsageError(f"no such file: {body[starts[-1] :]}")
        return [text]

    def add_generation(self, spec: Path, below: str) -> str:
        """Add a specification of ``--generate`` with the files that it names. Returns the specification's path.

        Raises:
            UsageError: the specification is invalid, or a file that it names is outside its directory.
        """
        reference, others = _check_named_files(spec)
        for name in dict.fromkeys(others):
            self.add(spec.parent / name, f"{below}/{name}")
        if reference:
            self.add_model(import_model(spec.parent / reference), str(PurePosixPath(below, reference).parent))
        return self.add(spec, f"{below}/{spec.name}")

    def digest_files(self) -> dict[str, str]:
        """Return path below the job's directory -> digest. Raises UsageError if a file cannot be read."""
        try:
            return {at: self._known.setdefault(file, digest_file(file)) for at, file in self.files.items()}
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error

    def list_uploads(self) -> dict[str, Path]:
        """Return digest -> file, the argument of :meth:`hil.controller.farm.client.client.FarmClient.upload`."""
        return {digest: self.files[at] for at, digest in self.digest_files().items()}


def pack_run(job: Job, model: Model) -> tuple[JobSpec, JobFiles]:
    """Return the spec and files of a `hil run` job for one model. ``job`` must not have a flag file."""
    parcel = JobFiles()
    job = add_inputs_file(apply_model_settings(job, model.path), model.path)
    main = parcel.add_model(model, "model")
    options = {
        **_select_portable_fields(job),
        "needs": choose_runtime(model.format, job.runtime),
        "models": [main],
        "inputs": [parcel.add_tensor(text, "inputs") for text in job.inputs],
        "expected": [parcel.add_tensor(text, "expected") for text in job.expected],
        "generate": parcel.add_generation(job.generate, "generate") if job.generate else None,
        PROFILES: [kind for kind, name in _PROFILES.items() if getattr(job, name) is not None],
    }
    digests = parcel.digest_files()
    return JobSpec(Kind.RUN, options, digests, make_affinity_key(model.digest, job.runtime, *job.compile_flags)), parcel


def pack_bundle(job: Job, runtime: str, methods: Sequence[str], key: Path | None) -> tuple[JobSpec, JobFiles]:
    """Return the spec and files of a `hil bundle run` job.

    Args:
        job: has a single model, the bundle.
        methods: methods to run; empty runs all.
        key: file of trusted public keys for the signature check.
    """
    parcel = JobFiles()
    (path,) = job.models
    job = apply_model_settings(job, path)
    main = parcel.add(path, f"bundle/{path.name}")
    options = {**_select_portable_fields(job), "models": [main], "inputs": [], "expected": [], "methods": list(methods)}
    options["needs"] = runtime
    options["key"] = parcel.add(key, f"key/{key.name}") if key else ""
    digests = parcel.digest_files()
    return JobSpec(Kind.BUNDLE, options, digests, make_affinity_key(digests[main])), parcel


def make_affinity_key(*parts: str) -> str:
    """Return an affinity key. Boards that ran a job with the same key have the data cached."""
    return digest_of("\0".join(parts).encode())


@contextlib.contextmanager
def _convert_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        hint = "the submitter may use a different hil version"
        raise UsageError(f"invalid {what}: {error}", hint=hint) from error


def rebuild_job(options: Mapping[str, Any], folder: Path) -> Job:
    """Rebuild the job from a spec's options, on the host that has the files."""
    known = {one.name for one in fields(Job)} - {*_LOCAL, *_PROFILES.values()}
    with _convert_errors("job"):
        job = Job.from_record({name: value for name, value in options.items() if name in known})
        refuse_functions(job)
        job = replace(
            job,
            models=tuple(resolve_inside(folder, path) for path in options["models"]),
            inputs=tuple(_rebuild_tensor_text(parts, folder) for parts in options.get("inputs", ())),
            expected=tuple(_rebuild_tensor_text(parts, folder) for parts in options.get("expected", ())),
            generate=_find_generation(options, folder),
        )
        check_fields(job)
        return job


def find_profiles(options: Mapping[str, Any]) -> list[str]:
    """Return the kinds of profiles that a run's job requests. Ignores the kinds of newer releases."""
    wanted = options.get(PROFILES, [])
    return [kind for kind in _PROFILES if isinstance(wanted, list) and kind in wanted]


def _check_generations(folder: Path) -> None:
    """Raise UsageError if a specification of --generate names a file outside the job.

    The suite's cases would otherwise read files of the host.
    """
    for spec in sorted(folder.rglob(f"*{GENERATE}")):
        try:
            read_file_names(spec)
        except UsageError:  # the case fails with the same error and reports it
            continue
        _check_named_files(spec)


def _check_named_files(spec: Path) -> tuple[str, list[str]]:
    """Return the path of the reference ("" without a reference), and the paths of a specification's other files.

    Raises UsageError for a file outside the specification's directory.
    """
    reference, others = read_file_names(spec)
    names = [os.path.normpath(name) for name in (reference, *others)]
    for name in map(PurePosixPath, names):
        if name.is_absolute() or ".." in name.parts:
            raise UsageError(
                f"file {str(name)[:80]!r} is outside the directory of {spec.name}",
                hint="copy the file next to the specification",
            )
    return names[0] if reference else "", names[1:]


def _find_generation(options: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the specification of --generate, or None. Raises UsageError if it names a file outside the job."""
    if not options.get("generate"):
        return None
    spec = resolve_inside(folder, str(options["generate"]))
    _check_named_files(spec)
    return spec


def find_key(options: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the file of trusted public keys for a bundle, or None. Raises UsageError for a path outside ``folder``."""
    return resolve_inside(folder, str(options["key"])) if options.get("key") else None


def resolve_inside(folder: Path, path: str) -> Path:
    """Return the path of a job's file in the job's directory. Raises UsageError for a path outside the directory."""
    below = PurePosixPath(path)
    if below.is_absolute() or ".." in below.parts:
        raise UsageError(f"job file {path!r} is outside the job's directory")
    return folder / below


def rebuild_request(options: Mapping[str, Any]) -> SuiteRequest:
    """Rebuild the suite request from a spec's options, with paths on the host."""
    known = {one.name for one in fields(SuiteRequest)}
    return SuiteRequest.from_json({name: value for name, value in options.items() if name in known})


def request_of(options: Mapping[str, Any], folder: Path) -> SuiteRequest:
    """Rebuild and validate the suite request from a spec's options, on the host that has the files."""
    with _convert_errors("suite"):
        request = rebuild_request(options)
        refuse_functions(request.settings)
        check_fields(request)
    source = request.source if request.source in BUILT_IN else str(resolve_inside(folder, request.source))
    if not options.get("flow_is_file") and ".toml" in request.flow:
        raise UsageError(f"flow {request.flow!r} is missing in the job's files")
    _check_flagfiles(folder)
    _check_generations(folder)
    flow = str(resolve_inside(folder, request.flow)) if options.get("flow_is_file") else request.flow
    return replace(request, source=source, flow=flow, settings=replace(request.settings, **_IR), profiles={})


def _check_flagfiles(folder: Path) -> None:
    """Raise UsageError if a flag file names a file outside the job.

    The suite's cases would otherwise read files of the host.
    """
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if not (is_flagfile(path.name) and path.is_file()):
            continue
        try:
            flags = parse_flagfile(path)
        except UsageError:  # the case fails with the same error and reports it
            continue
        named = [*flags.modules, *flags.parameters]
        for text in (*flags.inputs, *flags.expected):
            before, at, name = text.partition("@")
            if Path(text).suffix in _TENSOR_FILES and not (at and before[-1:] in ("", "=")):
                raise UsageError(f"tensor {text[:80]!r} of {path.name} is missing in the job's files")
            named += [Path(name)] if at else []
        for file in named:
            if not file.resolve().is_relative_to(root):
                raise UsageError(f"file {str(file)[:80]!r} of {path.name} is missing in the job's files")


def _select_portable_fields(job: Job) -> dict[str, Any]:
    """Return the job fields that are valid on any machine."""
    left_out = (*_LOCAL, *_PROFILES.values(), "models", "inputs", "expected")
    refuse_functions(job)
    plain = {name: value for name, value in convert_to_json(asdict(job)).items() if name not in left_out}
    return plain | {ORIGIN: find_origin(job.labels).to_json()}


def _rebuild_tensor_text(parts: Sequence[str], folder: Path) -> str:
    """Rebuild the ``--input`` text from the parts that :meth:`JobFiles.add_tensor` returned."""
    if len(parts) == 1:
        before, file, after = parts[0], "", ""
        # Check the suffix of the path, not of the text: `x.npy/.` is also the file x.npy.
        fits = "@" not in before and Path(before).suffix not in _TENSOR_FILES
    else:
        before, path, after = parts
        file = str(resolve_inside(folder, path))
        fits = "@" not in before[:-1] and before[-1:] in ("", "=", "@") and bool(_AFTER.fullmatch(after))
    if not fits or ".npz:" in before:
        raise UsageError(f"tensor {''.join(parts)!r} is missing in the job's files")
    return f"{before}{file}{after}"
