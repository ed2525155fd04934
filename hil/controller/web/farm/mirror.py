"""Mirror a farm's job results as directories for the index.

The mirror fetches results after all jobs in a submission end, newest first. Blobs are stored without duplicates.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hil.controller.farm.client.results import EndedJob, fetch_run, fetch_suite
from hil.controller.farm.messages import ENDED, Kind
from hil.controller.records.lab.farm import FarmJob, JobResultRow
from hil.controller.web.farm.link import FarmLink
from hil.controller.web.farm.mirror_room import MirrorRoom, NoRoom, TooLarge
from hil.controller.web.files.quota import count_bytes
from hil.core.digest import check
from hil.core.files import copy_file, read_text, write_atomic
from hil.errors import FarmUnreachable, HilError, UsageError

# Maximum submissions to mirror, newest first, and maximum bytes to store.
_MOST_SUBMISSIONS, MOST_BYTES = 200, 8 << 30
_LOG = logging.getLogger("uvicorn.error")
_MIRRORED_KINDS = (Kind.RUN.value, Kind.BUNDLE.value, Kind.SUITE.value)


class FarmMirror:
    """Context manager with a thread that fetches results.

    ``runs`` has a directory per submission. ``blobs`` has the files, which the directories share as hard links.
    ``done`` has a marker per complete submission.
    """

    def __init__(self, link: FarmLink, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.runs, self._blobs, self._done = folder / "runs", folder / "blobs", folder / "done"
        self._link, self._room = link, MirrorRoom(folder, most_bytes)
        link.runs = self.runs
        self._nothing: set[str] = set()  # keys of submissions without results, or that cannot be mirrored
        self._floor = 0  # newest submission deleted to free space
        for one in (self.runs, self._blobs, self._done):
            one.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread = threading.Thread(target=self._mirror_until_closed, name="hil-farm-mirror", daemon=True)

    def __enter__(self) -> FarmMirror:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The farm link is already closed, so the thread stops soon.
        self._thread.join(0.1)

    def _mirror_until_closed(self) -> None:
        seen, trouble = -1, ""
        while not self._link.over:
            seen = self._link.wait(seen)
            try:
                self.fetch_new()
                trouble = ""
            except FarmUnreachable:  # the link reports it
                continue
            except Exception as error:  # the next response may be valid
                if trouble != (trouble := _describe(error)):
                    _LOG.warning("farm results are not mirrored: %s", trouble)

    def fetch_new(self) -> None:
        """Fetch new results. Log and skip a submission that cannot be mirrored.

        Raises:
            FarmUnreachable: the farm is not connected.
            DiskFull: the disk has too little free space to fetch a submission.
        """
        rows: list[FarmJob] = self._link.ask("jobs", state=[state.value for state in ENDED], limit=_MOST_SUBMISSIONS)
        made = {row.submission for row in rows if row.kind in _MIRRORED_KINDS}
        for submission in sorted(made, reverse=True):
            if self._link.over:
                return
            name, key = str(submission), _make_key([row for row in rows if row.submission == submission])
            if submission <= self._floor or key in self._nothing or self._read_done_key(name) == key:
                continue
            self._room.check_disk()
            try:
                if (jobs := self._list_ended_jobs(submission)) is not None:
                    self._fetch_submission(name, key, jobs)
            except Exception as error:  # one bad submission must not stop the others
                self._delete_submission(name)
                if isinstance(error, FarmUnreachable):
                    raise
                self._delete_unshared()
                self._nothing.add(key)
                _LOG.warning("farm submission %s is not mirrored: %s", name, _describe(error))

    def _read_done_key(self, name: str) -> str:
        try:
            return read_text(self._done / name)
        except OSError:
            return ""

    def _list_ended_jobs(self, submission: int) -> list[FarmJob] | None:
        """Return a submission's jobs, or None if some are still active."""
        jobs: list[FarmJob] = self._link.ask("jobs", submission=submission, limit=100_000)
        return None if any(job.state not in ENDED for job in jobs) else jobs

    def _fetch_submission(self, name: str, key: str, jobs: Sequence[FarmJob]) -> None:
        # A recreated farm reuses names for different jobs.
        self._delete_submission(name)
        self._room.begin()
        if not self._room.is_half_free:
            self._delete_unshared()
        ended = [EndedJob.from_row(row) for row in self._request_results(name, jobs)]
        if not any(one.result.files for one in ended):
            self._nothing.add(key)
            return
        while not self._fetch_files(name, ended):
            if not self._evict_older(before=int(name)):
                self._floor = max(self._floor, int(name))
                return
        write_atomic(self._done / name, key)

    def _fetch_files(self, name: str, ended: Sequence[EndedJob]) -> bool:
        """Fetch job results. If there is not enough space, delete the results and return False.

        Raises:
            TooLarge: the submission exceeds the size limit.
            DiskFull: the disk has too little free space.
        """
        self._room.begin()
        farm: Any = _Contents(self._link, self._blobs, self._room)
        made = [one for one in ended if one.result.files]
        try:
            if made[0].spec.kind is Kind.SUITE:
                fetch_suite(farm, ended, self.runs / name)
            for one in made if made[0].spec.kind is not Kind.SUITE else ():
                fetch_run(farm, one, self.runs / name if len(ended) == 1 else self.runs / name / one.name)
            # Include directories and reports in the measurement.
            self._room.begin()
            self._room.take(0)
        except (NoRoom, TooLarge) as error:
            self._delete_submission(name)
            self._delete_unshared()
            if isinstance(error, TooLarge):
                raise
            return False
        return True

    def _request_results(self, name: str, jobs: Sequence[FarmJob]) -> list[JobResultRow]:
        try:
            found: list[JobResultRow] = self._link.ask("result", name=name, specs=True)
        except UsageError:  # the response exceeds the size limit
            return [row for job in jobs for row in self._link.ask("result", name=job.name, specs=True)]
        return found

    def _evict_older(self, before: int) -> bool:
        """Delete older submissions to free half the space. Return False if there were none."""
        older = sorted(number for number in self._list_submissions() if number < before)
        for number in older:
            self._floor = max(self._floor, number)
            self._delete_submission(str(number))
            self._delete_unshared()
            self._room.measure()
            if self._room.is_half_free:
                break
        return bool(older)

    def _list_submissions(self) -> list[int]:
        return [int(path.name) for path in self._done.iterdir() if path.name.isdecimal()]

    def _delete_submission(self, name: str) -> None:
        (self._done / name).unlink(missing_ok=True)
        shutil.rmtree(self.runs / name, ignore_errors=True)

    def _delete_unshared(self) -> None:
        """Delete blobs without hard links in ``runs``."""
        for path in self._blobs.iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_nlink == 1:
                    path.unlink()


def _make_key(jobs: Sequence[FarmJob]) -> str:
    """Return a key that distinguishes submissions with the same number from different farms."""
    return f"{jobs[-1].submission} {jobs[-1].queued_at}"


def _describe(error: Exception) -> str:
    """Return the type and the start of the message, in one line."""
    text = error.message if isinstance(error, HilError) else str(error)
    return f"{type(error).__name__}: {text[:200]!r}"


class _Contents:
    """Farm client that downloads only missing blobs. Also raises the errors of :class:`MirrorRoom`."""

    def __init__(self, link: FarmLink, folder: Path, room: MirrorRoom) -> None:
        self._link, self._folder, self._room = link, folder, room

    def download(self, digest: str, *places: Path) -> None:
        """Download a missing blob, then link the blob to all places."""
        kept = self._folder / check(digest).replace(":", "-")
        if not kept.exists():
            self._room.take_inode()
            self._link.download(digest, kept, self._room.take)
        for to in places:
            self._make_folder(to.parent)
            self._room.take_name()
            try:
                os.link(kept, to)
            except OSError:  # the file system does not support hard links
                self._room.take(count_bytes(kept.stat().st_size))
                copy_file(kept, to)

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for one in reversed(missing):
            self._room.take_inode()
            one.mkdir(exist_ok=True)
