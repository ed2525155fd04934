"""Test the JSON API: every page with data has a document that matches the schema, with the permissions of the page."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import onnx
import pytest
from starlette.testclient import TestClient
from support.fake_farm_client import busy_farm
from support.histories import history_entry
from support.layer_models import residual_cnn
from support.schemas import check_document
from support.shown_profile import example
from support.web import asking, write_record, write_run, write_suite
from support.web_hostile import PAYLOADS, hostile_root
from support.web_pages import Crawl, routes
from support.web_tensors import write_tensors

from hil.controller.analysis.profile.store import write_profile
from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.store import HistoryStore
from hil.controller.web.server.app import PAGES
from hil.controller.web.server.url_parameters import collect_documents
from hil.controller.workloads.triage.entries import make_entry
from hil.controller.workloads.triage.triage_file import NAME, write_triage
from tools.schemas import name_page

VIEW = "columns=table-of-cases~case&group=table-of-cases~operator&view=mine"
DOCUMENTS = collect_documents(PAGES)
# Routes without a document: files, downloads, streams, and data in other formats.
OTHERS = re.compile(
    r".*\.csv|/triage\.json|/log|/file|/share|/job/log(\.txt)?|/(farm/)?events|/api/.*|/graph/node-data|/perfetto/.*"
    r"|/board/console|/tensors/failing|/tensors/map\.(svg|png)"
)


def get_document(client: TestClient, address: str) -> dict[str, Any]:
    """Return the document of a page, checked with the schema."""
    path, _, query = address.partition("?")
    answer = client.get(f"/api/v1{'/home' if path == '/' else path}?{query}")
    assert answer.status_code == 200, (address, answer.text)
    assert answer.headers["content-type"] == "application/json"
    document = json.loads(answer.text, parse_constant=pytest.fail)
    check_document(document, name_page(path), "web")
    return document


def get_error(client: TestClient, address: str, **request: Any) -> tuple[int, dict[str, Any]]:
    """Return the status and the document of an error, checked with the schema."""
    answer = client.get(address, **request)
    document = answer.json()
    check_document(document, "error", "web")
    assert document["status"] == answer.status_code
    return answer.status_code, document


def test_every_page_has_document() -> None:
    without = {one for one in routes() if not OTHERS.fullmatch(one)} - DOCUMENTS.keys()
    assert not without, f"add DOCUMENTS to the modules of {without}: see docs/internals/adding-pages.md"
    assert DOCUMENTS.keys() <= {*routes()}


def write_everything(root: Path) -> None:
    onnx.save(residual_cnn(), root / "net.onnx")
    output = {"name": "y", "passed": True, "max_abs": 0.25, "sqnr_db": "inf", "shape": [2, 3], "dtype": "float32"}
    for number in range(12):
        time, outcome = (100.5 if number < 6 else 200.25), "FAIL" if number > 7 else "PASS"
        case = {"id": "case", "device_p50_ns": time, "iterations": 20, "outcome": outcome, "ended": outcome}
        case |= {"outputs": [output], "against": "cpu", "max_abs": float("nan")}
        case |= {"other_references": [{"against": "other", "outcome": "PASS", "outputs": [output]}]}
        write_suite(root, f"night-{number:02d}", [case], started=1.7e9 + number * 86400, suite="nets")
    layer = {"name": "conv", "op": "Conv", "nodes": ["stem"], "depth": 0, "cumulative": None}
    layer["isolated"] = {"outcome": "FAIL", "outputs": [output]}
    write_record(root / "bisect" / "bisect.json", {"layers": [layer], "model": "net.onnx"})
    write_record(root / "matrix" / "matrix.json", {"targets": [{"name": "pi"}]})
    write_run(root / "matrix", "pi", [{}])
    values = np.arange(4, dtype=np.float32)
    write_tensors(root, {"y": values + np.float32([0, -0.5, 0, np.inf])}, {"y": values})
    folder = write_tensors(root, {"y": values}, {"y": values}, name="raw")
    raw = folder / "model" / "outputs" / "0.npy"
    np.save(raw, np.zeros(4, np.dtype("V1")))
    record = json.loads((folder / "run.json").read_text())
    for one in record["cases"][0]["outputs"]:
        del one["dtype"]
    write_record(folder / "run.json", record)
    (root / "run" / "consoles").mkdir()
    (root / "run" / "consoles" / "pi.jsonl").write_text('{"host_ns": 5, "time_s": 1.7e9, "text": "<b>"}\n')
    write_profile(example("a"), root / "profiles" / "a")
    write_profile(example("b"), root / "profiles" / "b")
    compiled = root / "profiles" / "c"
    compiled.mkdir()
    (compiled / "passes.csv").write_text("phase,depth,pass,wall_ms\nInput,0,Input,10\nInput,1,CSE,4\n")
    head = "dispatch,onnx_nodes,share_estimate,time_us_estimate,flops_estimate,bytes_estimate,bound_estimate"
    (compiled / "dispatches.csv").write_text(f"{head}\nmain,Conv,0.5,10,1e6,2e6,compute\n")
    (compiled / "executables.csv").write_text("bytes\n7\n")
    (root / "profiles" / "only.pftrace.gz").write_bytes(b"\x1f\x8b")
    gate = {"schema": 1, "id": "gate", "folder": "", "created": 1.7e9, "finished": True, "history": "h"}
    gate |= {"baseline": "main", "commit": "feed", "min_effect": 0.02, "budget_s": 300.0, "exit_code": 0}
    write_record(root / "gate" / "gate.json", {**gate, "fail_on": [], "unmeasured": [], "verdicts": []})
    write_triage(root / NAME, [make_entry(case="case", state="known", owner="ada")])


@pytest.mark.ci
def test_every_document_matches_schema(tmp_path: Path) -> None:
    write_everything(tmp_path)
    with HistoryStore.open(tmp_path / "history", create=True) as store:
        store.add([history_entry("r", p50_ns=100.0)])
        series = store.series()[0].id
    farm = busy_farm()
    history = HistoryPlace(tmp_path / "history")
    pages = (
        "/ /?q=night /session?id=night-00 /session?id=bisect /session?id=matrix /session?id=gate"
        " /case?id=night-00&case=case /case?id=bisect&case=conv /graph?id=bisect /compare /compare?b=night-11"
        " /compare?a=night-00&b=night-11&all=1 /compare?a=night-00&b=night-11&show=broke /history /history?q=ca"
        " /history?case=case /history?suite=nets /history/regressions?since=2020-01-01"
        " /tensors?id=run&case=model /tensors?id=run&case=model&now=all /tensors?id=raw&case=model /traces"
        " /trace?profile=0/profiles/a /trace?profile=0/profiles/c /trace?a=0/profiles/a&b=0/profiles/b"
        f" /trace?profile=0/profiles/only.pftrace.gz /gates /triage /series /series?id={series} /search?q=case"
        " /boards /board?name=pi /queue /job?name=1 /job?name=2 /console?id=run&file=consoles/pi.jsonl"
    ).split()
    with farm.link() as link, asking(tmp_path, token="t", farm=link, history=history) as client:
        client.headers["authorization"] = "Bearer t"
        cause = re.findall(r'href="(/cause\?[^"]*)"', client.get("/history/regressions?since=2020-01-01").text)[0]
        found = {page: get_document(client, page) for page in (*pages, html.unescape(cause))}
    # Together, the documents show every type.
    shapes = {tuple(document) for document in found.values()}
    for path, templates in DOCUMENTS.items():
        for template, recipe in templates.items():
            assert recipe.kind.__struct_fields__ in shapes, (path, template)
    night = found["/session?id=night-00"]
    assert (night["cases"][0]["device_p50_ns"], night["total"]) == (100.5, 1)
    assert found["/case?id=night-00&case=case"]["outputs"][0]["sqnr_db"] == "inf"
    assert found["/history?case=case"]["points"][0]["id"] == "night-11"
    judged = found["/tensors?id=run&case=model"]
    assert judged["judgement"]["statistics"]["mismatches"] == 2
    assert judged["worst"][0]["index"] == [3] and judged["worst"][0]["difference"] == "inf"
    assert found["/tensors?id=raw&case=model"]["choices"]
    (line,) = found["/console?id=run&file=consoles/pi.jsonl"]["lines"]
    assert (line["number"], line["host_ns"], line["text"]) == (1, 5, "<b>")
    assert [one["name"] for one in found["/boards"]["boards"]] == [one["name"] for one in farm.boards]


def test_document_has_page_rows_and_no_second_computation(tmp_path: Path) -> None:
    cases = [{"id": f"case-{number:03d}", "outcome": "FAIL" if number == 7 else "PASS"} for number in range(250)]
    write_suite(tmp_path, "s", cases)
    with asking(tmp_path) as client:
        first, last = (get_document(client, f"/session?id=s&page={page}") for page in (1, 3))
        failing = get_document(client, "/session?id=s&outcome=failing")
    assert (len(first["cases"]), len(last["cases"]), first["total"], first["pages"]) == (100, 50, 250, 3)
    assert first["cases"][0]["name"] == "case-007" and [one["name"] for one in failing["cases"]] == ["case-007"]


def test_errors_are_json_with_suggestion(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    with asking(tmp_path) as client:
        for address, status, text, hint in (
            ("/session?id=none", 404, "session 'none' not found", ""),
            ("/session?id=one&outcom=x", 400, "unknown URL parameter 'outcom'", "did you mean 'outcome'?"),
            ("/session?id=one&page=x", 400, "page must be a number", ""),
            ("/session?id=one&order=tim", 400, "invalid case order 'tim'", "did you mean 'time'?"),
            ("/home?verdict=fial", 400, "invalid verdict 'fial'", "did you mean 'fail'?"),
            ("/triage?state=knwon", 400, "invalid state 'knwon'", "did you mean 'known'?"),
            ("/sesion?id=one", 404, "page '/sesion' not found", "did you mean '/session'?"),
            ("/queue", 404, "not connected to a farm", "hil web --farm local"),
            ("/file?id=one&file=run.json", 404, "page '/file' not found", ""),
        ):
            found, document = get_error(client, f"/api/v1{address}")
            assert (found, text in document["error"], hint in document["hint"]) == (status, True, True), document
        assert client.post("/api/v1/triage", headers={"authorization": "Bearer x"}).json()["status"] == 403


def test_table_parameters_are_known_to_pages_and_tables(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    with asking(tmp_path) as client:
        for path in ("/session", "/api/v1/session"):
            assert client.get(f"{path}?id=one&{VIEW}").status_code == 200
        assert client.get("/log?id=one&group=op").status_code == 400


def test_internal_error_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.web.site.WebSite.render_page", lambda *_, **__: 1 / 0)
    with asking(tmp_path) as client, TestClient(client.app, client.base_url, raise_server_exceptions=False) as quiet:
        status, document = get_error(quiet, "/api/v1/search")
    assert (status, document["kind"]) == (500, "HTTPError") and "terminal" in document["hint"]


def test_document_needs_token_of_page(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    with asking(tmp_path, host="0.0.0.0", token="0123456789abcdef") as client:
        status, document = get_error(client, "/api/v1/session?id=one")
        assert (status, document["kind"]) == (401, "AccessRefused") and "Token required" in document["error"]
        assert get_error(client, "/api/v1/none")[0] == 401 and client.get("/api/v1/openapi.json").status_code == 401
        client.headers["authorization"] = "Bearer 0123456789abcdef"
        assert get_document(client, "/session?id=one")["session"]["id"] == "one"


def test_marked_sessions_redirect_within_api(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path, name, [{}])
    with asking(tmp_path) as client:
        answer = client.get("/api/v1/compare?s=a&s=b", follow_redirects=False)
        assert answer.headers["location"].startswith("/api/v1/compare?a=")
        assert len(get_document(client, "/compare?s=a&s=b")["a"]["sessions"]) == 1


def test_headers_of_page_updates_do_not_change_document(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [{}])
    with asking(tmp_path) as client:
        plain = client.get("/api/v1/home").json()
        assert client.get("/api/v1/home", headers={"hx-target": "nights", "hx-request": "true"}).json() == plain


@pytest.mark.ci
@pytest.mark.parametrize("name", ["script", "half"])
def test_documents_of_hostile_records_match_schema(tmp_path: Path, name: str) -> None:
    seen = set()
    with asking(hostile_root(tmp_path, PAYLOADS[name])) as client:
        found = Crawl(client, most=150)
        found.start("/", *routes())
        for address, _ in list(found.pages()):
            path = urlsplit(address).path
            if path in DOCUMENTS and client.get(address).status_code == 200:
                get_document(client, address)
                seen.add(path)
    assert {"/", "/session", "/case", "/history", "/graph", "/compare"} <= seen


def test_openapi_describes_pages_and_parameters(tmp_path: Path) -> None:
    with asking(tmp_path) as client:
        document = client.get("/api/v1/openapi.json").json()
    assert {one.removeprefix("/api/v1") for one in document["paths"]} == {"/home", *DOCUMENTS} - {"/"}
    answer = document["paths"]["/api/v1/session"]["get"]
    assert [one["name"] for one in answer["parameters"]][:3] == ["id", "root", "q"]
    reference = answer["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert "cases" in schema["properties"]
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert used <= document["components"]["schemas"].keys()
    assert msgspec.json.decode(msgspec.json.encode(document)) == document
