"""What jobs print, kept in the order in which it came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hil.controller.farm.desk.changes import tell
from hil.controller.farm.desk.database import Tx
from hil.controller.farm.desk.rows import storable
from hil.controller.farm.words import job_name

# Of one lease's job; the rest is not kept.
MOST_BYTES = 16 << 20
_TOO_MUCH = "\n[it printed more than the farm keeps]\n"
_MOST_LINES = 2000
# Of what is read at a time; one text is there in any case.
_MOST_READ = 8 << 20
# Numbers are given in the order of commits, so that a reader who has seen one has missed none before it.
_LOCK = 0x68696C02


async def append(tx: Tx, lease: int, text: str) -> None:
    """Keep what a lease's job printed."""
    text = storable(text)
    await tx.execute("select pg_advisory_xact_lock(%s)", [_LOCK])
    asked = await tx.execute(
        "update hil.leases set printed = printed + %(size)s where id = %(lease)s and printed <= %(most)s"
        " returning job, printed > %(most)s as full",
        {"size": len(text.encode()), "lease": lease, "most": MOST_BYTES},
    )
    row = await asked.fetchone()
    if row is None:
        return
    kept = _TOO_MUCH if row["full"] else text
    await tx.execute("insert into hil.logs (job, lease, text) values (%s, %s, %s)", [row["job"], lease, kept])
    await tell(tx, {"kind": "log", "job": row["job"]})


async def after(tx: Tx, job_ids: Sequence[int], after: int = 0, *, limit: int = _MOST_LINES) -> list[dict[str, Any]]:
    """What these jobs printed after a number, the first of it where it is much: each text with its ``number``, the
    ``job``'s name, and the ``text``.
    """
    asked = await tx.execute(
        "with found as (select id, job, octet_length(text) as size from hil.logs"
        " where job = any(%s) and id > %s order by id limit %s),"
        " summed as (select id, job, size, sum(size) over (order by id) as read from found)"
        " select log.id, log.text, job.submission, job.number, submission.jobs"
        " from summed join hil.logs as log on log.id = summed.id join hil.jobs as job on job.id = summed.job"
        " join hil.submissions as submission on submission.id = job.submission"
        " where summed.read - summed.size < %s order by log.id",
        [list(job_ids), after, limit, _MOST_READ],
    )
    return [
        {"number": row["id"], "job": job_name(row["submission"], row["number"], row["jobs"]), "text": row["text"]}
        for row in await asked.fetchall()
    ]
