"""Records of generations, as `hil run --generate` writes them."""

from __future__ import annotations

from typing import Any

from hil.controller.records.base import make_record
from hil.controller.records.measurements.generation import StoredGeneration
from hil.core.steps import TokenPlaces

TIMES = {
    "iterations": 2,
    "steps": 4,
    "ttft_ns": 2e6,
    "tpot_p50_ns": 5e5,
    "tpot_p90_ns": 7e5,
    "tpot_max_ns": 9e5,
    "sampling_ns": 1e4,
    "prefill_tokens_per_s": 1500.0,
    "decode_tokens_per_s": 1600.0,
    "prefill_ns": [2_000_000, 4_000_000],
    "decode_ns": [1_000_000, 1_000_000],
    "step_ns": [500_000, 500_000],
}


def place_tokens(prompt: int, chosen: int) -> TokenPlaces:
    """Return the positions of a prompt of one turn and its chosen tokens."""
    return TokenPlaces.from_turns([0] * prompt, [0] * chosen)


def make_position(position: int, **values: Any) -> dict[str, Any]:
    """Return a passing position with changed fields."""
    right = {"kl": 1e-9, "max_abs": 1e-5, "margin": 0.5, "expected": 7, "actual": 7, "passed": True}
    return {"position": position, **right, **values}


def stored_generation(**values: Any) -> StoredGeneration:
    """Return the record of a passing generation: a prompt of 3 tokens and 2 steps, with changed fields."""
    given = {
        "prompt": "hello",
        "prompt_tokens": [1, 2, 3],
        "forced": [],
        "tokens": [7, 7, 7],
        "steps": 2,
        "chunk": 0,
        "bound": 64,
        "kl_bound": 1e-6,
        "error_bound": 1e-4,
        "positions": [make_position(position) for position in range(2, 5)],
        "top1": 1.0,
        "times": TIMES,
    }
    return make_record({**given, **values}, StoredGeneration)
