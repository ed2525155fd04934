"""The lock that gives an agent exclusive use of a store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.agents import start_process, stop_process

from hil.agent.store_lock import StoreLock
from hil.errors import UsageError


def test_store_lock_excludes_second_agent_before_release(tmp_path):
    first = StoreLock(tmp_path / "store")
    with pytest.raises(UsageError, match=f"already in use by an agent .process {os.getpid()}.") as refused:
        StoreLock(tmp_path / "store")
    assert "--store" in refused.value.hint
    first.release()
    StoreLock(tmp_path / "store").release()


def test_store_lock_rejects_unusable_directory(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "store", Path("/proc/hil")):
        with pytest.raises(UsageError, match="cannot be used"):
            StoreLock(place)


@pytest.mark.ci
@pytest.mark.parametrize("module", ["hil.agent", "hil.sim"])
def test_agent_refuses_locked_store_and_reuses_store_after_kill(tmp_path, module):
    store = tmp_path / "store"
    more = ("--fault", "crash:times=2") if module == "hil.sim" else ()
    process, _ = start_process(module, f"unix:{tmp_path}/a.sock", store, *more)
    (store / "programs" / "mine").mkdir()
    before = sorted(store.rglob("*"))
    command = [sys.executable, "-m", module, "--listen", f"unix:{tmp_path}/b.sock", "--store", str(store)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert f"already in use by an agent (process {process.pid})" in second.stderr
    assert sorted(store.rglob("*")) == before
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    stop_process(process)
    third, _ = start_process(module, f"unix:{tmp_path}/b.sock", store)
    stop_process(third)
