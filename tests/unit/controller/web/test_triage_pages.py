"""Test the triage of failures on pages: the form, the list, and states next to cases."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from support.nights import DAY, FIRST_NIGHT
from support.web import ADDRESS, asking, write_run, write_suite

from hil.controller.records.decisions.triage import TriageEntry
from hil.controller.workloads.triage.triage_file import NAME, read_triage, update_triage

TOKEN = "a token of some length"
CHANGE = {"authorization": f"Bearer {TOKEN}", "origin": ADDRESS}
FORM = {"id": "s1", "case": "conv1", "state": "known", "owner": "ada", "issue": "https://example.com/7", "note": "half"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    for number, outcome in enumerate(("PASS", "FAIL")):
        case = {"id": "conv1", "outcome": outcome, "ended": outcome, "op": "Conv", "board": "evk1", "model": "net"}
        write_suite(tmp_path, f"s{number}", [case], suite="nets", boards=["evk1"], started=FIRST_NIGHT + number * DAY)
    with asking(tmp_path, token=TOKEN) as found:
        found.follow_redirects = False
        yield found


def stored(client: TestClient) -> tuple[TriageEntry, ...]:
    return read_triage(client.app.state.site.triage.path).entries  # type: ignore[attr-defined]


def test_form_stores_entry_and_returns_to_case(client: TestClient) -> None:
    answer = client.post("/triage", data=FORM, headers=CHANGE)
    assert (answer.status_code, answer.headers["location"]) == (303, "/case?id=s1&case=conv1#triage")
    (entry,) = stored(client)
    assert (entry.case, entry.suite, entry.flow, entry.board, entry.runtime) == (
        "conv1",
        "nets",
        "iree",
        "evk1",
        "iree",
    )
    assert (entry.state, entry.owner, entry.outcomes, entry.note) == ("known", "ada", ["FAIL"], "half")


def test_case_page_shows_form_only_with_token(client: TestClient) -> None:
    page = client.get("/case?id=s1&case=conv1", headers=CHANGE).text
    assert '<form class="filter" action="/triage" method="post">' in page
    assert "start <code>hil web</code> with <code>--token</code>" in client.get("/case?id=s1&case=conv1").text
    # A passing case without an entry needs no triage.
    assert 'id="triage"' not in client.get("/case?id=s0&case=conv1", headers=CHANGE).text


def test_state_follows_case_to_other_sessions(client: TestClient) -> None:
    client.post("/triage", data=FORM, headers=CHANGE)
    shown = re.compile(r'class="triage known">known · ada<')
    pages = ("/", "/session?id=s0", "/session?id=s1", "/case?id=s0&case=conv1", "/history/regressions?since=2020-01-01")
    for page in pages:
        assert shown.search(client.get(page).text), page
    assert '<span class="triage known">known</span>' in client.get("/triage").text
    cause = re.findall(r'href="(/cause\?[^"]*)"', client.get("/").text)[0].replace("&amp;", "&")
    assert shown.search(client.get(cause).text)


def test_form_changes_and_removes_entry(client: TestClient) -> None:
    client.post("/triage", data=FORM, headers=CHANGE)
    expired = {**FORM, "state": "wontfix", "until": "2020-01-01", "all_boards": "1", "any_outcome": "1"}
    client.post("/triage", data=expired, headers=CHANGE)
    assert [(one.board, one.state, one.outcomes) for one in stored(client)] == [
        ("evk1", "known", ["FAIL"]),
        ("", "wontfix", []),
    ]
    page = client.get("/triage?state=wontfix", headers=CHANGE).text
    assert "wontfix until 2020-01-01, expired" in page and "1 of 2 entries" in page
    keys = {"case": "conv1", "suite": "nets", "flow": "iree", "board": "evk1", "runtime": "iree", "remove": "1"}
    assert client.post("/triage", data=keys, headers=CHANGE).headers["location"] == "/triage"
    assert [one.board for one in stored(client)] == [""]


def test_form_keeps_outcomes_of_entry(client: TestClient, tmp_path: Path) -> None:
    client.post("/triage", data=FORM, headers=CHANGE)
    update_triage(tmp_path / NAME, lambda entries: [one.replace(outcomes=["SLOWER", "TIMEOUT"]) for one in entries])
    # The case passes in s0: a new owner does not change which failures are known.
    client.post("/triage", data={**FORM, "id": "s0", "owner": "bo"}, headers=CHANGE)
    assert [(one.owner, one.outcomes) for one in stored(client)] == [("bo", ["SLOWER", "TIMEOUT"])]
    client.post("/triage", data=FORM, headers=CHANGE)
    assert [one.outcomes for one in stored(client)] == [["SLOWER", "TIMEOUT", "FAIL"]]


def test_passing_case_is_not_known_for_any_outcome_by_accident(client: TestClient) -> None:
    answer = client.post("/triage", data={**FORM, "id": "s0"}, headers=CHANGE)
    assert answer.status_code == 404 and "no outcome of this case can be known" in answer.text
    assert stored(client) == ()
    for form in ({"any_outcome": "1"}, {"state": "new"}):
        assert client.post("/triage", data={**FORM, "id": "s0", **form}, headers=CHANGE).status_code == 303


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"state": "odd"}, "unknown state"),
        ({"state": "wontfix"}, "wontfix requires a last day"),
        ({"state": "wontfix", "until": "soon"}, "invalid date"),
        ({"owner": "x" * 501}, "owner has 501 characters"),
        ({"case": "none"}, "not found"),
        ({"id": "none"}, "not found"),
        ({"root": "x"}, "root must be a number"),
    ],
)
def test_invalid_form_is_rejected(client: TestClient, change: dict[str, str], text: str) -> None:
    answer = client.post("/triage", data={**FORM, **change}, headers=CHANGE)
    assert answer.status_code == (400 if "must be" in text else 404) and text in answer.text and stored(client) == ()


def test_change_requires_token_and_same_origin(client: TestClient) -> None:
    for headers in ({}, {"origin": ADDRESS}, {**CHANGE, "origin": "http://evil.example"}):
        assert client.post("/triage", data=FORM, headers=headers).status_code == 403
    assert stored(client) == ()


def test_hostile_file_cannot_inject_scripts(client: TestClient, tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>\u202e"
    entry = {"case": "conv1", "state": "known", "owner": bad, "note": bad, "issue": "javascript:alert(1)"}
    (tmp_path / NAME).write_text(json.dumps({"schema": 1, "entries": [entry]}))
    for page in ("/", "/triage", "/case?id=s1&case=conv1", "/session?id=s1"):
        text = client.get(page, headers=CHANGE).text
        assert "<script>alert" not in text and "\u202e" not in text and 'href="javascript' not in text, page
    assert "=cmd" not in client.get("/triage.csv").text


def test_invalid_file_is_reported_and_does_not_hide_results(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{")
    assert client.get("/").status_code == client.get("/session?id=s1").status_code == 200
    assert "is not a triage file" in client.get("/triage").text
    assert client.get("/triage.json").status_code == 404
    # A change must not overwrite the file.
    assert client.post("/triage", data=FORM, headers=CHANGE).status_code == 404
    assert (tmp_path / NAME).read_text() == "{"


def test_issue_links_use_http_only(client: TestClient) -> None:
    client.post("/triage", data=FORM, headers=CHANGE)
    assert 'href="https://example.com/7" rel="noreferrer noopener"' in client.get("/case?id=s1&case=conv1").text
    client.post("/triage", data={**FORM, "issue": "#7"}, headers=CHANGE)
    assert "<td>#7</td>" in client.get("/triage").text


def test_json_contains_all_entries(client: TestClient) -> None:
    client.post("/triage", data=FORM, headers=CHANGE)
    document = client.get("/triage.json").json()
    assert document["schema"] == 1 and [one["case"] for one in document["entries"]] == ["conv1"]


def test_run_without_suite_can_be_triaged(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [{"outcome": "FAIL"}])
    with asking(tmp_path, token=TOKEN) as client:
        form = {**FORM, "id": "one", "case": "model"}
        assert client.post("/triage", data=form, headers=CHANGE, follow_redirects=False).status_code == 303
        (entry,) = stored(client)
    assert (entry.case, entry.suite, entry.outcomes) == ("model", "", ["FAIL"])
