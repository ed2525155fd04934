"""Test the files of `hil farm install`: systemd units, containers and monitoring."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from support.schemas import check_document

pytest.importorskip("prometheus_client", reason="needs the extra `farm`")

import prometheus_client as prometheus
from support.fake_farm_client import board, parsed

from hil.controller.cli.farm.farm import farm
from hil.controller.cli.farm.serve import host, up
from hil.controller.cli.stored.web import web
from hil.controller.farm.gateway.metrics import FarmSnapshot, Metrics, _FarmCollector
from hil.controller.farm.install.containers import make_containers
from hil.controller.farm.install.monitoring import make_monitoring
from hil.controller.farm.install.settings import InstallService, InstallSettings
from hil.controller.farm.install.units import make_units
from hil.controller.farm.install.writer import list_unreadable
from hil.controller.records.lab.farm import FarmStats, QueuePercentiles
from hil.errors import UsageError

COMMANDS = {"up": up, "host": host, "web": web}
SIMPLE = InstallSettings(command=("/usr/bin/hil",))


@pytest.fixture
def full(tmp_path: Path) -> InstallSettings:
    for name in ("farm.pem", "farm.key"):
        (tmp_path / name).touch()
    return InstallSettings(
        command=(sys.executable, "-m", "hil"),
        user="root",
        home=tmp_path / "farm home",
        listen="0.0.0.0:7070",
        tls_cert=tmp_path / "farm.pem",
        tls_key=tmp_path / "farm.key",
        db='postgresql://hil:pa$s%w"ord@db/hil',
        artifacts="s3://bucket/prefix",
        site="lab $1 50%",
        boards=("rpi5", "/etc/hil/boards/jetson.toml"),
        sims=2,
        backups=tmp_path / "backups",
    )


def parse_words(words: list[str]) -> dict[str, Any]:
    """Parse the arguments of `hil` with the real command, and return its parameters."""
    command = COMMANDS[words[1] if words[0] == "farm" else words[0]]
    rest = words[2:] if words[0] == "farm" else words[1:]
    return command.make_context("x", rest).params


def read_start(unit: str) -> list[str]:
    [line] = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    return [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(line)]


def test_units_run_commands_that_exist(full: InstallSettings) -> None:
    units = make_units(full)
    words = {name: read_start(text) for name, text in units.items() if name.endswith(".service")}
    gateway = parse_words(words["hil-farm-gateway.service"][3:])
    assert gateway["listen"] == "0.0.0.0:7070" and gateway["metrics"] == "127.0.0.1:9107"
    assert (gateway["tls_cert"], gateway["tls_key"]) == (full.tls_cert, full.tls_key)
    served = parse_words(words["hil-farm-host.service"][3:])
    assert (served["site"], served["boards"], served["sims"]) == (full.site, full.boards, 2)
    assert parse_words(words["hil-web.service"][3:])["port"] == 8790
    assert words["hil-farm-backup.service"][:2] == ["/bin/sh", "-c"]
    assert "farm backup --force" in words["hil-farm-backup.service"][2]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("which", ["simple", "full"])
def test_systemd_accepts_units(full: InstallSettings, tmp_path: Path, which: str) -> None:
    settings = full if which == "full" else replace(SIMPLE, command=(sys.executable, "-m", "hil"), user="root")
    for folder in (settings.home.parent, tmp_path / "units"):
        folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in make_units(settings).items():
        paths.append(tmp_path / "units" / name)
        paths[-1].write_text(text)
    units = [str(path) for path in paths if path.suffix != ".env"]
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "hil-" in line]
    assert ours == []


def test_backup_unit_writes_to_directory_with_special_characters(tmp_path: Path) -> None:
    folder, calls = tmp_path / "it's $HOME $(id) 100%", tmp_path / "calls"
    settings = replace(SIMPLE, command=("/bin/sh", "-c", f'printf %s "$4" > {calls}', "hil"), backups=folder)
    shell = read_start(make_units(settings)["hil-farm-backup.service"])
    subprocess.run(shell, check=True, timeout=60)
    assert re.fullmatch(re.escape(f"{folder}/farm-") + r"\d{4}-\d\d-\d\d\.tar", calls.read_text())


def test_home_in_environment_of_units_is_not_expanded() -> None:
    unit = make_units(replace(SIMPLE, home=Path("/srv/a $b 5%")))["hil-farm-gateway.service"]
    assert 'Environment="HIL_FARM_HOME=/srv/a $b 5%%"\n' in unit


def test_environment_files_contain_database_and_gateway(full: InstallSettings) -> None:
    units = make_units(full)
    assert 'HIL_FARM_DB="postgresql://hil:pa\\$s%w\\"ord@db/hil"' in units["farm.env"]
    assert "HIL_FARM_ARTIFACTS=s3://bucket/prefix" in units["farm.env"]
    assert "\nHIL_FARM=" not in units["host.env"]
    remote = make_units(replace(SIMPLE, gateway="lab:7070", tls_ca=Path("/etc/hil/ca.pem")))
    assert "HIL_FARM=lab:7070\nHIL_FARM_CA=/etc/hil/ca.pem\n" in remote["host.env"]
    assert parse_words(read_start(remote["hil-web.service"])[1:])["farm"] == "lab:7070"
    assert not {"hil-farm-gateway.service", "farm.env"} & remote.keys()


def test_compose_file_runs_commands_that_exist(full: InstallSettings) -> None:
    files = make_containers(full)
    services = yaml.safe_load(files["compose.yaml"])["services"]
    assert list(services) == ["gateway", "host", "web"]
    for name, service in services.items():
        words = [word.replace("$$", "$") for word in service["command"]]
        mounted = {inside: outside for outside, inside, *_ in (one.split(":") for one in service["volumes"])}
        assert parse_words([mounted.get(word, word) for word in words]), name
        assert service["env_file"] in files
    assert services["gateway"]["ports"] == ["0.0.0.0:7070:7070", "127.0.0.1:9107:9107"]
    assert services["web"]["ports"] == ["127.0.0.1:8790:8790"]
    assert services["host"]["depends_on"]["gateway"]["condition"] == "service_healthy"
    assert {"/etc/hil/boards:/configs/1:ro", "./board_configs:/boards:ro"} < set(services["host"]["volumes"])
    assert services["host"]["command"][-5:] == ["rpi5", "--board", "/configs/1/jetson.toml", "--sim", "2"]
    assert "HIL_BOARDS=/boards" in files["Containerfile"]


def test_containers_have_all_directories_of_board_configs() -> None:
    settings = replace(SIMPLE, boards=("/a/pi.toml", "/b/pi.toml", "/a/pi2.toml"))
    host = yaml.safe_load(make_containers(settings)["compose.yaml"])["services"]["host"]
    assert host["volumes"] == ["farm:/var/lib/hil", "/a:/configs/1:ro", "/b:/configs/2:ro"]
    assert [word for word in host["command"] if word.endswith(".toml")] == [
        *("/configs/1/pi.toml", "/configs/2/pi.toml", "/configs/1/pi2.toml")
    ]


def test_only_gateway_container_has_private_key(full: InstallSettings, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    key = tmp_path / "private" / "farm.pem"
    key.touch()
    services = yaml.safe_load(make_containers(replace(full, tls_key=key))["compose.yaml"])["services"]
    assert f"{key}:/certificates/key.pem:ro" in services["gateway"]["volumes"]
    assert f"{tmp_path / 'farm.pem'}:/certificates/cert.pem:ro" in services["gateway"]["volumes"]
    for name in ("host", "web"):
        mounts = [one for one in services[name]["volumes"] if "/certificates" in one]
        assert mounts == [f"{tmp_path / 'farm.pem'}:/certificates/ca.pem:ro"]


def test_pages_for_other_machines_use_tls(full: InstallSettings) -> None:
    shown = replace(full, web="0.0.0.0:8790")
    pages = parse_words(read_start(make_units(shown)["hil-web.service"])[3:])
    assert (pages["tls_cert"], pages["tls_key"]) == (full.tls_cert, full.tls_key)
    assert parse_words(read_start(make_units(full)["hil-web.service"])[3:])["tls_cert"] is None
    services = yaml.safe_load(make_containers(shown)["compose.yaml"])["services"]
    assert services["web"]["command"][-4:] == [
        "--tls-cert",
        "/certificates/cert.pem",
        "--tls-key",
        "/certificates/key.pem",
    ]
    assert f"{full.tls_key}:/certificates/key.pem:ro" in services["web"]["volumes"]


def test_certificate_of_remote_pages_is_no_ca_of_gateway(full: InstallSettings) -> None:
    tls = {"tls_cert": full.tls_cert, "tls_key": full.tls_key}
    pages = InstallSettings(command=full.command, gateway="lab:7070", web="0.0.0.0:8790", **tls)
    units = make_units(pages)
    assert "HIL_FARM_CA" not in units["host.env"]
    assert parse_words(read_start(units["hil-web.service"])[3:])["tls_cert"] == full.tls_cert
    with pytest.raises(UsageError, match="TLS is not supported on Unix sockets"):
        replace(pages, web="127.0.0.1:8790")


@pytest.mark.parametrize(
    ("service", "units", "containers"),
    [
        ("gateway", {"hil-farm-gateway.service", "farm.env"}, ["gateway"]),
        ("host", {"hil-farm-host.service", "host.env"}, ["host"]),
        ("web", {"hil-web.service", "web.env"}, ["web"]),
    ],
)
def test_machine_has_only_chosen_service(service: str, units: set[str], containers: list[str]) -> None:
    settings = replace(SIMPLE, services=(InstallService(service),))
    assert set(make_units(settings)) == units
    files = make_containers(settings)
    assert list(yaml.safe_load(files["compose.yaml"])["services"]) == containers
    assert [name for name in files if name.endswith(".env")] == [name for name in units if name.endswith(".env")]
    assert ("board_configs/README" in files) == (service == "host")


def test_image_excludes_environment_files(full: InstallSettings) -> None:
    files = make_containers(full)
    assert files[".dockerignore"].splitlines()[0] == "*"
    steps = [line.split()[0] for line in files["Containerfile"].splitlines() if re.match(r"[A-Z]+ ", line)]
    assert steps == ["FROM", "RUN", "ARG", "COPY", "RUN", "RUN", "USER", "WORKDIR", "ENV", "VOLUME", "ENTRYPOINT"]


def test_containers_of_remote_host_have_no_gateway() -> None:
    services = yaml.safe_load(make_containers(replace(SIMPLE, gateway="lab:7070"))["compose.yaml"])["services"]
    assert list(services) == ["host", "web"]
    assert "depends_on" not in services["host"]


def list_exported_metrics() -> set[str]:
    """Return the names of all time series that a gateway exports."""
    stats = FarmStats(
        jobs={"queued": 0}, boards={"online": 1}, queue={"low": 0}, waiting_s=QueuePercentiles(p50=0, p95=0), users=[]
    )
    metrics = Metrics()
    metrics.count_call("Farm.Submit", "OK", 0.1)
    metrics.count_call("Farm.Submit", "UNAVAILABLE", 0.1)
    metrics.count_grant("run", "normal", 0.1)
    metrics.count_result("pi", "PASS", is_final=True)

    async def read() -> FarmSnapshot:
        return FarmSnapshot(stats, parsed("boards", [board("pi")]), {"normal": 0.0}, datetime.now(timezone.utc))

    async def export() -> str:
        metrics.registry.register(_FarmCollector(asyncio.get_running_loop(), read))
        return (await asyncio.to_thread(prometheus.generate_latest, metrics.registry)).decode()

    text = asyncio.run(export())
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


def list_labels(expression: str) -> set[str]:
    return set(re.findall(r"hil_farm_\w+", expression))


def test_monitoring_uses_only_exported_metrics() -> None:
    files, exported = make_monitoring(SIMPLE), list_exported_metrics()
    rules = yaml.safe_load(files["alerts.yaml"])["groups"][0]["rules"]
    dashboard = json.loads(files["grafana-dashboard.json"])
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in list_labels(expression)}
    assert used - exported == set()
    shown = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in used}
    missing = {name for name in exported if name.startswith("hil_farm_") and not name.endswith("_created")}
    # The dashboard or the alerts show every metric.
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in missing} - shown == set()


def test_alerts_have_severity_summary_and_duration() -> None:
    rules = yaml.safe_load(make_monitoring(SIMPLE)["alerts.yaml"])["groups"][0]["rules"]
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and re.fullmatch(r"\d+m", rule["for"])
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 6


def test_scrape_config_names_metrics_address() -> None:
    config = yaml.safe_load(make_monitoring(replace(SIMPLE, metrics="lab:9999"))["prometheus.yaml"])
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["lab:9999"]}]
    assert config["rule_files"] == ["alerts.yaml"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"user": "no user"}, "invalid --user"),
        ({"home": Path("relative")}, "--home must be an absolute path"),
        ({"backups": Path("backups")}, "--backups must be an absolute path"),
        ({"listen": "0.0.0.0:7070"}, "needs TLS"),
        ({"listen": "7070"}, "invalid listen address"),
        ({"metrics": "127.0.0.1:0"}, "port 0"),
        ({"web": "localhost"}, "invalid address"),
        ({"gateway": "lab"}, "invalid gateway address"),
        ({"gateway": "lab:1", "db": "postgresql://x"}, "--gateway excludes"),
        ({"tls_cert": Path("/c.pem"), "listen": "0.0.0.0:1"}, "without a key"),
        ({"site": "a\nb"}, "unprintable"),
        ({"gateway": "lab:1", "services": (InstallService.GATEWAY,)}, "--gateway excludes --service gateway"),
        ({"backups": Path("/b"), "services": (InstallService.HOST,)}, "--backups needs the gateway"),
        ({"boards": ("a\nExecStart=x",)}, "unprintable"),
        ({"command": ("a\nExecStart=x",)}, "unprintable"),
    ],
)
def test_settings_reject_invalid_values(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        InstallSettings(**{"command": ("hil",), **given})


@pytest.fixture
def run() -> Callable[..., Any]:
    return lambda *words: CliRunner().invoke(farm, ["install", *map(str, words)])


def test_install_writes_all_parts_and_keeps_secrets_private(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("--out", tmp_path / "new", "--sim", 2, "--json")
    document = json.loads(done.stdout)
    check_document(document, "farm install", "farm")
    assert {Path(one).relative_to(tmp_path / "new").parts[0] for one in document["files"]} == {
        "systemd",
        "containers",
        "monitoring",
    }
    for name in document["files"]:
        mode = stat.S_IMODE(Path(name).stat().st_mode)
        assert mode & 0o077 == (0 if name.endswith(".env") else mode & 0o044), name
    assert any("systemctl enable --now hil-farm-gateway.service" in one for one in document["commands"])


def test_install_never_replaces_files_without_force(run: Callable[..., Any], tmp_path: Path) -> None:
    assert run("--out", tmp_path, "--only", "systemd").exit_code == 0
    unit = tmp_path / "systemd" / "hil-farm-host.service"
    unit.write_text("mine")
    (tmp_path / "systemd" / "hil-farm-gateway.service").unlink()
    again = run("--out", tmp_path)
    assert isinstance(again.exception, UsageError) and "already exists" in str(again.exception)
    assert unit.read_text() == "mine" and not (tmp_path / "monitoring").exists()
    assert run("--out", tmp_path, "--force").exit_code == 0
    assert "ExecStart" in unit.read_text()


def test_pages_for_other_machines_have_new_token(full: InstallSettings) -> None:
    def find_token(text: str) -> list[str]:
        return re.findall(r"^HIL_WEB_TOKEN=(.*)$", text, re.M)

    assert find_token(make_units(full)["web.env"]) == []
    (first,), (second,) = (find_token(make_containers(full)["web.env"]) for _ in range(2))
    assert len(first) >= 16 and first != second
    assert find_token(make_units(replace(full, web="0.0.0.0:8790"))["web.env"])


def test_install_creates_mounted_directory_of_configs(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("--out", tmp_path / "new", "--only", "containers", "--board", "rpi5")
    assert (tmp_path / "new/containers/board_configs/README").is_file()
    assert f"put the configs of boards in {tmp_path}/new/containers/board_configs" in done.stdout
    run("--out", tmp_path / "files", "--only", "containers", "--board", "/etc/hil/pi.toml")
    assert not (tmp_path / "files/containers/board_configs").exists()


def test_install_reports_command_that_service_user_cannot_read(run: Callable[..., Any], tmp_path: Path) -> None:
    program = tmp_path / "venv" / "hil"
    program.parent.mkdir(mode=0o700)
    program.touch(0o755)
    words = ["--out", tmp_path / "new", "--only", "systemd", "--command", program]
    assert "is not readable for hil: install hil elsewhere" in run(*words, "--dry-run").stdout
    assert f"sudo -u hil {program} --version" in run(*words, "--dry-run").stdout
    assert "is not readable" not in run(*words, "--user", "root", "--dry-run").stdout
    assert list_unreadable(["/bin/sh"]) == [] == list_unreadable(["hil"])


def test_install_dry_run_writes_nothing(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("--out", tmp_path / "new", "--dry-run")
    assert done.exit_code == 0 and f"would write {tmp_path}/new/systemd/hil-web.service" in done.stdout
    assert not (tmp_path / "new").exists()


def test_install_commands_change_only_directories_of_farm(run: Callable[..., Any], tmp_path: Path) -> None:
    words = ["--out", tmp_path / "new", "--home", "/srv/farm", "--backups", "/var/backups", "--dry-run", "--json"]
    commands = json.loads(run(*words).stdout)["commands"]
    assert [one for one in commands if one.startswith("sudo install -d")] == [
        "sudo install -d -o hil -m 700 /srv/farm /srv/farm/runs"
    ]
    assert "test -d /var/backups || sudo install -d -o hil -m 700 /var/backups" in commands


@pytest.mark.parametrize("is_from_index", [True, False])
def test_install_builds_image_from_wheel_without_index(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_from_index: bool
) -> None:
    monkeypatch.setattr("hil.controller.farm.install.writer.is_from_index", lambda _: is_from_index)
    words = ["--out", tmp_path / "new", "--only", "containers", "--dry-run", "--json"]
    commands = "\n".join(json.loads(run(*words).stdout)["commands"])
    assert ("--build-arg 'HIL=./hil-" in commands) is not is_from_index
    assert ("up --build" in commands) is is_from_index


def test_install_uses_absolute_paths_of_board_configs(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--out", "new", "--only", "systemd", "--board", "boards/pi.toml", "--board", "rpi5").exit_code == 0
    words = read_start((tmp_path / "new/systemd/hil-farm-host.service").read_text())
    assert words[-4:] == ["--board", f"{tmp_path}/boards/pi.toml", "--board", "rpi5"]


@pytest.mark.parametrize("has_script", [True, False])
def test_units_run_hil_of_this_environment(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_script: bool
) -> None:
    for folder in ("this", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hil").touch(0o755)
    if not has_script:
        (tmp_path / "this" / "hil").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "this" / "python"))
    assert run("--out", tmp_path / "new", "--only", "systemd").exit_code == 0
    words = read_start((tmp_path / "new/systemd/hil-farm-host.service").read_text())
    python = [f"{tmp_path}/this/python", "-m", "hil"]
    assert words == [*([f"{tmp_path}/this/hil"] if has_script else python), "farm", "host"]


def test_install_lists_commands_of_chosen_service(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("--out", tmp_path / "new", "--only", "systemd", "--service", "host", "--gateway", "lab:7070", "--json")
    document = json.loads(done.stdout)
    assert [Path(path).name for path in document["files"]] == ["hil-farm-host.service", "host.env"]
    assert document["commands"][-1] == "sudo systemctl enable --now hil-farm-host.service"
