from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.agent import store as store_module
from hil.agent.store import BlobStore
from hil.core.digest import digest_of
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
    for offset in (1, 599, 601):
        with pytest.raises(BlobDamaged, match="goes on at 600"):
            store.upload(digest, 1000, offset)
    with pytest.raises(UsageError, match="cannot go on at 1001"):
        store.upload(digest, 1000, 1001)
    assert put(store, data, 600) == digest
    assert store.path(digest).read_bytes() == data
    assert store.partial_size(digest) == 0


def test_two_uploads_of_one_blob_at_once_are_refused(store, monkeypatch):
    monkeypatch.setattr(store_module, "_SETTLES_S", 0.5)
    digest = digest_of(b"x")
    with store.upload(digest, 1, 0), pytest.raises(UsageError, match="being uploaded"):
        store.upload(digest, 1, 0)
    with store.upload(digest, 1, 0):
        pass


def alter(path: Path, data: bytes, *, keep_times: bool = False) -> None:
    """Write to a file of the store, as whoever runs as its owner can; later than a tick of the files' clock."""
    time.sleep(0.05)
    before = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(data)
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        path.chmod(stat.S_IMODE(before.st_mode))


def test_a_blob_that_was_damaged_on_disk_is_found_out_by_the_next_agent(tmp_path):
    digest = put(BlobStore(tmp_path), b"sound")
    alter(BlobStore(tmp_path).path(digest), b"rotten")
    later = BlobStore(tmp_path)
    assert not later.has(digest)
    with pytest.raises(BlobDamaged, match="is not on the board"):
        later.path(digest)


@pytest.mark.parametrize("keep_times", [False, True])
@pytest.mark.parametrize("data", [b"rotten", b"ROT"], ids=["longer", "of the same size"])
def test_a_blob_that_is_altered_while_the_agent_runs_is_found_out_at_its_next_use(store, data, keep_times):
    digest = put(store, b"sound")
    for use in (store.path, lambda one: store.link_program([("main", one)])):
        put(store, b"sound") if not store.has(digest) else None
        alter(store._path(digest), data, keep_times=keep_times)
        with pytest.raises(BlobDamaged, match="was altered on the board"):
            use(digest)
        assert not store.has(digest)
    assert not list((store.root / "programs").iterdir())
    put(store, b"sound")
    assert store.path(digest).read_bytes() == b"sound"


def test_a_program_that_alters_its_own_file_alters_no_other_ones(store):
    digest = put(store, b"sound")
    folder, pinned = store.link_program([("main", digest)])
    assert stat.S_IMODE((folder / "main").stat().st_mode) == 0o400
    alter(folder / "main", b"ROT", keep_times=True)
    store.unlink_program(folder, pinned)
    with pytest.raises(BlobDamaged):
        store.path(digest)


def test_what_a_session_used_is_checked_again_for_the_next_one(store, monkeypatch):
    digest = put(store, b"sound")
    store.unlink_program(*store.link_program([("main", digest)]))
    # In the very moment in which the agent notes that the file's times are changed, a program is at it.
    alter(store._path(digest), b"ROT", keep_times=True)
    store._verified[digest] = store_module._look(store._path(digest))
    assert store.has(digest)
    store.forget_session()
    assert not store.has(digest)


def test_an_unaltered_blob_is_hashed_once_however_often_it_is_used(store, monkeypatch):
    digest = put(store, b"sound")
    hashed = []
    digest_file = store_module.digests.digest_file
    monkeypatch.setattr(store_module.digests, "digest_file", lambda *of: hashed.append(of) or digest_file(*of))
    for _ in range(3):
        held = [store.link_program([("main", digest), ("twice", digest)]) for _ in range(2)]
        assert store.has(digest)
        for one in held:
            store.unlink_program(*one)
    assert not hashed
    store.forget_session()
    assert store.has(digest) and store.has(digest)
    assert len(hashed) == 1


@pytest.fixture
def while_hashing(monkeypatch):
    """Do something once, after a blob was hashed and before the store is told the digest."""

    def wait_for(meanwhile) -> list[object]:
        digest_file, hashed = store_module.digests.digest_file, []

        def hashing(*of):
            digest = digest_file(*of)
            hashed.append(of)
            if len(hashed) == 1:
                time.sleep(0.05)  # a tick of the files' clock
                meanwhile()
            return digest

        monkeypatch.setattr(store_module.digests, "digest_file", hashing)
        return hashed

    return wait_for


def test_a_blob_whose_links_come_and_go_while_it_is_hashed_was_altered_by_nobody(store, while_hashing):
    digest = put(store, b"sound")
    held = store.link_program([("main", digest)])
    store.forget_session()
    hashed = while_hashing(lambda: store.unlink_program(*held))
    assert store.path(digest).read_bytes() == b"sound" and len(hashed) == 2
    store.forget_session()
    linked = while_hashing(lambda: store.link_program([("main", digest)]))
    # The program's own look at it has hashed it, and its link is known.
    assert store.path(digest).read_bytes() == b"sound" and len(linked) == 2


@pytest.mark.parametrize("by_us", [False, True])
def test_a_blob_that_is_altered_while_it_is_hashed_is_found_out(store, while_hashing, by_us):
    digest = put(store, b"sound")
    held = store.link_program([("main", digest)])
    store.forget_session()

    def meanwhile() -> None:
        if by_us:
            store.unlink_program(*held)
        alter(store._path(digest), b"ROT", keep_times=True)

    while_hashing(meanwhile)
    with pytest.raises(BlobDamaged, match="was altered on the board"):
        store.path(digest)
    assert not store._path(digest).exists()


def test_a_blob_that_comes_again_while_a_damaged_one_is_hashed_is_not_dropped_for_that(store, while_hashing):
    digest = put(store, b"sound")
    alter(store._path(digest), b"ROT")
    while_hashing(lambda: put(store, b"sound"))
    assert store.path(digest).read_bytes() == b"sound"


def test_whatever_lies_in_a_blobs_place_it_is_no_blob(store, tmp_path):
    digest = digest_of(b"sound")
    (tmp_path / "elsewhere").write_bytes(b"sound")
    place = store._path(digest)
    place.parent.mkdir(parents=True)
    for plant in (
        lambda: place.symlink_to(tmp_path / "elsewhere"),
        lambda: os.mkfifo(place),
        lambda: (place.mkdir(), (place / "file").touch()),
    ):
        plant()
        assert not store.has(digest)
        assert put(store, b"sound") == digest
        assert store.path(digest).read_bytes() == b"sound"
        place.unlink()
    assert (tmp_path / "elsewhere").read_bytes() == b"sound"


def test_the_place_of_an_upload_is_followed_nowhere(store, tmp_path):
    digest = digest_of(b"sound")
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    store._partial(digest).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LoadFailed, match="cannot be written"):
        put(store, b"sound")
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"


@pytest.mark.parametrize("restarted", [False, True])
def test_the_least_recently_used_blobs_go_when_the_quota_is_reached(tmp_path, restarted):
    store = BlobStore(tmp_path, quota_bytes=3000)
    blobs = [put(store, bytes([number]) * 1000) for number in range(3)]
    for number in (2, 0):
        time.sleep(0.02)
        store.unlink_program(*store.link_program([("main", blobs[number])]))
    store = BlobStore(tmp_path, quota_bytes=3000) if restarted else store
    newest = put(store, b"n" * 1000)
    assert [store.has(digest) for digest in (*blobs, newest)] == [True, False, True, True]


def cut(store: BlobStore, number: int, size: int) -> str:
    digest = digest_of(b"cut %d" % number)
    with store.upload(digest, size + 1, 0) as upload:
        upload.write(memoryview(b"c" * size))
    return digest


def test_cut_uploads_count_in_the_quota_and_are_evicted_first(tmp_path):
    store = BlobStore(tmp_path, quota_bytes=20_000)
    kept = put(store, b"k" * 5000)
    for number in range(10):
        cut(store, number, 6000)
        assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= 20_000
    assert store.has(kept)
    large = put(store, b"n" * 14_000)
    assert store.has(kept) and store.has(large)
    assert not list((tmp_path / "partial").iterdir())


def test_uploads_at_the_same_time_do_not_share_the_room_of_one(tmp_path):
    store = BlobStore(tmp_path, quota_bytes=20_000)
    with store.upload(digest_of(b"a"), 15_000, 0), pytest.raises(LoadFailed, match="quota"):
        store.upload(digest_of(b"b"), 15_000, 0)
    with store.upload(digest_of(b"b"), 15_000, 0):
        pass


def test_cut_uploads_are_few_and_the_one_that_goes_on_is_not_evicted(store):
    oldest = cut(store, 0, 100)
    os.utime(store._partial(oldest), (1, 1))
    cut(store, 1, 100)
    assert store.partial_size(oldest) == 0  # nobody has gone on with it for a day
    for number in range(1, 40):
        cut(store, number, 100)
        assert len(list((store.root / "partial").iterdir())) <= 16
    first = next(one for one in (digest_of(b"cut %d" % number) for number in range(40)) if store.partial_size(one))
    with store.upload(first, 101, 100) as upload:
        assert upload.missing == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "link", "utime"])
def test_a_store_that_cannot_be_written_is_told_as_that(store, monkeypatch, number, call):
    digest = put(store, b"sound")

    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(LoadFailed, match="cannot be written"):
        store.upload(digest_of(b"x"), 1, 0) if call == "open" else store.link_program([("main", digest)])
    monkeypatch.undo()
    assert not list((store.root / "programs").iterdir())
    assert store.has(digest)


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


def test_a_program_that_leaves_folders_in_each_other_without_end_stops_no_agent(store):
    digest = put(store, b"data")
    for restarted in (False, True):
        folder, pinned = store.link_program([("main", digest)])
        at = os.open(folder, os.O_RDONLY)
        for _ in range(1200):
            os.mkdir("below", dir_fd=at)
            below = os.open("below", os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(at)
        if restarted:
            store = BlobStore(store.root)
        else:
            store.unlink_program(folder, pinned)
        assert not list((store.root / "programs").iterdir())


def test_more_or_other_bytes_than_announced_are_refused(store):
    with store.upload(digest_of(b"ab"), 2, 0) as upload, pytest.raises(UsageError, match="more than"):
        upload.write(memoryview(b"abc"))
    with store.upload(digest_of(b"ab"), 2, 0) as upload:
        upload.write(memoryview(b"xy"))
        with pytest.raises(BlobDamaged, match="damaged"):
            upload.finish()
    assert store.partial_size(digest_of(b"ab")) == 0
