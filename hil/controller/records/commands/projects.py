"""Documents of `hil init`, `hil config` and `hil doctor`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from hil.controller.records.base import Record, note


class ProjectFile(Record, kw_only=True):
    """A file of a project."""

    path: Annotated[str, note("relative to the directory of the project")]
    state: Annotated[Literal["created", "kept"], note("`kept`: the file existed and was not changed")]


class CreatedProject(Record, kw_only=True):
    """Output of `hil init`."""

    folder: str
    model: Annotated[str, note("relative to the folder")]
    board: Annotated[str, note("value of --board")]
    ci: Literal["github", "gitlab", "none"]
    files: list[ProjectFile]
    notes: Annotated[list[str], note("changes to make by hand")]
    next: Annotated[list[str], note("commands to run next")]


ValueSource = Literal["command line", "environment", "project", "board config", "built-in"]
ValueTable = Literal["defaults", "history", "board", "environment"]


class EffectiveValue(Record, kw_only=True):
    """The value of an option, with its source."""

    table: Annotated[ValueTable, note("tables of hil.toml, the board's config, or places and variables")]
    key: str
    value: Annotated[Any, note("as in hil.toml; null if there is no value")]
    source: ValueSource
    where: Annotated[str, note("option, variable, table of hil.toml or board config; empty for built-in values")]
    trusted: Annotated[bool, note("false if the value needs trust (hil board trust)")] = True
    meaning: Annotated[str, note("description of the key")] = ""


class EffectiveConfig(Record, kw_only=True):
    """Output of `hil config show`."""

    project: Annotated[str, note("path of hil.toml; empty without a project file")]
    model: Annotated[str, note("empty without MODEL")]
    models: Annotated[list[str], note("patterns of the tables [models] in the project file")]
    values: list[EffectiveValue]


CheckOutcome = Literal["pass", "note", "fail"]


class EnvironmentCheck(Record):
    """Result of a check of the environment."""

    name: str
    state: Annotated[CheckOutcome, note("`note`: an optional part is missing or unusable")]
    found: str
    fix: Annotated[str, note("command or action that fixes the problem; empty if nothing is wrong")] = ""


class DoctorReport(Record, kw_only=True):
    """Output of `hil doctor`."""

    ok: Annotated[bool, note("true if everything that hil requires works")]
    checks: list[EnvironmentCheck]
    exit_code: Annotated[int, note("0, or 2 if a check failed")]
