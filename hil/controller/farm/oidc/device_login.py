"""Log in with the device authorization flow (RFC 8628): the user confirms a code in any browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hil.controller.farm.oidc.login_store import StoredLogin, make_login
from hil.controller.farm.oidc.provider import fetch_configuration, get_endpoint, make_rejection, post_form
from hil.core.text import escape_controls
from hil.errors import FarmUnreachable, UsageError

_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_MAX_WAIT_SECONDS = 1800.0
# Interval between requests if the provider names none, the longest accepted interval, and the step of `slow_down`.
_INTERVAL, _MAX_INTERVAL, _SLOWER = 5.0, 60.0, 5.0
_MAX_TEXT = 500


@dataclass(frozen=True)
class DeviceCode:
    """Code that the user confirms."""

    user_code: str
    url: str  # page for the code
    complete_url: str  # page with the code in the URL; "" if unsupported
    seconds: float  # lifetime of the code


def log_in(
    issuer: str,
    client_id: str,
    show: Callable[[DeviceCode], object],
    *,
    scope: str = "openid profile offline_access",
    audience: str = "",
    uses_id_token: bool = False,
    sleep: Callable[[float], object] = time.sleep,
) -> StoredLogin:
    """Log in at a provider. Waits until the user has confirmed the code.

    Args:
        show: shows the code to the user.
        audience: audience of the access token, for providers that need it.
        uses_id_token: use the ID token for the farm.

    Raises:
        UsageError: the provider has no device flow, the user denied access, or the code has expired.
        FarmUnreachable: the provider does not respond.
    """
    configuration = fetch_configuration(issuer)
    token_endpoint = get_endpoint(configuration, "token_endpoint")
    asked = {"client_id": client_id, "scope": scope, **({"audience": audience} if audience else {})}
    status, answer = post_form(get_endpoint(configuration, "device_authorization_endpoint"), asked)
    if status != 200:
        raise make_rejection(status, answer)
    device_code = _read_text(answer, "device_code")
    seconds = min(_read_number(answer, "expires_in", _MAX_WAIT_SECONDS), _MAX_WAIT_SECONDS)
    url = answer.get("verification_uri", answer.get("verification_url", ""))
    complete = answer.get("verification_uri_complete", "")
    code = DeviceCode(_clean(_read_text(answer, "user_code")), _clean(url), _clean(complete), seconds)
    show(code)
    login = StoredLogin(
        issuer=issuer,
        client_id=client_id,
        token_endpoint=token_endpoint,
        token="",
        expires_at=0.0,
        uses_id_token=uses_id_token,
    )
    interval = min(_read_number(answer, "interval", _INTERVAL), _MAX_INTERVAL)
    return make_login(login, _wait_for_tokens(login, device_code, interval, seconds, sleep))


def _wait_for_tokens(
    login: StoredLogin, device_code: str, interval: float, seconds: float, sleep: Callable[[float], object]
) -> dict[str, Any]:
    values = {"grant_type": _GRANT, "device_code": device_code, "client_id": login.client_id}
    left = seconds
    while left > 0:
        sleep(interval)
        left -= max(interval, 0.1)
        try:
            status, answer = post_form(login.token_endpoint, values)
        except FarmUnreachable:
            # RFC 8628 requires longer intervals after a timeout.
            interval = min(interval * 2, _MAX_INTERVAL)
            continue
        error = answer.get("error")
        if status == 200:
            return answer
        if error == "slow_down":
            interval = min(interval + _SLOWER, _MAX_INTERVAL)
        elif error == "access_denied":
            raise UsageError("the login was denied", hint="confirm the code with your own account")
        elif error == "expired_token":
            break
        elif error != "authorization_pending":
            raise make_rejection(status, answer)
    raise UsageError("the code has expired before it was confirmed", hint="hil farm login")


def _read_text(answer: dict[str, Any], name: str) -> str:
    value = answer.get(name)
    if not isinstance(value, str) or not value:
        raise UsageError(f"the login provider sent no {name}")
    return value


def _clean(value: object) -> str:
    return escape_controls(str(value))[:_MAX_TEXT]


def _read_number(answer: dict[str, Any], name: str, default: float) -> float:
    value = answer.get(name, default)
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e6 else default
