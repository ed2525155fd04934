"""Test that addresses of pages are stable, and that unknown parameters are rejected."""

from __future__ import annotations

import re
import threading
import time
from html import unescape
from importlib import resources
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from support.fake_farm_client import busy_farm
from support.nights import FIRST_NIGHT
from support.shown_profile import example
from support.web import ADDRESS, asking, write_run, write_suite
from support.web_pages import STREAMS, Crawl, routes

from hil.controller.analysis.profile.store import write_profile
from hil.controller.cli.screen import print_web_link
from hil.controller.storage.screen.web_link import make_web_link
from hil.controller.web.access.security import AccessRules
from hil.controller.web.index.folders import index_path
from hil.controller.web.index.index import IndexWriter
from hil.controller.web.index.indexer import Indexer
from hil.controller.web.server import first_index
from hil.controller.web.server.app import PAGES, create_app
from hil.controller.web.server.url_parameters import collect_parameters
from hil.controller.web.text.roots import number_roots

PARAMETERS = collect_parameters(PAGES)


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("runs", "suites", "more")]
    for root in found:
        write_suite(root, "same", [{"board": root.name}], suite="nets", boards=[root.name], started=FIRST_NIGHT)
        write_suite(root, f"only-{root.name}", [{"outcome": "FAIL"}], started=FIRST_NIGHT)
        write_profile(example("a"), root / "profiles" / "a")
    return found


def links(text: str, path: str) -> set[str]:
    return {unescape(one) for one in re.findall(rf'href="({path}\?[^"#]*)"', text)}


def test_addresses_do_not_depend_on_order_of_directories(roots: list[Path]) -> None:
    shown = []
    for order in (roots, roots[::-1]):
        with asking(*order) as client:
            shown.append((links(client.get("/").text, "/session"), links(client.get("/traces").text, "/trace")))
            for link in (*shown[0][0], *shown[0][1]):
                assert client.get(link).status_code == 200, link
    assert all(one == shown[0] for one in shown)
    assert len(shown[0][0]) >= 6 and index_path(roots) == index_path(roots[::-1])


def test_address_with_two_leading_slashes_is_valid(roots: list[Path]) -> None:
    with asking(*roots) as client:
        page = client.get(f"{ADDRESS}//history?q=a")
        assert page.status_code == 200 and page.text == client.get("/history?q=a").text
        assert client.get(f"{ADDRESS}//none").status_code == 404


def test_address_remains_valid_if_directories_are_added(roots: list[Path]) -> None:
    with asking(roots[0]) as client:
        (before,) = {one for one in links(client.get("/").text, "/session") if "only-runs" in one}
    with asking(*roots) as client:
        assert client.get(before).status_code == 200
        (after,) = {one for one in links(client.get("/").text, "/session") if "only-runs" in one and "root" in one}
    with asking(roots[0]) as client:
        assert client.get(after).status_code == 200


def test_ambiguous_session_names_candidates(roots: list[Path]) -> None:
    with asking(*roots) as client:
        answer = client.get("/session?id=same")
        assert answer.status_code == 404 and "several sessions are called" in answer.text
        candidate = unescape(re.findall(r"id=same&amp;root=\d+", answer.text)[0])
        assert client.get(f"/session?{candidate}").status_code == 200


def test_session_is_found_by_end_of_its_path(tmp_path: Path) -> None:
    write_run(tmp_path, "deep/below/one", [{}])
    write_run(tmp_path, "deep/other/two", [{}])
    write_run(tmp_path, "deep/third/two", [{}])
    with asking(tmp_path) as client:
        for name in ("one", "below/one", "deep/below/one", "other/two"):
            assert client.get("/session", params={"id": name}).status_code == 200, name
        for name in ("ne", "two", "elow/one", ""):
            assert client.get("/session", params={"id": name}).status_code == 404, name


def test_numbers_of_directories_are_distinct_and_short(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(200)]
    numbered = number_roots([*paths, paths[0]])
    assert sorted(numbered.values()) == sorted(paths) and all(0 < one < 1_000_000_000 for one in numbered)
    assert number_roots(paths[:1]) == {0: paths[0]}


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("/?bord=x", "board"),
        ("/session?id=same&outcomes=FAIL", "outcome"),
        ("/traces?q=x", "parameters: columns, group, view"),
        ("/compare?a=same&c=same", "parameters: a, b"),
        ("/tensors?id=same&case=case&j0=1", "parameters: id"),
        ("/history/regressions?form=x", "parameters: since"),
        ("/gates?%1b%5b31m=x", "unknown URL parameter"),
    ],
)
def test_unknown_parameter_is_rejected_with_hint(roots: list[Path], address: str, hint: str) -> None:
    with asking(roots[0]) as client:
        answer = client.get(address)
    assert answer.status_code == 400 and "unknown URL parameter" in answer.text and hint in answer.text
    assert "\x1b" not in answer.text


def test_every_route_lists_its_parameters() -> None:
    without = {"/traces", "/nights.csv", "/triage.json", "/traces.csv", "/history/suites.csv", "/queue.csv"}
    assert set(routes()) - without <= PARAMETERS.keys()
    assert {path for path in PARAMETERS if not path.startswith(STREAMS)} <= set(routes())


def test_forms_use_known_parameters() -> None:
    folder = resources.files("hil.controller.web").joinpath("templates")
    checked = 0
    for file in folder.iterdir():
        for path, form in re.findall(
            r'<form[^>]*action="(/[^"]*)" method="get"[^>]*>(.*?)</form>', file.read_text(), re.S
        ):
            names = [one for one in re.findall(r'<(?:input|select)[^>]*\bname="([^"]*)"', form) if "{" not in one]
            assert set(names) <= {*PARAMETERS[path]}, (file.name, path)
            checked += len(names)
    assert checked > 20


@pytest.mark.ci
def test_no_page_links_unknown_parameters(roots: list[Path]) -> None:
    farm = busy_farm()
    with farm.link() as link, asking(*roots, token="t", farm=link) as client:
        client.headers["authorization"] = "Bearer t"
        crawl = Crawl(client, most=150)
        crawl.start(*routes())
        for address, text in crawl.pages():
            assert "unknown URL parameter" not in text, address
        assert len(crawl.visited) > 60


def test_pages_wait_for_first_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs", "one", [{}])
    root = (tmp_path / "runs").resolve()
    with IndexWriter(tmp_path / "index.sqlite") as writer:
        indexer = Indexer(writer, [root])
        app = create_app([root], tmp_path / "index.sqlite", indexer.progress, AccessRules("127.0.0.1"))
        with TestClient(app, base_url=ADDRESS) as client:
            monkeypatch.setattr(first_index, "SESSION_SECONDS", 0.2)
            # Without the index, the session may exist: the status says that the server is not ready.
            early = client.get("/session?id=one")
            assert (early.status_code, early.headers["retry-after"]) == (503, "2")
            assert client.get("/api/there?id=one").json() == {"gone": ""}
            monkeypatch.setattr(first_index, "SESSION_SECONDS", 20.0)
            started = time.monotonic()
            scan = threading.Timer(0.3, indexer.scan)
            scan.start()
            assert client.get("/session?id=one").status_code == 200
            assert 0.2 < time.monotonic() - started < 15
            scan.join()
            assert client.get("/session?id=none").status_code == 404


def test_invalid_change_is_rejected_before_first_index(tmp_path: Path) -> None:
    with IndexWriter(tmp_path / "index.sqlite") as writer:
        indexer = Indexer(writer, [tmp_path])
        app = create_app([tmp_path], tmp_path / "index.sqlite", indexer.progress, AccessRules("127.0.0.1", "secret"))
        with TestClient(app, base_url=ADDRESS, headers={"authorization": "Bearer secret", "origin": ADDRESS}) as client:
            answer = client.post("/triage", data={"case": " ", "remove": "1"})
    assert answer.status_code == 404 and "empty case ID" in answer.text and "reload" not in answer.text


@pytest.mark.parametrize(
    ("url", "link"),
    [
        ("http://lab:8790/", "http://lab:8790/session?id=tuesday"),
        ("https://lab.example/hil/?token=secret", "https://lab.example/hil/session?id=tuesday"),
        ("https://ada:secret@lab.example", "https://lab.example/session?id=tuesday"),
        ("lab:8790", ""),
        ("http://[", ""),
        ("", ""),
    ],
)
def test_link_contains_no_secrets(monkeypatch: pytest.MonkeyPatch, url: str, link: str) -> None:
    monkeypatch.setenv("HIL_WEB_URL", url)
    assert make_web_link(Path("hil-suites/tuesday")) == link


def test_link_of_unprintable_directory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_WEB_URL", ADDRESS)
    assert make_web_link(Path("hil-suites/a\udcff")) == f"{ADDRESS}/session?id=a%3F"


def test_links_of_commands_open_their_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_suite(tmp_path, "reports/nets/sim", [{"id": "a b"}])
    monkeypatch.setenv("HIL_WEB_URL", ADDRESS)
    folder = tmp_path / "reports" / "nets" / "sim"
    with asking(tmp_path) as client:
        for link in (make_web_link(folder), make_web_link(folder, parts=2), make_web_link(folder, "a b", parts=2)):
            assert client.get(link.removeprefix(ADDRESS)).status_code == 200, link


def test_command_prints_link_only_with_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HIL_WEB_URL", raising=False)
    print_web_link("hil-suites/tuesday")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("HIL_WEB_URL", "http://lab:8790")
    print_web_link("hil-suites/tuesday")
    monkeypatch.setenv("HIL_WEB_URL", "lab")
    print_web_link("hil-suites/tuesday")
    assert capsys.readouterr().err.splitlines() == [
        "open http://lab:8790/session?id=tuesday",
        "hil: no link: HIL_WEB_URL is not an http URL",
    ]
