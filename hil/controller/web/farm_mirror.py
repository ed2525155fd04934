"""What a farm's jobs made, as folders that the index reads like any other: fetched once they have ended, each content
once, the newest first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.farm.messages import ENDED, Kind
from hil.controller.farm.results import EndedJob, fetch_run, fetch_suite
from hil.controller.web.farm_link import ILL_FORMED, FarmLink
from hil.core.digest import check
from hil.core.files import write_atomic
from hil.errors import FarmUnreachable, HilError, UsageError

# So many of the newest submissions are looked at, and of what they made so much is kept.
_MOST_SUBMISSIONS, MOST_BYTES = 200, 8 << 30
_MADE = (Kind.RUN.value, Kind.BUNDLE.value, Kind.SUITE.value)


class FarmMirror:
    """Fetches results in a thread of its own. A context manager.

    ``runs`` has a folder for each submission, named as it is; ``blobs`` each content once, which the folders share;
    ``done`` a mark for each submission that is there whole.
    """

    def __init__(self, link: FarmLink, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.runs, self._blobs, self._done = folder / "runs", folder / "blobs", folder / "done"
        self._link, self._most_bytes = link, most_bytes
        link.runs = self.runs
        self._nothing: set[str] = set()  # submissions that made nothing, or whose files the farm has no more
        self._floor = 0  # submissions up to this one went, for want of room
        for one in (self.runs, self._blobs, self._done):
            one.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread = threading.Thread(target=self._watch, name="hil-farm-mirror", daemon=True)

    def __enter__(self) -> FarmMirror:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The link ended first, so that nothing goes on for long.
        self._thread.join(1.0)

    def _watch(self) -> None:
        seen = -1
        while not self._link.over:
            seen = self._link.wait(seen)
            # A farm may answer anything: the next answer may be right again.
            with contextlib.suppress(HilError, OSError, *ILL_FORMED):
                self.look()

    def look(self) -> None:
        """Fetch what has ended and is not here yet.

        Raises:
            FarmUnreachable: the farm is away.
            OSError: it cannot be written.
        """
        rows = self._link.ask("jobs", state=[state.value for state in ENDED], limit=_MOST_SUBMISSIONS)
        made = {int(row["submission"]) for row in rows if row["kind"] in _MADE}
        for submission in sorted(made, reverse=True):
            if self._link.over:
                return
            name, key = str(submission), _key([row for row in rows if row["submission"] == submission])
            if submission <= self._floor or key in self._nothing or self._mark(name) == key:
                continue
            if (jobs := self._ended(submission)) is not None:
                self._fetch(name, _key(jobs), jobs)

    def _mark(self, name: str) -> str:
        try:
            return (self._done / name).read_text()
        except OSError:
            return ""

    def _ended(self, submission: int) -> list[Mapping[str, Any]] | None:
        """The jobs of a submission; None where some have not ended."""
        jobs: list[Mapping[str, Any]] = self._link.ask("jobs", submission=submission, limit=100_000)
        return None if any(job["state"] not in ENDED for job in jobs) else jobs

    def _fetch(self, name: str, key: str, jobs: Sequence[Mapping[str, Any]]) -> None:
        # A farm that was made anew has other jobs of the same names.
        shutil.rmtree(self.runs / name, ignore_errors=True)
        farm: Any = _Contents(self._link, self._blobs)
        try:
            ended = [EndedJob.of_row(row) for row in self._results(name, jobs)]
            made = [one for one in ended if one.result.files]
            if not made:
                self._nothing.add(key)
                return
            if made[0].spec.kind is Kind.SUITE:
                fetch_suite(farm, ended, self.runs / name)
            for one in made if made[0].spec.kind is not Kind.SUITE else ():
                fetch_run(farm, one, self.runs / name if len(jobs) == 1 else self.runs / name / one.name)
        except (HilError, *ILL_FORMED) as error:
            shutil.rmtree(self.runs / name, ignore_errors=True)
            if isinstance(error, FarmUnreachable):
                raise
            self._nothing.add(key)
            return
        write_atomic(self._done / name, key)
        self._tidy()

    def _results(self, name: str, jobs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        try:
            found: list[Mapping[str, Any]] = self._link.ask("result", name=name, specs=True)
        except UsageError:  # too much for one answer
            return [row for job in jobs for row in self._link.ask("result", name=job["name"], specs=True)]
        return found

    def _tidy(self) -> None:
        """Delete the oldest where it is too much, and contents that no folder shares any more."""
        kept = sorted((int(path.name) for path in self._done.iterdir() if path.name.isdecimal()), reverse=True)
        while len(kept) > 1 and sum(size for _, size in self._sizes()) > self._most_bytes:
            self._floor = kept.pop()
            (self._done / str(self._floor)).unlink(missing_ok=True)
            shutil.rmtree(self.runs / str(self._floor), ignore_errors=True)
            for path, _ in self._sizes():
                if path.stat().st_nlink == 1:
                    path.unlink(missing_ok=True)

    def _sizes(self) -> Iterator[tuple[Path, int]]:
        for path in self._blobs.iterdir():
            with contextlib.suppress(OSError):
                yield path, path.stat().st_size


def _key(jobs: Sequence[Mapping[str, Any]]) -> str:
    """What tells a submission from another farm's of the same number."""
    return f"{jobs[-1]['submission']} {jobs[-1]['queued_at']}"


class _Contents:
    """A farm's files, of which each content comes once."""

    def __init__(self, link: FarmLink, folder: Path) -> None:
        self._link, self._folder = link, folder

    def download(self, digest: str, to: Path) -> None:
        """Put a file there."""
        kept = self._folder / check(digest).replace(":", "-")
        if not kept.exists():
            self._link.download(digest, kept)
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(kept, to)
        except OSError:  # a file system without links
            shutil.copyfile(kept, to)
