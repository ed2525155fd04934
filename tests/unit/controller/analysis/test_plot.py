"""Images of output differences: their data, and plots for every kind of tensor."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hil.compare.verdict import compare_output
from hil.controller.analysis import plot
from hil.controller.analysis.plot import Picture, plot_difference
from hil.core.install_hints import make_install_command
from hil.core.tensors import DTYPES, parse_dtype
from hil.errors import StorageError, UsageError


def draw(path: Path, actual: Any, reference: Any) -> None:
    actual, reference = np.asarray(actual), np.asarray(reference)
    plot_difference(path, "y", actual, reference, compare_output("y", actual, reference))


@pytest.mark.parametrize("place", [(0, 0), (999, 0), (0, 1299), (999, 1299), (500, 77)])
def test_picture_preserves_single_mismatch_when_downsampled(place: tuple[int, int]) -> None:
    b = np.ones((1000, 1300), np.float32)
    a = b.copy()
    a[place] += 3
    picture = Picture(a, b, None)
    assert picture.cells.shape == (256, 256) and picture.shown == (1000, 1300)
    assert np.count_nonzero(picture.cells) == 1 and picture.cells.max() == 3.0
    assert picture.cells[place[0] * 256 // 1000, place[1] * 256 // 1300] == 3.0
    assert picture.equal == b.size - 1 and picture.errors.sum() == 1


def test_picture_flattens_leading_dimensions() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((2, 3, 5)) for _ in range(2))
    picture = Picture(a, b, None)
    assert picture.shown == (6, 5) and not picture.folded
    np.testing.assert_allclose(picture.cells, np.abs(a - b).reshape(6, 5))


def test_picture_folds_long_vector_into_square() -> None:
    b = np.zeros(1000)
    a = b.copy()
    a[427] = 1
    picture = Picture(a, b, None)
    assert picture.folded and picture.shown == (32, 32)
    assert picture.cells[427 // 32, 427 % 32] == 1.0
    assert np.isnan(picture.cells[31, 8:]).all() and not np.isnan(picture.cells[31, :8]).any()
    assert not Picture(np.zeros(10), np.zeros(10), None).folded


def test_picture_marks_nonfinite_mismatch() -> None:
    a = np.array([[math.nan, math.inf, -math.inf, 1.0, math.nan, 2.0]])
    b = np.array([[math.nan, math.inf, math.inf, math.nan, 1.0, 2.5]])
    picture = Picture(a, b, None)
    assert picture.cells.tolist() == [[0, 0, math.inf, math.inf, math.inf, 0.5]]
    assert (picture.equal, picture.nonfinite, picture.errors.sum()) == (2, 3, 1)
    assert picture.points.tolist() == [[2.0], [2.5]]


def test_picture_histogram_uses_quarter_decades() -> None:
    errors = np.array([5e-324, 1e-3, 1.1e-3, 1.5, 1.7e308])
    picture = Picture(errors, np.zeros(5), None)
    bins = np.flatnonzero(picture.errors) / 4 - 324
    assert picture.errors.sum() == 5 and list(bins) == [-323.5, -3.0, 0.0, 308.0]


def test_picture_separates_integers_equal_in_float64() -> None:
    picture = Picture(np.array([2**53 + 1, -(2**63)]), np.array([2**53, 2**63 - 1]), None)
    assert picture.cells.tolist() == [[1.0, 2.0**64]] and picture.equal == 0


def test_picture_samples_worst_and_largest_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "_SCATTER_POINTS", 10)
    b = np.zeros(1001)
    a = b.copy()
    a[507], a[703] = 1, 5
    points = Picture(a, b, 507).points
    assert (1.0, 0.0) in set(zip(*points.tolist(), strict=True)) and (5.0, 0.0) in set(
        zip(*points.tolist(), strict=True)
    )
    assert points.shape[1] <= 13


def test_picture_reads_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "CHUNK", 7)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 3, (9, 11)).astype(np.float32) for _ in range(2))
    picture = Picture(np.asfortranarray(a), b, None)
    np.testing.assert_array_equal(picture.cells, np.abs(a - b))
    assert picture.points.shape == (2, 99) and picture.equal == np.count_nonzero(a == b)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "string"])
def test_picture_accepts_every_numeric_dtype(dtype: str) -> None:
    b = np.ones((3, 4)).astype(parse_dtype(dtype))
    a = b.copy()
    a[1, 2] = 0.25  # 0 as an integer
    picture = Picture(a, b, None)
    assert (
        picture.cells[1, 2] == np.abs(float(a[1, 2].real) - 1)
        and np.count_nonzero(picture.cells) == picture.errors.sum()
    )
    assert picture.equal == 12 - picture.errors.sum() and picture.points.shape == (2, 12)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "complex64", "int4"])
def test_plot_draws_dtypes_unknown_to_matplotlib(dtype: str, tmp_path: Path) -> None:
    draw(tmp_path / "y.png", np.zeros((3, 4)).astype(parse_dtype(dtype)), np.ones((3, 4)).astype(parse_dtype(dtype)))
    assert_png(tmp_path / "y.png")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("actual", "reference"),
    [
        (1.0, 2.0),
        (np.zeros((0, 3)), np.zeros((0, 3))),
        (np.zeros(0), np.zeros(0)),
        (np.ones(5), np.ones(5)),
        (np.full(4, math.nan), np.ones(4)),
        (np.array([1.7e308, 1.0]), np.array([-1.7e308, 1.0])),
        (np.array([5e-324, 0.0]), np.array([0.0, 0.0])),
        (np.ones((2, 2), np.float16), np.ones((2, 2), np.float32)),
        (np.arange(300.0), np.arange(300.0)[::-1]),
    ],
    ids=["scalar", "empty", "empty vector", "equal", "all NaN", "huge", "tiny", "dtypes differ", "vector"],
)
def test_plot_draws_odd_tensors(actual: Any, reference: Any, tmp_path: Path) -> None:
    draw(tmp_path / "y.png", actual, reference)
    assert_png(tmp_path / "y.png")


def assert_png(path: Path) -> None:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 400


def test_plot_title_shows_statistics(tmp_path: Path) -> None:
    a, b = np.array([1.0, 2.0, 3.5]), np.array([1.0, 2.0, 3.0])
    draw(tmp_path / "y.svg", a, b)
    found = compare_output("y", a, b)
    title = plot._format_title("y", found)
    assert title.startswith("FAIL   y   3 float64   1 of 3 out of tolerance (33.3 %)")
    assert f"max abs 0.5   max rel 0.1667   ULP {found.max_ulp:.4g}" in title and "dB" in title
    assert "<svg" in (tmp_path / "y.svg").read_text()


@pytest.mark.parametrize(
    ("actual", "reference"),
    [
        (np.ones((2, 3)), np.ones((3, 2))),
        (np.array(["a"], object), np.array(["b"], object)),
        (np.array(["a"], object), np.array([1.0])),
    ],
    ids=["shapes", "strings", "string and number"],
)
def test_plot_rejects_outputs_without_difference(actual: Any, reference: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot draw output y: "):
        draw(tmp_path / "y.png", actual, reference)
    assert not list(tmp_path.iterdir())


def test_plot_without_matplotlib_names_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError) as caught:
        draw(tmp_path / "y.png", np.ones(3), np.zeros(3))
    assert make_install_command("plot") in caught.value.hint


def test_plot_reports_unwritable_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        draw(tmp_path / "missing" / "y.png", np.ones(3), np.zeros(3))
    with pytest.raises(UsageError, match="cannot draw"):
        draw(tmp_path / "y.nonsense", np.ones(3), np.zeros(3))


def test_plot_imports_matplotlib_only_when_drawing() -> None:
    code = "import sys, hil.controller.analysis.plot, hil.compare.verdict; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
