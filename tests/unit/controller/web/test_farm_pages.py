"""Test the pages of a farm's boards, queue and jobs, and the permissions for changes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio.to_thread
import pytest
from starlette.testclient import TestClient
from support.fake_farm_client import FakeFarm, at, board, busy_farm, job
from support.waiting import eventually
from support.web import asking

from hil.controller.farm.messages import Role
from hil.controller.web.access.visitors import Visitor
from hil.controller.web.pages.farm import farm_events

OWN = {"origin": "http://127.0.0.1:8790", "authorization": "Bearer the server's token"}
EVIL = '<script>alert("x")</script>\u202e'


@pytest.fixture
def farm() -> FakeFarm:
    return busy_farm()


@pytest.fixture
def client(farm: FakeFarm, tmp_path: Path) -> Iterator[TestClient]:
    """Return a client on loopback with the server's token."""
    with farm.link() as link, asking(tmp_path, token="the server's token", farm=link) as client:
        client.headers["authorization"] = OWN["authorization"]
        yield client


@pytest.fixture
def elsewhere(farm: FakeFarm, tmp_path: Path) -> Iterator[TestClient]:
    """Return a client of a server on a public address."""
    with farm.link() as link, asking(tmp_path, token="the server's token", host="192.0.2.1", farm=link) as client:
        yield client


def rows(text: str, table: str) -> list[list[str]]:
    """Return the cells of the table with a region label."""
    body = text.partition(f'aria-label="{table}"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in body.split("<tr>")[1:]]
    return [[" ".join(re.sub(r"<[^>]*>", " ", cell).split()) for cell in row] for row in cells]


def test_boards_page_shows_state_and_user(client: TestClient) -> None:
    found = {row[0]: row for row in rows(client.get("/boards").text, "Table of boards")}
    assert found["pi"][1:4] == ["online", "1", "ada"]
    assert found["pi"][5] == "lab/host1" and found["pi"][-1] == "chip=a72"
    assert found["nano"][1] == "quarantined a tiny model: FAIL"
    assert found["zero"][1] == "maintenance drained by amy: new cable"


def test_boards_page_filters_by_selector(client: TestClient) -> None:
    assert [row[0] for row in rows(client.get("/boards?select=chip%3Da72").text, "Table of boards")] == ["pi"]
    assert "No board matches" in client.get("/boards?select=gpu").text
    assert client.get("/boards?select=%3D%3D").status_code == 404


def test_board_page_shows_leases_and_events(client: TestClient) -> None:
    text = client.get("/board?name=pi").text
    assert [row[:2] for row in rows(text, "Leases")] == [["1", "1"]]
    assert [row[1] for row in rows(text, "Events")] == ["job.granted"]
    assert client.get("/board?name=none").status_code == 404


def test_board_page_shows_image(client: TestClient, farm: FakeFarm) -> None:
    assert "<dt>Image</dt>" not in client.get("/board?name=pi").text
    image = {"schema": 1, "file": "<card>.img", "sha256": "ab" * 32, "time_s": 0.0}
    farm.boards = [board("pi", "online", image=image)]
    text = client.get("/board?name=pi").text
    assert f"<dt>Image</dt><dd>&lt;card&gt;.img, written 1970-01-01 00:00:00 UTC, SHA-256 <code>{'ab' * 32}" in text


def test_queue_page_shows_position_and_reason(client: TestClient) -> None:
    text = client.get("/queue").text
    assert [tuple(row[:3]) for row in rows(text, "Waiting jobs")] == [
        ("1", "2.1", "pi is busy"),
        ("2", "2.2", "pi is busy; 1 job ahead"),
    ]
    assert [(row[0], row[2]) for row in rows(text, "Running jobs")] == [("1", "pi")]
    assert [(row[0], row[2], row[4]) for row in rows(text, "Recently ended jobs")] == [("3", "PASS", "5.00s")]
    assert "1 more waiting" in client.get("/queue?limit=1").text


def test_queue_page_splits_long_queue(client: TestClient, farm: FakeFarm) -> None:
    farm.jobs += [job(f"{number}") for number in range(10, 440)]
    queued = [one for one in farm.jobs if one["state"] == "queued"]
    farm.queue = [{**one, "position": place, "why": "busy"} for place, one in enumerate(queued, 1)]

    def shown(address: str) -> list[str]:
        return [row[0] for row in rows(client.get(address).text, "Waiting jobs")]

    waiting = len(farm.queue)
    assert shown("/queue") == [str(place) for place in range(1, 101)]
    assert shown("/queue?limit=2000&page=2") == [str(place) for place in range(201, 401)]
    last = client.get("/queue?page=5").text
    assert f">{waiting}</td>" in last and 'rel="next"' not in last and 'href="/queue?page=4"' in last
    assert 'href="/queue?page=2&amp;hours=1"' in client.get("/queue?hours=1").text
    assert "No more waiting jobs." in client.get("/queue?page=9").text
    saved = client.get("/share", params={"page": "/queue"}).text
    assert f">{waiting}</td>" in saved and 'rel="next"' not in saved


def test_job_page_shows_position_leases_and_cases(client: TestClient, farm: FakeFarm) -> None:
    assert "place 2: pi is busy; 1 job ahead" in client.get("/job?name=2.2").text
    assert [row[:2] for row in rows(client.get("/job?name=3").text, "Cases")] == [["PASS", "digits"]]
    found = rows(client.get("/job?name=2").text, "Jobs of the submission")
    assert [(row[0], row[5].partition(":")[0]) for row in found] == [("2.1", "place 1"), ("2.2", "place 2")]
    for name in ("9", "x", "", "1.9999", "%00"):
        assert client.get(f"/job?name={name}").status_code == 404


def test_job_page_shows_ended_cases_of_running_job(client: TestClient, farm: FakeFarm) -> None:
    text = client.get("/job?name=1").text
    assert rows(text, "Cases") == [["FAIL", "relu", "y differs"], ["PASS", "add", ""]]
    assert "2 cases completed so far" in text and "/case?" not in text
    farm.cases["1"] = [{"name": f"case {number}", "outcome": "PASS"} for number in range(201)]
    text = client.get("/job?name=1").text
    assert len(rows(text, "Cases")) == 200 and "201 cases; showing 200" in text
    assert len(rows(client.get("/share?page=/job?name=1").text, "Cases")) == 201


@pytest.mark.ci
def test_job_log_streams_lines_and_end_of_job(client: TestClient) -> None:
    text = client.get("/job/log?name=3").text
    assert text == 'id: 1\ndata: "one\\n"\n\nid: 2\ndata: "two\\\\x1b[0m\\n"\n\nevent: over\ndata: ""\n\n'
    assert client.get("/job/log?name=3", headers={"last-event-id": "1"}).text.startswith("id: 2\n")
    assert client.get("/job/log.txt?name=3").text == "one\ntwo\\x1b[0m\n"
    assert client.get("/job/log?name=9").text == 'event: over\ndata: "job 9 not found"\n\n'


@pytest.mark.ci
def test_job_log_limits_streams_of_user(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    viewer = {"authorization": "Bearer v"}
    monkeypatch.setattr(farm_events, "_followed", {number: "vic" for number in range(10)})
    assert client.get("/job/log?name=3", headers=viewer).status_code == 429
    assert client.get("/job/log?name=3").status_code == 200
    monkeypatch.setattr(farm_events, "_followed", {number: "vic" for number in range(9)})
    assert client.get("/job/log?name=3", headers=viewer).status_code == 200
    assert len(farm_events._followed) == 9


def test_job_log_stream_checks_limit_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farm_events, "_followed", {number: "vic" for number in range(10)})
    view: Any = SimpleNamespace(visitor=Visitor("vic", Role.VIEWER))

    async def run() -> list[str]:
        return [part async for part in farm_events._stream_log(None, view, "3", 0)]

    assert "limit of open log streams" in "".join(asyncio.run(run()))


def test_job_log_uses_no_threads_of_pages() -> None:
    async def run() -> None:
        async with anyio.to_thread.current_default_thread_limiter():
            anyio.to_thread.current_default_thread_limiter().total_tokens = 1
            assert await asyncio.wait_for(farm_events._read_in_thread(int, "5"), 30) == 5

    asyncio.run(run())


def piece(number: int, text: str) -> dict[str, Any]:
    return {"number": number, "job": "3", "text": text}


@pytest.mark.ci
def test_job_log_ends_despite_repeated_pieces(
    client: TestClient, farm: FakeFarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farm, "printed_after", lambda number: [piece(1, "one\n"), piece(1, "again\n")])
    assert client.get("/job/log.txt?name=3").text == "one\n"
    assert client.get("/job/log?name=3").text == 'id: 1\ndata: "one\\n"\n\nevent: over\ndata: ""\n\n'


def test_job_log_text_ends_despite_endless_output(
    client: TestClient, farm: FakeFarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farm_events, "_LOG_SECONDS", 0.3)
    monkeypatch.setattr(farm, "printed_after", lambda number: [piece(number + 1, "line\n")])
    text = client.get("/job/log.txt?name=3").text
    assert text.startswith("line\nline\n") and text.endswith("[truncated: hil farm logs 3 prints the full log]\n")


def test_farm_pages_show_charts_as_tables(client: TestClient) -> None:
    for path, table in (
        ("/boards", "Use of boards"),
        ("/board?name=pi", "Use of boards"),
        ("/queue", "Queue times"),
    ):
        assert len(rows(client.get(path).text, table)) == 24
    assert client.get("/boards?hours=5").status_code == 400


def buttons(client: TestClient, path: str, **headers: str) -> set[str]:
    return set(re.findall(r'<button type="submit" aria-label="([^"]*)"', client.get(path, headers=headers).text))


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("v", set()),
        ("s", {"Cancel job 2.1", "Cancel job 2.2"}),
        ("a", {"Cancel job 1", "Cancel job 2.1", "Cancel job 2.2", "Drain pi", "Drain nano", "Resume zero"}),
        (
            "the server's token",
            {"Cancel job 1", "Cancel job 2.1", "Cancel job 2.2", "Drain pi", "Drain nano", "Resume zero"},
        ),
    ],
)
def test_farm_pages_show_buttons_by_role(client: TestClient, token: str, shown: set[str]) -> None:
    given = {"authorization": f"Bearer {token}"}
    assert buttons(client, "/queue", **given) | buttons(client, "/boards", **given) == shown


def test_farm_pages_show_user_and_role(client: TestClient) -> None:
    for token, said in (
        ("v", "You are vic, viewer."),
        ("the server's token", "You are ada, admin."),
    ):
        given = {"authorization": f"Bearer {token}"}
        for path in ("/boards", "/queue"):
            assert said in client.get(path, headers=given).text


def post(client: TestClient, path: str, token: str, **form: str) -> int:
    headers = {"origin": "http://127.0.0.1:8790", "authorization": f"Bearer {token}"}
    return client.post(path, data=form, headers=headers, follow_redirects=False).status_code


@pytest.mark.parametrize(
    ("path", "form", "may"),
    [
        ("/job/cancel", {"name": "2.1"}, {"s", "a", "the server's token"}),
        ("/job/cancel", {"name": "1"}, {"a", "the server's token"}),
        ("/board/drain", {"name": "pi", "reason": "why"}, {"a", "the server's token"}),
        ("/board/resume", {"name": "zero"}, {"a", "the server's token"}),
    ],
)
def test_farm_changes_use_token_of_user(
    client: TestClient, farm: FakeFarm, path: str, form: dict[str, str], may: set[str]
) -> None:
    for token in ("", "v", "s", "a", "the server's token", "wrong"):
        farm.done.clear()
        refused = 401 if token in ("", "wrong") else 403
        assert post(client, path, token, **form) == (303 if token in may else refused), token
        used = "own" if token == "the server's token" else token
        assert farm.done == ([(used, path.rpartition("/")[2], form)] if token in may else [])


def power_buttons(client: TestClient, token: str) -> set[str]:
    text = client.get("/boards", headers={"authorization": f"Bearer {token}"}).text
    return set(re.findall(r'value="\w+" aria-label="(Power [^"]*)"', text))


def test_boards_page_shows_power_of_free_boards_to_users_with_right(client: TestClient, farm: FakeFarm) -> None:
    for one, actions in zip(farm.boards, (["cycle"], ["on", "off", "cycle"], []), strict=True):
        one["power"] = actions
    every = {"Power on nano", "Power off nano", "Power cycle nano"}
    assert power_buttons(client, "s") == power_buttons(client, "v") == set()
    assert power_buttons(client, "a") == {"Power cycle pi", *every}
    farm.users["p"] = ("pat", Role.SUBMITTER)
    farm.rights["p"] = ["power"]
    assert power_buttons(client, "p") == every  # the user ada has the board pi
    farm.users["q"], farm.rights["q"] = ("ada", Role.SUBMITTER), ["power"]
    assert power_buttons(client, "q") == {"Power cycle pi", *every}


def test_power_form_does_not_wait_for_host(client: TestClient, farm: FakeFarm) -> None:
    form = {"name": "nano", "action": "cycle", "confirmed": "yes"}
    assert post(client, "/board/power", "s", **form) == 403
    assert post(client, "/board/power", "a", **form) == 303
    assert farm.done == [("a", "power", {"name": "nano", "switch": "cycle", "detach": True})]


def test_power_off_and_cycle_need_confirmation(client: TestClient, farm: FakeFarm) -> None:
    for one in farm.boards:
        one["power"] = ["on", "off", "cycle"]
    headers = {"origin": "http://127.0.0.1:8790", "authorization": "Bearer a"}
    for action in ("off", "cycle"):
        answer = client.post("/board/power", data={"name": "pi", "action": action}, headers=headers)
        assert answer.status_code == 200 and f"Power {action} pi?" in answer.text
        assert "of ada runs on the board, and fails" in answer.text
        assert '<input type="hidden" name="confirmed" value="yes">' in answer.text
        assert post(client, "/board/power", "s", name="pi", action=action) == 403
        assert post(client, "/board/power", "a", name="gone", action=action) == 404
    assert farm.done == []
    assert post(client, "/board/power", "a", name="nano", action="on") == 303
    assert farm.done == [("a", "power", {"name": "nano", "switch": "on", "detach": True})]


def test_farm_change_rejects_foreign_origin(client: TestClient, farm: FakeFarm) -> None:
    for origin in ("http://evil.example", "null", ""):
        headers = {"origin": origin, "authorization": "Bearer a"}
        assert client.post("/job/cancel", data={"name": "1"}, headers=headers).status_code == 403
    assert farm.done == []


def test_farm_token_grants_access_on_public_address(elsewhere: TestClient, farm: FakeFarm) -> None:
    assert elsewhere.get("/boards").status_code == 401
    assert elsewhere.get("/boards", headers={"authorization": "Bearer wrong"}).status_code == 401
    for path in ("/", "/boards", "/queue"):
        assert elsewhere.get(path, headers={"authorization": "Bearer v"}).status_code == 200
    # The server's token shows the pages, but must not use the farm token.
    assert buttons(elsewhere, "/boards", authorization=OWN["authorization"]) == set()
    assert post(elsewhere, "/board/drain", "the server's token", name="pi") == 403
    assert farm.done == []


def test_token_in_address_becomes_opaque_cookie(elsewhere: TestClient) -> None:
    answer = elsewhere.get("/boards?token=a&hours=1", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/boards?hours=1")
    assert "=a;" not in answer.headers["set-cookie"]
    assert "Drain pi" in buttons(elsewhere, "/boards")
    elsewhere.cookies.clear()
    assert elsewhere.get("/boards?token=wrong").status_code == 401


def test_farm_pages_report_outage_and_recover(client: TestClient, farm: FakeFarm) -> None:
    farm.away = True
    for path in ("/boards", "/board?name=pi", "/queue", "/job?name=1"):
        answer = client.get(path)
        assert answer.status_code == 503 and "the farm" in answer.text.lower() and f'data-farm="{path}"' in answer.text
        part = client.get(path, headers={"hx-request": "true", "hx-target": "farm"})
        assert part.status_code == 200 and part.text.lstrip().startswith('<div id="farm"')
    assert client.get("/").status_code == 200
    eventually(lambda: "no farm gateway responds" in client.get("/boards").text)
    farm.away = False
    eventually(lambda: client.get("/boards").status_code == 200)
    part = client.get("/boards", headers={"hx-request": "true", "hx-target": "farm"}).text
    assert "pi" in part and "<html" not in part


def test_farm_pages_escape_farm_texts(client: TestClient, farm: FakeFarm) -> None:
    farm.boards = [board(EVIL, EVIL, reason=EVIL, job=EVIL, user=EVIL, since=at(1), host=EVIL, labels={EVIL: EVIL})]
    texts: dict[str, Any] = dict.fromkeys(("title", "user", "project", "reason", "board", "pinned", "selector"), EVIL)
    farm.jobs = [job("1", "done", **texts, outcome=EVIL), job("2", "running", **texts), job("3", **texts)]
    farm.queue = [{**farm.jobs[2], "position": 1, "why": EVIL}]
    farm.cases["1"] = [{"name": EVIL, "outcome": EVIL, "reason": EVIL}]
    farm.happen(EVIL, board=EVIL, job="1", reason=EVIL)
    for path in ("/boards", "/queue", "/job?name=1", "/job?name=3"):
        text = client.get(path).text
        assert "&lt;script&gt;" in text and "<script>alert" not in text
        # A form field needs the exact value.
        assert "\u202e" not in re.sub(r'<input type="hidden" name="name" value="[^"]*">', "", text)


def test_farm_pages_suggest_option_without_farm(tmp_path: Path) -> None:
    with asking(tmp_path) as client:
        assert "/boards" not in client.get("/").text
        for path in ("/boards", "/queue", "/board?name=x", "/job?name=1", "/farm/events", "/job/log?name=1"):
            answer = client.get(path)
            assert answer.status_code == 404 and "hil web --farm local" in answer.text


def test_saved_farm_page_contains_data_without_buttons(client: TestClient) -> None:
    given = {"authorization": "Bearer a"}
    text = client.get("/share?page=/job?name=3", headers=given).text
    assert "one\ntwo\\x1b[0m" in text and "PASS" in text
    text = client.get("/share?page=/queue", headers=given).text
    assert "1 job ahead" in text and "Cancel" not in text.partition("<main")[2]


@pytest.mark.parametrize(("token", "refused"), [("v", 403), ("s", None), ("a", None), ("wrong", 401)])
def test_publish_rejects_viewer_token_of_farm(elsewhere: TestClient, token: str, refused: int | None) -> None:
    given = {"authorization": f"Bearer {token}"}
    answers = [
        elsewhere.post("/publish/missing", json={}, headers=given),
        elsewhere.put("/publish/blobs/x", headers=given),
        elsewhere.post("/publish/sessions", json={}, headers=given),
    ]
    assert [one.status_code if one.status_code in (401, 403) else None for one in answers] == [refused] * 3
