"""Requests to an OpenID Connect provider, with limits on time and size."""

from __future__ import annotations

import http.client
import urllib.parse
from collections.abc import Mapping
from typing import Any

from hil.core.bounded_http import HttpResponse, send_request, split_url
from hil.core.bounded_json import parse_json
from hil.core.loopback import is_loopback
from hil.core.text import escape_controls
from hil.errors import FarmUnreachable, UsageError

TIMEOUT_SECONDS = 10.0
_MAX_RESPONSE = 1 << 20
_MAX_VALUES = 50_000
_SHOWN = 200
_DISCOVERY = "/.well-known/openid-configuration"


class LoginRejected(UsageError):
    """The login provider rejected a request."""


def check_provider_url(url: str, what: str) -> str:
    """Return a URL of a provider. Raises UsageError unless it is https, or http to this machine."""
    try:
        parts = split_url(url)
    except ValueError as error:
        raise UsageError(f"invalid {what} {url[:_SHOWN]!r}: {error}") from error
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise UsageError(f"invalid {what} {url[:_SHOWN]!r}: unencrypted", hint="use https://")
    return url


def fetch_configuration(issuer: str) -> dict[str, Any]:
    """Return the provider's configuration document.

    Raises:
        FarmUnreachable: the provider does not respond.
        UsageError: the document is invalid, or belongs to another issuer.
    """
    check_provider_url(issuer, "issuer")
    document = fetch_json(issuer.rstrip("/") + _DISCOVERY)
    if document.get("issuer") != issuer:
        raise UsageError(
            f"the provider at {issuer} reports the issuer {str(document.get('issuer'))[:_SHOWN]!r}",
            hint="use exactly this issuer, with or without a slash at the end",
        )
    return document


def get_endpoint(configuration: Mapping[str, Any], name: str) -> str:
    """Return an endpoint of a provider's configuration. Raises UsageError if it is missing or unencrypted."""
    url = configuration.get(name)
    if not isinstance(url, str):
        raise UsageError(f"the login provider has no {name}", hint="use a provider with this endpoint")
    return check_provider_url(url, name)


def fetch_json(url: str) -> dict[str, Any]:
    """Return the JSON object at a URL. Raises FarmUnreachable or UsageError."""
    response = _send("GET", url, None, {"Accept": "application/json"})
    if response.status != 200:
        raise FarmUnreachable(f"the login provider responds with status {response.status} at {url[:_SHOWN]}")
    return _parse_object(response, url)


def post_form(url: str, values: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """Send a form and return the status and the JSON object of the response. Raises FarmUnreachable or UsageError."""
    body = urllib.parse.urlencode(values).encode()
    headers = {"Accept": "application/json", "Content-Type": "application/x-www-form-urlencoded"}
    response = _send("POST", url, body, headers)
    if response.status >= 500:
        raise FarmUnreachable(f"the login provider responds with status {response.status}", hint="retry later")
    return response.status, _parse_object(response, url)


def make_rejection(status: int, answer: Mapping[str, Any]) -> LoginRejected:
    """Return the error for an error response of a provider."""
    code = escape_controls(str(answer.get("error", f"status {status}")))[:_SHOWN]
    text = escape_controls(str(answer.get("error_description", "")))[:_SHOWN]
    return LoginRejected(f"the login provider rejected the request: {code}" + (f": {text}" if text else ""))


def _send(method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> HttpResponse:
    try:
        return send_request(method, url, body, headers, timeout_s=TIMEOUT_SECONDS, most_bytes=_MAX_RESPONSE)
    except (OSError, http.client.HTTPException, ValueError) as error:
        text = escape_controls(str(error))[:_SHOWN] or type(error).__name__
        raise FarmUnreachable(
            f"the login provider at {url[:_SHOWN]} is not responding: {text}", hint="retry later"
        ) from error


def _parse_object(response: HttpResponse, url: str) -> dict[str, Any]:
    try:
        document = parse_json(response.body, _MAX_VALUES)
    except ValueError as error:
        raise UsageError(f"invalid response of the login provider at {url[:_SHOWN]}: not JSON") from error
    if not isinstance(document, dict):
        raise UsageError(f"invalid response of the login provider at {url[:_SHOWN]}: not an object")
    return document
