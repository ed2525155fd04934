from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.agent import store as store_module
from hil.agent.store import BlobStore, Quota
from hil.core.digest import digest_of
from hil.errors import BlobDamaged, BoardUnfit, LoadFailed, UsageError


def put(store: BlobStore, data: bytes, offset: int = 0) -> str:
    digest = digest_of(data)
    with store.upload(digest, len(data), offset) as upload:
        upload.write(memoryview(data)[offset:])
        upload.finish()
    return digest


@pytest.fixture
def store(tmp_path) -> BlobStore:
    return BlobStore(tmp_path / "store")


def test_store_lists_blob_after_verification(store):
    digest = digest_of(b"hello")
    assert not store.has(digest)
    with store.upload(digest, 5, 0) as upload:
        upload.write(memoryview(b"hello"))
        assert not store.has(digest)
        upload.finish()
    assert store.path(digest).read_bytes() == b"hello"


@given(st.text(max_size=90))
def test_store_rejects_invalid_digest(tmp_path_factory, text):
    store = BlobStore(tmp_path_factory.mktemp("fuzz"))
    for call in (store.has, store.path, store.get_partial_size, lambda name: store.upload(name, 1, 0)):
        with pytest.raises(UsageError, match="not a digest"):
            call(text)


def test_store_upload_resumes_at_cut_offset(store):
    data = os.urandom(1000)
    digest = digest_of(data)
    with store.upload(digest, 1000, 0) as upload:
        upload.write(memoryview(data)[:600])
    assert store.get_partial_size(digest) == 600
    for offset in (1, 599, 601):
        with pytest.raises(BlobDamaged, match="must resume at 600"):
            store.upload(digest, 1000, offset)
    with pytest.raises(UsageError, match=r"cannot resume a blob of .* at 1001"):
        store.upload(digest, 1000, 1001)
    assert put(store, data, 600) == digest
    assert store.path(digest).read_bytes() == data
    assert store.get_partial_size(digest) == 0


def test_store_rejects_concurrent_uploads_of_same_blob(store, monkeypatch):
    monkeypatch.setattr(store_module, "_SETTLES_SECONDS", 0.5)
    digest = digest_of(b"x")
    with store.upload(digest, 1, 0), pytest.raises(UsageError, match="being uploaded"):
        store.upload(digest, 1, 0)
    with store.upload(digest, 1, 0):
        pass


def alter(path: Path, data: bytes, *, keep_times: bool = False) -> None:
    """Write to a file of the store as its owner could, after a tick of the file system's clock."""
    time.sleep(0.05)
    before = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(data)
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        path.chmod(stat.S_IMODE(before.st_mode))


def test_store_detects_blob_damaged_before_restart(tmp_path):
    digest = put(BlobStore(tmp_path), b"sound")
    alter(BlobStore(tmp_path).path(digest), b"rotten")
    later = BlobStore(tmp_path)
    assert not later.has(digest)
    with pytest.raises(BlobDamaged, match="is not on the board"):
        later.path(digest)


@pytest.mark.parametrize("keep_times", [False, True])
@pytest.mark.parametrize("data", [b"rotten", b"ROT"], ids=["longer", "of the same size"])
def test_store_detects_altered_blob_at_next_use(store, data, keep_times):
    digest = put(store, b"sound")
    for use in (store.path, lambda one: store.link_program([("main", one)])):
        put(store, b"sound") if not store.has(digest) else None
        alter(store._blob_path(digest), data, keep_times=keep_times)
        with pytest.raises(BlobDamaged, match="was modified on the board"):
            use(digest)
        assert not store.has(digest)
    assert not list((store.root / "programs").iterdir())
    put(store, b"sound")
    assert store.path(digest).read_bytes() == b"sound"


def test_store_detects_blob_altered_by_program(store):
    digest = put(store, b"sound")
    folder, pinned = store.link_program([("main", digest)])
    assert stat.S_IMODE((folder / "main").stat().st_mode) == 0o400
    alter(folder / "main", b"ROT", keep_times=True)
    store.unlink_program(folder, pinned)
    with pytest.raises(BlobDamaged):
        store.path(digest)


def test_store_reverifies_blobs_for_next_session(store, monkeypatch):
    digest = put(store, b"sound")
    store.unlink_program(*store.link_program([("main", digest)]))
    # As if a program wrote at the moment the agent recorded the file's times.
    alter(store._blob_path(digest), b"ROT", keep_times=True)
    store._verified[digest] = store_module._read_stamp(store._blob_path(digest))
    assert store.has(digest)
    store.forget_session()
    assert not store.has(digest)


def test_store_hashes_unaltered_blob_once_per_session(store, monkeypatch):
    digest = put(store, b"sound")
    hashed = []
    digest_file = store_module.digest_file
    monkeypatch.setattr(store_module, "digest_file", lambda *of: hashed.append(of) or digest_file(*of))
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
    """Call a function once, after a blob was hashed and before the store gets the digest."""

    def wait_for(meanwhile) -> list[object]:
        digest_file, hashed = store_module.digest_file, []

        def hashing(*of):
            digest = digest_file(*of)
            hashed.append(of)
            if len(hashed) == 1:
                time.sleep(0.05)  # a tick of the file system's clock
                meanwhile()
            return digest

        monkeypatch.setattr(store_module, "digest_file", hashing)
        return hashed

    return wait_for


def test_store_accepts_blob_whose_links_change_during_hashing(store, while_hashing):
    digest = put(store, b"sound")
    held = store.link_program([("main", digest)])
    store.forget_session()
    hashed = while_hashing(lambda: store.unlink_program(*held))
    assert store.path(digest).read_bytes() == b"sound" and len(hashed) == 2
    store.forget_session()
    linked = while_hashing(lambda: store.link_program([("main", digest)]))
    # The program's link hashed it first, and the store knows that link.
    assert store.path(digest).read_bytes() == b"sound" and len(linked) == 2


@pytest.mark.parametrize("by_us", [False, True])
def test_store_detects_blob_altered_during_hashing(store, while_hashing, by_us):
    digest = put(store, b"sound")
    held = store.link_program([("main", digest)])
    store.forget_session()

    def meanwhile() -> None:
        if by_us:
            store.unlink_program(*held)
        alter(store._blob_path(digest), b"ROT", keep_times=True)

    while_hashing(meanwhile)
    with pytest.raises(BlobDamaged, match="was modified on the board"):
        store.path(digest)
    assert not store._blob_path(digest).exists()


def test_store_retains_blob_replaced_during_hashing(store, while_hashing):
    digest = put(store, b"sound")
    alter(store._blob_path(digest), b"ROT")
    while_hashing(lambda: put(store, b"sound"))
    assert store.path(digest).read_bytes() == b"sound"


def test_store_replaces_links_and_special_files(store, tmp_path):
    digest = digest_of(b"sound")
    (tmp_path / "elsewhere").write_bytes(b"sound")
    place = store._blob_path(digest)
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


def test_store_upload_refuses_symbolic_link(store, tmp_path):
    digest = digest_of(b"sound")
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    store._partial_path(digest).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BoardUnfit, match="symbolic links"):
        put(store, b"sound")
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"


@pytest.mark.parametrize("restarted", [False, True])
def test_store_evicts_least_recently_used_blobs(tmp_path, restarted):
    store = BlobStore(tmp_path, Quota(bytes=3000))
    blobs = [put(store, bytes([number]) * 1000) for number in range(3)]
    for number in (2, 0):
        time.sleep(0.02)
        store.unlink_program(*store.link_program([("main", blobs[number])]))
    store = BlobStore(tmp_path, Quota(bytes=3000)) if restarted else store
    newest = put(store, b"n" * 1000)
    assert [store.has(digest) for digest in (*blobs, newest)] == [True, False, True, True]


def cut(store: BlobStore, number: int, size: int) -> str:
    digest = digest_of(b"cut %d" % number)
    with store.upload(digest, size + 1, 0) as upload:
        upload.write(memoryview(b"c" * size))
    return digest


def test_store_evicts_partial_uploads_first(tmp_path):
    store = BlobStore(tmp_path, Quota(bytes=20_000))
    kept = put(store, b"k" * 5000)
    for number in range(10):
        cut(store, number, 6000)
        assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= 20_000
    assert store.has(kept)
    large = put(store, b"n" * 14_000)
    assert store.has(kept) and store.has(large)
    assert not list((tmp_path / "partial").iterdir())


def test_store_reserves_quota_for_concurrent_uploads(tmp_path):
    store = BlobStore(tmp_path, Quota(bytes=20_000))
    with store.upload(digest_of(b"a"), 15_000, 0), pytest.raises(LoadFailed, match="quota"):
        store.upload(digest_of(b"b"), 15_000, 0)
    with store.upload(digest_of(b"b"), 15_000, 0):
        pass


def test_store_limits_partial_uploads_and_retains_resumed(store):
    oldest = cut(store, 0, 100)
    os.utime(store._partial_path(oldest), (1, 1))
    cut(store, 1, 100)
    assert store.get_partial_size(oldest) == 0  # stale for more than a day
    for number in range(1, 40):
        cut(store, number, 100)
        assert len(list((store.root / "partial").iterdir())) <= 16
    first = next(one for one in (digest_of(b"cut %d" % number) for number in range(40)) if store.get_partial_size(one))
    with store.upload(first, 101, 100) as upload:
        assert upload.missing == 1


FAULTS = {
    errno.ENOSPC: ("the disk is full", "remove files"),
    errno.EDQUOT: ("quota exceeded", "raise the quota"),
    errno.EROFS: ("the file system is read-only", "dmesg"),
    errno.EIO: (r"disk error \(Input/output error\)", "dmesg"),
}


@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize("call", ["open", "write", "link", "utime"])
def test_store_reports_disk_fault_as_board_unfit(store, monkeypatch, number, call):
    digest = put(store, b"sound")
    store.hold([digest])

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(BoardUnfit, match=FAULTS[number][0]) as caught:
        put(store, b"x") if call in ("open", "write") else store.link_program([("main", digest)])
    assert str(store.root) in caught.value.message and FAULTS[number][1] in caught.value.hint
    monkeypatch.undo()
    assert not list((store.root / "programs").iterdir())
    assert store.has(digest)


def test_store_link_program_recreates_programs_directory(store):
    digest = put(store, b"sound")
    (store.root / "programs").rmdir()
    folder, _ = store.link_program([("main", digest)])
    assert (folder / "main").read_bytes() == b"sound"
    assert folder.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["pipe", "no root"])
def test_store_link_program_reports_unusable_directory(store, damage):
    digest = put(store, b"sound")
    if damage == "pipe":
        (store.root / "programs").rmdir()
        os.mkfifo(store.root / "programs")
    else:
        shutil.rmtree(store.root)
    with pytest.raises(BoardUnfit, match="the board cannot use"):
        store.link_program([("main", digest)])


def test_store_reports_unreadable_disk_as_board_unfit(store, monkeypatch):
    digest = put(store, b"sound")
    store._verified.clear()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store_module, "digest_file", fail)
    with pytest.raises(BoardUnfit, match="disk error"):
        store.has(digest)
    monkeypatch.undo()
    assert store.has(digest)


def use(store: BlobStore, digest: str) -> None:
    time.sleep(0.02)
    store.unlink_program(*store.link_program([("main", digest)]))


@pytest.fixture
def small_disk(monkeypatch) -> Callable[[Path, int], None]:
    """Limit the disk size that the store sees for a directory."""

    def limit(folder: Path, total: int) -> None:
        def usage(_: Path) -> SimpleNamespace:
            used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            return SimpleNamespace(total=total, used=used, free=max(total - used, 0))

        monkeypatch.setattr(shutil, "disk_usage", usage)

    return limit


def test_store_evicts_least_recently_used_blobs_of_full_disk(tmp_path, small_disk):
    small_disk(tmp_path, 10_000)
    store = BlobStore(tmp_path, Quota(share=1.0))
    blobs = [put(store, bytes([number]) * 3000) for number in range(3)]
    use(store, blobs[0])
    newest = put(store, b"n" * 3000)
    assert [store.has(digest) for digest in (*blobs, newest)] == [True, False, True, True]


def test_store_evicts_above_share_of_free_disk(tmp_path, small_disk):
    small_disk(tmp_path, 10_000)
    store = BlobStore(tmp_path)
    blobs = [put(store, bytes([number]) * 2000) for number in range(4)]
    assert [store.has(digest) for digest in blobs] == [False, False, True, True]
    large = put(store, b"l" * 9000)  # one program may use the whole disk
    assert store.has(large) and not any(map(store.has, blobs))


def test_store_retains_blobs_held_by_session(tmp_path, small_disk):
    small_disk(tmp_path, 10_000)
    store = BlobStore(tmp_path)
    wanted, other = put(store, b"w" * 3000), put(store, b"o" * 1800)
    store.hold([wanted, digest_of(b"n" * 4500)])
    put(store, b"n" * 4500)
    assert store.has(wanted) and not store.has(other)
    with pytest.raises(BoardUnfit, match=rf"this blob needs 9000 bytes, .* 2344 bytes free in {tmp_path}") as caught:
        store.upload(digest_of(b"m"), 9000, 0)
    assert "remove files" in caught.value.hint
    store.forget_session()
    put(store, b"m" * 9000)
    assert not store.has(wanted)


def test_store_refuses_blob_larger_than_disk(tmp_path, small_disk):
    small_disk(tmp_path, 10_000)
    with pytest.raises(LoadFailed, match="this blob has 10001 bytes, but the board's disk has only 10000"):
        BlobStore(tmp_path).upload(digest_of(b"x"), 10_001, 0)


def test_store_evicts_when_disk_fills_during_upload(store, monkeypatch):
    old, write, is_full = put(store, b"old"), os.write, [True, True]

    def fill(fd: int, data: memoryview) -> int:
        if is_full and data.nbytes == 3:
            is_full.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(BoardUnfit, match="full"):
        put(store, b"new")
    assert not store.has(old)
    assert store.has(put(store, b"new"))


@pytest.mark.parametrize(
    ("text", "quota"),
    [("0", Quota(bytes=0)), ("12", Quota(bytes=12)), ("25%", Quota(share=0.25)), ("100%", Quota(1.0))],
)
def test_quota_parse_accepts_size_or_share(text, quota):
    assert Quota.parse(text) == quota


@pytest.mark.parametrize("text", ["", "x", "-1", "0%", "101%", "nan%", "%", "1.5"])
def test_quota_parse_rejects_invalid_text(text):
    with pytest.raises(ValueError):
        Quota.parse(text)


def test_store_never_evicts_blob_linked_by_program(tmp_path):
    store = BlobStore(tmp_path, Quota(bytes=1500))
    used = put(store, b"u" * 1000)
    folder, pinned = store.link_program([("main", used)])
    with pytest.raises(LoadFailed, match="quota"):
        put(store, b"n" * 1000)
    assert (folder / "main").read_bytes() == b"u" * 1000
    store.unlink_program(folder, pinned)
    put(store, b"n" * 1000)
    assert not store.has(used)


@pytest.mark.parametrize("name", ["", "..", "/etc/x", "a/../../x", "a\0b", "x" * 256])
def test_store_link_rejects_path_outside_program(store, name):
    digest = put(store, b"data")
    with pytest.raises(UsageError):
        store.link_program([("main", digest), (name, digest)])
    assert not list((store.root / "programs").iterdir())


def test_store_link_creates_subdirectories_without_conflicts(store):
    digest = put(store, b"data")
    folder, _ = store.link_program([("main", digest), ("weights/part.bin", digest)])
    assert (folder / "weights" / "part.bin").read_bytes() == b"data"
    for names in (["main", "main"], ["main", "main/below"]):
        with pytest.raises(UsageError):
            store.link_program([(name, digest) for name in names])


@pytest.mark.ci
def test_store_removes_deeply_nested_program_directories(store):
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


def test_store_upload_rejects_excess_or_damaged_bytes(store):
    with store.upload(digest_of(b"ab"), 2, 0) as upload, pytest.raises(UsageError, match="more than"):
        upload.write(memoryview(b"abc"))
    with store.upload(digest_of(b"ab"), 2, 0) as upload:
        upload.write(memoryview(b"xy"))
        with pytest.raises(BlobDamaged, match="corrupt"):
            upload.finish()
    assert store.get_partial_size(digest_of(b"ab")) == 0


def test_store_room_includes_evictable_blobs(tmp_path, monkeypatch):
    store = BlobStore(tmp_path)
    put(store, b"x" * 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=10**6, free=5000))
    assert store.count_free_bytes() == 6000
    store.quota = Quota(bytes=4000)
    assert store.count_free_bytes() == 4000

    def fail(path):
        raise OSError(errno.EIO, "failing")

    monkeypatch.setattr("shutil.disk_usage", fail)
    assert store.count_free_bytes() == 0
