"""Define the results of a generation, of its comparison, and the faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from hil.core.results import Outcome
from hil.core.steps import TokenPlaces
from hil.core.tensors import Array


class FaultKind(str, Enum):
    """Cause of a wrong generation."""

    NONFINITE = "overflow"
    STALE = "stale cache"
    SAMPLER = "sampler"
    SLOT = "slot"
    POSITION = "position"
    MASK = "mask"
    LAYER = "layer"
    HEAD = "head"
    FLIP = "flip"
    LOGITS = "logits"
    MODEL = "model"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class CacheRows:
    """Content of a cache tensor: one row per position.

    Attributes:
        rows: Array [positions, values].
        first: Position of the first row. A recurrent state has a single row, at the last position.
    """

    name: str
    layer: int
    is_key: bool
    rows: Array
    first: int = 0


@dataclass(frozen=True)
class Generated:
    """Result of a generation.

    Attributes:
        places: Positions of the tokens.
        positions: Position of each row of the logits [rows].
        logits: Array [rows, vocabulary].
        tokens: Tokens after the prompt and after each step of every turn.
        text: Token of each position of the given text; -1 for tokens that the board chose.
        prefill: Logits of all positions [positions, vocabulary], from a run with all tokens as the prompt; None if not
            measured.
    """

    places: TokenPlaces
    positions: Array
    logits: Array
    tokens: Array
    cache: tuple[CacheRows, ...] = ()
    prefill: Array | None = None
    text: Array = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class Perplexity:
    """Negative log-likelihood of known tokens, in nats.

    Attributes:
        tokens: Number of predicted tokens.
        board_nats: Mean of -log p(token), with p from the logits of the previous position.
        error_nats: Standard error of the mean difference between board and reference; NaN for one token.
    """

    tokens: int
    board_nats: float
    reference_nats: float
    error_nats: float


@dataclass(frozen=True)
class RowResult:
    """Comparison of the logits of a position.

    Attributes:
        kl: KL divergence of the board's distribution from that of the reference, in nats.
        max_abs: Largest difference of a logit.
        margin: Difference of the two largest logits of the reference.
        expected: Token with the largest logit of the reference.
        actual: Token with the largest logit of the board.
    """

    position: int
    kl: float
    max_abs: float
    margin: float
    expected: int
    actual: int
    passed: bool


@dataclass(frozen=True)
class CacheErrors:
    """Comparison of a cache tensor.

    Attributes:
        errors: Largest error of each position's entry, divided by the permitted error [positions].
        first: Position of the first entry. For a state without positions, this is the last position.
    """

    name: str
    layer: int
    is_key: bool
    errors: Array
    first: int = 0


@dataclass(frozen=True)
class GenerationFault:
    """Fault and where it occurred. ``step`` is 0 in a prompt. ``layer`` is -1 if unknown or outside the layers."""

    kind: FaultKind
    position: int
    step: int
    tensor: str = ""
    layer: int = -1
    phase: str = ""  # "prefill only", "decode only" or ""

    def __str__(self) -> str:
        parts = [f"layer {self.layer}"] if self.layer >= 0 else []
        if self.kind is not FaultKind.LAYER:
            parts.insert(0, str(self.kind))
        parts.append(f"step {self.step}" if self.step else "in the prompt")
        parts.append(f"position {self.position}")
        if self.tensor:
            parts.append(self.tensor)
        if self.phase:
            parts.append(self.phase)
        return ", ".join(parts)


@dataclass(frozen=True)
class GenerationVerdict:
    """Verdict on a generation.

    Attributes:
        kl_bound: Permitted divergence of a position, in nats.
        error_bound: Permitted difference of a logit.
        top: k -> mean share of the reference's k largest logits that are also among the board's k largest.
        first_divergent: Number of the first chosen token that differs from the reference's token, from 0; None if all
            are equal.
        cache: Comparison of the cache tensors that have the same shape as in the reference.
    """

    outcome: Outcome
    reason: str
    rows: tuple[RowResult, ...]
    kl_bound: float
    error_bound: float
    fault: GenerationFault | None = None
    notes: tuple[str, ...] = ()
    top: Mapping[int, float] = field(default_factory=dict)
    first_divergent: int | None = None
    perplexity: Perplexity | None = None
    cache: tuple[CacheErrors, ...] = ()
