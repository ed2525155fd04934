from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hil.controller.storage import cache as cache_module
from hil.controller.storage.cache import META, Cache, read_digests
from hil.core.cancellation import WorkCancelled, cancel_on
from hil.errors import CompileFailed, StorageError


def fill(text: str = "content") -> object:
    def write(folder: Path) -> None:
        (folder / "a.txt").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.bin").write_bytes(b"\0" * 100)

    return write


def test_cache_key_depends_on_kind_and_parts_but_not_order() -> None:
    key = Cache.key("artifact", a=1, b=["x"])
    assert key == Cache.key("artifact", b=["x"], a=1)
    assert (
        len({key, Cache.key("artifact", a=2, b=["x"]), Cache.key("reference", a=1, b=["x"]), Cache.key("artifact")})
        == 4
    )


@pytest.mark.parametrize("key", ["", "../etc-" + "0" * 64, "artifact-xyz", "artifact-" + "0" * 63, "/x-" + "0" * 64])
def test_cache_rejects_malformed_keys(cache: Cache, key: str) -> None:
    with pytest.raises(ValueError, match="invalid cache key"):
        cache.get(key)


def test_cache_returns_stored_entry(cache: Cache) -> None:
    key = cache.key("artifact", a=1)
    assert cache.get(key) is None
    path, cached = cache.get_or_make(key, {"model": "m"}, fill())
    assert not cached and (path / "a.txt").read_text() == "content"
    again, cached = cache.get_or_make(key, {"model": "m"}, lambda folder: pytest.fail("made twice"))
    assert cached and again == path
    assert set(read_digests(path)) == {"a.txt", "sub/b.bin"}


def test_cache_recompute_replaces_entry(cache: Cache) -> None:
    key = cache.key("artifact", a=1)
    cache.get_or_make(key, {}, fill("old"))
    path, cached = cache.get_or_make(key, {}, fill("new"), recompute=True)
    assert not cached and (path / "a.txt").read_text() == "new"


def test_cache_recompute_preserves_files_in_use(cache: Cache) -> None:
    key = cache.key("artifact", a=1)
    theirs, _ = cache.get_or_make(key, {}, fill("old"))
    another = Cache(cache.root)
    ours, cached = another.get_or_make(key, {}, fill("new"), recompute=True)
    assert not cached and (ours / "a.txt").read_text() == "new"
    assert another.get_or_make(key, {}, fill("third"), recompute=True) == (ours, True)
    assert another.get(key) == ours and set(read_digests(ours)) == {"a.txt", "sub/b.bin"}
    assert cache.get(key) == theirs and (theirs / "a.txt").read_text() == "old"
    assert Cache(cache.root).get(key) == theirs


def test_cache_replaces_damaged_entry_in_use(cache: Cache) -> None:
    key = cache.key("artifact", a=1)
    path, _ = cache.get_or_make(key, {}, fill("old"))
    (path / "a.txt").write_text("cut")
    assert Cache(cache.root).get_or_make(key, {}, fill("new")) == (path, False)
    assert cache.get(key) == path and (path / "a.txt").read_text() == "new"


def test_cache_hashes_large_file_only_after_metadata_change(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        (folder / "large").write_bytes(b"\1" * (5 << 20))

    key = cache.key("artifact", large=1)
    path, _ = cache.get_or_make(key, {}, write)
    with monkeypatch.context() as patched:
        patched.setattr(cache_module, "digest_file", lambda file: pytest.fail("hashed"))
        assert cache.get(key) == path
    before = (path / "large").stat()
    time.sleep(0.05)
    with (path / "large").open("r+b") as file:
        file.write(b"\2")
    os.utime(path / "large", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.get(key) is None
    _, cached = cache.get_or_make(key, {}, write)
    assert not cached
    # A moved file is hashed and has the same content.
    (path / "large").rename(path / "aside")
    (path / "large").write_bytes((path / "aside").read_bytes())
    assert cache.get(key) == path


@pytest.mark.parametrize("damage", ["changed", "longer", "gone", "meta"])
def test_cache_rebuilds_damaged_entry(cache: Cache, damage: str) -> None:
    key = cache.key("artifact", a=1)
    path, _ = cache.get_or_make(key, {}, fill())
    if damage == "changed":
        (path / "a.txt").write_text("CONTENT")
    elif damage == "longer":
        (path / "a.txt").write_text("content and more")
    elif damage == "gone":
        (path / "sub" / "b.bin").unlink()
    else:
        (path / META).write_text("{")
    assert cache.get(key) is None
    path, cached = cache.get_or_make(key, {}, fill())
    assert not cached and (path / "a.txt").read_text() == "content" and cache.get(key) == path


def test_cache_discards_entry_after_failure(cache: Cache) -> None:
    key = cache.key("artifact", a=1)

    def refuse(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise CompileFailed("no")

    with pytest.raises(CompileFailed):
        cache.get_or_make(key, {}, refuse)
    assert cache.get(key) is None and cache.ls() == [] and not list(cache.root.glob("making-*/*/*"))


def test_cache_shares_single_build_between_threads(cache: Cache) -> None:
    key = cache.key("artifact", a=1)
    made = []

    def slow(folder: Path) -> None:
        made.append(1)
        time.sleep(0.2)
        (folder / "x").write_text("x")

    threads = [threading.Thread(target=cache.get_or_make, args=(key, {}, slow)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_cache_shares_single_build_between_processes(cache: Cache, tmp_path: Path) -> None:
    script = (
        "import sys, time, os\nfrom pathlib import Path\nfrom hil.controller.storage.cache import Cache\n"
        "cache = Cache(Path(sys.argv[1]))\n"
        "def make(folder):\n"
        "    with open(sys.argv[2], 'a') as file: file.write('made\\n')\n"
        "    time.sleep(0.5)\n"
        "    (folder / 'x').write_text('x')\n"
        "cache.get_or_make(cache.key('artifact', a=1), {}, make)\n"
    )
    root = str(Path(__file__).parents[4])
    command = [sys.executable, "-c", script, str(cache.root), str(tmp_path / "made")]
    processes = [subprocess.Popen(command, env=os.environ | {"PYTHONPATH": root}) for _ in range(3)]
    assert [process.wait(30) for process in processes] == [0, 0, 0]
    assert (tmp_path / "made").read_text() == "made\n"


def test_cache_lists_kind_size_and_last_use(cache: Cache) -> None:
    first, second = cache.key("artifact", a=1), cache.key("reference", a=1)
    for key in (first, second):
        cache.get_or_make(key, {"model": key[:3]}, fill())
    os.utime(cache.get(first) / META, (0, 1000))
    listed = cache.ls()
    assert [entry.kind for entry in listed] == ["reference", "artifact"]
    assert listed[1].last_used == 1000 and listed[1].meta == {"model": "art"} and listed[1].size > 107
    cache.get(first)
    assert cache.ls()[0].key == first


def test_cache_gc_evicts_oldest_unlocked_entries(cache: Cache) -> None:
    keys = [cache.key("artifact", a=number) for number in range(4)]
    for number, key in enumerate(keys):
        path, _ = cache.get_or_make(key, {}, fill())
        os.utime(path / META, (0, 1000 + number))
    youngest_three = sum(entry.size for entry in cache.ls()[:3])
    assert [entry.key for entry in cache.gc(max_bytes=youngest_three)] == [keys[0]]
    with cache.lock(keys[1]):
        assert [entry.key for entry in cache.gc(max_bytes=0)] == [keys[3], keys[2]]
    assert [entry.key for entry in cache.ls()] == [keys[1]]
    assert [entry.key for entry in cache.gc(max_age=60)] == [keys[1]]
    assert cache.gc() == []


def test_cache_lock_wait_ends_when_cancelled(cache: Cache) -> None:
    key, flag = cache.key("artifact", a=1), threading.Event()
    flag.set()
    with cache.lock(key), cancel_on(flag), pytest.raises(WorkCancelled), Cache(cache.root).lock(key):
        pass
    with cache.lock(key):  # the lock is free again
        pass


def test_cache_gc_evicts_only_given_kinds(cache: Cache) -> None:
    keys = [cache.key(kind, a=1) for kind in ("artifact", "graph")]
    for key in keys:
        cache.get_or_make(key, {}, fill())
    assert [entry.key for entry in cache.gc(max_bytes=0, kinds=["graph", "other"])] == keys[1:]
    assert [entry.key for entry in cache.ls()] == keys[:1] and cache.ls(["graph"]) == []


def test_cache_gc_spares_entries_in_use(cache: Cache) -> None:
    made, given, other = (cache.key("artifact", a=name) for name in ("made", "given", "other"))
    for key in (given, other):
        Cache(cache.root).get_or_make(key, {}, fill())
    user, cleaner = Cache(cache.root), cache
    user.get_or_make(made, {}, fill())
    path = user.get(given)
    assert cleaner.list_in_use() == {made, given}
    assert [entry.key for entry in cleaner.gc(max_bytes=0)] == [other]
    assert path is not None and (path / "a.txt").read_text() == "content"
    del user
    assert {entry.key for entry in cleaner.gc(max_bytes=0)} == {made, given}
    assert list((cleaner.root / "users").iterdir()) == []


def test_cache_gc_evicts_entries_of_killed_process(cache: Cache) -> None:
    key = cache.key("artifact", a=1)
    cache.get_or_make(key, {}, fill())
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom hil.controller.storage.cache import Cache\n"
        "cache = Cache(Path(sys.argv[1])); print(cache.get(sys.argv[2]), flush=True); time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, "-c", script, str(cache.root), key]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None and key[-64:] in user.stdout.readline()
        assert cache.gc(max_bytes=0) == [] and cache.list_in_use() == {key}
        user.kill()
        user.wait()
        assert [entry.key for entry in cache.gc(max_bytes=0)] == [key]


def test_cache_evict_spares_entry_used_meanwhile(cache: Cache) -> None:
    key = cache.key("artifact", a=1)
    path, _ = cache.get_or_make(key, {}, fill())
    (entry,) = cache.ls()
    user = Cache(cache.root)
    assert user.get(key) == path  # after the cleaner has read the users, before it evicts the entry
    assert not cache._evict(entry)
    assert user.get(key) == path and not list(cache.root.glob("making-*/*/*"))


def test_cache_gc_and_users_run_concurrently(cache: Cache) -> None:
    keys = [cache.key("artifact", a=number) for number in range(3)]
    over = threading.Event()
    failures: list[str] = []

    def use() -> None:
        while not over.is_set():
            mine = Cache(cache.root)
            for key in keys:
                path, _ = mine.get_or_make(key, {}, fill())
                if not (path / "a.txt").exists() or not (path / META).exists():
                    failures.append(key)

    users = [threading.Thread(target=use) for _ in range(2)]
    for user in users:
        user.start()
    evicted = rounds = 0
    deadline = time.monotonic() + 60
    # On a busy machine every entry may be in use at each pass.
    while rounds < 150 or (not evicted and time.monotonic() < deadline):
        evicted += len(Cache(cache.root).gc(max_bytes=0))
        rounds += 1
    over.set()
    for user in users:
        user.join()
    assert failures == [] and evicted > 0


def test_cache_shares_single_recompute_between_threads(cache: Cache) -> None:
    key = cache.key("artifact", a=1)
    cache.get_or_make(key, {}, fill("old"))
    made = []

    def slow(folder: Path) -> None:
        made.append(1)
        time.sleep(0.1)
        (folder / "x").write_text("new")

    run = Cache(cache.root)
    threads = [threading.Thread(target=run.get_or_make, args=(key, {}, slow, True)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path, cached = run.get_or_make(key, {}, slow, recompute=True)
    assert len(made) == 1 and cached and (path / "x").read_text() == "new"
    assert not Cache(cache.root).get_or_make(key, {}, slow, recompute=True)[1] and len(made) == 2


def test_cache_root_follows_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "here"))
    assert Cache().root == tmp_path / "here"
    monkeypatch.delenv("HIL_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tmp_path in Cache().root.parents and Cache().root.name == "hil"


def test_cache_reports_full_disk_with_hint(cache: Cache) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match="No space left") as caught:
        cache.get_or_make(cache.key("artifact", a=1), {}, full)
    assert "HIL_CACHE_DIR" in caught.value.hint


def test_cache_reports_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.raises(StorageError):
        cache.get_or_make(cache.key("artifact", a=1), {}, fill())


def broken_root(folder: Path, kind: str) -> Path:
    """Return a path where no cache can be created."""
    loop, dangling = folder / "loop", folder / "dangling"
    loop.symlink_to(loop)
    dangling.symlink_to(folder / "missing" / "folder")
    os.mkfifo(folder / "pipe")
    return {"loop": loop / "cache", "long": folder / ("x" * 300), "dangling": dangling, "pipe": folder / "pipe"}[kind]


@pytest.mark.parametrize("kind", ["loop", "long", "dangling", "pipe"])
def test_cache_reports_unusable_root(tmp_path: Path, kind: str) -> None:
    cache = Cache(broken_root(tmp_path, kind))
    key = cache.key("artifact", a=1)
    for use in (lambda: cache.get_or_make(key, {}, fill()), lambda: cache.lock(key).__enter__(), cache.making):
        with pytest.raises(StorageError, match="cannot write to the cache") as caught:
            use()
        assert "HIL_CACHE_DIR" in caught.value.hint


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT, errno.EMFILE])
def test_cache_reports_disk_error(cache: Cache, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(StorageError, match=os.strerror(number)):
        cache.get_or_make(cache.key("artifact", a=1), {}, fill())


def test_cache_raises_builder_error_unless_entry_fails(cache: Cache) -> None:
    def elsewhere(_: Path) -> None:
        Path("/missing/model.onnx").read_bytes()

    def inside(folder: Path) -> None:
        folder.rmdir()
        (folder / "a.txt").write_text("x")

    with pytest.raises(FileNotFoundError):
        cache.get_or_make(cache.key("artifact", a=1), {}, elsewhere)
    with pytest.raises(StorageError):
        cache.get_or_make(cache.key("artifact", a=1), {}, inside)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "1",
        "[" * 200_000,
        '{"files": [], "meta": {}}',
        '{"files": {"a": null}, "meta": {}}',
        '{"files": {"a": {"size": "x", "digest": "x"}}, "meta": {}}',
        '{"files": {"a": {"size": 1e999, "digest": "x"}}, "meta": {}}',
        '{"files": {"a": {"size": 1, "digest": 1}}, "meta": {}}',
        '{"files": {"a\\u0000b": {"size": 1, "digest": "x"}}, "meta": {}}',
        '{"files": {}, "meta": "x"}',
    ],
    ids=lambda text: text[:60],
)
def test_cache_treats_damaged_meta_as_missing_entry(cache: Cache, text: str) -> None:
    key = Cache.key("program", a=1)
    entry = cache.put(key, {}, lambda folder: None)
    (entry / META).write_text(text)
    assert cache.get(key) is None
    assert all(set(one.meta) == set() for one in cache.ls())
    assert cache.get_or_make(key, {}, lambda folder: None)[1] is False
    assert [one.key for one in cache.ls()] == [key]


def test_cache_reports_pipe_as_lock_file(cache: Cache) -> None:
    cache.root.mkdir(parents=True)
    os.mkfifo(cache.root / "users.lock")
    with pytest.raises(StorageError, match=r"users\.lock is not a regular file") as caught:
        cache.put(Cache.key("program", a=1), {}, lambda folder: None)
    assert "HIL_CACHE_DIR" in caught.value.hint


def test_cache_ignores_foreign_files_among_users(cache: Cache) -> None:
    (cache.root / "users" / "abc").mkdir(parents=True)
    os.mkfifo(cache.root / "users" / "abd")
    key = Cache.key("program", a=1)
    cache.put(key, {}, lambda folder: None)
    assert cache.list_in_use() == set()
    assert [one.key for one in cache.gc(max_bytes=0)] == [key]
