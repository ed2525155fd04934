"""Farm for tests of `hil web`, without a gateway. The test defines the responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hil.controller.farm.client.answers import parse_answer
from hil.controller.farm.messages import JobSpec, Kind, Role
from hil.controller.farm.paths import FarmAddress
from hil.controller.web.farm.link import FarmLink
from hil.core.digest import digest_of
from hil.errors import AccessRefused, FarmUnreachable, UsageError
from hil.protocol.v1 import farm_pb2 as pb
from support.waiting import eventually

# Number of bytes in each piece of a file.
PIECE = 1000


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def parsed(what: str, answer: Any) -> Any:
    """Return a gateway's response as a client reads it."""
    return parse_answer(pb.Json(text=json.dumps(answer).encode()), what)


def board(name: str, state: str = "online", **values: Any) -> dict[str, Any]:
    usual = {"site": "lab", "host": "host1", "hw_type": "rpi5", "reason": "", "labels": {"name": name}, "failures": 0}
    usual |= {"warm": [], "job": "", "user": "", "since": None, "checked_at": at(1000), "power": []}
    usual |= {"access": {"users": [], "groups": []}, "provisions": False, "image": None}
    return {"name": name, "state": state, **usual, **values}


def job(name: str, state: str = "queued", **values: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"title": "digits", "kind": "run", "project": "", "priority": "normal", "selector": ""}
    usual |= {
        "attempts": 0,
        "user": "ada",
        "board": "",
        "pinned": "",
        "boards": [],
        "more": [],
        "queued_at": at(1000),
        "started_at": None,
    }
    usual |= {"finished_at": None, "exit_code": None, "outcome": "", "reason": "", "attempts_made": []}
    if state != "queued":
        usual |= {"board": "pi", "started_at": at(1005)}
    if state in ("done", "cancelled"):
        usual |= {"finished_at": at(1010), "exit_code": 0 if state == "done" else 130}
        usual |= {"outcome": "PASS" if state == "done" else ""}
    return {"name": name, "submission": int(name.partition(".")[0]), "state": state, **usual, **values}


class FakeFarm:
    """State of the farm, its users, and the received requests."""

    def __init__(self) -> None:
        self.users = {"own": ("ada", Role.ADMIN)}
        self.rights: dict[str, list[str]] = {}  # token -> rights; admins have all
        self.boards: list[dict[str, Any]] = []
        self.jobs: list[dict[str, Any]] = []
        self.queue: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.results: dict[str, dict[str, Any]] = {}
        self.cases: dict[str, list[dict[str, str]]] = {}
        self.logs: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []  # token, question
        self.done: list[tuple[str, str, dict[str, Any]]] = []  # token, action, arguments
        self.fetched: list[str] = []
        self.away = False

    def connect(self, address: FarmAddress) -> Any:
        return FakeClient(self, address.token)

    def happen(self, what: str = "board.online", **values: Any) -> None:
        usual = {"board": "", "job": "", "lease": None, "reason": "", "at": at(1000)}
        self.events.append({"id": len(self.events) + 1, "what": what, **usual, **values})

    def keep(self, data: bytes) -> str:
        """Store a file. Return its digest."""
        digest = digest_of(data)
        self.files[digest] = data
        return digest

    def end(self, name: str, files: dict[str, bytes], kind: Kind = Kind.RUN, **record: Any) -> None:
        """Add a job that has ended and has written these files."""
        spec = JobSpec(kind).to_json()
        self.jobs.append(job(name, "done", kind=kind.value))
        result = {"exit_code": 0, "outcome": "PASS", "reason": "", "infrastructure": False, "record": record}
        result |= {"files": {path: self.keep(data) for path, data in files.items()}, "timings": {}, "board_ns": [0, 0]}
        self.results[name] = {"name": name, "state": "done", **result, "spec": spec}

    def printed_after(self, number: int) -> list[dict[str, Any]]:
        return [one for one in self.logs if one["number"] > number]

    def cases_of(self, name: str) -> list[dict[str, str]]:
        """Return the outcomes of the cases of a job, or of all jobs of a submission."""
        jobs = [one["name"] for one in self.jobs if name in (one["name"], str(one["submission"]))]
        return [{"job": job, "reason": "", **case} for job in jobs for case in self.cases.get(job, [])]

    @contextmanager
    def link(self) -> Iterator[FarmLink]:
        with FarmLink(lambda: FarmAddress(("unix:/nowhere",), "own"), self.connect) as link:
            eventually(lambda: self.away or not link.trouble)
            yield link


def busy_farm() -> FakeFarm:
    """Return a farm with three boards. Job 1 runs, jobs 2.1 and 2.2 wait, job 3 has ended. There is a user of each
    role.
    """
    farm = FakeFarm()
    farm.users |= {"v": ("vic", Role.VIEWER), "s": ("sue", Role.SUBMITTER), "a": ("amy", Role.ADMIN)}
    farm.boards = [
        board("pi", job="1", user="ada", since=at(1005), labels={"name": "pi", "chip": "a72"}),
        board("nano", "quarantined", reason="a tiny model: FAIL", failures=3),
        board("zero", "maintenance", reason="drained by amy: new cable"),
    ]
    farm.jobs = [job("1", "running"), job("2.1", user="sue"), job("2.2", user="sue"), job("3", "done")]
    farm.queue = [
        {**farm.jobs[1], "position": 1, "why": "pi is busy"},
        {**farm.jobs[2], "position": 2, "why": "pi is busy; 1 job ahead"},
    ]
    farm.cases = {"1": [{"name": "relu", "outcome": "FAIL", "reason": "y differs"}, {"name": "add", "outcome": "PASS"}]}
    farm.cases["3"] = [{"name": "digits", "outcome": "PASS"}]
    farm.logs = [{"number": 1, "job": "3", "text": "one\n"}, {"number": 2, "job": "3", "text": "two\x1b[0m\n"}]
    farm.happen("job.queued", job="1", at=at(1000))
    farm.happen("job.granted", job="1", board="pi", lease=1, at=at(1005))
    farm.happen("board.quarantined", board="nano", reason="a tiny model: FAIL")
    return farm


class FakeClient:
    def __init__(self, farm: FakeFarm, token: str) -> None:
        self._farm, self._token = farm, token
        self.address = FarmAddress(("unix:/nowhere",), token)

    def with_token(self, token: str) -> FakeClient:
        return FakeClient(self._farm, token)

    def close(self) -> None:
        pass

    def _check(self, needed: Role = Role.VIEWER) -> str:
        if self._farm.away:
            raise FarmUnreachable("no farm gateway responds", hint="start a local farm with `hil farm up`")
        if self._token not in self._farm.users:
            raise AccessRefused("authentication with the farm failed: invalid, expired or revoked token")
        user, role = self._farm.users[self._token]
        if not role.covers(needed):
            raise AccessRefused(f"permission denied for {user}: requires role {needed.value}")
        return user

    def ask(self, what: str, **asked: Any) -> Any:
        return parsed(what, self._find_answer(what, **asked))

    def _find_answer(self, what: str, **asked: Any) -> Any:
        user, farm = self._check(), self._farm
        farm.asked.append((self._token, what))
        if what == "me":
            role = farm.users[self._token][1]
            rights = ["commands", "power"] if role is Role.ADMIN else farm.rights.get(self._token, [])
            return {"user": user, "role": role.value, "project": "", "rights": rights}
        if what == "events":
            found = [
                one for one in farm.events if all(asked.get(key, one[key]) == one[key] for key in ("board", "job"))
            ]
            return found[-asked.get("limit", 200) :]
        if what == "jobs":
            found = [one for one in farm.jobs if not asked.get("state") or one["state"] in asked["state"]]
            return [one for one in found if asked.get("submission") in (None, one["submission"])]
        if what == "job":
            return self._one(farm.jobs, asked["name"])
        if what == "result":
            names = {
                one["name"]: one["state"] for one in farm.jobs if asked["name"] in (one["name"], str(one["submission"]))
            }
            return [farm.results.get(name, {"name": name, "state": state}) for name, state in names.items()]
        if what == "cases":
            found = farm.cases_of(asked["name"])
            return {"total": len(found), "cases": found[: asked["limit"]]}
        if what == "logs":
            if asked["name"] not in {name for one in farm.jobs for name in (one["name"], str(one["submission"]))}:
                raise UsageError(f"job {asked['name']} not found")
            return farm.printed_after(asked.get("after", 0))
        if what == "stats":
            states = ("queued", "running", "done", "cancelled")
            counts = {state: sum(one["state"] == state for one in farm.jobs) for state in states}
            return {"jobs": counts, "waiting_s": {"p50": None, "p95": None}, "queue": {}, "boards": {}, "users": []}
        queue = [one for one in farm.queue if one["name"] in asked.get("jobs", [one["name"]])]
        return {"boards": farm.boards, "queue": queue[: asked.get("limit")]}[what]

    def _one(self, rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
        found = [one for one in rows if one["name"] == name]
        if not found:
            raise UsageError(f"job {name} not found")
        return found[0]

    def do(self, action: str, **arguments: Any) -> Any:
        user = self._check(Role.SUBMITTER if action in ("cancel", "power") else Role.ADMIN)
        if action == "power" and not self._find_answer("me")["rights"]:
            raise AccessRefused(f"permission denied for {user}")
        if action == "cancel":
            one = self._one(self._farm.jobs, arguments["name"])
            if one["user"] != user and self._farm.users[self._token][1] is not Role.ADMIN:
                raise AccessRefused(f"job {one['name']} is {one['user']}'s")
        self._farm.done.append((self._token, action, arguments))
        return {}

    def download(self, digest: str, to: Path, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        self._check()
        if digest not in self._farm.files:
            raise FarmUnreachable("it went away")
        to.parent.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(data := self._farm.files[digest]), PIECE):
            on_bytes(len(data[start : start + PIECE]))
        self._farm.fetched.append(digest)
        to.write_bytes(data)
