"""Send a stored session to a `hil web`: by content, only what it lacks, and from where it was cut off."""

from __future__ import annotations

import http.client
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import tenacity

from hil.controller.storage.runs import DEFAULT_ROOT
from hil.controller.web.parcels import DIGESTS, PIECE, FileEntry, Parcel, check_size, name_trouble
from hil.controller.web.readers import RECORDS
from hil.core.digest import digest_file
from hil.core.files import open_file, within
from hil.errors import FarmUnreachable, UsageError

# How long an answer may take: the server hashes what it was sent.
_ANSWER_S = 120.0
_CONNECT_S = 10.0
_TRIES = 5
_MOST_ANSWER = 4 << 20
# Where sessions are looked for by name.
FOLDERS = (DEFAULT_ROOT, Path("hil-suites"))
_TENSORS = (".npy", ".npz")
_OF_THIS_RELEASE = "is that a hil web, and of this release?"


@dataclass(frozen=True)
class Folder:
    """A session's folder, as it is to be sent."""

    parcel: Parcel
    files: Mapping[str, Path]  # digest -> a file with that content
    left_out: Sequence[str] = ()  # files that are not sent, each with why


@dataclass(frozen=True)
class Published:
    """What became of it."""

    id: str
    url: str  # of its page
    new: bool  # False: the server had it already
    files: int
    bytes: int
    sent_files: int  # those whose content the server lacked
    sent_bytes: int
    left_out: Sequence[str] = field(default_factory=tuple)


def session_folder(name: str) -> Path:
    """A stored session's folder, by its path, its name, an unambiguous beginning of it, or ``latest``.

    Raises:
        UsageError: there is none, or several.
    """
    if has_record(Path(name)):
        return Path(name)
    stored = [path for base in FOLDERS if base.is_dir() for path in base.iterdir() if has_record(path)]
    stored.sort(key=lambda path: path.name)  # a name begins with its time
    found = stored[-1:] if name == "latest" else [path for path in stored if name and path.name.startswith(name)]
    exact = [path for path in found if path.name == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    what = (
        f"several sessions begin with {name!r}: {', '.join(map(str, found[:5]))}" if found else f"no session {name!r}"
    )
    raise UsageError(what, hint="name its folder, which holds its record, such as run.json or suite.json")


def has_record(folder: Path) -> bool:
    """Whether a folder holds a session."""
    return any((folder / name).is_file() for name in RECORDS)


def read_folder(folder: Path, name: str = "", *, tensors: bool = True) -> Folder:
    """The files of a session's folder by content; hidden ones are nobody else's.

    Args:
        name: what the session is called there; "" is the folder's own name.
        tensors: send tensors too.

    Raises:
        UsageError: it holds no session, has too much, or a file cannot be read.
    """
    if not has_record(folder):
        raise UsageError(f"{folder} holds no stored session", hint=f"one of {', '.join(RECORDS)} would be in it")
    entries: list[FileEntry] = []
    paths: dict[str, Path] = {}
    left_out = []
    for path in _files(folder):
        shown = path.relative_to(folder).as_posix()
        if not tensors and path.suffix in _TENSORS:
            continue
        if trouble := name_trouble(shown) or _trouble(folder, path):
            left_out.append(f"{shown}: {trouble}")
            continue
        try:
            size, digest = path.stat().st_size, digest_file(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
        entries.append(FileEntry(shown, digest, size))
        paths.setdefault(digest, path)
    parcel = Parcel(name or folder.resolve().name, entries)
    check_size(parcel)
    return Folder(parcel, paths, left_out)


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        yield from (Path(place) / one for one in sorted(names) if not one.startswith("."))


def _trouble(folder: Path, path: Path) -> str:
    """Why a file is not sent; "" where it is."""
    try:
        within(folder, path)
    except UsageError:
        return "it is a link that leads elsewhere"
    return "" if path.is_file() else "it is no plain file"


class Server:
    """A `hil web` that takes sessions. A context manager.

    Args:
        address: its address, as `hil web` prints it; a ``?token=`` in it counts.
        plain_http: send the token unencrypted to another machine.

    Raises:
        UsageError: the address is none, or the token would go in the clear.
    """

    def __init__(self, address: str, token: str = "", *, plain_http: bool = False) -> None:
        try:
            parts = urlsplit(address)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise UsageError(f"{address!r} is no address: {error}") from error
        if parts.scheme not in ("http", "https") or not self._host:
            raise UsageError(f"{address!r} is no address", hint="as hil web prints it: http://HOST:PORT/")
        self._secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        self.address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self._token = (token or parse_qs(parts.query).get("token", [""])[-1]).strip()
        if not self._token:
            raise UsageError(f"publishing to {self.address} needs its token", hint="--token, or HIL_WEB_TOKEN")
        if not (self._token.isascii() and self._token.isprintable()):
            raise UsageError("a token that a program sends has printable ASCII characters only")
        if not (self._secure or plain_http or _is_loopback(self._host)):
            raise UsageError(
                f"the token would go to {self._host} unencrypted",
                hint="https://..., or ssh -L 8790:localhost:8790 and http://localhost:8790; --plain-http sends it",
            )
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def publish(self, folder: Folder, told: Callable[[int, int], None] = lambda done, total: None) -> Published:
        """Send what the server lacks, then have it put the session together.

        Args:
            told: called with how many bytes are there, and how many there will be.

        Raises:
            UsageError: the server refuses it, or a file was written meanwhile.
            FarmUnreachable: the server does not answer.
        """
        sizes = {one.digest: one.size for one in folder.parcel.files}
        sent: dict[str, int] = {}
        for _ in range(2):  # what the server finds damaged when it looks closely is sent once more
            lacking = self._lacking(sizes)
            done = sum(size for digest, size in sizes.items() if digest not in lacking)
            for digest, have in lacking.items():
                for there in self._send(digest, folder.files[digest], have, sizes[digest]):
                    told(done + there, sum(sizes.values()))
                done += sizes[digest]
                sent[digest] = sizes[digest]
            status, answer = self._ask("POST", "/publish/sessions", json.dumps(folder.parcel.to_json()).encode())
            if not (status == 409 and "missing" in answer):
                break
        _check(status, answer)
        return Published(
            id=str(answer.get("id")),
            url=self.address + str(answer.get("url")),
            new=answer.get("new") is True,
            files=len(folder.parcel.files),
            bytes=folder.parcel.size,
            sent_files=len(sent),
            sent_bytes=sum(sent.values()),
            left_out=folder.left_out,
        )

    def _lacking(self, sizes: Mapping[str, int]) -> dict[str, int]:
        lacking: dict[str, int] = {}
        digests = iter(sizes.items())
        while part := dict(itertools.islice(digests, DIGESTS)):
            found = _check(*self._ask("POST", "/publish/missing", json.dumps({"digests": part}).encode())).get(
                "missing"
            )
            if not isinstance(found, dict):
                raise UsageError(f"{self.address} does not answer as a hil web does", hint=_OF_THIS_RELEASE)
            for digest, have in found.items():
                if digest in part and isinstance(have, int) and 0 <= have <= part[digest]:
                    lacking[digest] = have
        return lacking

    def _send(self, digest: str, path: Path, have: int, size: int) -> Iterator[int]:
        """Send a file from a byte on; yields how many bytes of it are there."""
        try:
            with open_file(path) as file:
                while True:
                    file.seek(have)
                    data = file.read(min(PIECE, size - have))
                    if len(data) < min(PIECE, size - have):
                        raise UsageError(f"{path} became shorter while it was sent", hint="publish it once it is whole")
                    query = urlencode({"offset": have, "size": size})
                    status, answer = self._ask("PUT", f"/publish/blobs/{digest}?{query}", data)
                    if status == 409 and str(answer.get("hint", "")).isdecimal():
                        # A piece arrived whose answer did not, or somebody else sends the same.
                        before, have = have, min(int(answer["hint"]), size)
                        if have == before:
                            _check(status, answer)
                        continue
                    have = int(_check(status, answer, path)["have"])
                    yield have
                    if have >= size:
                        return
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error

    def _ask(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Ask, again on another connection where this one is cut. Raises FarmUnreachable: nobody answers."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((OSError, http.client.HTTPException)),
            stop=tenacity.stop_after_attempt(_TRIES),
            wait=tenacity.wait_exponential(0.2, max=5),
            reraise=True,
        )
        try:
            return retrying(self._ask_once, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise FarmUnreachable(
                f"{self.address} does not answer: {error or type(error).__name__}",
                hint="is hil web running there? What arrived is kept: publish again and it goes on from there",
            ) from error

    def _ask_once(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        connection = self._connection or self._connect()
        self._connection = None  # whatever cuts us short, the next request begins on another one
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/octet-stream"}
        try:
            connection.request(method, self._path + path, body, headers)
            answer = connection.getresponse()
            data = answer.read(_MOST_ANSWER)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        try:
            found = json.loads(data)
        except ValueError:
            found = {"error": data[:300].decode(errors="replace").strip()}
        return answer.status, found if isinstance(found, dict) else {}

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_CONNECT_S)
        connection.connect()
        connection.sock.settimeout(_ANSWER_S)
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _check(status: int, answer: Mapping[str, Any], path: Path | None = None) -> Mapping[str, Any]:
    """The answer. Raises UsageError: the server refuses."""
    if status == 200:
        return answer
    text, hint = (str(answer.get(name) or "") for name in ("error", "hint"))
    hints = {
        401: "--token, or HIL_WEB_TOKEN, is what that hil web was started with",
        404: _OF_THIS_RELEASE,
    }
    of = f" {path}" if path else ""
    raise UsageError(f"the server refuses{of}: {text or f'status {status}'}", hint=hint or hints.get(status, ""))


def _is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
