"""Verify tokens of an OpenID Connect provider: signature, issuer, audience and time."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from hil.controller.farm.messages import FARM_USER, Principal
from hil.controller.farm.oidc.oidc_settings import OidcSettings
from hil.controller.farm.oidc.provider import fetch_configuration, fetch_json, get_endpoint
from hil.core.install_hints import make_install_command
from hil.errors import AccessRefused, FarmUnreachable, HilError, UsageError

_LOG = logging.getLogger("hil.farm.gateway")
MAX_TOKEN = 16 << 10
# Lifetime of keys, and the shortest time between requests to the provider, so that invalid tokens cause few requests.
_KEYS_SECONDS, _PAUSE_SECONDS = 3600.0, 10.0
# While the provider does not respond, the gateway uses the last keys for this long.
_STALE_SECONDS = 24 * 3600.0
_MAX_KEYS = 100
_MAX_NAME, _MAX_GROUPS = 100, 200


class TokenRejected(AccessRefused):
    """A token is invalid or expired, or its user has no access."""


@dataclass(frozen=True)
class _PublicKey:
    """Public key of the provider."""

    key: Any
    algorithm: str | None  # the only algorithm of the key; None for all that fit its type


class TokenVerifier:
    """Verifier with a cache of the provider's keys. Thread-safe; calls may block for the provider's response.

    Raises UsageError if the package PyJWT is not installed.
    """

    def __init__(self, settings: OidcSettings) -> None:
        try:
            import jwt
        except ImportError as error:
            raise UsageError(
                "the login with OpenID Connect needs the package PyJWT", hint=make_install_command("farm")
            ) from error
        self._jwt: Any = jwt
        self.settings = settings
        self._reading = threading.Lock()
        self._keys: dict[str, _PublicKey] = {}  # key ID -> key; replaced, never changed
        self._read_at = self._tried_at = float("-inf")
        self._error: HilError | None = None

    def verify(self, token: str, *, is_running: bool = False) -> Principal:
        """Return the user of a token.

        Args:
            is_running: True for a stream that began with this token, which may continue after the token's end.

        Raises:
            TokenRejected: the token is invalid, or the user has no access.
            FarmUnreachable: the provider does not respond, and the keys are not cached.
        """
        if len(token) > MAX_TOKEN:
            raise TokenRejected("the token is too long")
        settings = self.settings
        try:
            header = self._jwt.get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid", "")
            if algorithm not in settings.algorithms:
                raise TokenRejected(f"the token's algorithm {str(algorithm)[:20]!r} is not allowed")
            key = self._find_key(str(key_id), algorithm)
            claims = self._jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=list(settings.audience),
                issuer=settings.issuer,
                leeway=settings.leeway_s + (settings.stream_hours * 3600 if is_running else 0),
                options={"require": ["exp", "iss", "aud", settings.user_claim]},
            )
        # PyJWT raises the other errors for a key of another type than the algorithm, and for malformed tokens.
        except (self._jwt.PyJWTError, TypeError, ValueError, RecursionError) as error:
            raise TokenRejected(f"invalid token: {str(error)[:_MAX_NAME]}") from None
        return self._make_principal(claims)

    def _make_principal(self, claims: dict[str, Any]) -> Principal:
        settings = self.settings
        user, project = claims[settings.user_claim], ""
        if settings.project_claim:
            project = claims.get(settings.project_claim, "")
        for name in (user, project):
            if not isinstance(name, str) or len(name) > _MAX_NAME or not name.isprintable() or name != name.strip():
                raise TokenRejected(f"invalid name {str(name)[:_MAX_NAME]!r} in the token")
        if user in ("", FARM_USER):
            raise TokenRejected(f"invalid user name {user!r} in the token")
        given = claims.get(settings.groups_claim, [])
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list) or len(given) > _MAX_GROUPS:
            raise TokenRejected(
                f"the token's claim {settings.groups_claim} must be a list of at most {_MAX_GROUPS} groups"
            )
        # An asterisk would give access to all boards.
        groups = frozenset(
            one
            for one in given
            if isinstance(one, str) and 0 < len(one) <= _MAX_NAME and "*" not in one and one.isprintable()
        )
        role = settings.choose_role(groups)
        if role is None:
            raise TokenRejected(f"{user} has no group with access to the farm")
        return Principal(user, role, project, rights=settings.list_rights(groups), groups=groups)

    def _find_key(self, key_id: str, algorithm: str) -> Any:
        """Return the key of a token. Reads the provider's keys if they are old, or if the key is unknown.

        While a thread reads the keys, other threads wait only for an unknown key, because the provider may be slow.
        """
        is_unknown = key_id not in self._keys
        is_old = time.monotonic() - self._read_at > _KEYS_SECONDS
        if (is_old or is_unknown) and self._reading.acquire(blocking=is_unknown):
            try:
                now = time.monotonic()
                if now - self._tried_at > _PAUSE_SECONDS:
                    self._tried_at = now
                    self._read_keys(now)
            finally:
                self._reading.release()
        if time.monotonic() - self._read_at > _STALE_SECONDS:
            raise self._error or FarmUnreachable("the login provider is not responding", hint="retry later")
        key = self._keys.get(key_id)
        if key is None:
            raise TokenRejected("the token's key is unknown to the login provider")
        if key.algorithm not in (None, algorithm):
            raise TokenRejected(f"the token's key is not for the algorithm {algorithm}")
        return key.key

    def _read_keys(self, now: float) -> None:
        try:
            configuration = fetch_configuration(self.settings.issuer)
            document = fetch_json(get_endpoint(configuration, "jwks_uri"))
        except HilError as error:
            _LOG.warning("oidc.keys", extra={"reason": error.message})
            self._error = error.as_kind(FarmUnreachable)
            return
        keys = document.get("keys")
        found = {}
        for one in keys[:_MAX_KEYS] if isinstance(keys, list) else ():
            if isinstance(one, dict) and one.get("use", "sig") == "sig" and one.get("kty") in ("RSA", "EC", "OKP"):
                try:
                    found[str(one.get("kid", ""))] = _PublicKey(self._jwt.PyJWK(one).key, one.get("alg"))
                except (self._jwt.PyJWTError, TypeError, ValueError):
                    continue
        self._keys, self._read_at, self._error = found, now, None
