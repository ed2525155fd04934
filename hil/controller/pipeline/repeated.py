"""Run a case's program repeatedly, compile it repeatedly, and judge differing outputs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hil.compare.verdict import Verdict
from hil.controller.devices.board import LoadedProgram
from hil.controller.devices.board_client import Invocation, ProfilePass
from hil.controller.pipeline.board_pool import BoardSession
from hil.controller.pipeline.settings.options import Options
from hil.core.repetition import Answer, Repetition, merge
from hil.core.results import Artifact, Model, Outcome, RunResult
from hil.core.tensors import Array

_GRAVITY = (Outcome.PASS, Outcome.BLIND, Outcome.FAIL)


@dataclass(frozen=True)
class Compilations:
    """Result of repeated compilations of a model."""

    count: int
    programs: tuple[Artifact, ...]  # programs that differ from the first and from each other

    @property
    def text(self) -> str:
        """Summary in one line."""
        if not self.programs:
            return f"{self.count} compilations gave the same program"
        return f"{self.count} compilations gave {1 + len(self.programs)} different programs"

    def record(self) -> dict[str, Any]:
        """Return the entry for run.json."""
        return {
            "count": self.count,
            "programs": 1 + len(self.programs),
            "digests": [dict(one.digests) for one in self.programs],
            "text": self.text,
        }


def compile_repeatedly(first: Artifact, count: int, again: Callable[[Path], Artifact], folder: Path) -> Compilations:
    """Compile a model ``count`` times in total and keep the differing programs.

    Args:
        again: Compiles with a cache in the given directory.
        folder: Directory for the differing programs, in separate subdirectories.
    """
    known = {frozenset(first.digests.items())}
    programs: list[Artifact] = []
    for number in range(2, count + 1):
        place = folder / str(number)
        artifact = again(place)
        if (digests := frozenset(artifact.digests.items())) in known:
            shutil.rmtree(place, ignore_errors=True)
        else:
            known.add(digests)
            programs.append(artifact)
    return Compilations(count, tuple(programs))


def run_repeatedly(
    session: BoardSession,
    artifact: Artifact,
    others: Sequence[Artifact],
    inputs: Mapping[str, Array],
    options: Options,
    *,
    check: Callable[[LoadedProgram], None] = lambda program: None,
) -> tuple[LoadedProgram, RunResult, Invocation]:
    """Run a program ``repeat`` times, then run each program of the other compilations once.

    Returns:
        The program, and the result and call of the first run. The result and the call include the times of all runs of
        the first program, and the repetition of all runs.
    """
    names = artifact.output_names
    counts: dict[str, Any] = {name: getattr(options, name) for name in ("warmup", "iterations", "timeout")}

    def load(one: Artifact) -> LoadedProgram:
        return session.load(one, timeout=options.timeout, no_fallback=options.no_fallback, check=check)[0]

    program = load(artifact)
    result, call = program.run(inputs, names=names, **counts)
    # Merge results immediately: the outputs of all runs may not fit in memory.
    for _ in range(options.repeat - 1):
        if options.fresh_load:
            session.unload(artifact)
        program = load(artifact)
        result, call = _merge_run(result, call, *program.run(inputs, names=names, **counts))
    for one in others:
        session.board.push(one)
        again, _ = load(one).run(inputs, names=names, **counts)
        result = replace(result, repetition=merge([_get_repetition(result), _get_repetition(again)]))
        session.unload(one)
    if others:
        program = load(artifact)
    return program, result, call


def _merge_run(
    result: RunResult, call: Invocation, again: RunResult, later: Invocation
) -> tuple[RunResult, Invocation]:
    """Return the first run with the times of a later run added and the outputs of the two runs compared."""
    times = (*result.iterations_ns, *again.iterations_ns)
    result = replace(result, iterations_ns=times, repetition=merge([_get_repetition(result), _get_repetition(again)]))
    warmup_ns, fetch_s = call.warmup_ns + later.warmup_ns, call.fetch_s + later.fetch_s
    return result, replace(call, warmup_ns=warmup_ns, fetch_s=fetch_s)


def _get_repetition(result: RunResult) -> Repetition:
    """Return the repetition of a run.

    If the board did not compare iterations, the repetition contains only the outputs.
    """
    return result.repetition or Repetition((Answer(1, 0, result.outputs),))


def with_profile(
    result: RunResult, taken: ProfilePass | None, convert: Callable[[Mapping[str, Array]], Mapping[str, Array]]
) -> RunResult:
    """Add the outputs of the profile pass to the repetition of a result.

    Args:
        convert: Converts outputs of a run to the form of the result's outputs.
    """
    if taken is None:
        return result
    repetition = taken.repetition
    if repetition is None:
        note = "the outputs of the profile pass were not checked: the profiler does not return them"
        return replace(result, provenance={**result.provenance, "notes": [*result.provenance.get("notes", ()), note]})
    repetition = repetition.converted(convert)
    given = list(repetition.answers[0].outputs or {})
    if len(given) == len(result.outputs):
        repetition = repetition.renamed(dict(zip(given, result.outputs, strict=True)))
    return replace(result, repetition=result.repetition and merge([result.repetition, repetition]))


def judge_answers(repetition: Repetition, compare: Callable[[Mapping[str, Array]], Verdict]) -> dict[int, Verdict]:
    """Compare the distinct answers whose outputs are known. Return verdicts by number of the answer."""
    if repetition.is_stable:
        return {}
    known = enumerate(repetition.answers)
    return {number: compare(answer.outputs) for number, answer in known if answer.outputs is not None}


def worst_answer(verdicts: Mapping[int, Verdict]) -> int:
    """Return the number of the answer with the largest error."""

    def severity(number: int) -> tuple[int, float, float]:
        verdict = verdicts[number]
        shares = [output.mismatch_share for output in verdict.outputs if output.mismatch_share is not None]
        errors = [output.max_abs for output in verdict.outputs if output.max_abs is not None]
        return _GRAVITY.index(verdict.outcome), max(shares, default=0.0), max(errors, default=0.0)

    return max(verdicts, key=severity)


def may_differ(repetition: Repetition, allowed: Sequence[str]) -> bool:
    """Return True if the patterns match all differing outputs."""
    differing = repetition.differing
    return bool(differing) and all(any(fnmatchcase(name, one) for one in allowed) for name in differing)


def instability(
    repetition: Repetition | None, verdicts: Mapping[int, Verdict], model: Model | None, allowed: Sequence[str]
) -> tuple[bool, str]:
    """Decide if differing outputs make a case UNSTABLE.

    Outputs that match an allowed pattern may differ if every answer was fetched and passes.

    Returns:
        True for an unstable case, and the reason or a note; "" if the answers do not differ.
    """
    if repetition is None or repetition.is_stable:
        return False, ""
    differing = repetition.differing
    is_allowed = may_differ(repetition, allowed)
    unseen = len(repetition.answers) - len(verdicts) + repetition.others
    if is_allowed and not unseen and all(verdicts.values()):
        return False, f"{repetition.text} in {', '.join(differing)}, allowed by --allow-unstable"
    text = f"{repetition.text} for the same inputs"
    if is_allowed and unseen:
        text += f" ({unseen} of them were not fetched, so --allow-unstable does not apply)"
    if random := [name for name in differing if model is not None and name in model.random_outputs]:
        text += f" ({', '.join(random)} {'depends' if len(random) == 1 else 'depend'} on random numbers)"
    if not verdicts:
        return True, text
    worst = worst_answer(verdicts)
    first = f"the first {_describe_verdict(verdicts[0])}"
    if not worst:
        return True, f"{text}; {first}, and no other is worse"
    return True, f"{text}; {first}, the worst {_describe_verdict(verdicts[worst])}"


def _describe_verdict(verdict: Verdict) -> str:
    if verdict:
        return "passes"
    return f"{'cannot be judged' if verdict.outcome is Outcome.BLIND else 'is wrong'} ({verdict.reason})"
