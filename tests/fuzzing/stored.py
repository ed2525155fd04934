"""Fuzzers of folders that others may have written: golden folders and studies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from fuzzing import mutate
from fuzzing.engine import Attempt, Fuzzer, Tried
from fuzzing.texts import toml
from hil.core.results import Relation
from hil.errors import LoadFailed, UsageError

# ---- golden folders


@contextlib.contextmanager
def _golden(folder: Path) -> Iterator[Attempt]:
    """A golden folder with its tensors; its index is the input."""
    import shutil

    from hil.controller.workloads.bundles.case_files import GOLDEN_INDEX, read_golden

    held = folder / "golden"
    _write_golden(held)
    (folder / "other").write_bytes(b"x")

    def attempt(data: bytes) -> Tried:
        (held / GOLDEN_INDEX).write_bytes(data)
        bundle = read_golden(held, context=None)  # type: ignore[arg-type]
        return Tried(1, (f"{len(bundle.methods)} methods", f"{sum(len(one.cases) for one in bundle.methods)} cases"))

    yield attempt
    shutil.rmtree(held)


def _write_golden(folder: Path) -> None:
    from support import bundle_files

    from hil.controller.workloads.bundles.case_files import write_golden

    made = folder.with_name("made")
    made.mkdir()
    case = bundle_files.case(6, control=bundle_files.control(6))
    write_golden(bundle_files.bundle(made, case), folder, context=None)  # type: ignore[arg-type]


def _golden_seeds() -> list[bytes]:
    import tempfile

    from hil.controller.workloads.bundles.case_files import GOLDEN_INDEX

    with tempfile.TemporaryDirectory() as place:
        _write_golden(Path(place) / "golden")
        return [(Path(place) / "golden" / GOLDEN_INDEX).read_bytes()]


# ---- studies

_STUDY = b"""[a]
title = "an experiment"
reported = "it failed"
[b]
"""


def _study_seeds() -> list[bytes]:
    row = {
        **{"experiment": "a", "title": "an experiment", "reported": "", "toolchain": "iree", "compiler": "iree 3"},
        **{"relation": "independent", "detail": "", "steps": 3, "placement": [{"device": "cpu", "nodes": 2}]},
        "outcome": "FAIL",
        "stages": [{"name": "train", "outcome": "pass", "seconds": 1.5, "message": ""}, {"name": "run"}],
        **{"failed_stage": "", "message": "", "bytes": 100, "program": "a/p.vmfb"},
        "worst": {"max_abs": 1.0, "max_ulp": 3, "of": "w", "step": 1},
    }
    ended = {**row, "experiment": "b", "outcome": "PASS", "worst": None, "placement": None}
    settings = {"steps": 3, "seed": 0, "rtol": 1e-5, "atol": None, "no_fallback": False, "allow_blind": []}
    known = {"schema": 1, "folder": "/x", "asked": settings, "board": {"name": "sim", "hw_type": "sim"}}
    return [_STUDY, json.dumps({**known, "finished": False, "rows": [row, ended], "exit_code": 1}).encode()]


@contextlib.contextmanager
def _study(folder: Path) -> Iterator[Attempt]:
    """A study's list of experiments, and the record that an interrupted one left."""
    from hil.controller.records.study import StudyRow, make_study
    from hil.controller.workloads.study.record import LIST, MODEL, exit_code, merge_rows, read_study, summarize_rows
    from hil.controller.workloads.study.show import format_markdown, list_failures, make_terminal_table
    from hil.core.bounded_json import parse_json

    for name in "ab":
        (folder / name).mkdir()
        (folder / name / MODEL).write_bytes(b"")
    (folder / LIST).write_bytes(_STUDY)
    known = {"toolchain": "iree", "relation": Relation.INDEPENDENT, "stages": []}
    asked = [
        StudyRow(experiment=one.name, title=one.title, reported=one.reported, **known) for one in read_study(folder)
    ]

    def attempt(data: bytes) -> Tried:
        kinds = []
        (folder / LIST).write_bytes(data)
        try:
            kinds.append(f"{len(read_study(folder))} experiments")
        except UsageError as error:
            str(error).encode()
            kinds.append(f"list {error.message.rpartition(':')[2][:20]}")
        try:
            rows = merge_rows(make_study(parse_json(data)).rows, asked)
        except UsageError as error:
            kinds.append(f"rows {error.message.rpartition('`')[2][:20]}")
        except ValueError as error:  # hil reports it as a UsageError
            kinds.append(f"rows {type(error).__name__}")
        else:
            kinds.append(f"{summarize_rows(rows)} {exit_code(rows, False)} {len(list_failures(rows))}"[:60])
            make_terminal_table(rows)
            format_markdown(rows).encode(errors="surrogatepass")
        return Tried(2, tuple(kinds))

    yield attempt


# ---- results of other tools

_LOG = b"""INFO: Graph: [a.tflite]
INFO: count=50 first=1 curr=2 min=1 max=3 avg=2.5 std=1 p5=1 median=2 p95=3
INFO: Inference timings in us: Init: 5, First inference: 6, Warmup (avg): 7, Inference (avg): 2.5
INFO: Memory footprint delta from the start of the tool (MB): init=6.5 overall=109.5
"""


def _foreign_seeds() -> list[bytes]:
    folder = Path(__file__).parents[1] / "data" / "history"
    times = b'[{"startComputeMs": 1.0, "endComputeMs": 2.5}, {"computeMs": 1.5, "latencyMs": 2.0}]'
    return [_LOG, times, *(path.read_bytes() for path in sorted(folder.iterdir()))]


@contextlib.contextmanager
def _foreign(folder: Path) -> Iterator[Attempt]:
    """A file of another tool, imported and stored."""
    from hil.controller.records.measurements.history import SourceState
    from hil.controller.storage.history.store import HistoryStore
    from hil.controller.workloads.history.foreign import ForeignNames, read_foreign

    def attempt(data: bytes) -> Tried:
        (folder / "a").write_bytes(data)
        entries = read_foreign(folder / "a", "", ForeignNames(), SourceState())
        with HistoryStore.open(folder / "history", create=True) as store:
            store.add(entries)
        return Tried(1, (entries[0].key.kind, f"{len(entries)} entries"))

    yield attempt


FUZZERS = [
    Fuzzer(
        "history",
        "measurements of other tools",
        _foreign,
        _foreign_seeds,
        lambda data, rng: (mutate.json_bytes if data[:1] in (b"{", b"[") else mutate.lines)(data, rng),
    ),
    Fuzzer("golden", "golden folders", _golden, _golden_seeds, mutate.json_bytes, (UsageError, LoadFailed)),
    Fuzzer(
        "study",
        "a study's list, and its record as an interrupted one left it",
        _study,
        _study_seeds,
        lambda data, rng: (mutate.json_bytes if data[:1] == b"{" else toml)(data, rng),
    ),
]
