from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hil.controller.farm.host.jobs.job_transfer import FileCache, upload_folder
from hil.controller.farm.messages import JobSpec, Kind
from hil.core.digest import digest_of
from hil.errors import FarmError, UsageError


class Store:
    """Farm store that counts downloads."""

    def __init__(self, *contents: bytes) -> None:
        self.held = {digest_of(content): content for content in contents}
        self.fetched: list[str] = []

    def download(self, digest: str, to: Path) -> None:
        if digest not in self.held:
            raise FarmError("the store has it no more")
        self.fetched.append(digest)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(self.held[digest])

    def upload(self, files: dict[str, Path]) -> int:
        self.held |= {digest: path.read_bytes() for digest, path in files.items()}
        return 0


def spec(**files: bytes) -> JobSpec:
    return JobSpec(Kind.RUN, files={name.replace("__", "/"): digest_of(content) for name, content in files.items()})


def test_files_downloads_content_only_for_first_job(tmp_path):
    store: Any = Store(b"model", b"input")
    files = FileCache(tmp_path / "kept")
    for number in range(2):
        files.lay_out(spec(model__a=b"model", x=b"input", y=b"model"), tmp_path / f"job{number}", store)
        found = {path.name: path.read_bytes() for path in (tmp_path / f"job{number}").rglob("*") if path.is_file()}
        assert found == {"a": b"model", "x": b"input", "y": b"model"}
    assert len(store.fetched) == 2


def test_files_isolates_jobs_from_changes_of_other_jobs(tmp_path):
    store: Any = Store(b"model")
    files = FileCache(tmp_path / "kept")
    files.lay_out(spec(a=b"model"), tmp_path / "one", store)
    (tmp_path / "one" / "a").write_bytes(b"other")
    files.lay_out(spec(a=b"model"), tmp_path / "two", store)
    assert (tmp_path / "two" / "a").read_bytes() == b"model"


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/a"])
def test_files_rejects_paths_outside_job_directory(name, tmp_path):
    with pytest.raises(UsageError, match="outside"):
        FileCache(tmp_path / "kept").lay_out(
            JobSpec(Kind.RUN, files={name: digest_of(b"x")}),
            tmp_path / "job",
            Store(b"x"),
        )


def test_files_rejects_invalid_digest(tmp_path):
    with pytest.raises(UsageError, match="not a digest"):
        FileCache(tmp_path / "kept").lay_out(
            JobSpec(Kind.RUN, files={"a": "../../secret"}),
            tmp_path / "job",
            Store(),
        )


def test_files_raises_farm_error_for_missing_content(tmp_path):
    with pytest.raises(FarmError, match="no more"):
        FileCache(tmp_path / "kept").lay_out(spec(a=b"gone"), tmp_path / "job", Store())


def test_files_evicts_least_recently_used_content(tmp_path):
    contents = [bytes([number]) * 100 for number in range(4)]
    store: Any = Store(*contents)
    files = FileCache(tmp_path / "kept", most_bytes=250)
    for number, content in enumerate(contents[:3]):
        files.lay_out(spec(a=content), tmp_path / "job", store)
        for path in (tmp_path / "kept").iterdir():
            if path.read_bytes() == content:
                os.utime(path, (number, number))
    files.lay_out(spec(a=contents[3]), tmp_path / "job", store)
    kept = {path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    assert kept == {contents[2], contents[3]}


def test_upload_folder_stores_files_and_skips_symlinks(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "sub" / "x.npy").write_bytes(b"tensor")
    (tmp_path / "link").symlink_to(__file__)  # A job must not get files of its host.
    store: Any = Store()
    stored = upload_folder(tmp_path, store)
    assert {name: store.held[digest] for name, digest in stored.items()} == {"run.json": b"{}", "sub/x.npy": b"tensor"}


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), (".",), ("a\0b",)])
def test_files_rejects_conflicting_paths(names, tmp_path):
    (tmp_path / "job").mkdir()
    with pytest.raises(UsageError, match="cannot create the job's file"):
        FileCache(tmp_path / "kept").lay_out(
            JobSpec(Kind.RUN, files=dict.fromkeys(names, digest_of(b"x"))),
            tmp_path / "job",
            Store(b"x"),
        )


def test_files_replaces_damaged_content(tmp_path):
    store: Any = Store(b"model")
    files = FileCache(tmp_path / "kept")
    files.lay_out(spec(a=b"model"), tmp_path / "one", store)
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_bytes(b"")
    files.lay_out(spec(a=b"model"), tmp_path / "two", store)
    assert (tmp_path / "two" / "a").read_bytes() == kept.read_bytes() == b"model"
