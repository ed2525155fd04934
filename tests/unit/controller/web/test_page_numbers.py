"""Recompute the numbers of every page from the stored records, with code that does not use hil's.

Every page with tables needs a check in CHECKS, and every table with numbers is recomputed by one of the checks.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import onnx
import pytest
from starlette.testclient import TestClient
from support.fake_farm_client import FakeFarm, at, board, job
from support.generations import make_position, stored_generation
from support.histories import history_entry
from support.layer_models import residual_cnn
from support.nights import DAY, FIRST_NIGHT, write_nights
from support.page_tables import PageTables, check_columns, near, value_of
from support.rooflines import make_peaks
from support.shown_profile import example
from support.web import asking, write_record, write_run, write_suite
from support.web_pages import routes
from support.web_tensors import write_tensors

from hil.controller.analysis.profile.store import write_profile
from hil.controller.analysis.roofline.peak_store import keep_peaks
from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.store import HistoryStore
from hil.controller.web.text.table_views import has_tables
from hil.controller.workloads.triage.entries import make_entry
from hil.controller.workloads.triage.triage_file import NAME, write_triage

FAILING = ("FAIL", "COMPILE_ERROR")
NOW = float(int(time.time()))


@dataclass
class Stored:
    """Stored records, the client that reads the pages, and the labels of the tables."""

    root: Path
    client: TestClient
    series: str
    samples: list[list[float]]
    recomputed: set[str] = field(default_factory=set)
    numeric: dict[str, str] = field(default_factory=dict)  # label of a table with numbers -> page

    def open(self, path: str, **query: Any) -> PageTables:
        """Return the tables of a page."""
        return PageTables(self.text(path, **query))

    def text(self, path: str, **query: Any) -> str:
        address = f"{path}?{urlencode(query, doseq=True)}" if query else path
        answer = self.client.get(address)
        assert answer.status_code == 200, (address, answer.text[-2000:])
        self.numeric |= dict.fromkeys(PageTables(answer.text).numeric, address)
        return answer.text

    def rows(self, path: str, label: str, **query: Any) -> list[dict[str, str]]:
        """Return the rows of a table that the check recomputes."""
        self.recomputed.add(label)
        found = self.open(path, **query)[label]
        assert found, (path, label)
        return found

    def cases(self, session: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.root / session / "results.jsonl").read_text().splitlines()]

    def nights(self, board: str) -> list[list[dict[str, Any]]]:
        """Return the cases of each night of a board, oldest first."""
        return [self.cases(f"{board}-{number:02d}") for number in range(12)]


def output(**values: Any) -> dict[str, Any]:
    usual = {"name": "y", "passed": False, "shape": [2, 3], "dtype": "int32", "mismatches": 2, "elements": 1234567}
    return {**usual, "max_abs": 12345678, "max_ulp": 2048, "sqnr_db": 41.25, "max_rel": 0.125, "cosine": 0.5, **values}


LAYER = {"name": "conv", "op": "Conv", "nodes": ["stem"], "depth": 0}
LAYER |= {
    "isolated": {"outcome": "FAIL", "max_abs": 0.012345, "sqnr_db": 33.333, "outputs": [output(max_abs=0.012345)]}
}
STAGES = [{"name": "train", "outcome": "pass", "seconds": 12.34}, {"name": "run", "outcome": "pass", "seconds": 0.0567}]
SIDES = [
    {
        "name": "m",
        "label": "A",
        "outcome": "PASS",
        "iterations_per_s": 121.07,
        "times": {"p50_ns": 8.26e6, "p90_ns": 9e6},
    },
    {
        "name": "n",
        "label": "B",
        "outcome": "PASS",
        "iterations_per_s": 38.31,
        "times": {"p50_ns": 26.1e6, "p90_ns": 27e6},
    },
]
BENCH = {"ratio": 2.225, "interval": {"low": 2.2, "high": 2.25, "level": 0.99}, "verdict": "slower"}
WORST = [{"name": "s1", "board": 0.25, "reference": 0.75}]
# Device times of four sessions per side: the board of side b has two speeds.
OUTLIERS = {"a": [1.003e5, 1.001e5, 0.999e5, 0.998e5], "b": [2.003e5, 2.001e5, 5.9e5, 6.1e5]}
POSITION = make_position(3, kl=0.0021, max_abs=0.02, margin=0.0625, expected=70000, actual=70001)
CONSOLE = [
    {"host_ns": 7_000_000_000 + ns, "board_ns": 1_250_000_000 + ns, "time_s": 1.7e9, "text": "line"}
    for ns in (0, 1_530_000_000)
]
# Times of the farm: seconds before now.
GRANTED, ENDED, WAITED, RAN = 5400.0, 1800.0, 90.0, 600.0


def write_sessions(root: Path) -> None:
    write_nights(root)
    onnx.save(residual_cnn(), root / "net.onnx")
    case = {
        "id": "ints",
        "outcome": "FAIL",
        "host_s": 1.5,
        "outputs": [output()],
        "against": "cpu",
        "max_abs": 12345678,
    }
    other = [{"against": "other", "outcome": "FAIL", "outputs": [output(max_abs=3, mismatches=1)]}]
    case |= {"max_ulp": 2048, "device_p50_ns": 999_600.0, "iterations": 20, "timings": {"compile_s": 0.9996}}
    started = FIRST_NIGHT - 40 * DAY
    write_suite(root, "ints", [{**case, "other_references": other}], suite="ints", started=started)
    (root / "ints" / "consoles").mkdir()
    (root / "ints" / "consoles" / "pi.jsonl").write_text("\n".join(map(json.dumps, CONSOLE)))
    for side, times in OUTLIERS.items():
        for number, device_ns in enumerate(times):
            timed = {"id": "two speeds", "device_p50_ns": device_ns, "device_p90_ns": device_ns, "iterations": 20}
            write_suite(root, f"{side}{number}", [timed], suite="outliers", started=started + 60 * number)
    generation = stored_generation(positions=[POSITION]).to_json()
    write_suite(root, "prompts", [{"id": "chat", "generation": generation}], suite="prompts", started=started)
    write_record(root / "layers" / "bisect.json", {"layers": [LAYER], "model": "net.onnx", "created": started})
    study = {"experiment": "e", "compiler": "iree", "outcome": "pass", "steps": 12, "stages": STAGES}
    write_record(root / "study" / "study.json", {"rows": [study], "created": started})
    write_record(root / "bench" / "bench.json", {"sides": SIDES, "comparison": BENCH, "created": started})
    write_record(root / "eval" / "eval.json", {"scores": {"worst": WORST}, "created": started})
    write_record(root / "matrix" / "matrix.json", {"targets": [{"name": "pi"}], "created": started})
    write_run(root / "matrix", "pi", [{"outcome": "FAIL"}], created=started)
    key = {"kind": "run", "model": "m.onnx", "case": "m", "board": "sim", "runtime": "iree"}
    side = {"outcome": "PASS", "reason": "", "compiler": "iree", "runtime": "iree", "program": ""}
    sides = {name: {**side, "run": name, "commit": name, "p50_ns": p50} for name, p50 in (("old", 2e6), ("new", 3e6))}
    verdict = {"key": key, "series": "m", "verdict": "regressed", "reason": "slower", "suspect": "step", **sides}
    verdict |= {"ratio": 1.25, "interval": {"low": 1.24, "high": 1.26, "level": 0.99}, "rounds": 8}
    gate = {"schema": 1, "id": "gate", "folder": "", "created": started, "finished": True, "history": "h"}
    gate |= {"baseline": "main", "commit": "feed", "min_effect": 0.02, "budget_s": 300.0, "exit_code": 1}
    write_record(root / "gate" / "gate.json", {**gate, "fail_on": [], "unmeasured": [], "verdicts": [verdict]})
    values = np.arange(4, dtype=np.float32)
    write_tensors(root, {"y": values + np.float32([0, -0.5, 0, 2])}, {"y": values})
    write_profile(example("a", timed_ns=99_000, iterations=30, timed_runs=30), root / "profiles" / "a")
    keep_peaks(make_peaks(f32=4e9, memory=1e9), root / "profiles" / "a")
    write_profile(example("b", slower=2.0, timed_ns=99_000), root / "profiles" / "b")
    compiled = root / "profiles" / "c"
    compiled.mkdir()
    (compiled / "passes.csv").write_text("phase,depth,pass,wall_ms\nInput,0,Input,10\nInput,1,CSE,4\nFlow,0,Flow,30\n")
    head = "dispatch,onnx_nodes,share_estimate,time_us_estimate,flops_estimate,bytes_estimate,bound_estimate"
    (compiled / "dispatches.csv").write_text(f"{head}\nmain,Conv,0.5,10,1e6,2e6,compute\n")
    (compiled / "executables.csv").write_text("bytes\n7000\n")


def make_farm() -> FakeFarm:
    farm = FakeFarm()
    farm.boards = [board("pi", job="1", user="ada", since=at(NOW - 120)), board("nano")]
    done = {"queued_at": at(NOW - ENDED - WAITED), "started_at": at(NOW - ENDED), "finished_at": at(NOW - ENDED + RAN)}
    attempt = {"lease": 1, "board": "pi", "fence": 7, "granted_at": at(NOW - GRANTED), "ended_at": at(NOW - ENDED)}
    farm.jobs = [
        job("1", "running", queued_at=at(NOW - 300), started_at=at(NOW - 120)),
        job("2.1", queued_at=at(NOW - 3600)),
        job("2.2", queued_at=at(NOW - 3600)),
        job("3", "done", **done, attempts_made=[{**attempt, "started_at": None, "reason": "done"}]),
    ]
    farm.queue = [{**one, "position": place, "why": "busy"} for place, one in enumerate(farm.jobs[1:3], 1)]
    farm.happen("job.granted", board="pi", job="3", lease=1, at=at(NOW - GRANTED))
    farm.happen("lease.ended", board="pi", job="3", lease=1, at=at(NOW - ENDED))
    return farm


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp("numbers")
    root = folder / "runs"
    write_sessions(root)
    write_triage(root / NAME, [make_entry(case="ints", state="known", owner="ada")])
    dice = np.random.default_rng(3)
    samples = [(1e6 * dice.normal(1, 0.02, 40)).tolist() for _ in range(5)]
    with HistoryStore.open(folder / "history", create=True) as store:
        for number, one in enumerate(samples):
            values = {"created": FIRST_NIGHT + number * DAY, "iterations": 40, "samples_ns": one}
            store.add([history_entry(f"r{number}", p50_ns=float(np.median(one)), **values)])
        series = store.series()[0].id
    history = HistoryPlace(folder / "history")
    with make_farm().link() as link, asking(root, token="t", farm=link, history=history) as client:
        client.headers["authorization"] = "Bearer t"
        yield Stored(root, client, series, samples)


def check_home(stored: Stored) -> None:
    nights = stored.rows("/", "Nights")
    for row in nights:
        name = row["Suite and board"].split()[0]
        if name not in ("evk1", "evk2", "rpi5"):
            continue
        for number, cases in enumerate(stored.nights(name)):
            day = np.datetime64(int(FIRST_NIGHT + number * DAY), "s").astype("datetime64[D]")
            kinds = Counter({"PASS": "pass", "FAIL": "fail"}.get(case["outcome"], "error") for case in cases)
            cell = row[str(day)[5:]].split()
            assert dict(zip(cell[1::2], map(int, cell[::2]), strict=True)) == dict(kinds)
    sessions = stored.rows("/", "Table of sessions", board="evk1")
    for row, number in zip(sessions, reversed(range(12)), strict=True):
        cases = stored.nights("evk1")[number]
        failing = sum(case["outcome"] in FAILING for case in cases)
        check_columns(row, {"Cases": len(cases), "Failing": failing or ""})
        assert row["Started (UTC)"] == utc(FIRST_NIGHT + number * DAY)


def utc(seconds: float) -> str:
    return str(np.datetime64(int(seconds), "s")).replace("T", " ")


def check_session(stored: Stored) -> None:
    rows = stored.rows("/session", "Table of cases", id="evk1-09")
    known = {case["id"]: case for case in stored.cases("evk1-09")}
    assert [row["Outcome"] != "PASS" for row in rows] == sorted(
        (row["Outcome"] != "PASS" for row in rows), reverse=True
    )
    for row in rows:
        time_ns = known[row["Case"]].get("device_p50_ns")
        check_columns(row, {"Outcome": known[row["Case"]]["outcome"], "Device time": time_ns and time_ns / 1e9})
    (ints,) = stored.rows("/session", "Table of cases", id="ints")
    assert (ints["Max abs"], ints["ULP"], ints["Device time"]) == ("12345678", "2048", "1 ms")
    (layer,) = stored.rows("/session", "Layers", id="layers")[:1]
    check_columns(layer, {"Depth": 0, "Max abs isolated": 0.012345, "SQNR isolated, dB": 33.333})
    (row,) = stored.rows("/session", "Rows", id="study")
    check_columns(row, {"Steps": 12, "train": 12.34, "run": 0.0567})
    sides = stored.rows("/session", "Sides", id="bench")
    for shown, side in zip(sides, SIDES, strict=True):
        times = {name: value / 1e9 for name, value in side["times"].items()}
        check_columns(shown, {"Median": times["p50_ns"], "p90": times["p90_ns"], "A second": side["iterations_per_s"]})
    text = stored.text("/session", id="bench")
    quotient = SIDES[1]["times"]["p50_ns"] / SIDES[0]["times"]["p50_ns"]
    assert "B takes 2.225 times" in text and f"quotient of the medians in the table is {quotient:.4g}" in text
    (sample,) = stored.rows("/session", "Worst samples", id="eval")
    check_columns(sample, {"Board": 0.25, "Reference": 0.75})
    (target,) = stored.rows("/session", "Targets", id="matrix")
    check_columns(target, {"Cases": 1, "Failing": 1})
    (verdict,) = stored.rows("/session", "Verdicts", id="gate")
    check_columns(verdict, {"Ratio": 1.25, "Rounds": 8, "Baseline median": 2e-3, "New median": 3e-3})
    assert "Ratio is measured again in alternating rounds" in stored.text("/session", id="gate")


def check_case(stored: Stored) -> None:
    (row,) = stored.rows("/case", "Comparison of outputs", id="ints", case="ints")
    assert row["Mismatches"] == "2 of 1234567"
    assert (row["Max abs"], row["ULP"]) == ("12345678", "2048")  # integers keep all digits
    check_columns(row, {"Max rel": 0.125, "Cosine": 0.5, "SQNR dB": 41.25})
    (other,) = stored.rows("/case", "Comparison with other", id="ints", case="ints")
    assert (other["Mismatches"], other["Max abs"]) == ("1 of 1234567", "3")
    (position,) = stored.rows("/case", "Positions", id="prompts", case="chat")
    shown = {"Position": 3, "Reference's token": 70000, "Board's token": 70001, "KL": 0.0021, "Margin": 0.0625}
    check_columns(position, shown)
    assert "1 ms of 20 iterations" in stored.text("/case", id="ints", case="ints")


def times_of(nights: list[list[dict[str, Any]]]) -> dict[str, list[float]]:
    found = defaultdict(list)
    for cases in nights:
        for case in cases:
            if "device_p50_ns" in case:
                found[case["id"]].append(case["device_p50_ns"])
    return found


def check_compare(stored: Stored) -> None:
    sides = {"a": [f"evk1-{number:02d}" for number in range(5)], "b": [f"evk1-{number:02d}" for number in range(5, 9)]}
    before, after = (times_of([stored.cases(one) for one in names]) for names in sides.values())
    rows = stored.rows("/compare", "Device time", **sides, show="device_p50_ns", all=1)
    geometric = {
        name: np.exp(np.mean(np.log(after[name])) - np.mean(np.log(before[name]))) for name in before if name in after
    }
    assert len(rows) == len(geometric)
    for row in rows:
        name = row["Case"].split()[0]
        medians = np.median(before[name]) / 1e9, np.median(after[name]) / 1e9
        check_columns(row, {"Baseline": medians[0], "Compared": medians[1], "Change": geometric[name]})
        low, _, high = row["Interval of the ratio"].split()[:3]
        assert float(low) <= geometric[name] <= float(high) or len(after[name]) < 2
        assert row["Change"] == f"{geometric[name]:.3f}x"
        assert abs(medians[1] / medians[0] / geometric[name] - 1) < 1e-2
        assert row["Verdict"] == ("slower" if geometric[name] > 1.03 else "no difference")
    # If the ratio differs from the quotient of the shown medians, the row has the quotient too.
    (row,) = stored.rows(
        "/compare", "Device time", **{side: [f"{side}{number}" for number in range(4)] for side in "ab"}
    )
    quotient = np.median(OUTLIERS["b"]) / np.median(OUTLIERS["a"])
    ratio = np.exp(np.mean(np.log(OUTLIERS["b"])) - np.mean(np.log(OUTLIERS["a"])))
    assert row["Change"] == f"{ratio:.3f}x medians {quotient:.3f}x"
    assert value_of(row["Compared"]) / value_of(row["Baseline"]) == pytest.approx(quotient, rel=1e-3)
    broke = stored.open("/compare", **sides, show="broke")["Newly failing"]
    fails = [
        {case["id"] for one in names for case in stored.cases(one) if case["outcome"] in FAILING}
        for names in sides.values()
    ]
    assert {row["Case"] for row in broke} == fails[1] - fails[0]
    overview = stored.text("/compare", a="evk1-00", b="evk1-01")
    one, other = (times_of([stored.cases(f"evk1-0{number}")]) for number in (0, 1))
    ratios = [other[name][0] / one[name][0] for name in one]
    assert f"Device time {np.exp(np.mean(np.log(ratios))):.3f}x" in overview
    # Results below the threshold are folded with their number, the largest difference first.
    assert f"{len(ratios)} cases without a reported change" in overview
    folded = stored.rows("/compare", "Device time: no change reported", a="evk1-00", b="evk1-01")
    shown = [value_of(row["Change"]) for row in folded]
    assert shown == [near(ratio) for ratio in sorted(ratios, key=lambda ratio: -abs(np.log(ratio)))[: len(shown)]]
    assert f"{len(ratios)} cases with the same outcome" in overview


def check_history(stored: Stored) -> None:
    for row in stored.rows("/history", "Table of suites"):
        if row["Suite"] == "nets":
            check_columns(row, {"Sessions": 12, "Last (UTC)": utc(FIRST_NIGHT + 11 * DAY)})
    nights = stored.nights("evk1")
    address = {"suite": "nets", "board": "evk1"}
    rows = stored.rows("/history", "Sessions", **address)
    for row, cases in zip(rows, reversed(nights), strict=True):
        failing = sum(case["outcome"] in FAILING for case in cases)
        times = [case["device_p50_ns"] for case in cases if "device_p50_ns" in case]
        total = sum(times) / 1e9 if len(times) == 18 else None
        check_columns(row, {"Cases": len(cases), "Failing": failing, "Device time": total})
        assert value_of(row["Passing"]) == pytest.approx(100 - 100 * failing / len(cases), abs=0.05)
        assert row["Board"] == "evk1"
    chart = read_chart(stored.text("/history", **address))
    assert chart["x"] == [FIRST_NIGHT + number * DAY for number in range(12)]  # in time, not by index
    mixed = stored.text("/history", suite="nets")
    assert "sessions on 3 boards" in mixed and "board=evk2" in mixed
    identity = {"case": "digits_layer_Conv_2", "board": "evk1", "suite": "nets"}
    times = [next(case["device_p50_ns"] for case in cases if case["id"] == identity["case"]) for cases in nights]
    samples = stored.rows("/history", "Samples", **identity)
    for row, time_ns in zip(samples, reversed(times), strict=True):
        check_columns(row, {"device time": time_ns / 1e9, "Iterations": 20})
    text = stored.text("/history", **identity)
    before, after = (float(np.exp(np.median(np.log(part)))) for part in (times[:5], times[5:]))
    assert f"({after / before:.3f}x)" in text
    assert '<a href="/history?suite=nets&amp;flow=iree&amp;board=evk1">' in text
    drawn = read_chart(text)
    assert drawn["values"] == times and drawn["x"] == chart["x"]


def read_chart(text: str) -> dict[str, Any]:
    """Return the data of the first chart of a page."""
    return dict(json.loads(unescape(text.partition('data-history="')[2].partition('"')[0])))


def check_regressions(stored: Stored) -> None:
    times = {name: times_of(stored.nights(name)) for name in ("evk1", "evk2", "rpi5")}
    rows = stored.rows("/history/regressions", "Regressions", since="2023-01-01", what="slower")
    timed = {name for name in times["evk1"] if len(times["evk1"][name]) == 12}
    assert timed <= {row["Case"] for row in rows}
    for row in rows:
        assert row["Board"] == "evk1"
        name = row["Case"]
        before, after = (np.exp(np.median(np.log(part))) for part in (times["evk1"][name][:5], times["evk1"][name][5:]))
        check_columns(row, {"Before": before / 1e9, "After": after / 1e9, "Since (UTC)": utc(FIRST_NIGHT + 5 * DAY)})
        assert value_of(row["After"].partition("s ")[2]) == near(after / before)


def check_cause(stored: Stored) -> None:
    page = stored.text("/", since="night:2023-11-17")
    links = [unescape(one.partition('"')[0]) for one in page.split('href="/cause?')[1:]]
    checked = 0
    for link in links:
        rows = PageTables(stored.text(f"/cause?{link}")).found["Cases of the cause"]
        for row in rows:
            if not row["Before"]:
                continue
            times = times_of(stored.nights(row["Board"]))[row["Case"].split()[0]]
            before, after = (np.exp(np.median(np.log(part))) for part in (times[:5], times[5:]))
            check_columns(row, {"Before": before / 1e9, "After": after / 1e9})
            assert value_of(row["After"].partition("s ")[2]) == near(after / before)
            checked += 1
    stored.recomputed.add("Cases of the cause")
    assert checked > 5


def check_series(stored: Stored) -> None:
    (row,) = stored.rows("/series", "Table of series")
    check_columns(row, {"Runs": 5, "Median": np.median(stored.samples[-1]) / 1e9})
    for shown, samples in zip(stored.rows("/series", "Runs", id=stored.series), reversed(stored.samples), strict=True):
        low, middle, high = np.quantile(samples, [0.25, 0.5, 0.75])
        check_columns(shown, {"Median": middle / 1e9, "Iterations": 40})
        assert value_of(shown["Spread"]) == pytest.approx(100 * (high - low) / middle, abs=0.06)
        ends = [value_of(part) for part in shown["99 % interval"].split(" to ")]
        assert ends[0] < middle / 1e9 < ends[1] and min(samples) / 1e9 <= ends[0] * 1.005
    chart = read_chart(stored.text("/series", id=stored.series))
    assert chart["x"] == [FIRST_NIGHT + number * DAY for number in range(5)]
    assert chart["values"] == pytest.approx([np.median(one) for one in stored.samples])


def check_gates(stored: Stored) -> None:
    (row,) = stored.rows("/gates", "Table of gates")
    check_columns(row, {"Exit code": 1, "Started (UTC)": utc(FIRST_NIGHT - 40 * DAY)})


def check_triage(stored: Stored) -> None:
    assert "1 of 1 entries" in stored.text("/triage")


def check_boards(stored: Stored) -> None:
    pi, nano = sorted(stored.rows("/boards", "Table of boards"), key=lambda row: row["Board"], reverse=True)
    assert seconds(pi["Since"]) == pytest.approx(time.time() - (NOW - 120), abs=60) and nano["Since"] == ""
    uses = stored.rows("/boards", "Use of boards")
    assert sum(float(row["pi"]) for row in uses) == pytest.approx(100 * (GRANTED - ENDED) / 3600, abs=2)
    assert {float(row["nano"]) for row in uses} == {0.0}
    chart = read_farm_chart(stored.text("/boards"))
    assert np.diff([*chart["times"], chart["until"]]) == pytest.approx(np.full(24, 3600.0))


def read_farm_chart(text: str) -> dict[str, Any]:
    return dict(json.loads(unescape(text.partition('data-chart="')[2].partition('"')[0])))


def seconds(text: str) -> float:
    """Return a duration such as ``1h30m`` or ``2m`` in seconds."""
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    number, total = "", 0.0
    for letter in text.replace(" ", ""):
        if letter in units:
            total, number = total + float(number) * units[letter], ""
        else:
            number += letter
    return total


def check_board(stored: Stored) -> None:
    (stay,) = stored.rows("/board", "Leases", name="pi")
    assert (stay["Lease"], stay["From (UTC)"]) == ("1", utc(NOW - GRANTED))
    assert seconds(stay["Held"]) == pytest.approx(GRANTED - ENDED, abs=60)


def check_queue(stored: Stored) -> None:
    waiting = stored.rows("/queue", "Waiting jobs")
    assert [row["Place"] for row in waiting] == ["1", "2"]
    assert all(seconds(row["Waiting"]) == pytest.approx(time.time() - (NOW - 3600), abs=90) for row in waiting)
    (running,) = stored.rows("/queue", "Running jobs")
    assert [seconds(running[name]) for name in ("Running", "Waited")] == pytest.approx(
        [time.time() - (NOW - 120), 180], abs=61
    )
    (ended,) = stored.rows("/queue", "Recently ended jobs")
    assert seconds(ended["Ran"]) == pytest.approx(RAN, abs=1) and ended["Ended (UTC)"] == utc(NOW - ENDED + RAN)
    waits = [row for row in stored.rows("/queue", "Queue times") if row["Jobs"] != "0"]
    assert sum(int(row["Jobs"]) for row in waits) == 2
    assert {round(seconds(row["Median"])) for row in waits} <= {90, 135, 180}


def check_job(stored: Stored) -> None:
    jobs = stored.rows("/job", "Jobs of the submission", name="2")
    waited = time.time() - (NOW - 3600)
    assert [seconds(row["Waited"]) for row in jobs] == pytest.approx([waited, waited], abs=90)
    (lease,) = stored.open("/job", name="3")["Leases"]
    assert (lease["Lease"], lease["Fence"]) == ("1", "7")
    assert seconds(lease["Held"]) == pytest.approx(GRANTED - ENDED, abs=60)


def check_traces(stored: Stored) -> None:
    assert len(stored.open("/traces")["Table of profiles"]) == 3


def operations(slower: float = 1.0) -> dict[str, float]:
    """Return the time of each operation per iteration in seconds, as in the written profiles."""
    return {"matmul_0": 60e-6, "matmul_1": (20 * slower + 10) * 1e-6, "buffer.copy": 10e-6}


def check_roofline(stored: Stored) -> None:
    """Check the roofline for peaks of 4 Gop/s and 1 GB/s."""
    work = {"whole": (150_000, 12_000), "matmul_0": (120_000, 6000), "matmul_1": (30_000, 6000)}
    times = {**operations(), "whole": 99e-6}
    rows = {
        row["operation"].split()[0]: row
        for row in stored.rows("/trace", "Table of the roofline", profile="0/profiles/a")
    }
    assert set(rows) == {*times}
    for name, (flops, moved) in work.items():
        spent = times[name]
        # The two calls of matmul_1 have an intensity of 5 each, above the ridge of 4.
        shortest = max(flops / 4e9, moved / 1e9)
        expected = {"Time": spent, "Work": flops, "Moved": moved, "op/byte": flops / moved, "Speed": flops / spent}
        check_columns(rows[name], {**expected, "Bound by": "compute"})
        assert value_of(rows[name]["Attained"]) == pytest.approx(100 * shortest / spent, abs=0.05)
        assert value_of(rows[name]["Interval"]) == pytest.approx(100 * shortest / spent, abs=0.05)
    assert rows["buffer.copy"]["Attained"] == ""


def check_trace(stored: Stored) -> None:
    times = operations()
    found = stored.rows("/trace", "Table of operations", profile="0/profiles/a")
    rows = {row["operation"].split()[0]: row for row in found}
    for name, spent in times.items():
        calls = 2 if name == "matmul_1" else 1
        check_columns(rows[name], {"Time per run": spent, "Calls per run": calls, "Mean": spent / calls})
        assert value_of(rows[name]["Share"]) == pytest.approx(100 * spent / sum(times.values()), abs=0.05)
    check_roofline(stored)
    text = stored.text("/trace", profile="0/profiles/a")
    assert "+1.0 % compared with the timed run" in text and "complete call without the profiler" in text
    phases = stored.rows("/trace", "Table of phases", profile="0/profiles/c")
    assert [(value_of(row["Time"]), value_of(row["Share"])) for row in phases] == [(0.01, 25.0), (0.03, 75.0)]
    passes = {row["Pass"]: row for row in stored.rows("/trace", "Table of passes", profile="0/profiles/c")}
    check_columns(passes["CSE"], {"Time": 4e-3, "Share": 10.0, "Runs": 1})
    (operation,) = stored.rows("/trace", "Table of operations", profile="0/profiles/c")
    check_columns(operation, {"Share": 50.0, "Time": 1e-5, "Work": 1e6, "Moved": 2e6})
    before, after = operations(), operations(2.0)
    changes = {
        row["Operation"]: row for row in stored.rows("/trace", "Table of changes", a="0/profiles/a", b="0/profiles/b")
    }
    check_columns(changes["timed run"], {"A": 99e-6, "B": 99e-6, "B / A": 1.0})
    assert "include the profiler's overhead" in stored.text("/trace", a="0/profiles/a", b="0/profiles/b")
    assert value_of(changes["total"]["A"]) == near(sum(before.values()))
    assert value_of(changes["total"]["B"]) == near(sum(after.values()))


def check_tensors(stored: Stored) -> None:
    reference = np.arange(4, dtype=np.float64)
    difference = np.array([0, -0.5, 0, 2.0])
    page = stored.open("/tensors", id="run", case="model")
    stored.recomputed |= {"Statistics", "Worst elements", "Value statistics", *page.numeric}
    statistics = {row["Statistic"]: row["Now"] for row in page["Statistics"]}
    assert value_of(statistics["max abs"]) == np.abs(difference).max()
    sqnr = 10 * np.log10((reference**2).sum() / (difference**2).sum())
    assert value_of(next(text for title, text in statistics.items() if title.startswith("SQNR"))) == near(sqnr)
    worst = [value_of(row["Difference"]) for row in page["Worst elements"]]
    assert worst[:2] == [2.0, 0.5]


def check_graph(stored: Stored) -> None:
    rows = {row["Node"].split()[0]: row for row in stored.rows("/graph", "Table of nodes", id="layers")}
    check_columns(rows["stem"], {"Max abs": 0.012345, "Outcome": "FAIL"})
    (scope,) = stored.rows("/graph", "Name scopes", id="layers")
    names = [node.name for node in onnx.load(stored.root / "net.onnx").graph.node]
    check_columns(scope, {"Scope": "block", "Nodes": sum(name.startswith("block/") for name in names), "Failing": ""})


def check_search(stored: Stored) -> None:
    (row,) = stored.rows("/search", "Table of found cases", q="case:speeds")
    check_columns(row, {"Case": "two speeds", "Results": sum(map(len, OUTLIERS.values()))})


def check_console(stored: Stored) -> None:
    rows = stored.rows("/console", "Console lines", id="ints", file="consoles/pi.jsonl")
    for number, (row, line) in enumerate(zip(rows, CONSOLE, strict=True), 1):
        after = (line["host_ns"] - CONSOLE[0]["host_ns"]) / 1e9
        check_columns(row, {"Line": number, "After": after, "Board clock": line["board_ns"] / 1e9})


CHECKS: Mapping[str, Callable[[Stored], None]] = {
    "/": check_home,
    "/board": check_board,
    "/boards": check_boards,
    "/case": check_case,
    "/cause": check_cause,
    "/compare": check_compare,
    "/console": check_console,
    "/gates": check_gates,
    "/graph": check_graph,
    "/history": check_history,
    "/history/regressions": check_regressions,
    "/job": check_job,
    "/queue": check_queue,
    "/search": check_search,
    "/series": check_series,
    "/session": check_session,
    "/tensors": check_tensors,
    "/trace": check_trace,
    "/traces": check_traces,
    "/triage": check_triage,
}


@pytest.mark.parametrize("path", CHECKS)
def test_page_shows_numbers_of_records(stored: Stored, path: str) -> None:
    CHECKS[path](stored)


def test_every_page_has_a_check() -> None:
    # `/graph/node-data` is a response for a script, and `/tensors/failing` redirects to `/tensors`.
    others = {"/graph/node-data", "/tensors/failing"}
    pages = {path for path in routes() if has_tables(path)} - others
    assert pages == set(CHECKS), "add a check of the page's numbers"


def test_every_table_with_numbers_is_recomputed(stored: Stored) -> None:
    for check in CHECKS.values():
        check(stored)
    missing = {label: page for label, page in stored.numeric.items() if label not in stored.recomputed}
    assert missing == {}
