"""Stored runs whose options this version of hil cannot read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_boards import fake_case
from support.histories import history_entry, program_source

from hil.controller.pipeline.settings.options import Job
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.programs import combine_digests
from hil.controller.storage.history.store import HistoryStore
from hil.controller.workloads.gate import suite_cases
from hil.controller.workloads.gate.programs import ProgramRestorer
from hil.controller.workloads.gate.stored_cases import StoredCases, StoredRunCases
from hil.controller.workloads.gate.suite_cases import StoredSuiteCases
from hil.core.digest import digest_of
from hil.errors import UsageError

OLD, NEW = b"old program", b"new program"
REQUESTS = [{"no_such_option": 1}, {"models": 3}]


@pytest.mark.parametrize("request_", REQUESTS)
def test_run_with_unknown_options_is_usage_error(tmp_path: Path, request_: dict[str, Any]) -> None:
    run: Any = SimpleNamespace(id="r1", folder=tmp_path, record=SimpleNamespace(request=request_))
    with pytest.raises(UsageError, match="cannot read the options of run r1"):
        StoredRunCases(run)


@pytest.mark.parametrize("request_", [{}, *REQUESTS])
def test_suite_with_unknown_options_is_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any]
) -> None:
    monkeypatch.setattr(suite_cases, "check_seal", lambda folder, request: None)
    run: Any = SimpleNamespace(folder=tmp_path, head=SimpleNamespace(id="s1", request=request_))
    unused: Any = None
    with pytest.raises(UsageError, match="cannot read the options of run s1"):
        StoredSuiteCases(run, "sim", unused, tmp_path)


def test_old_program_runs_without_the_run_of_another_user(tmp_path: Path) -> None:
    def find(entry: HistoryEntry) -> StoredCases:
        raise UsageError("cannot trust the stored command")

    entries = [
        history_entry(name, program=combine_digests({"main.vmfb": digest_of(content)}))
        for name, content in (("r1", OLD), ("r2", NEW))
    ]
    sources = [program_source(tmp_path / name, content) for name, content in (("old", OLD), ("new", NEW))]
    cases: Any = SimpleNamespace(
        adapt=lambda name, artifact: replace(artifact, function=name),
        restore=lambda name, job, artifact: replace(fake_case(name), artifact=artifact),
    )
    opener: Any = SimpleNamespace(find=find)
    with HistoryStore.open(HistoryPlace(tmp_path / "history"), create=True) as store:
        store.add(entries, sources)
        restorer = ProgramRestorer(store, Job(()), opener)
        case = restorer.restore_entry(cases, entries[1], entries[0], Job(()))
    assert case.artifact is not None and case.artifact.function == "m"
    assert case.artifact.files["main.vmfb"].read_bytes() == OLD
    assert case.references == ()
