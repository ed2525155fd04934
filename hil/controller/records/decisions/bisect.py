"""Records of a bisection: bisect.json of `hil bisect`."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Count, Number, Record, note
from hil.controller.records.console import StoredConsole
from hil.controller.records.outputs import Origin, Placement, StoredComparison
from hil.core.results import Outcome

BisectWay = Literal["isolated", "cumulative"]


class BisectFinding(Record, kw_only=True):
    """Result of a layer or of a whole model."""

    outcome: Annotated[Outcome, note("SKIP if not judged")]
    reason: str
    stage: Annotated[str, note("stage of the error, or empty")]
    hint: str
    max_abs: Annotated[Number, note("largest absolute difference in any output; null without numbers")]
    sqnr_db: Annotated[Number, note("lowest signal-to-noise ratio of any output; null without numbers")]
    unjudged: Annotated[dict[str, str], note("outputs that cannot be judged within the tolerance, with the reason")]
    placement: Placement = None
    elsewhere: Annotated[str, note("parts that ran on a device that was not requested, or empty")] = ""
    outputs: Annotated[list[StoredComparison], note("comparisons with the reference; empty without results")]


class LayerFinding(Record, kw_only=True):
    """Results of a layer. A result that was not requested is null."""

    name: str
    op: str
    nodes: list[str]
    depth: Count
    tensors: list[str]
    isolated: Annotated[
        BisectFinding | None, note("the layer compiled separately, with the reference's values as inputs")
    ]
    cumulative: Annotated[BisectFinding | None, note("the layer within the whole model")]

    def get_finding(self, way: BisectWay) -> BisectFinding | None:
        """Return the finding, isolated or cumulative."""
        return self.isolated if way == "isolated" else self.cumulative

    def outcome(self, way: BisectWay) -> Outcome | None:
        """Return the outcome, isolated or cumulative; None if not requested."""
        finding = self.get_finding(way)
        return finding.outcome if finding else None


class BisectFindings(Record, kw_only=True):
    """Results of all layers and of the whole model."""

    layers: Annotated[list[LayerFinding], note("in topological order")]
    whole: Annotated[BisectFinding | None, note("the unchanged model; null if only isolated layers were requested")]
    exposed: Annotated[BisectFinding | None, note("the model with intermediate values as outputs")]


class BisectRecord(BisectFindings, kw_only=True):
    """Record of a bisection."""

    schema: Literal[1]
    model: Annotated[str, note("file that the reference ran")]
    model_digest: Annotated[str, note("digest of the model, as in the record of a run; empty if unknown")] = ""
    artifact_model: Annotated[str, note("compiled file: `model`, unless the user named another file")]
    board: str
    hw_type: str
    runtime: str
    flow: str
    against: Annotated[str, note("name of the reference")]
    created: Annotated[float, note("seconds since the epoch")] = 0.0
    origin: Origin | None = None
    command: Annotated[str, note("command that repeats the bisection; empty if not started from a command line")] = ""
    notes: list[str]
    folder: Annotated[str, note("directory with the files of wrong layers; empty if not stored")]
    first_isolated: Annotated[str | None, note("name of the first wrong layer")]
    first_cumulative: Annotated[str | None, note("name of the first wrong layer within the whole model")]
    verdict: str
    consoles: Annotated[list[StoredConsole], note("consoles of the boards")] = []
    exit_code: int
