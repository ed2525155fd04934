"""The contract of every board, over an emulated microcontroller: firmware runs one program with fixed shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.commands import Ended
from support.microcontrollers import Microcontrollers
from support.models import save_model

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import open_board
from hil.controller.devices.choosing.board_resolver import choose, read_capabilities
from hil.core.files import digest_file
from hil.core.results import Artifact
from hil.errors import LoadFailed, UsageError

pytestmark = [pytest.mark.ci, pytest.mark.slow, pytest.mark.timeout(600)]
A = np.arange(64, dtype=np.float32)
B = np.full(64, 2.5, np.float32)


@pytest.fixture(scope="module")
def choice(start_chip: Microcontrollers) -> BoardChoice:
    return choose(str(start_chip("cortex-m4").config))


@pytest.fixture(scope="module")
def board(choice: BoardChoice) -> Iterator[Board]:
    """Yield a board that this test holds."""
    with open_board(replace(choice, purpose="contract test")) as opened:
        opened.take()
        yield opened


@pytest.fixture
def program(choice: BoardChoice, hil: Callable[..., Ended], tmp_path: Path) -> Artifact:
    """Return a program that adds two tensors of 64 float32."""
    value = (TensorProto.FLOAT, [64])
    node = helper.make_node("Add", ["a", "b"], ["y"], "add")
    model = save_model(tmp_path / "add.onnx", [node], [("a", *value), ("b", *value)], [("y", *value)])
    folder = tmp_path / "program"
    folder.mkdir()
    ended = hil("compile", model, "--board", choice.config.path, "-o", folder / "add.json")
    assert ended.code == 0, ended.err
    files = {path.name: path for path in folder.iterdir()}
    return Artifact("mcu", "add.json", files, {name: digest_file(path) for name, path in files.items()}, "", "-")


def test_client_has_capabilities_of_link_kind(board: Board, choice: BoardChoice) -> None:
    capabilities = read_capabilities(choice)
    assert board.client.has_session == capabilities.sessions
    assert bool(board.client.pings(1)) == capabilities.clock
    assert board.info["machine"]["arch"] == "armv7e-m"


def test_program_reports_specs_and_runs_repeatedly(board: Board, program: Artifact) -> None:
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
    assert result.provenance["board"] == board.name


def test_wrong_inputs_are_rejected(board: Board, program: Artifact) -> None:
    board.push(program)
    with board.load(program) as loaded, pytest.raises(UsageError):
        loaded.run({"a": A[:3], "b": B}, warmup=0, iterations=1)


def test_damaged_program_is_a_load_error_and_the_next_one_runs(board: Board, program: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{}")
    broken = Artifact("mcu", path.name, {path.name: path}, {path.name: digest_file(path)}, "", "-")
    board.push(broken)
    with pytest.raises(LoadFailed, match="is not a description of firmware"):
        board.load(broken)
    board.push(program)
    with board.load(program) as loaded:
        result, _ = loaded.run({"a": A, "b": B}, warmup=0, iterations=1)
    np.testing.assert_array_equal(next(iter(result.outputs.values())), A + B)
