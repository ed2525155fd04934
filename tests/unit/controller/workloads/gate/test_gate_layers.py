"""Layers of a regression: slower, new, or unknown."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.histories import history_entry

from hil.controller.workloads.gate.comparing import layers
from hil.controller.workloads.gate.comparing.layers import LayerFinder
from hil.controller.workloads.gate.plan import GateCase
from hil.errors import BoardLost, HilError, UsageError

CASE = GateCase(history_entry("r2"), history_entry("r1"))


def make_operation(name: str, change: str, change_ns: float, kind: str = "compute") -> Any:
    return SimpleNamespace(name=name, change=change, change_ns=change_ns, kind=kind, a=None if "only" in change else 1)


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the slower layers as texts, with the reason, for compared operations or an error."""

    def run(*operations: Any, incomparable: str = "", error: HilError | None = None) -> tuple[list[str], str]:
        def profile(*_: Any) -> tuple[Any, Any]:
            if error is not None:
                raise error
            return None, None

        found = SimpleNamespace(ops=operations, incomparable=incomparable)
        monkeypatch.setattr(LayerFinder, "_profile_programs", profile)
        monkeypatch.setattr(layers, "compare_profiles", lambda old, new: found)
        unused: Any = None
        slower, reason = LayerFinder(unused, Path()).find_slower(CASE)
        return [f"{one.name} {one.change_ns:.0f}{' new' * one.is_new}" for one in slower], reason

    return run


def test_slower_and_new_layers_are_sorted_by_change(find: Any) -> None:
    operations = [
        make_operation("faster", "faster", -9),
        make_operation("conv", "slower", 5),
        make_operation("same", "", 9),
        make_operation("fc", "only in b", 7),
        make_operation("copy", "slower", 8, kind="runtime"),
    ]
    assert find(*operations) == (["fc 7 new", "conv 5"], "")


@pytest.mark.parametrize("error", [BoardLost("lost"), UsageError("lost")])
def test_error_of_profiling_is_only_a_reason(find: Any, error: HilError) -> None:
    assert find(error=error) == ([], "lost")


def test_layers_are_unknown_with_incomparable_profiles(find: Any) -> None:
    conv = make_operation("conv", "slower", 5)
    found, reason = find(conv, incomparable="the profiler adds 60% to A's runs")
    assert found == [] and reason.endswith(
        "the old program (A) with the new program (B): the profiler adds 60% to A's runs"
    )
    assert find() == ([], "no layer is significantly slower in the profiles")


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commit of a repository with the file m.onnx, in the working directory."""
    (tmp_path / "tree").mkdir()
    monkeypatch.chdir(tmp_path / "tree")
    Path("m.onnx").write_text("model")
    for words in (("init", "-q"), ("add", "m.onnx"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qma")):
        subprocess.run(("git", *words), check=True)
    return subprocess.run(("git", "rev-parse", "HEAD"), check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("run", ["r1", "../outside", "{}/outside", "a/b", ".."])
def test_exported_model_is_in_the_given_directory(commit: str, tmp_path: Path, run: str) -> None:
    """The run is a text from the history."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    entry = history_entry(run.format(tmp_path), key={"model": "m.onnx"}, commit=commit)
    found = layers._export_model(entry, scratch)
    assert found is not None and found.parent.parent == scratch
    assert found.read_text() == "model" and sorted(one.name for one in tmp_path.iterdir()) == ["scratch", "tree"]


@pytest.mark.parametrize("model", ["", "..", "../m.onnx", "a\0b", "\ud800", "x" * 5000])
def test_model_with_unusable_path_is_not_exported(commit: str, tmp_path: Path, model: str) -> None:
    assert layers._export_model(history_entry(key={"model": model}, commit=commit), tmp_path) is None
