"""A suite run in its folder: ``suite.json``, ``results.jsonl`` with a line for each ended case, ``cases/<id>/``."""

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

from hil.controller.pipeline.next_steps import hint_for_case
from hil.controller.storage.origin import origin_of_request
from hil.controller.storage.runs import Run, safe_name, seal, storing, write_file, write_json
from hil.core import own_version
from hil.core.files import read_file
from hil.core.installed import version
from hil.core.tensors import Array
from hil.core.text import jsonable
from hil.errors import UsageError


@dataclass(frozen=True)
class CaseRecord:
    """One case's end. Everything in it is what JSON can say."""

    # id, model, layer, op, params: of the :class:`~hil.controller.workloads.suites.spec.CaseSpec`.
    id: str
    model: str
    suite: str
    flow: str
    runtime: str
    outcome: str  # a word of :class:`hil.core.results.Outcome`, expected failures taken into account
    ended: str  # the outcome without regard to what was expected
    layer: str = ""
    op: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    # board, hw_type: which board ran it, as results call it, and its hardware type; "" where none did.
    board: str = ""
    hw_type: str = ""
    stage: str = ""
    message: str = ""  # why, in a line; "" for a pass
    # hint: what to do next. detail: the tool's own words about an error.
    hint: str = ""
    detail: str = ""
    # seconds of the host's clock: the fields of :class:`hil.core.results.Timings`; None is a stage that was not.
    timings: Mapping[str, float | None] = field(default_factory=dict)
    # device_p50_ns, device_p90_ns: median and 90th percentile of an iteration's device time, or None.
    device_p50_ns: float | None = None
    device_p90_ns: float | None = None
    iterations: int = 0  # how many were timed
    cold: bool = False  # whether that was one alone, the program's first run since it was loaded
    # how many iterations were compared with each other, and what they gave; "" where fewer than two were.
    answers: str = ""
    agentless: str = ""  # why the board has no agent, where programs are run by command; "" where it has one
    artifact_bytes: int | None = None  # size of the program's files, or None
    # digest of the file that the runtime opens; "" where there is none. What was compiled together has the same.
    program: str = ""
    cached: bool | None = None  # whether the program came out of the cache, or None where nothing was compiled
    # what the compiler told of its work: of a program's delegation, say. See :class:`hil.core.results.Artifact`.
    notes: Mapping[str, Any] = field(default_factory=dict)
    # where it ran: fields of :class:`hil.core.results.Part`; None where the runtime did not tell.
    placement: tuple[Mapping[str, Any], ...] | None = None
    elsewhere: str = ""  # a note on what ran on another device than it was told to; "" where nothing did
    # one comparison an output with the flow's own reference: fields of :class:`hil.compare.verdict.OutputComparison`
    # and ``mismatch_share``; inf and nan are texts, for JSON.
    outputs: tuple[Mapping[str, Any], ...] = ()
    against: str = ""  # who that reference was
    # what it shares with the program: a value of :class:`hil.core.results.Relation`; "" where none answered.
    relation: str = ""
    decided_by: str = ""  # the reference that a pass rests on, with its relation; "" where the case did not pass
    # the references that could not answer: {"reference", "outcome", "reason", "detail"}.
    unanswered: tuple[Mapping[str, Any], ...] = ()
    # of every further reference, where several were asked: {"against", "relation", "outcome", "outputs"}.
    other_references: tuple[Mapping[str, Any], ...] = ()
    disagreement: str = ""  # which references disagree on what; "" where none do
    random: tuple[str, ...] = ()  # the model's nodes that draw random numbers
    # plain_outputs, plain_against: the same beside the model before the flow's recipe; empty where there is none.
    plain_outputs: tuple[Mapping[str, Any], ...] = ()
    plain_against: str = ""
    # what was expected to fail: {"outcome", "reason", "issue"}; empty where nothing was.
    expectation: Mapping[str, str] = field(default_factory=dict)
    # every try before the one that counted and every confirmation, in order: {"why" ("board lost", "confirm"), "board",
    # "outcome", "message"}.
    attempts: tuple[Mapping[str, str], ...] = ()
    confirmed: str = ""  # of a mismatch that was run again: "always wrong", "flaky" or "one bad board"; else ""
    repeat: str = ""  # the command that repeats it
    diff: str = ""  # the command that shows the difference of its worst output; "" where there is none
    folder: str = ""  # where its tensors and logs are, relative to the run's folder; "" where nothing was kept
    # where else it left something, relative to the run's folder: ``ir`` (of the compiler), ``run profile``, ``compile
    # profile`` -> a folder.
    left: Mapping[str, str] = field(default_factory=dict)
    started: float = 0.0  # seconds since the epoch
    content: str = ""  # of the :class:`~hil.controller.workloads.suites.spec.CaseSpec`

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> CaseRecord:
        """The record of a line; what a newer hil added is left out."""
        known = {one.name for one in fields(cls)}
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in known
        }
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """What JSON can say of it."""
        return dict(vars(self))


def told_by(case: Mapping[str, Any]) -> dict[str, Any]:
    """What a case of run.json says of itself, as fields of :class:`CaseRecord`.

    Where the case is, who it was run for and how it is run again is for the caller to say.
    """
    artifact, error, device = case["artifact"] or {}, case["error"] or {}, case["device"] or {}
    provenance, timings, repetition = case["provenance"], dict(case["timings"]), case.get("repetition") or {}
    parts = provenance.get("placement")
    # Some models are programs, and some cases come with one.
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
        "outputs": _outputs(first),
        **{name: str(first.get(name, "")) for name in ("against", "relation")},
        "decided_by": str(case.get("decided_by", "")),
        "unanswered": tuple(jsonable(case.get("unanswered", ()))),
        "other_references": tuple(
            {**{name: one.get(name, "") for name in ("against", "relation", "outcome")}, "outputs": _outputs(one)}
            for one in others
        ),
        "disagreement": str(case.get("disagreement", "")),
        "random": tuple(case.get("random", ())),
    }


def _outputs(verdict: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return tuple(jsonable(verdict.get("outputs", ())))


_PACKAGES = ("onnx", "onnxruntime", "iree-base-compiler", "iree-base-runtime", "numpy")
# Those of hil's extras, told where they are installed.
_FRAMEWORKS = ("torch", "executorch", "torchvision", "torchaudio", "tensorflow", "tensorflow-cpu", "ai-edge-litert")


def versions() -> dict[str, str]:
    """Tool -> version, and what the host is."""
    return {
        "hil": own_version(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        **installed(_FRAMEWORKS),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of those of some packages that are installed."""
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
    """A suite run in its folder; one process at a time writes it (:meth:`writing`)."""

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        self.folder = folder
        # What suite.json holds: ``schema``, ``request``, ``suite``, ``flow``, ``runtime``, ``boards``, ``command``,
        # ``versions``, ``origin``, ``ids`` (of all cases, in order), ``started``, ``finished``, ``exit_code``,
        # ``interrupted``.
        self.head = head

    @classmethod
    def create(cls, folder: Path, head: Mapping[str, Any]) -> SuiteRun:
        """A new run. Raises UsageError: the folder holds one already."""
        if (folder / HEAD).exists():
            raise UsageError(
                f"{folder} holds a suite run already",
                hint=f"go on with it: --resume {shlex.quote(str(folder))}, or name another --out",
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
        """A stored run. Raises UsageError: there is none, or its head cannot be read."""
        try:
            head = json.loads(read_file(folder / HEAD))
            if head["schema"] > SCHEMA:
                raise UsageError(f"{folder} was written by a newer hil (schema {head['schema']})")
        except FileNotFoundError as error:
            raise UsageError(
                f"{folder} holds no suite run: it has no {HEAD}",
                hint="name the folder of one: --out, or what hil suite run told of",
            ) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{folder / HEAD} cannot be read: {error}") from error
        return cls(folder, head)

    def save(self) -> None:
        """Write suite.json, atomically."""
        write_json(self.folder / HEAD, self.head)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Have the run for oneself. What a killed writer left of a line is taken away.

        Raises UsageError: somebody else writes it.
        """
        import filelock

        lock = filelock.FileLock(self.folder / _LOCK, timeout=0)
        with storing(self.folder):
            try:
                lock.acquire()
            except filelock.Timeout as error:
                raise UsageError(f"another hil writes {self.folder} now", hint="wait until it has ended") from error
            path = self.folder / LINES
            if path.exists() and (half := path.read_bytes().rpartition(b"\n")[2]):
                os.truncate(path, path.stat().st_size - len(half))
        try:
            yield
        finally:
            lock.release()

    def append(self, record: CaseRecord) -> None:
        """Add a case's record; it is out of this process when this returns, whatever kills us."""
        with storing(self.folder), (self.folder / LINES).open("ab") as file:
            file.write(_line(record))

    def records(self) -> list[CaseRecord]:
        """The records of the cases that have ended, in the suite's order."""
        return self.read()[0]

    def read(self) -> tuple[list[CaseRecord], int]:
        """The same, and how many lines cannot be read: of these nothing is known, so that their cases run again."""
        found: dict[str, CaseRecord] = {}
        damaged = 0
        path = self.folder / LINES
        # What follows the last line's end is half a line, or nothing.
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
            try:
                record = CaseRecord.of_json(json.loads(line))
            except (ValueError, TypeError, AttributeError, RecursionError):
                damaged += 1
            else:
                found[record.id] = record
        order = {case_id: number for number, case_id in enumerate(self.head.get("ids", ()))}
        return sorted(found.values(), key=lambda record: order.get(record.id, len(order))), damaged

    def drop_stale(self, content: Mapping[str, str]) -> list[str]:
        """Take out the records of cases whose content is not what it was; returns their ids."""
        records = self.records()
        stale = [record.id for record in records if record.content != content.get(record.id)]
        if stale:
            kept = b"".join(_line(record) for record in records if record.id not in stale)
            write_file(self.folder / LINES, kept)
        return stale

    def case_folder(self, case_id: str) -> Path:
        """Where a case keeps its files."""
        return self.folder / "cases" / case_id

    def to(self, folder: Path) -> str:
        """A folder as links in the run's reports name it: relative, so that both may be moved together."""
        return Path(os.path.relpath(folder.absolute(), self.folder.absolute())).as_posix()

    def save_tensors(self, case_id: str, kind: str, tensors: Mapping[str, Array]) -> list[Path]:
        """Write tensors of a case as .npy below ``cases/<id>/<kind>``; returns their files, in order."""
        cases = Run(self.folder / "cases", {})
        return [cases.folder / entry["file"] for entry in cases.save_tensors(case_id, kind, tensors)]


def _line(record: CaseRecord) -> bytes:
    return json.dumps(jsonable(record.to_json()), allow_nan=False).encode() + b"\n"


def default_folder(title: str, flow: str) -> Path:
    """A new folder's name where the user names none."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return Path("hil-suites") / f"{stamp}-{safe_name(title)}-{safe_name(flow)}-{os.urandom(2).hex()}"
