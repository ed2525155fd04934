"""Test the mirror of a farm's job results among the sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_farm_client import FakeFarm, job
from support.suite_runs import suite_head
from support.waiting import eventually

from hil.controller.farm.messages import Kind
from hil.controller.web.farm.mirror import FarmMirror
from hil.controller.web.farm.mirror_room import DiskFull
from hil.controller.workloads.suites.request import SuiteRequest
from hil.core.digest import digest_of
from hil.errors import FarmError, FarmUnreachable

RUN = json.dumps({"schema": 1, "cases": [{"name": "digits", "outcome": "PASS"}]}).encode()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_mirror_downloads_ended_jobs_without_duplicates(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN, "digits/outputs/0-y.npy": b"same"})
    farm.end("2.1", {"run.json": RUN, "a.log": b"same"}, Kind.BUNDLE)
    farm.end("2.2", {"run.json": b"{}"}, Kind.BUNDLE)
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path)
        mirror.fetch_new()
        assert names(mirror.runs) == [
            "1/digits/outputs/0-y.npy",
            "1/run.json",
            "2/2.1/a.log",
            "2/2.1/run.json",
            "2/2.2/run.json",
        ]
        assert (mirror.runs / "1/run.json").read_bytes() == RUN
        assert sorted(farm.fetched) == sorted(farm.files) and len(farm.fetched) == 3
        asked = len(farm.asked)
        mirror.fetch_new()
        FarmMirror(link, tmp_path).fetch_new()
        assert len(farm.fetched) == 3 and [what for _, what in farm.asked[asked:] if what == "result"] == []


def test_mirror_skips_incomplete_and_empty_submissions(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1.1", {"run.json": RUN})
    farm.jobs += [job("1.2", "running"), job("2", "cancelled"), job("3", "done", kind="lease"), job("4")]
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path)
        mirror.fetch_new()
        assert names(mirror.runs) == [] and farm.fetched == []


def test_mirror_skips_unavailable_and_unsafe_files(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN})
    farm.end("2", {"../../evil": b"x"})
    farm.end("3", {"run.json": RUN})
    farm.results["3"]["files"]["gone"] = "nonsense"
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path / "farm")
        mirror.fetch_new()
        assert names(mirror.runs) == ["1/run.json"] and not (tmp_path / "evil").exists()
        count = len(farm.asked)
        mirror.fetch_new()
        assert [what for _, what in farm.asked[count:] if what != "events"] == ["jobs"]


def test_mirror_ignores_directory_names_from_farm(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN}, Kind.BUNDLE)
    farm.end("2.1", {"run.json": RUN}, Kind.BUNDLE)
    farm.end("2.2", {"run.json": RUN}, Kind.BUNDLE)
    farm.results["2.2"]["name"] = "../../../evil"
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path / "farm")
        mirror.fetch_new()
        assert names(mirror.runs) == ["1/run.json"] and not list(tmp_path.rglob("evil"))
        farm.jobs[0]["submission"] = "../../other"
        (tmp_path / "other").mkdir()
        with pytest.raises(FarmError, match="submission"):
            mirror.fetch_new()
        assert (tmp_path / "other").exists()


@pytest.mark.ci
def test_farm_link_reports_invalid_responses_and_recovers(tmp_path: Path) -> None:
    farm = FakeFarm()
    with farm.link() as link:
        farm.events.append({"at": "now", "board": "", "job": ""})
        eventually(lambda: "invalid response from the farm" in link.trouble)
        farm.events.clear()
        eventually(lambda: not link.trouble)


def test_mirror_retries_after_farm_outage(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN, "more": b"more"})
    data = farm.files.pop(digest_of(b"more"))
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path)
        with pytest.raises(FarmUnreachable):
            mirror.fetch_new()
        assert names(mirror.runs) == []
        farm.keep(data)
        mirror.fetch_new()
        assert names(mirror.runs) == ["1/more", "1/run.json"]
        assert len(farm.fetched) == 2


def test_mirror_replaces_job_of_other_farm(tmp_path: Path) -> None:
    for text, queued in ((b"one", "2026-01-01T00:00:00+00:00"), (b"two", "2026-02-01T00:00:00+00:00")):
        farm = FakeFarm()
        farm.end("1", {"run.json": text})
        farm.jobs[0]["queued_at"] = queued
        with farm.link() as link:
            FarmMirror(link, tmp_path).fetch_new()
        assert (tmp_path / "runs/1/run.json").read_bytes() == text


def end_suite(farm: FakeFarm, name: str, **record: Any) -> None:
    """End a suite's job with one case."""
    case = {"id": "a", "model": "m", "suite": "s", "flow": "f", "runtime": "iree", "outcome": "PASS", "ended": "PASS"}
    document = {**suite_head().to_json(), "folder": "", "cases": [case], **record}
    farm.end(name, {"suite.json": b"{}"}, Kind.SUITE, **document)
    typed = {"source": "s", "flow": "f", "filters": [], "suite": "s", "flow_name": "f", "runtime": "", "expected": None}
    options = {**SuiteRequest("s", "f").to_json(), "typed": typed, "cases": [["a", "m", "", ""]]}
    farm.results[name]["spec"]["options"] = options


def test_mirror_fetches_suite(tmp_path: Path) -> None:
    farm = FakeFarm()
    end_suite(farm, "1", started=1.0)
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path)
        mirror.fetch_new()
        assert "1/junit.xml" in names(mirror.runs)


@pytest.mark.ci
@pytest.mark.parametrize("bad", [{"started": 1e308}, {"finished": "x"}, {"board_info": [[]]}])
def test_mirror_skips_bad_suite_record(tmp_path: Path, bad: dict[str, Any]) -> None:
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN})
    end_suite(farm, "2", **bad)
    with farm.link() as link, FarmMirror(link, tmp_path) as mirror:
        eventually(lambda: (tmp_path / "done/1").exists())
        farm.end("3", {"run.json": RUN})
        farm.happen()
        eventually(lambda: (tmp_path / "done/3").exists())
        assert names(mirror.runs) == ["1/run.json", "3/run.json"]
        assert sum(what == "result" for _, what in farm.asked) == 3


@pytest.mark.ci
def test_mirror_thread_survives_any_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN})
    failed: list[int] = []

    def fail(*_: Any) -> Any:
        failed.append(1)
        raise RecursionError

    monkeypatch.setattr(FarmMirror, "_read_done_key", fail)
    with farm.link() as link, FarmMirror(link, tmp_path):
        eventually(lambda: bool(failed))
        monkeypatch.undo()
        farm.happen()
        eventually(lambda: (tmp_path / "done/1").exists())


def test_mirror_rejects_deep_paths(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1", {"a/" * 1000 + "x": b"x"})
    farm.end("2", {"a/" * 20 + "x": b"x"})
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path)
        mirror.fetch_new()
        assert names(mirror.runs) == ["2/" + "a/" * 20 + "x"]


def test_mirror_counts_directories_before_creation(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1", {f"{number}/" + "a/" * 30 + "x": b"same" for number in range(30)})
    made: list[Path] = []
    mkdir = Path.mkdir

    def count(self: Path, *args: Any, **how: Any) -> None:
        made.append(self)
        mkdir(self, *args, **how)

    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path, most_bytes=2_000_000)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "mkdir", count)
            mirror.fetch_new()
        assert names(mirror.runs) == [] and len(made) < 100


def test_mirror_keeps_free_space_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN})
    room = [1 << 20]
    monkeypatch.setattr("hil.controller.web.farm.mirror_room.has_room", lambda folder, more: more <= room[0])
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path)
        mirror.fetch_new()
        farm.end("2", {"run.json": b"=" * 10_000})
        room[0] = 20_000  # less than the file's charge
        mirror.fetch_new()
        farm.end("3", {"run.json": RUN})
        room[0] = -1
        with pytest.raises(DiskFull):
            mirror.fetch_new()
        assert names(mirror.runs) == ["1/run.json"]
        room[0] = 1 << 20
        mirror.fetch_new()
        assert names(mirror.runs) == ["1/run.json", "3/run.json"]


def room_used(folder: Path) -> int:
    """Return the bytes of all files below a directory, with hard links counted once."""
    found = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return sum(found.values())


def test_mirror_deletes_oldest_submissions_at_limit(tmp_path: Path) -> None:
    farm = FakeFarm()
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path, most_bytes=200_000)
        for name in map(str, range(1, 9)):
            farm.end(name, {"run.json": name.encode() * 30_000, "both": b"=" * 100})
            mirror.fetch_new()
            assert room_used(tmp_path) <= 200_000
        kept = [path.name for path in mirror.runs.iterdir()]
        assert "8" in kept and "1" not in kept
        assert len(list((tmp_path / "blobs").iterdir())) == len(kept) + 1
        fetched = len(farm.fetched)
        mirror.fetch_new()
        assert len(farm.fetched) == fetched


def test_mirror_downloads_newest_submissions_within_limit(tmp_path: Path) -> None:
    farm = FakeFarm()
    for name in map(str, range(1, 9)):
        farm.end(name, {"run.json": name.encode() * 30_000})
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path, most_bytes=400_000)
        mirror.fetch_new()
        kept = {path.name for path in mirror.runs.iterdir()}
        assert {"8", "7", "6"} <= kept and "1" not in kept
        assert room_used(tmp_path) <= 400_000
        fetched = len(farm.fetched)
        mirror.fetch_new()
        assert len(farm.fetched) == fetched


@pytest.mark.parametrize("kind", ["one large file", "many small files", "copies"])
def test_mirror_rejects_submission_above_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def no_links(*places: object) -> None:
        raise OSError

    if kind == "copies":
        monkeypatch.setattr("os.link", no_links)
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN})
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path, most_bytes=400_000)
        mirror.fetch_new()
        files = {
            "one large file": {"run.json": b"=" * 10_000_000},
            "many small files": {f"{number}": str(number).encode() for number in range(300)},
            "copies": {f"{number}": b"=" * 30_000 for number in range(300)},
        }[kind]
        farm.end("2", files)
        written: list[int] = []
        monkeypatch.setattr("shutil.copyfile", lambda have, to: written.append(to.write_bytes(have.read_bytes())))
        mirror.fetch_new()
        assert names(mirror.runs) == ["1/run.json"]
        assert room_used(tmp_path) < 10_000 and sum(written) <= 200_000
        count = len(farm.asked)
        mirror.fetch_new()
        assert [what for _, what in farm.asked[count:] if what == "result"] == []
