from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.agent.store import BlobStore
from hil.digest import digest_of
from hil.errors import BlobDamaged, LoadFailed, UsageError


def put(store: BlobStore, data: bytes, offset: int = 0) -> str:
    digest = digest_of(data)
    with store.upload(digest, len(data), offset) as upload:
        upload.write(memoryview(data)[offset:])
        upload.finish()
    return digest


@pytest.fixture
def store(tmp_path) -> BlobStore:
    return BlobStore(tmp_path / "store")


def test_a_blob_is_there_once_it_is_verified(store):
    digest = digest_of(b"hello")
    assert not store.has(digest)
    with store.upload(digest, 5, 0) as upload:
        upload.write(memoryview(b"hello"))
        assert not store.has(digest)
        upload.finish()
    assert store.path(digest).read_bytes() == b"hello"


@given(st.text(max_size=90))
def test_what_is_no_digest_never_becomes_a_path(tmp_path_factory, text):
    store = BlobStore(tmp_path_factory.mktemp("fuzz"))
    for call in (store.has, store.path, store.partial_size, lambda name: store.upload(name, 1, 0)):
        with pytest.raises(UsageError, match="not a digest"):
            call(text)


def test_an_upload_goes_on_only_where_it_was_cut(store):
    data = os.urandom(1000)
    digest = digest_of(data)
    with store.upload(digest, 1000, 0) as upload:
        upload.write(memoryview(data)[:600])
    assert store.partial_size(digest) == 600
    for offset in (1, 599, 601, 1001):
        with pytest.raises(UsageError, match="goes on at 600"):
            store.upload(digest, 1000, offset)
    assert put(store, data, 600) == digest
    assert store.path(digest).read_bytes() == data
    assert store.partial_size(digest) == 0


def test_two_uploads_of_one_blob_at_once_are_refused(store):
    digest = digest_of(b"x")
    with store.upload(digest, 1, 0), pytest.raises(UsageError, match="being uploaded"):
        store.upload(digest, 1, 0)
    with store.upload(digest, 1, 0):
        pass


def test_a_blob_that_was_damaged_on_disk_is_found_out_by_the_next_agent(tmp_path):
    digest = put(BlobStore(tmp_path), b"sound")
    BlobStore(tmp_path).path(digest).write_bytes(b"rotten")
    later = BlobStore(tmp_path)
    assert not later.has(digest)
    with pytest.raises(LoadFailed):
        later.path(digest)


def test_the_least_recently_used_blobs_go_when_the_quota_is_reached(tmp_path):
    store = BlobStore(tmp_path, quota_bytes=3000)
    blobs = [put(store, bytes([number]) * 1000) for number in range(3)]
    for age, digest in enumerate(reversed(blobs)):
        stamp = time.time() - 100 * (age + 1)
        os.utime(store.path(digest), (stamp, stamp))
    os.utime(store.path(blobs[0]))
    newest = put(store, b"n" * 1000)
    assert [store.has(digest) for digest in (*blobs, newest)] == [True, False, True, True]


def test_a_blob_that_a_program_uses_is_never_evicted(tmp_path):
    store = BlobStore(tmp_path, quota_bytes=1500)
    used = put(store, b"u" * 1000)
    folder, pinned = store.link_program([("main", used)])
    with pytest.raises(LoadFailed, match="quota"):
        put(store, b"n" * 1000)
    assert (folder / "main").read_bytes() == b"u" * 1000
    store.unlink_program(folder, pinned)
    put(store, b"n" * 1000)
    assert not store.has(used)


@pytest.mark.parametrize("name", ["", "..", "/etc/x", "a/../../x", "a\0b", "x" * 256])
def test_a_program_file_stays_in_its_folder(store, name):
    digest = put(store, b"data")
    with pytest.raises(UsageError):
        store.link_program([("main", digest), (name, digest)])
    assert not list((store.root / "programs").iterdir())


def test_files_of_a_program_may_lie_in_folders_but_not_in_each_other(store):
    digest = put(store, b"data")
    folder, _ = store.link_program([("main", digest), ("weights/part.bin", digest)])
    assert (folder / "weights" / "part.bin").read_bytes() == b"data"
    for names in (["main", "main"], ["main", "main/below"]):
        with pytest.raises(UsageError):
            store.link_program([(name, digest) for name in names])


def test_more_or_other_bytes_than_announced_are_refused(store):
    with store.upload(digest_of(b"ab"), 2, 0) as upload, pytest.raises(UsageError, match="more than"):
        upload.write(memoryview(b"abc"))
    with store.upload(digest_of(b"ab"), 2, 0) as upload:
        upload.write(memoryview(b"xy"))
        with pytest.raises(BlobDamaged, match="damaged"):
            upload.finish()
    assert store.partial_size(digest_of(b"ab")) == 0
