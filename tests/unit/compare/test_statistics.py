"""The table of statistics: the guides and the schema match it, and an added statistic appears everywhere."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hil.compare.stats import STATISTICS, find_worst, summarize
from hil.compare.verdict import compare_output
from hil.controller.records.outputs import StoredComparison

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "internals" / "adding.md").read_text()


def test_comparing_guide_lists_statistics_of_code():
    text = (ROOT / "docs" / "comparing.md").read_text()
    rows = [f"| `{one.key}` | {one.heading if one.column else ''} | {one.meaning} |" for one in STATISTICS]
    assert "\n".join(rows).replace("|  |", "| |") in text


def test_stored_comparison_has_keys_of_comparison():
    keys = [*compare_output("y", np.ones(2), np.ones(2)).record(), "mismatch_share"]
    assert list(StoredComparison.__struct_fields__) == keys


def test_worst_of_combines_statistics_of_outputs():
    outputs = [
        {"mismatches": 1, "elements": 4, "max_abs": 0.5, "cosine": 0.5, "sqnr_db": 3.0},
        {"mismatches": 2, "elements": 4, "max_abs": 0.25, "cosine": None, "sqnr_db": 9.0, "max_ulp": 7},
    ]
    found = find_worst(outputs)
    assert (found["mismatches"], found["elements"], found["max_abs"], found["max_ulp"]) == (3, 8, 0.5, 7)
    assert (found["cosine"], found["sqnr_db"], found["rmse"]) == (0.5, 3.0, None)
    assert summarize(outputs) == "3 of 8 out of tolerance, max abs 0.5, 7 ULP, 3 dB"
    assert summarize([]) == summarize([dict.fromkeys(outputs[0])]) == "no statistics available"


# Reads a field from stdin, appends it to the table and to the record, and prints the results. One case of the suite is
# older: its record lacks the new statistic.
ADDED = """
import ast, io, json, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.mutants import Mutated
text = Path("hil/compare/stats.py").read_text()
(table,) = (one for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == "Statistics")
field = [one for one in table.body if isinstance(one, ast.AnnAssign)][-1]
last = "".join(text.splitlines(keepends=True)[field.lineno - 1 : field.end_lineno])
new = sys.stdin.read()
sys.meta_path.insert(0, Mutated("hil.compare.stats", [(last, last + new)]))
last = f"    {field.target.id}: Number = None\\n"
stored = f"    {new.split(':')[0].strip()}: Number = None\\n"
sys.meta_path.insert(0, Mutated("hil.controller.records.outputs", [(last, last + stored)]))
import numpy as np
from rich.console import Console
from hil.compare.verdict import compare
from hil.controller.pipeline.records.print_case import print_verdict
from hil.controller.pipeline.records.record import record_verdict
from hil.controller.workloads.suites.reports.page import report_html
from hil.controller.workloads.suites.reports.results import load_run
from hil.controller.workloads.suites.reports.tables import format_cases_csv, format_outputs_csv
from hil.core.results import RunResult
from support.suite_runs import case, suite_run
a, b = (RunResult(name, {"y": np.array(values, np.float32)}) for name, values in (("a", [3, 4.5]), ("b", [3, 4])))
record = record_verdict(compare(a, b))
screens = {}
for width in (80, 200):
    console = Console(file=io.StringIO(), width=width)
    print_verdict(console, record)
    screens[width] = console.file.getvalue()
run = load_run(suite_run(Path(sys.argv[2]), [case("new", "FAIL", outputs=record.to_json()["outputs"]), case("old")]))
made = {"cases": format_cases_csv(run), "outputs": format_outputs_csv(run), "page": report_html(run)}
print(json.dumps({"record": record.to_json()["outputs"][0], "screens": screens, **made}))
"""


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the records and output after adding the guide's statistic to the table."""
    section = GUIDE.split("## Add a statistic")[1].split("\n## ")[0]
    (field,) = re.findall(r"^```\n(.*?)^```$", section, re.M | re.S)
    command = [sys.executable, "-c", ADDED, str(ROOT / "tests"), str(tmp_path_factory.mktemp("added") / "run")]
    done = subprocess.run(command, input=field, capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_added_statistic_appears_in_verdict_record(added: dict[str, Any]):
    keys = list(added["record"])
    assert added["record"]["rel_l2"] == pytest.approx(0.5 / 5)
    assert keys.index("rel_l2") == keys.index(STATISTICS[-1].key) + 1 == keys.index("first_index") - 1


def test_added_statistic_appears_on_wide_terminal(added: dict[str, Any]):
    heading, row = added["screens"]["200"].splitlines()[1:3]
    assert heading.split()[-2:] == ["rel", "L2"] and row.split()[-1] == "0.1"
    assert "SQNR dB" in added["screens"]["80"]


def test_added_statistic_appears_in_suite_files(added: dict[str, Any]):
    for name in ("cases", "outputs"):
        new, old = csv.DictReader(io.StringIO(added[name]))
        assert float(new["rel_l2"]) == pytest.approx(0.1) and old["rel_l2"] == "", name
    assert '"key":"rel_l2","title":"rel L2"' in added["page"] and '"rel_l2":0.1' in added["page"]
