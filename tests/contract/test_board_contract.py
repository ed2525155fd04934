"""The contract of every board: with an agent over every connection, and without one, by command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.agents import compile_mlir
from support.links import AGENTS, COMMANDS, ENDS, Reached, reach
from support.step_programs import logits_of, prompt_function, step_function

from hil import errors
from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import open_board
from hil.controller.devices.choosing.board_resolver import choose, read_capabilities
from hil.controller.devices.links.link import Capabilities
from hil.core.board_config import RuntimeCommand
from hil.core.files import digest_file
from hil.core.results import Artifact
from hil.core.steps import PromptFunction, StepRule, StepsPlan

MLIR = (
    ENDS
    + """
func.func @add(%a: tensor<64xf32>, %b: tensor<64xf32>) -> tensor<64xf32> {
  %0 = arith.addf %a, %b : tensor<64xf32>
  return %0 : tensor<64xf32>
}
func.func @two(%a: tensor<2x3xi32>) -> (tensor<2x3xi32>, tensor<2x3xi32>) {
  %0 = arith.addi %a, %a : tensor<2x3xi32>
  %1 = arith.muli %a, %a : tensor<2x3xi32>
  return %0, %1 : tensor<2x3xi32>, tensor<2x3xi32>
}
"""
    + step_function()
    + prompt_function()
)
A = np.arange(64, dtype=np.float32)
B = np.full(64, 2.5, np.float32)
PLAN = StepsPlan(
    ((0, StepRule.TOKENS), (1, StepRule.POSITIONS)), ((2, 1),), logits=0, steps=9, bound=8, shapes=((1, 8, 4),)
)


@pytest.fixture(scope="module", params=[*AGENTS, *COMMANDS])
def reached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reached]:
    """Yield the agents of the agent contract, and boards without an agent."""
    with reach(request.param, tmp_path_factory.mktemp("agent"), request) as found:
        yield found


@pytest.fixture(scope="module")
def choice(reached: Reached) -> BoardChoice:
    choice = choose(reached.board or reached.address, identity=reached.identity, known_hosts=reached.known_hosts)
    if reached.by_command:
        choice = replace(choice, config=replace(choice.config, command=RuntimeCommand(kind="command")))
    return choice


@pytest.fixture(scope="module")
def capabilities(choice: BoardChoice) -> Capabilities:
    return read_capabilities(choice)


@pytest.fixture(scope="module")
def board(choice: BoardChoice) -> Iterator[Board]:
    """Yield a board that this test holds."""
    with open_board(replace(choice, purpose="contract test")) as opened:
        opened.take()
        yield opened


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, reached) -> Callable[[str], Artifact]:
    """Return a function that maps a function name to the program for the board's architecture."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "all.mlir").write_text(MLIR)
    made = compile_mlir(folder / "all.mlir", reached.arch, folder / "all of it.vmfb")
    return lambda function: Artifact("iree", made.path.name, {made.path.name: made.path}, made.digests, function, "-")


@pytest.fixture
def load(board, programs):
    def make(function: str):
        board.push(programs(function))
        return board.load(programs(function))

    return make


def broken(folder: Path) -> Artifact:
    path = folder / "broken.vmfb"
    path.write_bytes(b"this is no program")
    return Artifact("iree", path.name, {path.name: path}, {path.name: digest_file(path)}, "", "-")


@pytest.mark.ci
def test_board_client_has_capabilities_of_link_kind(board, capabilities):
    assert board.client.has_session == capabilities.sessions
    assert bool(board.client.pings(1)) == capabilities.clock
    assert (board.clock_fit() is not None) == capabilities.clock
    assert ("python" in board.info["machine"]) == capabilities.python


def test_board_client_reports_missing_measurements(board):
    missing = board.info.get("not_measured", ())
    assert all(what in board.client.notice() for what in missing)
    assert bool(board.client.notice()) == bool(missing)
    assert board.client.find_command() == "", "hil provides the program"


def test_board_push_skips_known_program(board, programs):
    board.push(programs("add"))
    assert board.push(programs("add")) == 0


def test_board_program_reports_input_specs(load):
    with load("add") as program:
        assert [(spec.dtype, spec.shape) for spec in program.loaded.inputs] == [("float32", (64,))] * 2


def test_board_run_records_provenance(board, load):
    with load("add") as program:
        result, call = program.run({"a": A, "b": B}, warmup=1, iterations=2)
    np.testing.assert_array_equal(next(iter(result.outputs.values())), A + B)
    assert call.warmup_ns > 0
    assert result.provenance["board"] == board.name
    assert result.provenance["board_id"]
    assert result.provenance["runtime_version"]
    assert result.provenance["machine"]["arch"] == board.info["machine"]["arch"]
    assert result.provenance["machine"]["boot_id"]
    is_checked = result.repetition is not None and result.repetition.is_stable
    assert ("were not compared" in "".join(result.provenance["notes"])) is not is_checked
    assert len(result.provenance["notes"]) == (not is_checked)
    assert is_checked is ("command" not in result.provenance)
    assert board.name in result.source
    assert ("host_key" in result.provenance) == (board.shell is not None)


def test_board_run_records_placement_every_time(load):
    with load("add") as program:
        for _ in range(2):  # the board itself reports the placement only once
            result, _ = program.run({"a": A, "b": B})
            (part,) = result.provenance["placement"]
            assert part == {"device": "local-task", "nodes": 0, "names": [], "elsewhere": False, "reasons": []}
            assert result.provenance["elsewhere"] == ""


def test_board_run_omits_unavailable_measurements(board, load):
    with load("add") as program:
        result, _ = program.run({"a": A, "b": B}, iterations=3)
    measured = "command" not in result.provenance
    assert len(result.device_ns) == 3, "without an agent IREE's own tool times it"
    assert (result.peak_memory_bytes is not None) == measured
    assert ("clock" in result.provenance) == measured


def test_board_run_uses_new_inputs_every_time(load):
    with load("two") as program:
        for seed in range(3):
            a = np.random.default_rng(seed).integers(-100, 100, (2, 3), dtype=np.int32)
            result, _ = program.run({"a": a}, names=("twice", "squared"))
            assert list(result.outputs) == ["twice", "squared"]
            np.testing.assert_array_equal(result.outputs["twice"], a + a)
            np.testing.assert_array_equal(result.outputs["squared"], a * a)


def test_board_generates_tokens_or_refuses(reached, load):
    tokens = {"prompt": [1, 4, 2], "forced": [5, 0], "other_prompt": [6, 6]}
    inputs = {name: np.array(one, np.int64) for name, one in tokens.items()}
    names = ("logits", "positions", "tokens", "cache")
    with load("step") as program:
        if reached.by_command:
            with pytest.raises(errors.NotRun, match="requires an agent on the board") as caught:
                program.run(inputs, steps=PLAN, names=names)
            assert "without --generate" in caught.value.hint
            return
        result, call = program.run(inputs, warmup=1, iterations=2, steps=PLAN, names=names)
        plan = replace(PLAN, prompts=(PromptFunction("prefill", (1, 0, 2), (-1, 0)),))
        other, other_call = program.run(inputs, steps=plan, names=names)
        with pytest.raises(errors.RunFailed, match="9 tokens exceed the cache of 8 tokens"):
            program.run({**inputs, "prompt": np.zeros(7, np.int64)}, steps=PLAN, names=names)
    assert list(result.outputs) == [*names]
    np.testing.assert_array_equal(result.outputs["logits"], logits_of([1, 4, 2, 5, 0]))
    assert result.outputs["positions"].tolist() == [0, 1, 2, 3, 4]
    assert result.repetition is not None and result.repetition.is_stable
    assert [one.tokens for one in call.calls] == [1] * 5 * 2
    assert [one.tokens for one in other_call.calls] == [2, 1, 1, 1]
    assert other.outputs["positions"].tolist() == [2, 3, 4]
    np.testing.assert_array_equal(other.outputs["logits"], result.outputs["logits"][2:])
    np.testing.assert_array_equal(other.outputs["cache"], result.outputs["cache"])


@pytest.mark.parametrize("inputs", [{"a": A}, {"a": A.astype(np.float64), "b": B}, {"a": A[:5], "b": B}])
def test_board_run_rejects_mismatched_inputs(load, inputs):
    with load("add") as program:
        with pytest.raises(errors.UsageError):
            program.run(inputs)
        program.run({"a": A, "b": B})


def test_board_profiles_program_and_runs_afterwards(capabilities, load):
    with load("add") as program:
        taken = program.profile({"a": A, "b": B}, warmup=1, iterations=2)
        assert len(taken.files["profile.ireeprof"]) > 100
        assert (taken.warmup, taken.iterations) == (1, 2)
        assert taken.host.start_ns < taken.host.end_ns
        assert bool(taken.clock_pairs) == (taken.board is not None) == capabilities.clock
        result, _ = program.run({"a": A, "b": B})
    np.testing.assert_array_equal(next(iter(result.outputs.values())), A + B)


def test_board_profile_of_failing_program_raises_run_error(load):
    with load("refuses") as program:
        with pytest.raises(errors.RunFailed) as caught:
            program.profile({"n": np.array(4, np.int32)})
        assert "it is not three" in f"{caught.value.message} {caught.value.detail}"
        program.profile({"n": np.array(3, np.int32)})


@pytest.mark.ci
def test_board_profile_times_out(load):
    with load("hangs") as program, pytest.raises(errors.StageTimeout):
        program.profile({"n": np.array(1, np.int32)}, timeout=2)
    with load("add") as program:
        program.run({"a": A, "b": B})


def test_board_counters_sampled_during_run(board, capabilities, load):
    with board.watch_counters(0.02) as watch, load("add") as program:
        program.run({"a": A, "b": B})
        measured = not watch.problem
        while measured and not watch.problem and len({sample.at_ns for sample in watch.samples}) < 2:
            time.sleep(0.01)
    assert bool(watch.samples) == measured == capabilities.clock
    stamps = [sample.at_ns for sample in watch.samples]
    assert stamps == sorted(stamps)
    assert watch.problem == "" or not measured


def test_board_reports_invalid_program_as_load_error(board, tmp_path):
    board.push(broken(tmp_path))
    with pytest.raises(errors.LoadFailed):
        board.load(broken(tmp_path)).run({})


def test_board_reports_unknown_function_as_load_error(load):
    with pytest.raises(errors.LoadFailed, match="nowhere"):
        load("nowhere").run({})


def test_board_reports_program_failure_as_run_error(load):
    three, four = np.array(3, np.int32), np.array(4, np.int32)
    with load("refuses") as program:
        with pytest.raises(errors.RunFailed) as caught:
            program.run({"n": four})
        assert "it is not three" in f"{caught.value.message} {caught.value.detail}"
    with load("refuses") as program:
        result, _ = program.run({"n": three})
        assert int(next(iter(result.outputs.values()))) == 3


@pytest.mark.ci
def test_board_run_times_out_and_next_program_runs(load):
    with load("hangs") as program, pytest.raises(errors.StageTimeout):
        program.run({"n": np.array(1, np.int32)}, timeout=2)
    with load("add") as program:
        result, _ = program.run({"a": A, "b": B})
    np.testing.assert_array_equal(next(iter(result.outputs.values())), A + B)
