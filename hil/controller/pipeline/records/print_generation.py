"""Describe the verdict and the times of a generation, for terminals and reports."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hil.controller.records.base import Number, parse_number
from hil.controller.records.measurements.generation import (
    GenerationTimes,
    StoredGeneration,
    StoredPerplexity,
    StoredPosition,
)
from hil.controller.storage.screen.texts import format_count, format_seconds, keep_together, print_labelled
from hil.core.steps import TokenPlaces, split_turns

if TYPE_CHECKING:
    from rich.console import Console

    from hil.controller.records.run import RunCase

# 97.5 % quantile of the normal distribution.
_Z95 = 1.959964
# Name of a case with a text window: model and prompt at the start, sizes at the end.
_WINDOW = re.compile(r"(.*)-window-\d+(.*)", re.S)
_MAX_EXPONENT = 700.0


def print_generation(console: Console, generation: StoredGeneration) -> None:
    """Print labelled lines about the tokens, the logits, and the times."""
    for label, parts in describe_generation(generation):
        print_labelled(console, label, ", ".join(map(keep_together, parts)) if len(parts) > 1 else parts[0])


def describe_generation(generation: StoredGeneration) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (label, parts of the text) for tokens, logits, agreement, notes and times."""
    yield "tokens", _describe_tokens(generation)
    if generation.positions:
        yield "logits", _describe_logits(generation)
        if agreement := _describe_agreement(generation):
            yield "agreement", agreement
    if generation.perplexity is not None:
        yield "perplexity", describe_perplexity([generation.perplexity])
    for note in generation.notes:
        yield "note", [note]
    if generation.times is not None:
        places = TokenPlaces.from_turns(generation.prompt_tokens, generation.tokens)
        yield from describe_times(generation.times, places.steps, generation.bound)


def find_worst_position(generation: StoredGeneration) -> StoredPosition | None:
    """Return the first position with the largest divergence. NaN counts as the largest."""
    return max(generation.positions, key=lambda one: _rank_number(one.kl), default=None)


def _rank_number(value: Number) -> tuple[bool, float]:
    number = parse_number(value)
    return (True, 0.0) if number is None or number != number else (False, number)


def _format_number(value: Number) -> str:
    number = parse_number(value)
    return "-" if number is None else f"{number:.3g}"


def _describe_tokens(generation: StoredGeneration) -> list[str]:
    source = "forced" if generation.forced else "chosen by the board"
    step = generation.first_divergent
    steps = format_count(generation.steps, "step") + (f" ({source})" if generation.steps else "")
    sizes = [len(turn) for turn in split_turns(generation.prompt_tokens)]
    prompts = f"prompt{'s' if len(sizes) > 1 else ''} of {' and '.join(map(str, sizes))}"
    parts = [prompts, steps]
    if generation.positions:
        parts.append("same as the reference" if step is None else f"token {step} differs from the reference")
    return parts


def _describe_logits(generation: StoredGeneration) -> list[str]:
    worst = find_worst_position(generation)
    assert worst is not None
    bound = f"bound {_format_number(generation.kl_bound)}"
    return [f"worst KL {_format_number(worst.kl)} at position {worst.position}", bound]


def _describe_agreement(generation: StoredGeneration) -> list[str]:
    shares = {f"top-{k}": getattr(generation, f"top{k}") for k in (1, 5, 100)}
    return [f"{name} {100 * share:.4g} %" for name, share in shares.items() if share is not None]


def describe_perplexity(texts: Sequence[StoredPerplexity]) -> list[str]:
    """Describe the perplexity of the tokens of one or more cases, with a 95 % interval of the ratio to the reference.

    The interval assumes that the differences of tokens are independent.
    """
    total = sum(one.tokens for one in texts)
    means = [(parse_number(one.board_nats), parse_number(one.reference_nats)) for one in texts]
    if not total or any(None in pair for pair in means):
        return ["-"]
    weights = [one.tokens / total for one in texts]
    board, reference = (
        sum(weight * (value or 0.0) for weight, value in zip(weights, values, strict=True))
        for values in zip(*means, strict=True)
    )
    errors = [parse_number(one.error_nats) or 0.0 for one in texts]
    error = math.hypot(*(weight * own for weight, own in zip(weights, errors, strict=True)))
    low, ratio, high = (_compute_exponential(board - reference + sign * _Z95 * error) for sign in (-1, 0, 1))
    return [
        f"{_compute_exponential(board):.5g} over {format_count(total, 'token')}",
        f"reference {_compute_exponential(reference):.5g}",
        f"ratio {ratio:.6g} (95 %: {low:.6g} to {high:.6g})",
    ]


def describe_texts(cases: Iterable[RunCase]) -> Iterator[str]:
    """Yield a line for every combination of model, size and prompt with windows: the perplexity over all windows."""
    texts: dict[tuple[str, ...], list[StoredPerplexity | None]] = {}
    for case in cases:
        if match := _WINDOW.match(case.name):
            texts.setdefault(match.groups(), []).append(case.generation.perplexity if case.generation else None)
    for name, windows in texts.items():
        found = [one for one in windows if one is not None and one.file]
        if found and len(windows) > 1:
            parts = describe_perplexity(found)
            if len(found) < len(windows):
                parts.append(f"{format_count(len(windows) - len(found), 'window')} of {len(windows)} without result")
            yield f"perplexity of {''.join(name)} ({found[0].file}): {', '.join(parts)}"


def _compute_exponential(value: float) -> float:
    return math.inf if value >= _MAX_EXPONENT else math.exp(value)


def describe_times(
    times: GenerationTimes, depths: Sequence[int], bound: int | None
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (label, parts of the text) for the times.

    Args:
        depths: Number of cached tokens before each step.
    """
    if times.ttft_ns is not None:
        host = [] if times.host_ttft_ns is None else [f"{format_seconds(times.host_ttft_ns / 1e9)} on the host"]
        yield (
            "TTFT",
            [format_seconds(times.ttft_ns / 1e9), *host, f"prefill {_format_rate(times.prefill_tokens_per_s)}"],
        )
    percentiles = {"p50": times.tpot_p50_ns, "p90": times.tpot_p90_ns, "max": times.tpot_max_ns}
    shown = [f"{name} {format_seconds(ns / 1e9)}" for name, ns in percentiles.items() if ns is not None]
    if shown:
        depth = f"at depth {depths[0]} to {depths[-1]}" if depths else ""
        depth += f" of {bound}" if bound else ""
        yield "TPOT", [*shown, f"decode {_format_rate(times.decode_tokens_per_s)} {depth}"]
    if times.sampling_ns is not None:
        yield "sampling", [f"p50 {format_seconds(times.sampling_ns / 1e9)} between calls, not in TPOT"]


def _format_rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f} tokens/s" if rate >= 100 else f"{rate:.3g} tokens/s"
