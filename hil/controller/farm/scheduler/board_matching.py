"""Match the board requests of a job with different boards. Pure functions.

Sets of boards are bit masks: bit N is board N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def match_requests(masks: Sequence[int], order: Sequence[int]) -> list[int | None]:
    """Return a different board for every request. None marks the requests without a board.

    The result has a board for as many requests as possible (maximum bipartite matching with augmenting paths).

    Args:
        masks: for every request, the boards that match.
        order: board numbers, the preferred boards first.
    """
    owner: dict[int, int] = {}  # board -> request

    def find_board(request: int, tried: set[int]) -> bool:
        for board in order:
            if masks[request] >> board & 1 and board not in tried:
                tried.add(board)
                if board not in owner or find_board(owner[board], tried):
                    owner[board] = request
                    return True
        return False

    # A request with few boards has no choice, so it is first.
    for request in sorted(range(len(masks)), key=lambda number: masks[number].bit_count()):
        find_board(request, set())
    boards: list[int | None] = [None] * len(masks)
    for board, request in owner.items():
        boards[request] = board
    return boards


def can_match_all(masks: Sequence[int]) -> bool:
    """Return True if there is a different board for every request."""
    every = 0
    for mask in masks:
        every |= mask
    return all(masks) and (len(masks) == 1 or None not in match_requests(masks, list(iterate_bits(every))))


def iterate_bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the boards in a mask."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
