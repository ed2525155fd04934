"""What a suite's case came to: one line of ``results.jsonl``, one row of every report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class CaseRecord:
    """One case's end. Everything in it is what JSON can say.

    Attributes:
        id, model, layer, op, params: of the :class:`~hil.controller.workloads.suites.spec.CaseSpec`.
        suite, flow, runtime: what it ran in.
        board, hw_type: which board ran it, as results call it, and its hardware type; "" where none did.
        outcome: a word of :class:`hil.core.results.Outcome`, expected failures taken into account.
        ended: the outcome without regard to what was expected.
        stage: where it ended.
        message: why, in a line; "" for a pass.
        hint, detail: of an error: what to do next, and the tool's own words.
        timings: seconds of the host's clock: the fields of :class:`hil.core.results.Timings`; None is a stage that was
            not.
        device_p50_ns, device_p90_ns: median and 90th percentile of an iteration's device time, or None.
        iterations: how many were timed.
        cold: whether that was one alone, the program's first run since it was loaded.
        agentless: why the board has no agent, where programs are run by command; "" where it has one.
        artifact_bytes: size of the program's files, or None.
        program: digest of the file that the runtime opens; "" where there is none. What was compiled together has
            the same.
        cached: whether the program came out of the cache, or None where nothing was compiled.
        notes: what the compiler told of its work: of a program's delegation, say. See
            :class:`hil.core.results.Artifact`.
        placement: where it ran: fields of :class:`hil.core.results.Part`; None where the runtime did not tell.
        elsewhere: a note on what ran on another device than it was told to; "" where nothing did.
        outputs: one comparison an output with the flow's own reference: fields of
            :class:`hil.compare.verdict.OutputComparison` and ``mismatch_share``; inf and nan are texts, for JSON.
        against: who that reference was.
        plain_outputs, plain_against: the same beside the model before the flow's recipe; empty where there is none.
        expectation: what was expected to fail: {"outcome", "reason", "issue"}; empty where nothing was.
        attempts: every try before the one that counted and every confirmation, in order: {"why" ("board lost",
            "confirm"), "board", "outcome", "message"}.
        confirmed: of a mismatch that was run again: "always wrong", "flaky" or "one bad board"; else "".
        repeat: the command that repeats it.
        diff: the command that shows the difference of its worst output; "" where there is none.
        folder: where its tensors and logs are, relative to the run's folder; "" where nothing was kept.
        started: seconds since the epoch.
        content: of the :class:`~hil.controller.workloads.suites.spec.CaseSpec`.
    """

    id: str
    model: str
    suite: str
    flow: str
    runtime: str
    outcome: str
    ended: str
    layer: str = ""
    op: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    board: str = ""
    hw_type: str = ""
    stage: str = ""
    message: str = ""
    hint: str = ""
    detail: str = ""
    timings: Mapping[str, float | None] = field(default_factory=dict)
    device_p50_ns: float | None = None
    device_p90_ns: float | None = None
    iterations: int = 0
    cold: bool = False
    agentless: str = ""
    artifact_bytes: int | None = None
    program: str = ""
    cached: bool | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    placement: tuple[Mapping[str, Any], ...] | None = None
    elsewhere: str = ""
    outputs: tuple[Mapping[str, Any], ...] = ()
    against: str = ""
    plain_outputs: tuple[Mapping[str, Any], ...] = ()
    plain_against: str = ""
    expectation: Mapping[str, str] = field(default_factory=dict)
    attempts: tuple[Mapping[str, str], ...] = ()
    confirmed: str = ""
    repeat: str = ""
    diff: str = ""
    folder: str = ""
    started: float = 0.0
    content: str = ""

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> CaseRecord:
        """The record of a line; what a newer hil added is left out."""
        known = {one.name for one in fields(cls)}
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in known
        }
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """What JSON can say of it."""
        return {one.name: getattr(self, one.name) for one in fields(self)}
