"""Search for the first bad candidate in a list that may contain untestable candidates.

Pure functions of the test results.
"""

from __future__ import annotations

from hil.controller.records.decisions.gate import TrialOutcome


class CandidateSearch:
    """Binary search over a list of candidates. The first candidate should be good, and the last bad.

    The search tests both ends first, because a clean build may differ from the stored measurements::

        search = CandidateSearch(len(candidates))
        while (position := search.choose_next()) is not None:
            search.add(position, test(candidates[position]))
        search.candidates  # the first bad candidate, or multiple if skipped candidates hide it

    Args:
        count: number of candidates, at least 2.
        needs_good: whether the first candidate counts as good only after it passed a test. If False, it is good unless
            a test fails.
    """

    def __init__(self, count: int, *, needs_good: bool = False) -> None:
        if count < 2:
            raise ValueError(f"expected at least 2 candidates, got {count}")
        self._count = count
        self._needs_good = needs_good
        self._outcomes: dict[int, TrialOutcome] = {}

    def add(self, position: int, outcome: TrialOutcome) -> None:
        """Add the result of a test."""
        self._outcomes[position] = outcome

    def forget(self, position: int) -> None:
        """Forget the result of a test, so that the candidate can be tested again."""
        self._outcomes.pop(position, None)

    def choose_next(self) -> int | None:
        """Return the position of the candidate to test next, or None at the end of the search."""
        for end in (self._count - 1, 0):
            if end not in self._outcomes:
                return end
            if self.find_problem(end):
                return None
        low, high = self._find_bounds()
        untested = [place for place in range(low + 1, high) if place not in self._outcomes]
        return min(untested, key=lambda place: abs(2 * place - low - high), default=None)

    def find_problem(self, end: int) -> TrialOutcome | None:
        """Return the result at one end of the range if the search cannot continue with this result, otherwise None."""
        found = self._outcomes.get(end)
        if end:
            return found if found != "bad" else None
        return found if found == "bad" or (found == "skipped" and self._needs_good) else None

    @property
    def candidates(self) -> range:
        """Positions that may be the first bad candidate.

        Empty if the test of an end of the range contradicts the stored measurement.
        """
        if self.find_problem(self._count - 1) or self.find_problem(0):
            return range(0)
        low, high = self._find_bounds()
        return range(low + 1, high + 1)

    def _find_bounds(self) -> tuple[int, int]:
        """Return the positions of the first bad candidate, and of the last good candidate before it."""
        high = min((place for place, found in self._outcomes.items() if found == "bad"), default=self._count - 1)
        good = (place for place, found in self._outcomes.items() if found == "good" and place < high)
        return max(good, default=0), high
