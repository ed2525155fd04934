"""Jobs that wait for boards which fail check after check: whoever waits for such a job is told, and need not go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hil.controller.farm.desk.database import Tx
from hil.controller.farm.desk.rows import fetched
from hil.controller.farm.health import GIVEN_UP
from hil.controller.farm.selector import parse
from hil.controller.farm.words import BoardState, JobState

_BOARDS = """
    select name, labels, state, failures, reason from hil.boards
    where not forgotten and hold = '' and state <> 'offline' order by name
"""


async def why_hopeless(tx: Tx, jobs: list[Mapping[str, Any]]) -> dict[str, str]:
    """Of jobs as :mod:`.reading` tells them: those that wait for boards which all failed their checks again and again,
    and the reason. A board that is offline or held back may come any moment, but tells nothing of when.
    """
    waiting = [job for job in jobs if job["state"] == JobState.QUEUED.value]
    boards = await fetched(tx, _BOARDS) if waiting else []
    reasons: dict[tuple[str, str], str] = {}
    for job in waiting:
        key = job["selector"], job["pinned"]
        if key not in reasons:
            selector = parse(job["selector"])
            fit = [one for one in boards if job["pinned"] in ("", one["name"]) and selector.matches(one["labels"])]
            failed = [
                one for one in fit if one["state"] == BoardState.QUARANTINED.value and one["failures"] >= GIVEN_UP
            ]
            said = "; ".join(f"{one['name']}: {one['reason']}" for one in failed[:3])
            reasons[key] = said if failed and len(failed) == len(fit) else ""
    return {job["name"]: why for job in waiting if (why := reasons[job["selector"], job["pinned"]])}
