"""Test the mirror of a farm's job results among the sessions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fake_farm_client import FakeFarm, job
from support.waiting import eventually

from hil.controller.farm.messages import Kind
from hil.controller.web.farm.mirror import FarmMirror
from hil.core.digest import digest_of
from hil.errors import FarmUnreachable

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
        mirror.look()
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
        mirror.look()
        FarmMirror(link, tmp_path).look()
        assert len(farm.fetched) == 3 and [what for _, what in farm.asked[asked:] if what == "result"] == []


def test_mirror_skips_incomplete_and_empty_submissions(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1.1", {"run.json": RUN})
    farm.jobs += [job("1.2", "running"), job("2", "cancelled"), job("3", "done", kind="lease"), job("4")]
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path)
        mirror.look()
        assert names(mirror.runs) == [] and farm.fetched == []


def test_mirror_skips_unavailable_and_unsafe_files(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN})
    farm.end("2", {"../../evil": b"x"})
    farm.end("3", {"run.json": RUN})
    farm.results["3"]["files"]["gone"] = "nonsense"
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path / "farm")
        mirror.look()
        assert names(mirror.runs) == ["1/run.json"] and not (tmp_path / "evil").exists()
        count = len(farm.asked)
        mirror.look()
        assert [what for _, what in farm.asked[count:] if what != "events"] == ["jobs"]


def test_mirror_ignores_directory_names_from_farm(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN}, Kind.BUNDLE)
    farm.end("2.1", {"run.json": RUN}, Kind.BUNDLE)
    farm.end("2.2", {"run.json": RUN}, Kind.BUNDLE)
    farm.results["2.2"]["name"] = "../../../evil"
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path / "farm")
        mirror.look()
        assert names(mirror.runs) == ["1/run.json"] and not list(tmp_path.rglob("evil"))
        farm.jobs[0]["submission"] = "../../other"
        (tmp_path / "other").mkdir()
        with pytest.raises(ValueError, match="other"):
            mirror.look()
        assert (tmp_path / "other").exists()


def test_farm_link_reports_invalid_responses_and_recovers(tmp_path: Path) -> None:
    farm = FakeFarm()
    with farm.link() as link:
        farm.events.append({"at": "now", "board": "", "job": ""})
        eventually(lambda: "unexpected response" in link.trouble)
        farm.events.clear()
        eventually(lambda: not link.trouble)


def test_mirror_retries_after_farm_outage(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1", {"run.json": RUN, "more": b"more"})
    data = farm.files.pop(digest_of(b"more"))
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path)
        with pytest.raises(FarmUnreachable):
            mirror.look()
        assert names(mirror.runs) == []
        farm.keep(data)
        mirror.look()
        assert names(mirror.runs) == ["1/more", "1/run.json"]
        assert len(farm.fetched) == 2


def test_mirror_replaces_job_of_other_farm(tmp_path: Path) -> None:
    for text, queued in ((b"one", "2026-01-01T00:00:00+00:00"), (b"two", "2026-02-01T00:00:00+00:00")):
        farm = FakeFarm()
        farm.end("1", {"run.json": text})
        farm.jobs[0]["queued_at"] = queued
        with farm.link() as link:
            FarmMirror(link, tmp_path).look()
        assert (tmp_path / "runs/1/run.json").read_bytes() == text


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
            mirror.look()
            assert room_used(tmp_path) <= 200_000
        kept = [path.name for path in mirror.runs.iterdir()]
        assert "8" in kept and "1" not in kept
        assert len(list((tmp_path / "blobs").iterdir())) == len(kept) + 1
        fetched = len(farm.fetched)
        mirror.look()
        assert len(farm.fetched) == fetched


def test_mirror_downloads_newest_submissions_within_limit(tmp_path: Path) -> None:
    farm = FakeFarm()
    for name in map(str, range(1, 9)):
        farm.end(name, {"run.json": name.encode() * 30_000})
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path, most_bytes=200_000)
        mirror.look()
        assert {"8", "7", "6"} <= {path.name for path in mirror.runs.iterdir()}
        assert room_used(tmp_path) <= 200_000
        fetched = len(farm.fetched)
        mirror.look()
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
        mirror = FarmMirror(link, tmp_path, most_bytes=200_000)
        mirror.look()
        files = {
            "one large file": {"run.json": b"=" * 10_000_000},
            "many small files": {f"{number}": str(number).encode() for number in range(300)},
            "copies": {f"{number}": b"=" * 30_000 for number in range(300)},
        }[kind]
        farm.end("2", files)
        written: list[int] = []
        monkeypatch.setattr("shutil.copyfile", lambda have, to: written.append(to.write_bytes(have.read_bytes())))
        mirror.look()
        assert names(mirror.runs) == ["1/run.json"]
        assert room_used(tmp_path) < 10_000 and sum(written) <= 200_000
        count = len(farm.asked)
        mirror.look()
        assert [what for _, what in farm.asked[count:] if what == "result"] == []
