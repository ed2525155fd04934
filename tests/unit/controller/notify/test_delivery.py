"""Delivery of messages to webhooks."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hil.controller.notify.delivery import (
    Webhook,
    check_webhook_url,
    deliver_message,
    encode_body,
    post_message,
)
from hil.controller.notify.slack import build_slack_message
from hil.errors import DeliveryFailed, UsageError
from tests.support.webhooks import WebhookReceiver, receive_webhooks


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with receive_webhooks() as one:
        yield one


def test_post_message_sends_body_and_headers(receiver: WebhookReceiver) -> None:
    body = encode_body({"board": "rpi5", "p95": float("inf")})
    post_message(Webhook(receiver.url, headers={"Authorization": "Bearer x"}), body, event="job_ended", delivery="7")
    [message] = receiver.messages
    assert message.document == {"board": "rpi5", "p95": "inf"}
    assert message.headers["content-type"] == "application/json"
    assert message.headers["authorization"] == "Bearer x"
    assert (message.headers["x-hil-event"], message.headers["x-hil-delivery"]) == ("job_ended", "7")
    assert "x-hil-signature-256" not in message.headers


def test_post_message_signs_the_body(receiver: WebhookReceiver) -> None:
    post_message(Webhook(receiver.url, secret="s3cret"), b'{"a": 1}')
    expected = hmac.new(b"s3cret", receiver.messages[0].body, hashlib.sha256).hexdigest()
    assert receiver.messages[0].headers["x-hil-signature-256"] == f"sha256={expected}"


def test_delivery_retries_temporary_errors(receiver: WebhookReceiver) -> None:
    receiver.respond(503, 429, headers={"Retry-After": "20"})
    waits: list[float] = []
    deliver_message(Webhook(receiver.url), b"{}", delivery="7", sleep=waits.append)
    assert [message.headers["x-hil-delivery"] for message in receiver.messages] == ["7"] * 3
    assert waits == [20, 20]


def test_delivery_ends_after_all_attempts(receiver: WebhookReceiver) -> None:
    receiver.respond(*[500] * 9)
    with pytest.raises(DeliveryFailed, match="status 500"):
        deliver_message(Webhook(receiver.url), b"{}", attempts=3, sleep=lambda _: None)
    assert len(receiver.messages) == 3


@pytest.mark.parametrize("status", [302, 400, 404])
def test_delivery_does_not_retry_rejections(receiver: WebhookReceiver, status: int) -> None:
    receiver.respond(status, headers={"Location": receiver.url})
    with pytest.raises(DeliveryFailed, match=f"status {status}") as failure:
        deliver_message(Webhook(receiver.url), b"{}", sleep=lambda _: None)
    assert failure.value.is_permanent and len(receiver.messages) == 1


def test_errors_do_not_contain_the_path(receiver: WebhookReceiver) -> None:
    receiver.respond(403)
    webhook = Webhook(receiver.url + "/T0/SECRET?key=SECRET", secret="SECRET")
    with pytest.raises(DeliveryFailed) as failure:
        post_message(webhook, b"{}")
    assert "SECRET" not in f"{failure.value} {failure.value.detail} {webhook}"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(DeliveryFailed, match=f"http://127.0.0.1:{port}") as failure:
        post_message(Webhook(f"http://127.0.0.1:{port}/SECRET"), b"{}")
    assert "SECRET" not in str(failure.value) and not failure.value.is_permanent


def test_slow_receiver_is_limited_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                while not ended.wait(0.05):
                    connection.send(b"H")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(DeliveryFailed, match="timed out"):
            post_message(Webhook(f"http://127.0.0.1:{server.getsockname()[1]}/"), b"{}", timeout_s=0.3)
        assert time.monotonic() - begun < 30
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    "url", ["ftp://host/", "file:///etc/passwd", "http://", "https://u:p@host/", "http://ho st/", "http://host:x/", "x"]
)
def test_check_webhook_url_rejects_url(url: str) -> None:
    with pytest.raises(UsageError, match=r"\[webhooks.ci\]: invalid URL") as failure:
        check_webhook_url(url, "[webhooks.ci]")
    assert len(url) < 3 or url not in str(failure.value)


def test_slack_message_escapes_and_limits_text() -> None:
    message = build_slack_message(
        "<!channel> a & b", ["x" * 4000] * 60, fields={"board": "<rpi5>"}, link="https://farm/jobs/7"
    )
    assert message["text"] == "&lt;!channel&gt; a &amp; b"
    head, fields, *sections = message["blocks"]
    assert head["text"]["text"] == "*<https://farm/jobs/7|&lt;!channel&gt; a &amp; b>*"
    assert fields["fields"] == [{"type": "mrkdwn", "text": "*board*\n&lt;rpi5&gt;"}]
    assert len(message["blocks"]) == 50 and max(len(one["text"]["text"]) for one in sections) == 3000
