"""Record of `hil bisect --over`: stack-search.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from hil.controller.records.base import Count, Record, Timestamp, note
from hil.controller.records.console import StoredConsole
from hil.controller.records.outputs import Origin
from hil.controller.records.stack import StackPart

BoardAnswer = Literal["pass", "fail", "unstable", "board error", "not judged"]
StackConclusion = Literal["found", "confounded", "not the part", "all pass", "all fail", "not comparable"]


class BoardRun(Record, kw_only=True):
    """Run of the program on a board."""

    outcome: str
    reason: str
    outputs: Annotated[str, note("digest of the outputs; empty without outputs")] = ""


class TriedBoard(Record, kw_only=True):
    """Result of a board."""

    request: Annotated[str, note("value of --board")]
    name: Annotated[str, note("empty if the board was never reached")] = ""
    board_id: str = ""
    stack: list[StackPart] = []
    program: Annotated[str, note("digest of the program; empty if nothing was compiled")] = ""
    answer: Annotated[
        BoardAnswer, note("`unstable`: the runs differ; `not judged`: the output cannot be judged within the tolerance")
    ]
    reason: str
    runs: list[BoardRun] = []


class StackVersion(Record, kw_only=True):
    """Boards with the same version of the part."""

    version: Annotated[str, note("empty if unknown")]
    passing: list[str]
    failing: list[str]
    excluded: Annotated[list[str], note("boards without a clear answer")]


class StackSearchRecord(Record, kw_only=True):
    """Record of a search over the versions of a part."""

    schema: Literal[1]
    over: Annotated[str, note("searched part, or `board`")]
    model: str
    model_digest: Annotated[str, note("digest of the model, as in the record of a run; empty if unknown")] = ""
    request: Annotated[dict[str, Any], note("settings that must not change when the search resumes")]
    created: Timestamp
    origin: Origin | None = None
    command: Annotated[str, note("command that repeats the search; empty if not started from a command line")] = ""
    runs: Annotated[Count, note("runs per board")]
    boards: list[TriedBoard]
    versions: list[StackVersion] = []
    conclusion: StackConclusion | None = None
    found: Annotated[list[str], note("versions that change the answer")] = []
    confounders: Annotated[list[str], note("other parts that separate the boards in the same way")] = []
    verdict: str = ""
    hint: str = ""
    consoles: Annotated[list[StoredConsole], note("consoles of the boards")] = []
    finished: bool = False
    exit_code: int | None = None
    folder: Annotated[str, note("directory of the record; empty if not stored")] = ""
