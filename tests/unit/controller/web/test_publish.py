"""Test what `hil web` accepts from `hil publish`."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.web import asking, write_run

from hil.controller.web.files import quota
from hil.controller.web.publish import parcels, published
from hil.core.cancellation import WorkCancelled, cancel_on
from hil.core.digest import digest_of
from hil.errors import UsageError

BEARER = {"authorization": "Bearer the token"}
RECORD = b'{"schema": 1, "id": "one", "cases": []}'
# The size of an empty store: four directories and the counter.
OVERHEAD = 5 * quota.INODE_BYTES


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


def test_session_appears_after_last_file_arrives(client: TestClient, kept: Path) -> None:
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


def test_upload_pieces_require_consecutive_offsets(client: TestClient) -> None:
    data = bytes(range(256)) * 100
    digest = digest_of(data)
    assert put(client, data[:100], 0, len(data), digest).json() == {"have": 100}
    assert client.post("/publish/missing", json={"digests": {digest: len(data)}}).json() == {"missing": {digest: 100}}
    for offset in (0, 99, 101, 200):
        again = put(client, data[offset : offset + 5], offset, len(data), digest)
        assert (again.status_code, again.json()["hint"]) == (409, "100")
    assert put(client, data[100:], 100, len(data), digest).json() == {"have": len(data)}
    assert put(client, data, 0, len(data), digest).json() == {"have": len(data)}


def test_upload_rejects_content_with_wrong_digest(client: TestClient, kept: Path) -> None:
    answer = put(client, b"other", digest=digest_of(b"right"))
    assert answer.status_code == 422
    assert list((kept / ".hil-web" / "blobs").iterdir()) == list((kept / ".hil-web" / "partial").iterdir()) == []


def test_upload_ignores_data_of_other_size(client: TestClient) -> None:
    """Regression: data larger than a file, under the file's digest, blocked the file's upload."""
    digest = digest_of(RECORD)
    assert put(client, bytes(1000), 0, 2000, digest).json() == {"have": 1000}
    asked = {"digests": {digest: len(RECORD)}}
    assert client.post("/publish/missing", json=asked).json() == {"missing": {digest: 0}}
    assert put(client, RECORD).json() == {"have": len(RECORD)}
    assert finish(client, {"run.json": RECORD}).status_code == 200


def put_part(store: published.PublishedStore, number: int) -> Path:
    """Upload a part of a file. Return the path of the incomplete upload."""
    folder = store.folder / ".hil-web" / "partial"
    before = set(folder.iterdir()) if folder.is_dir() else set()
    store.put(digest_of(b"%d" % number), 0, 100, b"x")
    (path,) = set(folder.iterdir()) - before
    os.utime(path, (time.time() - 1000 + number,) * 2)
    return path


def test_new_upload_replaces_oldest_incomplete_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 256 incomplete uploads blocked all uploads for a day."""
    monkeypatch.setattr(published, "_MAX_PARTIAL", 3)
    store = published.PublishedStore(tmp_path)
    paths = [put_part(store, number) for number in range(3)]
    store.put(digest_of(b"0"), 1, 100, b"x")  # now the first upload is the newest
    last = put_part(store, 3)
    assert set(last.parent.iterdir()) == {paths[0], paths[2], last}
    assert store.used == quota.count_tree(tmp_path, ".hil-web")


def test_new_upload_deletes_expired_incomplete_uploads(tmp_path: Path) -> None:
    store = published.PublishedStore(tmp_path)
    path = put_part(store, 0)
    os.utime(path, (1, 1))
    new = put_part(store, 1)
    assert list(path.parent.iterdir()) == [new]
    assert store.used == quota.count_tree(tmp_path, ".hil-web")


def test_altered_blob_requires_new_upload(client: TestClient, kept: Path) -> None:
    put(client, RECORD)
    blob = next((kept / ".hil-web" / "blobs").iterdir())
    blob.chmod(0o644)
    blob.write_bytes(RECORD[::-1])
    assert finish(client, {"run.json": RECORD}).status_code == 409
    put(client, RECORD)
    assert finish(client, {"run.json": RECORD}).json()["new"] is True


def test_session_name_conflict_preserves_existing_session(client: TestClient, kept: Path) -> None:
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
def test_session_rejects_unsafe_file_names(client: TestClient, kept: Path, tmp_path: Path, name: str) -> None:
    put(client, RECORD)
    before = {path for path in tmp_path.rglob("*") if kept not in (path, *path.parents)}
    entries = [["run.json", digest_of(RECORD), len(RECORD)], [name, digest_of(RECORD), len(RECORD)]]
    text = json.dumps({"schema": 1, "id": "one", "files": entries})
    assert client.post("/publish/sessions", content=text).status_code == 400
    assert not (kept / "one").exists()
    assert {path for path in tmp_path.rglob("*") if kept not in (path, *path.parents)} == before


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "..", ".hil-web", "a/b", "a\0b", "\ud800", "x" * 500, "<b>"])
def test_session_name_maps_to_single_directory(client: TestClient, kept: Path, name: str) -> None:
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
def test_publish_rejects_malformed_requests(client: TestClient, kept: Path, body: bytes) -> None:
    for where in ("/publish/sessions", "/publish/missing"):
        answer = client.post(where, content=body)
        assert answer.status_code == 400 and answer.json()["error"]
    assert not kept.exists() or [path.name for path in kept.iterdir()] == [".hil-web"]


@pytest.mark.parametrize("digest", ["x", "blake3:" + "g" * 64, "blake3:..%2f" + "a" * 60, "md5:" + "0" * 32])
def test_upload_rejects_malformed_digest(client: TestClient, kept: Path, digest: str) -> None:
    assert put(client, b"x", digest=digest).status_code in (400, 404)
    assert not kept.exists() or not list(kept.rglob("*x*"))


@pytest.mark.parametrize("given", ["", "x", "-1", "1e3", "9" * 40, "²", "NaN"])
def test_upload_rejects_invalid_offset_and_size(client: TestClient, given: str) -> None:
    for asked in ({"offset": given, "size": "1"}, {"offset": "0", "size": given}):
        assert client.put(f"/publish/blobs/{digest_of(b'x')}", params=asked, content=b"x").status_code == 400


def test_publish_requires_token(tmp_path: Path) -> None:
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


def test_upload_rejects_oversized_piece(client: TestClient) -> None:
    data = bytes(9 << 20)
    assert put(client, data).status_code == 413

    def dripped():
        yield from (bytes(1 << 20) for _ in range(9))

    answer = client.put(f"/publish/blobs/{digest_of(data)}?offset=0&size={len(data)}", content=dripped())
    assert answer.status_code == 413


def test_store_enforces_quota_and_deletes_unused_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_COUNT_SECONDS", 0.0)
    store = published.PublishedStore(tmp_path, most=OVERHEAD + quota.INODE_BYTES)
    store.put(digest_of(b"a" * 600), 0, 600, b"a" * 600)
    with pytest.raises(published.Refused, match="storage limit") as refused:
        store.put(digest_of(b"b" * 600), 0, 600, b"b" * 600)
    assert refused.value.status == 507
    # Blobs without a session are deleted after a while.
    monkeypatch.setattr(published, "KEEP_SECONDS", -1.0)
    assert store.put(digest_of(b"b" * 600), 0, 600, b"b" * 600) == 600


def test_store_spares_blobs_of_sessions_at_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "KEEP_SECONDS", -1.0)
    monkeypatch.setattr(published, "_COUNT_SECONDS", 0.0)
    session = quota.count_bytes(0) + quota.NAME_BYTES + quota.count_name_bytes("run.json", 600)
    store = published.PublishedStore(tmp_path, most=OVERHEAD + session + quota.INODE_BYTES)
    store.put(digest_of(b"a" * 600), 0, 600, b"a" * 600)
    store.finish(parcels.Parcel("one", [parcels.FileEntry("run.json", digest_of(b"a" * 600), 600)]))
    with pytest.raises(published.Refused):
        store.put(digest_of(b"b" * 600), 0, 600, b"b" * 600)
    shutil.rmtree(tmp_path / "one")
    assert store.put(digest_of(b"b" * 600), 0, 600, b"b" * 600) == 600


def disk(**values: int) -> Any:
    """Return file system values of a disk with free space."""
    return types.SimpleNamespace(
        **{"f_files": 1 << 30, "f_favail": 1 << 29, "f_bavail": 1 << 30, "f_frsize": 4096} | values
    )


def used(folder: Path) -> tuple[int, int]:
    """Return the size of all blocks and the number of entries below a directory, without the counter of a store."""
    found = {path.lstat().st_ino: path.lstat() for path in folder.rglob("*") if path.name != "used"}
    return sum(one.st_blocks * 512 for one in found.values()), len(found)


def test_quota_includes_directories(tmp_path: Path) -> None:
    """Regression: a session with 15 directories per name used 1.1 GB and 300,000 inodes outside the quota."""
    store = published.PublishedStore(tmp_path / "there", most=4 << 20)
    store.put(digest_of(RECORD), 0, len(RECORD), RECORD)
    before = used(tmp_path)
    files = [parcels.FileEntry("run.json", digest_of(RECORD), len(RECORD))]
    files += [parcels.FileEntry(f"{n:x}/" * 15 + "x", digest_of(RECORD), len(RECORD)) for n in range(200)]
    with pytest.raises(published.Refused, match="storage limit") as refused:
        store.finish(parcels.Parcel("one", files))
    assert refused.value.status == 507
    assert used(tmp_path) == before


def test_parcel_limits_number_of_directories() -> None:
    names = ["run.json", *("/".join(f"{n:x}" for _ in range(15)) + "/x" for n in range(2000))]
    entries = [[name, digest_of(RECORD), 1] for name in names]
    with pytest.raises(UsageError, match="directories"):
        parcels.check_parcel({"schema": 1, "id": "one", "files": entries})


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV])
def test_quota_includes_copies_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Without hard links, each name of a content is a copy."""
    store = published.PublishedStore(tmp_path / "there", most=2 << 20)
    store.put(digest_of(RECORD), 0, len(RECORD), RECORD)
    data = b"x" * 100_000
    store.put(digest_of(data), 0, len(data), data)
    before = used(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(code, "no links here")

    monkeypatch.setattr(published.os, "link", refuse)
    files = [parcels.FileEntry("run.json", digest_of(RECORD), len(RECORD))]
    files += [parcels.FileEntry(f"{number}.npy", digest_of(data), len(data)) for number in range(30)]
    with pytest.raises(published.Refused, match="storage limit"):
        store.finish(parcels.Parcel("one", files))
    assert used(tmp_path) == before
    store.finish(parcels.Parcel("one", files[:5]))
    assert (tmp_path / "there" / "one" / "3.npy").read_bytes() == data


def test_store_copies_blob_at_link_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ext4 allows 65,000 links of a file. Each further name was a copy, 588 MB of 40 kB."""
    most, link = 10, os.link

    def limited(source: Path, target: Path) -> None:
        if source.stat().st_nlink >= most:
            raise OSError(errno.EMLINK, "too many links")
        link(source, target)

    monkeypatch.setattr(published.os, "link", limited)
    store = published.PublishedStore(tmp_path)
    data = b"x" * 100_000
    for one in (RECORD, data):
        store.put(digest_of(one), 0, len(one), one)
    files = [parcels.FileEntry("run.json", digest_of(RECORD), len(RECORD))]
    files += [parcels.FileEntry(f"{number}.npy", digest_of(data), len(data)) for number in range(45)]
    store.finish(parcels.Parcel("one", files))
    names = list((tmp_path / "one").glob("*.npy"))
    assert len({path.stat().st_ino for path in names}) == 5  # nine names each, because the blob is the tenth link
    assert {path.read_bytes() for path in names} == {data}


def test_quota_includes_index_size_of_records(tmp_path: Path) -> None:
    """A record in many sessions uses disk space once, but index space each time."""
    store = published.PublishedStore(tmp_path, most=8 << 20)
    data = b" " * 100_000 + RECORD
    store.put(digest_of(data), 0, len(data), data)
    stored = 0
    with pytest.raises(published.Refused, match="storage limit"):
        for number in range(100):
            store.finish(parcels.Parcel(f"{number}", [parcels.FileEntry("run.json", digest_of(data), len(data))]))
            stored += 1
    assert 4 <= stored <= 7


def test_running_count_equals_recount_of_store(tmp_path: Path) -> None:
    store = published.PublishedStore(tmp_path)
    contents = [RECORD, b"", b"x" * 5000, b"y" * 50_000]
    for data in contents:
        store.put(digest_of(data), 0, len(data), data)
    with pytest.raises(published.Refused):
        store.put(digest_of(b"right"), 0, 5, b"wrong")
    names = ("run.json", "a/b/empty", "a/b/c.npy", "a/more.jsonl")
    files = [parcels.FileEntry(name, digest_of(data), len(data)) for name, data in zip(names, contents, strict=True)]
    store.finish(parcels.Parcel("one", files))
    assert store.used == quota.count_tree(tmp_path, ".hil-web")
    # Directories and names count the maximum size of their blocks.
    assert store.used > sum(used(tmp_path)[:1])


def test_quota_includes_inode_of_small_files(tmp_path: Path) -> None:
    store = published.PublishedStore(tmp_path, most=OVERHEAD + 10 * quota.INODE_BYTES)
    with pytest.raises(published.Refused, match="storage limit"):
        for number in range(11):
            data = str(number).encode()
            store.put(digest_of(data), 0, len(data), data)
    assert number == 10


def put_whole(store: published.PublishedStore, data: bytes) -> int:
    return store.put(digest_of(data), 0, len(data), data)


def test_servers_of_same_directory_share_quota(tmp_path: Path) -> None:
    """Regression: each server counted alone, so two servers used twice the quota."""
    most = OVERHEAD + 10 * quota.INODE_BYTES
    servers = [published.PublishedStore(tmp_path, most) for _ in range(2)]
    for number in range(10):
        put_whole(servers[number % 2], str(number).encode())
    for server in servers:
        with pytest.raises(published.Refused, match="storage limit"):
            put_whole(server, b"one more")
    assert quota.count_tree(tmp_path, ".hil-web") <= most


def test_store_recounts_after_damaged_counter(tmp_path: Path) -> None:
    most = OVERHEAD + 2 * quota.INODE_BYTES
    for number in range(2):
        put_whole(published.PublishedStore(tmp_path, most), str(number).encode())
    for left in ("", "no number"):
        (tmp_path / ".hil-web/used").write_text(left)
        with pytest.raises(published.Refused, match="storage limit"):
            put_whole(published.PublishedStore(tmp_path, most), b"one more")


def test_store_lock_wait_ends_when_client_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, flag = published.PublishedStore(tmp_path), threading.Event()
    put_whole(store, b"one")
    with (tmp_path / ".hil-web/used").open("rb") as other, cancel_on(flag):
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(published.time, "sleep", lambda _: flag.set())
        with pytest.raises(WorkCancelled):
            put_whole(store, b"two")
    assert put_whole(store, b"two") == 3


def test_upload_rejects_when_inodes_run_out(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota.os, "statvfs", lambda _: disk(f_favail=1000))
    answer = put(client, b"x")
    assert (answer.status_code, answer.json()["error"]) == (507, "the server's disk is full")
    assert not list(tmp_files(client))


def tmp_files(client: TestClient) -> Iterator[Path]:
    """Return the files in the store of a client's server, without the counter."""
    folder: Path = client.app.state.published.folder  # type: ignore[attr-defined]
    return (path for path in folder.rglob("*") if path.is_file() and path.name != "used")


def test_session_rejects_names_equal_except_for_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a case-insensitive file system, "A" must not overwrite the content of "a"."""
    link = os.link
    monkeypatch.setattr(published.os, "link", lambda source, target: link(source, str(target).lower()))
    store = published.PublishedStore(tmp_path / "there")
    for data in (RECORD, b"one", b"two"):
        store.put(digest_of(data), 0, len(data), data)
    files = {"run.json": RECORD, "a": b"one", "A": b"two"}
    entries = [parcels.FileEntry(name, digest_of(data), len(data)) for name, data in files.items()]
    with pytest.raises(published.Refused, match="name 'A'"):
        store.finish(parcels.Parcel("one", entries))
    blobs = {path.read_bytes() for path in (tmp_path / "there" / ".hil-web" / "blobs").iterdir()}
    assert blobs == {RECORD, b"one", b"two"}
    assert not list((tmp_path / "there" / ".hil-web" / "staging").iterdir())


def test_interrupted_check_of_upload_resumes(client: TestClient, kept: Path) -> None:
    """Simulate a server that ended between the last piece and the check."""
    put(client, b"first"), put(client, RECORD[:5], 0, len(RECORD), digest_of(RECORD))
    partial = next((kept / ".hil-web" / "partial").iterdir())
    partial.write_bytes(RECORD)
    assert put(client, b"", len(RECORD), len(RECORD), digest_of(RECORD)).json() == {"have": len(RECORD)}
    assert finish(client, {"run.json": RECORD}).status_code == 200


def test_publish_rejects_request_with_excessive_values(client: TestClient) -> None:
    answer = client.post("/publish/sessions", content=b"[" + b"[]," * 500_000 + b"[]]")
    assert answer.status_code == 400 and "invalid JSON" in answer.json()["error"]


def test_upload_reports_full_disk(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota.os, "statvfs", lambda _: disk(f_bavail=100))
    answer = put(client, b"x")
    assert (answer.status_code, answer.json()["error"]) == (507, "the server's disk is full")


def test_session_limits_files_and_size(monkeypatch: pytest.MonkeyPatch, client: TestClient) -> None:
    monkeypatch.setattr(parcels, "MAX_FILES", 1)
    assert "allowed" in finish(client, {"run.json": RECORD, "a": b"a"}).json()["error"]
    monkeypatch.setattr(parcels, "MAX_FILES", 10)
    monkeypatch.setattr(parcels, "MAX_SESSION", 40)
    assert "allowed" in finish(client, {"run.json": RECORD, "a": b"aaaaaa"}).json()["error"]


def test_page_shows_published_record(tmp_path: Path, client: TestClient) -> None:
    folder = write_run(tmp_path / "other", "one", [{"name": "model", "outcome": "FAIL", "reason": "it is wrong"}])
    data = (folder / "run.json").read_bytes()
    put(client, data)
    url = finish(client, {"run.json": data}).json()["url"]
    with asking(tmp_path / "runs") as fresh:
        assert "it is wrong" in fresh.get(url).text
