"""The agent reports a program that crashes, hangs or is killed, and the next run passes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.agents import Program
from support.over_grpc import metadata_of, stub_of
from support.slow import slow_except
from support.waiting import eventually

from hil import errors
from hil.agent import programs
from hil.agent.server import Agent, AgentConfig
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.protocol.v1 import agent_pb2 as pb

A = np.arange(4096, dtype=np.float32)
INPUTS = {"a": A, "b": A}


def run_once(client, add: Program, timeout: float = 30):
    add.push(client)
    loaded = add.load(client)
    return client.invoke(loaded.program_id, INPUTS, timeout=timeout)


def passes_by_now(client, add: Program) -> bool:
    """Return whether the program passes. Until the agent notices the death, it may crash or fail to open its device."""
    try:
        return passes(client, add)
    except (errors.RunCrashed, errors.BoardUnfit):
        return False


def passes(client, add: Program) -> bool:
    outputs = run_once(client, add).outputs
    return bool((next(iter(outputs.values())) == A + A).all())


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL", "SIGKILL", "SIGABRT", "SIGBUS"])
@pytest.mark.parametrize("at", slow_except(["run", "load"], 1))
def test_worker_killed_by_signal_reports_and_next_run_passes(start_agent, open_client, add_programs, name, at):
    client = open_client(start_agent("--fault", f"crash:signal={name},at={at},times=1", module="hil.sim"))
    with pytest.raises(errors.RunCrashed, match=f"killed by {name} during {at}") as caught:
        run_once(client, add_programs["iree"])
    assert f"simulated {name}" in caught.value.detail
    assert (caught.value.code is errors.ErrorCode.ILLEGAL_INSTRUCTION) == (name == "SIGILL")
    if name == "SIGSEGV":
        assert "Segmentation fault" in caught.value.detail
    assert passes(client, add_programs["iree"])


@pytest.mark.daily
@pytest.mark.parametrize("runtime", ["iree", "onnxruntime"])
def test_hung_worker_stops_at_timeout_and_next_run_passes(start_agent, open_client, add_programs, runtime):
    client = open_client(start_agent("--fault", "hang:times=1", module="hil.sim"))
    start = time.monotonic()
    with pytest.raises(errors.StageTimeout, match="limit of 2 s") as caught:
        run_once(client, add_programs[runtime], timeout=2)
    assert time.monotonic() - start >= 2
    assert "simulated hang" in caught.value.detail
    assert passes(client, add_programs[runtime])


def test_externally_killed_worker_reports_run_crash(start_agent, open_client, add_programs):
    add = add_programs["onnxruntime"]
    client = open_client(start_agent())
    add.push(client)
    loaded = add.load(client)
    threading.Timer(0.3, os.kill, (loaded.worker_pid, signal.SIGKILL)).start()
    with pytest.raises(errors.RunCrashed, match="SIGKILL") as caught:
        client.invoke(loaded.program_id, INPUTS, iterations=1_000_000, timeout=30)
    assert "dmesg" in caught.value.hint
    assert passes(client, add)


def test_closing_session_stops_workers(start_agent, open_client, add_programs):
    client = open_client(start_agent())
    add_programs["iree"].push(client)
    pid = add_programs["iree"].load(client).worker_pid
    assert alive(pid)
    client.close_session()
    eventually(lambda: not alive(pid))


def test_call_without_inputs_frees_program_on_disconnect(tmp_path, add_programs, monkeypatch):
    monkeypatch.setattr(programs, "_RELEASE_SECONDS", 0.1)
    agent = Agent(AgentConfig(f"unix:{tmp_path}/a.sock", tmp_path / "store"))
    first, second = (AgentClient(AgentEndpoint(agent.address), "test") for _ in range(2))
    never = queue.SimpleQueue[pb.InvokeRequest | None]()
    try:
        fence = first.open_session("test", on_wait=print)
        add_programs["onnxruntime"].push(first)
        loaded = add_programs["onnxruntime"].load(first)
        start = pb.InvokeStart(
            program_id=loaded.program_id,
            iterations=1,
            inputs=[pb.Tensor(name=name, dtype="float32", shape=[4096], streamed=4 * 4096) for name in "ab"],
        )
        never.put(pb.InvokeRequest(start=start))
        call = stub_of(first).Invoke(iter(never.get, None), metadata=metadata_of(first))
        time.sleep(0.5)  # until the agent waits for the remaining inputs
        second.open_session("test", fence=fence + 1, on_wait=print)
        eventually(lambda: not alive(loaded.worker_pid))
        held = tmp_path / "store/programs"
        call.cancel()
        eventually(lambda: not list(held.iterdir()))
    finally:
        never.put(None)
        first.close()
        second.close()
        agent.stop()


def test_session_end_stops_load_before_next_session(tmp_path, start_agent, open_client, add_programs):
    address = start_agent("--fault", "hang:at=load,times=1", module="hil.sim")
    add, client = add_programs["onnxruntime"], open_client(address)
    add.push(client)
    with ThreadPoolExecutor() as threads:
        load = threads.submit(add.load, client)
        journal = tmp_path / "store-0/journal.jsonl"
        eventually(lambda: "load begins" in whats(journal))
        time.sleep(0.3)  # until the load has a worker
        client.close_session()
        with pytest.raises(errors.SessionEnded):
            load.result(timeout=30)
    assert passes(open_client(address), add)
    noted = whats(journal)
    assert noted.index("load ended") < noted.index("session ended")


def test_journal_records_run_end_before_session_end(tmp_path, start_agent, open_client, add_programs):
    address, add = start_agent(), add_programs["iree"]
    for _ in range(5):
        client = open_client(address)
        assert passes(client, add)
        client.close()  # immediately: the agent may not have logged the end of the run
    noted = whats(tmp_path / "store-0/journal.jsonl")
    runs = ["session opened", "load begins", "load ended", "invoke begins", "invoke ended", "session ended"]
    assert [what for what in noted if what in runs] == runs * 5


def test_agent_loads_programs_after_worker_forker_was_killed(start_agent, open_client, add_programs):
    add, client = add_programs["onnxruntime"], open_client(start_agent())
    add.push(client)
    forker = parent_of(add.load(client).worker_pid)
    add.load(client)
    # The worker prepared for the next program dies with the forker.
    eventually(lambda: len(children_of(forker)) == 3)
    os.kill(forker, signal.SIGKILL)
    eventually(lambda: not alive(forker))
    eventually(lambda: passes_by_now(client, add))


def test_killed_agent_stops_workers(start_agent, open_client, add_programs):
    address = start_agent()
    client = open_client(address)
    add_programs["iree"].push(client)
    pid = add_programs["iree"].load(client).worker_pid
    agent = subprocess.run(["pgrep", "-f", address], capture_output=True, text=True, check=True).stdout.split()
    for found in agent:
        os.kill(int(found), signal.SIGKILL)
    eventually(lambda: not alive(pid))
    with pytest.raises(errors.BoardLost):
        client.missing([])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def whats(journal: Path) -> list[str]:
    return [json.loads(line)["what"] for line in journal.read_text().splitlines()]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
