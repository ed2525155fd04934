"""What a farm's jobs made, among the sessions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fake_farm_client import FakeFarm, job
from support.waiting import eventually

from hil.controller.farm.messages import Kind
from hil.controller.web.farm_mirror import FarmMirror
from hil.core.digest import digest_of
from hil.errors import FarmUnreachable

RUN = json.dumps({"schema": 1, "cases": [{"name": "digits", "outcome": "PASS"}]}).encode()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_has_ended_is_fetched_and_each_content_once(tmp_path: Path) -> None:
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


def test_what_goes_on_or_made_nothing_is_left_alone(tmp_path: Path) -> None:
    farm = FakeFarm()
    farm.end("1.1", {"run.json": RUN})
    farm.jobs += [job("1.2", "running"), job("2", "cancelled"), job("3", "done", kind="lease"), job("4")]
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path)
        mirror.look()
        assert names(mirror.runs) == [] and farm.fetched == []


def test_what_is_no_longer_there_is_not_asked_for_again_and_hinders_nothing(tmp_path: Path) -> None:
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


def test_no_folder_is_called_as_a_farm_likes(tmp_path: Path) -> None:
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


def test_a_farm_that_answers_nonsense_is_away_until_it_does_not(tmp_path: Path) -> None:
    farm = FakeFarm()
    with farm.link() as link:
        farm.events.append({"at": "now", "board": "", "job": ""})
        eventually(lambda: "does not know" in link.trouble)
        farm.events.clear()
        eventually(lambda: not link.trouble)


def test_a_farm_that_goes_away_while_it_sends_is_asked_again(tmp_path: Path) -> None:
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


def test_another_farms_job_of_the_same_name_takes_its_place(tmp_path: Path) -> None:
    for text, queued in ((b"one", "2026-01-01T00:00:00+00:00"), (b"two", "2026-02-01T00:00:00+00:00")):
        farm = FakeFarm()
        farm.end("1", {"run.json": text})
        farm.jobs[0]["queued_at"] = queued
        with farm.link() as link:
            FarmMirror(link, tmp_path).look()
        assert (tmp_path / "runs/1/run.json").read_bytes() == text


def test_the_oldest_goes_where_it_is_too_much(tmp_path: Path) -> None:
    farm = FakeFarm()
    for name in ("1", "2", "3"):
        farm.end(name, {"run.json": name.encode() * 100, "both": b"=" * 100})
    with farm.link() as link:
        mirror = FarmMirror(link, tmp_path, most_bytes=300)
        mirror.look()
        mirror.look()
        assert names(mirror.runs) == ["2/both", "2/run.json", "3/both", "3/run.json"]
        assert len(list((tmp_path / "blobs").iterdir())) == 3
