"""`hil compare` without a plot or without comparable values: the verdict does not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.run_records import run_case

from hil.controller.storage.runs import RunStore, store_tensors

F32 = np.float32


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., str]:
    """Return a function that stores a run (case -> output -> tensor) and returns its ID."""

    def make(**cases: dict[str, np.ndarray]) -> str:
        run = RunStore(tmp_path / "hil-runs").create("made", {})
        run.record.cases = [
            run_case(name=name, outputs=store_tensors(run.folder, name, "outputs", outputs))
            for name, outputs in cases.items()
        ]
        run.save()
        return run.id

    return make


@pytest.mark.parametrize(
    ("actual", "reference", "code", "why"),
    [
        (np.zeros(3, F32), np.zeros(4, F32), 1, "output: shape 3"),
        (np.array(["a"]), np.array(["b"]), 1, "output: 1 of 1 value differs"),
        (np.array(["a"]), np.array(["a"]), 0, "values are strings"),
    ],
    ids=["shapes", "other strings", "same strings"],
)
def test_compare_reports_verdict_without_drawable_plot(hil, tmp_path, actual, reference, code, why):
    np.save(tmp_path / "a.npy", actual)
    np.save(tmp_path / "b.npy", reference)
    ended = hil("compare", "a.npy", "b.npy", "--plot", "diff.png")
    assert (ended.code, ended.out.split()[0]) == (code, "FAIL" if code else "PASS")
    assert "no plot written: output: " in ended.err and why in ended.err
    assert "plot in" not in ended.out and not (tmp_path / "diff.png").exists()
    as_json = hil("compare", "a.npy", "b.npy", "--plot", "diff.png", "--json").document
    assert (as_json["plot"], as_json["exit_code"]) == (None, code)


def test_compare_skips_plot_for_different_output_counts(hil, store, tmp_path):
    one, two = store(m={"y": np.zeros(3, F32)}), store(m={"y": np.zeros(3, F32), "z": np.zeros(3, F32)})
    ended = hil("compare", one, two, "--plot", "diff.png")
    assert ended.code == 1
    assert "1 output, the reference has 2" in ended.out and "1 output, the reference has 2" in ended.err


def test_compare_plots_worst_drawable_output(hil, store, tmp_path):
    actual = {"odd": np.zeros(3, F32), "fine": np.ones(3, F32), "bad": np.full(3, 2, F32)}
    # Outputs in another order: compare pairs them by name.
    reference = {"bad": np.full(3, 1, F32), "fine": np.ones(3, F32), "odd": np.zeros(4, F32)}
    ended = hil("compare", store(m=actual), store(m=reference), "--plot", "diff.svg")
    assert ended.code == 1 and "plot in      diff.svg" in ended.out
    drawn = (tmp_path / "diff.svg").read_text()
    assert "FAIL   bad   3 float32   3 of 3 out of tolerance" in drawn and "max abs 1 " in drawn


@pytest.mark.parametrize("swapped", [False, True])
def test_compare_fails_case_without_outputs_in_a_run(hil, store, swapped):
    y = {"y": np.ones(3, F32)}
    # A crashed case has no outputs.
    runs = [store(m=y, crashed=y, other=y), store(m=y, crashed={}, other=y)]
    ended = hil("compare", *(reversed(runs) if swapped else runs), "--json")
    assert ended.code == ended.document["exit_code"] == 1
    verdicts = ended.document["verdicts"]
    assert {name: one["outcome"] for name, one in verdicts.items()} == {"m": "PASS", "other": "PASS", "crashed": "FAIL"}
    assert verdicts["crashed"]["reason"] == f"only {runs[0]} has outputs for this case"
    shown = hil("compare", *runs)
    assert shown.code == 1 and f"only {runs[0]} has outputs for this case" in shown.out
