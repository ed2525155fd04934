"""Store the tests of candidates as lines of bisect.jsonl, so that an interrupted gate can be resumed."""

from __future__ import annotations

import json
from pathlib import Path

from hil.controller.records.base import make_record
from hil.controller.records.decisions.gate import CandidateTrial
from hil.controller.storage.line_file import read_lines, remove_incomplete_line
from hil.controller.storage.runs import convert_write_errors
from hil.core.bounded_json import parse_json
from hil.core.files import MAX_TEXT_BYTES
from hil.errors import UsageError

TRIALS = "bisect.jsonl"


class TrialLog:
    """The file of a gate's tests.

    Attributes:
        trials: stored tests, oldest first.

    Raises:
        UsageError: the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / TRIALS
        with convert_write_errors(folder):
            remove_incomplete_line(self._path, MAX_TEXT_BYTES)
        try:
            self.trials = [
                make_record(parse_json(line), CandidateTrial) for line in read_lines(self._path, MAX_TEXT_BYTES)
            ]
        except (ValueError, UsageError) as error:
            raise UsageError(f"{self._path} is damaged: {error}") from error

    def append(self, trial: CandidateTrial) -> None:
        """Append a test. After the return, the test survives a crash of this process."""
        with convert_write_errors(self._path.parent), self._path.open("ab") as file:
            file.write(json.dumps(trial.to_json(), allow_nan=False).encode() + b"\n")
        self.trials.append(trial)
