"""Test page tables as CSV: same rows, plain numbers, and no cells that a spreadsheet would execute."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from starlette.testclient import TestClient
from support.fake_farm_client import FakeFarm, at, board, busy_farm, job
from support.generations import stored_generation
from support.histories import history_entry
from support.layer_models import residual_cnn
from support.rooflines import make_peaks
from support.shown_profile import example
from support.web import asking, write_record, write_run, write_suite
from support.web_tensors import write_tensors

from hil.controller.analysis.profile.store import write_profile
from hil.controller.analysis.roofline.peak_store import keep_peaks
from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.store import HistoryStore
from hil.controller.web.text import csv_answer
from hil.controller.workloads.triage.entries import make_entry
from hil.controller.workloads.triage.triage_file import NAME, write_triage
from hil.core.timeline import OpTicks, Ticks

FORMULAS = ["=1+1", "+1", "-1+2", "@SUM(A1)", "\t=1", "\r=1", "=cmd|' /C calc'!A0", '=HYPERLINK("http://evil.example")']


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    cases = [{"id": one, "message": one, "board": one, "op": one} for one in FORMULAS]
    cases.append({"id": "numbers", "device_p50_ns": -5.5, "iterations": 3, "message": 'a, "b"\nc', "outcome": "FAIL"})
    write_suite(tmp_path, "a", cases, suite="=EVIL()")
    write_suite(tmp_path, "b", [{**one, "outcome": "FAIL"} for one in cases])
    return tmp_path


def test_session_csv_contains_filtered_cases(root: Path) -> None:
    with asking(root) as client:
        answer = client.get("/session.csv?id=a")
        failing = rows_of(client.get("/session.csv?id=a&outcome=failing").text)
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"].startswith('attachment; filename="')
    rows = rows_of(answer.text)
    assert len(rows) == len(FORMULAS) + 1
    numbers = rows[-1]
    assert (numbers["device_p50_ns"], numbers["iterations"], numbers["message"]) == ("-5.5", "3", 'a, "b"\nc')
    assert [row["name"] for row in failing] == ["numbers"]


@pytest.mark.parametrize("address", ["/session.csv?id=a", "/sessions.csv", "/compare.csv?a=a&b=b"])
def test_csv_cells_never_contain_formulas(root: Path, address: str) -> None:
    with asking(root) as client:
        answer = client.get(address)
    assert answer.status_code == 200
    cells = [cell for row in csv.reader(io.StringIO(answer.text, newline="")) for cell in row]
    formulas = [cell for cell in cells if cell[:1] in ("=", "+", "@", "\t", "\r")]
    formulas += [cell for cell in cells if cell.startswith("-") and not cell[1:].replace(".", "").isdecimal()]
    assert len(cells) > 20 and formulas == []


def test_compare_csv_contains_page_tables(root: Path) -> None:
    with asking(root) as client:
        rows = rows_of(client.get("/compare.csv?a=a&b=b").text)
        broke = rows_of(client.get("/compare.csv?a=a&b=b&show=broke").text)
        assert client.get("/compare.csv?a=a").status_code == 404
    assert len(broke) == len(FORMULAS) and all((row["baseline"], row["compared"]) == ("PASS", "FAIL") for row in broke)
    assert [row for row in rows if row["table"] == "broke"] == broke


def test_csv_streams_long_table_and_reports_row_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with asking(root) as client:
        whole = client.get("/session.csv?id=a").text
        monkeypatch.setattr(csv_answer, "AT_A_TIME", 2)
        assert client.get("/session.csv?id=a").text == whole
        # Omitted rows are reported, even a single one.
        monkeypatch.setattr(csv_answer, "MAX_ROWS", len(FORMULAS))
        cut = client.get("/session.csv?id=a").text
        monkeypatch.setattr(csv_answer, "MAX_ROWS", len(FORMULAS) - 2)
        sides = [client.get(f"/compare.csv?a=a&b=b{one}").text for one in ("", "&show=broke")]
    assert whole.startswith(cut.rpartition(f"truncated after {len(FORMULAS)} rows")[0])
    for text, most in ((cut, len(FORMULAS)), *((one, len(FORMULAS) - 2) for one in sides)):
        assert len(rows_of(text)) == most + 1 and text.splitlines()[-1].startswith(f"truncated after {most} rows")


def taken(client, page: str, route: str) -> list[dict[str, str]]:
    """Return the rows of the CSV linked on a page. Of several links to a route, use the shortest."""
    answer = client.get(page)
    assert answer.status_code == 200, answer.text
    links = [unescape(one) for one in re.findall(rf'href="({re.escape(route)}[^"]*)" download', answer.text)]
    found = client.get(min(links, key=len))
    assert found.status_code == 200 and found.headers["content-type"] == "text/csv; charset=utf-8"
    cells = [cell for row in csv.reader(io.StringIO(found.text, newline="")) for cell in row]
    assert not [cell for cell in cells if cell[:1] in ("=", "+", "@", "\t", "\r")]
    return rows_of(found.text)


def test_pages_link_number_tables_as_csv(tmp_path: Path) -> None:
    for number in range(12):
        time, outcome = (100.5 if number < 6 else 200.25), "FAIL" if number > 7 else "PASS"
        case = {"id": "=case", "device_p50_ns": time, "iterations": 20, "outcome": outcome, "ended": outcome}
        write_suite(tmp_path, f"night-{number:02d}", [case], started=1.7e9 + number * 86400, suite="=suite")
    layers = [{"name": "conv", "depth": 1, "isolated": {"outcome": "PASS", "max_abs": 0.12345678, "sqnr_db": 41.25}}]
    write_record(tmp_path / "bisect" / "bisect.json", {"layers": layers * 600, "model": "=net.onnx"})
    times = {"p50_ns": 1234567.0, "p90_ns": 2e6}
    write_record(tmp_path / "bench" / "bench.json", {"sides": [{"name": "a", "label": "A", "times": times}]})
    reference = np.arange(4, dtype=np.float32)
    write_tensors(tmp_path, {"=y": reference + np.float32([0, -0.5, 0, 2])}, {"=y": reference})
    write_profile(example("a"), tmp_path / "profiles" / "a")
    write_profile(example("b"), tmp_path / "profiles" / "b")
    with asking(tmp_path) as client:
        samples = taken(client, "/history?case=%3Dcase", "/history.csv")
        assert [row["session"] for row in samples] == [f"night-{number:02d}" for number in reversed(range(12))]
        assert [row["device_p50_ns"] for row in samples[5:7]] == ["200.25", "100.5"]
        assert [row["session"] for row in samples if row["level_begins"] == "yes"] == ["night-06"]
        suite = taken(client, "/history?suite=%3Dsuite", "/history.csv")
        assert [row["passing_percent"] for row in suite[3:5]] == ["0.0", "100.0"]
        regressed = taken(client, "/history/regressions?since=2020-01-01", "/history/regressions.csv")
        (slower,) = [row for row in regressed if row["what"] == "slower"]
        assert (slower["case"], float(slower["before_ns"])) == ("'=case", pytest.approx(100.5))
        own = taken(client, "/session?id=bisect", "/session/table.csv")
        assert len(own) == 600 and (own[599]["Max abs isolated"], own[599]["SQNR isolated, dB"]) == (
            "0.12345678",
            "41.25",
        )
        (side,) = taken(client, "/session?id=bench", "/session/table.csv")
        assert (side["Median (ns)"], side["p90 (ns)"]) == ("1234567.0", "2000000.0")
        worst = taken(client, "/tensors?id=run&case=model", "/tensors.csv")
        assert [(row["index"], row["board"], row["reference"], row["difference"]) for row in worst] == [
            ("[3]", "5.0", "3.0", "2.0"),
            ("[1]", "0.5", "1.0", "0.5"),
        ]
        operations = taken(client, "/trace?profile=0/profiles/a", "/trace.csv")
        assert operations and all(float(row["run_ns"]) > 0 and int(row["calls"]) for row in operations)
        changes = taken(client, "/trace?a=0/profiles/a&b=0/profiles/b", "/trace.csv")
        assert changes[0]["kind"] == "timed"
        assert {"a_p50_ns", "b_p50_ns"} <= changes[0].keys()
        for wrong in ("/history.csv", "/trace.csv?profile=no", "/trace.csv?a=1", "/tensors.csv", "/session/table.csv"):
            assert client.get(wrong).status_code == 404, wrong
        assert client.get("/session/table.csv?id=night-00").status_code == 404


def test_farm_pages_link_tables_as_csv(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.boards = [board("pi", job="1", user="=ada", labels={"name": "pi"}), board("nano", "quarantined", failures=3)]
    farm.jobs = [job("1", "running"), job("2", "done")]
    farm.happen("board.quarantined", board="nano", reason="=FAIL")
    farm.happen("job.granted", board="pi", job="1", lease=4)
    with farm.link() as link, asking(tmp_path, token="t", farm=link) as client:
        client.headers["authorization"] = "Bearer t"
        boards = taken(client, "/boards", "/boards.csv")
        assert [(row["name"], row["user"], row["failures"]) for row in boards] == [
            ("pi", "'=ada", "0"),
            ("nano", "", "3"),
        ]
        assert [row["name"] for row in taken(client, "/boards?select=name%3Dpi", "/boards.csv")] == ["pi"]
        assert [row["what"] for row in taken(client, "/board?name=nano", "/events.csv")] == ["board.quarantined"]
        assert [row["lease"] for row in taken(client, "/job?name=1", "/events.csv")] == ["4"]
        assert {row["name"] for row in taken(client, "/queue", "/jobs.csv")} == {"1", "2"}
        farm.away = True
        assert client.get("/boards.csv").status_code == 503
    with asking(tmp_path) as client:
        assert client.get("/boards.csv").status_code == 404


class Tables(HTMLParser):
    """Parse the tables of a page: the label of the region, the number of filled rows, and the CSV link below."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[list[Any]] = []  # label, rows, address
        self._label, self._in_body = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("role") == "region":
            self._label = values.get("aria-label") or ""
        elif tag == "table":
            self.found.append([self._label, 0, ""])
        elif tag == "tbody":
            self._in_body = True
        elif tag == "tr" and self._in_body:
            self.found[-1][1] += 1
        elif tag == "td" and "colspan" in values:
            self.found[-1][1] -= 1  # an empty-table notice
        elif tag == "a" and "download" in values and ".csv" in (values["href"] or "") and self.found:
            self.found[-1][2] = self.found[-1][2] or values["href"]

    def handle_endtag(self, tag: str) -> None:
        self._in_body &= tag != "tbody"


def check_tables(client: TestClient, page: str) -> set[str]:
    """Fetch each table of a page as CSV and check that it has at least the page's rows. Return the labels."""
    answer = client.get(page)
    assert answer.status_code == 200, (page, answer.text)
    tables = Tables(answer.text).found
    assert tables, page
    for label, rows, address in tables:
        assert address, f"{label} of {page} is no CSV"
        taken = client.get(address)
        assert taken.status_code == 200, (page, label, address, taken.text)
        found = rows_of(taken.text)
        assert len(found) >= rows, (page, label)
        assert not [cell for row in found for cell in row.values() if (cell or "")[:1] in ("=", "+", "@")], (
            page,
            label,
        )
    return {label for label, _, _ in tables}


@pytest.mark.ci
def test_every_page_table_has_csv(tmp_path: Path) -> None:
    onnx.save(residual_cnn(), tmp_path / "net.onnx")
    output = {"name": "=y", "passed": True, "max_abs": 0.25, "sqnr_db": 40, "shape": [2, 3], "dtype": "float32"}
    others = [{"against": "=other", "outcome": "PASS", "outputs": [output]}]
    for number in range(12):
        time, outcome = (100.5 if number < 6 else 200.25), "FAIL" if number > 7 else "PASS"
        case = {"id": "=case", "device_p50_ns": time, "iterations": 20, "outcome": outcome, "ended": outcome}
        case |= {"outputs": [output], "against": "=cpu", "other_references": others}
        write_suite(tmp_path, f"night-{number:02d}", [case], started=1.7e9 + number * 86400, suite="=suite")
    write_suite(tmp_path, "prompts", [{"id": "chat", "generation": stored_generation().to_json()}], suite="prompts")
    layer = {"name": "conv", "op": "Conv", "nodes": ["stem"], "depth": 0}
    layer |= {"isolated": {"outcome": "FAIL", "outputs": [output]}, "cumulative": None}
    write_record(tmp_path / "bisect" / "bisect.json", {"layers": [layer], "model": "net.onnx"})
    (tmp_path / "night-00" / "consoles").mkdir()
    line = {"host_ns": 1, "time_s": 1.7e9, "text": "=1+1"}
    (tmp_path / "night-00" / "consoles" / "b.jsonl").write_text(json.dumps(line) + "\n")
    write_record(tmp_path / "matrix" / "matrix.json", {"targets": [{"name": "pi"}]})
    write_run(tmp_path / "matrix", "pi", [{}])
    values = np.arange(4, dtype=np.float32)
    write_tensors(tmp_path, {"=y": values + np.float32([0, -0.5, 0, 2])}, {"=y": values})
    texts = np.array(["=1", "b", "c"], dtype=object)
    write_tensors(tmp_path, {"t": texts}, {"t": texts[::-1].copy()}, name="texts")
    write_profile(example("a"), tmp_path / "profiles" / "a")
    keep_peaks(make_peaks(), tmp_path / "profiles" / "a")
    write_profile(example("b"), tmp_path / "profiles" / "b")
    ticks = Ticks(3, 1.25, 100.0, (OpTicks("=conv", "compute", ("=node",), ("Conv",), 1, 100.0, 99, 101, 1.0),))
    write_profile(replace(example("a"), rows=[], ticks=ticks), tmp_path / "profiles" / "t")
    compiled = tmp_path / "profiles" / "c"
    compiled.mkdir()
    (compiled / "passes.csv").write_text("phase,depth,pass,wall_ms\nInput,0,Input,10\nInput,1,CSE,4\n")
    head = "dispatch,onnx_nodes,share_estimate,time_us_estimate,flops_estimate,bytes_estimate,bound_estimate"
    (compiled / "dispatches.csv").write_text(f"{head}\nmain,=Conv,0.5,10,1e6,2e6,compute\n")
    (compiled / "executables.csv").write_text("bytes\n7\n")
    gate = {"schema": 1, "id": "gate", "folder": "", "created": 1.7e9, "finished": True, "history": "h"}
    gate |= {"baseline": "=main", "commit": "feed", "min_effect": 0.02, "budget_s": 300.0, "exit_code": 0}
    write_record(tmp_path / "gate" / "gate.json", {**gate, "fail_on": [], "unmeasured": [], "verdicts": []})
    with HistoryStore.open(tmp_path / "history", create=True) as store:
        store.add([history_entry("=r", p50_ns=100.0)])
        series = store.series()[0].id
    pages = (
        "/ /session?id=night-00 /session?id=bisect /session?id=matrix /case?id=night-00&case=%3Dcase /graph?id=bisect"
        " /case?id=prompts&case=chat /console?id=night-00&file=consoles/b.jsonl"
        " /compare?a=night-00&b=night-11 /history /history?case=%3Dcase /history?suite=%3Dsuite"
        " /history/regressions?since=2020-01-01 /tensors?id=run&case=model /tensors?id=texts&case=model /traces"
        " /trace?profile=0/profiles/a /trace?profile=0/profiles/c"
        " /trace?profile=0/profiles/t /trace?a=0/profiles/a&b=0/profiles/b"
        f" /gates /triage /series /series?id={series} /search?q=%3Dcase"
    ).split()
    farm = busy_farm()
    farm.boards[0]["user"] = "=ada"
    attempt = {"lease": 1, "board": "pi", "fence": 1, "granted_at": at(1005), "started_at": None, "ended_at": None}
    attempt["reason"] = "=x"
    farm.jobs[0]["attempts_made"] = [attempt]
    history = HistoryPlace(tmp_path / "history")
    write_triage(tmp_path / NAME, [make_entry(case="=case", state="known", owner="=ada")])
    with farm.link() as link, asking(tmp_path, token="t", farm=link, history=history) as client:
        client.headers["authorization"] = "Bearer t"
        farms = ("/boards", "/board?name=pi", "/queue", "/job?name=1", "/job?name=2")
        cause = unescape(
            re.findall(r'href="(/cause\?[^"]*)"', client.get("/history/regressions?since=2020-01-01").text)[0]
        )
        seen = {label for page in (*pages, *farms, cause) for label in check_tables(client, page)}
        (first,) = rows_of(client.get("/case.csv?id=night-00&case=%3Dcase&beside=1").text)
        assert (first["reference"], first["output"], first["shape"]) == ("'=other", "'=y", "2x3")
        assert (float(first["max_abs"]), float(first["sqnr_db"])) == (0.25, 40)
        positions = rows_of(client.get("/case/positions.csv?id=prompts&case=chat").text)
        assert next((row["position"], row["actual"], row["kl"]) for row in positions) == ("2", "7", "1e-09")
        nodes = {row["node"]: row for row in rows_of(client.get("/graph.csv?id=bisect").text)}
        assert len(nodes) > 3 and (nodes["stem"]["outcome"], nodes["stem"]["max_abs"]) == ("FAIL", "0.25")
        whole, *_ = rows_of(client.get("/trace/roofline.csv?profile=0/profiles/a").text)
        assert (whole["kind"], whole["flops"], whole["time_ns"]) == ("model", "150000", "80000.0")
        (operation,) = rows_of(client.get("/trace/compilation.csv?profile=0/profiles/c&table=operations").text)
        assert (operation["name"], float(operation["seconds"])) == ("'=Conv", pytest.approx(1e-5))
        statistics = rows_of(client.get("/tensors.csv?id=run&case=model&table=statistics").text)
        assert {"statistic": "max_abs", "now": "2.0", "in_the_record": "2.0"} in statistics
        sums = [
            sum(int(row[side]) for row in rows_of(client.get("/tensors.csv?id=run&case=model&table=histogram").text))
            for side in ("Board", "Reference")
        ]
        assert sums == [4, 4]
        waiting = rows_of(client.get("/queue.csv").text)
        assert [(row["position"], row["name"]) for row in waiting] == [("1", "2.1"), ("2", "2.2")]
        for wrong in (
            *("/case.csv?id=night-00&case=%3Dcase&beside=2", "/case/positions.csv?id=night-00&case=%3Dcase"),
            *("/graph.csv", "/job/jobs.csv?name=x", "/job/leases.csv?name=9"),
            *("/tensors.csv?id=run&case=model&table=texts", "/tensors.csv?id=texts&case=model&table=values"),
        ):
            assert client.get(wrong).status_code == 404, wrong
        for wrong in ("/jobs.csv?state=x", "/boards/use.csv?hours=3", "/trace/compilation.csv?table=x"):
            assert client.get(wrong).status_code == 400, wrong
    # Check that the pages above include all tables of the templates.
    templates = resources.files("hil.controller.web").joinpath("templates")
    written = {
        label
        for file in templates.iterdir()
        for label in re.findall(r'role="region" aria-label="([^"{]*)"', file.read_text())
    }
    assert len(written) > 20 and written <= seen
