from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.waiting import eventually

from hil.agent.ipc import Arena
from hil.agent.programs import MAX_PROGRAMS, InputReceiver, Programs, WorkerProgram
from hil.agent.session import Journal, Sessions
from hil.agent.store import BlobStore
from hil.core.digest import Hasher, digest_of
from hil.errors import LoadFailed, SessionEnded, UsageError
from hil.protocol.v1 import agent_pb2 as pb


@pytest.mark.parametrize(("gone", "told"), [("program", UsageError), ("session", SessionEnded)])
def test_programs_call_raises_cause_if_program_ends_while_queued(
    tmp_path: Path, gone: str, told: type[Exception]
) -> None:
    sessions = Sessions(tmp_path / "fence", lambda: programs.unload_all(SessionEnded("over")), Journal(tmp_path / "j"))
    programs = Programs(Mock(), Mock(), sessions)
    session = sessions.open("somebody", "a test", 60.0, 0, lambda _: None)
    assert session is not None
    loaded = programs._loaded["p"] = WorkerProgram(Mock(), session, tmp_path, [])

    def call() -> None:
        with programs.lock_program(session, pb.InvokeStart(program_id="p", iterations=1), lambda: True):
            pytest.fail("a program that is gone was called")

    with ThreadPoolExecutor() as threads:
        with loaded.lock:
            waiting = threads.submit(call)
            time.sleep(0.1)
            if gone == "program":
                programs.unload(session, "p")
            else:
                ending = threads.submit(sessions.end, session, "its owner left")
                eventually(lambda: not programs._loaded)
        with pytest.raises(told):
            waiting.result()
        if gone == "session":
            ending.result()


def test_programs_load_enforces_program_limit(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "fence", lambda: None, Journal(tmp_path / "j"))
    programs = Programs(Mock(), Mock(), sessions)
    session = sessions.open("somebody", "a test", 60.0, 0, lambda _: None)
    assert session is not None
    for number in range(MAX_PROGRAMS):
        programs._loaded[str(number)] = WorkerProgram(Mock(), session, tmp_path, [])
    with pytest.raises(LoadFailed, match="512 programs are already loaded"):
        programs.load(session, pb.LoadRequest())


def test_programs_reject_messages_above_part_limit(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "fence", lambda: None, Journal(tmp_path / "j"))
    programs = Programs(Mock(), Mock(), sessions)
    session = sessions.open("somebody", "a test", 60.0, 0, lambda _: None)
    assert session is not None
    with pytest.raises(UsageError, match="files, maximum 10000"):
        programs.load(session, pb.LoadRequest(files=[pb.ProgramFile()] * 10_001))
    loaded = programs._loaded["p"] = WorkerProgram(Mock(), session, tmp_path, [])
    for inputs in ([pb.Tensor()] * 20_001, [pb.Tensor(shape=[1] * 33)]):
        start = pb.InvokeStart(program_id="p", iterations=1, inputs=inputs)
        # Also while another call uses the program: such messages must not queue.
        with (
            loaded.lock,
            pytest.raises(UsageError, match="at most 20000 inputs"),
            programs.lock_program(session, start, lambda: True),
        ):
            pytest.fail("it was let in")


def test_programs_load_stops_linking_when_session_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(tmp_path / "fence", lambda: None, Journal(tmp_path / "j"))
    store = BlobStore(tmp_path / "store")
    programs = Programs(store, Mock(), sessions)
    session = sessions.open("somebody", "a test", 60.0, 0, lambda _: None)
    assert session is not None
    blob = digest_of(b"x")
    with store.upload(blob, 1, 0) as upload:
        upload.write(memoryview(b"x"))
        upload.finish()
    files = [pb.ProgramFile(name=f"{number}/file", digest=blob) for number in range(5000)]
    link = Mock(side_effect=os.link)
    monkeypatch.setattr(os, "link", link)
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(programs.load, session, pb.LoadRequest(main="0/file", files=files))
        eventually(lambda: list((tmp_path / "store/programs").glob("*/*")), every_s=0.001)
        sessions.end(session, "its owner left")
        with pytest.raises(SessionEnded):
            loading.result()
    assert link.call_count < 5000
    assert not list((tmp_path / "store/programs").iterdir())


def test_programs_verify_inputs_hashed_before_program_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Hasher):
        """Hash only when the digest is read, as a hasher in the background may."""

        def update(self, data: object) -> None:
            self.digest = lambda: digest_of(data)  # type: ignore[method-assign]

    monkeypatch.setattr("hil.agent.programs.Hasher", Late)
    start = pb.InvokeStart(inputs=[pb.Tensor(dtype="uint8", shape=[3], streamed=3)])
    arena = Arena()
    coming = InputReceiver(arena, start, Mock(), lambda size: None)
    coming.add(memoryview(b"abc"))
    arena.view(3, grow=False)[:] = b"xyz"
    coming.verify([digest_of(b"abc")])
    arena.close()
