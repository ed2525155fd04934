"""Provide a farm of simulated boards for the benchmarks, and its jobs: bundles of a small program with many cases."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import compile_mlir
from hil.bundles import Bundle, MethodTestCase, MethodTestSuite
from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.job_files import pack_bundle
from hil.controller.farm.local.local_farm import LocalFarm, UpOptions
from hil.controller.farm.messages import JobSpec, Submission
from hil.controller.farm.paths import HOME_VARIABLE, choose_farm_address
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.lab.farm import JobResultRow
from hil.core.files import digest_file
from hil.core.results import Artifact
from hil.core.tensors import TensorSpec

SOURCE = """
func.func @main(%x: tensor<16xf32>) -> tensor<16xf32> {
  %y = arith.addf %x, %x : tensor<16xf32>
  return %y : tensor<16xf32>
}
"""
_ONLINE_S = 600.0


@dataclass(frozen=True)
class Lab:
    """Running farm.

    Attributes:
        client: connection to the farm.
        url: URL of the database.
        boards: names of the boards.
        up_s: seconds from the start of the host until all boards are checked and online.
    """

    client: FarmClient
    url: str
    boards: tuple[str, ...]
    up_s: float

    def order(self, specs: Sequence[JobSpec], board: str = "") -> list[str]:
        """Submit jobs. Return their names."""
        return self.client.submit(Submission("bench", tuple(specs), board=board))[1]

    def results(self, names: Sequence[str]) -> list[JobResultRow]:
        """Wait until jobs have ended. Return the results, which must all be passes."""
        for _ in self.client.follow(names):
            pass
        submission = names[0].partition(".")[0]
        found: list[JobResultRow] = self.client.ask("result", name=submission)
        assert [one.outcome for one in found] == ["PASS"] * len(names), found
        return found

    def upload(self, path: Path) -> JobSpec:
        """Upload a bundle to the farm's store. Return the spec of its job."""
        spec, parcel = pack_bundle(Job(models=(path,)), "iree", (), None)
        self.client.upload(parcel.list_uploads())
        return spec


@contextlib.contextmanager
def lab(boards: int, *faults: str) -> Iterator[Lab]:
    """Start a farm of simulated boards, and wait until all are checked and online."""
    with tempfile.TemporaryDirectory(prefix="hil-bench-") as folder, contextlib.ExitStack() as stack:
        home = Path(folder) / "home"
        before = os.environ.get(HOME_VARIABLE)
        os.environ[HOME_VARIABLE] = str(home)
        stack.callback(_restore, before)
        stack.enter_context(LocalFarm(home, UpOptions(), lambda text: None, threading.Event()))
        words = ["--sim", str(boards), *(word for fault in faults for word in ("--sim-fault", fault))]
        begun = time.monotonic()
        with (Path(folder) / "host.log").open("wb") as log:
            host = subprocess.Popen([sys.executable, "-m", "hil", "farm", "host", *words], stdout=log, stderr=log)
        stack.callback(_end, host)
        client = stack.enter_context(FarmClient(choose_farm_address()))
        deadline = time.monotonic() + _ONLINE_S
        while sum(board.state == "online" for board in client.ask("boards")) < boards:
            if time.monotonic() > deadline:
                raise TimeoutError((Path(folder) / "host.log").read_text()[-2000:])
            time.sleep(0.2)
        names = tuple(board.name for board in client.ask("boards"))
        yield Lab(client, embedded_url(home), names, time.monotonic() - begun)


def make_bundle(folder: Path, cases: int) -> Path:
    """Write a bundle with a small program and ``cases`` cases."""
    source, path = folder / "double.mlir", folder / f"double-{cases}.hilb"
    source.write_text(SOURCE)
    program = compile_mlir(source)
    specs = (TensorSpec("x", "float32", (16,)),), (TensorSpec("y", "float32", (16,)),)
    digests = {program.name: digest_file(program)}
    artifact = Artifact("iree", program.name, {program.name: program}, digests, "main", "iree", (), *specs)
    inputs = [np.full(16, number, np.float32) for number in range(cases)]
    made = [MethodTestCase([x], [x + x]) for x in inputs]
    Bundle.create(artifact, [MethodTestSuite("main", made)]).save(path)
    return path


def _restore(home: str | None) -> None:
    os.environ.pop(HOME_VARIABLE, None)
    if home is not None:
        os.environ[HOME_VARIABLE] = home


def _end(host: subprocess.Popen[bytes]) -> None:
    host.terminate()
    try:
        host.wait(60)
    except subprocess.TimeoutExpired:
        host.kill()
        host.wait()


def embedded_url(home: Path) -> str:
    """Return the URL of the database in a farm's home directory."""
    from hil.controller.farm.database.embedded_database import EmbeddedDatabase

    return EmbeddedDatabase(home / "postgres").url
