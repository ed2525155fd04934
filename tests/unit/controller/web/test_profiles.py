"""Where profiles are, and that pages read those alone which lie in the folders that `hil web` was given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.shown_profile import example

from hil.controller.analysis.profile.store import write_profile
from hil.controller.web import profiles
from hil.controller.web.index import Reader, Writer
from hil.controller.web.indexer import Indexer
from hil.controller.web.profiles import (
    file_of,
    find_profile,
    how_to_show,
    kind_of,
    list_profiles,
    named_profiles,
    open_profile,
    stored_profiles,
    trace_file,
)
from hil.errors import UsageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = (tmp_path / "served").resolve()
    write_profile(example("monday"), root / "profiles" / "monday")
    return root


def test_a_profile_is_named_by_the_folder_that_is_served_and_the_way_from_there(root):
    one = find_profile([root], "0/profiles/monday")
    assert (one.kind, one.folder, one.name) == ("run", root / "profiles" / "monday", "profiles/monday")
    assert find_profile([root / "other", root], "1/profiles/monday").folder == one.folder
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
def test_nothing_else_is_a_profile(root, key):
    write_profile(example("tuesday"), root.parent / "elsewhere")
    (root / "link").symlink_to(root.parent / "elsewhere")
    with pytest.raises(UsageError, match="there is no profile"):
        find_profile([root], key)


def test_a_file_of_it_that_lies_elsewhere_is_not_read(root, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    one = find_profile([root], "0/profiles/monday")
    for name in ("trace.pftrace.gz", "profile.json"):
        (one.folder / name).unlink()
        (one.folder / name).symlink_to(secret)
    with pytest.raises(UsageError, match=r"has no trace.pftrace.gz that can be shown"):
        trace_file([root], one)
    with pytest.raises(UsageError, match=r"has no profile.json that can be shown"):
        open_profile([root], one)


def test_what_is_too_long_or_no_file_is_not_read(root, monkeypatch):
    one = find_profile([root], "0/profiles/monday")
    monkeypatch.setitem(profiles._MOST, "ops.csv", 10)
    with pytest.raises(UsageError, match="too many for a page") as caught:
        open_profile([root], one)
    assert "hil profile show" in caught.value.hint
    (one.folder / "trace.pftrace.gz").unlink()
    os.mkfifo(one.folder / "trace.pftrace.gz")
    with pytest.raises(UsageError, match="has no trace"):
        file_of([root], one, "trace.pftrace.gz")


def test_a_cases_profile_is_the_first_place_that_has_one_and_is_served(root, tmp_path):
    inside, outside = root / "profiles" / "monday", tmp_path / "outside"
    write_profile(example("monday"), outside)
    found = stored_profiles([root], {"run": [root / "none", inside], "compile": [outside, root / "none"]})
    assert [(one.kind, one.folder, one.key) for one in found] == [
        ("run", inside, "0/profiles/monday"),
        ("compile", outside, ""),
    ]
    assert str(outside) in how_to_show(found[1]) and "hil web --runs DIR" in how_to_show(found[1])
    # A link in the session's folder leads where it leads.
    (root / "link").symlink_to(outside)
    assert [one.key for one in stored_profiles([root], {"run": [root / "link"]})] == [""]
    assert stored_profiles([root], {"run": [root / "none"]}) == []


def test_a_profile_is_found_from_where_its_command_was_called(root, tmp_path):
    session = root / "hil-runs" / "run"
    session.mkdir(parents=True)
    write_profile(example("net"), root / "times" / "net")

    def found(way, case="net"):
        return [one.key for one in named_profiles([root], session, case, {"run": [way]})]

    assert found("profiles/monday") == ["0/profiles/monday"] and found("times") == ["0/times/net"]
    assert found(str(root / "times" / "net"), "other") == ["0/times/net"]
    # What is in no place that is served is told as if it were elsewhere: pages do not say what is there.
    assert found("nowhere") == found("/etc") == [""] and found("a\0b") == []


def test_all_are_listed_the_newest_first_without_following_links(root, tmp_path):
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
    with Writer(tmp_path / "index.sqlite") as writer:
        Indexer(writer, [root]).look()
    with Reader(tmp_path / "index.sqlite").reading() as database:
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


def test_kinds(root, tmp_path):
    assert kind_of(root / "profiles" / "monday") == "run"
    assert kind_of(tmp_path) == kind_of(tmp_path / "none") == kind_of(tmp_path / "\0") == ""
