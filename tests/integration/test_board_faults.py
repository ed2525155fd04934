"""What goes wrong with a real board on its cable, and how `hil run` ends then: in the right outcome, with nothing left
running on either side, and with a board on which the next run passes."""

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
# A run that goes on for so long, at some 0.3 ms an iteration, that whatever happens to it happens in its middle.
# Some seconds, also on a machine that is fast: it has to be seen at work.
LONG_ITERATIONS = 200_000
LONG = ("--iterations", str(LONG_ITERATIONS))
CUT_S = 5


@pytest.fixture(scope="module")
def board(start_board) -> VirtualBoard:
    """A board for this file's accidents; each test leaves it on and plugged in."""
    return start_board(name="unlucky")


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts `hil run MODEL` on a board."""
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
        with run.process:  # and its pipes
            run.process.kill()


@pytest.fixture
def passes(start) -> Callable[[VirtualBoard], dict[str, Any]]:
    """A run that must pass; its case."""

    def run(board: VirtualBoard) -> dict[str, Any]:
        going = start(board, DIGITS_CNN)
        case = going.end()
        assert case["outcome"] == "PASS", (case["reason"], case["error"], going.err)
        return case

    return run


@pytest.fixture
def ready(board: VirtualBoard, passes) -> VirtualBoard:
    """The board with its agent."""
    passes(board)
    return board


@pytest.fixture
def cut_when(board: VirtualBoard) -> Iterator[Callable[..., float]]:
    """Pulls the cable as soon as something holds; it is plugged in again at the test's end at the latest. Returns for
    how long it was out."""

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
    """A run in whose middle the cable was out, and its case.

    On a busy machine it may have been out for so much longer that the board was rightly lost: then once more.

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


# Each: what makes the traffic, which way, and the stage it is of.
MOVING = {"upload": (model_with_weights, "tx", "push"), "fetch": (model_with_output, "rx", "run")}


@pytest.mark.parametrize("moving", MOVING)
def test_a_cable_out_for_5_s_only_takes_longer(start, ready, cut_when, tmp_path, moving):
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


def test_a_cable_out_for_5_s_does_not_disturb_a_run(start, ready, cut_when):
    def begin() -> tuple[Run, float]:
        run = start(ready, DIGITS_CNN, *LONG)
        return run, cut_when(lambda: working(ready), CUT_S)

    run, case = cut_for_5_s(begin)
    assert case["outcome"] == "PASS", (case["reason"], case["error"], run.err)
    assert case["device"]["iterations"] == LONG_ITERATIONS
    assert not run.left_behind()


@pytest.mark.slow
@pytest.mark.parametrize("moving", MOVING)
def test_a_cable_out_for_good_is_a_lost_board(start, passes, ready, cut_when, tmp_path, moving):
    make, way, stage = MOVING[moving]
    quiet = agents_processes(ready)
    before = traffic(ready, way)
    run = start(ready, make(tmp_path, 64), "--timeout", "120")
    cut_when(lambda: traffic(ready, way) - before > 8 * MB)
    check_lost(run, run.end(), stage)
    ready.restore()
    eventually(lambda: is_quiet(ready, quiet))
    passes(ready)


def test_a_cable_out_for_good_in_a_run_is_a_lost_board_that_frees_itself(start, passes, ready, cut_when):
    quiet = agents_processes(ready)
    run = start(ready, DIGITS_CNN, "--iterations", "600000", "--timeout", "300")
    cut_when(lambda: working(ready))
    check_lost(run, run.end(), "run")
    eventually(lambda: is_quiet(ready, quiet))
    ready.restore()
    passes(ready)


def test_an_sshd_that_is_killed_is_a_lost_board(start, passes, ready):
    quiet = agents_processes(ready)
    run = start(ready, DIGITS_CNN, *LONG)
    eventually(lambda: working(ready))
    ready.run(["pkill", "-KILL", "sshd"])
    case = run.end()
    check_lost(run, case, "run")
    assert "stayed up" in case["error"]["hint"]
    eventually(lambda: is_quiet(ready, quiet))
    passes(ready)


def test_an_agent_that_is_killed_is_a_lost_board(start, passes, ready):
    quiet = agents_processes(ready)
    run = start(ready, DIGITS_CNN, *LONG)
    eventually(lambda: working(ready))
    ready.run(["pkill", "-KILL", "-f", "--", "-m hil.agent --"])
    case = run.end()
    check_lost(run, case, "run")
    assert "stayed up" in case["error"]["hint"]
    passes(ready)
    eventually(lambda: is_quiet(ready, quiet))


def test_a_board_that_reboots_in_a_run_is_told_of(start, passes, ready):
    run = start(ready, DIGITS_CNN, *LONG)
    eventually(lambda: working(ready))
    ready.reboot()
    case = run.end()
    check_lost(run, case, "run")
    assert "the board rebooted" in case["reason"]
    passes(ready)


def test_a_controller_that_is_killed_leaves_the_board_free(start, passes, ready):
    quiet = agents_processes(ready)
    run = start(ready, DIGITS_CNN, "--iterations", "600000", "--timeout", "300")
    eventually(lambda: working(ready))
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    eventually(lambda: not run.left_behind())
    eventually(lambda: is_quiet(ready, quiet))
    passes(ready)


def test_a_controller_that_is_interrupted_leaves_the_board_free(start, passes, ready):
    quiet = agents_processes(ready)
    run = start(ready, DIGITS_CNN, "--iterations", "600000", "--timeout", "300")
    eventually(lambda: working(ready))
    run.process.send_signal(signal.SIGINT)
    run.process.communicate(timeout=PATIENCE_S)
    assert run.process.returncode == 130
    eventually(lambda: not run.left_behind())
    eventually(lambda: is_quiet(ready, quiet))
    passes(ready)


def test_two_controllers_at_once_take_turns(start, ready):
    # Seconds of it: neither may have the board back before the other one asks for it.
    count = 50_000
    runs = [start(ready, DIGITS_CNN, "--iterations", str(count)) for _ in range(2)]
    for run in runs:
        case = run.end()
        assert case["outcome"] == "PASS", (case["reason"], case["error"], run.err)
        assert case["device"]["iterations"] == count
    assert any("has the board (hil run" in run.err for run in runs)


def test_two_controllers_at_once_put_one_agent_on_a_new_board(start, make_board):
    board = make_board(name="new")
    runs = [start(board, DIGITS_CNN), start(board, DIGITS_CNN)]
    for run in runs:
        case = run.end()
        assert case["outcome"] == "PASS", (case["reason"], case["error"], run.err)
    assert len(set(board.run(["ls", "/root/.hil/agents"]).stdout.split()) - {"current"}) == 1


def test_a_long_way_that_loses_packets_only_takes_longer(passes, make_board):
    board = make_board(name="far", netem="delay 20ms loss 1%")
    passes(board)
    assert passes(board)["pushed_bytes"] == 0


def test_a_full_disk_is_told_of_and_nothing_breaks(start, passes, make_board, tmp_path):
    board = make_board(name="full", disk_mb=160)
    passes(board)
    run = start(board, model_with_weights(tmp_path, 120))
    case = run.end()
    assert case["outcome"] == "LOAD_ERROR", (case["reason"], run.err)
    assert re.search(r"disk has \d+ bytes free and this blob needs \d+", case["reason"])
    assert run.process.returncode == 3
    passes(board)


def test_a_disk_too_small_for_the_agent_is_told_of_before_anything_is_sent(start, make_board):
    board = make_board(name="tiny", disk_mb=20)
    run = start(board, DIGITS_CNN)
    case = run.end()
    assert case["outcome"] == "BOARD_LOST"
    assert re.search(r"needs \d+ MB in /root/.hil on the board, which has \d+ MB left", case["reason"])
    assert board.run(["sh", "-c", "ls /root/.hil/packages 2>/dev/null"]).stdout == ""


@pytest.mark.slow
def test_a_clock_that_jumps_in_a_run_is_told_of_and_disturbs_nothing(start, passes, make_board):
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
