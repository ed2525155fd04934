"""What a board stamps is found on the host's clock, however far its own is off, and the error that is told is true."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.agents import Program, compile_mlir, start_process, stop_process
from support.boards import MakeBoard

from hil.controller.devices.board import Board, LoadedProgram
from hil.controller.devices.board_client import Invocation, ProfilePass
from hil.controller.devices.board_factory import connect_board
from hil.controller.devices.board_resolver import choose
from hil.controller.devices.power import answering
from hil.core.results import Artifact
from tools.virtual_board import VirtualBoard

HOUR_NS = 3600 * 10**9
A = np.arange(4096, dtype=np.float32)
INPUTS = {"a": A, "b": A}
# Sets how fast the clock of the machine that runs it goes; prints what the kernel made of it.
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
    """A timed run and a profiling pass, with pings before, between and after."""
    board.ping(8)
    _, call = program.run(INPUTS, iterations=3)
    board.ping(8)
    taken = program.profile(INPUTS, iterations=3)
    for _ in range(looks):
        board.ping(8)
    return call, taken


def check_slices(board: Board, call: Invocation, taken: ProfilePass) -> None:
    """Of all that was stamped on the board: it lies inside the call that it belongs to."""
    fit = board.clock_fit()
    (_, first_board), (_, last_board) = taken.clock_pairs
    inside = [(call.host_ns, call.board_ns), ((taken.host.start_ns, taken.host.end_ns), (first_board, last_board))]
    inside += [(call.host_ns, stamps) for stamps in call.iterations_ns]
    for (sent, received), (start, end) in inside:
        assert sent < fit.to_host(start) <= fit.to_host(end) < received


@pytest.fixture
def late_simulator(tmp_path: Path) -> Iterator[Callable[[str], tuple[Board, Path]]]:
    """Connects to a simulator with a clock of that kind, at the end of a link with 20 ms delay each way."""
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


@pytest.mark.parametrize("runtime", ["iree", "onnxruntime"])
def test_an_hour_off_and_200_ppm_fast_over_a_slow_link(late_simulator, add_programs, runtime):
    board, store = late_simulator("clock:offset=3600,ppm=200")
    program = artifact(add_programs[runtime])
    board.push(program)
    with board.load(program) as loaded:
        call, taken = run_and_profile(board, loaded)
    fit = board.clock_fit()
    check_slices(board, call, taken)
    assert fit.jumped_ns == 0
    assert fit.error_ns < call.host_ns[1] - call.host_ns[0]
    # What its clock shows is known here, for it is made of ours.
    (started,) = struct.unpack("<q", (store / "clock").read_bytes()[:8])
    for host in (call.host_ns[0], call.host_ns[1], taken.host.end_ns):
        shown = host + HOUR_NS + round((host - started) * 200e-6)
        assert abs(fit.to_host(shown) - host) <= fit.error_ns + 1


def test_a_clock_that_jumps_in_a_run_is_found_out(late_simulator, add_programs):
    board, _ = late_simulator("clock:jump=-5")
    program = artifact(add_programs["iree"])
    board.push(program)
    board.ping(8)
    with board.load(program) as loaded:
        assert board.clock_fit().jumped_ns == 0
        _, call = loaded.run(INPUTS)
        assert call.board_ns[1] < call.board_ns[0], "it was put back in between"
        board.ping(8)
        # It is seen as late as the pings around it come.
        assert board.clock_fit().jumped_ns == pytest.approx(-5e9, abs=2e9)
        _, call = loaded.run(INPUTS)
    fit = board.clock_fit()
    assert call.host_ns[0] < fit.to_host(call.board_ns[0]) <= fit.to_host(call.board_ns[1]) < call.host_ns[1]


@pytest.mark.slow
@pytest.mark.board
def test_a_machine_of_its_own_whose_clock_is_an_hour_off_and_200_ppm_fast(make_board: MakeBoard, tmp_path: Path):
    machine = make_board(arch="aarch64", system=True, netem="delay 20ms")
    assert machine.run(["python3", "-c", SET_RATE, "200"], check=True, timeout=60).stdout.strip() == "200"
    machine.run(["date", "-s", "1 hour"], check=True, timeout=60)
    (tmp_path / "add.mlir").write_text(
        "func.func @main(%a: tensor<4096xf32>, %b: tensor<4096xf32>) -> tensor<4096xf32> {\n"
        "  %0 = arith.addf %a, %b : tensor<4096xf32>\n  return %0 : tensor<4096xf32>\n}\n"
    )
    program = artifact(compile_mlir(tmp_path / "add.mlir", "aarch64", tmp_path / "add.vmfb"))
    choice = choose(machine.address, identity=machine.identity, known_hosts=machine.known_hosts)
    # The first time its agent imports IREE, an emulated machine may take longer than an agent is waited for.
    with answering(lambda: connect_board(choice), 300) as board:
        board.push(program)
        with board.load(program) as loaded:
            seen = [look(machine)]
            call, taken = run_and_profile(board, loaded, looks=10)
            seen.append(look(machine))
        board.ping(8)
        check_slices(board, call, taken)
        fit = board.clock_fit()
    assert fit.jumped_ns == 0
    # The machine itself says, another way than by the agent, what its clock showed then.
    for before, clock_ns, after in seen:
        assert before - fit.error_ns <= fit.to_host(clock_ns) <= after + fit.error_ns


def look(machine: VirtualBoard) -> tuple[int, int, int]:
    """What the machine's clock shows, over its serial line, between two stamps of ours."""
    before = time.monotonic_ns()
    said = machine.run(["python3", "-c", "import time; print(time.monotonic_ns())"], check=True, timeout=60).stdout
    return before, int(said), time.monotonic_ns()
