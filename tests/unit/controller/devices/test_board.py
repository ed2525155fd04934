"""A board and its programs, with an agent in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_agent import RUNTIME, FakeAgent, program
from support.lying_agent import impatient

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.links.link import Link
from hil.core.board_config import BoardConfig, Command, MeasureCommands
from hil.core.instructions import InstructionCounts
from hil.core.scratch import make_folder, remove_tree
from hil.errors import (
    BlobDamaged,
    BoardBusy,
    BoardLost,
    BoardUnfit,
    BoardUnreachable,
    RunFailed,
    SessionEnded,
    UsageError,
)

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    folder = make_folder("hil-fake-", for_sockets=True)
    with FakeAgent(folder / "agent.sock") as made:
        yield made
    remove_tree(folder)


class Lab:
    """Open boards connected to the fake agent.

    Attributes:
        said: messages of the boards.
        renewed: number of renewed links.
        on_renew: called at the far end on each renewal.
    """

    def __init__(self, agent: FakeAgent) -> None:
        self.agent = agent
        self.said: list[str] = []
        self.renewed = 0
        self.on_renew: Callable[[], object] = lambda: None
        self._open: list[Board] = []

    def open(self, build: str = "", *, can_renew: bool = True, wait_s: float = 1.0, **config: Any) -> Board:
        link = Link(AgentEndpoint(self.agent.address), build=build, log=lambda: "the far side's last words")
        link.renew = (lambda: self._renew(link)) if can_renew else None
        config = BoardConfig("lab", "lab", runtime=RUNTIME, **config)
        self._open.append(Board(BoardChoice(config, purpose="a test", wait_s=wait_s, say=self.said.append), link))
        return self._open[-1]

    def _renew(self, link: Link) -> AgentEndpoint:
        self.renewed += 1
        self.on_renew()
        return link.target

    def close(self) -> None:
        for board in self._open:
            board.close()


@pytest.fixture
def lab(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr("hil.controller.devices.board._PUSH_PAUSE_SECONDS", 0.001)
    made = Lab(agent)
    yield made
    made.close()


def run(board: Board, artifact: Any, x: np.ndarray = X, **options: Any) -> Any:
    board.push(artifact)
    with board.load(artifact) as loaded:
        return loaded.run({"x": x}, **options)


# ---- preparing


def test_board_is_prepared_once_and_restored_when_closed(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    log = tmp_path / "log"
    before, after = (Command(("sh", "-c", f"echo {word} >> {log}")) for word in ("before", "after"))
    board = lab.open(measure=MeasureCommands((before,), (after,)))
    for _ in range(2):
        board.prepare()
    assert log.read_text() == "before\n"
    for _ in range(2):
        board.close()
    assert log.read_text() == "before\nafter\n" and not list(tmp_path.rglob("*.json"))
    unused = lab.open(measure=MeasureCommands((before,), (after,)))
    unused.close()
    assert log.read_text() == "before\nafter\n"


def test_failed_preparation_of_board_is_not_repeated(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    log = tmp_path / "log"
    failing = Command(("sh", "-c", f"echo before >> {log}; exit 3"))
    board = lab.open(measure=MeasureCommands((failing,), (Command(("sh", "-c", f"echo after >> {log}")),)))
    for _ in range(2):
        with pytest.raises(BoardUnfit, match=r"\[measure\] before failed with exit code 3") as found:
            board.prepare()
        assert found.value.hint.startswith("run it manually")
    board.close()
    assert log.read_text() == "before\nafter\n"


def test_board_waits_for_measurement_of_other_process(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    measure = MeasureCommands((Command(("true",)),), ())
    first, busy = lab.open(measure=measure), lab.open(measure=measure, wait_s=0.0)
    first.prepare()
    with pytest.raises(BoardBusy, match="another hil command measures on this board") as found:
        busy.prepare()
    assert found.value.outcome == "BOARD_BUSY"
    second = lab.open(measure=measure, wait_s=60.0)
    threading.Timer(0.3, first.close).start()
    second.prepare()
    assert lab.said.count("lab: another hil command measures on this board") == 1


def test_board_closes_if_it_cannot_be_restored(lab, agent, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    board = lab.open(measure=MeasureCommands((), (Command(("false",)),)))
    board.take()
    board.prepare()
    board.close()
    assert lab.said[-1].startswith("lab may not be restored")
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["pending-measure"]
    lab.open().take()  # the first board was released


# ---- taking


def test_board_opens_session_once(lab, agent):
    board = lab.open()
    assert "Hold" not in agent.calls
    board.take()
    board.take()
    assert agent.calls.count("Hold") == 1


def test_board_held_by_other_raises_busy(lab):
    lab.open().take()
    with pytest.raises(BoardBusy, match="somebody has the device"):
        lab.open().take()
    assert any("somebody has used the board for" in text for text in lab.said)


def test_released_board_can_be_taken(lab):
    first = lab.open()
    first.take()
    first.close()
    lab.open().take()


def test_board_replaces_agent_of_other_version(lab, agent):
    board = lab.open(build="ours")
    lab.on_renew = lambda: setattr(agent, "build", "ours")
    agent.build = "newer"
    board.take()
    assert lab.renewed == 1
    assert board.info["build"] == "ours"


def test_persistent_agent_of_other_version_raises_busy(lab, agent):
    board = lab.open(build="ours")
    agent.build = "newer"
    with pytest.raises(BoardBusy, match="a different version"):
        board.take()
    assert lab.renewed == 1


def test_board_restarts_agent_stopped_before_session(lab, agent):
    board = lab.open()
    agent.stop()
    lab.on_renew = agent.start
    board.take()
    assert lab.renewed == 1


def test_stopped_agent_raises_lost_or_unreachable(lab, agent):
    board = lab.open(can_renew=False)
    agent.stop()
    with pytest.raises((BoardLost, BoardUnreachable)):
        board.take()


# ---- pushing


def test_push_sends_only_missing_files_once(lab, agent, tmp_path):
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


def test_push_resumes_interrupted_upload(lab, agent, tmp_path):
    size = 3 << 20
    board, artifact = lab.open(), program(tmp_path / "p.onnx", size)
    agent.cut_at, lab.on_renew = 1 << 20, agent.start
    assert board.push(artifact) >= size
    first, second = agent.offsets
    assert (first, second) == (0, 1 << 20)
    assert list(agent.blobs) == list(artifact.digests.values())
    assert any("reconnecting" in text for text in lab.said)
    assert run(board, artifact)[0].outputs["y"].tolist() == [1, 2, 3, 4]


def test_push_raises_lost_if_board_stays_away(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    agent.cut_at = 1

    def gone() -> None:
        raise BoardUnreachable("nobody answers")

    lab.on_renew = gone
    with pytest.raises(BoardLost, match="stopped responding during the upload") as caught:
        board.push(artifact)
    assert (caught.value.stage, caught.value.board) == ("push", "lab")
    assert caught.value.detail == "the far side's last words"


def test_push_gives_up_after_repeated_breaks(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx", 6 << 20)

    def again() -> None:
        agent.start()
        agent.cut_at = 1

    agent.cut_at, lab.on_renew = 1, again
    with pytest.raises(BoardLost):
        board.push(artifact)
    assert lab.renewed == 3


def test_push_rejects_file_altered_after_reading(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    artifact.files["p.onnx"].write_bytes(bytes(1000))
    with pytest.raises(UsageError, match="changed after hil read it"):
        board.push(artifact)


# ---- silence


@pytest.mark.ci
def test_transferring_board_does_not_count_as_silent(lab, agent, tmp_path):
    """Session replies may queue behind this data on a slow link or a busy machine."""
    agent.pace_s = 0.075
    board, x = lab.open(), np.ones(3 << 20, np.float32)
    with impatient(1.0):
        result, _ = run(board, program(tmp_path / "p.onnx", 12 << 20), x)
    assert (result.outputs["y"] == 2).all()


@pytest.mark.ci
def test_stalled_board_raises_lost(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx", 12 << 20)
    with impatient(1.0), pytest.raises(BoardLost):
        board.take()
        agent.pace_s = 30
        run(board, artifact)


# ---- loading


def test_board_loads_two_programs(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    first, second = board.load(artifact), board.load(artifact)
    assert first.loaded.program_id != second.loaded.program_id
    first.unload()
    assert second.run({"x": X})[0].outputs["y"].tolist() == [1, 2, 3, 4]


def test_load_resends_damaged_blob(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    agent.damaged = list(artifact.digests.values())
    result, _ = run(board, artifact)
    assert result.outputs["y"].tolist() == [1, 2, 3, 4]
    assert agent.calls.count("Put") == 2
    assert any("was altered; uploading a new copy" in text for text in lab.said)


def test_load_fails_for_repeatedly_damaged_blob(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    agent.damaged = list(artifact.digests.values()) * 2
    with pytest.raises(BlobDamaged):
        board.load(artifact)


# ---- running


def test_run_provenance_describes_board(lab, agent, tmp_path):
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
    assert any("2 CPU throttle events" in note for note in provenance["notes"])
    assert "command" not in provenance
    assert call.host_ns[0] < call.host_ns[1]


def test_board_whose_clock_counts_reports_instructions_and_no_times(lab, tmp_path):
    result, call = run(lab.open(icount_shift=2), program(tmp_path / "p.onnx"), iterations=2)
    assert result.instructions == InstructionCounts("icount", (250, 250))
    assert (result.iterations_ns, call.iterations_ns, call.board_ns, call.warmup_ns) == ((), (), None, 0)
    assert "clock" not in result.provenance


def test_board_with_coarse_clock_reports_no_instructions(lab, tmp_path):
    result, _ = run(lab.open(icount_shift=10), program(tmp_path / "p.onnx"))
    assert result.instructions is not None and "check [board] icount_shift" in result.instructions.problem


def test_board_whose_clock_counts_has_no_profile(lab, tmp_path):
    board, artifact = lab.open(icount_shift=0), program(tmp_path / "p.onnx")
    board.push(artifact)
    with board.load(artifact) as loaded, pytest.raises(RunFailed, match="the board's clock counts instructions"):
        loaded.profile({"x": X})


def test_older_agent_does_not_count_instructions(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    with board.load(artifact, instructions=True) as loaded:
        result, _ = loaded.run({"x": X})
    assert result.instructions == InstructionCounts(problem="the agent is older than this hil")
    assert len(result.device_ns) == 1


def test_first_run_without_warmup_counts_as_cold(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    with board.load(artifact) as loaded:
        assert [loaded.run({"x": X})[0].cold for _ in range(2)] == [True, False]
    with board.load(artifact) as loaded:
        assert not loaded.run({"x": X}, warmup=1)[0].cold


def test_run_uses_given_output_names(lab, tmp_path):
    result, _ = run(lab.open(), program(tmp_path / "p.onnx"), names=("sum",))
    assert list(result.outputs) == ["sum"]


def test_run_rejects_mismatched_inputs_before_sending(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    with board.load(artifact) as loaded:
        with pytest.raises(UsageError, match="takes 1 inputs, got 0"):
            loaded.run({})
        with pytest.raises(UsageError, match="does not accept"):
            loaded.run({"x": X.astype(np.float64)})
    of_model = replace(artifact, inputs=(replace(loaded.loaded.inputs[0], dtype="float64"),))
    with board.load(of_model) as loaded, pytest.raises(RunFailed, match="and the model have different inputs"):
        loaded.run({"x": X.astype(np.float64)})
    assert "Invoke" not in agent.calls


def test_session_ended_in_run_raises_without_retry(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    agent.end_in_run = "another owner took the device"
    with pytest.raises(SessionEnded, match="another owner took the device"):
        run(board, artifact)
    assert agent.calls.count("Invoke") == 1
    assert lab.renewed == 0


def test_push_reopens_session_lost_between_runs(lab, agent, tmp_path):
    board = lab.open()
    board.push(program(tmp_path / "first.onnx"))
    agent.end_session("its time is over")
    result, _ = run(board, program(tmp_path / "second.onnx", 2000))
    assert result.outputs["y"].tolist() == [1, 2, 3, 4]
    assert lab.renewed == 1


@pytest.mark.parametrize("has_data_socket", [True, False])
def test_run_over_grpc_fallback_has_note(lab, agent, tmp_path, has_data_socket):
    if has_data_socket:  # a socket without a listener
        Path(f"{agent.socket}.data").touch()
    result, _ = run(lab.open(), program(tmp_path / "p.onnx"))
    assert any("gRPC, which is slower" in note for note in result.provenance["notes"]) == has_data_socket


def test_board_stopped_before_run_raises_lost(lab, agent, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    loaded = board.load(artifact)
    agent.stop()
    with pytest.raises((BoardLost, SessionEnded)):
        loaded.run({"x": X})
    loaded.unload()
    assert loaded.log() == [], "a board that is gone tells nothing"


# ---- profiling


def test_profile_reloads_program_after_tool_upload_breaks(lab, agent, tmp_path, monkeypatch):
    agent.profile_tool = "iree-benchmark-module"
    (tmp_path / "tool").write_bytes(b"a tool" * 1000)
    monkeypatch.setattr("hil.controller.devices.deploy.wheels.fetch_iree_tool", lambda *_, **__: tmp_path / "tool")
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


def test_run_streams_large_tensors(lab, tmp_path):
    x = np.arange(1 << 20, dtype=np.float32)
    result, _ = run(lab.open(), program(tmp_path / "p.onnx"), x)
    np.testing.assert_array_equal(result.outputs["y"], x + 1)


def test_run_rejects_damaged_output(lab, agent, tmp_path):
    agent.spoil_outputs = True
    with pytest.raises(BoardLost, match="corrupted during download"):
        run(lab.open(), program(tmp_path / "p.onnx"), np.arange(1 << 20, dtype=np.float32))


def test_invoke_writes_outputs_into_given_arrays(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    x, y = np.arange(1 << 20, dtype=np.float32), np.empty(1 << 20, np.float32)
    with board.load(artifact) as loaded:
        call = board.client.invoke(loaded.loaded.program_id, {"x": x}, into={"y": y})
    assert np.shares_memory(call.outputs["y"], y)
    np.testing.assert_array_equal(y, x + 1)


def test_threads_run_program_concurrently(lab, tmp_path):
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
            thread.join(60)
    assert found == {number: (X + number + 1).tolist() for number in range(4)}


def test_closed_board_raises_lost(lab, tmp_path):
    board, artifact = lab.open(), program(tmp_path / "p.onnx")
    board.push(artifact)
    board.close()
    assert board.closed
    with pytest.raises(BoardLost, match="closed"):
        board.load(artifact)
