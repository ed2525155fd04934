"""Fuzzer of what `hil publish` is answered."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest import mock

from fuzzing import mutate
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried
from hil.errors import FarmUnreachable, UsageError

# Between the answers that one connection after another has.
_CUT = b"\0cut\0"
_RECORD = b'{"schema": 1, "id": "one", "cases": []}'
_MAX_ASKED = 1000


class _Connection:
    """A socket whose other end has said everything already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def settimeout(self, seconds: float) -> None:
        """Nothing is waited for."""

    def send(self, data: bytes) -> int:
        """Take everything."""
        return len(data)

    def makefile(self, mode: str, buffering: int = 0) -> io.BytesIO:
        """Return what is left: each answer is read from a file of its own."""
        file = io.BytesIO(self._data)
        self._data = b""
        return file

    def close(self) -> None:
        """End it."""


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Attempt]:
    import tenacity

    from hil.controller.web.publish import web_client
    from hil.controller.web.publish.publisher import Publisher, read_folder

    run = folder / "one"
    run.mkdir()
    (run / "run.json").write_bytes(_RECORD)
    read = read_folder(run)
    asked, left = 0, list[bytes]()

    def connect(host: str, port: int, deadline: float) -> _Connection:
        nonlocal asked
        asked += 1
        if not left:
            raise ConnectionRefusedError("no more answers")
        return _Connection(left.pop(0))

    def attempt(data: bytes) -> Tried:
        nonlocal asked
        asked, left[:] = 0, data.split(_CUT)
        began = time.monotonic()
        try:
            with Publisher("http://localhost:1", "t") as server:
                found = server.publish(read)
        finally:
            if asked > _MAX_ASKED or time.monotonic() - began > 10:
                raise Broken(f"it connected {asked} times")
        shown = f"{found.id} {found.url}"
        if not shown.isprintable() or not found.url.startswith("http://localhost:1/"):
            raise Broken(f"it would show {shown!r}")
        return Tried(kinds=(f"published, {found.sent_files} sent",))

    with (
        mock.patch.object(web_client, "open_socket", connect),
        mock.patch.object(web_client, "_WAIT", tenacity.wait_none()),
    ):
        yield attempt


def _reply(document: object, status: str = "200 OK", head: str = "") -> bytes:
    body = json.dumps(document).encode()
    return f"HTTP/1.1 {status}\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _seeds() -> list[bytes]:
    from hil.core.digest import digest_of

    digest, size = digest_of(_RECORD), len(_RECORD)
    lacks, has = _reply({"missing": {digest: 0}}), _reply({"missing": {}})
    done = _reply({"id": "one", "new": True, "url": "/session?id=one"})
    conflict = _reply({"error": "offset mismatch: the server has 5 bytes", "hint": "5"}, "409 Conflict")
    gone = _reply({"error": "1 is missing", "hint": "", "missing": {digest: 0}}, "409 Conflict")
    body = json.dumps({"missing": {}}).encode()
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(body), body)
    return [
        _CUT.join(answers)
        for answers in (
            (has, done),
            (lacks, _reply({"have": size}), done),
            (lacks, conflict, _reply({"have": size}), done),
            (lacks, conflict, _reply({"have": size}), gone, has, done),
            (chunked, done),
            (b"HTTP/1.1 100 Continue\r\n\r\n" + has, done),
            (_reply({"error": "no", "hint": "yes"}, "401 Unauthorized", "Connection: close\r\n"),),
            (_reply({}, "302 Found", "Location: http://192.0.2.1/\r\n"),),
            (b"SSH-2.0-OpenSSH_9.2\r\n",),
        )
    ]


def _mutated(data: bytes, rng: Random) -> bytes:
    """Change the bytes of an answer, or a value of its JSON, whose length is then right."""
    answers = data.split(_CUT)
    at = rng.randrange(len(answers))
    kind = rng.random()
    if kind < 0.15:
        answers.insert(at, rng.choice(answers))
    elif kind < 0.6:
        head, _, body = answers[at].partition(b"\r\n\r\n")
        body = mutate.json_bytes(body, rng)
        status = head.split(b"\r\n")[0]
        answers[at] = b"%s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
    else:
        answers[at] = mutate.havoc(answers[at], rng)
    return _CUT.join(answers[:50])


FUZZER = Fuzzer(
    "publishing",
    "what `hil publish` is answered",
    _opened,
    _seeds,
    _mutated,
    (UsageError, FarmUnreachable),
    limit_s=30.0,
)
