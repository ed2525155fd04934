"""A small OpenID Connect provider on loopback, with device login, refresh and key rotation."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT = "hil"


@dataclass
class OidcProvider:
    """Provider with one signing key, and the answers of its token endpoint in order."""

    issuer: str = ""
    keys: dict[str, rsa.RSAPrivateKey] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # errors of the next token requests
    lifetime_s: float = 300.0
    key_requests: int = 0
    forms: list[dict[str, str]] = field(default_factory=list)
    user: str = "anna"
    device_code: str = "d"
    is_broken: bool = False  # True to answer all requests with status 500

    def rotate(self, name: str) -> None:
        """Replace the signing key."""
        self.keys = {name: rsa.generate_private_key(public_exponent=65537, key_size=2048)}

    def make_token(self, *, key: str = "", algorithm: str = "RS256", secret: Any = None, **claims: Any) -> str:
        """Return a signed token. A claim with the value None is left out."""
        key = key or next(iter(self.keys))
        now = time.time()
        values = {"iss": self.issuer, "aud": CLIENT, "sub": self.user, "exp": now + self.lifetime_s, "iat": now}
        values |= {"groups": ["vision"], **claims}
        payload = {name: value for name, value in values.items() if value is not None}
        return jwt.encode(payload, secret or self.keys.get(key), algorithm=algorithm, headers={"kid": key})

    def list_keys(self) -> list[dict[str, Any]]:
        """Return the public keys."""
        listed = []
        for name, key in self.keys.items():
            public = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
            listed.append({**public, "kid": name, "use": "sig", "alg": "RS256"})
        return listed

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """Return status and document of a response."""
        if self.is_broken:
            return 500, {}
        if path.endswith("/.well-known/openid-configuration"):
            endpoints = ("token_endpoint", "device_authorization_endpoint", "jwks_uri")
            return 200, {"issuer": self.issuer, **{name: f"{self.issuer}/{name}" for name in endpoints}}
        if path.endswith("/jwks_uri"):
            self.key_requests += 1
            return 200, {"keys": self.list_keys()}
        self.forms.append(form)
        if path.endswith("/device_authorization_endpoint"):
            page = f"{self.issuer}/device"
            return 200, {
                "device_code": self.device_code,
                "user_code": "WDJB-MJHT",
                "verification_uri": page,
                "interval": 5,
            }
        if self.errors:
            return 400, {"error": self.errors.pop(0)}
        return 200, {"access_token": self.make_token(), "refresh_token": "r2", "expires_in": self.lifetime_s}


@contextlib.contextmanager
def serve_provider() -> Iterator[OidcProvider]:
    """Serve a provider."""
    provider = OidcProvider()
    provider.rotate("k1")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._answer({name: values[0] for name, values in parse_qs(text).items()})

        def _answer(self, form: dict[str, str]) -> None:
            status, document = provider.answer(self.path, form)
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider.issuer = f"http://127.0.0.1:{server.server_port}/realm"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
