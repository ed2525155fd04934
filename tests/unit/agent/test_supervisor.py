from __future__ import annotations

import signal
import subprocess
import time
from unittest.mock import Mock

import pytest

from hil.agent import answers
from hil.agent.supervisor import LogBook, Supervisor, WorkerProcess, explain_step
from hil.core import clock
from hil.errors import BoardUnfit, RunCrashed, SessionEnded


@pytest.mark.parametrize(("seen_s", "kind"), [(7, BoardUnfit), (0, RunCrashed)])
def test_explain_step_blames_board_only_if_agent_saw_step(monkeypatch, seen_s, kind):
    since = time.monotonic_ns(), time.time_ns()
    monkeypatch.setattr(clock, "get_time_ns", lambda: time.monotonic_ns() - seen_s * 10**9)
    error = explain_step(answers.ClockStepped(7 * 10**9), since)
    assert type(error) is kind
    assert ("clock stepped back by at least 7 s" if kind is BoardUnfit else "timestamps decrease") in error.message


@pytest.mark.parametrize(
    ("numbers", "step_ns"),
    [((0, 0, 0, 5, 3, 7, 8), 4), ((0, 0, 0, 5, 6, 7, 4), 2), ((-9, 0, 0, 1, 2, 3, 4), 9), ((0, 0, 0, 1, 4, 2, 6), 0)],
)
def test_read_reply_reports_size_of_clock_step(numbers, step_ns):
    body = answers.ipc.join_message(numbers, answers.ipc.encode({"ok": {"outputs": []}}))
    if step_ns:
        with pytest.raises(answers.ClockStepped) as caught:
            answers.read(body, "invoke", 2)
        assert caught.value.ns == step_ns
    else:
        assert answers.read(body, "invoke", 2)


@pytest.mark.parametrize(
    ("device", "is_missing"),
    [("", False), ("cuda", True), ("cuda://0", True), ("vulkan", False), ("vulkan://GPU-1", False)],
)
def test_supervisor_missing_device_detects_unlisted_device(device, is_missing):
    supervisor = Supervisor({"iree": "hil.agent.runtimes.iree:IreeRuntime"}, {})
    supervisor._servers["iree"].described = {"version": "1", "devices": ["local-task", "vulkan"]}
    found = supervisor.check_device("iree", device)
    assert (found is not None) == is_missing
    assert found is None or (device in found.message and "local-task, vulkan" in found.hint)


def test_supervisor_missing_device_accepts_short_names_of_providers():
    supervisor = Supervisor({"onnxruntime": "hil.agent.runtimes.onnxruntime:OnnxRuntime"}, {})
    supervisor._servers["onnxruntime"].described = {"version": "1", "devices": ["CPUExecutionProvider"]}
    found = {device: supervisor.check_device("onnxruntime", device) is None for device in ("cpu", "CPU", "cuda")}
    assert found == {"cpu": True, "CPU": True, "cuda": False}


def test_worker_answer_of_ended_session_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: on a busy machine, the exit message took longer than the next session waits."""
    over = SessionEnded("the session is over")
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        # The server never reports that the process ended.
        server = Mock(fork=lambda files, on_exit: process.pid)
        worker = WorkerProcess(server, LogBook())
        worker.kill(over)
        monkeypatch.setattr(worker._exited, "wait", Mock(side_effect=AssertionError("it waits")))
        with pytest.raises(SessionEnded) as caught:
            worker.receive_answer("invoke", 60.0, time.monotonic())
        assert caught.value is over and process.wait() == -signal.SIGKILL
    worker._give_back()
