"""Checks of messages that the protocol's types cannot make: a call gets a valid document, or a UsageError."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from hil.controller.farm import rpc
from hil.controller.farm.messages import MOST_FENCE, BoardCard, JobResult, Submission
from hil.core import digest
from hil.errors import UsageError
from hil.protocol.v1 import farm_pb2 as pb

MOST_FILES = 100_000
# Most characters of a name or a title, which every user's table shows; most bytes of a board's labels, which every
# selector reads, and of its config.
_TEXT, _MOST_LABELS, _MOST_CONFIG = 2000, 64 << 10, 1 << 20
# Most bytes of a file's name, and of its path below a job's folder: what file systems take.
_LONGEST_NAME, _LONGEST_PATH = 255, 1000
_BOARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,99}")
_KEY = re.compile(r"[\x21-\x7e]{8,200}")


def submission_of(message: pb.Submission) -> Submission:
    """Return a submission whose texts and files can be stored; the store checks whether it can be scheduled.

    Raises:
        UsageError: it cannot be stored.
    """
    submission = rpc.submission_of(message)
    for name in ("title", "selector", "board", "project"):
        _check_text(name, getattr(submission, name))
    if not _KEY.fullmatch(submission.key):
        raise UsageError("the submission's key must be 8 to 200 printable characters")
    for spec in submission.specs:
        _check_files(spec.files)
        _check_text("affinity", spec.affinity)
    return submission


def card_of(message: pb.BoardCard) -> BoardCard:
    """Return a board's card.

    Raises:
        UsageError: its name, fence, labels or config cannot be a board's.
    """
    card = rpc.card_of(message)
    for name in ("name", "site", "host", "hw_type", "direct", "machine"):
        _check_text(name, getattr(card, name))
    if len(card.config) > _MOST_CONFIG or "\0" in card.config:
        raise UsageError("the card's config must be TOML of at most 1 MiB")
    if not _BOARD.fullmatch(card.name):
        raise UsageError(f"{card.name[:120]!r} cannot be a board's name", hint="letters, digits and . _ - @ : +")
    if not 0 <= card.fence < MOST_FENCE:
        raise UsageError(
            f"the card's fence makes no sense: {card.fence}", hint="hil board reset-fence mends an agent's"
        )
    labels = json.dumps(dict(card.labels))
    if len(labels) > _MOST_LABELS:
        raise UsageError(f"the labels of {card.name} are longer than {_MOST_LABELS >> 10} KiB")
    if "\\u0000" in labels or not _finite(one for one in card.labels.values() if isinstance(one, float)):
        raise UsageError(f"the labels of {card.name} hold NaN, an infinite number or a NUL character")
    return card


def result_of(message: pb.JobResult) -> JobResult:
    """Return a result as a worker reports it. A NaN in its record does not make it invalid: the store replaces it.

    Raises:
        UsageError: its exit code, times or files are impossible.
    """
    result = rpc.result_of(message)
    if not 0 <= result.exit_code <= 255:
        raise UsageError(f"the result's exit_code must be 0 to 255, not {result.exit_code}")
    if not _finite(result.timings.values()):
        raise UsageError("the result's timings must be finite numbers")
    _check_files(result.files)
    return result


def _check_text(name: str, value: str) -> None:
    if len(value) > _TEXT or "\0" in value:
        raise UsageError(
            f"{name} must be a text of at most {_TEXT} characters, without NUL, not {value[:50]!r}",
        )


def _finite(numbers: Iterable[float]) -> bool:
    return all(math.isfinite(one) for one in numbers)


def _check_files(files: Mapping[str, str]) -> None:
    if len(files) > MOST_FILES:
        raise UsageError(f"a job has at most {MOST_FILES} files")
    for path, name in files.items():
        inside = PurePosixPath(path)
        long = len(os.fsencode(path)) > _LONGEST_PATH or any(
            len(os.fsencode(part)) > _LONGEST_NAME for part in inside.parts
        )
        unusual = "\0" in path or inside.is_absolute() or ".." in inside.parts or str(inside) != path
        if not path or long or unusual:
            raise UsageError(f"{path[:100]!r} is no path of a file below a job's folder")
        digest.check(name)
