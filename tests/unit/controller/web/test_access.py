"""Test which pages of `hil web` need a token. Every route is listed here; an unlisted route fails the test."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Mount
from starlette.testclient import TestClient
from support.fake_farm_client import FakeFarm, busy_farm
from support.web import ADDRESS, asking, write_run

from hil.controller.web.access import peers, security, visitors
from hil.controller.web.access.peers import Peer, find_peer, find_peer_of, find_peer_user
from hil.controller.web.server.app import PAGES
from hil.controller.web.server.url_parameters import collect_parameters

TOKEN = "the server's token"
BEARER = {"authorization": f"Bearer {TOKEN}"}
# Readable on loopback without a token, unless a farm is shown.
SESSIONS = """
    / /session /case /log /file /compare /history /history/regressions /graph /graph/node-data /tensors /traces /trace
    /share /events /api/there /api/graph /api/tensors/cell /static /perfetto/ /perfetto/ui/{name:path} /perfetto/trace
    /sessions.csv /session.csv /session/table.csv /session/targets.csv /case.csv /compare.csv /tensors.csv /graph.csv
    /case/positions.csv
    /search /search.csv /api/v1/openapi.json /console /console.csv /graph/scopes.csv
    /tensors/failing /tensors/map.svg /tensors/map.png
    /series /series.csv /gates /cause /changes.csv /nights.csv /triage.csv /triage.json
    /history.csv /history/suites.csv /history/regressions.csv /traces.csv /trace.csv /trace/compilation.csv
    /trace/roofline.csv
"""
# Available only with a farm.
FARM = """
    /boards /board /board/console /queue /job /job/log /job/log.txt /farm/events
    /boards.csv /board/leases.csv /board/use.csv /boards/use.csv /events.csv /jobs.csv /queue.csv /queue/waits.csv
    /job/jobs.csv /job/leases.csv /job/cases.csv
"""
# Routes that change something.
CHANGES = """
    /board/drain /board/resume /board/power /job/cancel /history/annotate /triage
    /publish/missing /publish/blobs/{digest} /publish/sessions
"""


def routes(client: TestClient) -> Iterator[tuple[str, str]]:
    """Yield each method and path of the application."""
    for one in client.app.routes:  # type: ignore[attr-defined]
        included = getattr(one, "original_router", None)  # newer versions of FastAPI keep routers
        for route in included.routes if included else (one,):
            for method in ("GET",) if isinstance(route, Mount) else route.methods:
                yield method, route.path


@pytest.fixture
def farm() -> FakeFarm:
    return busy_farm()


@pytest.fixture
def shown(farm: FakeFarm, tmp_path: Path) -> Iterator[TestClient]:
    """Serve on loopback with a farm."""
    write_run(tmp_path, "one", [{"name": "model"}])
    with farm.link() as link, asking(tmp_path, token=TOKEN, farm=link) as client:
        yield client


def test_access_lists_classify_every_route(shown: TestClient) -> None:
    assert {path for _, path in routes(shown)} == {*SESSIONS.split(), *FARM.split(), *CHANGES.split()}


def test_every_route_requires_token_with_farm(shown: TestClient) -> None:
    for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic x"}, {"cookie": "hil_token=x"}):
        for method, path in routes(shown):
            answer = shown.request(method, path, headers=given)
            assert answer.status_code == 401, (method, path)
            assert len(answer.content) < 200, (method, path)
    assert shown.get("/nothing").status_code == 401
    assert shown.get("/", headers=BEARER).status_code == 200


def test_only_changes_require_token_without_farm(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [{"name": "model"}])
    with asking(tmp_path, token=TOKEN) as client:
        for method, path in routes(client):
            if path == "/events":  # this stream never ends
                continue
            status = client.request(method, path).status_code
            assert (status == 403) == (method not in ("GET", "HEAD")), (method, path, status)
            if path in FARM.split():
                assert status == 404, path


def test_farm_view_rejects_request_without_token(shown: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security.AccessRules, "is_open", property(lambda self: True))
    for path in FARM.split():
        named = "name" in collect_parameters(PAGES).get(path, ())
        answer = shown.get(path, params={"name": "1"} if named else {})
        assert answer.status_code in (403, 404), path
        assert "token required for farm pages" in answer.text or "over" in answer.text, path


def login(client: TestClient, token: str = TOKEN) -> dict[str, str]:
    """Return the cookie header of a browser after a login."""
    answer = client.get(f"/?token={token}", follow_redirects=False)
    client.cookies.clear()
    return {"cookie": answer.headers["set-cookie"].partition(";")[0]}


def test_cookie_works_only_on_issuing_server(tmp_path: Path) -> None:
    with asking(tmp_path, token=TOKEN, host="192.0.2.1") as one, asking(tmp_path, token=TOKEN, host="192.0.2.1") as two:
        kept = login(one)
        assert one.get("/", headers=kept).status_code == 200
        assert two.get("/", headers=kept).status_code == 401


@pytest.mark.parametrize("token", [TOKEN, "a"])
def test_cookie_works_only_for_logged_in_user(shown: TestClient, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setattr(security, "find_peer_of", lambda scope: Peer("1000", "1000"))
    kept = login(shown, token)
    assert shown.get("/boards", headers=kept).status_code == 200
    # Browsers send the cookie to a server of another user on another port of this host too.
    monkeypatch.setattr(security, "find_peer_of", lambda scope: Peer("65534", "65534"))
    assert shown.get("/boards", headers=kept).status_code == 401
    drain = {"origin": ADDRESS, **kept}
    assert shown.post("/board/drain", data={"name": "pi"}, headers=drain).status_code == 401


def test_guard_limits_lookups_of_unknown_tokens(shown: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "_MOST_WAITING_OF_CLIENT", 0)
    answer = shown.get("/", headers={"authorization": "Bearer wrong"})
    assert answer.status_code == 429 and answer.headers["retry-after"]
    assert "content-security-policy" in answer.headers
    assert shown.get("/", headers=BEARER).status_code == 200


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux only")


@pytest.fixture(params=["query", "tables"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one of the kernel's interfaces only."""
    if request.param == "tables":
        monkeypatch.setattr(peers, "_query_socket", lambda here, there: None)
        return
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        ends = [(ipaddress.ip_address(host), port) for host, port in (client.getsockname(), client.getpeername())]
        if peers._query_socket(*ends) is None:
            pytest.skip("no sock_diag here")
    monkeypatch.setattr(peers, "_find_row", lambda here, there: None)


@LINUX
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_user_of_peer_returns_owner_of_connection(host: str) -> None:
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        pytest.skip(f"no {host} here")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        here, there = client.getsockname()[:2], listener.getsockname()[:2]
        assert find_peer_user(here, there) == str(os.getuid())
        assert not find_peer_user(there, (here[0], 1))


@LINUX
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("listens, connects", [("::", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1")])
def test_find_peer_finds_user_of_mapped_address(listens: str, connects: str) -> None:
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    try:
        listener = socket.create_server((listens, 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except (OSError, ValueError):
        pytest.skip("no IPv6 here")
    with listener, socket.create_connection((connects, listener.getsockname()[1])):
        connection = listener.accept()[0]
        with connection:
            found = find_peer(connection, connection.getpeername()[:2], connection.getsockname()[:2])
    assert found == Peer(str(os.getuid()), str(os.getuid()))


@LINUX
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("end", ["shutdown", "close", "reset"])
def test_find_peer_trusts_no_closed_connection(end: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        connection, address = listener.accept()
        with connection:
            if end == "shutdown":
                client.shutdown(socket.SHUT_WR)
            elif end == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if end != "shutdown":
                client.close()
            found = [find_peer(connection, address, listener.getsockname()) for _ in range(2)]
            assert end == "reset" or find_peer_user(address, listener.getsockname()) is None
    assert found[0].user != found[1].user
    assert all(one.user.startswith("unknown") and one.name == "unknown" for one in found)


@LINUX
def test_find_peer_rejects_port_of_earlier_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, address = listener.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with connection, socket.create_connection(listener.getsockname(), source_address=address):
            assert find_peer_user(address, listener.getsockname()) == str(os.getuid())
            assert find_peer(connection, address, listener.getsockname()).user.startswith("unknown")


def test_find_peer_asks_no_kernel_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_peer_user", None)
    with socket.socket() as connection:
        assert find_peer(connection, ("192.0.2.7", 5), ("192.0.2.1", 80)) == Peer("", "192.0.2.7")


@pytest.mark.parametrize(
    ("client", "name"),
    [
        (("192.0.2.7", 5), "192.0.2.7"),
        (("::ffff:192.0.2.7", 5), "192.0.2.7"),
        (("2001:db8::1:2", 5), "2001:db8::/64"),
        (("testclient", 5), ""),
        (None, ""),
    ],
)
def test_peer_of_names_client_by_address(client: Any, name: str) -> None:
    assert find_peer_of({"client": client}) == Peer("", name)
    assert find_peer_of({"client": client, peers.PEER: Peer("1", "1")}) == Peer("1", "1")


@pytest.mark.parametrize("client", [None, ("testclient", 50000), ("", 1)])
def test_user_of_peer_returns_none_without_address(client: Any) -> None:
    assert find_peer_user(client, ("127.0.0.1", 8790)) is None
    assert find_peer_user(("127.0.0.1", 1), None) is None


def test_user_of_peer_returns_empty_for_unlisted_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_peer_user(("127.0.0.1", 1), ("127.0.0.1", 8790)) == ""
    monkeypatch.setattr(peers, "_TABLES", {4: Path("/nowhere"), 6: Path("/nowhere")})
    assert find_peer_user(("127.0.0.1", 1), ("127.0.0.1", 8790)) == ""
