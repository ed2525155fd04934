"""`hil publish` against `hil web`: complete, interrupted, resumed and rejected uploads."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from support.commands import Ended
from support.waiting import allowed_s, eventually
from support.web import serving, write_record, write_run, write_suite

from hil.controller.web.pages import publish
from hil.controller.web.publish import publisher, web_client
from hil.core.digest import digest_of
from hil.errors import FarmUnreachable, UsageError

TOKEN = "the token"
Hil = Callable[..., Ended]


def stored(root: Path) -> Path:
    """A matrix of two runs that share one tensor."""
    matrix = root / "hil-runs" / "20260101-000000-both-aaaa"
    write_record(matrix / "matrix.json", {"schema": 1, "title": "both boards", "targets": []})
    for name, data in (("a", b"same" * 1000), ("b", b"same" * 1000), ("c", b"other")):
        folder = write_run(matrix, name, [{"name": f"model {name}"}])
        (folder / "x.npy").write_bytes(data)
        (folder / ".begun").write_text("the user's own")
    return matrix


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_publish_uploads_matrix_with_runs(hil: Hil, tmp_path: Path) -> None:
    matrix = stored(tmp_path)
    (tmp_path / "there").mkdir()
    with serving(tmp_path / "there", token=TOKEN) as address:
        first = hil("publish", "2026", "--to", f"{address}/?token={TOKEN}", "--json")
        assert first.code == 0, first.err
        there = tmp_path / "there" / "published" / matrix.name
        assert contents(there) == {name: data for name, data in contents(matrix).items() if not name.endswith(".begun")}
        told = first.document
        # Two of the seven files have the same content.
        assert (told["new"], told["files"], told["sent_files"], told["url"].startswith(address)) == (True, 7, 6, True)
        assert told["bytes"] - told["sent_bytes"] == 4000
        again = hil("publish", matrix, "--to", address, "--token", TOKEN, "--json").document
        assert (again["new"], again["sent_files"], again["url"]) == (False, 0, told["url"])
        other = hil("publish", "latest", "--to", address, "--token", TOKEN, "--as", "other", "--no-tensors", "--json")
        assert (other.document["sent_files"], other.document["files"]) == (0, 4)
        write_run(matrix, "a", [{"name": "another"}])
        refused = hil("publish", matrix, "--to", address, "--token", TOKEN)
        assert refused.code == 2 and "a different session" in refused.err and "--as" in refused.err


def test_publish_skips_external_links_and_pipes(hil: Hil, tmp_path: Path) -> None:
    folder = write_suite(tmp_path, "suite", [{"id": "case"}])
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "own.txt").symlink_to(folder / "suite.json")
    os.mkfifo(folder / "pipe")
    (folder / "a\nb").write_text("x")
    (tmp_path / "there").mkdir()
    with serving(tmp_path / "there", token=TOKEN) as address:
        done = hil("publish", folder, "--to", address, "--token", TOKEN)
    assert done.code == 0 and "secret" not in done.out
    for text in ("link.txt: link outside the directory", "pipe: not a regular file", "b: unprintable character"):
        assert text in done.err
    there = tmp_path / "there" / "published" / "suite"
    assert sorted(contents(there)) == ["own.txt", "results.jsonl", "suite.json"]
    assert (there / "own.txt").read_bytes() == (folder / "suite.json").read_bytes()


@contextmanager
def cutting(address: str, after: int) -> Iterator[str]:
    """Return the address of a proxy that cuts the connection once, after `after` bytes."""
    host, port = address.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    left = [after]

    def pump(source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counts and left:
                    left[0] -= len(data)
                    if left[0] < 0:
                        left.clear()
                        break
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection((host, int(port)))
            opened.extend((near, far))
            for pair in ((near, far, True), (far, near, False)):
                threads.append(threading.Thread(target=pump, args=pair))
                threads[-1].start()

    opened, threads = [listener], [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for one in opened:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for one in opened:
            one.close()


def test_publish_resumes_after_cut_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "PIECE", 100_000)
    folder = write_run(tmp_path, "one", [{"name": "model"}])
    (folder / "large.npy").write_bytes(os.urandom(1_000_000))
    (tmp_path / "there").mkdir()
    there = serving(tmp_path / "there", token=TOKEN)
    with there as address, cutting(address, 450_000) as way, publisher.Publisher(way, TOKEN) as server:
        found = server.publish(publisher.read_folder(folder))
    assert found.new and contents(tmp_path / "there" / "published" / "one") == contents(folder)


def test_publish_resumes_after_interrupt(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = write_run(tmp_path, "one", [{"name": "model"}])
    (folder / "large.npy").write_bytes(os.urandom(48 << 20))
    (tmp_path / "there").mkdir()
    partial = tmp_path / "there" / "published" / ".hil-web" / "partial"
    with serving(tmp_path / "there", token=TOKEN) as address:
        command = [sys.executable, "-m", "hil.controller.cli.main", "publish", str(folder), "--to", address, "--json"]
        settings = {**environment, "HIL_WEB_TOKEN": TOKEN}
        process = subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        eventually(
            lambda: partial.is_dir() and any(path.stat().st_size > 0 for path in partial.iterdir()), process=process
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        if process.returncode != 0:  # otherwise the upload finished before the interrupt
            assert process.returncode == 130 and "Traceback" not in err, err
            assert not (tmp_path / "there" / "published" / "one").exists()
            done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            out = done.stdout
        assert json.loads(out)["new"] is True
    assert contents(tmp_path / "there" / "published" / "one") == contents(folder)


def send_slow_body(address: str) -> socket.socket:
    """Send the first byte of an upload of 100 bytes. Return the connection."""
    host, port = address.removeprefix("http://").split(":")
    head = f"PUT /publish/blobs/{digest_of(b'x')}?offset=0&size=100 HTTP/1.1\r\nHost: {host}\r\n"
    peer = socket.create_connection((host, int(port)), timeout=60)
    peer.sendall(f"{head}Authorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\nx".encode())
    return peer


def test_slow_uploads_do_not_block_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: four slow uploads took all places, and other uploads timed out."""
    monkeypatch.setattr(web_client, "_TRIES", 1)
    monkeypatch.setattr(web_client, "_ANSWER_S", allowed_s(5.0))
    monkeypatch.setattr(publish, "_DELAY_S", 600.0)
    folder = write_run(tmp_path, "one", [{"name": "model"}])
    (tmp_path / "there").mkdir()
    with serving(tmp_path / "there", token=TOKEN) as address, ExitStack() as peers:
        for _ in range(4):
            peers.enter_context(send_slow_body(address))
        time.sleep(0.5)  # the server reads the requests
        with publisher.Publisher(address, TOKEN) as server:
            assert server.publish(publisher.read_folder(folder)).new


def test_slow_upload_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_DELAY_S", 0.3)
    with serving(tmp_path, token=TOKEN) as address, send_slow_body(address) as peer:
        assert peer.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_publish_reports_file_changed_during_upload(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "one")
    read = publisher.read_folder(folder)
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.upper())
    (tmp_path / "there").mkdir()
    with serving(tmp_path / "there", token=TOKEN) as address, publisher.Publisher(address, TOKEN) as server:
        with pytest.raises(UsageError, match="digest mismatch"):
            server.publish(read)
        (folder / "run.json").write_text(text[:-5])
        with pytest.raises(UsageError, match="truncated"):
            server.publish(read)
    assert not (tmp_path / "there" / "published" / "one").exists()


def test_publish_reports_unreachable_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_client, "_TRIES", 2)
    folder = publisher.read_folder(write_run(tmp_path, "one"))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # no process listens on this port
        with pytest.raises(FarmUnreachable, match="is not responding"):
            publisher.Publisher(f"http://127.0.0.1:{bound.getsockname()[1]}", TOKEN).publish(folder)


def test_publish_rejects_response_of_unknown_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = publisher.read_folder(write_run(tmp_path, "one"))
    answer = web_client.ServerResponse(200, {"error": "<!doctype html>"})
    monkeypatch.setattr(publisher.Publisher, "_ask_once", lambda *_: answer)
    with pytest.raises(UsageError, match="unexpected response from"):
        publisher.Publisher("http://localhost:1", TOKEN).publish(folder)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--to", "http://localhost:1"), "token required to publish"),
        (("--to", "http://localhost:1", "--token", " "), "token required to publish"),
        (("--to", "http://192.0.2.1:1", "--token", "x"), "unencrypted"),
        (("--to", "ftp://x", "--token", "x"), "invalid URL"),
        (("--to", "http://[", "--token", "x"), "invalid URL"),
        (("--to", "http://localhost:99999999", "--token", "x"), "invalid URL"),
        (("--to", "http://localhost:1", "--token", "a\nb"), "printable"),
    ],
)
def test_publish_rejects_invalid_arguments(hil: Hil, tmp_path: Path, args: tuple[str, ...], text: str) -> None:
    folder = write_run(tmp_path, "one")
    done = hil("publish", folder, *args)
    assert done.code == 2 and text in done.err


def test_publish_rejects_wrong_token_and_missing_directory(hil: Hil, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "one")
    with serving(tmp_path, token=TOKEN) as address:
        done = hil("publish", folder, "--to", address, "--token", "other")
    assert done.code == 2 and "token" in done.err
    assert hil("publish", tmp_path / "nothing", "--to", "http://localhost:1", "--token", "x").code == 2
