"""Who has a store, and for how long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.agents import start_process, stop_process

from hil.agent.store import StoreLock
from hil.errors import UsageError


def test_a_store_is_one_agents_until_it_is_released(tmp_path):
    first = StoreLock(tmp_path / "store")
    with pytest.raises(UsageError, match=f"in use by another agent .process {os.getpid()}.") as refused:
        StoreLock(tmp_path / "store")
    assert "--store" in refused.value.hint
    first.release()
    StoreLock(tmp_path / "store").release()


def test_a_folder_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "store", Path("/proc/hil")):
        with pytest.raises(UsageError, match="cannot be used"):
            StoreLock(place)


@pytest.mark.parametrize("module", ["hil.agent", "hil.sim"])
def test_a_second_agent_on_a_store_leaves_it_alone_and_a_killed_ones_is_free(tmp_path, module):
    store = tmp_path / "store"
    more = ("--fault", "crash:times=2") if module == "hil.sim" else ()
    process, _ = start_process(module, f"unix:{tmp_path}/a.sock", store, *more)
    (store / "programs" / "mine").mkdir()
    before = sorted(store.rglob("*"))
    command = [sys.executable, "-m", module, "--listen", f"unix:{tmp_path}/b.sock", "--store", str(store)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert f"in use by another agent (process {process.pid})" in second.stderr
    assert sorted(store.rglob("*")) == before
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    stop_process(process)
    third, _ = start_process(module, f"unix:{tmp_path}/b.sock", store)
    stop_process(third)
