"""The history over both databases: entries, programs, annotations, concurrent and interrupted use."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading

import pytest
from support.farms import fresh
from support.histories import history_entry, program_source

from hil.controller.storage.history import programs
from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.programs import combine_digests
from hil.controller.storage.history.store import HistoryStore, compute_relative_spread, make_series_id
from hil.core.digest import digest_of
from hil.errors import StorageError, UsageError

MB = 1 << 20


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    if request.param == "sqlite":
        yield HistoryPlace(tmp_path / "history")
        return
    server = request.getfixturevalue("database_server")
    with fresh(server, server.make) as url:
        yield HistoryPlace(tmp_path / "history", url)


@pytest.fixture
def store(place):
    with HistoryStore.open(place, create=True, quota=3 * MB) as opened:
        yield opened


def test_store_returns_entries_in_order_with_samples(store):
    late, early = history_entry("r2", created=5.0), history_entry("r1", created=4.0)
    report = store.add([late, early])
    assert (report.added, report.present) == (2, 0)
    assert list(store.entries(make_series_id(early.key))) == [early, late]
    assert list(store.entries(early.key)) == list(store.entries())
    assert list(store.entries(samples=False)) == [early.replace(samples_ns=[]), late.replace(samples_ns=[])]


def test_store_returns_newest_entries_in_order(store):
    store.add([history_entry(f"r{number}", created=number) for number in (3, 1, 4, 2)])
    assert [entry.run for entry in store.entries(newest=2)] == ["r3", "r4"]


def test_store_adds_an_entry_once(store):
    first = history_entry("r1", p50_ns=1.0)
    store.add([first])
    report = store.add([history_entry("r1", p50_ns=2.0), history_entry("r2")])
    assert (report.added, report.present) == (1, 1)
    assert [one.p50_ns for one in store.entries()] == [1.0, 20.0]


def test_store_replaces_entry_by_newer_result(store):
    lost = history_entry("r1", created=2.0, outcome="BOARD_LOST", p50_ns=None, samples_ns=[], key={"board": ""})
    store.add([lost, history_entry("r2", created=2.0)])
    store.confirm(lost, "accepted")
    older, newer, copy = history_entry("r1"), history_entry("r1", created=3.0), history_entry("r2", created=3.0)
    assert [store.add([one]).added for one in (older, newer, newer, copy)] == [0, 1, 0, 0]
    assert list(store.entries()) == [history_entry("r2", created=2.0), newer]
    assert [one.entries for one in store.series()] == [2]


def test_series_reports_newest_outcome_and_median(store):
    store.add(
        [
            history_entry("r1", created=1.0, p50_ns=10.0),
            history_entry("r2", created=2.0, p50_ns=None, outcome="COMPILE_ERROR", commit="ffff"),
            history_entry("r1", "other", key={"board": "rpi5"}),
        ]
    )
    one, other = store.series()
    assert (one.entries, one.outcome, one.commit, one.p50_ns) == (2, "COMPILE_ERROR", "ffff", 10.0)
    assert other.key.board == "rpi5"


def test_store_finds_series_by_id_prefix_case_or_model(store):
    store.add([history_entry(), history_entry(case="n", key={"model": "n.onnx"})])
    wanted = make_series_id(history_entry().key)
    assert {store.find_series(name).id for name in (wanted, wanted[:6], "m", "m.onnx")} == {wanted}
    for name, why in (("nonesuch", "no series"), ("", "no series")):
        with pytest.raises(UsageError, match=why):
            store.find_series(name)
    store.add([history_entry("r2", key={"board": "rpi5"})])
    with pytest.raises(UsageError, match="ambiguous series 'm'"):
        store.find_series("m")


@pytest.mark.parametrize("unknown", [{"runtime": ""}, {"board": "", "runtime": ""}])
def test_early_failure_joins_series_with_known_board(store, unknown):
    store.add([history_entry("r1")])
    store.add([history_entry("r2", key=unknown, outcome="COMPILE_ERROR")])
    (series,) = store.series()
    assert series.entries == 2


def test_early_failure_keeps_key_if_several_series_match(store):
    store.add([history_entry("r1"), history_entry("r2", key={"board": "rpi5"})])
    store.add([history_entry("r3", key={"board": ""}, outcome="COMPILE_ERROR")])
    assert len(store.series()) == 3


def test_series_key_ignores_compiler_and_commit():
    one, other = history_entry(commit="a"), history_entry(commit="b", tools={"compiler": "iree 4", "flags": ["-O3"]})
    assert make_series_id(one.key) == make_series_id(other.key)
    assert make_series_id(one.key) != make_series_id(history_entry(key={"flags": ["-O3"]}).key)


def test_annotations_apply_to_commit_run_or_case(store):
    store.add([history_entry("r1", commit="1a2b3c4d"), history_entry("r2", commit="9f"), history_entry("r2", "n")])
    assert store.annotate("1a2b", "a")[1] == 2
    assert store.annotate("r2", "b")[1] == 2
    assert store.annotate("r2:n", "c")[1] == 1
    found = {(one.run, one.case): [note.text for note in one.annotations] for one in store.entries()}
    assert found == {("r1", "m"): ["a"], ("r2", "m"): ["b"], ("r2", "n"): ["a", "b", "c"]}


@pytest.mark.parametrize(
    "values",
    [{"created": -1.0}, {"created": 1e300}, {"run": "\ud800"}, {"samples_ns": [float("inf")]}, {"reason": "\ud800"}],
)
def test_store_never_adds_entry_that_it_cannot_read(store, values):
    entry = history_entry()
    for name, value in values.items():
        setattr(entry, name, value)
    report = store.add([entry, history_entry("r2")])
    assert len(list(store.entries())) == report.added == 2 - len(report.skipped)
    store.series()


def test_annotate_escapes_invalid_text(store):
    store.add([history_entry()])
    assert store.annotate("r1", "a\ud800")[0].text == "a\\ud800"
    with pytest.raises(UsageError, match="no entry"):
        store.annotate("\ud800xxx", "a")


def test_branch_stands_for_commit_of_newest_entry(store):
    entries = [("r1", "a" * 8, "fix/x", 3.0), ("r2", "b" * 8, "fix/x", 2.0), ("r3", "c" * 8, "main", 4.0)]
    store.add([history_entry(run, commit=commit, branch=name, created=at) for run, commit, name, at in entries])
    store.add([history_entry("r4", commit="a" * 8, branch="main", created=1.0)])
    assert store.accept("fix/x") == 2
    assert {one.run for one in store.entries() if one.confirmed == "accepted"} == {"r1", "r4"}
    note, count = store.annotate("main", "x")
    assert (note.commit, count) == ("c" * 8, 1)
    with pytest.raises(UsageError, match="no entry of commit, branch or run 'fix'"):
        store.accept("fix")


def test_annotate_rejects_unknown_and_ambiguous_commits(store):
    store.add([history_entry("r1", commit="12345"), history_entry("r2", commit="12346")])
    for target, why in (("1234", "ambiguous commit"), ("123", "no entry"), ("r1:x", "no entry")):
        with pytest.raises(UsageError, match=why):
            store.annotate(target, "a")
    assert store.annotations() == []


def test_missing_history_is_empty_and_not_created(place):
    for _ in range(2):
        with HistoryStore.open(place) as store:
            store.add([history_entry()])  # without effect
        with HistoryStore.open(place) as store:
            assert store.series() == list(store.entries()) == []
            assert store.program(digest_of(b"")) is None
    assert not place.folder.exists()


def test_spread_is_relative_interquartile_range():
    assert compute_relative_spread([9.0, 10.0, 10.0, 11.0, 10.0]) == 0.0
    assert compute_relative_spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)
    assert compute_relative_spread([1.0] * 3) is None


def test_store_keeps_program_with_record(store, tmp_path):
    source = program_source(tmp_path / "p", b"program")
    digest = source.record.digest
    assert store.add([history_entry(program=digest)], [source]).programs == 1
    assert store.add([], [source]).programs == 0
    folder = store.program(digest)
    assert folder is not None
    assert (folder / "main.vmfb").read_bytes() == b"program"
    assert store.program_record(digest) == source.record


def test_program_digest_covers_names_of_several_files():
    one, two = digest_of(b"1"), digest_of(b"2")
    assert combine_digests({"a": one}) == one
    assert combine_digests({"a": one, "b": two}) == combine_digests({"b": two, "a": one})
    assert combine_digests({"a": one, "b": two}) != combine_digests({"a": two, "b": one})


@pytest.mark.parametrize("change", ["altered", "missing", "outside"])
def test_store_skips_unusable_program_and_keeps_entry(store, tmp_path, change):
    source = program_source(tmp_path / "p", b"program")
    if change == "altered":
        (tmp_path / "p" / "main.vmfb").write_bytes(b"other")
    elif change == "missing":
        (tmp_path / "p" / "main.vmfb").unlink()
    else:
        source.record.files = {"../x": digest_of(b"program")}
    report = store.add([history_entry(program=source.record.digest)], [source])
    assert (report.added, report.programs, len(report.skipped)) == (1, 0, 1)
    assert store.program(source.record.digest) is None
    assert not list((store.place.folder / "programs").glob(".*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_store_is_unchanged_if_programs_cannot_be_written(store, tmp_path, monkeypatch, number):
    def copy_file(source, target):
        raise OSError(number, os.strerror(number), str(target))

    program = program_source(tmp_path / "p", b"program")
    entry = history_entry(program=program.record.digest)
    with monkeypatch.context() as patch, pytest.raises(StorageError, match=os.strerror(number)):
        patch.setattr(programs, "copy_file", copy_file)
        store.add([entry], [program])
    assert list(store.entries()) == []
    assert store.add([entry], [program]).programs == 1


def test_store_evicts_oldest_programs_but_keeps_last_good(store, tmp_path):
    sources = [program_source(tmp_path / str(number), bytes([number]) * MB) for number in range(6)]
    digests = [one.record.digest for one in sources]
    branches = ["main", "main", "topic", "topic", "topic", "topic"]
    outcomes = ["PASS", "PASS", "PASS", "FAIL", "FAIL", "FAIL"]
    for number, source in enumerate(sources):
        given = {"created": float(number), "branch": branches[number], "outcome": outcomes[number]}
        store.add([history_entry(f"r{number}", program=digests[number], **given)], [source])
    held = [number for number, digest in enumerate(digests) if store.program(digest)]
    assert held == [1, 2, 5]  # last good of the baseline branch, last good, newest
    assert len(list(store.entries())) == 6


def test_store_rejects_program_above_quota(store, tmp_path):
    source = program_source(tmp_path / "p", bytes(4 * MB))
    report = store.add([], [source])
    assert report.programs == 0
    assert "larger than the quota" in report.skipped[0]


def test_killed_writer_leaves_no_partial_add(place, tmp_path):
    HistoryStore.open(place, create=True).close()
    source = program_source(tmp_path / "p", b"program")

    def entries():
        yield history_entry("r1")
        yield history_entry("r2")
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            HistoryStore.open(place).add(entries(), [source])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (place.folder / "programs" / f".new-{'0' * 16}").mkdir(parents=True)
    for folder in (place.folder / "programs").glob(".new-*"):
        os.utime(folder, (0, 0))
    with HistoryStore.open(place) as store:
        assert list(store.entries()) == []
        assert store.add([history_entry("r1"), history_entry("r2")], [source]).added == 2
        assert not list((place.folder / "programs").glob(".*"))


def test_store_copies_programs_without_write_lock(store, tmp_path):
    source = program_source(tmp_path / "p", b"program")

    def programs():
        with HistoryStore.open(store.place) as other:
            other.add([history_entry("r2")], [source])  # another writer, which would wait for the lock
        yield source

    report = store.add([history_entry("r1", program=source.record.digest)], programs())
    assert (report.added, report.programs) == (1, 0)
    with store._programs.copy_program(program_source(tmp_path / "q", b"other")) as copy:
        assert copy.is_dir()
        store.add([], [])  # does not delete the copy
        assert copy.is_dir()
    assert not list((store.place.folder / "programs").glob(".*"))


def test_concurrent_writers_add_each_entry_once(place):
    added = []

    def write():
        with HistoryStore.open(place, create=True) as store:
            added.extend(store.add([history_entry(f"r{number}")]).added for number in range(10))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(added) == 10
    assert len(added) == 20
    with HistoryStore.open(place) as store:
        assert len(list(store.entries())) == 10


def test_confirmed_and_accepted_entries_are_marked(store):
    first, second, other = history_entry("r1"), history_entry("r2"), history_entry("r3", commit="ffff0000")
    store.add([first, second, other])
    store.confirm(second, "measured")
    assert store.accept("ffff0000") == 1
    assert [one.confirmed for one in store.entries()] == ["", "measured", "accepted"]
    assert store.accept("r1:m") == 1
    assert [one.confirmed for one in store.entries()] == ["accepted", "measured", "accepted"]
    with pytest.raises(UsageError, match="no entry"):
        store.accept("r9")


def test_program_of_confirmed_entry_is_kept_above_quota(store, tmp_path):
    sources = [program_source(tmp_path / str(n), bytes([n]) * MB) for n in range(5)]
    entries = [
        history_entry(f"r{n}", created=float(n + 1), program=source.record.digest) for n, source in enumerate(sources)
    ]
    store.add(entries[:2], sources[:2])
    store.confirm(entries[0], "measured")
    store.add(entries[2:], sources[2:])
    assert [store.program(one.record.digest) is not None for one in sources] == [True, False, False, False, True]


def test_confirmed_entry_of_other_branch_does_not_release_baseline(store, tmp_path):
    sources = [program_source(tmp_path / str(n), bytes([n]) * MB) for n in range(6)]
    branches = ["main", "main", "main", "topic", "topic", "main"]
    entries = [
        history_entry(f"r{n}", created=float(n + 1), program=source.record.digest, branch=branches[n])
        for n, source in enumerate(sources)
    ]
    for n, how in enumerate(("accepted", "measured", "", "accepted", "", "")):
        store.add([entries[n]], [sources[n]])
        if how:
            store.confirm(entries[n], how)
    held = [n for n, source in enumerate(sources) if store.program(source.record.digest)]
    assert held == [0, 1, 5]  # accepted and confirmed of the baseline branch, newest


def test_store_refuses_linked_programs_and_keeps_other_directories(place, tmp_path):
    folder, victim = place.folder, tmp_path / "victim"
    source = program_source(tmp_path / "p", b"program")
    kept = [victim / name for name in (".oh-my-zsh", f".new-{'0' * 16}")]
    for one in kept:
        one.mkdir(parents=True)
    with HistoryStore.open(place, create=True) as store:
        folder.mkdir(exist_ok=True)
        (folder / "programs").symlink_to(victim)
        for attempt in (lambda: store.add([history_entry()], [source]), lambda: store.program(source.record.digest)):
            with pytest.raises(StorageError, match="programs is a symbolic link"):
                attempt()
        (folder / "programs").unlink()
        victim.rename(folder / "programs")
        store.add([history_entry()])
        recent = folder / "programs" / kept[1].name
        assert recent.exists()  # may belong to a running process
        os.utime(recent, (0, 0))
        store.add([history_entry()])
    assert [one.name for one in (folder / "programs").iterdir()] == [".oh-my-zsh"]


@pytest.mark.parametrize("change", ["digest", "files", "main", "outside", "json", "link"])
def test_program_record_rejects_damaged_record(store, tmp_path, change):
    source = program_source(tmp_path / "p", b"program")
    digest = source.record.digest
    store.add([], [source])
    files = store.program(digest)
    record = files.parent / "program.json"
    values = source.record.to_json()
    if change == "link":
        files.rename(tmp_path / "files")
        files.symlink_to(tmp_path / "files")
    changes = {
        "digest": {"digest": digest_of(b"other")},
        "files": {"files": {"main.vmfb": digest_of(b"other")}},
        "main": {"main": "../main.vmfb"},
        "outside": {"files": {"../../../x": digest}, "main": "../../../x"},
    }
    record.write_text("{" if change == "json" else json.dumps({**values, **changes.get(change, {})}))
    with pytest.raises(StorageError, match="is damaged"):
        store.program_record(digest)


def test_store_skips_oversized_entry(store):
    report = store.add([history_entry(reason="a" * 2_000_000)])
    assert "2000" in report.skipped[0]
    assert list(store.entries()) == []
