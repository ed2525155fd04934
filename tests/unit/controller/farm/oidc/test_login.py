"""Device login of users, and the private file with their tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest

pytest.importorskip("jwt", reason="needs PyJWT of the extra `farm`")

from support.oidc_provider import CLIENT, OidcProvider, serve_provider

from hil.controller.farm.oidc.device_login import DeviceCode, log_in
from hil.controller.farm.oidc.login_store import LoginStore, StoredLogin
from hil.controller.farm.paths import choose_farm_address, open_login_store
from hil.errors import FarmUnreachable, UsageError

FARM = "farm.example:8790"


@pytest.fixture
def provider() -> Iterator[OidcProvider]:
    with serve_provider() as one:
        yield one


@pytest.fixture
def store(tmp_path: Path) -> LoginStore:
    return LoginStore(tmp_path / "data" / "logins.json")


def log_in_at(provider: OidcProvider, waits: list[float] | None = None) -> StoredLogin:
    return log_in(provider.issuer, CLIENT, lambda code: None, sleep=(waits if waits is not None else []).append)


def test_device_login_waits_for_confirmation(provider: OidcProvider) -> None:
    provider.errors = ["authorization_pending", "slow_down", "authorization_pending"]
    codes: list[DeviceCode] = []
    waits: list[float] = []
    login = log_in(provider.issuer, CLIENT, codes.append, sleep=waits.append)
    assert [(code.user_code, code.url) for code in codes] == [("WDJB-MJHT", f"{provider.issuer}/device")]
    assert waits == [5, 5, 10, 10]
    assert provider.forms[-1]["grant_type"] == "urn:ietf:params:oauth:grant-type:device_code"
    assert login.token.count(".") == 2 and login.refresh_token == "r2"
    assert login.expires_at == pytest.approx(time.time() + 300, abs=100)


def test_device_login_sends_long_code_unchanged(provider: OidcProvider) -> None:
    provider.device_code = "d" * 2000
    log_in_at(provider)
    assert provider.forms[-1]["device_code"] == "d" * 2000


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("access_denied", "login was denied"),
        ("expired_token", "code has expired"),
        ("invalid_client", "rejected the request: invalid_client"),
    ],
)
def test_device_login_reports_refusal(provider: OidcProvider, error: str, message: str) -> None:
    provider.errors = [error]
    with pytest.raises(UsageError, match=message):
        log_in_at(provider)


def test_device_login_ends_when_code_expires(provider: OidcProvider) -> None:
    provider.errors = ["authorization_pending"] * 1000
    with pytest.raises(UsageError, match="code has expired"):
        log_in_at(provider)


def test_device_login_reports_provider_that_is_down(provider: OidcProvider) -> None:
    provider.is_broken = True
    with pytest.raises(FarmUnreachable, match="status 500"):
        log_in_at(provider)


def test_store_is_private(provider: OidcProvider, store: LoginStore) -> None:
    store.save(FARM, log_in_at(provider))
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert store.get_token(FARM).count(".") == 2
    store.path.chmod(0o644)
    with pytest.raises(UsageError, match="readable by other users"):
        store.get_token(FARM)


def test_store_refreshes_token_before_its_end(provider: OidcProvider, store: LoginStore) -> None:
    provider.lifetime_s = 30
    login = log_in_at(provider)
    store.save(FARM, login)
    provider.lifetime_s, provider.user = 300, "bert"
    token = store.get_token(FARM)
    assert token != login.token and store.get_token(FARM) == token
    assert provider.forms[-1] == {"grant_type": "refresh_token", "refresh_token": "r2", "client_id": CLIENT}


def test_store_keeps_valid_token_while_provider_is_down(provider: OidcProvider, store: LoginStore) -> None:
    provider.lifetime_s = 30
    login = log_in_at(provider)
    store.save(FARM, login)
    provider.is_broken = True
    assert store.get_token(FARM) == login.token
    store.save(FARM, login.replace(expires_at=1.0))
    with pytest.raises(FarmUnreachable, match="status 500"):
        store.get_token(FARM)
    provider.is_broken, provider.errors = False, ["invalid_grant"]
    with pytest.raises(UsageError, match="rejected the request: invalid_grant") as failure:
        store.get_token(FARM)
    assert failure.value.hint == "log in again: hil farm login"


def test_store_reports_lock_of_other_process(store: LoginStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.farm.oidc.login_store._LOCK_SECONDS", 0.1)
    store.path.parent.mkdir()
    with filelock.FileLock(f"{store.path}.lock"), pytest.raises(FarmUnreachable, match="another hil process has used"):
        store.remove(FARM)


def test_store_removes_login(provider: OidcProvider, store: LoginStore) -> None:
    store.save(FARM, log_in_at(provider))
    assert (store.remove(FARM), store.remove(FARM)) == (True, False)
    with pytest.raises(UsageError, match="no login"):
        store.get_token(FARM)


def test_commands_use_stored_login(provider: OidcProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("HIL_FARM", "127.0.0.1:1")
    monkeypatch.delenv("HIL_FARM_TOKEN", raising=False)
    with pytest.raises(UsageError, match="requires a token"):
        choose_farm_address()
    login = log_in_at(provider)
    open_login_store().save("127.0.0.1:1", login)
    assert choose_farm_address().metadata[0] == ("authorization", f"Bearer {login.token}")
    monkeypatch.setenv("HIL_FARM_TOKEN", "hilf_x")
    assert choose_farm_address().metadata[0] == ("authorization", "Bearer hilf_x")
