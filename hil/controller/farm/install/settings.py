"""Settings of `hil farm install`, and their checks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hil.errors import UsageError
from hil.protocol.listening import check_listen, check_tls_files, is_local, parse_host_port

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


class InstallPart(str, Enum):
    """Group of files, and name of their directory."""

    SYSTEMD = "systemd"
    CONTAINERS = "containers"
    MONITORING = "monitoring"


class InstallService(str, Enum):
    """Service of a farm."""

    GATEWAY = "gateway"
    HOST = "host"
    WEB = "web"


@dataclass(frozen=True)
class InstallSettings:
    """Settings of an installation. Each field corresponds to the option of the same name."""

    command: tuple[str, ...]  # program and arguments that run hil
    services: tuple[InstallService, ...] = ()  # services of this machine; empty for all
    user: str = "hil"
    home: Path = Path("/var/lib/hil/farm")
    listen: str = ""  # address for other machines; "" for none
    # PEM files for ``listen``, and for ``web`` if other machines can reach the pages.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    metrics: str = "127.0.0.1:9107"
    web: str = "127.0.0.1:8790"
    gateway: str = ""  # address that the host and the pages use; "" for the farm of the same machine
    tls_ca: Path | None = None
    db: str = ""  # PostgreSQL URL; "" for the embedded database
    artifacts: str = ""
    site: str = ""
    boards: tuple[str, ...] = ()
    sims: int = 0
    allow_commands: bool = False  # True if the host runs commands of users
    backups: Path | None = None  # directory for daily backups; None for no backups

    def __post_init__(self) -> None:
        for name in ("db", "artifacts", "site", "gateway"):
            if not getattr(self, name).isprintable():
                raise UsageError(f"--{name} contains an unprintable character")
        if not _USER.fullmatch(self.user):
            raise UsageError(f"invalid --user {self.user!r}", hint="use the name of a system user, such as hil")
        for option, path in self._list_paths().items():
            if path is not None and not (path.is_absolute() and str(path).isprintable()):
                raise UsageError(f"{option} must be an absolute path, got {str(path)!r}")
        if self.gateway and (self.listen or self.db or self.backups):
            raise UsageError(
                "--gateway excludes --listen, --db and --backups: this machine then runs no gateway",
                hint="use these options on the gateway's machine",
            )
        if self.gateway and InstallService.GATEWAY in self.services:
            raise UsageError("--gateway excludes --service gateway: the gateway is on another machine")
        if self.backups and not self.has(InstallService.GATEWAY):
            raise UsageError("--backups needs the gateway", hint="add --service gateway, or leave out --backups")
        for option, words in (("--board", self.boards), ("--command", self.command)):
            if not all(one.isprintable() for one in words):
                raise UsageError(f"{option} contains an unprintable character")
        self._check_addresses()

    def has(self, service: InstallService) -> bool:
        """Return True if this machine runs a service."""
        if service is InstallService.GATEWAY and self.gateway:
            return False
        return not self.services or service in self.services

    @property
    def web_address(self) -> tuple[str, int]:
        """Address of the web pages."""
        return parse_host_port(self.web, what="address", hint="--web HOST:PORT")

    @property
    def metrics_address(self) -> tuple[str, int]:
        """Address of the metrics."""
        return parse_host_port(self.metrics, what="address", hint="--metrics HOST:PORT")

    @property
    def runs(self) -> Path:
        """Directory of stored results for the web pages."""
        return self.home / "runs"

    @property
    def has_web_tls(self) -> bool:
        """Whether the pages use HTTPS."""
        return bool(self.tls_cert and self.tls_key) and not is_local(self.web)

    @property
    def ca(self) -> Path | None:
        """CA certificate of the gateway, for hosts and pages. A self-signed certificate is its own CA."""
        return self.tls_ca or (None if self.gateway else self.tls_cert)

    def _list_paths(self) -> dict[str, Path | None]:
        certificates = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-ca": self.tls_ca}
        return {"--home": self.home, "--backups": self.backups, **certificates}

    def _check_addresses(self) -> None:
        for address in (self.web_address, self.metrics_address):
            if not address[1]:
                raise UsageError("port 0 is not allowed here: other programs need a fixed port")
        remote = [one for one in (self.listen, "" if is_local(self.web) else self.web) if one]
        check_tls_files(cert=self.tls_cert, key=self.tls_key, ca_needs_cert=True, listens=remote or ["unix:"])
        if self.listen:
            protected = bool(self.tls_cert and self.tls_key)
            check_listen(self.listen, protected=protected, needs="TLS", hint="set --tls-cert and --tls-key")
        if self.gateway:
            parse_host_port(self.gateway, what="gateway address", hint="--gateway HOST:PORT")
