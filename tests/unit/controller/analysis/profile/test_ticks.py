"""Ticks of emulated boards are never shown as times: in the terminal, as JSON, on pages, and in traces."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.made_profiles import BEGIN, MS, profile
from support.web import asking

from hil.controller.analysis.profile.runtimes.firmware_profile import FirmwareSteps
from hil.controller.analysis.profile.sites import DispatchSite
from hil.controller.analysis.profile.store import TRACE, read_profile, write_profile
from hil.controller.cli.main import cli
from hil.core.timeline import Profile, Span, Ticks
from hil.formats.operations import Operation

SITES = (DispatchSite("main$0_conv", ("conv", "relu"), flops=100, bytes=10), DispatchSite("main$1_matmul", ("fc",)))
TYPES = {"conv": "Conv", "relu": "Relu", "fc": "Gemm"}
# A time as hil writes it: 12.3 us, 4 ms, 1 s.
TIME = re.compile(r"\d (?:ns|us|µs|ms|s)\b")
NUMBERS = (70_000, 1_000, 30_001)


def steps(*runs: tuple[int, int, int]) -> FirmwareSteps:
    """Return runs of a convolution, a copy, and a product, with the given ticks."""
    made = []
    for number, ticks in enumerate(runs):
        for name, count in zip(("main$0_conv", "copy", "main$1_matmul"), ticks, strict=True):
            made.append(Operation(name, number, 0, 40 * count, is_overhead=name == "copy", ticks=count))
    return FirmwareSteps(made, SITES, TYPES)


def make_profile(ticks: Ticks | None = None, **more: Any) -> Profile:
    stages = [Span("run", BEGIN, BEGIN + 5 * MS)]
    return profile(stages=stages, ticks=ticks or steps(NUMBERS).sum_ticks(1.25), **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(make_profile(), tmp_path / "emulated")
    return tmp_path / "emulated"


def show(*words: object) -> str:
    done = CliRunner().invoke(cli, ["profile", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_ticks_are_medians_over_runs() -> None:
    found = steps((100, 10, 50), (104, 12, 50), (300, 11, 51)).sum_ticks(0.5)
    assert (found.iterations, found.p50, found.instructions_per_tick) == (3, 166, 0.5)
    conv, copy, product = found.operations
    assert (conv.p50, conv.minimum, conv.maximum, conv.calls) == (104, 100, 300, 1)
    assert (conv.onnx_nodes, conv.op_types, conv.flops) == (("conv", "relu"), ("Conv", "Relu"), 100)
    assert (copy.kind, copy.onnx_nodes, product.kind) == ("runtime", (), "compute")
    assert sum(one.share for one in found.operations) == pytest.approx(1)


def test_rows_of_a_real_board_have_times_and_nodes() -> None:
    rows = list(steps(NUMBERS).iter_rows(runtime="mcu", run="r", board="b", warmup=0))
    assert [(row.op, row.duration_ns, row.onnx_nodes) for row in rows] == [
        ("main$0_conv", 2_800_000, ("conv", "relu")),
        ("copy", 40_000, ()),
        ("main$1_matmul", 1_200_040, ("fc",)),
    ]


def test_stored_profile_preserves_ticks(folder: Path) -> None:
    found = read_profile(folder)
    assert found.ticks == make_profile().ticks
    assert list(found.rows) == []


@pytest.mark.parametrize("by", ["op", "node", "type"])
def test_profile_show_lists_ticks_without_times(folder: Path, by: str) -> None:
    text = show("show", folder, "--by", by)
    assert "101,001 ticks" in text and "70,000" in text
    assert "1 tick is 1.25 instructions of the emulated CPU, and not a time" in " ".join(text.split())
    assert TIME.search(text) is None
    document = json.loads(show("show", folder, "--by", by, "--json"))
    assert document["totals"] == [] and document["timed_p50_ns"] is document["profiled_p50_ns"] is None
    assert [one["p50"] for one in document["ticks"]["operations"]] == [70_000, 1_000, 30_001]


@pytest.mark.parametrize(
    "words",
    [
        ["show", "{}", "--plot", "x.svg"],
        ["diff", "{}", "{}"],
        ["export", "{}", "--node-data", "x.json"],
        ["roofline", "{}"],
    ],
)
def test_commands_for_times_reject_ticks(folder: Path, tmp_path: Path, words: list[str]) -> None:
    filled = [str(tmp_path / word) if word.startswith("x.") else word.format(folder) for word in words]
    done = CliRunner().invoke(cli, ["profile", *filled])
    assert "has ticks instead of times" in str(done.exception)
    assert not list(tmp_path.glob("x.*"))


def test_trace_contains_no_ticks(folder: Path) -> None:
    content = gzip.decompress((folder / TRACE).read_bytes())
    assert b"its operations have ticks, which are not times" in content
    assert b"run" in content
    assert not [name for name in (b"main$0_conv", b"main$1_matmul", b"iteration 0") if name in content]


def test_page_and_csv_list_ticks_without_times(tmp_path: Path) -> None:
    write_profile(make_profile(), tmp_path / "profiles" / "emulated")
    write_profile(make_profile(), tmp_path / "profiles" / "other")
    with asking(tmp_path) as client:
        page = client.get("/trace?profile=0/profiles/emulated")
        main = page.text.partition("<main")[2].partition("</main>")[0]
        assert "70,000" in main or "70000" in main
        assert TIME.search(re.sub(r"<[^>]*>", " ", main)) is None
        answer = client.get("/trace.csv?profile=0/profiles/emulated&by=node")
        rows = list(csv.DictReader(io.StringIO(answer.text)))
        assert [(row["name"], float(row["p50"])) for row in rows] == [
            ("conv, relu", 70_000),
            ("fc", 30_001),
            ("(runtime)", 1_000),
        ]
        assert not [name for name in rows[0] if name.endswith("_ns")]
        document = client.get("/api/v1/trace?profile=0/profiles/emulated").json()
        assert document["operations"] == [] and len(document["ticks"]["operations"]) == 3
        compared = client.get("/trace?a=0/profiles/emulated&b=0/profiles/other")
        assert "has ticks instead of times" in compared.text
