"""Pictures of profiles."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.shown_profile import example

from hil.controller.analysis.profile.diff import OpDiff, ProfileDiff
from hil.controller.analysis.profile.show import plot_diff, plot_profile
from hil.controller.analysis.profile.totals import GROUPS, RunTimes
from hil.controller.records.commands.stored import OperationCost
from hil.core.install_hints import make_install_command
from hil.errors import StorageError, UsageError


@pytest.fixture(autouse=True)
def texts_in_svg_stay_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")


def texts(path: Path) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def difference(*ops: OpDiff, incomparable: str = "") -> ProfileDiff:
    times = RunTimes(100_000.0, 100_000.0, 9)
    timed, total = (changed(name, 100, 110) for name in ("timed run", "total"))
    return ProfileDiff("a", "b", 0.95, 0.05, times, times, timed, incomparable, total, ops)


def changed(name: str, a: float, b: float, change: str = "slower") -> OpDiff:
    costs = [OperationCost(p50_ns=value * 1e3, mean_ns=value * 1e3, share=0.5, iterations=9) for value in (a, b)]
    return OpDiff(name, "compute", ("op",), ("op",), *costs, ratio=b / a, low=1.0, high=9.0, change=change)


@pytest.mark.parametrize("by", GROUPS)
def test_plot_profile_shows_names_and_times(tmp_path, by):
    plot_profile(tmp_path / "p.svg", example(), by=by)
    found = texts(tmp_path / "p.svg")
    names = {"op": "matmul_0 (fc1, relu1)", "node": "fc1, relu1", "type": "Gemm+Relu"}
    told = ("us per run under the profiler (+25%)", "us of the median iteration (+25%)")
    for text in (names[by], "60.0%", "operations per byte", *told):
        assert text in found
    assert "digits_cnn on sim, iree 3.13.0 on local-task, timed p50 80 us" in found


@pytest.mark.ci
def test_plot_profile_png_height_fits_bars(tmp_path):
    few, many = tmp_path / "few.png", tmp_path / "many.png"
    rows = [replace(row, op=f"{row.op}_{n}") for n in range(30) for row in example().rows]
    plot_profile(few, example())
    plot_profile(many, replace(example(), rows=rows), top=40)
    heights = [int.from_bytes(path.read_bytes()[20:24], "big") for path in (few, many)]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (few, many))
    assert heights[1] > 2 * heights[0]


def test_plot_profile_without_estimates_omits_roofline(tmp_path):
    rows = [replace(row, flops=None, bytes=None, bound_estimate="") for row in example().rows]
    plot_profile(tmp_path / "p.svg", replace(example(), rows=rows))
    assert "operations per byte" not in texts(tmp_path / "p.svg")


def test_plot_profile_draws_markup_names_literally(tmp_path):
    rows = [replace(row, op="$\\frac{a}$ <b> _x_", onnx_nodes=("n$1$",)) for row in example().rows]
    plot_profile(tmp_path / "p.svg", replace(example(), rows=rows, model="a$b$"))
    found = texts(tmp_path / "p.svg")
    assert "$\\frac{a}$ <b> _x_ (n$1$)" in found and "n$1$" in found
    assert any(text.startswith("a$b$ on sim") for text in found)


def test_plot_profile_accepts_zero_durations(tmp_path):
    rows = [replace(row, duration_ns=0, start_ns=5) for row in example().rows]
    plot_profile(tmp_path / "p.png", replace(example(), rows=rows))
    assert (tmp_path / "p.png").stat().st_size


def test_plot_diff_shows_ratios(tmp_path):
    ops = [changed("conv1", 10, 25), changed("fc2", 9, 3, "faster"), changed("relu", 1, 1, "")]
    plot_diff(tmp_path / "d.svg", difference(*ops))
    found = texts(tmp_path / "d.svg")
    verdict = "B is slower than A: the timed run takes 1.1 times as long"
    for text in ("conv1 x2.5", "fc2 x0.333", "relu x1", "a -> b", verdict):
        assert text in found


def test_plot_diff_shows_shares_for_incomparable_times(tmp_path):
    plot_diff(tmp_path / "d.svg", difference(changed("conv1", 10, 25), incomparable="the profiler adds 300% to B"))
    found = texts(tmp_path / "d.svg")
    assert {"conv1", "A", "B"} <= set(found) and "conv1 x2.5" not in found
    assert "% of the run's operations; times are not comparable: the profiler adds 300% to B" in found


def test_plots_report_missing_data_file_and_library(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no operations to draw") as caught:
        plot_profile(tmp_path / "p.png", replace(example(), rows=[], notes=["the runtime has no profiler"]))
    assert caught.value.hint == "the runtime has no profiler"
    with pytest.raises(UsageError, match="no operations to draw"):
        plot_diff(tmp_path / "p.png", difference())
    with pytest.raises(UsageError, match=r"p\.xyz") as caught:
        plot_profile(tmp_path / "p.xyz", example())
    assert ".png" in caught.value.hint
    with pytest.raises(StorageError, match="cannot write"):
        plot_profile(tmp_path / "missing" / "p.png", example())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="require matplotlib") as caught:
        plot_profile(tmp_path / "p.png", example())
    assert make_install_command("plot") in caught.value.hint
