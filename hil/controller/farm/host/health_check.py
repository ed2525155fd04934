"""A health job: the board must answer, and where hil has a program to try, run it and give the right answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hil.controller.devices.power import recover, switch
from hil.controller.farm.host.board_connection import BoardConnection
from hil.controller.farm.host.job_attempt import Told, failed
from hil.controller.farm.messages import Grant, JobResult
from hil.controller.pipeline.options import Job
from hil.controller.storage.isolated import Isolated
from hil.controller.workloads.board_checks import tiny_model
from hil.controller.workloads.run_job import run_job
from hil.core.files import write_atomic
from hil.core.runtimes import RUNTIMES
from hil.core.text import jsonable
from hil.errors import HilError

_MODEL = "tiny.onnx"


def revive(way: BoardConnection, grant: Grant, say: Callable[[str], None]) -> None:
    """Have the board answer: its power is cycled first where a check failed before, and when it stays silent.

    Raises:
        BoardError: whatever was done, it does not.
        UsageError: its config is wrong.
    """
    power = way.config.power
    if grant.spec.options.get("failures") and power.can("cycle"):
        say("its last check failed: power cycle")
        switch(power, "cycle", board=way.post.name)
        way.hang_up()
    recover(way.look, power, board=way.post.name, say=say)


def check(way: BoardConnection, board: Path, folder: Path, say: Callable[[str], None], isolated: Isolated) -> JobResult:
    """Run the tiny model.

    Args:
        way: the board's.
        board: its config file with the lease's fence.
        folder: an empty one.
        say: told of progress.
        isolated: a pool of workers.
    """
    runtime = way.config.runtime
    if runtime not in RUNTIMES or not RUNTIMES[runtime].from_onnx:
        return JobResult(0, "PASS", f"it answers; there is no program of hil's to try on {runtime}")
    try:
        record = run_job(
            Job((_model(way.site.folder, isolated, folder),), board=str(board), out=folder / "out"),
            screen=Told(say),
            isolated=isolated,
        )
    except HilError as error:
        return failed(error)
    (case,) = record["cases"]
    reason = "" if record["exit_code"] == 0 else f"a tiny model: {case['outcome']}: {case['reason']}"
    return JobResult(int(record["exit_code"]), case["outcome"], reason, record=jsonable(record))


def write_model(folder: str) -> str:
    """Write the model; in a worker of its own, so that what makes it is not kept in this process."""
    return str(tiny_model(Path(folder)))


def _model(kept: Path, isolated: Isolated, folder: Path) -> Path:
    path = kept / _MODEL
    if not path.exists():
        made = isolated.call(
            write_model,
            {"folder": str(folder)},
            timeout=60.0,
            log=folder / "log",
        )
        write_atomic(path, Path(made).read_bytes())
    return path
