"""The page of docs/internals/adding-pages.md works as written there."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
from jinja2 import ChoiceLoader, DictLoader
from support.web import asking, write_run

from hil.controller.web.server import app

ROOT = Path(__file__).parents[4]
SECTION = (ROOT / "docs/internals/adding-pages.md").read_text().partition("\n## Change the farm")[0]


def test_guide_adds_working_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    [module] = re.findall(r"^```python\n(.*?)^```$", SECTION, re.M | re.S)
    [template] = re.findall(r"^```html\n(.*?)^```$", SECTION, re.M | re.S)
    page = types.ModuleType("outcomes")
    exec(compile(module, "outcomes.py", "exec", dont_inherit=True), page.__dict__)
    environment = app.make_environment()
    environment.loader = ChoiceLoader([environment.loader, DictLoader({"outcomes.html": template})])
    monkeypatch.setattr(app, "make_environment", lambda: environment)
    monkeypatch.setattr(app, "PAGES", (*app.PAGES, page))
    write_run(tmp_path, "one", [{"outcome": "PASS"}])
    write_run(tmp_path, "two", [{"outcome": "FAIL"}, {"name": "other", "outcome": "PASS"}])
    with asking(tmp_path) as client:
        answer = client.get("/outcomes")
        document = client.get("/api/v1/outcomes").json()
    assert answer.status_code == 200, answer.text
    rows = re.findall(r'<th scope="row">(\w+)</th><td>(\d+)</td>', answer.text)
    assert rows == [("FAIL", "1"), ("PASS", "2")]
    assert document == {"schema": 1, "rows": [["FAIL", 1], ["PASS", 2]]}
