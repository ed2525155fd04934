"""Board timestamps convert to host time within the reported error."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.agents import Program, compile_mlir, start_process, stop_process
from support.boards import MakeBoard

from hil.controller.devices.board import Board
from hil.controller.devices.board_client import Invocation, ProfilePass
from hil.controller.devices.choosing.board_factory import connect_board
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.devices.loaded_program import LoadedProgram
from hil.controller.devices.power_control.power import connect_with_retry
from hil.core.results import Artifact
from hil.errors import BoardUnfit
from tools.virtual_board import VirtualBoard

HOUR_NS = 3600 * 10**9
A = np.arange(4096, dtype=np.float32)
INPUTS = {"a": A, "b": A}
# Sets the rate of the machine's clock and prints the rate that the kernel applied.
SET_RATE = """
import ctypes, sys
class Timex(ctypes.Structure):
    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("rest", ctypes.c_byte * 999),
    ]
wanted = Timex(modes=2, freq=int(sys.argv[1]) << 16)
assert ctypes.CDLL(None, use_errno=True).clock_adjtime(0, ctypes.byref(wanted)) >= 0, ctypes.get_errno()
print(wanted.freq >> 16)
"""


def artifact(program: Program) -> Artifact:
    return Artifact(program.runtime, program.path.name, {program.path.name: program.path}, program.digests, "", "none")


def run_and_profile(board: Board, program: LoadedProgram, looks: int = 3) -> tuple[Invocation, ProfilePass]:
    """Run a timed call and a profiling pass, with pings before, between and after."""
    board.ping(8)
    _, call = program.run(INPUTS, iterations=3)
    board.ping(8)
    taken = program.profile(INPUTS, iterations=3)
    for _ in range(looks):
        board.ping(8)
    return call, taken


def check_slices(board: Board, call: Invocation, taken: ProfilePass) -> None:
    """Check that all board timestamps lie inside their call."""
    fit = board.clock_fit()
    (_, first_board), (_, last_board) = taken.clock_pairs
    inside = [(call.host_ns, call.board_ns), ((taken.host.start_ns, taken.host.end_ns), (first_board, last_board))]
    inside += [(call.host_ns, stamps) for stamps in call.iterations_ns]
    for (sent, received), (start, end) in inside:
        assert sent < fit.to_host(start) <= fit.to_host(end) < received


@pytest.fixture
def late_simulator(tmp_path: Path) -> Iterator[Callable[[str], tuple[Board, Path]]]:
    """Return a function that connects to a simulator with a clock fault over a link with 20 ms delay each way."""
    started = []

    def start(clock: str) -> tuple[Board, Path]:
        store = tmp_path / "store"
        faults = ("--fault", clock, "--fault", "slow:rate=1e9,delay=0.02")
        process, address = start_process("hil.sim", f"unix:{tmp_path}/s.sock", store, *faults)
        started.append((process, connect_board(choose(address))))
        return started[-1][1], store

    yield start
    for process, board in started:
        board.close()
        stop_process(process)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["iree", "onnxruntime"])
def test_clock_fit_handles_offset_and_drift_over_slow_link(late_simulator, add_programs, runtime):
    board, store = late_simulator("clock:offset=3600,ppm=200")
    program = artifact(add_programs[runtime])
    board.push(program)
    with board.load(program) as loaded:
        call, taken = run_and_profile(board, loaded)
    fit = board.clock_fit()
    check_slices(board, call, taken)
    assert fit.jumped_ns == 0
    assert fit.error_ns < call.host_ns[1] - call.host_ns[0]
    # The simulated clock derives from the host clock, so that its reading is known.
    (started,) = struct.unpack("<q", (store / "clock").read_bytes()[:8])
    for host in (call.host_ns[0], call.host_ns[1], taken.host.end_ns):
        shown = host + HOUR_NS + round((host - started) * 200e-6)
        assert abs(fit.to_host(shown) - host) <= fit.error_ns + 1


def test_clock_fit_detects_clock_jump_during_run(late_simulator, add_programs):
    board, _ = late_simulator("clock:jump=-5")
    program = artifact(add_programs["iree"])
    board.push(program)
    board.ping(8)
    with board.load(program) as loaded:
        assert board.clock_fit().jumped_ns == 0
        # The time between the two readings makes the step look smaller.
        with pytest.raises(BoardUnfit, match=r"monotonic clock stepped back by at least ([34]\.\d+|5) s"):
            loaded.run(INPUTS)
    board.ping(8)
    # The precision is the interval of the pings around the step.
    assert board.clock_fit().jumped_ns == pytest.approx(-5e9, abs=2e9)
    with board.load(program) as loaded:
        _, call = loaded.run(INPUTS)
    fit = board.clock_fit()
    assert call.host_ns[0] < fit.to_host(call.board_ns[0]) <= fit.to_host(call.board_ns[1]) < call.host_ns[1]


@pytest.mark.slow
@pytest.mark.board
def test_clock_fit_handles_offset_and_drift_of_virtual_machine(make_board: MakeBoard, tmp_path: Path):
    machine = make_board(arch="aarch64", system=True, netem="delay 20ms")
    assert machine.run(["python3", "-c", SET_RATE, "200"], check=True, timeout=60).stdout.strip() == "200"
    machine.run(["date", "-s", "1 hour"], check=True, timeout=60)
    (tmp_path / "add.mlir").write_text(
        "func.func @main(%a: tensor<4096xf32>, %b: tensor<4096xf32>) -> tensor<4096xf32> {\n"
        "  %0 = arith.addf %a, %b : tensor<4096xf32>\n  return %0 : tensor<4096xf32>\n}\n"
    )
    program = artifact(compile_mlir(tmp_path / "add.mlir", "aarch64", tmp_path / "add.vmfb"))
    choice = choose(machine.address, identity=machine.identity, known_hosts=machine.known_hosts)
    # On an emulated machine the first import of IREE may take longer than the agent timeout.
    with connect_with_retry(lambda: connect_board(choice), 300) as board:
        board.push(program)
        with board.load(program) as loaded:
            seen = [look(machine)]
            call, taken = run_and_profile(board, loaded, looks=10)
            seen.append(look(machine))
        board.ping(8)
        check_slices(board, call, taken)
        fit = board.clock_fit()
    assert fit.jumped_ns == 0
    # Compare with readings of the clock over the serial line.
    for before, clock_ns, after in seen:
        assert before - fit.error_ns <= fit.to_host(clock_ns) <= after + fit.error_ns


def look(machine: VirtualBoard) -> tuple[int, int, int]:
    """Read the machine's clock over its serial line, between two host timestamps."""
    before = time.monotonic_ns()
    said = machine.run(["python3", "-c", "import time; print(time.monotonic_ns())"], check=True, timeout=60).stdout
    return before, int(said), time.monotonic_ns()
