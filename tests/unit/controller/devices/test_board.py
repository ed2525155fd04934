"""A board and its programs, against an agent in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fake_agent import RUNTIME, FakeAgent, program
from support.lying_agent import impatient

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import Target
from hil.controller.devices.links.link import Link
from hil.core.board_config import BoardConfig
from hil.core.scratch import new_folder, remove_tree
from hil.errors import (
    BlobDamaged,
    BoardBusy,
    BoardLost,
    BoardUnreachable,
    RunFailed,
    SessionEnded,
    UsageError,
)

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    folder = new_folder("hil-fake-", for_sockets=True)
    with FakeAgent(folder / "agent.sock") as made:
        yield made
    remove_tree(folder)


class Lab:
    """Opens boards whose link leads to the fake agent.

    Attributes:
        said: what boards told.
        renewed: how often a link was made anew.
        on_renew: what happens at the far end then.
    """

    def __init__(self, agent: FakeAgent) -> None:
        self.agent = agent
        self.said: list[str] = []
        self.renewed = 0
        self.on_renew: Callable[[], object] = lambda: None
        self._open: list[Board] = []

    def open(self, build: str = "", *, can_renew: bool = True, wait_s: float = 1.0) -> Board:
        link = Link(Target(self.agent.address), build=build, log=lambda: "the far side's last words")
        link.renew = (lambda: self._renew(link)) if can_renew else None
        config = BoardConfig("lab", "lab", runtime=RUNTIME)
        self._open.append(Board(BoardChoice(config, purpose="a test", wait_s=wait_s, say=self.said.append), link))
        return self._open[-1]

    def _renew(self, link: Link) -> Target:
        self.renewed += 1
        self.on_renew()
        return link.target

    def close(self) -> None:
        for board in self._open:
            board.close()


@pytest.fixture
def lab(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr("hil.controller.devices.board._PUSH_PAUSE_S", 0.001)
    made = Lab(agent)
    yield made
    made.close()


def run(board: Board, artifact: Any, x: np.ndarray = X, **options: Any) -> Any:
    board.push(artifact)
    with board.load(artifact) as loaded:
        return loaded.run({"x": x}, **options)


# ---- taking


def test_a_board_is_taken_once(lab, agent):
    board = lab.open()
    assert "Hold" not in agent.calls
    board.take()
    board.take()
    assert agent.calls.count("Hold") == 1


def test_a_board_that_somebody_has_is_busy(lab):
    lab.open().take()
    with pytest.raises(BoardBusy, match="somebody has the device"):
        lab.open().take()
    assert any("somebody has the board (tests)" in text for text in lab.said)


def test_a_board_that_was_given_back_can_be_taken(lab):
    first = lab.open()
    first.take()
    first.close()
    lab.open().take()


def test_an_agent_of_another_version_is_replaced_before_anything_runs(lab, agent):
    board = lab.open(build="ours")
    lab.on_renew = lambda: setattr(agent, "build", "ours")
    agent.build = "newer"
    board.take()
    assert lab.renewed == 1
    assert board.info["build"] == "ours"


def test_an_agent_of_another_version_that_stays_has_the_board(lab, agent):
    board = lab.open(build="ours")
    agent.build = "newer"
    with pytest.raises(BoardBusy, match="another version"):
        board.take()
    assert lab.renewed == 1


def test_an_agent_that_left_before_it_was_taken_is_started_again(lab, agent):
    board = lab.open()
    agent.stop()
    lab.on_renew = agent.start
    board.take()
    assert lab.renewed == 1


def test_an_agent_that_left_for_good_is_unreachable_or_lost(lab, agent):
    board = lab.open(can_renew=False)
    agent.stop()
    with pytest.raises((BoardLost, BoardUnreachable)):
        board.take()


# ---- pushing


def test_only_what_the_board_lacks_is_sent_and_only_once(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx", 3000)
    told: list[tuple[int, int]] = []
    assert board.push(artifact, lambda sent, total: told.append((sent, total))) == 3000
    assert told[-1] == (3000, 3000)
    assert board.push(artifact) == 0
    assert agent.calls.count("Missing") == 1, "what was seen there is not asked for again"
    second = lab_again(lab, board)
    assert second.push(artifact) == 0
    assert agent.calls.count("Put") == 1
    assert board.payload_bytes_sent == 3000


def lab_again(lab: Lab, board: Board) -> Board:
    board.close()
    return lab.open()


def test_an_upload_goes_on_where_it_was_cut(lab, agent, tmp_path):
    size = 3 << 20
    board, artifact = lab.open(), program(tmp_path / "p.onnx", size)
    agent.cut_at, lab.on_renew = 1 << 20, agent.start
    assert board.push(artifact) >= size
    first, second = agent.offsets
    assert (first, second) == (0, 1 << 20)
    assert list(agent.blobs) == list(artifact.digests.values())
    assert any("connecting again" in text for text in lab.said)
    assert run(board, artifact)[0].outputs["y"].tolist() == [1, 2, 3, 4]


def test_an_upload_whose_board_stays_away_is_lost(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    agent.cut_at = 1

    def gone() -> None:
        raise BoardUnreachable("nobody answers")

    lab.on_renew = gone
    with pytest.raises(BoardLost, match="stopped answering during the upload") as caught:
        board.push(artifact)
    assert (caught.value.stage, caught.value.board) == ("push", "lab")
    assert caught.value.detail == "the far side's last words"


def test_an_upload_that_breaks_again_and_again_is_given_up(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx", 6 << 20)

    def again() -> None:
        agent.start()
        agent.cut_at = 1

    agent.cut_at, lab.on_renew = 1, again
    with pytest.raises(BoardLost):
        board.push(artifact)
    assert lab.renewed == 3


def test_a_file_that_was_altered_here_after_it_was_read_is_the_users_doing(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    artifact.files["p.onnx"].write_bytes(bytes(1000))
    with pytest.raises(UsageError, match="was altered after it was read"):
        board.push(artifact)


# ---- silence


def test_a_board_that_sends_and_takes_data_is_not_silent(lab, agent, tmp_path):
    """The session's own answers may be behind that data, on a slow link or a busy machine."""
    agent.pace_s = 0.075
    board, x = lab.open(), np.ones(3 << 20, np.float32)
    with impatient(1.0):
        result, _ = run(board, program(tmp_path / "p.onnx", 12 << 20), x)
    assert (result.outputs["y"] == 2).all()


def test_a_board_that_sends_no_more_is_silent(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx", 12 << 20)
    with impatient(1.0), pytest.raises(BoardLost):
        board.take()
        agent.pace_s = 30
        run(board, artifact)


# ---- loading


def test_two_programs_are_loaded_side_by_side(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    first, second = board.load(artifact), board.load(artifact)
    assert first.loaded.program_id != second.loaded.program_id
    first.unload()
    assert second.run({"x": X})[0].outputs["y"].tolist() == [1, 2, 3, 4]


def test_a_blob_that_was_damaged_on_the_board_is_sent_again(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    agent.damaged = list(artifact.digests.values())
    result, _ = run(board, artifact)
    assert result.outputs["y"].tolist() == [1, 2, 3, 4]
    assert agent.calls.count("Put") == 2
    assert any("was altered; sending it again" in text for text in lab.said)


def test_a_blob_that_is_damaged_again_is_an_error(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    agent.damaged = list(artifact.digests.values()) * 2
    with pytest.raises(BlobDamaged):
        board.load(artifact)


# ---- running


def test_a_run_says_on_what_it_was_measured(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    agent.readings = {"throttle events": 1}
    board.take()
    board.info = {**board.info, "readings": [{"name": "throttle events", "value": 1.0}]}
    agent.readings = {"throttle events": 3}
    result, call = run(board, artifact, iterations=3)
    assert result.source == f"lab: {RUNTIME} 9.9"
    assert len(result.device_ns) == 3 and set(result.device_ns) == {1000}
    assert result.peak_memory_bytes == 1 << 20
    provenance = result.provenance
    assert abs(provenance["clock"]["offset_ns"]) < 1e9
    assert (provenance["board"], provenance["runtime_version"], provenance["agent_version"]) == ("lab", "9.9", "1")
    assert provenance["placement"][0]["device"] == "CPUExecutionProvider"
    assert any("counted 2 throttle events" in note for note in provenance["notes"])
    assert "command" not in provenance
    assert call.host_ns[0] < call.host_ns[1]


def test_the_first_run_is_cold_unless_it_was_warmed_up(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    with board.load(artifact) as loaded:
        assert [loaded.run({"x": X})[0].cold for _ in range(2)] == [True, False]
    with board.load(artifact) as loaded:
        assert not loaded.run({"x": X}, warmup=1)[0].cold


def test_outputs_take_the_names_that_are_given(lab, tmp_path):
    result, _ = run(lab.open(), program(tmp_path / "p.onnx"), names=("sum",))
    assert list(result.outputs) == ["sum"]


def test_inputs_that_a_program_does_not_take_are_not_sent(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    with board.load(artifact) as loaded:
        with pytest.raises(UsageError, match="takes 1 inputs, got 0"):
            loaded.run({})
        with pytest.raises(UsageError, match="does not take"):
            loaded.run({"x": X.astype(np.float64)})
    of_model = replace(artifact, inputs=(replace(loaded.loaded.inputs[0], dtype="float64"),))
    with board.load(of_model) as loaded, pytest.raises(RunFailed, match="other inputs on the board than its model"):
        loaded.run({"x": X.astype(np.float64)})
    assert "Invoke" not in agent.calls


def test_a_session_that_is_taken_away_in_a_run_ends_it_and_nothing_runs_again(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    agent.end_in_run = "another owner took the device"
    with pytest.raises(SessionEnded, match="another owner took the device"):
        run(board, artifact)
    assert agent.calls.count("Invoke") == 1
    assert lab.renewed == 0


def test_a_session_that_is_lost_between_runs_is_opened_again_by_the_next_upload(lab, agent, tmp_path):
    board = lab.open()
    board.push(program(tmp_path / "first.onnx"))
    agent.end_session("its time is over")
    result, _ = run(board, program(tmp_path / "second.onnx", 2000))
    assert result.outputs["y"].tolist() == [1, 2, 3, 4]
    assert lab.renewed == 1


def test_a_board_that_is_gone_in_a_run_is_lost(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    loaded = board.load(artifact)
    agent.stop()
    with pytest.raises((BoardLost, SessionEnded)):
        loaded.run({"x": X})
    loaded.unload()
    assert loaded.log() == [], "a board that is gone tells nothing"


# ---- profiling


def test_a_tool_whose_upload_costs_the_session_has_the_program_loaded_again(lab, agent, tmp_path, monkeypatch):
    agent.profile_tool = "iree-benchmark-module"
    (tmp_path / "tool").write_bytes(b"a tool" * 1000)
    monkeypatch.setattr("hil.controller.devices.deploy.wheels.iree_tool", lambda *_, **__: tmp_path / "tool")
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    with board.load(artifact) as loaded:
        before = loaded.loaded.program_id
        agent.cut_at, lab.on_renew = 1, agent.start
        taken = loaded.profile({"x": X}, iterations=2)
        assert taken.iterations == 2 and taken.board is not None
        assert loaded.loaded.program_id != before
        assert lab.renewed == 1
        assert loaded.run({"x": X})[0].outputs["y"].tolist() == [1, 2, 3, 4]


# ---- streams


def test_large_tensors_come_and_go_in_pieces(lab, tmp_path):
    x = np.arange(1 << 20, dtype=np.float32)
    result, _ = run(lab.open(), program(tmp_path / "p.onnx"), x)
    np.testing.assert_array_equal(result.outputs["y"], x + 1)


def test_an_output_that_is_damaged_on_its_way_is_no_answer(lab, agent, tmp_path):
    agent.spoil_outputs = True
    with pytest.raises(BoardLost, match="damaged on their way"):
        run(lab.open(), program(tmp_path / "p.onnx"), np.arange(1 << 20, dtype=np.float32))


def test_outputs_are_written_into_the_arrays_that_are_given(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    x, y = np.arange(1 << 20, dtype=np.float32), np.empty(1 << 20, np.float32)
    with board.load(artifact) as loaded:
        call = board.client.invoke(loaded.loaded.program_id, {"x": x}, into={"y": y})
    assert np.shares_memory(call.outputs["y"], y)
    np.testing.assert_array_equal(y, x + 1)


def test_threads_run_programs_at_the_same_time(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    found: dict[int, list[float]] = {}
    with board.load(artifact) as loaded:

        def one(number: int) -> None:
            call = board.client.invoke(loaded.loaded.program_id, {"x": X + number})
            found[number] = call.outputs["y"].tolist()

        threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert found == {number: (X + number + 1).tolist() for number in range(4)}


def test_a_closed_board_answers_nothing(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    board.close()
    assert board.closed
    with pytest.raises(BoardLost, match="closed"):
        board.load(artifact)
