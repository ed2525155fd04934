"""Run a case's program repeatedly, compile it repeatedly, and judge differing outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hil.controller.devices.board_client import Invocation, ProfilePass
from hil.controller.devices.loaded_program import LoadedProgram
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Options
from hil.core.instructions import merge_counts
from hil.core.repetition import Answer, Repetition, merge
from hil.core.results import Artifact, RunResult
from hil.core.steps import MAX_CALLS, OUTPUTS
from hil.core.tensors import Array

# Minimum number of generations before the timed ones. Between two of them, the board runs another prompt.
_MIN_WARMUP = 1


def run_repeatedly(
    session: BoardSession,
    artifact: Artifact,
    others: Sequence[Artifact],
    inputs: Mapping[str, Array],
    options: Options,
    *,
    check: Callable[[LoadedProgram], None] = lambda program: None,
    **arguments: Any,
) -> tuple[LoadedProgram, RunResult, Invocation]:
    """Run a program ``repeat`` times, then run each program of the other compilations once.

    Args:
        arguments: Arguments of :meth:`LoadedProgram.run` that replace the values of the options.

    Returns:
        The program, and the result and the call of the first run. Both include the times of all runs of the first
        program. The result also includes the repetition of all runs.
    """
    counts: dict[str, Any] = {name: getattr(options, name) for name in ("warmup", "iterations", "timeout")}
    counts |= {"names": artifact.output_names, **arguments}

    def load(one: Artifact) -> LoadedProgram:
        return session.load(one, **load_arguments(options), check=check)[0]

    program = load(artifact)
    result, call = program.run(inputs, **counts)
    # Merge each result immediately, because the outputs of all runs may not fit into memory.
    for _ in range(options.repeat - 1):
        if options.fresh_load:
            session.unload(artifact)
        program = load(artifact)
        result, call = _merge_run(result, call, *program.run(inputs, **counts))
    for one in others:
        session.board.push(one)
        again, _ = load(one).run(inputs, **counts)
        result = replace(result, repetition=merge([_get_repetition(result), _get_repetition(again)]))
        session.unload(one)
    if others:
        program = load(artifact)
    return program, result, call


def load_arguments(options: Options) -> dict[str, Any]:
    """Return the arguments of :meth:`BoardSession.load` for options."""
    return {name: getattr(options, name) for name in ("timeout", "no_fallback", "instructions")}


def make_steps_arguments(case: Case) -> dict[str, Any]:
    """Return the arguments that make :meth:`LoadedProgram.run` generate tokens; none for a case without a decoder."""
    decoder = case.decoder
    if decoder is None:
        return {}
    names = (*OUTPUTS, *(one.output for one in decoder.cache))
    return {
        "steps": decoder.plan,
        "names": names,
        "warmup": max(case.options.warmup, _MIN_WARMUP),
    }


def _merge_run(
    result: RunResult, call: Invocation, again: RunResult, later: Invocation
) -> tuple[RunResult, Invocation]:
    """Add the times of a later run to the first run, and compare the outputs of both."""
    times = (*result.iterations_ns, *again.iterations_ns)
    result = replace(
        result,
        iterations_ns=times,
        repetition=merge([_get_repetition(result), _get_repetition(again)]),
        instructions=merge_counts(result.instructions, again.instructions),
    )
    warmup_ns, fetch_s = call.warmup_ns + later.warmup_ns, call.fetch_s + later.fetch_s
    calls = call.calls if len(call.calls) >= MAX_CALLS else (*call.calls, *later.calls)
    return result, replace(call, warmup_ns=warmup_ns, fetch_s=fetch_s, calls=calls)


def _get_repetition(result: RunResult) -> Repetition:
    """Return the repetition of a run.

    If the board did not compare iterations, the repetition contains only the outputs.
    """
    return result.repetition or Repetition((Answer(1, 0, result.outputs),))


def add_profile_pass(
    result: RunResult, taken: ProfilePass | None, convert: Callable[[Mapping[str, Array]], Mapping[str, Array]]
) -> RunResult:
    """Add the outputs of the profile pass to the repetition of a result.

    Args:
        convert: Function that converts outputs of a run to the form of the result's outputs.
    """
    if taken is None:
        return result
    repetition = taken.repetition
    if repetition is None:
        note = "the outputs of the profile pass were not checked: the profiler does not return them"
        return replace(result, provenance={**result.provenance, "notes": [*result.provenance.get("notes", ()), note]})
    repetition = repetition.convert(convert)
    given = list(repetition.answers[0].outputs or {})
    if len(given) == len(result.outputs):
        repetition = repetition.rename(dict(zip(given, result.outputs, strict=True)))
    return replace(result, repetition=result.repetition and merge([result.repetition, repetition]))
