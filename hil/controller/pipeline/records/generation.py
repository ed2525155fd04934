"""Build the record of a generation from a case, with times from the board's clock."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hil.compare.generation.results import CacheErrors, GenerationFault, RowResult
from hil.controller.models.inputs import digest_of_samples
from hil.controller.pipeline.case import Case
from hil.controller.records.base import Number
from hil.controller.records.measurements.generation import (
    MAX_COLUMNS,
    MAX_LAYERS,
    MAX_ROWS,
    MAX_TIMES,
    GenerationTimes,
    StoredCacheMap,
    StoredCacheRow,
    StoredFault,
    StoredGeneration,
    StoredPerplexity,
    StoredPosition,
)
from hil.core.digest import digest_of
from hil.core.results import RunResult
from hil.core.steps import FORCED, PROMPT, TOKENS, StepCall, TokenPlaces, split_turns


def record_generation(case: Case) -> StoredGeneration | None:
    """Return the record of a case with --generate that ran; None for other cases."""
    decoder, inputs, result, judged = case.decoder, case.inputs, case.result, case.generation
    if decoder is None or inputs is None or result is None:
        return None
    prompt, tokens = inputs[PROMPT].tolist(), result.outputs[TOKENS].tolist()
    judgement: dict[str, Any] = {}
    if judged is not None:
        judgement = {
            "fault": judged.fault and _record_fault(judged.fault),
            "kl_bound": judged.kl_bound,
            "error_bound": judged.error_bound,
            "positions": [StoredPosition(**vars(row)) for row in _select_rows(judged.rows)],
            **{f"top{k}": share for k, share in judged.top.items()},
            "perplexity": judged.perplexity and StoredPerplexity(**vars(judged.perplexity), file=case.text_file),
            "first_divergent": judged.first_divergent,
            "cache": _map_cache(judged.cache),
            "notes": list(judged.notes),
        }
    return StoredGeneration(
        prompt=case.options.prompt,
        prompt_tokens=prompt,
        forced=inputs[FORCED].tolist(),
        tokens=tokens,
        steps=len(TokenPlaces.from_turns(prompt, tokens).steps),
        chunk=decoder.plan.chunk,
        bound=decoder.plan.bound or None,
        times=measure_generation(result, case.calls, prompt, tokens, case.link_ns),
        **judgement,
    )


def digest_generation(case: Case) -> str:
    """Return a digest of the model, the reference, the tokens, and the plans of both models; "" without --generate."""
    model, decoder, reference, inputs = case.model, case.decoder, case.reference_decoder, case.inputs
    if model is None or decoder is None or reference is None or inputs is None:
        return ""
    plans = [decoder.plan.to_json(), reference.decoder.plan.to_json()]
    parts = [model.digest, reference.model.digest, digest_of_samples([inputs]), json.dumps(plans)]
    return digest_of("\0".join(parts).encode())


def _record_fault(fault: GenerationFault) -> StoredFault:
    layer = fault.layer if fault.layer >= 0 else None
    return StoredFault(**{**vars(fault), "kind": fault.kind.value, "layer": layer})


def _select_rows(rows: Sequence[RowResult]) -> list[RowResult]:
    """Return at most MAX_ROWS rows in order of positions. Prefer wrong rows, then rows with a large divergence."""
    worst = sorted(rows, key=lambda row: (row.passed, -math.inf if math.isnan(row.kl) else -row.kl))[:MAX_ROWS]
    return sorted(worst, key=lambda row: row.position)


def _map_cache(cache: Sequence[CacheErrors]) -> StoredCacheMap | None:
    """Return the errors by layer and position.

    If there are too many, neighbours share an entry with the largest error.
    """
    if not cache:
        return None
    positions, count = max(one.first + len(one.errors) for one in cache), max(one.layer for one in cache) + 1
    stride, layers = (max(-(-size // most), 1) for size, most in ((positions, MAX_COLUMNS), (count, MAX_LAYERS)))
    rows = []
    for first in range(0, count, layers):
        own = [one for one in cache if first <= one.layer < first + layers]
        keys, values = (_shrink_errors([one for one in own if one.is_key == kind], stride) for kind in (True, False))
        rows.append(StoredCacheRow(layer=first, keys=keys, values=values))
    return StoredCacheMap(positions=positions, stride=stride, layers=layers, rows=rows)


def _shrink_errors(cache: Sequence[CacheErrors], stride: int) -> list[Number]:
    """Return the largest error of each column of ``stride`` positions. NaN is larger than any number."""
    size = max((one.first + len(one.errors) for one in cache), default=0)
    columns = np.zeros((len(cache), -(-size // stride) * stride))
    for row, one in zip(columns, cache, strict=True):
        row[one.first : one.first + len(one.errors)] = one.errors
    largest = columns.max(0, initial=0.0).reshape(-1, stride).max(-1)
    return [float(f"{one:.3g}") for one in largest.tolist()]


@dataclass(frozen=True)
class TokenTimes:
    """Calls of an iteration: the calls of the prompts, and the calls of the steps.

    Attributes:
        first_ns: End of the first turn's prompt.
    """

    start_ns: int
    first_ns: int
    prompt: Sequence[StepCall]
    steps: Sequence[StepCall]

    @property
    def ttft_ns(self) -> int:
        """Time to first token."""
        return self.first_ns - self.start_ns

    @property
    def prefill_ns(self) -> int:
        """Duration of the prompt's calls."""
        return sum(map(compute_duration, self.prompt))

    @property
    def gaps_ns(self) -> list[int]:
        """Times between the calls."""
        calls = sorted([*self.prompt, *self.steps], key=lambda call: call.start_ns)
        return [after.start_ns - before.end_ns for before, after in itertools.pairwise(calls)]


def measure_generation(
    result: RunResult, calls: Sequence[StepCall], prompt: Sequence[int], tokens: Sequence[int], link_ns: int = 0
) -> GenerationTimes | None:
    """Return the times of the timed iterations; None without calls.

    Args:
        calls: Calls of all iterations, in order. The agent may have dropped the last calls.
        prompt: Tokens of the prompt, with :data:`hil.core.steps.TURN_END` between turns.
        tokens: Chosen tokens, in the same form.
        link_ns: Time to send the inputs and to receive the response; 0 if unknown.
    """
    iterations = split_calls(result.iterations_ns, calls, prompt, tokens)
    if not iterations:
        return None
    prompt_tokens = sum(map(len, split_turns(prompt)))
    most = max(len(one.steps) for one in iterations)
    complete = [one for one in iterations if len(one.steps) == most]
    steps = [compute_duration(call) for one in iterations for call in one.steps]
    prefill = [one.prefill_ns for one in iterations]
    decode = [sum(map(compute_duration, one.steps)) for one in complete]
    gaps = [gap for one in iterations for gap in one.gaps_ns]
    by_step = np.median([[compute_duration(call) for call in one.steps[:MAX_TIMES]] for one in complete], axis=0)
    ttft_ns = float(np.median([one.ttft_ns for one in iterations]))
    return GenerationTimes(
        iterations=len(iterations),
        steps=len(steps),
        ttft_ns=ttft_ns,
        host_ttft_ns=ttft_ns + link_ns if link_ns else None,
        tpot_p50_ns=_compute_percentile(steps, 50),
        tpot_p90_ns=_compute_percentile(steps, 90),
        tpot_max_ns=_compute_percentile(steps, 100),
        sampling_ns=_compute_percentile(gaps, 50),
        prefill_tokens_per_s=_compute_rate(prompt_tokens, prefill),
        decode_tokens_per_s=_compute_rate(most, decode),
        prefill_ns=prefill[:MAX_TIMES],
        decode_ns=decode[:MAX_TIMES] if most else [],
        step_ns=[round(value) for value in by_step.tolist()],
    )


def split_calls(
    iterations_ns: Iterable[tuple[int, int]], calls: Sequence[StepCall], prompt: Iterable[int], tokens: Iterable[int]
) -> list[TokenTimes]:
    """Assign the calls to the iterations by their times. Iterations with missing calls of prompts are dropped.

    Args:
        prompt: Tokens of the prompt, with :data:`hil.core.steps.TURN_END` between turns.
        tokens: Chosen tokens, in the same form.
    """
    turns = [(len(turn), len(picked)) for turn, picked in zip(split_turns(prompt), split_turns(tokens), strict=False)]
    found = []
    starts = [call.start_ns for call in calls]
    for start, end in iterations_ns:
        own = iter(calls[bisect.bisect_left(starts, start) : bisect.bisect_right(starts, end)])
        prompts: list[list[StepCall]] = []
        steps: list[StepCall] = []
        missing = 0
        for size, chosen in turns:
            prompts.append([])
            missing = size
            while missing > 0 and (call := next(own, None)) is not None:
                prompts[-1].append(call)
                missing -= call.tokens
            if missing:
                break
            steps += itertools.islice(own, max(chosen - 1, 0))
        if prompts and prompts[0] and not missing:
            found.append(TokenTimes(start, prompts[0][-1].end_ns, [*itertools.chain(*prompts)], steps))
    return found


def compute_duration(call: StepCall) -> int:
    """Return the duration of a call in nanoseconds."""
    return max(call.end_ns - call.start_ns, 0)


def _compute_percentile(values: Sequence[int], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _compute_rate(tokens: int, times_ns: Sequence[int]) -> float | None:
    """Return tokens per second at the median time."""
    spent = float(np.median(times_ns))
    return tokens / spent * 1e9 if tokens and spent else None
