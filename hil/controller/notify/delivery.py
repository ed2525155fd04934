"""Deliver messages to webhooks.

A delivery is a POST request. With a secret, the header ``X-Hil-Signature-256`` has an HMAC of the body, in the form of
GitHub's webhooks. URLs can contain secrets, so messages of errors contain only the scheme and the host.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import tenacity

from hil.controller.records.base import Record
from hil.core.bounded_http import HttpResponse, send_request, split_url
from hil.core.text import convert_to_json, escape_controls
from hil.errors import DeliveryFailed, UsageError

SIGNATURE_HEADER = "X-Hil-Signature-256"
EVENT_HEADER = "X-Hil-Event"
# The same in all attempts to deliver a message, so that a receiver can ignore repeated messages.
DELIVERY_HEADER = "X-Hil-Delivery"
# Time limit in seconds for one attempt: connection, request and response.
TIMEOUT_SECONDS = 10.0
MAX_ATTEMPTS = 5
# Longest waiting time in seconds that a receiver can request with Retry-After.
_MAX_RETRY_AFTER = 3600.0
_MAX_RESPONSE = 64 << 10
_SHOWN = 200
# Responses after which a repeated request can succeed, in addition to 5xx.
_RETRIED = (408, 425, 429)
_BACKOFF = tenacity.wait_exponential(0.5, max=30)
_OUTBOX_RETRYING = tenacity.Retrying(wait=tenacity.wait_exponential(5, max=3600))


class MessageFormat(str, Enum):
    """Format of a message's body."""

    JSON = "json"
    SLACK = "slack"


@dataclass(frozen=True)
class Webhook:
    """Receiver of messages."""

    url: str = field(repr=False)
    secret: str = field(default="", repr=False)  # key of the signature; "" for no signature
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # further headers, such as Authorization

    @property
    def place(self) -> str:
        """Scheme and host of the URL, without secrets."""
        parts = split_url(self.url)
        return f"{parts.scheme}://{parts.netloc}"


def check_webhook_url(url: str, place: str) -> str:
    """Return the URL of a webhook. Raises UsageError, without the URL, if it is invalid.

    Args:
        place: where the URL is configured, for the message.
    """
    try:
        split_url(url)
    except ValueError as error:
        raise UsageError(f"{place}: invalid URL of a webhook: {error}") from None
    return url


def encode_body(document: Record | Mapping[str, object]) -> bytes:
    """Return a message as JSON."""
    values = document.to_json() if isinstance(document, Record) else convert_to_json(document)
    return json.dumps(values, allow_nan=False).encode()


def sign_body(secret: str, body: bytes) -> str:
    """Return the value of the signature header: ``sha256=`` and the HMAC-SHA256 of the body, in hexadecimal."""
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def post_message(
    webhook: Webhook, body: bytes, *, event: str = "", delivery: str = "", timeout_s: float = TIMEOUT_SECONDS
) -> HttpResponse:
    """Send a message once and return the response. Call it in a thread: it blocks up to the time limit.

    Args:
        event: kind of the message, for the header ``X-Hil-Event``.
        delivery: ID of the message, for the header ``X-Hil-Delivery``.

    Raises:
        DeliveryFailed: the receiver does not respond, or rejects the message.
    """
    headers = {"Content-Type": "application/json", **webhook.headers}
    headers |= {EVENT_HEADER: event} if event else {}
    headers |= {DELIVERY_HEADER: delivery} if delivery else {}
    headers |= {SIGNATURE_HEADER: sign_body(webhook.secret, body)} if webhook.secret else {}
    try:
        response = send_request("POST", webhook.url, body, headers, timeout_s=timeout_s, most_bytes=_MAX_RESPONSE)
    except ssl.SSLCertVerificationError as error:
        raise DeliveryFailed(
            f"{webhook.place} has an invalid certificate: {error.verify_message}",
            hint="set SSL_CERT_FILE to the authority of the receiver",
        ) from None
    # No cause: a traceback would contain the URL.
    except (OSError, http.client.HTTPException, ValueError) as error:
        text = escape_controls(str(error))[:_SHOWN] or type(error).__name__
        raise DeliveryFailed(f"{webhook.place} did not accept the message: {text}") from None
    if not response.is_success:
        raise _make_rejection_error(webhook, response)
    return response


def deliver_message(
    webhook: Webhook,
    body: bytes,
    *,
    event: str = "",
    delivery: str = "",
    attempts: int = MAX_ATTEMPTS,
    sleep: Callable[[float], None] = time.sleep,
) -> HttpResponse:
    """Send a message, and retry after temporary errors with growing delays.

    Args:
        sleep: waits for a number of seconds.

    Raises:
        DeliveryFailed: the receiver rejects the message, or all attempts failed.
    """
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, DeliveryFailed) and not error.is_permanent),
        stop=tenacity.stop_after_attempt(attempts),
        wait=_compute_wait,
        reraise=True,
        sleep=sleep,
    )
    return retrying(post_message, webhook, body, event=event, delivery=delivery)


def compute_backoff(attempts: int) -> float:
    """Return the delay in seconds before the next attempt of a stored message: from 5 s up to an hour.

    Args:
        attempts: number of failed attempts.
    """
    state = tenacity.RetryCallState(_OUTBOX_RETRYING, None, (), {})
    state.attempt_number = attempts
    return float(_OUTBOX_RETRYING.wait(state))


def _compute_wait(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    requested = error.retry_after_s if isinstance(error, DeliveryFailed) else 0.0
    return max(_BACKOFF(state), min(requested, _BACKOFF.max))


def _make_rejection_error(webhook: Webhook, response: HttpResponse) -> DeliveryFailed:
    status = response.status
    error = DeliveryFailed(
        f"{webhook.place} rejected the message with status {status}",
        detail=escape_controls(response.body[:_SHOWN].decode(errors="replace")),
    )
    error.is_permanent = status < 500 and status not in _RETRIED
    seconds = response.headers.get("retry-after", "")
    if seconds.isascii() and seconds.isdecimal():
        error.retry_after_s = min(float(seconds[:9]), _MAX_RETRY_AFTER)
    if 300 <= status < 400:
        error.hint = "redirects are not followed; configure the final URL"
    return error
