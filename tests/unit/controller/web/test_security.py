"""Test access to `hil web` from an attacker's view."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient
from support.web import asking, write_run

from hil.controller.cli.stored.web import web
from hil.controller.web.access.security import COOKIE, HEADERS, MAX_BODY, AccessRules
from hil.controller.web.server.server import choose_url_host, open_listener
from hil.errors import UsageError

TOKEN = "a token of some length"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, "one", [{"name": "model"}])
    return folder


@pytest.fixture(scope="module")
def ours(root: Path):
    """Serve on loopback, with a token for changes."""
    with asking(root, token=TOKEN) as client:
        yield client


@pytest.fixture(scope="module")
def everybodys(root: Path):
    """Serve on a public address."""
    with asking(root, token=TOKEN, host="192.0.2.1") as client:
        yield client


def test_responses_include_security_headers(ours: TestClient) -> None:
    answers = [ours.get("/"), ours.get("/nothing"), ours.get("/session?id=none"), ours.get("/static/hil.js")]
    answers += [ours.post("/"), ours.get("/", headers={"host": "evil.example"}), ours.get("/static/../app.py")]
    for answer in answers:
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, answer.url


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "0.0.0.0", "[::2]", "localhost@evil", "[", ""]
)
def test_loopback_server_rejects_foreign_host_names(ours: TestClient, host: str) -> None:
    assert ours.get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:8790", "127.0.0.1:1", "[::1]:8790", "127.9.9.9"])
def test_loopback_server_accepts_loopback_names(ours: TestClient, host: str) -> None:
    assert ours.get("/", headers={"host": host}).status_code == 200


def test_public_server_requires_token_for_all_pages(everybodys: TestClient) -> None:
    for given in ({}, {"authorization": "Bearer "}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
        for path in ("/", "/session?id=one", "/static/hil.js", "/events", "/log?id=one", "/nothing"):
            answer = everybodys.get(path, headers=given)
            assert (answer.status_code, "model" in answer.text) == (401, False)
    assert everybodys.get("/", headers=BEARER).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_server_reports_wrong_token_to_programs(root: Path, host: str) -> None:
    with asking(root, token=TOKEN, host=host) as client:
        answer = client.post("/publish/missing", headers={"authorization": "Bearer wrong"})
    assert (answer.status_code, answer.text) == (401, "Invalid token for this server.")


@pytest.mark.parametrize(
    "host, told",
    [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("192.0.2.7", "192.0.2.7"), ("::1", "::1")],
)
def test_reached_at_returns_listening_address(host: str, told: str) -> None:
    assert choose_url_host(host) == told


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_reached_at_replaces_wildcard_address(host: str) -> None:
    assert choose_url_host(host) not in ("", "0.0.0.0", "::")


def test_listener_suggests_fix_for_unusable_address() -> None:
    with open_listener("127.0.0.1", 0) as taken:
        with pytest.raises(UsageError) as of_port:
            open_listener("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(UsageError) as of_host:
            open_listener("192.0.2.7", 0)
    assert "--port" in of_port.value.hint
    assert "--host" in of_host.value.hint and "--port" not in of_host.value.hint


def test_web_rejects_empty_token(tmp_path: Path) -> None:
    for given in ("", " "):
        answer = CliRunner().invoke(web, ["--runs", str(tmp_path), "--token", given])
        assert answer.exit_code and "empty --token" in f"{answer.output}{answer.exception}"


def test_server_without_token_rejects_empty_tokens(root: Path) -> None:
    with asking(root) as client:
        for given in ("", "x"):
            answer = client.post("/", headers={"authorization": f"Bearer {given}", "cookie": f"{COOKIE}={given}"})
            assert answer.status_code == 403
    assert not AccessRules("127.0.0.1").accepts("")


def test_token_in_address_sets_cookie_and_redirects(everybodys: TestClient) -> None:
    answer = everybodys.get(f"/session?id=one&token={TOKEN}&q=a%26b", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/session?id=one&q=a%26b")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and TOKEN not in cookie and "Domain" not in cookie
    everybodys.cookies.clear()
    kept = {"cookie": cookie.partition(";")[0]}
    assert everybodys.get("/", headers=kept).status_code == 200
    assert everybodys.get("/", headers={"cookie": kept["cookie"] + "0"}).status_code == 401
    assert everybodys.get(f"/?token={TOKEN}x").status_code == 401


@pytest.mark.parametrize(
    "path", ["//evil.example/", "/\\evil.example", "/%2F/evil.example", "/%5Cevil", "/%0d%0aX-Bad:1"]
)
def test_token_redirect_stays_on_server(everybodys: TestClient, path: str) -> None:
    answer = everybodys.get(f"http://127.0.0.1:8790{path}?token={TOKEN}", follow_redirects=False)
    where = urlsplit(answer.headers["location"])
    assert (where.scheme, where.netloc, where.path[:2] in ("//", "/\\")) == ("", "", False)
    assert "x-bad" not in answer.headers
    everybodys.cookies.clear()


def cookie(client: TestClient) -> dict[str, str]:
    answer = client.get(f"/?token={TOKEN}", follow_redirects=False)
    client.cookies.clear()
    return {"cookie": answer.headers["set-cookie"].partition(";")[0]}


def test_change_requires_token_and_same_origin(ours: TestClient) -> None:
    own = {"origin": "http://127.0.0.1:8790"}
    assert ours.post("/", headers=own).status_code == 403
    assert ours.post("/", headers={**own, **cookie(ours)}).status_code == 405  # accepted, but the route has no POST
    assert ours.post("/", headers=BEARER).status_code == 405
    for foreign in ("http://evil.example", "null", "", "http://127.0.0.1:8791", "file://", "chrome-extension://x", "["):
        assert ours.post("/", headers={"origin": foreign, **cookie(ours)}).status_code == 403
    # A request without an origin is rejected.
    assert ours.post("/", headers=cookie(ours)).status_code == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "GETX"])
def test_other_methods_require_token(ours: TestClient, method: str) -> None:
    assert ours.request(method, "/").status_code == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_server_rejects_embedding_by_other_sites(ours: TestClient, site: str) -> None:
    for mode, kind in (("no-cors", "script"), ("cors", "empty"), ("no-cors", "image"), ("navigate", "iframe")):
        told = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": kind}
        assert ours.get("/", headers=told).status_code == 403
    link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert ours.get("/", headers=link).status_code == 200


def test_server_limits_request_size(ours: TestClient) -> None:
    assert ours.post("/", headers=BEARER, content=b"x" * (MAX_BODY + 1)).status_code == 413
    for length in ("-1", "1e3", "9" * 30, "\xb2".encode("latin-1"), b"0x10"):
        assert ours.get("/", headers={"content-length": length}).status_code == 413


@pytest.mark.parametrize(
    "query",
    [
        *(
            "&".join("a=1" for _ in range(3000)),
            "q=" + "a%20" * 5000,
            'q="',
            "q=%22%22%22",
            "q=NEAR(",
            "q=abc*",
            "q=a%00bcd",
        ),
        *("q=%ED%A0%80%ED%A0%80", "q='%20or%201=1--", "order=created;drop", "order=-", "page=0", "page=999999999"),
        *(
            "page=-1",
            "page=99999999999999999999",
            "page=%C2%B2",
            "page=1e9",
            "page=NaN",
            "root=4294967296",
            "=",
            "%",
            "&&&",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/", "/session", "/case", "/log"])
def test_invalid_query_never_causes_server_error(ours: TestClient, path: str, query: str) -> None:
    answer = ours.get(f"{path}?id=one&case=model&{query}")
    assert answer.status_code < 500 and "Traceback" not in answer.text and "site-packages" not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/static/../app.py",
            "/static/..%2f..%2fapp.py",
            "/static/%2e%2e/app.py",
            "/static//etc/passwd",
            "/static/%00",
        ),
        *("/static/" + "a" * 5000, "/static/vendor", "/static", "/" + "%2e%2e/" * 20 + "etc/passwd", "/%ff%fe"),
    ],
)
def test_static_files_reject_path_traversal(ours: TestClient, path: str) -> None:
    answer = ours.get(path)
    assert answer.status_code in (400, 404, 405) and "root:" not in answer.text and "import" not in answer.text


def test_log_route_serves_only_logs_of_session(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "one", [{"name": "model"}])
    logs = folder / "model" / "logs"
    logs.mkdir(parents=True)
    (logs / "own.log").write_text("<script>alert(1)</script>\x1b[31m")
    (tmp_path / "secret.log").write_text("secret")
    (logs / "link.log").symlink_to(tmp_path / "secret.log")
    (folder / "away").symlink_to(tmp_path)
    __import__("os").mkfifo(logs / "pipe.log")
    with asking(tmp_path / "runs") as client:
        good = client.get("/log?id=one&file=model/logs/own.log")
        assert (good.status_code, good.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        for file in ("../../secret.log", str(tmp_path / "secret.log"), "model/logs/link.log", "away/secret.log"):
            answer = client.get("/log", params={"id": "one", "file": file})
            assert answer.status_code == 404 and "secret\n" not in answer.text
        for file in (
            "model/logs/pipe.log",
            "model/logs",
            "",
            "run.json",
            "x\0.log",
            "a" * 5000 + ".log",
            "/dev/zero.log",
        ):
            assert client.get("/log", params={"id": "one", "file": file}).status_code == 404


def test_log_route_shows_end_of_large_log(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "one")
    with (folder / "big.log").open("wb") as file:
        file.truncate(8 << 30)
        file.seek(0, 2)
        file.write(b"the end")
    with asking(tmp_path) as client:
        answer = client.get("/log?id=one&file=big.log")
    assert answer.text.endswith("the end") and len(answer.content) < 1 << 20


def test_server_error_hides_details(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("/home/me/secret")

    monkeypatch.setattr("hil.controller.web.index.sessions.list_sessions", broken)
    with asking(root) as client:
        client = TestClient(client.app, base_url=client.base_url, raise_server_exceptions=False)
        answer = client.get("/")
    assert answer.status_code == 500 and "secret" not in answer.text and "RuntimeError" not in answer.text
    assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"]
