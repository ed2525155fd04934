from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from hil.agent.journal import Journal
from hil.agent.programs import MAX_PROGRAMS, Loaded, Programs
from hil.agent.session import Sessions
from hil.errors import LoadFailed, SessionEnded, UsageError
from hil.proto.v1 import agent_pb2 as pb


@pytest.mark.parametrize(("gone", "told"), [("program", UsageError), ("session", SessionEnded)])
def test_a_call_that_waited_for_a_program_that_went_is_told_what_went(
    tmp_path: Path, gone: str, told: type[Exception]
) -> None:
    sessions = Sessions(tmp_path / "fence", lambda: programs.unload_all(SessionEnded("over")), Journal(tmp_path / "j"))
    programs = Programs(Mock(), Mock(), sessions)
    session = sessions.open("somebody", "a test", 60.0, 0, print)
    assert session is not None
    loaded = programs._loaded["p"] = Loaded(Mock(), session, tmp_path, [])

    def call() -> None:
        with programs.called(session, pb.InvokeStart(program_id="p", iterations=1), lambda: True):
            pytest.fail("a program that is gone was called")

    with ThreadPoolExecutor() as threads:
        with loaded.lock:
            waiting = threads.submit(call)
            time.sleep(0.1)
            if gone == "program":
                programs.unload(session, "p")
            else:
                ending = threads.submit(sessions.end, session, "its owner left")
                while programs._loaded:
                    time.sleep(0.01)
        with pytest.raises(told):
            waiting.result()
        if gone == "session":
            ending.result()


def test_a_session_has_so_many_programs_and_no_more(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "fence", lambda: None, Journal(tmp_path / "j"))
    programs = Programs(Mock(), Mock(), sessions)
    session = sessions.open("somebody", "a test", 60.0, 0, print)
    assert session is not None
    for number in range(MAX_PROGRAMS):
        programs._loaded[str(number)] = Loaded(Mock(), session, tmp_path, [])
    with pytest.raises(LoadFailed, match="512 programs are loaded already"):
        programs.load(session, pb.LoadRequest())
