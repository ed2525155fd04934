"""List the kinds of config files: hil.toml, board configs and farm.toml."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from enum import Enum

from hil.controller.farm.messages import Right, Role
from hil.controller.farm.oidc.oidc_settings import ALGORITHMS, OidcSettings
from hil.controller.farm.settings import OIDC_TABLE, WEBHOOKS_TABLE, FarmSettings, UserLimits
from hil.controller.farm.webhooks.webhook_settings import EVENTS
from hil.controller.notify.delivery import MessageFormat
from hil.controller.projects.config_keys import (
    ConfigKey,
    ConfigTable,
    Schema,
    list_board_tables,
    list_dataclass_keys,
    list_project_tables,
    make_history_table,
)
from hil.controller.projects.config_schema import ConfigFile

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}


def _list_farm_tables() -> list[ConfigTable]:
    """Return the tables of ``farm.toml``."""
    limits = _require_positive(list_dataclass_keys(UserLimits), ("boards", "queued"))
    return [
        ConfigTable("terms", "Times, in seconds unless noted.", _require_positive(list_dataclass_keys(FarmSettings))),
        ConfigTable("limits", "Limits of each user.", limits),
        ConfigTable(
            "limits.users.NAME",
            "Limits of one user. If a key is missing, the key of `[limits]` applies.",
            tuple(replace(one, default="as `[limits]`") for one in limits),
            parent="limits",
        ),
        make_history_table(path="`history` in the farm's directory; with PostgreSQL, the farm's database"),
        ConfigTable(f"{WEBHOOKS_TABLE}.NAME", "[Webhook](farm-webhooks.md) of a gateway.", _list_webhook_keys()),
        ConfigTable(
            OIDC_TABLE,
            "[Login](farm-access.md#log-in-with-openid-connect) with OpenID Connect; requires `issuer` and `audience`.",
            _list_oidc_keys(),
        ),
        ConfigTable(f"{OIDC_TABLE}.roles", "Groups with a role.", _list_member_keys(Role)),
        ConfigTable(f"{OIDC_TABLE}.rights", "Groups with a further right.", _list_member_keys(Right)),
    ]


def _list_webhook_keys() -> tuple[ConfigKey, ...]:
    formats = [one.value for one in MessageFormat]
    return (
        ConfigKey("url", _TEXT, "", "URL of the receiver."),
        ConfigKey("url_env", _TEXT, "", "Environment variable of the gateway with the URL, instead of `url`."),
        ConfigKey("secret", _TEXT, "no signature", "Key of the signature."),
        ConfigKey("secret_env", _TEXT, "", "Environment variable of the gateway with the key, instead of `secret`."),
        ConfigKey("format", {**_TEXT, "enum": formats}, f"`{MessageFormat.JSON.value}`", "Format of the messages."),
        ConfigKey("events", _make_list(EVENTS), "all", f"Events: {', '.join(f'`{one}`' for one in EVENTS)}."),
        ConfigKey("failed_only", {"type": "boolean"}, "`false`", "Leave out jobs with exit code 0."),
    )


def _list_oidc_keys() -> tuple[ConfigKey, ...]:
    usual = OidcSettings(issuer="", audience=())
    return (
        ConfigKey("issuer", _TEXT, "", "URL of the provider, exactly as in its configuration document."),
        ConfigKey("audience", _make_list(), "", "Accepted values of the claim `aud`, usually the ID of the client."),
        ConfigKey(
            "algorithms",
            _make_list(ALGORITHMS),
            " ".join(f"`{one}`" for one in usual.algorithms),
            "Accepted signatures.",
        ),
        ConfigKey("user_claim", _TEXT, f"`{usual.user_claim}`", "Claim with the user's name."),
        ConfigKey("groups_claim", _TEXT, f"`{usual.groups_claim}`", "Claim with the list of groups."),
        ConfigKey("project_claim", _TEXT, "no project", "Claim with the project."),
        ConfigKey(
            "role",
            {**_TEXT, "enum": ["", *(one.value for one in Role)]},
            f"`{usual.role}`",
            "Role of users without a group in `roles`; an empty string refuses these users.",
        ),
        ConfigKey("leeway_s", _NUMBER, f"`{usual.leeway_s:g}`", "Accepted difference between clocks, at most 300 s."),
        ConfigKey(
            "stream_hours",
            _NUMBER,
            f"`{usual.stream_hours:g}`",
            "Time for which a lease, or another stream, can continue after its token's end.",
        ),
    )


def _list_member_keys(kind: type[Enum]) -> tuple[ConfigKey, ...]:
    return tuple(ConfigKey(one.value, _make_list(), "", f"Groups with `{one.value}`.") for one in kind)


def _make_list(values: Collection[str] = ()) -> Schema:
    return {"type": "array", "items": {"type": "string", **({"enum": [*values]} if values else {})}}


def _require_positive(keys: Iterable[ConfigKey], whole: Collection[str] = ()) -> tuple[ConfigKey, ...]:
    kinds = {True: {"type": "integer"}, False: {}}
    return tuple(replace(one, schema={**one.schema, **kinds[one.name in whole], "exclusiveMinimum": 0}) for one in keys)


CONFIG_FILES: Mapping[str, ConfigFile] = {
    "project": ConfigFile("hil.toml", "Project file; docs/project-file.md explains it.", list_project_tables),
    "board": ConfigFile("Board config", "Board config; docs/board-configs.md explains it.", list_board_tables),
    "farm": ConfigFile("farm.toml", "Settings of a farm; docs/farm-operation.md explains them.", _list_farm_tables),
}
