from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import DIGITS
from support.profiles import profile_iree, profile_onnxruntime

from hil.controller.analysis.profile.collect import check_folder, iter_iree_rows, iter_onnxruntime_rows
from hil.controller.analysis.profile.compilation.estimate import estimate
from hil.controller.analysis.profile.runtimes.iree_profile import read_ireeprof
from hil.controller.analysis.profile.runtimes.onnxruntime_profile import read_onnxruntime
from hil.controller.analysis.profile.sites import Sites, dispatch_sites
from hil.controller.models.importers import import_model
from hil.core.timeline import OpRow
from hil.errors import UsageError

WARMUP, RUNS = 1, 3


@pytest.fixture(params=["local-task", "local-sync"])
def iree(request: pytest.FixtureRequest, settings: dict[str, Any], tmp_path: Path) -> Iterator[list[OpRow]]:
    run = profile_iree(DIGITS / "digits_cnn.onnx", tmp_path, settings, device=request.param, runs=WARMUP + RUNS)
    given = {name: settings[name] for name in ("isolated", "timeout", "log")}
    events = read_ireeprof(run.profile, folder=tmp_path, warmup=WARMUP, iterations=RUNS, **given)
    sites = dispatch_sites(run.model, run.artifact, cache=settings["cache"], **given)
    notes: list[str] = []
    yield list(iter_iree_rows(events, sites, run="night", board="sim", notes=notes))
    assert not notes


@pytest.mark.ci
def test_iree_rows_join_events_nodes_and_estimates(iree: list[OpRow]) -> None:
    assert {(row.run, row.board, row.runtime, row.clock) for row in iree} == {("night", "sim", "iree", "board")}
    assert [row.start_ns for row in iree] == sorted(row.start_ns for row in iree)
    for iteration in range(RUNS):
        computed = [row for row in iree if row.iteration == iteration and row.kind == "compute"]
        assert [row.onnx_nodes for row in computed] == [
            ("conv1",),
            ("conv1", "relu1"),
            ("pool1",),
            ("conv2", "relu2"),
            ("pool2",),
            ("fc1",),
        ]
        assert computed[1].op_types == ("Conv", "Relu")
        assert computed[1].shapes == "10x10xf32, 16x3x3xf32 -> 16x8x8xf32"
        assert all(row.flops is not None and row.bytes and row.bound_estimate == "memory" for row in computed)
        executed = [row for row in iree if row.iteration == iteration and row.op == "execute"]
        assert sum(row.duration_ns for row in computed) <= 4 * sum(row.duration_ns for row in executed)
    others = [row for row in iree if row.kind == "runtime"]
    assert {"alloca", "execute"} <= {row.op for row in others}
    assert not [row for row in others if row.onnx_nodes or row.flops is not None or row.bound_estimate]


def test_iree_rows_without_sites_keep_times_and_add_note(settings: dict[str, Any], tmp_path: Path) -> None:
    run = profile_iree(DIGITS / "digits_cnn.onnx", tmp_path, settings, runs=RUNS)
    given = {name: settings[name] for name in ("isolated", "timeout", "log")}
    events = read_ireeprof(run.profile, folder=tmp_path, iterations=RUNS, **given)
    notes: list[str] = []
    rows = list(iter_iree_rows(events, Sites((), {}), run="r", board="b", notes=notes))
    assert len(rows) == len(events)
    assert not [row for row in rows if row.onnx_nodes]
    (note,) = notes
    assert note.startswith("6 dispatches, such as digits_cnn$async_dispatch_0_slow_memcpy, have no known call site")


def test_onnxruntime_rows_join_kernels_nodes_and_estimates(settings: dict[str, Any], tmp_path: Path) -> None:
    model = import_model(DIGITS / "digits_cnn.onnx", isolated=settings["isolated"])
    given = {name: settings[name] for name in ("isolated", "timeout", "log")}
    path = profile_onnxruntime(model.path, tmp_path, WARMUP + RUNS)
    events = read_onnxruntime(path, model, warmup=WARMUP, **given)
    rows = list(
        iter_onnxruntime_rows(events, estimate(model, cache=settings["cache"], **given), run="night", board="sim")
    )
    assert {row.iteration for row in rows} == set(range(RUNS))
    assert {(row.run, row.board, row.runtime) for row in rows} == {("night", "sim", "onnxruntime")}
    conv = next(row for row in rows if row.onnx_nodes == ("conv1", "relu1") and row.flops is not None)
    assert conv.op_types == ("Conv", "Relu")
    assert conv.flops == 2 * 16 * 64 * 9 + 16 * 64
    assert conv.tiles is None
    # A kernel that only reorders values does not claim the computation of its nodes.
    moving = [row for row in rows if row.op.startswith("Reorder")]
    assert not [row for row in moving if row.flops is not None]


def test_check_folder_creates_directory(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "out", "run")
    assert (tmp_path / "new" / "out").is_dir()


@pytest.mark.parametrize(("kind", "held"), [("run", "profile.json"), ("run", "raw"), ("compile", "passes.csv")])
def test_check_folder_accepts_older_profile_of_same_kind(tmp_path: Path, kind: str, held: str) -> None:
    (tmp_path / held).touch()
    check_folder(tmp_path, kind)


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("run", ["model.onnx"]),
        ("run", ["passes.csv"]),
        ("compile", ["ops.csv"]),
        ("compile", ["passes.csv", "ops.csv"]),
    ],
)
def test_check_folder_rejects_directory_with_other_files(tmp_path: Path, kind: str, held: list[str]) -> None:
    for name in held:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="contains other files"):
        check_folder(tmp_path, kind)


def test_check_folder_reports_unusable_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot use .* as profile directory"):
        check_folder(tmp_path / "file" / "below", "run")
