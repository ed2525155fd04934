"""Faults of a real board and its cable.

`hil run` reports the right outcome and leaves no process on either side, and the next run passes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.accidents import (
    MB,
    PATIENCE_S,
    Run,
    agents_processes,
    is_quiet,
    model_with_output,
    model_with_weights,
    traffic,
    working,
)
from support.models import DIGITS
from support.waiting import eventually

from tools.virtual_board import VirtualBoard

pytestmark = pytest.mark.board

DIGITS_CNN = DIGITS / "digits_cnn.onnx"
# Iterations take about 0.3 ms, so that the run lasts some seconds and faults occur during the run.
LONG_ITERATIONS = 200_000
LONG = ("--iterations", str(LONG_ITERATIONS), "--timeout", "300")
CUT_S = 5


@pytest.fixture(scope="module")
def board(start_board) -> VirtualBoard:
    """Provide a board for faults; each test leaves it on and connected."""
    return start_board(name="unlucky")


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Return a function that starts `hil run MODEL` on a board."""
    runs: list[Run] = []

    def make(board: VirtualBoard, model: Path, *options: str) -> Run:
        mark = uuid.uuid4().hex
        command = [sys.executable, "-m", "hil.controller.cli.main", "run", str(model), "--json", *options]
        command += ["--board", board.address, "--identity", str(board.identity)]
        command += ["--known-hosts", str(board.known_hosts)]
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        env = {**environment, "HIL_TEST_MARK": mark}
        runs.append(Run(subprocess.Popen(command, cwd=tmp_path, env=env, **settings), mark))
        return runs[-1]

    yield make
    for run in runs:
        with run.process:  # closes its pipes
            run.process.kill()


@pytest.fixture
def passes(start) -> Callable[[VirtualBoard], dict[str, Any]]:
    """Return a function that runs a model, requires PASS and returns the case."""

    def run(board: VirtualBoard) -> dict[str, Any]:
        going = start(board, DIGITS_CNN)
        case = going.end()
        assert case["outcome"] == "PASS", (case["reason"], case["error"], going.err)
        return case

    return run


@pytest.fixture
def ready(board: VirtualBoard, passes) -> VirtualBoard:
    """Provide the board with a deployed agent."""
    passes(board)
    return board


@pytest.fixture
def cut_when(board: VirtualBoard) -> Iterator[Callable[..., float]]:
    """Return a function that cuts the cable when a condition is true and returns the duration of the cut.
    The cable is restored at the end of the test.
    """

    def cut(condition: Callable[[], bool], seconds: float | None = None) -> float:
        eventually(condition, every_s=0.002)
        start = time.monotonic()
        board.cut()
        if seconds is not None:
            time.sleep(seconds)
            board.restore()
        return time.monotonic() - start

    yield cut
    board.restore()


def cut_for_5_s(begin: Callable[[], tuple[Run, float]]) -> tuple[Run, dict[str, Any]]:
    """Cut the cable for 5 s during a run; return the run and its case.

    On a busy machine the cut may last longer, so that the board is lost; retry up to five times.

    Args:
        begin: starts a run and cuts it; returns for how long, too.
    """
    for _ in range(5):
        run, out_s = begin()
        case = run.end()
        if out_s <= CUT_S + 1.5:
            return run, case
    raise AssertionError(f"the cable was never out for just {CUT_S} s")


def check_lost(run: Run, case: dict[str, Any], stage: str) -> None:
    assert case["outcome"] == "BOARD_LOST", (case["reason"], run.err)
    assert run.process.returncode == 4
    assert case["stage"] == stage, case["reason"]
    assert case["verdicts"] == []
    eventually(lambda: not run.left_behind())


# Model factory, direction and stage of each transfer.
MOVING = {"upload": (model_with_weights, "tx", "push"), "fetch": (model_with_output, "rx", "run")}


@pytest.mark.slow
@pytest.mark.parametrize("moving", MOVING)
def test_transfer_survives_5_s_cable_cut(start, ready, cut_when, tmp_path, moving):
    make, way, _ = MOVING[moving]

    def begin() -> tuple[Run, float]:
        before = traffic(ready, way)
        run = start(ready, make(tmp_path, 64), "--timeout", "120")
        return run, cut_when(lambda: traffic(ready, way) - before > 8 * MB, CUT_S)

    run, case = cut_for_5_s(begin)
    assert case["outcome"] == "PASS", (case["reason"], case["error"], run.err)
    if moving == "upload":
        assert case["timings"]["push_s"] > CUT_S
    assert not run.left_behind()


def test_run_survives_5_s_cable_cut(start, ready, cut_when):
    def begin() -> tuple[Run, float]:
        run = start(ready, DIGITS_CNN, *LONG)
        return run, cut_when(lambda: working(ready), CUT_S)

    run, case = cut_for_5_s(begin)
    assert case["outcome"] == "PASS", (case["reason"], case["error"], run.err)
    assert case["device"]["iterations"] == LONG_ITERATIONS
    assert not run.left_behind()


@pytest.mark.slow
@pytest.mark.parametrize("moving", MOVING)
def test_run_reports_board_lost_after_cut_during_transfer(start, passes, ready, cut_when, tmp_path, moving):
    make, way, stage = MOVING[moving]
    quiet = agents_processes(ready)
    before = traffic(ready, way)
    run = start(ready, make(tmp_path, 64), "--timeout", "120")
    cut_when(lambda: traffic(ready, way) - before > 8 * MB)
    check_lost(run, run.end(), stage)
    ready.restore()
    eventually(lambda: is_quiet(ready, quiet))
    passes(ready)


@pytest.mark.slow
def test_run_reports_board_lost_after_cut_and_board_recovers(start, passes, ready, cut_when):
    quiet = agents_processes(ready)
    run = start(ready, DIGITS_CNN, "--iterations", "600000", "--timeout", "300")
    cut_when(lambda: working(ready))
    check_lost(run, run.end(), "run")
    eventually(lambda: is_quiet(ready, quiet))
    ready.restore()
    passes(ready)


@pytest.mark.slow
def test_run_reports_board_lost_after_sshd_kill(start, passes, ready):
    quiet = agents_processes(ready)
    run = start(ready, DIGITS_CNN, *LONG)
    eventually(lambda: working(ready))
    ready.run(["pkill", "-KILL", "sshd"])
    case = run.end()
    check_lost(run, case, "run")
    assert "stayed up" in case["error"]["hint"]
    eventually(lambda: is_quiet(ready, quiet))
    passes(ready)


def test_run_reports_board_lost_after_agent_kill(start, passes, ready):
    quiet = agents_processes(ready)
    run = start(ready, DIGITS_CNN, *LONG)
    eventually(lambda: working(ready))
    ready.run(["pkill", "-KILL", "-f", "--", "-m hil.agent --"])
    case = run.end()
    check_lost(run, case, "run")
    assert "stayed up" in case["error"]["hint"]
    passes(ready)
    eventually(lambda: is_quiet(ready, quiet))


def test_run_reports_reboot_of_board(start, passes, ready):
    run = start(ready, DIGITS_CNN, *LONG)
    eventually(lambda: working(ready))
    ready.reboot()
    case = run.end()
    check_lost(run, case, "run")
    assert "the board rebooted" in case["reason"]
    passes(ready)


@pytest.mark.slow
def test_killed_controller_frees_board(start, passes, ready):
    quiet = agents_processes(ready)
    run = start(ready, DIGITS_CNN, "--iterations", "600000", "--timeout", "300")
    eventually(lambda: working(ready))
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    eventually(lambda: not run.left_behind())
    eventually(lambda: is_quiet(ready, quiet))
    passes(ready)


@pytest.mark.slow
def test_interrupted_controller_frees_board(start, passes, ready):
    quiet = agents_processes(ready)
    run = start(ready, DIGITS_CNN, "--iterations", "600000", "--timeout", "300")
    eventually(lambda: working(ready))
    run.process.send_signal(signal.SIGINT)
    run.process.communicate(timeout=PATIENCE_S)
    assert run.process.returncode == 130
    eventually(lambda: not run.left_behind())
    eventually(lambda: is_quiet(ready, quiet))
    passes(ready)


@pytest.mark.slow
def test_concurrent_runs_take_turns(start, ready):
    # Long enough that the other run asks for the board meanwhile.
    count = 50_000
    runs = [start(ready, DIGITS_CNN, "--iterations", str(count)) for _ in range(2)]
    for run in runs:
        case = run.end()
        assert case["outcome"] == "PASS", (case["reason"], case["error"], run.err)
        assert case["device"]["iterations"] == count
    assert any("has used the board for" in run.err for run in runs)


@pytest.mark.slow
def test_concurrent_runs_deploy_single_agent(start, make_board):
    board = make_board(name="new")
    runs = [start(board, DIGITS_CNN), start(board, DIGITS_CNN)]
    for run in runs:
        case = run.end()
        assert case["outcome"] == "PASS", (case["reason"], case["error"], run.err)
    assert len(set(board.run(["ls", "/root/.hil/agents"]).stdout.split()) - {"current"}) == 1


@pytest.mark.slow
def test_run_passes_over_lossy_link(passes, make_board):
    board = make_board(name="far", netem="delay 20ms loss 1%")
    passes(board)
    assert passes(board)["pushed_bytes"] == 0


@pytest.mark.slow
def test_run_reports_full_board_disk_as_board_unfit(start, passes, make_board, tmp_path):
    board = make_board(name="full", disk_mb=160)
    passes(board)
    run = start(board, model_with_weights(tmp_path, 120))
    case = run.end()
    assert case["outcome"] == "BOARD_UNFIT", (case["reason"], run.err)
    assert re.search(
        r"this blob needs \d+ bytes, but the board's disk has \d+ bytes free in /root/.hil/store", case["reason"]
    )
    assert run.process.returncode == 4 and "remove files on the board" in case["error"]["hint"]
    passes(board)


def test_deploy_checks_disk_space_before_upload(start, make_board):
    board = make_board(name="tiny", disk_mb=20)
    run = start(board, DIGITS_CNN)
    case = run.end()
    assert case["outcome"] == "BOARD_UNFIT"
    assert re.search(r"needs \d+ MB in /root/.hil on the board, but only \d+ MB are free", case["reason"])
    assert board.run(["sh", "-c", "ls /root/.hil/packages 2>/dev/null"]).stdout == ""


@pytest.mark.slow
def test_run_notes_wall_clock_jump_and_passes(start, passes, make_board):
    board = make_board(name="jumpy", arch="aarch64", system=True)
    passes(board)
    run = start(board, DIGITS_CNN, "--iterations", "1000")
    eventually(lambda: working(board))
    board.run(["date", "-s", "+1 hour"], check=True)
    case = run.end()
    assert case["outcome"] == "PASS", (case["reason"], case["error"], run.err)
    notes = case["provenance"]["notes"]
    assert any(re.match(r"the board's wall clock was set 3\d{3} s forward", note) for note in notes), notes
    assert max(case["device"]["samples_ns"]) < 60e9
    passes(board)
