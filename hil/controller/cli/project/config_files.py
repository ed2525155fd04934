"""List the kinds of config files: hil.toml, board configs and farm.toml."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from hil.controller.farm.settings import FarmSettings, UserLimits
from hil.controller.farm.webhooks.webhook_settings import EVENTS
from hil.controller.notify.delivery import MessageFormat
from hil.controller.projects.config_keys import (
    ConfigKey,
    ConfigTable,
    list_board_tables,
    list_dataclass_keys,
    list_project_tables,
    make_history_table,
)
from hil.controller.projects.config_schema import ConfigFile


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
        ConfigTable("oidc", "[Login with OpenID Connect](farm-access.md).", _OIDC),
        ConfigTable("webhooks.NAME", "[Webhook](farm-webhooks.md): a receiver of the farm's events.", _WEBHOOK),
    ]


_TEXT, _TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
_GROUPS = {"type": "object", "additionalProperties": _TEXTS}
_OIDC = (
    ConfigKey("issuer", _TEXT, "", "URL of the provider. Required."),
    ConfigKey("audience", _TEXTS, "", "Accepted audiences: usually the client's ID. Required."),
    ConfigKey("algorithms", _TEXTS, "`RS256` `ES256`", "Accepted signature algorithms, with public keys."),
    ConfigKey("user_claim", _TEXT, "`sub`", "Claim with the user's name in the farm."),
    ConfigKey("groups_claim", _TEXT, "`groups`", "Claim with the list of groups."),
    ConfigKey("project_claim", _TEXT, "", "Claim with the project."),
    ConfigKey("role", _TEXT, "`submitter`", 'Role of users without a group in `roles`; `""` rejects them.'),
    ConfigKey("roles", _GROUPS, "", "Role -> groups with this role."),
    ConfigKey("rights", _GROUPS, "", "Right -> groups with this right."),
    ConfigKey("leeway_s", {"type": "number", "minimum": 0, "maximum": 300}, "`30`", "Accepted clock difference in s."),
    ConfigKey(
        "stream_hours",
        {"type": "number", "minimum": 0, "maximum": 720},
        "`24`",
        "A lease that began with a valid token may continue for this time after the token's end, in hours.",
    ),
)
_WEBHOOK = (
    ConfigKey("url", _TEXT, "", "Address of the receiver. Required, unless `url_env` is set."),
    ConfigKey("url_env", _TEXT, "", "Environment variable of the gateway with the address."),
    ConfigKey("secret", _TEXT, "", "Secret for the signature of messages."),
    ConfigKey("secret_env", _TEXT, "", "Environment variable of the gateway with the secret."),
    ConfigKey("format", {"type": "string", "enum": [one.value for one in MessageFormat]}, "`json`", "Message format."),
    ConfigKey("events", _TEXTS, "all", f"List of events: {', '.join(f'`{one}`' for one in EVENTS)}."),
    ConfigKey("failed_only", {"type": "boolean"}, "`false`", "Leave out jobs that passed."),
)


def _require_positive(keys: Iterable[ConfigKey], whole: Collection[str] = ()) -> tuple[ConfigKey, ...]:
    kinds = {True: {"type": "integer"}, False: {}}
    return tuple(replace(one, schema={**one.schema, **kinds[one.name in whole], "exclusiveMinimum": 0}) for one in keys)


CONFIG_FILES: Mapping[str, ConfigFile] = {
    "project": ConfigFile("hil.toml", "Project file; docs/project-file.md explains it.", list_project_tables),
    "board": ConfigFile("Board config", "Board config; docs/board-configs.md explains it.", list_board_tables),
    "farm": ConfigFile("farm.toml", "Settings of a farm; docs/farm-operation.md explains them.", _list_farm_tables),
}
