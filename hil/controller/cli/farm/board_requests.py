"""Boards of a job: the options --board, --select and --count."""

from __future__ import annotations

from collections.abc import Sequence

import click

from hil.controller.farm.messages import BoardRequest
from hil.controller.farm.rpc import MAX_BOARDS
from hil.errors import UsageError

count_option = click.option(
    "--count",
    type=click.IntRange(1, MAX_BOARDS),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of boards for each --select, used at the same time.",
)


def list_board_requests(boards: Sequence[str], selectors: Sequence[str], count: int) -> tuple[BoardRequest, ...]:
    """Return the boards that a command or a lease needs at the same time, in order.

    With several values of --board, each board must match --select. Otherwise, each value of --select requests ``count``
    boards. Raises UsageError for an invalid combination.
    """
    if boards:
        if len(selectors) > 1:
            raise UsageError("--board accepts a single --select", hint="use either several --board or several --select")
        if count > 1:
            raise UsageError("--count applies only to --select", hint="name each board: --board A --board B")
        if twice := next((name for name in boards if list(boards).count(name) > 1), ""):
            raise UsageError(f"--board {twice} is given twice", hint="each board can be used once in a job")
        requests = [BoardRequest("".join(selectors), name) for name in boards]
    else:
        requests = [BoardRequest(selector) for selector in selectors or ("",) for _ in range(count)]
    if len(requests) > MAX_BOARDS:
        raise UsageError(f"a job can use at most {MAX_BOARDS} boards, got {len(requests)}")
    return tuple(requests)
