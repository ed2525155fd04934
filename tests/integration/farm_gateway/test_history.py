"""The farm's history: finished jobs are added once, and errors never change results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.farms import Server
from support.gateways import BareBoard, Running, gateway_process, running_gateway, simple_order, token_of
from support.histories import program_source
from support.run_records import run_case, run_record
from support.suite_runs import case as suite_case
from support.waiting import eventually

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.gateway.history import recorder
from hil.controller.farm.job_files import KEEP_PROGRAMS
from hil.controller.farm.messages import JobResult, JobSpec, Kind
from hil.controller.farm.paths import FarmAddress
from hil.controller.pipeline.settings.history_settings import HistorySettings
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.programs import ProgramSource
from hil.controller.storage.history.store import HistoryStore
from hil.controller.workloads.suites.request import SuiteRequest
from hil.core.files import digest_file
from hil.core.text import convert_to_json

ORIGIN = {"labels": ["nightly"], "branch": "topic", "commit": "1a2b3c4d"}


@pytest.fixture(autouse=True)
def short_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_RETRY_S", 0.1)


@pytest.fixture
def settings(farm_db: str, tmp_path: Path) -> HistorySettings:
    return HistorySettings(HistoryPlace(tmp_path / "history", farm_db), auto=True)


@pytest.fixture
def gateway(farm_db: str, tmp_path: Path, settings: HistorySettings) -> Iterator[Running]:
    with running_gateway(farm_db, tmp_path, history=settings) as running:
        yield running


def run_spec(**options: Any) -> JobSpec:
    return JobSpec(Kind.RUN, {"dirty": True, "model_path": "nets/digits_cnn.onnx", "origin": ORIGIN, **options})


def run_result(files: dict[str, str] | None = None, **values: Any) -> JobResult:
    record = run_record(run_case(name="digits_cnn", **values), origin={**ORIGIN, "branch": "main"})
    return JobResult(0, "PASS", record=record.to_json(), files=files or {})


def finish(farm: FarmClient, board: BareBoard, result: JobResult, spec: JobSpec | None = None) -> str:
    """Submit a job and report its result."""
    _, [job] = farm.submit(simple_order(specs=(spec or run_spec(),)))
    assert board.report(board.send_grant(), result).recorded
    return job


def entries(settings: HistorySettings) -> list[HistoryEntry]:
    with HistoryStore.open(settings.place) as store:
        return list(store.entries())


def reasons(farm: FarmClient, what: str) -> list[str]:
    return [one.reason for one in farm.ask("events", limit=100) if one.what == what]


def upload_program(farm: FarmClient, source: ProgramSource, folder: Path) -> dict[str, str]:
    """Upload a program as hosts do. Return the files of the result."""
    record = folder / "program.json"
    record.write_text(json.dumps(source.record.to_json()))
    places = {"program.json": record, **{f"files/{name}": source.folder / name for name in source.record.files}}
    digests = {name: digest_file(path) for name, path in places.items()}
    farm.upload({digests[name]: path for name, path in places.items()})
    return {f".programs/{source.record.digest.replace(':', '-')}/{name}": digest for name, digest in digests.items()}


def test_finished_job_is_added_with_submitters_commit(
    client: Callable[..., FarmClient], board: BareBoard, settings: HistorySettings, tmp_path: Path
) -> None:
    farm = client()
    source = program_source(tmp_path / "p", b"program", "m.vmfb")
    artifact = {**run_case().artifact.to_json(), "digests": source.record.files, "main": "m.vmfb"}
    _, [job] = farm.submit(simple_order(specs=(run_spec(),)))
    grant = board.send_grant()
    assert grant.spec.options[KEEP_PROGRAMS]
    files = upload_program(farm, source, tmp_path)
    board.report(grant, run_result(files=files, artifact=artifact))
    [entry] = eventually(lambda: entries(settings))
    assert entry.source.to_json() == {"commit": "1a2b3c4d", "branch": "topic", "dirty": True, "labels": ["nightly"]}
    assert (entry.run, entry.case, entry.key.model) == (job, "digits_cnn", "nets/digits_cnn.onnx")
    assert (entry.key.board, entry.board.name) == (grant.board, grant.board)
    assert entry.samples_ns and entry.board.stack and entry.outcome == "PASS"
    with HistoryStore.open(settings.place) as store:
        assert entry.program == source.record.digest and store.program_record(entry.program) == source.record
    assert reasons(farm, "job.unrecorded") == []
    assert farm.ask("job", name=job).outcome == "PASS"


def test_suite_job_is_added_under_submission(
    client: Callable[..., FarmClient], board: BareBoard, settings: HistorySettings
) -> None:
    typed = {"source": "@models", "flow": "iree", "filters": [], "suite": "models", "flow_name": "iree"}
    typed |= {"runtime": "iree", "expected": None}
    request = convert_to_json(SuiteRequest("@models").to_json())
    options = {**request, "origin": ORIGIN, "typed": typed, "cases": [["net", "net", "", ""]]}
    record = {"cases": [suite_case("net", board="rpi").to_json()], "boards": ["rpi"]}
    job = finish(client(), board, JobResult(0, "PASS", record=record), JobSpec(Kind.SUITE, options))
    [entry] = eventually(lambda: entries(settings))
    assert (entry.run, entry.case, entry.key.kind, entry.key.flow) == (job, "net", "suite", "iree")
    assert (entry.source.commit, entry.source.dirty) == ("1a2b3c4d", None)


def test_invalid_results_are_reported_and_others_are_added(
    client: Callable[..., FarmClient], board: BareBoard, settings: HistorySettings
) -> None:
    farm = client()
    missing = {".programs/x/program.json": "blake3:" + "0" * 64}
    results = {
        "invalid result of job": JobResult(0, "PASS", record={"cases": 3}),
        "": JobResult(4, "BOARD_LOST", record={}),
        "not found in the farm's store": run_result(files=missing),
        "the entry has 2": run_result(samples_ns=[], reason="a" * 2_000_000),
    }
    jobs = {reason: finish(farm, board, result) for reason, result in results.items()}
    last = finish(farm, board, run_result())
    found = eventually(lambda: [one.run for one in entries(settings) if one.run == last] and entries(settings))
    assert [one.run for one in found] == [jobs["not found in the farm's store"], last]
    events = {one.job: one.reason for one in farm.ask("events", limit=100) if one.what == "job.unrecorded"}
    assert set(events) == {job for reason, job in jobs.items() if reason}
    for reason, job in jobs.items():
        assert reason in events.get(job, "")
        assert farm.ask("job", name=job).outcome == results[reason].outcome


def test_invalid_programs_are_not_stored(
    client: Callable[..., FarmClient], board: BareBoard, settings: HistorySettings, tmp_path: Path
) -> None:
    farm = client()
    changes = {
        "describes another program": {"digest": "blake3:" + "0" * 64},
        "is not a file of the program": {"main": "../x"},
        "invalid record": {"files": 3},
    }
    source = program_source(tmp_path / "p", b"program")
    files = {}
    for number, change in enumerate(changes.values()):
        record = tmp_path / f"{number}.json"
        record.write_text(json.dumps({**source.record.to_json(), **change}))
        files[f".programs/{number}/program.json"] = digest_file(record)
        farm.upload({digest_file(record): record})
    finish(farm, board, run_result(files=files))
    [text] = eventually(lambda: reasons(farm, "job.unrecorded"))
    assert all(reason in text for reason in changes)
    assert len(entries(settings)) == 1 and not (settings.place.folder / "programs").exists()


def test_programs_above_quota_are_left_out(farm_db: str, tmp_path: Path, settings: HistorySettings) -> None:
    small = replace(settings, quota=1000)
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(farm_db, tmp_path, history=small))
        farm = stack.enter_context(gateway.client(token_of(farm_db, "anna")))
        board = BareBoard(farm, "rpi").online()
        stack.callback(board.leave)
        sources = [program_source(tmp_path / str(size), bytes(size)) for size in (600, 700)]
        files = [upload_program(farm, source, source.folder) for source in sources]
        finish(farm, board, run_result(files={**files[0], **files[1]}))
        [reason] = eventually(lambda: reasons(farm, "job.unrecorded"))
    assert f"program {sources[1].record.digest}: the programs of the job exceed the quota" in reason
    with HistoryStore.open(settings.place) as store:
        assert [store.program(one.record.digest) is not None for one in sources] == [True, False]


def test_jobs_are_added_once_after_restart_and_by_two_gateways(
    farm_db: str, tmp_path: Path, settings: HistorySettings
) -> None:
    with running_gateway(farm_db, tmp_path) as gateway, gateway.client(token_of(farm_db, "anna")) as farm:
        board = BareBoard(farm, "rpi").online()
        jobs = [finish(farm, board, run_result()) for _ in range(3)]
        board.leave()
    first = {"listen": (f"unix:{tmp_path}/1.sock",), "history": settings}
    second = {"listen": (f"unix:{tmp_path}/2.sock",), "history": settings}
    with running_gateway(farm_db, tmp_path, **first), running_gateway(farm_db, tmp_path, **second):
        eventually(lambda: len(entries(settings)) == 3)
        eventually(lambda: not list_pending(farm_db))
    with psycopg.connect(farm_db, autocommit=True) as connection:
        connection.execute("update hil.jobs set in_history = false")  # as if killed before this update
    with running_gateway(farm_db, tmp_path, **first):
        eventually(lambda: not list_pending(farm_db))
    assert [one.run for one in entries(settings)] == jobs


def test_killed_gateway_adds_job_after_restart(farm_db: str, tmp_path: Path, settings: HistorySettings) -> None:
    (tmp_path / "farm.toml").write_text("[history]\nauto = true\n")
    HistoryStore.open(settings.place, create=True).close()
    token = token_of(farm_db, "anna")
    with psycopg.connect(farm_db) as other, gateway_process(farm_db, tmp_path) as (process, said):
        farm = FarmClient(FarmAddress((said["addresses"][0],), token))
        board = BareBoard(farm, "rpi").online()
        other.execute("lock table hil_history.series in exclusive mode")
        job = finish(farm, board, run_result())
        waiting = "select 1 from pg_locks where not granted and relation = 'hil_history.series'::regclass"
        eventually(lambda: other.execute(waiting).fetchall())
        process.kill()
        board.cut()
        farm.close()
    with gateway_process(farm_db, tmp_path):
        eventually(lambda: not list_pending(farm_db))
    assert [one.run for one in entries(settings)] == [job]


def list_pending(db: str) -> list[Any]:
    with psycopg.connect(db) as connection:
        return connection.execute("select 1 from hil.jobs where not in_history and kind = 'run'").fetchall()


def test_jobs_wait_until_history_is_available(farm_db: str, database_server: Server, tmp_path: Path) -> None:
    url = database_server.url("later")
    settings = HistorySettings(HistoryPlace(tmp_path / "history", url), auto=True)
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(farm_db, tmp_path, history=settings))
        farm = stack.enter_context(gateway.client(token_of(farm_db, "anna")))
        board = BareBoard(farm, "rpi").online()
        stack.callback(board.leave)
        job = finish(farm, board, run_result())
        [reason] = eventually(lambda: reasons(farm, "gateway.history"))
        assert 'database "later" does not exist' in reason
        assert farm.ask("job", name=job).outcome == "PASS"
        database_server.make("later")
        stack.callback(database_server.drop, "later")
        [entry] = eventually(lambda: entries(settings))
        assert entry.run == job and len(reasons(farm, "gateway.history")) == 1


def test_invalid_settings_do_not_lose_jobs(farm_db: str, tmp_path: Path) -> None:
    settings = HistorySettings(HistoryPlace(tmp_path / "history", f"{farm_db}&nonesuch=1"), auto=True)
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(farm_db, tmp_path, history=settings))
        farm = stack.enter_context(gateway.client(token_of(farm_db, "anna")))
        board = BareBoard(farm, "rpi").online()
        stack.callback(board.leave)
        finish(farm, board, run_result())
        [reason] = eventually(lambda: reasons(farm, "gateway.history"))
        assert "invalid PostgreSQL URL of the history" in reason
        with psycopg.connect(farm_db) as connection:
            assert connection.execute("select 1 from hil.jobs where in_history").fetchall() == []
