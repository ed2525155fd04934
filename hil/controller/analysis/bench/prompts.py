"""Token times in a bench: one case per prompt of a specification, and a comparison of two programs for every prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hil.controller.analysis.bench.measure import BenchSide
from hil.controller.analysis.bench.stats import Batch, BenchJob, compare_rounds, round_log_ratios
from hil.controller.models.generation.spec import read_spec
from hil.controller.pipeline.records.energy_text import compare_energies
from hil.controller.pipeline.records.generation import TokenTimes, compute_duration, measure_generation, split_calls
from hil.controller.pipeline.settings.options import Options
from hil.controller.records.measurements.bench import PromptComparison, SideGeneration, SpeedComparison
from hil.core.steps import PROMPT, TOKENS, TokenPlaces, split_turns


def split_prompts(options: Options) -> list[Options]:
    """Return the options of each prompt. Without ``--generate``, return only the given options. Raises UsageError."""
    if options.generate is None:
        return [options]
    return [replace(options, prompt=prompt.name) for prompt in read_spec(options.generate).prompt]


def group_sides(sides: Iterable[BenchSide]) -> list[list[BenchSide]]:
    """Group the sides by prompt. Without prompts, return a single group."""
    groups: dict[str, list[BenchSide]] = {}
    for side in sides:
        groups.setdefault(side.case.options.prompt, []).append(side)
    return list(groups.values())


def compare_prompts(sides: Iterable[BenchSide], bench: BenchJob) -> list[PromptComparison]:
    """Compare B with A for every prompt. Without two programs or without prompts, return an empty list."""
    return [_compare_prompt(pair, bench) for pair in group_sides(sides) if len(pair) == 2 and pair[0].case.decoder]


def describe_side(side: BenchSide) -> SideGeneration | None:
    """Return the prompt of a side, and the times of its tokens; None without a decoder."""
    case = side.case
    if case.decoder is None or case.inputs is None or case.result is None:
        return None
    stamps = tuple(stamp for batch in side.batches for stamp in _iter_stamps(batch))
    calls = [call for batch in side.batches for call in batch.calls]
    prompt, tokens = _read_tokens(side)
    steps = TokenPlaces.from_turns(prompt, tokens).steps
    return SideGeneration(
        prompt=case.options.prompt,
        prompt_tokens=sum(map(len, split_turns(prompt))),
        depths=[steps[0], steps[-1]] if steps else [],
        bound=case.decoder.plan.bound or None,
        times=measure_generation(replace(case.result, iterations_ns=stamps), calls, prompt, tokens),
    )


def _compare_prompt(pair: Sequence[BenchSide], bench: BenchJob) -> PromptComparison:
    iterations = [(batch, split_batch(side, batch)) for side in pair for batch in side.batches]

    def compare(name: str) -> SpeedComparison | None:
        batches = [
            replace(batch, duration_ns=np.array(times, np.int64))
            for batch, found in iterations
            if (times := [*_iter_times(found, name)])
        ]
        return compare_rounds(round_log_ratios(batches), min_effect=bench.min_effect)

    times = {name: compare(name) for name in ("prefill", "ttft", "tpot")}
    energy = compare_energies(pair[0].energy, pair[1].energy, bench.min_effect)
    return PromptComparison(prompt=pair[0].case.options.prompt, **times, energy=energy)


def split_batch(side: BenchSide, batch: Batch) -> list[TokenTimes]:
    """Return the times of the tokens in each iteration of a decoder's batch."""
    return split_calls(_iter_stamps(batch), batch.calls, *_read_tokens(side))


def _read_tokens(side: BenchSide) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt, and the chosen tokens."""
    assert side.case.inputs is not None and side.case.result is not None
    return side.case.inputs[PROMPT].tolist(), side.case.result.outputs[TOKENS].tolist()


def _iter_stamps(batch: Batch) -> Iterator[tuple[int, int]]:
    """Yield start and end of each iteration."""
    yield from zip(batch.start_ns.tolist(), (batch.start_ns + batch.duration_ns).tolist(), strict=True)


def _iter_times(iterations: Iterable[TokenTimes], name: str) -> Iterator[float]:
    """Yield a time of each iteration in nanoseconds."""
    for one in iterations:
        if name == "tpot" and one.steps:
            yield float(np.median([compute_duration(call) for call in one.steps]))
        elif name != "tpot":
            yield one.ttft_ns if name == "ttft" else one.prefill_ns
