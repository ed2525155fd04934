"""Chaos test: a farm of simulated boards runs jobs while its parts are repeatedly killed, frozen and disconnected.

Three hosts serve two gateways, each through a separate relay. Two hosts present a third of the boards. A seed
determines all events (:mod:`farm_chaos_plan`). :mod:`farm_chaos_checks` contains the conditions that must hold.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.database.database import Database, migrate
from hil.controller.farm.database.embedded_database import EmbeddedDatabase
from hil.controller.farm.messages import Priority, Role, Submission
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.store.access import add_token
from hil.core.boards import load_board
from hil.errors import BoardError, FarmError
from support import farm_chaos_verdict as verdict
from support.farm_chaos_plan import Batch, Blow, batches, blows
from support.farm_jobs import KnownJob, known_jobs
from support.farm_keeper import MARK, Keeper, Relay, free_ports, signalled
from support.sshd import LOOPBACK
from support.waiting import eventually

USERS = ("ann", "ben")
TERMS = "[terms]\nquarantine_s = 2\nquarantine_most_s = 5\n"
ATTEMPTS = 40
_PYTHON = sys.executable
# Longer than a job takes on the slowest machine, so that no job ends by its time limit.
_JOB_S = 600.0


@dataclass(frozen=True)
class Size:
    """Size of the chaos test: jobs, jobs per submission, boards, duration, and time between events."""

    jobs: int = 500
    each: int = 20
    boards: int = 20
    hosts: int = 3
    seconds: float = 150.0
    every_s: float = 1.2
    patience_s: float = 240.0


FULL = Size()
QUICK = Size(jobs=24, each=6, boards=4, hosts=2, seconds=14.0, every_s=1.5, patience_s=60.0)


@dataclass
class Farm:
    """The farm under test.

    Attributes:
        expected: job -> required exit code and outcome.
        done: events in order: seconds, action, target.
    """

    folder: Path
    size: Size
    keeper: Keeper
    database: EmbeddedDatabase
    tokens: dict[str, str] = field(default_factory=dict)
    gateways: list[int] = field(default_factory=list)
    relays: list[list[Relay]] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    agents: dict[str, Path] = field(default_factory=dict)
    expected: dict[str, tuple[int, str]] = field(default_factory=dict)
    done: list[tuple[float, str, str]] = field(default_factory=list)

    def client(self, user: str) -> FarmClient:
        """Return a user's connection to all gateways."""
        addresses = tuple(f"{LOOPBACK}:{port}" for port in self.gateways)
        # Gateways need seconds to start on a busy machine.
        return FarmClient(FarmAddress(addresses, self.tokens[user]), restart_s=self.size.patience_s)


def hosts_of(board: int, boards: int, hosts: int) -> list[int]:
    """Return the hosts that present a board: one host, and for each third board the next host too."""
    own = board * hosts // boards
    return [own] if board % 3 else sorted({own, (own + 1) % hosts})


@contextmanager
def running(size: Size, faults: Mapping[int, str] = MappingProxyType({})) -> Iterator[Farm]:
    """Run a farm whose parts restart after they die. Some boards have a fault of the simulator."""
    folder = Path(tempfile.mkdtemp(prefix="hil-chaos-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in ("tmp", "s", "home", "boards"):
            (folder / name).mkdir()
        (folder / "home/farm.toml").write_text(TERMS)
        # Mark the processes that the database starts, too.
        os.environ[MARK] = folder.name
        stack.callback(os.environ.pop, MARK, None)
        database = stack.enter_context(EmbeddedDatabase(folder / "postgres", settings={"fsync": "off"}))
        keeper = stack.enter_context(Keeper(folder.name, folder / "logs"))
        farm = Farm(folder, size, keeper, database)
        farm.tokens = asyncio.run(_prepare(database.url))
        keeper.look(lambda: None if database.is_alive() else _up_again(database))
        farm.gateways = free_ports(2)
        for number in range(2):
            start_gateway(farm, number)
        for number in range(size.boards):
            _start_agent(farm, number, faults.get(number, ""))
        for number in range(size.hosts):
            relays = [Relay(port) for port in farm.gateways]
            farm.relays.append(relays)
            for relay in relays:
                stack.callback(relay.close)
            _start_host(farm, number)
        yield farm


def _up_again(database: EmbeddedDatabase) -> None:
    # The process may be killed while it starts. Then the keeper starts it again at its next check.
    with suppress(FarmError):
        database.start()


async def _prepare(url: str) -> dict[str, str]:
    await migrate(url)
    database = await Database.open(url)
    try:
        async with database.transaction() as tx:
            users = {user: await add_token(tx, user, Role.SUBMITTER) for user in USERS}
            return {**users, "hosts": await add_token(tx, "hosts", Role.HOST)}
    finally:
        await database.close()


def start_gateway(farm: Farm, number: int) -> None:
    """Start a gateway on the farm's database."""
    listen = f"{LOOPBACK}:{farm.gateways[number]}"
    command = [_PYTHON, "-m", "hil", "farm", "gateway", "--db", farm.database.url, "--listen", listen]
    farm.keeper.keep(f"gateway-{number}", command, **_places(farm, farm.folder / "home"))


def _places(farm: Farm, home: Path) -> dict[str, str]:
    home.mkdir(exist_ok=True)
    return {
        "HIL_FARM_HOME": str(home),
        "TMPDIR": str(farm.folder / "tmp"),
        "XDG_CACHE_HOME": str(farm.folder / "cache"),
    }


def _start_agent(farm: Farm, number: int, fault: str) -> None:
    name = f"board-{number:02}"
    socket, farm.agents[name] = farm.folder / "s" / f"{number}", farm.folder / "stores" / name
    model = load_board("sim").config
    (farm.folder / "boards" / f"{name}.toml").write_text(
        f'[board]\nhw_type = "sim"\n[connection]\naddress = "unix:{socket}"\n'
        f"[labels]\nsimulated = true\nrank = {number}\n"
        f'[devices]\niree = "local-task"\n[compile_flags]\niree = {json.dumps(model.compile_flags["iree"])}\n'
    )
    words = ["--listen", f"unix:{socket}", "--store", str(farm.agents[name]), "--name", name]
    command = [_PYTHON, "-m", "hil.sim", *words, "--config", str(model.path), *(["--fault", fault] if fault else [])]
    farm.keeper.keep(f"agent-{number:02}", command, TMPDIR=str(farm.folder / "tmp"))


def _start_host(farm: Farm, number: int) -> None:
    name, size = f"host-{number}", farm.size
    mine = [board for board in range(size.boards) if number in hosts_of(board, size.boards, size.hosts)]
    words = [word for board in mine for word in ("--board", str(farm.folder / "boards" / f"board-{board:02}.toml"))]
    farm.hosts.append(name)
    farm.keeper.keep(
        name,
        [_PYTHON, "-m", "hil", "farm", "host", "--site", f"site-{number}", "--name", name, *words],
        HIL_FARM=",".join(f"{LOOPBACK}:{relay.port}" for relay in farm.relays[number]),
        HIL_FARM_TOKEN=farm.tokens["hosts"],
        **_places(farm, farm.folder / name),
    )


def boards_online(farm: Farm) -> int:
    """Return the number of boards that are online; 0 if no gateway responds."""
    try:
        with farm.client("ann") as client:
            return sum(board.state == "online" for board in client.ask("boards"))
    except BoardError:
        return 0


class Attack:
    """Execute the plan in a separate thread."""

    def __init__(self, farm: Farm, plan: list[Blow]) -> None:
        self._farm, self._plan = farm, plan
        self._mends: list[tuple[float, Callable[[], None]]] = []
        self.thread = threading.Thread(target=self._run, name="attack")

    def _run(self) -> None:
        begun = time.monotonic()
        for blow in self._plan:
            self._wait(begun + blow.at_s)
            self._farm.done.append((time.monotonic() - begun, blow.what, self._strike(blow)))
        while self._mends:
            self._wait(min(at for at, _ in self._mends))

    def _wait(self, until: float) -> None:
        """Wait until a time. Meanwhile, undo the events that end."""
        while True:
            for due, mend in [one for one in self._mends if one[0] <= time.monotonic()]:
                mend()
                self._mends.remove((due, mend))
            if time.monotonic() >= until:
                return
            time.sleep(min(0.02, max(until - time.monotonic(), 0.001)))

    def _strike(self, blow: Blow) -> str:
        """Execute an event. Return its target."""
        farm, keeper = self._farm, self._farm.keeper
        verb, kind = blow.what.split()
        if kind == "database":
            if farm.database.pid is None or not signalled(farm.database.pid, signal.SIGKILL):
                return "down already"
            return "database"
        if kind == "link":
            relay = _pick([relay for relays in farm.relays for relay in relays], blow.pick)
            if verb == "drop":
                relay.drop()
            else:
                relay.cut()
                self._mends.append((time.monotonic() + blow.lasts_s, relay.restore))
            return f"a host's way to gateway {farm.gateways.index(relay.to)}"
        if kind == "worker":
            host = _pick(farm.hosts, blow.pick)
            workers = keeper.children(host)
            if not workers or not signalled(_pick(workers, blow.pick * len(farm.hosts) % 1), signal.SIGKILL):
                return "none there"
            return f"a process of {host}"
        name = _pick(sorted(name for name in keeper.kept if name.startswith(kind)), blow.pick)
        if verb == "kill":
            keeper.kill(name)
        else:
            self._mends.append((time.monotonic() + blow.lasts_s, keeper.freeze(name)))
        return name


def _pick(things: list, pick: float):
    return things[min(int(pick * len(things)), len(things) - 1)]


def submit(farm: Farm, plan: list[Batch], jobs: dict[str, KnownJob]) -> None:
    """Submit each batch at its time. Repeat failed submissions."""
    begun = time.monotonic()
    for batch in plan:
        time.sleep(max(begun + batch.at_s - time.monotonic(), 0.0))
        order = Submission(
            "chaos",
            tuple(jobs[kind].spec for kind in batch.kinds),
            batch.selector,
            priority=Priority(batch.priority),
            timeout_s=_JOB_S,
            max_attempts=ATTEMPTS,
        )
        _, names = _again(lambda batch=batch, order=order: _submit(farm, batch, order, jobs))
        for name, kind in zip(names, batch.kinds, strict=True):
            farm.expected[name] = (jobs[kind].exit_code, jobs[kind].outcome)


def _submit(farm: Farm, batch: Batch, order: Submission, jobs: dict[str, KnownJob]) -> tuple[int, list[str]]:
    with farm.client(batch.user) as client:
        for kind in dict.fromkeys(batch.kinds):
            client.upload(jobs[kind].files)
        return client.submit(order)


def _again(call: Callable[[], tuple[int, list[str]]], seconds: float = 120.0) -> tuple[int, list[str]]:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except BoardError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def jobs_left(farm: Farm) -> int:
    """Return the number of submitted jobs without a result; all jobs if no gateway responds."""
    try:
        with farm.client("ann") as client:
            counts = client.ask("stats").jobs
        return int(counts.get("queued", 0) + counts.get("running", 0))
    except BoardError:
        return len(farm.expected) or 1


def run(size: Size, seed: int, say: Callable[[str], None] = print) -> verdict.Verdict:
    """Start a farm, run the plan, wait until the jobs have ended, and check the final state."""
    with running(size) as farm:
        jobs = known_jobs(farm.folder / "home")
        eventually(lambda: boards_online(farm) == size.boards, within_s=180)
        say(f"{size.boards} boards are online")
        begun = time.monotonic()
        attack = Attack(farm, blows(seed, size.seconds, size.every_s))
        attack.thread.start()
        try:
            submit(farm, batches(seed, size.jobs, size.each, size.boards, size.seconds * 0.8), jobs)
        finally:
            attack.thread.join()
        say(f"{len(farm.expected)} jobs submitted, {len(farm.done)} blows done, {jobs_left(farm)} jobs left")
        beaten = time.monotonic()
        deadline = beaten + size.patience_s
        while jobs_left(farm) and time.monotonic() < deadline:
            time.sleep(0.5)
        ended = time.monotonic()
        found = verdict.look(farm, seed)
        found.seconds = {"chaos": beaten - begun, "after it": ended - beaten}
        found.blows = dict(Counter(what for _, what, _ in farm.done))
        found.leaks += verdict.ended(farm)
        return found
