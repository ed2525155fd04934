"""The HTML report as text; tests/integration/test_suite_report_browser.py tests it in a browser."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser

import pytest
from support.suite_runs import case, comparison, large_run, suite_run

from hil.controller.workloads.suites.reports.page import report_html
from hil.controller.workloads.suites.reports.results import load_run
from hil.controller.workloads.suites.reports.tables import COLUMNS, CaseColumn, format_cases_csv

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "&lt;b&gt;",
    "${data}",
    "'\"\\",
]


class Tags(HTMLParser):
    """Counts elements and keeps the data block's text and every address."""

    def __init__(self):
        super().__init__()
        self.tags, self.addresses, self.data, self.inside = {}, [], "", False

    def handle_starttag(self, tag, attributes):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "srcset", "data")]
        self.inside = ("id", "data") in attributes

    def handle_data(self, text):
        if self.inside:
            self.data += text

    def handle_endtag(self, tag):
        self.inside = False


def parsed(folder, *records, **header):
    tags = Tags()
    tags.feed(report_html(load_run(suite_run(folder, list(records), **header))))
    return tags


def test_page_contains_every_case_without_external_links(tmp_path):
    records = large_run(60)
    page = parsed(tmp_path, *records)
    assert [one["id"] for one in json.loads(page.data)["cases"]] == [record.id for record in records]
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    text = (tmp_path / "x").with_suffix(".html")
    text.write_text(report_html(load_run(tmp_path)))
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", text.read_text())


@pytest.mark.parametrize("text", HOSTILE)
def test_page_escapes_names_and_messages(tmp_path, text):
    usual = parsed(tmp_path / "usual", case("a", "FAIL"))
    values = dict.fromkeys(("model", "layer", "op", "board", "message", "hint", "detail", "repeat", "folder"), text)
    record = case(text, "FAIL", **values, outputs=(comparison(name=text, passed=False, reason=text),))
    page = parsed(
        tmp_path / "hostile", record, suite=text, flow=text, command=text, boards=[text], versions={text: text}
    )
    assert page.tags == usual.tags
    (found,) = json.loads(page.data)["cases"]
    assert found["id"] == found["message"] == found["outputs"][0]["name"] == text


def test_page_writes_infinity_as_text(tmp_path):
    page = parsed(tmp_path, case("a", outputs=(comparison(sqnr_db="inf", max_abs=float("nan")),)))
    (found,) = json.loads(page.data)["cases"]
    assert (found["outputs"][0]["sqnr_db"], found["outputs"][0]["max_abs"]) == ("inf", "nan")


def test_page_shortens_long_detail(tmp_path):
    page = parsed(tmp_path, *(case(f"c{n}", "COMPILE_ERROR", detail="x" * 300_000) for n in range(20)))
    assert len(page.data) < 200_000


def test_titled_column_appears_in_csv_and_page(tmp_path, monkeypatch):
    hint = CaseColumn("hint", lambda record: record.hint, title="Hint")
    monkeypatch.setattr("hil.controller.workloads.suites.reports.tables.COLUMNS", (*COLUMNS, hint))
    run = load_run(suite_run(tmp_path, [case("a", hint="lower the limit"), case("b")]))
    assert [row["hint"] for row in csv.DictReader(io.StringIO(format_cases_csv(run)))] == ["lower the limit", ""]
    tags = Tags()
    tags.feed(report_html(run))
    data = json.loads(tags.data)
    assert data["columns"][-1] == {"name": "hint", "title": "Hint", "unit": "text"}
    assert [one["cells"].get("hint") for one in data["cases"]] == ["lower the limit", None]
