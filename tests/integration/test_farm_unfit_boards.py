"""A farm with full, read-only and stuck boards completes all jobs and blames no model."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.farm_hosts import running_host, states
from support.farms import Server, fresh
from support.gateways import running_gateway, token_of
from support.waiting import eventually

from hil.controller.farm.job_files import pack_run
from hil.controller.farm.messages import JobSpec, Submission
from hil.controller.farm.settings import FarmSettings
from hil.controller.models.importers import import_model
from hil.controller.pipeline.settings.options import Job
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.boards import load_board

BOARDS = ("good", "full", "read-only", "stuck", "resettable")
UNFIT = ("full", "read-only", "stuck")
TERMS = FarmSettings(beat_s=0.2, lease_s=30.0, owner_s=30.0, quarantine_s=600.0)
# Larger than the space that a full board can free.
WEIGHTS_MIB, DISK_MIB = 8, 48
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Disk:
    """A small file system for a board."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")

    def fill(self) -> None:
        """Fill the file system."""
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as file:
            while file.write(b"x" * 65536):
                pass

    def make_read_only(self) -> None:
        """Reject new files; open files stay writable, as on a failing disk."""
        for folder in ("blobs", "partial", "programs"):
            place = str(self.folder / "store" / folder)
            subprocess.run(["mount", "--bind", place, place], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)

    def close(self) -> None:
        subprocess.run(["umount", "-R", "-l", str(self.folder)], check=True)


class SimulatedBoard:
    """An agent process with simulated devices."""

    def __init__(self, folder: Path, name: str, store: Path) -> None:
        self._folder, self._name, self._store = folder, name, store
        self._process: subprocess.Popen[bytes]
        self.reset = folder / f"{name}.reset"  # created by the recovery step
        self.config = folder / f"{name}.toml"
        self.config.write_text(
            f'[board]\nhw_type = "sim"\nruntime = "onnxruntime"\n[connection]\naddress = "unix:{folder}/{name}.sock"\n'
            f'[recover]\nsteps = [{{ command = ["touch", "{self.reset}"] }}]\n'
        )

    def start(self, *faults: str) -> None:
        words = ["--listen", f"unix:{self._folder}/{self._name}.sock", "--store", str(self._store)]
        words += ["--name", self._name, "--config", str(load_board("sim").config.path)]
        words += [word for fault in faults for word in ("--fault", fault)]
        with (self._folder / f"{self._name}.log").open("ab") as log:
            command = [sys.executable, "-m", "hil.sim", *words]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


@pytest.fixture
def boards() -> Iterator[tuple[dict[str, SimulatedBoard], dict[str, Disk]]]:
    if os.geteuid():
        pytest.skip("only root mounts file systems")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hil-unfit-")))
        disks = {}
        for name in ("full", "read-only"):
            disks[name] = Disk(folder / f"disk-{name}")
            stack.callback(disks[name].close)
        made = {}
        for name in BOARDS:
            store = disks[name].folder / "store" if name in disks else folder / f"store-{name}"
            made[name] = SimulatedBoard(folder, name, store)
            made[name].start()
            stack.callback(made[name].stop)
        yield made, disks


def large_model(path: Path) -> Path:
    """Write a model whose weights exceed the space of a full board."""
    weights = np.random.default_rng(1).standard_normal((16, WEIGHTS_MIB << 14), np.float32)
    values = [helper.make_tensor_value_info(*one) for one in (("x", 1, [16]), ("y", 1, [1]))]
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["products"]),
        helper.make_node("ReduceMax", ["products"], ["y"], axes=[0]),
    ]
    graph = helper.make_graph(nodes, "large", values[:1], values[1:], [numpy_helper.from_array(weights, "weights")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_farm_with_unfit_boards_completes_all_jobs(
    boards: tuple[dict[str, SimulatedBoard], dict[str, Disk]], database_server: Server, tmp_path: Path
) -> None:
    made, disks = boards
    words = [word for board in made.values() for word in ("--board", str(board.config))]
    with (
        fresh(database_server, database_server.make_farm) as db,
        running_gateway(db, tmp_path, settings=TERMS) as gateway,
        running_host(gateway, token_of(db, "lab"), "lab", *words) as host,
        gateway.client(token_of(db, "anna")) as farm,
    ):
        eventually(lambda: states(farm) == dict.fromkeys(BOARDS, "online"), lambda: host.said, within_s=150)
        disks["full"].fill()
        disks["read-only"].make_read_only()
        for name, fault in (("stuck", "wedge:how=hang"), (BOARDS[-1], f"wedge:reset={made[BOARDS[-1]].reset}")):
            made[name].stop()
            made[name].start(fault)
        with Isolated(1) as isolated:
            job = Job((large_model(tmp_path / "large.onnx"),), runtime="onnxruntime", timeout=10.0)
            spec, parcel = pack_run(job, import_model(job.models[0], isolated=isolated))
        farm.upload(parcel.list_uploads())
        specs: tuple[JobSpec, ...] = (spec,) * 60
        submission, names = farm.submit(Submission("large", specs, max_attempts=2))
        for _ in farm.follow(names):
            pass
        results = farm.ask("result", name=str(submission))
        assert Counter(one.outcome for one in results) == {"PASS": 60}, [one.reason for one in results]
        eventually(
            lambda: states(farm) == {**dict.fromkeys(BOARDS, "online"), **dict.fromkeys(UNFIT, "quarantined")},
            lambda: str(farm.ask("boards")),
            within_s=240,
        )
        reasons = {board.name: board.reason for board in farm.ask("boards")}
        assert "jobs need 16" in reasons["full"], reasons
        assert "read-only" in reasons["read-only"], reasons
        assert "TIMEOUT" in reasons["stuck"] and "tried `touch" in reasons["stuck"], reasons
        assert any("recovered by `touch" in event.reason for event in farm.ask("events", board=BOARDS[-1]))
