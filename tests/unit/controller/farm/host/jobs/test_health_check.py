from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from support.run_records import run_case, run_record

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.farm.host.jobs.job_attempt import check_health
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.workloads import board_needs, run_job
from hil.controller.workloads.board_needs import find_lack_of_disk, find_lack_of_memory, write_model
from hil.core.board_config import BoardConfig


def attempt(runtime: str, host: Path, folder: Path, isolated: Isolated) -> Any:
    """Return the parts of a job attempt that a health check uses."""
    board = BoardChoice(BoardConfig("rack3", "rpi5"))
    site: Any = SimpleNamespace(folder=host)
    return SimpleNamespace(runtime=runtime, board=board, site=site, folder=folder, print=print, isolated=isolated)


FAILED = run_case(outcome="FAIL", reason="3 differ")


@pytest.mark.parametrize("runtime", ["tflite", "vendor"])
def test_health_check_passes_without_test_program(runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(board_needs, "check_needs", lambda *args: True)
    monkeypatch.setattr(
        "hil.controller.workloads.run_job.run_job", lambda *args, **more: pytest.fail("nothing is to be run")
    )
    with Isolated(1) as isolated:
        result = check_health(attempt(runtime, tmp_path, tmp_path, isolated))
    assert result.exit_code == 0 and "no test program" in result.reason


@pytest.mark.parametrize(
    ("record", "code", "reason"),
    [
        (run_record(run_case(), exit_code=0), 0, ""),
        (run_record(FAILED, exit_code=1), 1, "small test model: FAIL: 3 differ"),
    ],
)
def test_health_check_reports_result_of_small_model(record, code, reason, tmp_path, monkeypatch):
    asked: list[Any] = []

    def ran(job: Any, **more: Any) -> Any:
        asked.append(job)
        return record

    monkeypatch.setattr(board_needs, "check_needs", lambda *args: True)
    monkeypatch.setattr(run_job, "run_job", ran)
    (tmp_path / "job").mkdir()
    with Isolated(1) as isolated:
        for _ in range(2):
            result = check_health(attempt("onnxruntime", tmp_path, tmp_path / "job", isolated))
            assert (result.exit_code, result.reason) == (code, reason)
    (tmp_path / "again").mkdir()
    assert {job.models for job in asked} == {(tmp_path / "small.onnx",)} and asked[0].board == "rack3"
    write_model(tmp_path / "again/small.onnx", weights=True)
    assert (tmp_path / "small.onnx").read_bytes() == (tmp_path / "again/small.onnx").read_bytes()
    assert (tmp_path / "small.onnx").stat().st_size > board_needs.MODEL_MIB << 20


@pytest.mark.parametrize(("runtime", "code"), [("vendor", 0), ("onnxruntime", 3)])
def test_health_check_accepts_package_compiler_that_refuses_model(runtime, code, tmp_path, monkeypatch):
    record = run_record(run_case(outcome="COMPILE_ERROR", reason="no Add"), exit_code=3)
    monkeypatch.setattr("hil.controller.farm.host.jobs.job_attempt.can_load_onnx", lambda runtime: True)
    monkeypatch.setattr(board_needs, "check_needs", lambda *args: True)
    monkeypatch.setattr(run_job, "run_job", lambda job, **more: record)
    (tmp_path / "job").mkdir()
    with Isolated(1) as isolated:
        result = check_health(attempt(runtime, tmp_path, tmp_path / "job", isolated))
    assert result.exit_code == code and ("refuses hil's test program" in result.reason) is (code == 0)


@pytest.mark.parametrize(
    ("readings", "lack"),
    [
        ([], ""),
        ([{"name": "free memory", "value": 900.0, "unit": "MiB"}], ""),
        ([{"name": "free memory", "value": 7.0, "unit": "MiB"}], "7 MiB of memory free, jobs require 32 MiB"),
        ([{"name": "free memory", "unit": "MiB"}], "0 MiB of memory free, jobs require 32 MiB"),
    ],
)
def test_health_check_reports_low_memory(readings: list[dict[str, Any]], lack: str):
    assert find_lack_of_memory({"readings": readings}) == lack


@pytest.mark.parametrize(
    ("info", "lack"),
    [
        ({}, ""),
        ({"store_room_bytes": str(16 << 20)}, ""),
        ({"store_room_bytes": str(9 << 20)}, "store has 9 MiB free, jobs require 16 MiB"),
        ({"store_room_bytes": "0"}, "store has 0 MiB free, jobs require 16 MiB"),
    ],
)
def test_health_check_reports_low_store_space(info: dict[str, Any], lack: str):
    assert find_lack_of_disk(info) == lack


def test_check_needs_writes_new_file_each_time(tmp_path, monkeypatch):
    written: list[bytes] = []

    class Session:
        info: ClassVar = {"machine": {"memory_bytes": str(1 << 30)}, "memory_limit_bytes": str(64 << 20)}

        def __init__(self) -> None:
            self.board = self.client = self

        def put(self, blobs: Any) -> None:
            written.extend(path.read_bytes() for path, _ in blobs.values())

    class Pool:
        def __init__(self, *args: Any, **more: Any) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def session(self, *args: Any, **more: Any) -> Session:
            return Session()

    monkeypatch.setattr("hil.controller.pipeline.boards.board_pool.BoardPool", Pool)
    choice = BoardChoice(BoardConfig("rack3", "rpi5"))
    for _ in range(2):
        assert board_needs.check_needs(choice, "iree", tmp_path, print) is False
    assert len(set(written)) == 2 and len(written[0]) == 64 << 10
