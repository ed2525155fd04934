"""Test the assignment of boards to jobs with tables, properties and a simulated lab."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.farm.messages import BoardAccess, BoardRequest, Kind, Priority
from hil.controller.farm.scheduler import policy
from hil.controller.farm.scheduler.candidates import BoardUse, FreeBoard, WaitingJob
from hil.controller.farm.scheduler.policy import assign
from hil.controller.farm.selector import parse
from hil.controller.farm.settings import FarmLimits, UserLimits

AGING_S = 600.0
HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW
A, B, C = (FreeBoard(name) for name in ("a", "b", "c"))


def job(number: int, user: str = "ada", **settings: Any) -> WaitingJob:
    """Return a job. Of similar jobs, the one with the lower number has waited longer."""
    return WaitingJob(number, user, **{"waits_s": 100.0 - number, **settings})


def given_to(
    jobs: Sequence[WaitingJob], *boards: FreeBoard, use: Mapping[tuple[str, str], BoardUse] | None = None
) -> list[str]:
    """Return grants as text: ``1a`` means job 1 gets board a. Also check that input order does not matter."""
    found = assign(jobs, boards, use or {}, AGING_S)
    assert assign(list(reversed(jobs)), boards, use or {}, AGING_S) == found
    return [f"{one}{board}" for one, board in found]


@pytest.mark.parametrize(
    ("jobs", "boards", "use", "order"),
    [
        pytest.param([], [A], {}, [], id="nobody waits"),
        pytest.param([job(1)], [], {}, [], id="no board is free"),
        pytest.param([job(2), job(1), job(3)], [A, B], {}, ["1a", "2b"], id="who has waited longest"),
        pytest.param(
            [job(1, priority=LOW), job(2), job(3, priority=HIGH)], [A, B], {}, ["3a", "2b"], id="the higher class"
        ),
        pytest.param([job(1, board="b"), job(2, board="c")], [A, B], {}, ["1b"], id="pinned"),
        pytest.param([job(1, board="a", selector="gpu")], [A], {}, [], id="pinned to what does not match"),
        pytest.param([job(1, avoid=frozenset("a"))], [A], {}, [], id="nothing but what it avoids"),
        pytest.param([job(1, avoid=frozenset("a"))], [A, B], {}, ["1b"], id="another than what it avoids"),
        pytest.param([job(1), job(2, "bob")], [A], {("ada", ""): BoardUse(1)}, ["2a"], id="who has no board now"),
        pytest.param([job(1), job(2, "bob")], [A], {("ada", ""): BoardUse(0, 9.0)}, ["2a"], id="who had less of late"),
        pytest.param([job(1), job(2, "bob")], [A], {("ada", ""): BoardUse(0, 0.5)}, ["2a"], id="who never had one"),
        pytest.param([job(1), job(2, "bob")], [A], {("ada", ""): BoardUse()}, ["1a"], id="who is known and had none"),
        pytest.param(
            [job(1), job(2), job(3), job(4, "bob")],
            [A, B, C],
            {("bob", ""): BoardUse(1)},
            ["1a", "2b", "4c"],
            id="what is given counts",
        ),
        pytest.param(
            [job(1, board="a"), job(2, board="a"), job(3, board="b")],
            [A, B],
            {},
            ["1a", "3b"],
            id="its only board is gone",
        ),
        pytest.param(
            [job(1), job(2, "bob")],
            [A],
            {("ada", ""): BoardUse(0, 9.0), ("bob", ""): BoardUse(1)},
            ["1a"],
            id="now before late",
        ),
        pytest.param(
            [job(1, project="x"), job(2, project="y")], [A], {("ada", "x"): BoardUse(1)}, ["2a"], id="the other project"
        ),
        pytest.param(
            [job(1), job(2, "bob", project="x")],
            [A],
            {("ada", ""): BoardUse(1), ("bob", "y"): BoardUse(2)},
            ["1a"],
            id="a user is all of its projects",
        ),
        pytest.param(
            [job(1), job(2), job(3), job(4, "bob"), job(5, "bob")], [A, B, C], {}, ["1a", "4b", "2c"], id="in turns"
        ),
        pytest.param(
            [job(1), job(2, "bob", priority=HIGH)], [A], {("bob", ""): BoardUse(7)}, ["2a"], id="class before share"
        ),
        pytest.param(
            [job(1, kind=Kind.HEALTH, board="b", user="farm", priority=LOW, waits_s=0.0), job(2, priority=HIGH)],
            [A, B],
            {},
            ["1b", "2a"],
            id="checks first",
        ),
        pytest.param(
            [job(1), job(2, kind=Kind.HEALTH, board="a"), job(3, kind=Kind.HEALTH, board="a")],
            [replace(A, health_only=True)],
            {},
            ["2a"],
            id="a board to be checked is for its check alone",
        ),
        pytest.param([job(1)], [replace(A, health_only=True)], {}, [], id="a board to be checked is for no job"),
        pytest.param([job(1, kind=Kind.HEALTH)], [A], {}, [], id="a check is of one board"),
    ],
)
def test_policy_selects_job_for_board(
    jobs: list[WaitingJob], boards: list[FreeBoard], use: dict[tuple[str, str], BoardUse], order: list[str]
):
    assert given_to(jobs, *boards, use=use) == order


GPU, WARM = FreeBoard("a", {"gpu": True}), FreeBoard("b", warm=frozenset({"net"}))


@pytest.mark.parametrize(
    ("jobs", "boards", "order"),
    [
        pytest.param([job(1, affinity="net")], [A, WARM, C], ["1b"], id="a job takes the warm board"),
        pytest.param([job(1, affinity="other")], [A, WARM], ["1a"], id="nothing is warm for it"),
        pytest.param([job(1), job(2, affinity="net")], [WARM], ["2b"], id="a board takes the warm job"),
        pytest.param([job(1), job(2, affinity="net")], [A, WARM], ["2b", "1a"], id="each the best of the other"),
        pytest.param([job(1), job(2, "bob", affinity="net")], [WARM], ["1b"], id="not another user's"),
        pytest.param([job(1), job(2, affinity="net", priority=LOW)], [WARM], ["1b"], id="not a lower class's"),
        pytest.param(
            [job(1, waits_s=AGING_S), job(2, affinity="net")], [WARM], ["1b"], id="not past one that waits for long"
        ),
        pytest.param([job(1, board="a"), job(2, affinity="net")], [A, WARM], ["1a", "2b"], id="it took nothing away"),
        pytest.param([job(1), job(2, selector="gpu")], [GPU, B], ["1b", "2a"], id="the scarce board is left"),
        pytest.param(
            [job(1, affinity="net"), job(2, selector="gpu")],
            [replace(GPU, warm=frozenset({"net"})), B],
            ["1b", "2a"],
            id="even where it is warm",
        ),
        pytest.param([job(1), job(2, board="a")], [A, B], ["1b", "2a"], id="so is one that a job is pinned to"),
    ],
)
def test_policy_selects_board_for_job(jobs: list[WaitingJob], boards: list[FreeBoard], order: list[str]):
    assert given_to(jobs, *boards) == order


@pytest.mark.parametrize(("place", "first"), [(32, "32b"), (33, "1b")])
def test_policy_searches_warm_jobs_only_near_queue_front(place: int, first: str):
    assert given_to([job(number, affinity="net" if number == place else "") for number in range(1, 40)], WARM) == [
        first
    ]


@pytest.mark.parametrize(
    ("priority", "waits_s", "first"),
    [
        (NORMAL, AGING_S - 1, "2a"),
        (NORMAL, AGING_S + 1, "1a"),
        (LOW, AGING_S + 1, "2a"),
        (LOW, 2 * AGING_S - 1, "2a"),
        (LOW, 2 * AGING_S + 1, "1a"),
    ],
)
@pytest.mark.parametrize("user", ["ada", "bob"])
def test_policy_promotes_job_to_next_class_after_aging_time(priority: Priority, waits_s: float, first: str, user: str):
    jobs = [job(1, user, priority=priority, waits_s=waits_s), job(2, priority=HIGH, waits_s=0.0)]
    assert given_to(jobs, A) == [first]


def test_policy_weighs_class_against_waiting_time_of_aged_jobs():
    high = job(2, priority=HIGH, waits_s=AGING_S + 100)
    assert given_to([job(1, priority=LOW, waits_s=2 * AGING_S + 100), high], A) == ["2a"]
    assert given_to([job(1, priority=LOW, waits_s=3 * AGING_S + 101), high], A) == ["1a"]
    equal = [job(5, priority=HIGH, waits_s=0.0), job(3, waits_s=AGING_S)]
    assert given_to(equal, A) == ["3a"]


def test_policy_prefers_fair_share_over_age_within_class():
    backlog = [job(number, waits_s=50 * AGING_S) for number in range(9)]
    assert given_to([*backlog, job(10, "bob", waits_s=0.0)], A, use={("ada", ""): BoardUse(3)}) == ["10a"]


def test_policy_prefers_urgent_job_over_aged_backlog():
    backlog = [job(number, priority=LOW, waits_s=50 * AGING_S) for number in range(9)]
    assert given_to([*backlog, job(10, "bob", priority=HIGH, waits_s=0.0)], A, use={("ada", ""): BoardUse(3)}) == [
        "10a"
    ]


CHIPS = ("a53", "a72", "zen")
BOARDS = st.builds(
    FreeBoard,
    name=st.just(""),
    labels=st.fixed_dictionaries({"chip": st.sampled_from(CHIPS), "gpu": st.booleans()}),
    warm=st.frozensets(st.sampled_from("xyz"), max_size=2),
    health_only=st.booleans(),
)
JOBS = st.builds(
    WaitingJob,
    id=st.just(0),
    user=st.sampled_from(["ada", "bob", "cyd"]),
    project=st.sampled_from(["", "p"]),
    priority=st.sampled_from(Priority),
    waits_s=st.floats(0, 5000),
    selector=st.sampled_from(["", "gpu", "!gpu", "chip=a53", "chip in (a72, zen)", "chip=none"]),
    board=st.sampled_from(["", "", "", "b0", "b1", "gone"]),
    avoid=st.frozensets(st.sampled_from(["b0", "b2"]), max_size=2),
    affinity=st.sampled_from(["", "x", "y"]),
    kind=st.sampled_from([Kind.RUN, Kind.RUN, Kind.LEASE, Kind.HEALTH]),
)
USES = st.dictionaries(
    st.tuples(st.sampled_from(["ada", "bob"]), st.sampled_from(["", "p"])),
    st.builds(BoardUse, st.integers(0, 5), st.floats(0, 1e6)),
)


def _may(one: WaitingJob, board: FreeBoard) -> bool:
    if one.kind is Kind.HEALTH:
        return one.board == board.name
    pinned = one.board in ("", board.name)
    return (
        pinned and not board.health_only and board.name not in one.avoid and parse(one.selector).matches(board.labels)
    )


@pytest.mark.ci
@given(st.lists(JOBS, max_size=12), st.lists(BOARDS, max_size=6), USES)
def test_policy_assigns_every_usable_board_to_single_job(
    some: list[WaitingJob], free: list[FreeBoard], use: dict[tuple[str, str], BoardUse]
):
    jobs = {number: replace(one, id=number) for number, one in enumerate(some)}
    boards = {f"b{number}": replace(board, name=f"b{number}") for number, board in enumerate(free)}
    found = assign(list(jobs.values()), list(boards.values()), use, AGING_S)
    assert len({number for number, _ in found}) == len({name for _, name in found}) == len(found)
    assert all(_may(jobs[number], boards[name]) for number, name in found)
    idle = boards.keys() - {name for _, name in found}
    waiting = jobs.keys() - {number for number, _ in found}
    assert not [(number, name) for number in waiting for name in idle if _may(jobs[number], boards[name])]
    checked = {name for number, name in found if jobs[number].kind is Kind.HEALTH}
    assert checked == {one.board for one in some if one.kind is Kind.HEALTH} & boards.keys()


def _simulate(jobs: list[WaitingJob], boards: int, job_s: float = 1.0) -> list[WaitingJob]:
    """Return the order in which jobs start on boards with equal run times and staggered starts."""
    waiting = {one.id: one for one in jobs}
    used: dict[tuple[str, str], BoardUse] = defaultdict(BoardUse)
    free_at = {f"b{number}": number * job_s / boards for number in range(boards)}
    holder: dict[str, WaitingJob] = {}
    started = []
    while waiting:
        board = min(free_at, key=lambda name: free_at[name])
        now = free_at[board]
        if before := holder.pop(board, None):
            had = used[before.user, before.project]
            used[before.user, before.project] = BoardUse(had.running - 1, had.board_s + job_s)
        queue = [replace(one, waits_s=now) for one in waiting.values()]
        [(number, _)] = assign(queue, [FreeBoard(board)], used, AGING_S)
        holder[board] = one = waiting.pop(number)
        had = used[one.user, one.project]
        used[one.user, one.project] = BoardUse(had.running + 1, had.board_s)
        free_at[board] = now + job_s
        started.append(one)
    return started


@pytest.mark.ci
@pytest.mark.parametrize("boards", [1, 4, 20])
@pytest.mark.parametrize("job_s", [1.0, 3 * AGING_S])
def test_policy_shares_boards_between_large_and_small_user(boards: int, job_s: float):
    jobs = [job(number, "first") for number in range(300)] + [job(number, "second") for number in range(300, 320)]
    started = _simulate(jobs, boards, job_s)
    last = max(place for place, one in enumerate(started) if one.user == "second")
    assert last <= 40
    assert [one.id for one in started if one.user == "first"] == list(range(300))


def test_policy_shares_boards_between_projects_of_user():
    jobs = [job(number, project="big") for number in range(60)] + [job(number, project="small") for number in (90, 91)]
    assert max(place for place, one in enumerate(_simulate(jobs, 2)) if one.project == "small") <= 5


def test_policy_runs_low_job_despite_endless_urgent_jobs():
    patient = job(0, "patient", priority=LOW, waits_s=0.0)
    use: dict[tuple[str, str], BoardUse] = {}
    for number in itertools.count(1):
        now = number * 60.0
        urgent = [WaitingJob(number, "urgent", priority=HIGH, waits_s=5.0)]
        [(granted, _)] = assign([replace(patient, waits_s=now), *urgent], [A], use, AGING_S)
        if granted == 0:
            break
        use = {("urgent", ""): BoardUse(0, now)}
    assert 2 * AGING_S <= now <= 2 * AGING_S + 60


def test_policy_caches_selector_matches_per_board(monkeypatch: pytest.MonkeyPatch):
    asked: Counter[tuple[str, str]] = Counter()

    def counting(text: str) -> Any:
        def matches(labels: Mapping[str, Any]) -> bool:
            asked[text, labels["name"]] += 1
            return parse(text).matches(labels)

        return SimpleNamespace(matches=matches)

    monkeypatch.setattr(policy, "parse", counting)
    selectors = ("", "chip=a53", "chip=a72 or gpu", "!gpu")
    jobs = [job(number, f"u{number % 9}", selector=selectors[number % 4]) for number in range(2000)]
    boards = [FreeBoard(f"b{number}", {"name": f"b{number}", "chip": "a53"}) for number in range(200)]
    assert len(assign(jobs, boards, {}, AGING_S)) == 200
    assert set(asked.values()) == {1}
    assert len(asked) == len(selectors) * len(boards)


def pair(number: int, *names: str, **settings: Any) -> WaitingJob:
    """Return a job that needs these boards at once."""
    first, *more = names
    return job(number, board=first, more=tuple(BoardRequest(board=name) for name in more), **settings)


def test_policy_grants_all_boards_of_job_or_none():
    assert given_to([pair(1, "b", "a")], A, B) == ["1b", "1a"]
    assert given_to([pair(1, "a", "b")], A) == []
    assert given_to([pair(1, "a", "b"), job(2)], A) == ["2a"]


def test_policy_finds_different_boards_for_overlapping_requests():
    small, large = FreeBoard("s", {"ram": 1}), FreeBoard("l", {"ram": 2})
    wanted = job(1, selector="ram>=1", more=(BoardRequest("ram<2"),))
    assert given_to([wanted], small, large) == ["1l", "1s"]


def test_policy_keeps_boards_for_job_after_long_wait():
    jobs = [pair(1, "a", "b", waits_s=70.0), job(2, waits_s=1.0)]
    assert assign(jobs, [A], {}, AGING_S, busy=[B], gather_s=60.0) == []
    assert assign(jobs, [A], {}, AGING_S, busy=[B], gather_s=80.0) == [(2, "a")]
    assert assign(jobs, [A], {}, AGING_S, busy=[], gather_s=60.0) == [(2, "a")]


def test_policy_limits_boards_of_job():
    limits = FarmLimits(UserLimits(boards=1))
    assert assign([pair(1, "a", "b"), job(2)], [A, B], {}, AGING_S, limits) == [(2, "a")]


def test_policy_respects_access_of_board():
    closed = replace(A, access=BoardAccess(groups=("vision",)))
    assert given_to([job(1), job(2, "bob", groups=frozenset({"vision"}))], closed) == ["2a"]
    assert given_to([job(1)], closed, B) == ["1b"]


@given(st.lists(st.sets(st.sampled_from("abc"), min_size=1), min_size=1, max_size=8))
def test_policy_ends_all_jobs_with_overlapping_boards(needs: list[set[str]]):
    """Jobs that need any sets of boards all run: no two jobs wait for boards of each other."""
    waiting = [pair(number, *sorted(names), waits_s=100.0) for number, names in enumerate(needs)]
    running: list[tuple[int, str]] = []
    for _ in range(2 * len(needs)):
        used = {board for _, board in running}
        free, busy = ([one for one in (A, B, C) if (one.name in used) is state] for state in (False, True))
        granted = assign(waiting, free, {}, AGING_S, busy=busy, gather_s=0.0)
        for number in {number for number, _ in granted}:
            assert {board for of, board in granted if of == number} == needs[number]
        started = {number for number, _ in granted}
        waiting = [one for one in waiting if one.id not in started]
        running += granted
        ended = running[0][0] if running else None
        running = [one for one in running if one[0] != ended]
    assert waiting == []
