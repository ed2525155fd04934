"""Container image and compose file of a farm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from hil.controller.farm.install.settings import InstallService, InstallSettings
from hil.controller.farm.install.units import (
    list_gateway_words,
    list_host_words,
    list_web_words,
    make_client_environment,
    make_gateway_environment,
    make_web_token,
)
from hil.core import own_version
from hil.core.boards import BOARDS_FOLDER, is_file
from hil.protocol.listening import parse_host_port

# Directories in the containers: data, named boards, and directories of config files.
_DATA, _BOARDS, _CONFIGS = PurePosixPath("/var/lib/hil"), PurePosixPath("/boards"), PurePosixPath("/configs")
_CERT, _KEY, _CA = (Path("/certificates", name) for name in ("cert.pem", "key.pem", "ca.pem"))
_SOURCE = "0+source"
# Extras of hil in the image.
_EXTRAS = "[farm,web,sim]"
_README = "Configs of named boards (NAME.toml) for the container `host`. All users must be able to read them.\n"


def make_containers(settings: InstallSettings) -> dict[str, str]:
    """Return file name -> content of the image's and the compose file, and their environment files."""
    inside = _move_inside(settings)
    return {
        "Containerfile": _make_containerfile(),
        # The image must not contain the environment files, which have tokens.
        ".dockerignore": "*\n!*.whl\n",
        "compose.yaml": _make_compose(settings, inside),
        **_make_environments(settings, inside),
        **({f"{BOARDS_FOLDER}/README": _README} if _mounts_configs(settings) else {}),
    }


def _make_environments(settings: InstallSettings, inside: InstallSettings) -> dict[str, str]:
    ca = _CA if settings.ca else None
    files = {}
    if settings.has(InstallService.GATEWAY):
        files["farm.env"] = make_gateway_environment(settings)
    if settings.has(InstallService.HOST):
        files["host.env"] = make_client_environment(settings, "host", ca)
    if settings.has(InstallService.WEB):
        files["web.env"] = make_client_environment(settings, "viewer", ca) + make_web_token(inside.web)
    return files


def _move_inside(settings: InstallSettings) -> InstallSettings:
    """Return the settings with the paths and addresses inside the containers."""
    listen = f"0.0.0.0:{parse_host_port(settings.listen)[1]}" if settings.listen and settings.tls_cert else ""
    return replace(
        settings,
        home=Path(_DATA / "farm"),
        listen=listen,
        tls_cert=_CERT if settings.tls_cert else None,
        tls_key=_KEY if settings.tls_key else None,
        metrics=f"0.0.0.0:{settings.metrics_address[1]}",
        web=f"0.0.0.0:{settings.web_address[1]}",
        boards=tuple(
            str(_place_configs(settings)[PurePosixPath(board).parent] / PurePosixPath(board).name)
            if is_file(board)
            else board
            for board in settings.boards
        ),
    )


def _place_configs(settings: InstallSettings) -> dict[PurePosixPath, PurePosixPath]:
    """Return directory of config files -> directory in the container."""
    folders = dict.fromkeys(PurePosixPath(board).parent for board in settings.boards if is_file(board))
    return {folder: _CONFIGS / str(number) for number, folder in enumerate(folders, start=1)}


def name_wheel() -> str:
    """Return the pip requirement for a wheel of this version of hil in the directory of the Containerfile."""
    return f"./hil-{own_version()}-py3-none-any.whl{_EXTRAS}"


def _mounts_configs(settings: InstallSettings) -> bool:
    """Return True if the host's container reads the configs of named boards."""
    has_names = not all(map(is_file, settings.boards)) or not settings.boards
    return has_names and settings.has(InstallService.HOST)


def _make_containerfile() -> str:
    version = own_version()
    pinned = "" if version == _SOURCE else f"=={version}"
    return f"""# Image of a farm: gateway, host and pages.
FROM docker.io/library/python:3.12-slim
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends openssh-client \\
    && rm -rf /var/lib/apt/lists/*
# HIL may also be the path of a wheel in this directory: --build-arg HIL={name_wheel()}
ARG HIL=hil{_EXTRAS}{pinned}
COPY . /build/
RUN cd /build && pip install --no-cache-dir "$HIL" && rm -rf /build
RUN useradd --system --create-home --uid 10001 hil && install --directory --owner hil {_DATA}
USER hil
WORKDIR {_DATA}
ENV HIL_FARM_HOME={_DATA}/farm HIL_BOARDS={_BOARDS}
VOLUME {_DATA}
ENTRYPOINT ["hil"]
"""


def _make_compose(settings: InstallSettings, inside: InstallSettings) -> str:
    data = f"farm:{_DATA}"
    # Only servers may read the private key.
    keys = {settings.tls_cert: _CERT, settings.tls_key: _KEY} if inside.tls_cert else {}
    certificates = [f"{outside}:{target}:ro" for outside, target in keys.items()]
    has_web_tls = settings.has_web_tls
    shared = [data, *([f"{settings.ca}:{_CA}:ro"] if settings.ca else [])]
    boards = [f"{folder}:{target}:ro" for folder, target in _place_configs(settings).items()]
    if _mounts_configs(settings):
        boards.append(f"./{BOARDS_FOLDER}:{_BOARDS}:ro")
    local = settings.has(InstallService.GATEWAY)
    metrics_host, metrics_port = settings.metrics_address
    web_host, web_port = settings.web_address
    published = [_publish(settings.listen, inside.listen)] if inside.listen else []
    services = {
        InstallService.GATEWAY: _make_service(
            "gateway",
            list_gateway_words(inside),
            "farm.env",
            [data, *(certificates if inside.listen else [])],
            ports=[*published, f"{_bracket(metrics_host)}{metrics_port}:{metrics_port}"],
            more=_HEALTH,
        ),
        InstallService.HOST: _make_service(
            "host", list_host_words(inside), "host.env", [*shared, *boards], more=_SHARED_MEMORY, waits=local
        ),
        InstallService.WEB: _make_service(
            "web",
            list_web_words(inside, str(_DATA), has_tls=has_web_tls),
            "web.env",
            [*shared, *(certificates if has_web_tls else [])],
            ports=[f"{_bracket(web_host)}{web_port}:{web_port}"],
            waits=local,
        ),
    }
    chosen = [text for service, text in services.items() if settings.has(service)]
    return "services:\n" + "".join(chosen) + "volumes:\n  farm: {}\n"


# The gateway's answer also shows that the database responds.
_HEALTH = """    healthcheck:
      test: ["CMD", "hil", "farm", "boards", "--json"]
      interval: 30s
      timeout: 20s
      start_period: 60s
    stop_grace_period: 2m
"""
# Tensors pass between the agent and its workers in shared memory.
_SHARED_MEMORY = """    shm_size: 1gb
    stop_grace_period: 1m
"""


def _make_service(
    name: str,
    words: Sequence[str],
    environment: str,
    volumes: Iterable[str],
    *,
    ports: Iterable[str] = (),
    more: str = "",
    waits: bool = False,
) -> str:
    return (
        f"  {name}:\n    build:\n      context: .\n      dockerfile: Containerfile\n"
        f"    image: localhost/hil-farm\n    init: true\n    restart: unless-stopped\n"
        f"    command: [{', '.join(map(_quote, words))}]\n    env_file: {environment}\n"
        f"{_make_list('volumes', volumes)}{_make_list('ports', ports)}{more}{_WAITS if waits else ''}"
    )


_WAITS = """    depends_on:
      gateway:
        condition: service_healthy
"""


def _make_list(name: str, items: Iterable[str]) -> str:
    lines = [f"      - {_quote(item)}\n" for item in items]
    return f"    {name}:\n{''.join(lines)}" if lines else ""


def _publish(outside: str, inside: str) -> str:
    host, port = parse_host_port(outside)
    return f"{_bracket(host)}{port}:{parse_host_port(inside)[1]}"


def _bracket(host: str) -> str:
    """Return the host part of a published port."""
    return f"[{host}]:" if ":" in host else f"{host}:" if host else ""


def _quote(text: str) -> str:
    """Return a YAML string for a compose file, in which `$` has a meaning."""
    return json.dumps(text.replace("$", "$$"))
