"""Test profile paths: pages read only profiles in the directories given to `hil web`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.shown_profile import example

from hil.controller.analysis.profile.store import write_profile
from hil.controller.web.index import profiles
from hil.controller.web.index.index import IndexReader, IndexWriter
from hil.controller.web.index.indexer import Indexer
from hil.controller.web.index.profiles import (
    classify_profile,
    find_profile,
    find_stored_profiles,
    list_named_profiles,
    list_profiles,
    make_show_hint,
    open_profile,
    resolve_file,
    trace_file,
)
from hil.controller.web.text.roots import number_roots
from hil.errors import UsageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = (tmp_path / "served").resolve()
    write_profile(example("monday"), root / "profiles" / "monday")
    return root


def test_profile_key_names_root_and_path(root):
    one = find_profile([root], "0/profiles/monday")
    assert (one.kind, one.folder, one.name) == ("run", root / "profiles" / "monday", "profiles/monday")
    roots = [root / "other", root]
    number = next(number for number, path in number_roots(roots).items() if path == root)
    for order in (roots, roots[::-1]):
        assert find_profile(order, f"{number}/profiles/monday").folder == one.folder
    assert find_profile([root / "profiles" / "monday"], "0/").folder == one.folder
    assert len(open_profile([root], one).rows) == 12
    assert trace_file([root], one) == one.folder / "trace.pftrace.gz"


@pytest.mark.parametrize(
    "key",
    [
        *("", "0", "0/", "0/profiles", "1/profiles/monday", "-1/profiles/monday", "x/profiles/monday"),
        *("0/../elsewhere", "0//etc", "0/\0", "²/profiles/monday", "9999999999/x", "0/link", f"0/{'x' * 5000}"),
    ],
)
def test_find_profile_rejects_other_keys(root, key):
    write_profile(example("tuesday"), root.parent / "elsewhere")
    (root / "link").symlink_to(root.parent / "elsewhere")
    with pytest.raises(UsageError, match=r"profile .* not found"):
        find_profile([root], key)


def test_profile_rejects_symlinked_files(root, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    one = find_profile([root], "0/profiles/monday")
    for name in ("trace.pftrace.gz", "profile.json"):
        (one.folder / name).unlink()
        (one.folder / name).symlink_to(secret)
    with pytest.raises(UsageError, match=r"trace\.pftrace\.gz not found"):
        trace_file([root], one)
    with pytest.raises(UsageError, match=r"profile\.json not found"):
        open_profile([root], one)


def test_profile_rejects_oversized_and_special_files(root, monkeypatch):
    one = find_profile([root], "0/profiles/monday")
    monkeypatch.setitem(profiles._MAX_FILE_BYTES, "ops.csv", 10)
    with pytest.raises(UsageError, match="exceeds the size limit") as caught:
        open_profile([root], one)
    assert "hil profile show" in caught.value.hint
    (one.folder / "trace.pftrace.gz").unlink()
    os.mkfifo(one.folder / "trace.pftrace.gz")
    with pytest.raises(UsageError, match=r"trace.* not found"):
        resolve_file([root], one, "trace.pftrace.gz")


def test_stored_profiles_prefer_first_existing_directory(root, tmp_path):
    inside, outside = root / "profiles" / "monday", tmp_path / "outside"
    write_profile(example("monday"), outside)
    found = find_stored_profiles([root], {"run": [root / "none", inside], "compile": [outside, root / "none"]})
    assert [(one.kind, one.folder, one.key) for one in found] == [
        ("run", inside, "0/profiles/monday"),
        ("compile", outside, ""),
    ]
    assert str(outside) in make_show_hint(found[1]) and "hil web --runs DIR" in make_show_hint(found[1])
    # A symlink counts as its target.
    (root / "link").symlink_to(outside)
    assert [one.key for one in find_stored_profiles([root], {"run": [root / "link"]})] == [""]
    assert find_stored_profiles([root], {"run": [root / "none"]}) == []


def test_named_profiles_resolve_paths_from_project_directory(root, tmp_path):
    session = root / "hil-runs" / "run"
    session.mkdir(parents=True)
    write_profile(example("net"), root / "times" / "net")

    def found(way, case="net"):
        return [one.key for one in list_named_profiles([root], session, case, {"run": [way]})]

    assert found("profiles/monday") == ["0/profiles/monday"] and found("times") == ["0/times/net"]
    assert found(str(root / "times" / "net"), "other") == ["0/times/net"]
    # A path outside the served directories is reported as elsewhere, whether it exists or not.
    assert found("nowhere") == found("/etc") == [""] and found("a\0b") == []


def test_list_profiles_sorts_newest_first_without_symlinks(root, tmp_path):
    write_profile(example("tuesday"), root / "tuesday")
    (root / "compiling").mkdir()
    (root / "compiling" / "passes.csv").touch()
    (root / "both.pftrace.gz").touch()
    (root / "session").mkdir()
    (root / "session" / "run.json").touch()
    write_profile(example("within"), root / "session" / "model" / "profile")
    (root / "loop").symlink_to(root)
    for number, name in enumerate(("both.pftrace.gz", "compiling/passes.csv", "tuesday/profile.json")):
        os.utime(root / name, (number, number))
    with IndexWriter(tmp_path / "index.sqlite") as writer:
        Indexer(writer, [root]).scan()
    with IndexReader(tmp_path / "index.sqlite").open_snapshot() as database:
        listed, newest = (list_profiles(database, [root], most) for most in (9, 2))
        runs = list_profiles(database, [root], 9, kind="run", but="0/tuesday")
    assert [(one.key, one.kind) for one in listed.found] == [
        ("0/profiles/monday", "run"),
        ("0/tuesday", "run"),
        ("0/compiling", "compile"),
        ("0/both.pftrace.gz", "trace"),
    ]
    assert (newest.found, newest.total) == (listed.found[:2], 4)
    assert [one.key for one in runs.found] == ["0/profiles/monday"]
    assert all(find_profile([root], one.key).kind == one.kind for one in listed.found)


def test_kind_of_detects_profile_directories(root, tmp_path):
    assert classify_profile(root / "profiles" / "monday") == "run"
    assert classify_profile(tmp_path) == classify_profile(tmp_path / "none") == classify_profile(tmp_path / "\0") == ""
