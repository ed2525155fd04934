"""Upload a stored session to a `hil web` server. Only missing content is sent, and interrupted uploads resume."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hil.controller.records.commands.stored import PublishResult
from hil.controller.storage.session_folders import has_record
from hil.controller.web.publish.parcels import (
    DIGESTS,
    MAX_FILES,
    MAX_SESSION,
    PIECE,
    FileEntry,
    Parcel,
    check_size,
    name_trouble,
)
from hil.controller.web.publish.web_client import ServerResponse, WebClient
from hil.controller.web.readers import RECORDS
from hil.core.files import digest_file, open_file, resolve_within
from hil.errors import FarmUnreachable, UsageError

# Maximum responses without progress per file, and maximum bytes to send per byte in the file.
_MAX_STALLS = 5
_MAX_SENT = 2
_MAX_NAME = 2000
_TENSORS = (".npy", ".npz")


@dataclass(frozen=True)
class SessionFolder:
    """Session directory to upload."""

    parcel: Parcel
    files: Mapping[str, Path]  # digest -> a file with this content
    left_out: Sequence[str] = ()  # skipped files with reasons


def read_folder(folder: Path, name: str = "", *, tensors: bool = True) -> SessionFolder:
    """Read the files of a session directory and their digests. Hidden files are private.

    Args:
        name: name of the session on the server; "" uses the directory name.
        tensors: include tensors.

    Raises:
        UsageError: the directory is not a session, exceeds a limit, or a file is unreadable.
    """
    if not has_record(folder, RECORDS):
        raise UsageError(f"{folder} is not a stored session", hint=f"expected record files: {', '.join(RECORDS)}")
    entries: list[FileEntry] = []
    paths: dict[str, Path] = {}
    left_out, total = [], 0
    for path in _walk_files(folder):
        shown = path.relative_to(folder).as_posix()
        if not tensors and path.suffix in _TENSORS:
            continue
        if trouble := name_trouble(shown) or _skip_reason(folder, path):
            left_out.append(f"{shown}: {trouble}")
            continue
        try:
            size, digest = path.stat().st_size, digest_file(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
        entries.append(FileEntry(shown, digest, size))
        paths.setdefault(digest, path)
        total += size
        if len(entries) > MAX_FILES or total > MAX_SESSION:  # stop early; check_size() reports the error
            break
    parcel = Parcel(name or folder.resolve().name, entries)
    check_size(parcel)
    return SessionFolder(parcel, paths, left_out)


def _walk_files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        yield from (Path(place) / one for one in sorted(names) if not one.startswith("."))


def _skip_reason(folder: Path, path: Path) -> str:
    """Return the reason for skipping a file, or ""."""
    try:
        resolve_within(folder, path)
    except UsageError:
        return "link outside the directory"
    return "" if path.is_file() else "not a regular file"


class Publisher(WebClient):
    """Client that publishes sessions to a `hil web` server. A context manager."""

    def publish(
        self, folder: SessionFolder, told: Callable[[int, int], None] = lambda done, total: None
    ) -> PublishResult:
        """Upload missing content, then create the session on the server.

        Args:
            told: progress callback: number of bytes that the server has, and total number of bytes.

        Raises:
            UsageError: the server rejects the session, is not a `hil web` server, or a file changed during the upload.
            FarmUnreachable: the server does not respond or makes no progress.
        """
        sizes = {one.digest: one.size for one in folder.parcel.files}
        sent: dict[str, int] = {}
        for _ in range(2):  # the second pass uploads blobs that were damaged on the server
            lacking = self._request_missing(sizes)
            done = sum(size for digest, size in sizes.items() if digest not in lacking)
            for digest, have in lacking.items():
                for there in self._upload_file(digest, folder.files[digest], have, sizes[digest]):
                    told(done + there, sum(sizes.values()))
                done += sizes[digest]
                sent[digest] = sizes[digest]
            answer = self.ask("POST", "/publish/sessions", json.dumps(folder.parcel.to_json()).encode())
            if not (answer.status == 409 and "missing" in answer.document):
                break
        found = self.check(answer)
        return PublishResult(
            id=self._check_text(found, "id"),
            url=self.address + self._check_text(found, "url"),
            new=found.get("new") is True,
            files=len(folder.parcel.files),
            bytes=folder.parcel.size,
            sent_files=len(sent),
            sent_bytes=sum(sent.values()),
            left_out=list(folder.left_out),
        )

    def _check_text(self, document: Mapping[str, Any], name: str) -> str:
        """Return a validated text to show to the user: the session's id, or the path of its page."""
        found = document.get(name)
        if not (isinstance(found, str) and found.isprintable() and 0 < len(found) <= _MAX_NAME):
            raise self.make_malformed_error(f"the field {name} is {_format_value(found)}")
        if name == "url" and not found.startswith("/"):  # any other prefix could lead to another server
            raise self.make_malformed_error(f"the field url is {_format_value(found)}")
        return found

    def _request_missing(self, sizes: Mapping[str, int]) -> dict[str, int]:
        lacking: dict[str, int] = {}
        digests = iter(sizes.items())
        while part := dict(itertools.islice(digests, DIGESTS)):
            answer = self.ask("POST", "/publish/missing", json.dumps({"digests": part}).encode())
            found = self.check(answer).get("missing")
            if not isinstance(found, dict):
                raise self.make_malformed_error(f"the field missing is {_format_value(found)}")
            for digest, have in found.items():
                if digest not in part:
                    raise self.make_malformed_error("unrequested digest in the response")
                lacking[digest] = self._check_number(have, part[digest], "missing")
        return lacking

    def _check_number(self, value: Any, most: int, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.make_malformed_error(f"the field {name} is {_format_value(value)}")
        return value

    def _upload_file(self, digest: str, path: Path, have: int, size: int) -> Iterator[int]:
        """Upload a file from an offset. Yield the number of bytes that the server has."""
        furthest, stalls, sent = have, 0, 0
        try:
            with open_file(path) as file:
                while True:
                    file.seek(have)
                    data = file.read(min(PIECE, size - have))
                    if len(data) < min(PIECE, size - have):
                        raise UsageError(
                            f"{path} was truncated during the upload",
                            hint="wait until no program writes to the file, then publish again",
                        )
                    query = urlencode({"offset": have, "size": size})
                    answer = self.ask("PUT", f"/publish/blobs/{digest}?{query}", data)
                    sent += len(data)
                    expected, have = have + len(data), self._parse_have(answer, path, size)
                    if answer.status == 200:
                        if have not in (expected, size):  # another client may have uploaded the whole file
                            raise self.make_malformed_error(f"the field have is {have} instead of {expected}")
                        yield have
                        if have == size:
                            return
                    stalls += have <= furthest
                    furthest = max(furthest, have)
                    if stalls > _MAX_STALLS or sent + min(PIECE, size - have) > _MAX_SENT * size:
                        raise FarmUnreachable(
                            f"upload to {self.address} stalled at {have} of {size} bytes of {path}",
                            hint="a concurrent upload of the same file may be in progress: retry later",
                        )
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error

    def _parse_have(self, answer: ServerResponse, path: Path, size: int) -> int:
        """Return the number of bytes that the server has, from the response to an upload request."""
        hint = answer.document.get("hint")
        if answer.status == 409 and isinstance(hint, str) and hint.isascii() and hint.isdecimal() and len(hint) < 16:
            # An earlier response was lost, or another client uploads the same file.
            return self._check_number(int(hint), size, "hint")
        return self._check_number(self.check(answer, path).get("have"), size, "have")


def _format_value(value: Any) -> str:
    """Format a response value for a message.

    Lists and objects become the type name, because the values may be deeply nested.
    """
    return type(value).__name__ if isinstance(value, (dict, list)) else repr(value)[:100]
