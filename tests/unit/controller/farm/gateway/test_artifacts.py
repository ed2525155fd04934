"""Test the artifact store in a directory and in an S3 bucket."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fsspec", reason="needs the extra `farm`")

from hil.controller.farm.gateway.artifacts import CHUNK, ArtifactStore
from hil.core.digest import digest_of
from hil.errors import FarmError, StorageError, UsageError

WAIT_S = 30.0


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """Return the endpoint of an S3 server with a bucket `farm`."""
    pytest.importorskip("moto.server", reason="needs moto[s3,server]")
    pytest.importorskip("s3fs", reason="needs the extra `s3`")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        endpoint = next(found[0] for line in lines if (found := re.search(r"http://127.0.0.1:\d+", line)))
        yield endpoint
    finally:
        server.kill()
        server.communicate()


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    if request.param == "folder":
        return ArtifactStore(str(tmp_path / "artifacts"))
    return s3_store(request.getfixturevalue("bucket"), f"farm/{tmp_path.name}", monkeypatch)


def s3_store(endpoint: str, place: str, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    import s3fs

    for name, value in (
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    made = s3fs.S3FileSystem(skip_instance_cache=True)
    if not made.exists("farm"):
        made.mkdir("farm")
    return ArtifactStore(f"s3://{place}")


def put(store: ArtifactStore, data: bytes, name: str = "", size: int | None = None) -> str:
    name = name or digest_of(data)
    with store.receive(name, len(data) if size is None else size) as incoming:
        for start in range(0, len(data), CHUNK):
            incoming.add(data[start : start + CHUNK])
        incoming.finish()
    return name


@pytest.mark.ci
@pytest.mark.parametrize("data", [b"", b"small", bytes(range(256)) * 20_000], ids=["empty", "small", "5 MB"])
def test_store_returns_uploaded_data(store: ArtifactStore, data: bytes) -> None:
    name = digest_of(data)
    assert store.list_missing([name, name]) == [name]
    put(store, data)
    assert store.list_missing([name]) == []
    assert store.size(name) == len(data)
    assert b"".join(store.read(name)) == data
    put(store, data)  # A repeated upload succeeds.
    assert b"".join(store.read(name)) == data


def test_store_accepts_sha256_digests(store: ArtifactStore) -> None:
    name = put(store, b"data", digest_of(b"data", "sha256"))
    assert b"".join(store.read(name)) == b"data"


@pytest.mark.ci
def test_store_lists_missing_digests_in_request_order(store: ArtifactStore) -> None:
    names = [digest_of(bytes([number])) for number in range(40)]
    for number in range(0, 40, 2):
        put(store, bytes([number]))
    assert store.list_missing(names) == names[1::2]


def test_store_discards_incomplete_or_mismatched_uploads(store: ArtifactStore) -> None:
    name = digest_of(b"true")
    with pytest.raises(UsageError, match="got blake3"):
        put(store, b"lies", name)
    with pytest.raises(UsageError, match="ended after 2 of 4"):
        put(store, b"tr", name, 4)
    with pytest.raises(UsageError, match="exceeds the announced size"):
        put(store, b"true and more", name, 4)
    with pytest.raises(RuntimeError), store.receive(name, 4) as incoming:
        incoming.add(b"tr")
        raise RuntimeError
    assert store.list_missing([name]) == [name]
    with pytest.raises(FarmError, match=r"blake3.* not found in the farm's store"):
        list(store.read(name))
    with pytest.raises(FarmError, match=r"blake3.* not found in the farm's store"):
        store.size(name)


@pytest.mark.parametrize("name", ["../../etc/passwd", "blake3:", "md5:" + "0" * 32, "blake3:" + "A" * 64, ""])
def test_store_rejects_malformed_digests(store: ArtifactStore, name: str) -> None:
    for attempt in (
        lambda: store.list_missing([name]),
        lambda: store.receive(name, 1),
        lambda: list(store.read(name)),
        lambda: store.size(name),
        lambda: store.delete(name),
    ):
        with pytest.raises(UsageError):
            attempt()


def test_store_delete_succeeds_for_missing_file(store: ArtifactStore) -> None:
    name = put(store, b"old")
    store.delete(name)
    assert store.list_missing([name]) == [name]
    store.delete(name)


def test_store_sweep_deletes_abandoned_uploads(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    name = put(store, b"kept")
    left = tmp_path / ".incoming" / "upload-left"
    left.write_bytes(b"part")
    assert store.sweep(60, time.time()) == 0
    assert store.sweep(60, time.time() + 120) == 1
    assert not left.exists() and store.list_missing([name]) == []


def test_store_reports_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"the farm's store .* failed"):
        ArtifactStore(str(tmp_path / "file" / "artifacts"))


def test_store_rejects_unknown_url_scheme() -> None:
    with pytest.raises(UsageError, match="cannot open the farm's store"):
        ArtifactStore("nonsense://somewhere")


def test_store_reports_unreachable_s3_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="needs the extra `s3`")
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_MAX_ATTEMPTS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"the farm's store .* failed"):
        ArtifactStore("s3://farm/x").list_missing([digest_of(b"")])
