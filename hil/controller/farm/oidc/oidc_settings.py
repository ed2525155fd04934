"""Settings of the OpenID Connect login of a gateway: the table ``[oidc]`` in ``farm.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hil.controller.farm.messages import Right, Role
from hil.controller.farm.oidc.provider import check_provider_url
from hil.controller.farm.settings import OIDC_TABLE, read_settings_tables
from hil.errors import UsageError, did_you_mean

# Signatures with public keys. A shared secret (HS256) or no signature would allow anyone to forge tokens.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_TEXTS = ("issuer", "user_claim", "groups_claim", "project_claim")


@dataclass(frozen=True)
class OidcSettings:
    """Which tokens a gateway accepts, and what their users may do."""

    issuer: str
    audience: tuple[str, ...]  # accepted values of ``aud``: usually the client's ID
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    user_claim: str = "sub"  # claim with the user's name in the farm
    groups_claim: str = "groups"  # claim with the list of groups
    project_claim: str = ""  # claim with the project; "" for no project
    role: str = Role.SUBMITTER.value  # role of users without a group in ``roles``; "" refuses them
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # role -> groups
    rights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # right -> groups
    leeway_s: float = 30.0  # accepted difference between the clocks
    # A stream, such as a lease, that began with a valid token may continue for this time after the token's end.
    stream_hours: float = 24.0

    def choose_role(self, groups: frozenset[str]) -> Role | None:
        """Return the highest role of a user with these groups, or None if the user has no access."""
        found = [Role(role) for role, members in self.roles.items() if groups.intersection(members)]
        if not found and self.role:
            return Role(self.role)
        return max(found, key=list(Role).index, default=None)

    def list_rights(self, groups: frozenset[str]) -> frozenset[Right]:
        """Return the rights of a user with these groups."""
        return frozenset(Right(right) for right, members in self.rights.items() if groups.intersection(members))


def load_oidc(path: Path) -> OidcSettings | None:
    """Read the table ``[oidc]``. Returns None if there is none. Raises UsageError for an invalid setting."""
    table = read_settings_tables(path).get(OIDC_TABLE)
    if table is None:
        return None
    place = f"{path}: [{OIDC_TABLE}]"
    if not isinstance(table, dict):
        raise UsageError(f"{place} must be a table")
    known = [one.name for one in fields(OidcSettings)]
    for name in table:
        if name not in known:
            hint = f"{did_you_mean(name, known)}known settings: {', '.join(known)}"
            raise UsageError(f"{place}: unknown setting {name!r}", hint=hint)
    values: dict[str, Any] = dict(table)
    for name in _TEXTS:
        if not isinstance(values.get(name, ""), str):
            raise UsageError(f"{place}: {name} must be a string")
    values["roles"] = _read_members(place, "roles", values.get("roles", {}), [one.value for one in Role])
    values["rights"] = _read_members(place, "rights", values.get("rights", {}), [one.value for one in Right])
    for name in ("issuer", "audience"):
        if not values.get(name):
            raise UsageError(
                f"{place}: missing {name}", hint="set issuer to the provider's URL, and audience to the client"
            )
    check_provider_url(values["issuer"], f"issuer in {place}")
    for name, known_names in (("audience", None), ("algorithms", ALGORITHMS)):
        if name in values:
            values[name] = _read_names(place, name, values[name], known_names)
    if values.get("role", Role.SUBMITTER.value) not in ("", *(one.value for one in Role)):
        raise UsageError(f"{place}: unknown role {values['role']!r}")
    for name, most in (("leeway_s", 300.0), ("stream_hours", 24.0 * 30)):
        value = values.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
            raise UsageError(f"{place}: {name} must be a number from 0 to {most:g}")
    return OidcSettings(**values)


def _read_names(place: str, name: str, value: Any, known: tuple[str, ...] | list[str] | None) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        raise UsageError(f"{place}: {name} must be a list of strings")
    for one in found:
        if known is not None and one not in known:
            raise UsageError(f"{place}: {one!r} is not allowed in {name}", hint=f"allowed: {', '.join(known)}")
    return tuple(found)


def _read_members(place: str, name: str, table: Any, known: list[str]) -> dict[str, tuple[str, ...]]:
    if not isinstance(table, dict):
        raise UsageError(f"{place}: {name} must be a table")
    for key in table:
        if key not in known:
            raise UsageError(
                f"{place}: unknown key {key!r} in {name}",
                hint=f"{did_you_mean(key, known)}known keys: {', '.join(known)}",
            )
    return {key: _read_names(place, f"{name}.{key}", value, None) for key, value in table.items()}
