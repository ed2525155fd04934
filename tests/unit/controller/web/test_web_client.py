"""Test `hil publish` with hostile servers: it always ends with an error that suggests a fix."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import tenacity
from click.testing import CliRunner
from support.web import write_run

from hil.controller.cli.stored.publish import publish
from hil.controller.web.publish import web_client
from hil.controller.web.publish.publisher import Publisher, SessionFolder, read_folder
from hil.errors import EXIT_BOARD, EXIT_USAGE, FarmUnreachable, HilError, UsageError

LIMIT_S = 0.5
Talk = Callable[[socket.socket], None]


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CONNECT_S", "_SEND_S", "_ANSWER_S"):
        monkeypatch.setattr(web_client, name, LIMIT_S)
    monkeypatch.setattr(web_client, "_WAIT", tenacity.wait_none())


@pytest.fixture
def folder(tmp_path: Path) -> SessionFolder:
    return read_folder(write_run(tmp_path, "one", [{"name": "model"}]))


@contextmanager
def hostile(talk: Talk) -> Iterator[str]:
    """Run a server that handles each connection with ``talk``. Yield its address."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            talk(connection)

    def accept() -> None:
        while not over.is_set():
            with suppress(OSError):
                threads.append(threading.Thread(target=serve, args=[listener.accept()[0]], daemon=True))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        thread = threading.Thread(target=accept)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        thread.join()
    for one in threads:
        one.join(60)


def request(connection: socket.socket) -> str:
    """Read a whole request and return its path."""
    with connection.makefile("rb") as file:
        line, length = file.readline().decode(), 0
        while (header := file.readline().strip()) and header:
            if header.lower().startswith(b"content-length:"):
                length = int(header.partition(b":")[2])
        file.read(length)
    return line.split(" ")[1] if line else ""


def reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(head).encode() + body


def answers(data: bytes) -> Talk:
    """Return the same response to every request."""

    def talk(connection: socket.socket) -> None:
        while request(connection):
            connection.sendall(data)

    return talk


def drips(start: bytes, piece: bytes) -> Talk:
    """Send a beginning, then small pieces without end."""

    def talk(connection: socket.socket) -> None:
        request(connection)
        connection.sendall(start)
        while True:
            connection.sendall(piece)
            time.sleep(0.02)

    return talk


def floods(start: bytes, piece: bytes) -> Talk:
    """Send as much as possible."""

    def talk(connection: socket.socket) -> None:
        request(connection)
        connection.sendall(start)
        while True:
            connection.sendall(piece * 1000)

    return talk


def silent(connection: socket.socket) -> None:
    connection.recv(1)
    time.sleep(10 * LIMIT_S)


def hangs_up(connection: socket.socket) -> None:
    request(connection)


def malformed(address: str, folder: SessionFolder) -> UsageError:
    """Publish to a server with malformed responses and return the error."""
    with (
        pytest.raises(UsageError, match="unexpected response from") as error,
        Publisher(address, "t") as server,
    ):
        server.publish(folder)
    return error.value


OK = b"HTTP/1.1 200 OK\r\n"
ENDLESS = {
    "silence": silent,
    "the head comes byte by byte": drips(b"", b"H"),
    "headers come byte by byte": drips(OK, b"X: y\r\n"),
    "the body comes byte by byte": drips(OK + b"Content-Length: 1000000\r\n\r\n", b" "),
    "chunks come byte by byte": drips(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "a body without length comes byte by byte": drips(OK + b"\r\n", b" "),
    "interim answers without end": floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "interim answers now and then": drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a header without end": floods(OK + b"X: ", b"y"),
    "headers without end": floods(OK, b"X: y\r\n"),
    "trailers without end": floods(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
    "a chunk's size without end": floods(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
    "hanging up": hangs_up,
}


@pytest.mark.ci
@pytest.mark.parametrize("what", ENDLESS)
def test_publish_ends_without_progress(folder: SessionFolder, what: str) -> None:
    with hostile(ENDLESS[what]) as address, Publisher(address, "t") as server:
        begun = time.monotonic()
        with pytest.raises(FarmUnreachable, match=r"is not responding: .+") as error:
            server.publish(folder)
        # At most five attempts, and none after the time of one.
        assert time.monotonic() - begun < 20 * LIMIT_S
    assert error.value.exit_code == EXIT_BOARD and error.value.hint


BODIES = {
    "no JSON": b"<!doctype html>",
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "nested": b"[" * 100_000,
    "nested objects": b'{"missing":' * 100_000,
    "a number of 5,000 digits": b'{"missing": ' + b"9" * 5000 + b"}",
    "no object in it": b'{"missing": []}',
    "no number": b'{"missing": {"%s": "x"}}',
    "a bool": b'{"missing": {"%s": true}}',
    "a negative number": b'{"missing": {"%s": -1}}',
    "more than there is": b'{"missing": {"%s": 1000000}}',
    "infinity": b'{"missing": {"%s": 1e999}}',
    "NaN": b'{"missing": {"%s": NaN}}',
    "another digest": b'{"missing": {"blake3:00": 0}}',
    "compressed": gzip.compress(b'{"missing": {}}'),
    "a compressed bomb": gzip.compress(bytes(100 << 20)),
    "no text": b"\xff\xfe\x00",
    "more than 4 MiB": b" " * (5 << 20),
}


@pytest.mark.ci
@pytest.mark.parametrize("what", BODIES)
def test_publish_reports_malformed_response_as_usage_error(folder: SessionFolder, what: str) -> None:
    body = BODIES[what].replace(b"%s", folder.parcel.files[0].digest.encode())
    for headers in ((), ("Content-Encoding: gzip",), ("Content-Type: text/html", "Connection: close")):
        with hostile(answers(reply(body, "200 OK", *headers))) as address:
            error = malformed(address, folder)
        assert error.hint == web_client.OTHER_SERVER


def conversation(put: bytes, sessions: bytes) -> Talk:
    """Serve a server that lacks all content, with fixed responses to pieces and sessions."""

    def talk(connection: socket.socket) -> None:
        while path := request(connection):
            if path == "/publish/missing":
                lacking = json.dumps({"missing": {talk.digest: 0}}).encode()  # type: ignore[attr-defined]
                connection.sendall(reply(lacking))
            else:
                connection.sendall(put if path.startswith("/publish/blobs/") else sessions)

    return talk


DONE = reply(b'{"id": "one", "new": true, "url": "/session?id=one"}')
PUTS = {
    "nothing": (reply(b"{}"), UsageError),
    "a text": (reply(b'{"have": "x"}'), UsageError),
    "a list": (reply(b'{"have": [1]}'), UsageError),
    "null": (reply(b'{"have": null}'), UsageError),
    "infinity": (reply(b'{"have": 1e999}'), UsageError),
    "too much": (reply(b'{"have": 123456789}'), UsageError),
    "negative": (reply(b'{"have": -5}'), UsageError),
    "never more": (reply(b'{"have": 0}'), UsageError),
    "one byte": (reply(b'{"have": 1}'), UsageError),
    "too slow": (reply(b'{"error": "slow upload", "hint": "retry"}', "408 Request Timeout"), FarmUnreachable),
    "never more, as a conflict": (reply(b'{"error": "x", "hint": "0"}', "409 Conflict"), FarmUnreachable),
    "a conflict beyond the end": (reply(b'{"error": "x", "hint": "999999999"}', "409 Conflict"), UsageError),
    "a conflict of words": (reply(b'{"error": "x", "hint": ["0"]}', "409 Conflict"), UsageError),
    "a redirect": (reply(b"", "302 Found", "Location: http://192.0.2.1/"), UsageError),
    "a full disk": (reply(b'{"error": "the disk is full", "hint": "make room"}', "507 Full"), UsageError),
    "a busy proxy": (reply(b"<html>busy", "503 Busy"), FarmUnreachable),
    "an error of no text": (reply(b'{"error": {"a": [1]}, "hint": 5}', "400 Bad"), UsageError),
    "control characters": (reply(b'{"error": "\\u001b[2J\\u202e"}', "400 Bad"), UsageError),
}


@pytest.mark.parametrize("what", PUTS)
def test_publish_reports_malformed_response_to_piece(folder: SessionFolder, what: str) -> None:
    put, kind = PUTS[what]
    talk = conversation(put, DONE)
    talk.digest = folder.parcel.files[0].digest  # type: ignore[attr-defined]
    with hostile(talk) as address, Publisher(address, "t") as server, pytest.raises(kind) as error:
        server.publish(folder)
    assert type(error.value) is kind and "\x1b" not in str(error.value) and "\u202e" not in str(error.value)
    assert error.value.hint or what in ("an error of no text", "control characters", "a conflict of words")


@pytest.mark.parametrize("is_conflict", [False, True])
def test_publish_limits_sent_bytes(folder: SessionFolder, monkeypatch: pytest.MonkeyPatch, is_conflict: bool) -> None:
    """Regression: with one byte of progress in each response, hil sent 1.3 GB for a session of 6 MB."""
    size = folder.parcel.files[0].size
    monkeypatch.setattr("hil.controller.web.publish.publisher.PIECE", size // 4)
    sent: list[int] = []

    def respond(server: Publisher, method: str, path: str, body: bytes) -> web_client.ServerResponse:
        if method != "PUT":
            return web_client.ServerResponse(200, {"missing": {folder.parcel.files[0].digest: 0}})
        sent.append(len(body))
        document = {"error": "x", "hint": str(len(sent))} if is_conflict else {"have": len(sent)}
        return web_client.ServerResponse(409 if is_conflict else 200, document)

    monkeypatch.setattr(Publisher, "ask", respond)
    with pytest.raises(FarmUnreachable if is_conflict else UsageError):
        Publisher("http://localhost:1", "t").publish(folder)
    assert sum(sent) <= 2 * size


SESSIONS = [b"{}", b'{"id": 1, "url": "/x"}', b'{"id": "one", "url": "@evil.example/"}', b'{"id": "one", "url": ["/"]}']
SESSIONS += [b'{"id": "one", "url": "/\\u001b[2J"}', b'{"id": "one", "url": "/%s"}' % (b"x" * 5000)]


@pytest.mark.parametrize("body", SESSIONS)
def test_publish_reports_malformed_session_response(folder: SessionFolder, body: bytes) -> None:
    size = folder.parcel.files[0].size
    talk = conversation(reply(b'{"have": %d}' % size), reply(body))
    talk.digest = folder.parcel.files[0].digest  # type: ignore[attr-defined]
    with hostile(talk) as address:
        malformed(address, folder)


def test_publish_stops_when_content_stays_missing(folder: SessionFolder) -> None:
    size = folder.parcel.files[0].size
    talk = conversation(reply(b'{"have": %d}' % size), reply(b'{"error": "gone", "missing": {}}', "409 Conflict"))
    talk.digest = folder.parcel.files[0].digest  # type: ignore[attr-defined]
    with hostile(talk) as address, Publisher(address, "t") as server, pytest.raises(UsageError, match="gone"):
        server.publish(folder)


def test_publish_reads_response_before_end_of_request(tmp_path: Path) -> None:
    root = write_run(tmp_path, "one")
    (root / "large.npy").write_bytes(bytes(30 << 20))
    large = read_folder(root)

    def talk(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(reply(b'{"error": "no more of that"}', "413 Too large", "Connection: close"))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass

    with hostile(talk) as address, Publisher(address, "t") as server, pytest.raises(UsageError, match="no more of"):
        server.publish(large)


def test_publish_command_exits_with_code(tmp_path: Path) -> None:
    run = str(write_run(tmp_path, "one", [{"name": "model"}]))
    for talk, code in ((hangs_up, EXIT_BOARD), (answers(reply(b"[]")), EXIT_USAGE)):
        with hostile(talk) as address:
            done = CliRunner().invoke(publish, [run, "--to", address, "--token", "t"])
        assert isinstance(done.exception, HilError) and done.exception.exit_code == code


@pytest.mark.parametrize(
    "address",
    [
        *("http://..", "http://" + "a" * 70, "http://a b", "http://a\x1bb", "http://a\0b", "http://[::1", "http://x:y"),
        *("http://\u202e", "http:///", "http://:80", "x", "", "http://%zz%", "http://a:99999"),
    ],
)
def test_publish_rejects_invalid_address(folder: SessionFolder, address: str) -> None:
    with pytest.raises((UsageError, FarmUnreachable)):
        Publisher(address, "t", plain_http=True).publish(folder)


@pytest.mark.parametrize(
    ("path", "encoded"), [("/a b", "/a%20b"), ("/\u00e9", "/%C3%A9"), ("/a\x00b", "/a%00b"), ("/%2e%2e", "/%2e%2e")]
)
def test_publish_encodes_path_of_address(folder: SessionFolder, path: str, encoded: str) -> None:
    paths: list[str] = []

    def talk(connection: socket.socket) -> None:
        while found := request(connection):
            paths.append(found)
            connection.sendall(reply(b"[]"))

    with hostile(talk) as address:
        malformed(address + path, folder)
    assert paths and all(found.startswith(f"{encoded}/") for found in paths), paths


def test_read_folder_stops_at_file_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, "one")
    for number in range(20):
        (folder / f"{number}.log").write_text(str(number))
    monkeypatch.setattr("hil.controller.web.publish.publisher.MAX_FILES", 5)
    monkeypatch.setattr("hil.controller.web.publish.parcels.MAX_FILES", 5)
    with pytest.raises(UsageError, match="6 files, at most 5 are allowed"):
        read_folder(folder)
