"""The contract of every board, over emulated microcontrollers: firmware runs one program with fixed shapes.

The contract of the agent runs over them too. These contracts of boards have no counterpart, because firmware has no
control flow and no allocator:

- An unknown function is a load error: firmware has one function, without a name.
- Generation of tokens: the program has no state and no cache. hil refuses to generate.
- Tensors whose size is known only at run time.
- Two loaded programs: firmware contains one program.

The clock of these boards counts instructions, so results contain no times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.agents import compile_for_chip
from support.microcontrollers import CHIPS, Microcontrollers
from support.models import save_model
from support.planted_firmware import build_firmware

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import open_board
from hil.controller.devices.choosing.board_resolver import choose, read_capabilities
from hil.controller.storage.cache import choose_default_root
from hil.core.board_config import BoardConfig
from hil.core.chips import Chip, parse_chip
from hil.core.files import digest_file
from hil.core.results import Artifact
from hil.core.steps import StepRule, StepsPlan
from hil.errors import BoardUnfit, HilError, LoadFailed, RunCrashed, RunFailed, StageTimeout, UsageError
from hil.formats.firmware import DESCRIPTION
from hil.formats.operations import OPERATIONS_FILE, read_operations

pytestmark = [pytest.mark.ci, pytest.mark.slow, pytest.mark.timeout(600)]
A = np.arange(64, dtype=np.float32)
B = np.full(64, 2.5, np.float32)
ARCHS = {"cortex-m55": "armv8.1-m", "cortex-m4": "armv7e-m", "riscv32": "riscv32"}
ONE = {"x": np.ones(1, np.float32)}
PLAN = StepsPlan(((0, StepRule.TOKENS), (1, StepRule.POSITIONS)), ((2, 1),), logits=0, steps=5, shapes=((1, 0, 4),))


@pytest.fixture(scope="module", params=CHIPS)
def chip(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def choice(chip: str, start_chip: Microcontrollers, tmp_path_factory: pytest.TempPathFactory) -> BoardChoice:
    config = tmp_path_factory.mktemp("board") / f"{chip}.toml"
    # An emulated minute takes seconds: without this limit, the firmware ends programs before hil does.
    config.write_text(f"{start_chip(chip).config.read_text()}watchdog_s = 86400\n")
    return choose(str(config))


@pytest.fixture(scope="module")
def board(choice: BoardChoice) -> Iterator[Board]:
    """Yield a board that this test holds."""
    with open_board(replace(choice, purpose="contract test")) as opened:
        opened.take()
        yield opened


@pytest.fixture(scope="module")
def programs(choice: BoardChoice, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """Return a program that adds two tensors of 64 float32, and one with two int32 outputs."""
    folder = tmp_path_factory.mktemp("programs")
    value, matrix = (TensorProto.FLOAT, [64]), (TensorProto.INT32, [2, 3])
    add = [helper.make_node("Add", ["a", "b"], ["y"], "add")]
    two = [helper.make_node("Add", ["a", "a"], ["s"], "sum"), helper.make_node("Mul", ["a", "a"], ["p"], "product")]
    models = {
        "add": save_model(folder / "add.onnx", add, [("a", *value), ("b", *value)], [("y", *value)]),
        "two": save_model(folder / "two.onnx", two, [("a", *matrix)], [("s", *matrix), ("p", *matrix)]),
    }
    return {name: compile_program(model, choice.config, folder / name) for name, model in models.items()}


def compile_program(model: Path, config: BoardConfig, folder: Path) -> Artifact:
    return read_program(compile_for_chip(model, config.path, folder).path)


def read_program(main: Path) -> Artifact:
    """Return the program in a directory of firmware."""
    files = {path.name: path for path in main.parent.iterdir() if path.is_file()}
    return Artifact("mcu", main.name, files, {name: digest_file(path) for name, path in files.items()}, "", "-")


@pytest.fixture
def load(board: Board, programs: dict[str, Artifact]) -> Callable[[str], object]:
    def make(name: str):
        board.push(programs[name])
        return board.load(programs[name])

    return make


@pytest.fixture
def plant(board: Board, choice: BoardChoice, tmp_path: Path) -> Callable[[str], object]:
    """Return a function that loads a program whose only dispatch has a given C body."""
    assert choice.config.mcu is not None
    chip: Chip = parse_chip(choice.config.mcu.values)

    def make(body: str):
        folder = tmp_path / "planted"
        folder.mkdir()
        build_firmware(chip, body, folder, choose_default_root() / "zig")
        program = read_program(folder / DESCRIPTION)
        board.push(program)
        return board.load(program)

    return make


@pytest.fixture
def check_board(load) -> Callable[[], None]:
    """Return a function that runs a correct program."""

    def check() -> None:
        with load("add") as loaded:
            result, _ = loaded.run({"a": A, "b": B})
        np.testing.assert_array_equal(next(iter(result.outputs.values())), A + B)

    return check


def test_client_has_capabilities_of_link_kind(board: Board, choice: BoardChoice, chip: str) -> None:
    capabilities = read_capabilities(choice)
    assert board.client.has_session == capabilities.sessions
    assert bool(board.client.pings(1)) == capabilities.clock
    assert board.info["machine"]["arch"] == ARCHS[chip]


def test_client_reports_missing_measurements(board: Board) -> None:
    missing = board.info.get("not_measured", ())
    assert all(what in board.client.notice() for what in missing)
    assert bool(board.client.notice()) == bool(missing)
    assert board.client.find_command() == ""


def test_program_reports_specs_and_runs_repeatedly(board: Board, programs: dict[str, Artifact]) -> None:
    program = programs["add"]
    board.push(program)
    assert board.push(program) == 0
    with board.load(program) as loaded:
        assert [(spec.dtype, spec.shape) for spec in loaded.loaded.inputs] == [("float32", (64,))] * 2
        result, call = loaded.run({"a": A, "b": B}, warmup=1, iterations=3)
        again, _ = loaded.run({"a": B, "b": B}, warmup=0, iterations=1)
    np.testing.assert_array_equal(next(iter(result.outputs.values())), A + B)
    np.testing.assert_array_equal(next(iter(again.outputs.values())), B + B)
    assert call.repetition is not None
    assert call.repetition.iterations == 4  # with the warm-up


def test_run_records_provenance_and_placement(board: Board, load) -> None:
    with load("add") as loaded:
        for _ in range(2):  # the board itself reports the placement only once
            result, _ = loaded.run({"a": A, "b": B})
            (part,) = result.provenance["placement"]
            assert part == {"device": "cpu", "nodes": 0, "names": [], "elsewhere": False, "reasons": []}
            assert result.provenance["elsewhere"] == ""
    assert result.provenance["board"] == board.name
    assert result.provenance["board_id"]
    assert result.provenance["runtime_version"]
    assert result.provenance["machine"]["arch"] == board.info["machine"]["arch"]
    assert board.name in result.source
    assert "host_key" not in result.provenance


def test_run_reports_instructions_and_no_times(load) -> None:
    with load("add") as loaded:
        result, call = loaded.run({"a": A, "b": B}, warmup=1, iterations=3)
    assert not result.device_ns
    assert not call.iterations_ns and call.board_ns is None and call.warmup_ns == 0
    assert result.instructions is not None
    assert (result.instructions.counter, len(result.instructions.counts)) == ("icount", 3)
    assert min(result.instructions.counts) > 64
    assert "clock" not in result.provenance


def test_run_uses_new_inputs_every_time(load) -> None:
    with load("two") as loaded:
        for seed in range(3):
            a = np.random.default_rng(seed).integers(-100, 100, (2, 3), dtype=np.int32)
            result, _ = loaded.run({"a": a}, names=("twice", "squared"))
            assert list(result.outputs) == ["twice", "squared"]
            np.testing.assert_array_equal(result.outputs["twice"], a + a)
            np.testing.assert_array_equal(result.outputs["squared"], a * a)


def test_generation_is_refused(load, check_board) -> None:
    tokens = {"prompt": [1, 4], "forced": [5], "other_prompt": [6]}
    with load("add") as loaded, pytest.raises(HilError) as caught:
        loaded.run({name: np.array(one, np.int64) for name, one in tokens.items()}, steps=PLAN)
    assert caught.value.message
    check_board()


@pytest.mark.parametrize("inputs", [{"a": A}, {"a": A.astype(np.float64), "b": B}, {"a": A[:5], "b": B}])
def test_wrong_inputs_are_rejected(load, inputs) -> None:
    with load("add") as loaded:
        with pytest.raises(UsageError):
            loaded.run(inputs)
        loaded.run({"a": A, "b": B})


def test_profile_counts_ticks_of_each_dispatch(load, tmp_path: Path) -> None:
    with load("add") as loaded:
        taken = loaded.profile({"a": A, "b": B}, warmup=1, iterations=2)
        result, _ = loaded.run({"a": A, "b": B})
    path = tmp_path / OPERATIONS_FILE
    path.write_bytes(taken.files[OPERATIONS_FILE])
    dispatches = [one for one in read_operations(path) if not one.is_overhead]
    assert {one.run for one in dispatches} == {0, 1, 2}
    assert dispatches and all(one.ticks for one in dispatches)
    assert (taken.warmup, taken.iterations) == (1, 2)
    np.testing.assert_array_equal(next(iter(result.outputs.values())), A + B)


def test_profile_of_failing_program_raises_run_error(plant, check_board) -> None:
    with plant("return 42;") as loaded, pytest.raises(RunFailed, match="the dispatch planted returned 42"):
        loaded.profile(ONE)
    check_board()


def test_counters_are_sampled_during_run(board: Board, load) -> None:
    with board.watch_counters(0.02) as watch, load("add") as loaded:
        loaded.run({"a": A, "b": B})
    stamps = [sample.at_ns for sample in watch.samples]
    assert stamps == sorted(stamps)
    assert bool(stamps) != bool(watch.problem)


def test_damaged_program_is_a_load_error_and_the_next_one_runs(board: Board, check_board, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{}")
    broken = Artifact("mcu", path.name, {path.name: path}, {path.name: digest_file(path)}, "", "-")
    board.push(broken)
    with pytest.raises(LoadFailed, match="is not a description of firmware"):
        board.load(broken)
    check_board()


def test_unknown_device_is_reported(choice: BoardChoice, programs: dict[str, Artifact], board: Board) -> None:
    board.push(programs["add"])
    with pytest.raises(BoardUnfit, match="cannot find device 'npu'"):
        board.client.load_program(programs["add"], device="npu", timeout=60)


def test_failing_program_is_a_run_error_and_the_next_one_runs(plant, check_board) -> None:
    with plant("return 42;") as loaded, pytest.raises(RunFailed, match="the dispatch planted returned 42"):
        loaded.run(ONE)
    check_board()


def test_fault_of_a_program_is_a_crash_and_the_next_one_runs(plant, check_board) -> None:
    body = "((void (*)(void))0xe0000001u)(); return 0;"
    with plant(body) as loaded, pytest.raises(RunCrashed, match="called by planted"):
        loaded.run(ONE)
    check_board()


@pytest.mark.parametrize("call", ["run", "profile"])
def test_endless_program_times_out_and_the_next_one_runs(plant, check_board, call: str) -> None:
    with plant("for (volatile int i = 0;; i++) {}") as loaded, pytest.raises(StageTimeout):
        getattr(loaded, call)(ONE, timeout=2)
    check_board()
