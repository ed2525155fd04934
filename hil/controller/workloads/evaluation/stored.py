"""Files of an evaluation in the directory of its run: eval.json and samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hil.controller.records.base import make_record, read_record
from hil.controller.records.decisions.evaluation import EvaluatedSample, EvaluationRecord
from hil.controller.storage.line_file import read_lines, remove_incomplete_line
from hil.controller.storage.runs import Run, convert_write_errors, write_json
from hil.core.bounded_json import parse_json
from hil.errors import UsageError

RECORD = "eval.json"
_SAMPLES = "samples.jsonl"


def read_evaluation(run: Run) -> EvaluationRecord:
    """Read eval.json. Raises UsageError if the run is not an evaluation."""
    try:
        return read_record(run.folder / RECORD, EvaluationRecord)
    except UsageError as error:
        raise UsageError(
            f"run {run.id} is not an evaluation: {error.message}", hint="choose a run of `hil eval`"
        ) from error


def find_evaluation(run: Run) -> EvaluationRecord | None:
    """Return the run's evaluation, or None if the run has none. Raises UsageError if the file is damaged."""
    return read_evaluation(run) if (run.folder / RECORD).exists() else None


def write_evaluation(record: EvaluationRecord, folder: Path) -> None:
    """Write eval.json."""
    write_json(folder / RECORD, record.to_json())


def read_samples(folder: Path) -> list[EvaluatedSample]:
    """Return the finished samples in the order of their runs.

    This function ignores an incomplete last line, which a killed process may leave. If a sample has multiple results,
    the first one counts.

    Raises:
        UsageError: the file is damaged.
    """
    path = folder / _SAMPLES
    try:
        lines = read_lines(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    samples: dict[str, EvaluatedSample] = {}
    for number, line in enumerate(lines, 1):
        try:
            sample = make_record(parse_json(line), EvaluatedSample)
        except (ValueError, UsageError) as error:
            raise UsageError(f"{path}, line {number} is not a sample: {error}") from error
        samples.setdefault(sample.name, sample)
    return list(samples.values())


@contextmanager
def open_samples(folder: Path) -> Iterator[Callable[[EvaluatedSample], None]]:
    """Yield a function that appends a finished sample to the file. The sample survives a crash of this process."""
    path = folder / _SAMPLES
    with convert_write_errors(folder):
        remove_incomplete_line(path)
        file = path.open("a", encoding="utf-8")

    def append(sample: EvaluatedSample) -> None:
        with convert_write_errors(folder):
            file.write(json.dumps(sample.to_json(), allow_nan=False) + "\n")
            file.flush()

    with file:
        yield append
