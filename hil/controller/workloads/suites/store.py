"""Directory of a suite run: ``suite.json``, ``results.jsonl`` with a line per finished case, ``cases/<id>/``."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from hil.controller.pipeline.records.next_steps import hint_for_case
from hil.controller.storage.origin import origin_of_request
from hil.controller.storage.runs import Run, safe_name, seal, storing, write_file, write_json
from hil.core import own_version
from hil.core.bounded_json import parse_json, read_json
from hil.core.files import read_file
from hil.core.installed import version
from hil.core.tensors import Array
from hil.core.text import jsonable
from hil.errors import UsageError


@dataclass(frozen=True)
class CaseRecord:
    """Record of a finished case, with JSON values only."""

    # id, model, layer, op, params: from the :class:`~hil.controller.workloads.suites.cases.spec.CaseSpec`.
    id: str
    model: str
    suite: str
    flow: str
    runtime: str
    outcome: str  # a value from :class:`hil.core.results.Outcome`, with expected failures applied
    ended: str  # the outcome without expected failures
    layer: str = ""
    op: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    # board, hw_type: name and hardware type, for the board that ran the case; "" if it did not run.
    board: str = ""
    hw_type: str = ""
    stage: str = ""
    message: str = ""  # reason in one line; "" for a pass
    # hint: suggested next step. detail: the tool's error output.
    hint: str = ""
    detail: str = ""
    # Seconds on the host's clock: fields in :class:`hil.core.results.Timings`; None for skipped stages.
    timings: Mapping[str, float | None] = field(default_factory=dict)
    # device_p50_ns, device_p90_ns: median and 90th percentile device time per iteration, or None.
    device_p50_ns: float | None = None
    device_p90_ns: float | None = None
    iterations: int = 0  # timed iterations
    cold: bool = False  # whether only the first run after the load was timed
    # Iterations compared with each other, and the result; "" for fewer than two.
    answers: str = ""
    agentless: str = ""  # why the board has no agent, if programs run by command, or ""
    artifact_bytes: int | None = None  # total program file size, or None
    # Digest for the file that the runtime opens, or "". Programs compiled in a group have the same digest.
    program: str = ""
    cached: bool | None = None  # whether the program was cached; None if nothing was compiled
    # Compiler notes, such as a program's delegation. See :class:`hil.core.results.Artifact`.
    notes: Mapping[str, Any] = field(default_factory=dict)
    # Placement: fields in :class:`hil.core.results.Part`; None if the runtime did not report it.
    placement: tuple[Mapping[str, Any], ...] | None = None
    elsewhere: str = ""  # a note on parts that ran on a device that was not requested, or ""
    # Comparisons with the flow's reference, per output: fields in :class:`hil.compare.verdict.OutputComparison` and
    # ``mismatch_share``. inf and nan are strings, for JSON.
    outputs: tuple[Mapping[str, Any], ...] = ()
    against: str = ""  # that reference's name
    # Code shared with the program: a value from :class:`hil.core.results.Relation`; "" without a reference.
    relation: str = ""
    decided_by: str = ""  # a pass's deciding reference, with the relation, or ""
    # References that failed: {"reference", "outcome", "reason", "detail"}.
    unanswered: tuple[Mapping[str, Any], ...] = ()
    # Additional references' results: {"against", "relation", "outcome", "outputs"}.
    other_references: tuple[Mapping[str, Any], ...] = ()
    disagreement: str = ""  # disagreement between references, or ""
    random: tuple[str, ...] = ()  # the model's nodes that draw random numbers
    # plain_outputs, plain_against: comparison with the model before the flow's recipe; empty without a recipe.
    plain_outputs: tuple[Mapping[str, Any], ...] = ()
    plain_against: str = ""
    # The expected failure: {"outcome", "reason", "issue"}; empty if none was expected.
    expectation: Mapping[str, str] = field(default_factory=dict)
    # Attempts before the final one and all confirmations, in order: {"why" ("board lost", "board unfit", "confirm"),
    # "board", "outcome", "message"}.
    attempts: tuple[Mapping[str, str], ...] = ()
    confirmed: str = ""  # result from confirmation runs: "always wrong", "flaky" or "one bad board", or ""
    repeat: str = ""  # command that repeats the case
    diff: str = ""  # command that shows the worst output's difference, or ""
    folder: str = ""  # directory for tensors and logs, relative to the run; "" if none
    # Other directories, relative to the run: ``ir`` (from the compiler), ``run profile``, ``compile profile`` ->
    # directory.
    directories: Mapping[str, str] = field(default_factory=dict)
    started: float = 0.0  # seconds since the epoch
    content: str = ""  # from the :class:`~hil.controller.workloads.suites.cases.spec.CaseSpec`

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> CaseRecord:
        """Parse a line's record. Ignore fields from newer hil versions.

        The key of ``directories`` was ``left`` before version 0.1.
        """
        if "left" in values:
            values = {"directories": values["left"], **values}
        known = {one.name for one in fields(cls)}
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in known
        }
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return dict(vars(self))


def told_by(case: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a case from run.json to fields in :class:`CaseRecord`.

    The caller adds the fields on the case's location, the suite and the command that repeats it.
    """
    artifact, error, device = case["artifact"] or {}, case["error"] or {}, case["device"] or {}
    provenance, timings, repetition = case["provenance"], dict(case["timings"]), case.get("repetition") or {}
    parts = provenance.get("placement")
    # Programs that are models or bundled in cases are not compiled.
    compiled = artifact.get("compiler", "none") != "none" and timings.get("compile_s") is not None
    first, *others = case["verdicts"] or [{}]
    return {
        "stage": str(case["stage"] or ""),
        "message": str(case["reason"] or ""),
        "hint": hint_for_case(case),
        "detail": str(error.get("detail", "")),
        "timings": timings,
        **{f"device_{name}": device.get(name) for name in ("p50_ns", "p90_ns")},
        "iterations": int(device.get("iterations", 0)),
        "cold": device.get("iterations") == 1 and device.get("cold_ns") is not None,
        "answers": repetition["text"] if repetition.get("iterations", 0) > 1 else "",
        "agentless": str(provenance.get("command", {}).get("why", "")),
        "artifact_bytes": artifact.get("bytes"),
        "cached": artifact["cached"] if compiled else None,
        "notes": dict(artifact.get("notes", {})),
        "placement": None if parts is None else tuple(parts),
        "elsewhere": str(provenance.get("elsewhere", "")),
        "outputs": _convert_outputs(first),
        **{name: str(first.get(name, "")) for name in ("against", "relation")},
        "decided_by": str(case.get("decided_by", "")),
        "unanswered": tuple(jsonable(case.get("unanswered", ()))),
        "other_references": tuple(
            {
                **{name: one.get(name, "") for name in ("against", "relation", "outcome")},
                "outputs": _convert_outputs(one),
            }
            for one in others
        ),
        "disagreement": str(case.get("disagreement", "")),
        "random": tuple(case.get("random", ())),
    }


def _convert_outputs(verdict: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return tuple(jsonable(verdict.get("outputs", ())))


_PACKAGES = ("onnx", "onnxruntime", "iree-base-compiler", "iree-base-runtime", "numpy")
# Packages in hil's extras, listed if installed.
_FRAMEWORKS = ("torch", "executorch", "torchvision", "torchaudio", "tensorflow", "tensorflow-cpu", "ai-edge-litert")


def versions() -> dict[str, str]:
    """Return the tools' versions, and a host description."""
    return {
        "hil": own_version(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        **installed(_FRAMEWORKS),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the installed packages among ``packages``."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


SCHEMA = 1
HEAD = "suite.json"
LINES = "results.jsonl"
_LOCK = ".lock"


class SuiteRun:
    """A suite run in a directory. Only one process at a time may write (:meth:`writing`)."""

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        self.folder = folder
        # suite.json content: ``schema``, ``request``, ``suite``, ``flow``, ``runtime``, ``boards``, ``command``,
        # ``versions``, ``origin``, ``ids`` (all cases, in order), ``started``, ``finished``, ``exit_code``,
        # ``interrupted``.
        self.head = head

    @classmethod
    def create(cls, folder: Path, head: Mapping[str, Any]) -> SuiteRun:
        """Create a run. Raises UsageError if the directory already contains a run."""
        if (folder / HEAD).exists():
            raise UsageError(
                f"{folder} already contains a suite run",
                hint=f"resume it with --resume {shlex.quote(str(folder))}, or choose a different --out",
            )
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LINES).touch()
            seal(folder, head.get("request", {}))
        now = {"started": time.time(), "finished": None, "exit_code": None}
        origin = head.get("origin") or origin_of_request(head.get("request", {}))
        run = cls(folder, {"schema": SCHEMA, **head, "origin": origin, **now})
        run.save()
        return run

    @classmethod
    def open(cls, folder: Path) -> SuiteRun:
        """Open a stored run. Raises UsageError if the run is missing or the head is unreadable."""
        try:
            head = read_json(folder / HEAD)
            if head["schema"] > SCHEMA:
                raise UsageError(f"{folder} was written by a newer hil (schema {head['schema']})")
        except FileNotFoundError as error:
            raise UsageError(
                f"{folder} is not a suite run: {HEAD} not found",
                hint="give the directory of a suite run: --out, or the path that hil suite run printed",
            ) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{folder / HEAD} cannot be read: {error}") from error
        return cls(folder, head)

    def save(self) -> None:
        """Write suite.json atomically."""
        write_json(self.folder / HEAD, self.head)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the run for writing. Remove an incomplete line that a killed writer left.

        Raises UsageError if a different process has the lock.
        """
        import filelock

        lock = filelock.FileLock(self.folder / _LOCK, timeout=0)
        with storing(self.folder):
            try:
                lock.acquire()
            except filelock.Timeout as error:
                raise UsageError(
                    f"{self.folder} is in use by a different hil process", hint="wait for that process to end"
                ) from error
            path = self.folder / LINES
            if path.exists() and (half := read_file(path).rpartition(b"\n")[2]):
                os.truncate(path, path.stat().st_size - len(half))
        try:
            yield
        finally:
            lock.release()

    def append(self, record: CaseRecord) -> None:
        """Append a case's record. After the return the record survives a crash of this process."""
        with storing(self.folder), (self.folder / LINES).open("ab") as file:
            file.write(_encode_record(record))

    def records(self) -> list[CaseRecord]:
        """Return the records of the finished cases, in the suite's order."""
        return self.read()[0]

    def read(self) -> tuple[list[CaseRecord], int]:
        """Return the records and the number of damaged lines. Cases on damaged lines run again."""
        found: dict[str, CaseRecord] = {}
        damaged = 0
        path = self.folder / LINES
        # The part after the last newline is an incomplete line or empty.
        for line in read_file(path).split(b"\n")[:-1] if path.exists() else ():
            try:
                record = CaseRecord.of_json(parse_json(line))
            except (ValueError, TypeError, AttributeError, RecursionError):
                damaged += 1
            else:
                found[record.id] = record
        order = {case_id: number for number, case_id in enumerate(self.head.get("ids", ()))}
        return sorted(found.values(), key=lambda record: order.get(record.id, len(order))), damaged

    def drop_stale(self, content: Mapping[str, str]) -> list[str]:
        """Remove the records of cases with changed content. Return their IDs."""
        records = self.records()
        stale = [record.id for record in records if record.content != content.get(record.id)]
        if stale:
            kept = b"".join(_encode_record(record) for record in records if record.id not in stale)
            write_file(self.folder / LINES, kept)
        return stale

    def case_folder(self, case_id: str) -> Path:
        """Return the directory of a case."""
        return self.folder / "cases" / case_id

    def to(self, folder: Path) -> str:
        """Return a relative link to a directory, so that the reports and the directory can be moved together."""
        return Path(os.path.relpath(folder.absolute(), self.folder.absolute())).as_posix()

    def save_tensors(self, case_id: str, kind: str, tensors: Mapping[str, Array]) -> list[Path]:
        """Write tensors of a case as .npy files in ``cases/<id>/<kind>``. Return the files, in order."""
        cases = Run(self.folder / "cases", {})
        return [cases.folder / entry["file"] for entry in cases.save_tensors(case_id, kind, tensors)]


def _encode_record(record: CaseRecord) -> bytes:
    return json.dumps(jsonable(record.to_json()), allow_nan=False).encode() + b"\n"


def default_folder(title: str, flow: str) -> Path:
    """Return the default name of a new run directory."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return Path("hil-suites") / f"{stamp}-{safe_name(title)}-{safe_name(flow)}-{os.urandom(2).hex()}"
