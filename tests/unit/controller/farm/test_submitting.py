"""Test the arguments of `hil farm submit`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hil.controller.farm.client import submitting
from hil.controller.farm.client.submitting import Workload, _build_workload, choose_kind
from hil.controller.farm.job_files import JobFiles
from hil.controller.farm.messages import BoardRequest, JobSpec, Kind, Submission
from hil.controller.pipeline.settings.options import Job
from hil.errors import UsageError, VersionMismatch


def test_kind_of_suggests_suite_for_unknown_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert choose_kind(["@models"]) is Kind.SUITE
    with pytest.raises(UsageError, match="suite, model, bundle or directory 'models' not found") as caught:
        choose_kind(["models"])
    assert "did you mean '@models'? @operators, @models, or" in caught.value.hint
    (tmp_path / "models").mkdir()
    assert choose_kind(["models"]) is Kind.SUITE


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.onnx", Kind.RUN), ("a.hilb", Kind.BUNDLE), ("a.bpte", Kind.SUITE), ("call_0.flagfile", Kind.SUITE)],
)
def test_kind_of_recognizes_file_types(tmp_path: Path, name: str, kind: Kind) -> None:
    (tmp_path / name).write_text("")
    assert choose_kind([str(tmp_path / name)]) is kind


class OldFarm:
    """Client of a gateway that ignores the boards after the first."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def upload(self, files: dict[str, Path]) -> int:
        return 0

    def submit(self, order: Submission, trace: str) -> tuple[int, list[str]]:
        return 7, ["7"]

    def ask(self, what: str, name: str) -> SimpleNamespace:
        return SimpleNamespace(more=[])

    def do(self, action: str, name: str) -> None:
        self.cancelled.append(f"{action} {name}")


def test_submit_cancels_job_if_gateway_ignores_further_boards() -> None:
    farm, load = OldFarm(), Workload("link test", (JobSpec(Kind.COMMAND),), {})
    with pytest.raises(VersionMismatch, match="does not support several boards"):
        submitting.submit(farm, load, {"more": (BoardRequest(board="b"),)}, say=print)
    assert farm.cancelled == ["cancel 7"]
    assert submitting.submit(farm, load, {}, say=print).jobs == ["7"]


def test_submission_titles_jobs_by_model() -> None:
    job = Job(models=(Path("nets/digits.onnx"), Path("nets/saved/saved_model.pb"), Path("relu.onnx")))
    load = _build_workload(job, [(JobSpec(Kind.RUN), JobFiles()) for _ in job.models])
    assert load.title == "digits and 2 more"
    assert [spec.title for spec in load.specs] == ["digits", "saved", "relu"]
    assert [spec.options["model_path"] for spec in load.specs] == [str(path) for path in job.models]
    target = load.for_target("sim-f16")
    assert (target.title, target.specs[2].title) == ("digits and 2 more sim-f16", "relu sim-f16")


def test_submission_sends_state_of_working_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "is_tree_dirty", lambda: True)
    job = Job(models=(Path("nets/digits.onnx"),))
    (spec,) = _build_workload(job, [(JobSpec(Kind.RUN, {"seed": 1}), JobFiles())]).specs
    assert spec.options == {"seed": 1, "dirty": True, "model_path": "nets/digits.onnx"}
