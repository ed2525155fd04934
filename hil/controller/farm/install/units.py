"""systemd units of a farm: gateway, host, pages and a daily backup."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from hil.controller.farm.install.settings import InstallService, InstallSettings
from hil.protocol.listening import is_local

# Directory of the environment files, which contain secrets.
ENVIRONMENT = Path("/etc/hil")
UNITS = {
    InstallService.GATEWAY: "hil-farm-gateway.service",
    InstallService.HOST: "hil-farm-host.service",
    InstallService.WEB: "hil-web.service",
}
_PLAIN = re.compile(r"[\w@%+=:,./-]+")
_HARDENING = """NoNewPrivileges=yes
ProtectSystem=full
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
LockPersonality=yes"""


def make_units(settings: InstallSettings) -> dict[str, str]:
    """Return file name -> content of the units and their environment files."""
    units = {}
    if settings.has(InstallService.GATEWAY):
        units[UNITS[InstallService.GATEWAY]] = _make_gateway_unit(settings)
        units["farm.env"] = make_gateway_environment(settings)
    if settings.has(InstallService.HOST):
        units[UNITS[InstallService.HOST]] = _make_host_unit(settings)
        units["host.env"] = make_client_environment(settings, "host", settings.ca)
    if settings.has(InstallService.WEB):
        units[UNITS[InstallService.WEB]] = _make_web_unit(settings)
        units["web.env"] = make_client_environment(settings, "viewer", settings.ca) + make_web_token(settings.web)
    if settings.backups:
        units["hil-farm-backup.service"] = _make_backup_unit(settings)
        units["hil-farm-backup.timer"] = _BACKUP_TIMER
    return units


def make_gateway_environment(settings: InstallSettings) -> str:
    """Return the environment file of the gateway."""
    database = f"HIL_FARM_DB={_quote_value(settings.db)}" if settings.db else "#HIL_FARM_DB=postgresql://USER@HOST/DB"
    artifacts = (
        f"HIL_FARM_ARTIFACTS={_quote_value(settings.artifacts)}"
        if settings.artifacts
        else "#HIL_FARM_ARTIFACTS=s3://BUCKET/PREFIX"
    )
    return (
        "# Database of the farm. Without it, hil runs PostgreSQL in HIL_FARM_HOME.\n"
        f"{database}\n"
        "# Storage of files. The default is a directory in HIL_FARM_HOME.\n"
        f"{artifacts}\n"
    )


def make_client_environment(settings: InstallSettings, role: str, ca: Path | None) -> str:
    """Return the environment file of a service that connects to a gateway.

    Args:
        role: role of the service's token.
        ca: path of the gateway's CA certificate for this service.
    """
    token = f"# An admin creates the token: hil farm token add NAME --role {role}\n"
    if not settings.gateway:
        return (
            "# Without HIL_FARM, the service uses the farm of this machine.\n"
            f"#HIL_FARM=HOST:7070\n#HIL_FARM_CA={ca or '/etc/hil/farm.pem'}\n{token}#HIL_FARM_TOKEN=\n"
        )
    lines = [f"HIL_FARM={_quote_value(settings.gateway)}\n"]
    lines += [f"HIL_FARM_CA={_quote_value(str(ca))}\n"] if ca else []
    return "".join([*lines, token, "HIL_FARM_TOKEN=\n"])


def make_web_token(address: str) -> str:
    """Return the setting of the pages' token: a new token if other machines can reach the address of the pages."""
    if is_local(address):
        return (
            "# Token for the pages, at least 16 characters. Without it, the pages can only be read on this machine.\n"
            "#HIL_WEB_TOKEN=\n"
        )
    return f"# Token for the pages, at least 16 characters.\nHIL_WEB_TOKEN={secrets.token_urlsafe(24)}\n"


def list_gateway_words(settings: InstallSettings) -> list[str]:
    """Return the arguments of `hil` that run the gateway, and the embedded database if there is no other."""
    files = {"--tls-cert": settings.tls_cert, "--tls-key": settings.tls_key} if settings.listen else {}
    given = {"--listen": settings.listen, "--metrics": settings.metrics}
    given |= {option: str(path) for option, path in files.items() if path}
    return ["farm", "up", *(word for option, value in given.items() if value for word in (option, value))]


def list_host_words(settings: InstallSettings) -> list[str]:
    """Return the arguments of `hil` that serve the boards."""
    words = ["farm", "host", *(["--site", settings.site] if settings.site else [])]
    words += ["--allow-commands"] if settings.allow_commands else []
    words += [word for board in settings.boards for word in ("--board", board)]
    return words + (["--sim", str(settings.sims)] if settings.sims else [])


def list_web_words(settings: InstallSettings, runs: str, *, has_tls: bool) -> list[str]:
    """Return the arguments of `hil` that serve the pages."""
    host, port = settings.web_address
    words = ["web", "--farm", settings.gateway or "local", "--host", host, "--port", str(port), "--runs", runs]
    if has_tls:
        words += ["--tls-cert", str(settings.tls_cert), "--tls-key", str(settings.tls_key)]
    return words


def _make_gateway_unit(settings: InstallSettings) -> str:
    # The farm stops its host, gateway and database in this order, so signal only the main process.
    return _make_service(
        settings,
        "hil farm: gateway and database",
        list_gateway_words(settings),
        "farm.env",
        more="KillMode=mixed\nTimeoutStopSec=120\n",
    )


def _make_host_unit(settings: InstallSettings) -> str:
    return _make_service(
        settings,
        "hil farm: boards of this machine",
        list_host_words(settings),
        "host.env",
        after=[UNITS[InstallService.GATEWAY]],
        more="KillMode=mixed\nTimeoutStopSec=60\n",
    )


def _make_web_unit(settings: InstallSettings) -> str:
    words = list_web_words(settings, str(settings.runs), has_tls=settings.has_web_tls)
    return _make_service(
        settings,
        "hil: pages of the farm and of stored results",
        words,
        "web.env",
        after=[UNITS[InstallService.GATEWAY]],
    )


def _make_backup_unit(settings: InstallSettings) -> str:
    command = " ".join(map(shlex.quote, settings.command))
    script = f'exec {command} farm backup --force {shlex.quote(str(settings.backups))}/"farm-$(date +%F).tar"'
    return (
        "[Unit]\nDescription=hil farm: daily backup\n\n"
        f"[Service]\nType=oneshot\nUser={settings.user}\nUMask=0077\n"
        f"Environment={_quote_assignment('HIL_FARM_HOME', str(settings.home))}\n"
        f"EnvironmentFile=-{ENVIRONMENT}/farm.env\n"
        f"ExecStart=/bin/sh -c {_quote_word(script)}\n{_HARDENING}\n"
    )


_BACKUP_TIMER = """[Unit]
Description=hil farm: daily backup

[Timer]
OnCalendar=daily
RandomizedDelaySec=30min
Persistent=yes

[Install]
WantedBy=timers.target
"""


def _make_service(
    settings: InstallSettings,
    description: str,
    words: Sequence[str],
    environment: str,
    *,
    after: Iterable[str] = (),
    more: str = "",
) -> str:
    return (
        f"[Unit]\nDescription={description}\nWants=network-online.target\n"
        f"After={' '.join(['network-online.target', *after])}\n\n"
        f"[Service]\nType=exec\nUser={settings.user}\nUMask=0077\n"
        f"Environment={_quote_assignment('HIL_FARM_HOME', str(settings.home))}\n"
        f"EnvironmentFile=-{ENVIRONMENT}/{environment}\n"
        f"WorkingDirectory={_escape_specifiers(str(settings.home))}\n"
        f"ExecStart={' '.join(map(_quote_word, (*settings.command, *words)))}\n"
        f"Restart=always\nRestartSec=5\n{more}{_HARDENING}\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def _escape_specifiers(text: str) -> str:
    return text.replace("%", "%%")


def _quote_word(word: str) -> str:
    """Return a word for a command line of a unit, in which `$` and `%` have a meaning."""
    return _quote(_escape_specifiers(word).replace("$", "$$"))


def _quote_assignment(name: str, value: str) -> str:
    """Return an assignment for ``Environment=``, in which only `%` has a meaning."""
    return _quote(_escape_specifiers(f"{name}={value}"))


def _quote(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quote_value(value: str) -> str:
    """Return a value for an environment file."""
    if _PLAIN.fullmatch(value):
        return value
    return '"' + re.sub(r'([\\"$`])', r"\\\1", value) + '"'
