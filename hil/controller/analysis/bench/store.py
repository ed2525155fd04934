"""A bench in its run's folder: samples as they come, its document, and all that measuring it again needs.

Beside what every run has, the folder holds ``bench.json`` (the document of ``hil bench --json``), ``samples.csv`` (a
line an iteration, written after each batch, so a killed bench keeps those it had) and ``<case>/program/``, the compiled
program.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.analysis.bench.model import Batch
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.job import Job
from hil.controller.storage.runs import Run, storing
from hil.core.artifacts import Artifact
from hil.core.results import RunResult
from hil.core.tensors import TensorSpec
from hil.core.text import jsonable
from hil.errors import UsageError

_COLUMNS = ("side", "round", "batch", "copy", "start_ns", "duration_ns")
_TYPES = [("side", "U1"), ("round", "i8"), ("batch", "i8"), ("copy", "i8"), ("start_ns", "i8"), ("duration_ns", "i8")]


def save_document(run: Run, document: Mapping[str, Any]) -> None:
    """Write bench.json, atomically.

    Raises:
        StorageError: the folder cannot be written.
    """
    with storing(run.folder):
        temporary = run.folder / f"bench.json.{os.getpid()}"
        temporary.write_text(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n")
        temporary.replace(run.folder / "bench.json")


def read_document(run: Run) -> dict[str, Any]:
    """What bench.json holds.

    Raises:
        UsageError: the run is no bench.
    """
    try:
        document: dict[str, Any] = json.loads((run.folder / "bench.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"run {run.id} is no bench", hint="name one that `hil bench` stored") from error
    return document


class SampleFile:
    """``samples.csv``, which grows by a batch at a time. A context manager.

    Raises:
        StorageError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._batches = 0
        with storing(folder):
            self._file = (folder / "samples.csv").open("w")
            self._write(",".join(_COLUMNS) + "\n")

    def append(self, batch: Batch) -> None:
        """Write a batch; it is in the file when this returns."""
        head = f"{batch.side},{batch.round},{self._batches},{batch.copy},"
        pairs = zip(batch.start_ns.tolist(), batch.duration_ns.tolist(), strict=True)
        self._write("".join(f"{head}{start},{duration}\n" for start, duration in pairs))
        self._batches += 1

    def _write(self, text: str) -> None:
        with storing(self._folder):
            self._file.write(text)
            self._file.flush()

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_samples(folder: Path) -> list[Batch]:
    """The batches of a stored bench, in order; a last line that was cut off by a kill is left out.

    Raises:
        UsageError: there are none to be read.
    """
    try:
        whole, _, _ = (folder / "samples.csv").read_text().rpartition("\n")
        rows = np.array([tuple(line.split(",")) for line in whole.splitlines()[1:]], dtype=_TYPES)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}/samples.csv cannot be read: {error}") from error
    return list(_batches(rows))


def _batches(rows: Any) -> Iterator[Batch]:
    for _, numbers in groupby(range(len(rows)), key=lambda number: int(rows[number]["batch"])):
        part = rows[list(numbers)]
        first = part[0]
        yield Batch(str(first["side"]), int(first["round"]), int(first["copy"]), part["start_ns"], part["duration_ns"])


def keep_program(run: Run, case: Case) -> dict[str, Any]:
    """Copy a case's program into the run, for a later ``--against``; returns what bench.json says of it.

    Raises:
        StorageError: the folder cannot be written.
    """
    artifact = case.artifact
    assert artifact is not None
    folder = run.folder / case.name / "program"
    with storing(folder):
        for name, path in artifact.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    told = ("runtime", "main", "digests", "function", "compiler", "flags")
    return {
        **{name: getattr(artifact, name) for name in told},
        "folder": str(folder.relative_to(run.folder)),
        "outputs": None if artifact.outputs is None else [asdict(spec) for spec in artifact.outputs],
    }


def stored_case(run: Run) -> tuple[Job, Case]:
    """The newest side of a stored bench, ready to be measured again: same program, inputs, references, options.

    Raises:
        UsageError: it is no bench, or it was cut off before there was a program to run.
    """
    document = read_document(run)
    side, case = document["sides"][-1], run.record["cases"][-1]
    program, job = side["program"], Job.of_record(run.record["request"])
    if not program or not case["inputs"]:
        raise UsageError(f"bench {run.id} has no program that could run", hint="name one that measured something")
    place = Path(program["folder"])
    specs = program["outputs"]
    artifact = Artifact(
        runtime=program["runtime"],
        main=program["main"],
        files={name: run.own(str(place / name)) for name in program["digests"]},
        digests=program["digests"],
        function=program["function"],
        compiler=program["compiler"],
        flags=tuple(program["flags"]),
        outputs=specs and tuple(TensorSpec(spec["name"], spec["dtype"], tuple(spec["shape"])) for spec in specs),
        cached=True,
    )
    missing = [str(path) for path in artifact.files.values() if not path.is_file()]
    if missing:
        raise UsageError(f"bench {run.id} lacks its program: {', '.join(missing)}")
    references = tuple(
        RunResult(one["source"], run.load_tensors(one["outputs"]), provenance=one["provenance"])
        for one in case["references"]
    )
    again = Case(
        case["name"],
        job.models[-1],
        job.options(),
        Path(),
        artifact=artifact,
        inputs=run.load_tensors(case["inputs"]),
        references=references,
    )
    return job, again
