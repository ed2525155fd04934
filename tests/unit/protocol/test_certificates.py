"""Servers use a replaced TLS certificate for new connections, without a restart."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.certificates import write_certificate
from support.waiting import eventually

from hil.errors import UsageError
from hil.protocol.certificates import CertificateReloader, TlsFiles, make_reloading_context
from hil.protocol.listening import listen_on


@contextlib.contextmanager
def grpc_server(files: TlsFiles) -> Iterator[str]:
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    address = listen_on(server, "localhost:0", cert=files.cert, key=files.key, client_ca=files.client_ca)
    server.start()
    yield address
    server.stop(0).wait()


@contextlib.contextmanager
def connected(address: str, ca: bytes) -> Iterator[bool]:
    """Connect with TLS. Yield True if the server's certificate is accepted."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 60_000)]
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), options) as channel:
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append, try_to_connect=True)
        ended = {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE}
        eventually(lambda: ended & set(states))
        yield grpc.ChannelConnectivity.READY in states


def test_grpc_server_uses_replaced_certificate_after_expiry(tmp_path: Path) -> None:
    files = write_certificate(tmp_path, valid_s=3)
    old = files.cert.read_bytes()
    with grpc_server(files) as address, connected(address, old) as first:
        assert first

        def has_expired() -> bool:
            with connected(address, old) as accepted:
                return not accepted

        eventually(has_expired, every_s=0.5)
        write_certificate(tmp_path)
        with connected(address, files.cert.read_bytes()) as accepted:
            assert accepted


def test_tls_server_without_server_name_uses_replaced_certificate(tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    context = make_reloading_context(files)

    def read_served_certificate(server_name: str | None) -> bytes:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        near, far = socket.socketpair()
        with near, far:
            accept = threading.Thread(target=lambda: context.wrap_socket(far, server_side=True).close())
            accept.start()
            with client.wrap_socket(near, server_hostname=server_name) as connection:
                served = connection.getpeercert(binary_form=True)
            accept.join()
        assert served is not None
        return served

    before = read_served_certificate(None)
    assert read_served_certificate("localhost") == before
    write_certificate(tmp_path)
    expected = ssl.PEM_cert_to_DER_cert(files.cert.read_text())
    assert before != expected
    assert read_served_certificate(None) == read_served_certificate("localhost") == expected


def test_half_replaced_files_keep_old_certificate(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("hil.protocol.certificates._RETRY_SECONDS", 0.0)
    files = write_certificate(tmp_path)
    reloader = CertificateReloader(files)
    old = reloader.get_contents()
    key = files.key.read_bytes()
    write_certificate(tmp_path)
    new_key = files.key.read_bytes()
    files.key.write_bytes(key)
    assert reloader.get_contents() is old
    assert reloader.get_contents() is old
    assert [record.message.split(":")[0] for record in caplog.records] == ["the server keeps its old TLS certificate"]
    assert "not a TLS certificate and its key" in caplog.text
    files.key.unlink()
    assert reloader.get_contents() is old
    files.key.write_bytes(new_key)
    assert reloader.get_contents().cert == files.cert.read_bytes() != old.cert
    assert reloader.get_contents() is reloader.get_contents()


def test_reloader_reads_broken_files_at_most_once_a_second(tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    reloader = CertificateReloader(files)
    old = reloader.get_contents()
    files.key.write_text("broken")
    assert reloader.get_contents() is old
    write_certificate(tmp_path)
    assert reloader.get_contents() is old
    eventually(lambda: reloader.get_contents() is not old)


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot read the TLS file .*farm.key: No such file"), ("", "not a TLS certificate"), ("x", "not a TLS")],
)
def test_listen_on_rejects_invalid_key(tmp_path: Path, content: str | None, why: str) -> None:
    files = write_certificate(tmp_path)
    files.key.unlink()
    if content is not None:
        files.key.write_text(content)
    with pytest.raises(UsageError, match=why):
        listen_on(grpc.server(None), "localhost:0", cert=files.cert, key=files.key)


def test_listen_on_rejects_key_with_password(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    files = write_certificate(tmp_path)
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(UsageError, match="not a TLS certificate") as caught:
        listen_on(grpc.server(None), "localhost:0", cert=files.cert, key=files.key)
    assert "must not have a password" in caught.value.hint
