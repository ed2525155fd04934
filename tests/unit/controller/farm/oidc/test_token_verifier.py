"""Verification of a login provider's tokens in the gateway."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jwt", reason="needs PyJWT of the extra `farm`")

from cryptography.hazmat.primitives import serialization
from support.oidc_provider import CLIENT, OidcProvider, serve_provider

from hil.controller.farm.messages import Right, Role
from hil.controller.farm.oidc import token_verifier
from hil.controller.farm.oidc.oidc_settings import OidcSettings, load_oidc
from hil.controller.farm.oidc.token_verifier import TokenRejected, TokenVerifier
from hil.errors import FarmUnreachable, UsageError


@pytest.fixture
def provider() -> Iterator[OidcProvider]:
    with serve_provider() as one:
        yield one


def make_verifier(provider: OidcProvider, **settings: Any) -> TokenVerifier:
    return TokenVerifier(OidcSettings(provider.issuer, (CLIENT,), **settings))


def test_verifier_reads_user_groups_role_and_rights(provider: OidcProvider) -> None:
    verifier = make_verifier(
        provider,
        user_claim="preferred_username",
        project_claim="team",
        roles={"admin": ("lab-admins",)},
        rights={"commands": ("vision",)},
    )
    who = verifier.verify(provider.make_token(preferred_username="anna", team="speech"))
    assert (who.user, who.project, who.role, who.groups) == ("anna", "speech", Role.SUBMITTER, frozenset({"vision"}))
    assert who.has_right(Right.COMMANDS) and not who.has_right(Right.POWER)
    admin = verifier.verify(provider.make_token(preferred_username="root", groups=["lab-admins", "*"]))
    assert (admin.role, admin.groups) == (Role.ADMIN, frozenset({"lab-admins"}))


def test_verifier_refuses_users_without_role(provider: OidcProvider) -> None:
    verifier = make_verifier(provider, role="", roles={"viewer": ("guests",)})
    with pytest.raises(TokenRejected, match="anna has no group with access"):
        verifier.verify(provider.make_token())
    assert verifier.verify(provider.make_token(groups="guests")).role is Role.VIEWER


def test_verifier_uses_default_role_only_without_group(provider: OidcProvider) -> None:
    verifier = make_verifier(provider, roles={"viewer": ("guests",), "host": ("lab",)})
    assert verifier.verify(provider.make_token(groups=["guests"])).role is Role.VIEWER
    assert verifier.verify(provider.make_token(groups=["guests", "lab"])).role is Role.HOST
    assert verifier.verify(provider.make_token(groups=["others"])).role is Role.SUBMITTER


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        pytest.param({"iss": "https://other.example"}, "issuer", id="wrong issuer"),
        pytest.param({"aud": "other"}, "Audience", id="wrong audience"),
        pytest.param({"aud": None}, "aud", id="no audience"),
        pytest.param({"exp": 1000}, "expired", id="expired"),
        pytest.param({"exp": None}, "exp", id="no end"),
        pytest.param({"nbf": 4102444800}, "not yet valid", id="not yet valid"),
        pytest.param({"sub": None}, "sub", id="no user"),
        pytest.param({"sub": "farm"}, "invalid user name", id="reserved user"),
        pytest.param({"sub": "a\nb"}, "invalid name", id="unprintable user"),
        pytest.param({"groups": {"a": 1}}, "must be a list", id="groups are no list"),
    ],
)
def test_verifier_rejects_claims(provider: OidcProvider, claims: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenRejected, match=message):
        make_verifier(provider).verify(provider.make_token(**claims))


def _encode(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def test_verifier_rejects_unsigned_token(provider: OidcProvider) -> None:
    _, payload, signature = provider.make_token().split(".")
    for algorithm in ("none", "None", "nOnE"):
        for end in ("", signature):
            with pytest.raises(TokenRejected, match=r"not allowed|invalid token"):
                make_verifier(provider).verify(f"{_encode({'alg': algorithm, 'kid': 'k1'})}.{payload}.{end}")


def test_verifier_rejects_public_key_as_secret(provider: OidcProvider) -> None:
    import hashlib
    import hmac

    public = provider.keys["k1"].public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    body = f"{_encode({'alg': 'HS256', 'kid': 'k1'})}.{provider.make_token().split('.')[1]}"
    signature = base64.urlsafe_b64encode(hmac.new(pem, body.encode(), hashlib.sha256).digest()).decode().rstrip("=")
    with pytest.raises(TokenRejected, match="'HS256' is not allowed"):
        make_verifier(provider).verify(f"{body}.{signature}")


def test_verifier_rejects_key_of_other_type(provider: OidcProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some providers list keys without an algorithm.
    verifier = make_verifier(provider)
    verifier.verify(provider.make_token())
    monkeypatch.setattr(verifier, "_keys", {name: replace(key, algorithm=None) for name, key in verifier._keys.items()})
    _, payload, signature = provider.make_token().split(".")
    with pytest.raises(TokenRejected, match="invalid token"):
        verifier.verify(f"{_encode({'alg': 'ES256', 'kid': 'k1'})}.{payload}.{signature}")


def test_known_key_does_not_wait_for_slow_provider(provider: OidcProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, token = make_verifier(provider), provider.make_token()
    verifier.verify(token)
    monkeypatch.setattr(token_verifier, "_KEYS_SECONDS", 0.0)
    with verifier._reading:  # another thread waits for the provider
        assert verifier.verify(token).user == "anna"
    assert provider.key_requests == 1


def test_verifier_rejects_changed_payload_and_foreign_key(provider: OidcProvider) -> None:
    verifier, token = make_verifier(provider), provider.make_token()
    head, _, signature = token.split(".")
    changed = provider.make_token(sub="root").split(".")[1]
    with pytest.raises(TokenRejected, match=r"[Ss]ignature"):
        verifier.verify(f"{head}.{changed}.{signature}")
    old = provider.keys["k1"]
    provider.rotate("k1")
    with pytest.raises(TokenRejected, match=r"[Ss]ignature"):
        verifier.verify(provider.make_token(secret=provider.keys["k1"]))
    assert verifier.verify(provider.make_token(secret=old)).user == "anna"


@pytest.mark.parametrize("token", ["", "a.b", "a.b.c", "....", "x" * 20_000, "e30.e30.e30"])
def test_verifier_rejects_malformed_token(provider: OidcProvider, token: str) -> None:
    with pytest.raises(TokenRejected):
        make_verifier(provider).verify(token)


def test_verifier_reads_rotated_keys(provider: OidcProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = make_verifier(provider)
    verifier.verify(provider.make_token())
    provider.rotate("k2")
    with pytest.raises(TokenRejected, match="unknown to the login provider"):
        verifier.verify(provider.make_token())
    for _ in range(5):  # unknown keys cause no more requests for some seconds
        with pytest.raises(TokenRejected):
            verifier.verify(provider.make_token())
    assert provider.key_requests == 1
    monkeypatch.setattr(token_verifier, "_PAUSE_SECONDS", 0.0)
    assert verifier.verify(provider.make_token()).user == "anna"
    assert provider.key_requests == 2


def test_verifier_uses_cached_keys_while_provider_is_down(
    provider: OidcProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, token = make_verifier(provider), provider.make_token()
    verifier.verify(token)
    provider.is_broken = True
    monkeypatch.setattr(token_verifier, "_KEYS_SECONDS", 0.0)
    monkeypatch.setattr(token_verifier, "_PAUSE_SECONDS", 0.0)
    assert verifier.verify(token).user == "anna"
    with pytest.raises(FarmUnreachable, match="status 500"):
        make_verifier(provider).verify(token)


def test_stream_continues_after_end_of_token(provider: OidcProvider) -> None:
    verifier, token = make_verifier(provider), provider.make_token(exp=time.time() - 600)
    with pytest.raises(TokenRejected, match="expired"):
        verifier.verify(token)
    assert verifier.verify(token, is_running=True).user == "anna"


def test_verifier_rejects_other_issuer_in_configuration(provider: OidcProvider) -> None:
    settings = OidcSettings(f"{provider.issuer}/", (CLIENT,))
    with pytest.raises(FarmUnreachable, match="reports the issuer"):
        TokenVerifier(settings).verify(provider.make_token(iss=settings.issuer))


def test_settings_are_read(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(
        '[oidc]\nissuer = "https://login.example/realm"\naudience = "hil"\nalgorithms = ["ES256"]\nrole = ""\n'
        'roles = {admin = "lab-admins"}\nrights = {power = ["lab"]}\n'
    )
    settings = load_oidc(path)
    assert settings is not None
    assert (settings.audience, settings.algorithms, settings.role) == (("hil",), ("ES256",), "")
    assert (settings.roles, settings.rights) == ({"admin": ("lab-admins",)}, {"power": ("lab",)})
    assert load_oidc(tmp_path / "none.toml") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('issuer = "https://x"', "missing audience"),
        ('audience = "hil"', "missing issuer"),
        ('issuer = "http://login.example"\naudience = "hil"', "unencrypted"),
        ('issuer = "https://x"\naudience = "hil"\nalgorithms = ["HS256"]', "'HS256' is not allowed in algorithms"),
        ('issuer = "https://x"\naudience = "hil"\nalgorithms = ["none"]', "'none' is not allowed"),
        ('issuer = "https://x"\naudience = "hil"\nroles = {root = "a"}', "unknown key 'root' in roles"),
        ('issuer = "https://x"\naudience = "hil"\nrole = "root"', "unknown role 'root'"),
        ('issuer = "https://x"\naudience = "hil"\nleeway_s = 9000', "leeway_s must be a number from 0 to 300"),
        ('issuer = "https://x"\naudience = "hil"\naudiences = []', "unknown setting 'audiences'"),
    ],
)
def test_settings_refuse_invalid_values(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "farm.toml").write_text(f"[oidc]\n{text}\n")
    with pytest.raises(UsageError, match=message):
        load_oidc(tmp_path / "farm.toml")
