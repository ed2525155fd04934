"""A bisection as a table and as a picture."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.bisect_records import bisect_record, layer_finding

from hil.compare.verdict import compare_output
from hil.controller.analysis.bisect.result import make_finding, plot_growth, print_bisection
from hil.controller.pipeline.records.record import record_comparison
from hil.controller.records.decisions.bisect import BisectFinding, BisectRecord, LayerFinding
from hil.core.install_hints import make_install_command
from hil.core.results import Outcome
from hil.errors import StorageError, UsageError


def finding(off: float) -> BisectFinding:
    output = record_comparison(compare_output("y", np.ones(4) + off, np.ones(4)))
    return make_finding(Outcome.PASS if output.passed else Outcome.FAIL, output.reason, outputs=[output])


def change_findings(
    record: BisectRecord, layers: Sequence[LayerFinding], **models: BisectFinding | None
) -> BisectRecord:
    """Return a copy with other findings, and the verdict on them."""
    whole = models.get("whole", record.whole)
    return bisect_record(layers, whole, artifact_model=record.artifact_model, notes=record.notes)


def bisection(count: int = 4) -> BisectRecord:
    """Errors grow from layer to layer; the second last does not compile alone, the last is not judged."""
    errors = [0.0, *(1e-9 * 10**number for number in range(1, count - 2))]
    layers = [
        layer_finding(f"Conv_$layer{depth}", "Conv", (f"$layer{depth}",), depth, ("y",), finding(off / 2), finding(off))
        for depth, off in enumerate(errors)
    ]
    broken = make_finding(Outcome.COMPILE_ERROR, "no such operator", stage="compile")
    layers.append(layer_finding("Odd_odd", "Odd", ("odd",), count, ("y",), broken, finding(0.5)))
    unjudged = make_finding(Outcome.SKIP, "atol says nothing")
    layers.append(layer_finding("Neg_neg", "Neg", ("neg",), count, ("z",), unjudged, unjudged))
    return bisect_record(layers, finding(0.5), artifact_model="received.onnx", notes=["so it is"])


def shown(width: int | None, found: BisectRecord) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=width is not None, color_system=None)
    print_bisection(console, found)
    return file.getvalue()


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_table_drops_numbers_before_names_when_narrow(width):
    found = bisection()
    lines = shown(width, change_findings(found, found.layers[:2])).splitlines()
    assert max(map(len, lines[1:4])) <= width
    for number, layer in enumerate(found.layers[:2]):
        (line,) = [line for line in lines if layer.name in line]
        assert line.split()[:2] == [str(number), layer.name] and line.split().count("PASS") == 2
    assert ("max abs" in lines[1]) is (width >= 60) and ("SQNR dB" in lines[1]) is (width >= 80)


def test_table_shows_isolated_and_cumulative_per_layer():
    lines = shown(None, bisection()).splitlines()
    assert "compiled from received.onnx" in lines[0]
    assert lines[2].split() == ["0", "Conv_$layer0", "Conv", "$layer0", "PASS", "0", "inf", "PASS", "0", "inf"]
    assert lines[4].split() == ["4", "Odd_odd", "Odd", "odd", "COMPILE_ERROR", "-", "-", "FAIL", "0.5", "6.02"]
    text = "\n".join(lines)
    assert "Odd_odd (Odd, node odd), isolated: COMPILE_ERROR: no such operator" in text
    assert "Neg_neg, isolated: not judged: atol says nothing" in text
    assert "unchanged model: 4 of 4 values out of tolerance" in text
    assert "note: so it is" in text
    assert text.index("COMPILE_ERROR: no such") < text.index("not judged")
    assert lines[-1].startswith("the isolated layers that ran are correct; in the whole model")


@pytest.mark.ci
def test_table_and_plot_show_nonfinite_mismatch(tmp_path: Path):
    output = record_comparison(compare_output("y", np.array([1, np.nan, np.inf]), np.array([1.0, 2, 3])))
    assert (output.max_abs, output.sqnr_db) == (0, "inf")
    wrong = make_finding(Outcome.FAIL, output.reason, outputs=[output])
    found = change_findings(bisection(), (layer_finding("Log_log", "Log", ("log",), 0, ("y",), wrong, finding(0.0)),))
    assert shown(None, found).splitlines()[2].split() == [
        "0", "Log_log", "Log", "log", "FAIL", "NaN/Inf", "-", "PASS", "0", "inf",
    ]  # fmt: skip
    assert "2 values NaN or infinite on one side only" in shown(None, found)
    plot_growth(tmp_path / "growth.svg", found)
    assert (tmp_path / "growth.svg").read_text().count("off the scale (NaN/Inf)") == 2
    plot_growth(tmp_path / "growth.svg", bisection())
    assert "off the scale" not in (tmp_path / "growth.svg").read_text()


def test_table_and_plot_show_blind_outcome_without_error(tmp_path: Path):
    output = record_comparison(compare_output("y", np.full(2, np.nan), np.full(2, np.nan)))
    blind = make_finding(Outcome.BLIND, output.reason, outputs=[output])
    layers = (layer_finding("Log_log", "Log", ("log",), 0, ("y",), blind, finding(0.0)),)
    found = change_findings(bisection(), layers, whole=blind)
    text = shown(None, found)
    assert "Log_log, isolated: not judged: every value is NaN on both sides" in text
    assert "unchanged model: every value is NaN on both sides" in text
    assert text.splitlines()[-1] == "no layer is wrong, cumulative; cannot judge Log_log (Log, node log)"
    crosses = []
    for name, outcome in (("blind", Outcome.BLIND), ("error", Outcome.RUN_ERROR)):
        layer = layers[0].replace(isolated=make_finding(outcome))
        plot_growth(tmp_path / f"{name}.svg", change_findings(found, (layer,)))
        crosses.append((tmp_path / f"{name}.svg").read_text().count("stroke-width: 2"))
    assert crosses[0] < crosses[1], "a cross is what could not be run"


def test_table_merges_layers_with_same_reason():
    lost = make_finding(Outcome.BOARD_LOST, "the board went away")
    layers = [layer_finding(f"Op_{name}", "Op", (name,), 0, (name,), lost) for name in "abcdefghijkl"]
    lines = shown(None, change_findings(bisection(), layers, whole=None)).splitlines()
    (line,) = (line for line in lines if "went away" in line)
    assert line.startswith("Op_a (Op, node a), Op_b (Op, node b), ")
    assert line.endswith(" and 8 more, isolated: BOARD_LOST: the board went away")


@pytest.mark.parametrize("width", [80, 140])
def test_table_fits_terminal_width(width):
    table = shown(width, bisection()).splitlines()[1:6]
    assert all(len(line.rstrip()) <= width for line in table)
    assert ("nodes" in table[0]) == (width == 140)
    assert "cumulative max abs SQNR dB" in " ".join(table[0].split())


@pytest.mark.ci
@pytest.mark.parametrize("count", [3, 4, 60])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_growth_draws_few_and_many_layers(tmp_path: Path, count: int, suffix: str):
    path = tmp_path / f"growth.{suffix}"
    plot_growth(path, bisection(count))
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "svg" and count == 4:
        text = path.read_text()
        assert "Odd_odd" in text and "isolated" in text and "cumulative" in text


def test_plot_growth_accepts_missing_findings(tmp_path: Path):
    nothing = bisection()
    layers = [layer_finding(one.name, one.op, one.nodes, one.depth, one.tensors) for one in nothing.layers]
    plot_growth(tmp_path / "none.png", bisect_record(layers))
    plot_growth(tmp_path / "empty.png", bisect_record([]))
    for name in ("none.png", "empty.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_plot_growth_reports_cause_of_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match="cannot draw"):
        plot_growth(tmp_path / "growth.nonsense", bisection())
    with pytest.raises(UsageError, match=r"directory .* not found"):
        plot_growth(tmp_path / "missing" / "growth.png", bisection())
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(StorageError, match="cannot write"):
        plot_growth(tmp_path / "taken.png", bisection())
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError) as caught:
        plot_growth(tmp_path / "growth.png", bisection())
    assert make_install_command("plot") in caught.value.hint
