"""Whether a job that ended on a board is tried on another. Pure.

Only the infrastructure's failures are: a wrong answer, a compile error or a time-out is what the job was run to learn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hil.controller.farm.words import Kind, Result


@dataclass(frozen=True)
class Retry:
    """The job goes back to the queue.

    Attributes:
        reason: what failed, for its row and its event.
    """

    reason: str


@dataclass(frozen=True)
class Final:
    """The job is over.

    Attributes:
        result: its result.
    """

    result: Result


def decide(result: Result, kind: Kind, attempts: int, max_attempts: int, *, held: bool = False) -> Retry | Final:
    """What becomes of a job after an attempt.

    Args:
        result: how the attempt ended.
        kind: what the job does. A health job is never repeated: that its board failed is what it says.
        attempts: the attempts so far, this one too.
        max_attempts: how many there may be.
        held: of a lease: whether its holder had the board already, so that another would be a surprise.
    """
    if not result.infrastructure or kind is Kind.HEALTH or held:
        return Final(result)
    reason = result.reason or "the infrastructure failed"
    if attempts < max_attempts:
        return Retry(reason)
    return Final(replace(result, reason=f"{reason} (attempt {attempts} of {max_attempts})"))
