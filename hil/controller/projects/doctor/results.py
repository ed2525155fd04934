"""Results of checks."""

from __future__ import annotations

from typing import Final

from hil.controller.records.commands.projects import CheckOutcome, EnvironmentCheck

# PASS: works. NOTE: an optional part is missing or unusable. FAIL: hil does not work.
PASS: Final = "pass"
NOTE: Final = "note"
FAIL: Final = "fail"


def make_check(name: str, wrong: str, fine: str, fix: str, *, outcome: CheckOutcome = FAIL) -> EnvironmentCheck:
    """Return a passing check if ``wrong`` is empty, else a check with the outcome and the fix."""
    return EnvironmentCheck(name, outcome, wrong, fix) if wrong else EnvironmentCheck(name, PASS, fine)
