"""Describe the verdict and the times of a generation, for terminals and reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hil.controller.records.base import Number, parse_number
from hil.controller.records.generation import GenerationTimes, StoredGeneration, StoredPosition
from hil.controller.storage.screen.texts import counted, say, seconds, together

if TYPE_CHECKING:
    from rich.console import Console


def print_generation(console: Console, generation: StoredGeneration) -> None:
    """Print labelled lines about the tokens, the logits, and the times."""
    for label, parts in describe_generation(generation):
        say(console, label, ", ".join(map(together, parts)) if len(parts) > 1 else parts[0])


def describe_generation(generation: StoredGeneration) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield labels and the parts of their texts: tokens, logits, agreement, notes, times."""
    yield "tokens", _describe_tokens(generation)
    if generation.positions:
        yield "logits", _describe_logits(generation)
        if agreement := _describe_agreement(generation):
            yield "agreement", agreement
    for note in generation.notes:
        yield "note", [note]
    if generation.times is not None:
        yield from _describe_times(generation, generation.times)


def worst_position(generation: StoredGeneration) -> StoredPosition | None:
    """Return the position with the largest divergence, the first one of equals. NaN is the largest."""
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
    steps = counted(generation.steps, "step") + (f" ({source})" if generation.steps else "")
    parts = [f"prompt of {len(generation.prompt_tokens)}", steps]
    if generation.positions:
        where = "the prompt" if step == 0 else f"step {step}"
        parts.append("same as the reference" if step is None else f"differs from the reference after {where}")
    return parts


def _describe_logits(generation: StoredGeneration) -> list[str]:
    worst = worst_position(generation)
    assert worst is not None
    bound = f"bound {_format_number(generation.kl_bound)}"
    return [f"worst KL {_format_number(worst.kl)} at position {worst.position}", bound]


def _describe_agreement(generation: StoredGeneration) -> list[str]:
    shares = {f"top-{k}": getattr(generation, f"top{k}") for k in (1, 5, 100)}
    return [f"{name} {100 * share:.4g} %" for name, share in shares.items() if share is not None]


def _describe_times(generation: StoredGeneration, times: GenerationTimes) -> Iterator[tuple[str, Sequence[str]]]:
    prompt, bound = len(generation.prompt_tokens), generation.bound
    if times.ttft_ns is not None:
        yield "TTFT", [seconds(times.ttft_ns / 1e9), f"prefill {_format_rate(times.prefill_tokens_per_s)}"]
    percentiles = {"p50": times.tpot_p50_ns, "p90": times.tpot_p90_ns, "max": times.tpot_max_ns}
    shown = [f"{name} {seconds(ns / 1e9)}" for name, ns in percentiles.items() if ns is not None]
    if shown:
        last = prompt + generation.steps - 1
        depth = f"at depth {prompt} to {last}" + (f" of {bound}" if bound else "")
        yield "TPOT", [*shown, f"decode {_format_rate(times.decode_tokens_per_s)} {depth}"]
    if times.sampling_ns is not None:
        yield "sampling", [f"p50 {seconds(times.sampling_ns / 1e9)} between calls, not in TPOT"]


def _format_rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f} tokens/s" if rate >= 100 else f"{rate:.3g} tokens/s"
