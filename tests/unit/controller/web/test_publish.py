"""What `hil web` takes of `hil publish`, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.web import asking, write_run

from hil.controller.web import parcels, published
from hil.core.digest import digest_of

BEARER = {"authorization": "Bearer the token"}
RECORD = b'{"schema": 1, "id": "one", "cases": []}'


@pytest.fixture
def client(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    with asking(tmp_path / "runs", token="the token") as found:
        found.headers.update(BEARER)
        yield found


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "published"


def put(client: TestClient, data: bytes, offset: int = 0, size: int | None = None, digest: str = "") -> Any:
    where = f"/publish/blobs/{digest or digest_of(data)}"
    return client.put(where, params={"offset": offset, "size": len(data) if size is None else size}, content=data)


def finish(client: TestClient, files: dict[str, bytes], name: str = "one") -> Any:
    entries = [[path, digest_of(data), len(data)] for path, data in files.items()]
    return client.post("/publish/sessions", json={"schema": 1, "id": name, "files": entries})


def test_a_session_appears_once_all_of_it_is_there(client: TestClient, kept: Path) -> None:
    files = {"run.json": RECORD, "model/logs/a.log": b"a log", "empty": b""}
    asked = {"digests": {digest_of(data): len(data) for data in files.values()}}
    assert client.post("/publish/missing", json=asked).json() == {"missing": dict.fromkeys(asked["digests"], 0)}
    put(client, RECORD), put(client, b"a log")
    refused = finish(client, files)
    assert (refused.status_code, refused.json()["missing"]) == (409, {digest_of(b""): 0})
    assert not (kept / "one").exists()
    put(client, b"")
    answer = finish(client, files)
    assert answer.json() == {"id": "one", "new": True, "url": "/session?id=published%2Fone"}
    assert {path.relative_to(kept / "one").as_posix(): path.read_bytes() for path in (kept / "one").rglob("*.*")} == {
        "run.json": RECORD,
        "model/logs/a.log": b"a log",
    }
    assert client.post("/publish/missing", json=asked).json() == {"missing": {}}
    assert finish(client, files).json()["new"] is False


def test_pieces_follow_one_another(client: TestClient) -> None:
    data = bytes(range(256)) * 100
    digest = digest_of(data)
    assert put(client, data[:100], 0, len(data), digest).json() == {"have": 100}
    assert client.post("/publish/missing", json={"digests": {digest: len(data)}}).json() == {"missing": {digest: 100}}
    for offset in (0, 99, 101, 200):
        again = put(client, data[offset : offset + 5], offset, len(data), digest)
        assert (again.status_code, again.json()["hint"]) == (409, "100")
    assert put(client, data[100:], 100, len(data), digest).json() == {"have": len(data)}
    assert put(client, data, 0, len(data), digest).json() == {"have": len(data)}


def test_content_that_is_not_what_it_says_does_not_count(client: TestClient, kept: Path) -> None:
    answer = put(client, b"other", digest=digest_of(b"right"))
    assert answer.status_code == 422
    assert list((kept / ".hil-web" / "blobs").iterdir()) == list((kept / ".hil-web" / "partial").iterdir()) == []


def test_content_that_was_altered_on_the_disk_is_sent_again(client: TestClient, kept: Path) -> None:
    put(client, RECORD)
    blob = next((kept / ".hil-web" / "blobs").iterdir())
    blob.chmod(0o644)
    blob.write_bytes(RECORD[::-1])
    assert finish(client, {"run.json": RECORD}).status_code == 409
    put(client, RECORD)
    assert finish(client, {"run.json": RECORD}).json()["new"] is True


def test_another_session_of_that_name_stays(client: TestClient, kept: Path) -> None:
    for data in (RECORD, b"{}", b"more"):
        put(client, data)
    assert finish(client, {"run.json": RECORD}).status_code == 200
    for files in ({"run.json": b"{}"}, {"run.json": RECORD, "more": b"more"}):
        assert finish(client, files).status_code == 409
    assert (kept / "one" / "run.json").read_bytes() == RECORD
    assert finish(client, {"run.json": b"{}"}, "two").json()["new"] is True
    (kept / "link").symlink_to(kept / "one")
    assert finish(client, {"run.json": RECORD}, "link").status_code == 409


NAMES = (
    "../x",
    "/x",
    "a/../../x",
    "a//b",
    "",
    ".",
    "..",
    "a/.",
    ".hil-web/blobs/x",
    "a/.hidden",
    "a\\b",
    "a\0b",
    "a\nb",
)
NAMES += ("\ud800", "\u202ea", "a" * 256, "/".join("a" * 17), "é" * 200, "run.json/x", "x" * 2000)


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_elsewhere(client: TestClient, kept: Path, tmp_path: Path, name: str) -> None:
    put(client, RECORD)
    before = {path for path in tmp_path.rglob("*") if kept not in (path, *path.parents)}
    entries = [["run.json", digest_of(RECORD), len(RECORD)], [name, digest_of(RECORD), len(RECORD)]]
    text = json.dumps({"schema": 1, "id": "one", "files": entries})
    assert client.post("/publish/sessions", content=text).status_code == 400
    assert not (kept / "one").exists()
    assert {path for path in tmp_path.rglob("*") if kept not in (path, *path.parents)} == before


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "..", ".hil-web", "a/b", "a\0b", "\ud800", "x" * 500, "<b>"])
def test_a_sessions_name_is_one_folder_below_the_store(client: TestClient, kept: Path, name: str) -> None:
    put(client, RECORD)
    text = json.dumps({"schema": 1, "id": name, "files": [["run.json", digest_of(RECORD), len(RECORD)]]})
    answer = client.post("/publish/sessions", content=text)
    assert answer.status_code == 200
    found = [path for path in kept.iterdir() if path.name != ".hil-web"]
    assert [path.name for path in found] == [answer.json()["id"]] and (found[0] / "run.json").is_file()


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"x"', b"[" * 100_000, b'{"schema": 2}', b'{"schema": 1, "id": 1, "files": []}'),
        *(b'{"schema": 1, "id": "x", "files": [1]}', b'{"schema": 1, "id": "x", "files": [["run.json", 1, 1]]}'),
        *(
            b'{"schema": 1, "id": "x", "files": [["run.json", "blake3:../x", 1]]}',
            b"\xff\xfe",
            b'{"digests": {"x": 1}}',
        ),
        *(b'{"schema": 1, "id": "x", "files": []}', b'{"digests": []}', b'{"digests": {"blake3:": -1}}', b"NaN"),
    ],
)
def test_nonsense_is_refused(client: TestClient, kept: Path, body: bytes) -> None:
    for where in ("/publish/sessions", "/publish/missing"):
        answer = client.post(where, content=body)
        assert answer.status_code == 400 and answer.json()["error"]
    assert not kept.exists() or [path.name for path in kept.iterdir()] == [".hil-web"]


@pytest.mark.parametrize("digest", ["x", "blake3:" + "g" * 64, "blake3:..%2f" + "a" * 60, "md5:" + "0" * 32])
def test_no_digest_leads_elsewhere(client: TestClient, kept: Path, digest: str) -> None:
    assert put(client, b"x", digest=digest).status_code in (400, 404)
    assert not kept.exists() or not list(kept.rglob("*x*"))


@pytest.mark.parametrize("given", ["", "x", "-1", "1e3", "9" * 40, "²", "NaN"])
def test_no_number_of_a_piece_is_a_failure(client: TestClient, given: str) -> None:
    for asked in ({"offset": given, "size": "1"}, {"offset": "0", "size": given}):
        assert client.put(f"/publish/blobs/{digest_of(b'x')}", params=asked, content=b"x").status_code == 400


def test_publishing_needs_the_token(tmp_path: Path) -> None:
    with asking(tmp_path, token="the token") as client:
        for headers in ({}, {"authorization": "Bearer other"}, {**BEARER, "origin": "http://evil.example"}):
            for ask in (
                client.post("/publish/missing", json={}, headers=headers),
                client.put("/publish/blobs/x", headers=headers),
            ):
                assert ask.status_code == (401 if headers.get("authorization") == "Bearer other" else 403)
    with asking(tmp_path) as client:
        assert client.post("/publish/missing", json={}, headers=BEARER).status_code == 403
    assert list(tmp_path.iterdir()) == []


def test_a_piece_has_a_bound(client: TestClient) -> None:
    data = bytes(9 << 20)
    assert put(client, data).status_code == 413

    def dripped():
        yield from (bytes(1 << 20) for _ in range(9))

    answer = client.put(f"/publish/blobs/{digest_of(data)}?offset=0&size={len(data)}", content=dripped())
    assert answer.status_code == 413


def test_there_is_room_up_to_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = published.PublishedStore(tmp_path, most=1000)
    store.put(digest_of(b"a" * 600), 0, 600, b"a" * 600)
    with pytest.raises(published.Refused, match="may have") as refused:
        store.put(digest_of(b"b" * 600), 0, 600, b"b" * 600)
    assert refused.value.status == 507
    # What no session has is deleted after a while, and makes room.
    monkeypatch.setattr(published, "KEEP_S", -1.0)
    assert store.put(digest_of(b"b" * 600), 0, 600, b"b" * 600) == 600


def test_what_a_session_has_is_not_deleted_to_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "KEEP_S", -1.0)
    store = published.PublishedStore(tmp_path, most=1000)
    store.put(digest_of(b"a" * 600), 0, 600, b"a" * 600)
    store.finish(parcels.Parcel("one", [parcels.FileEntry("run.json", digest_of(b"a" * 600), 600)]))
    with pytest.raises(published.Refused):
        store.put(digest_of(b"b" * 600), 0, 600, b"b" * 600)
    shutil.rmtree(tmp_path / "one")
    assert store.put(digest_of(b"b" * 600), 0, 600, b"b" * 600) == 600


def test_a_full_disk_is_told(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(1 << 40, 1 << 40, 100)
    monkeypatch.setattr(published.shutil, "disk_usage", lambda _: usage)
    answer = put(client, b"x")
    assert (answer.status_code, answer.json()["error"]) == (507, "the server's disk is full")


def test_a_session_has_a_bound(monkeypatch: pytest.MonkeyPatch, client: TestClient) -> None:
    monkeypatch.setattr(parcels, "MOST_FILES", 1)
    assert "allowed" in finish(client, {"run.json": RECORD, "a": b"a"}).json()["error"]
    monkeypatch.setattr(parcels, "MOST_FILES", 10)
    monkeypatch.setattr(parcels, "MOST_SESSION", 40)
    assert "allowed" in finish(client, {"run.json": RECORD, "a": b"aaaaaa"}).json()["error"]


def test_what_is_shown_is_what_was_published(tmp_path: Path, client: TestClient) -> None:
    folder = write_run(tmp_path / "other", "one", [{"name": "model", "outcome": "FAIL", "reason": "it is wrong"}])
    data = (folder / "run.json").read_bytes()
    put(client, data)
    url = finish(client, {"run.json": data}).json()["url"]
    with asking(tmp_path / "runs") as fresh:
        assert "it is wrong" in fresh.get(url).text
