"""Documents of `hil plugin` and `hil new-plugin`."""

from __future__ import annotations

from typing import Annotated

from hil.controller.records.base import Count, Record, note


class PluginViolation(Record, kw_only=True):
    """Violation of the contract."""

    entry_point: Annotated[str, note("group and name")]
    rule: str
    found: Annotated[str, note("what the package does")]
    expected: Annotated[str, note("what the package must do")]
    documentation: Annotated[str, note("page and heading that describe the rule")]


class SkippedCheck(Record, kw_only=True):
    """Check that was not possible, such as a model that the compiler refuses."""

    entry_point: str
    what: str
    why: str


class PluginReport(Record, kw_only=True):
    """Output of `hil plugin check`."""

    package: str
    version: str
    checks: Annotated[Count, note("number of calls in worker processes")]
    entry_points: list[str]
    operators: Annotated[list[str], note("operators of the models that the package compiled or computed")]
    violations: list[PluginViolation]
    skipped: Annotated[list[SkippedCheck], note("checks that did not run")]
    exit_code: int


class NewPlugin(Record, kw_only=True):
    """Output of `hil new-plugin`."""

    folder: str
    package: Annotated[str, note("name of the package, for pip and `hil plugin check`")]
    files: list[str]
