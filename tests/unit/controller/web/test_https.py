"""`hil web` serves HTTPS, and uses a renewed certificate without a restart."""

from __future__ import annotations

import http.client
import ssl
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.certificates import write_certificate
from support.waiting import eventually

pytest.importorskip("uvicorn", reason="needs the extra `web`")

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from hil.controller.cli.stored.web import web
from hil.controller.web.server.server import make_server, open_listener
from hil.protocol.certificates import make_reloading_context


def read_scheme(port: int, ca: Path) -> tuple[str, bytes]:
    """Return the scheme that the server reports, and the server's certificate."""
    connection = http.client.HTTPSConnection("localhost", port, context=ssl.create_default_context(cafile=ca))
    connection.request("GET", "/")
    served = connection.sock.getpeercert(binary_form=True)
    text = connection.getresponse().read().decode()
    connection.close()
    return text, served


def test_web_server_uses_renewed_certificate(tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    app = FastAPI()

    @app.get("/")
    def show_scheme(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.url.scheme)

    server = make_server(app, tls=make_reloading_context(files))
    with open_listener("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            eventually(lambda: server.started)
            scheme, before = read_scheme(port, files.cert)
            assert scheme == "https"
            write_certificate(tmp_path)
            _, after = read_scheme(port, files.cert)
            assert after == ssl.PEM_cert_to_DER_cert(files.cert.read_text()) != before
        finally:
            server.should_exit = True
            thread.join()


def test_web_rejects_incomplete_or_invalid_tls(tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    alone = CliRunner().invoke(web, ["--runs", str(tmp_path), "--tls-cert", str(files.cert)])
    assert alone.exit_code != 0 and "without a key" in str(alone.exception)
    files.key.write_text("broken")
    tls = ["--tls-cert", str(files.cert), "--tls-key", str(files.key)]
    broken = CliRunner().invoke(web, ["--runs", str(tmp_path), "--port", "0", *tls])
    assert broken.exit_code != 0 and "not a TLS certificate and its key" in str(broken.exception)
