"""Record of a generation: tokens, comparison of each position with the reference, and times."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hil.controller.records.base import Count, Number, Record, note

# Maximum numbers of stored values.
MAX_ROWS, MAX_TIMES = 4096, 10_000
# Maximum size of a cache map: layers and positions.
MAX_LAYERS, MAX_COLUMNS = 64, 256
# Token ids. -1 is between the turns of a conversation.
Tokens = list[int]
Share = Annotated[float, Meta(ge=0, le=1)] | None
_Times = Annotated[list[Count], Meta(max_length=MAX_TIMES)]


class StoredFault(Record, kw_only=True):
    """First fault of a generation."""

    kind: Annotated[
        str, note("cause: overflow, stale cache, sampler, slot, position, mask, layer, head, flip, logits, model")
    ]
    position: Count
    step: Annotated[Count, note("number of the step, from 1; 0 is in the prompt")]
    layer: Annotated[Count | None, note("layer, from 0; null if unknown or outside the layers")]
    tensor: Annotated[str, note("first wrong output, or empty")]
    phase: Annotated[
        Literal["prefill only", "decode only", ""],
        note("calls with wrong outputs: only the prompt, or only the steps; empty if both or unknown"),
    ]


class StoredPosition(Record, kw_only=True):
    """Logits at a position, compared with the reference's."""

    position: Count
    kl: Annotated[Number, note("divergence from the reference's distribution, in nats")]
    max_abs: Annotated[Number, note("largest difference of a logit")]
    margin: Annotated[Number, note("difference of the two largest logits of the reference")]
    expected: Annotated[int, note("token with the reference's largest logit")]
    actual: Annotated[int, note("token with the board's largest logit")]
    passed: bool


class StoredPerplexity(Record, kw_only=True):
    """Perplexity of the known tokens: the tokens of the prompt and the forced tokens.

    The perplexity is exp(mean of -log p(token)), with p from the logits of the position before.
    """

    tokens: Annotated[Count, note("number of predicted tokens")]
    board_nats: Annotated[Number, note("mean of -log p of the board; the perplexity is its exponential")]
    reference_nats: Number
    error_nats: Annotated[Number, note("standard error of the mean difference board - reference; null for one token")]
    file: Annotated[str, note("text file of the tokens, or empty")] = ""


class StoredCacheRow(Record, kw_only=True):
    """Errors of cache entries, relative to the bound: above 1 is wrong."""

    layer: Annotated[Count, note("first layer of the row")]
    keys: Annotated[
        list[Number], note("largest error of the layers' keys, per column of positions", max_length=MAX_COLUMNS)
    ]
    values: Annotated[list[Number], note("as keys, for the layers' values", max_length=MAX_COLUMNS)]


class StoredCacheMap(Record, kw_only=True):
    """Errors of the cache by layer and position."""

    positions: Count
    stride: Annotated[int, note("positions per column", ge=1)]
    layers: Annotated[int, note("layers per row", ge=1)]
    rows: Annotated[list[StoredCacheRow], Meta(max_length=MAX_LAYERS)]


class GenerationTimes(Record, kw_only=True):
    """Times of the timed iterations in nanoseconds, on the board's clock.

    A call runs the program once and reads the logits. hil chooses the next token and makes the inputs between calls.
    """

    iterations: Annotated[Count, note("iterations with a complete prompt")]
    steps: Annotated[Count, note("steps of all iterations")]
    ttft_ns: Annotated[
        float | None,
        note("time to first token: median time from an iteration's start to the end of the prompt's calls"),
    ]
    host_ttft_ns: Annotated[
        float | None,
        note("ttft_ns and the time to send the inputs and receive the response without outputs; null if unknown"),
    ] = None
    tpot_p50_ns: Annotated[float | None, note("time per output token: duration of a step's call; null without steps")]
    tpot_p90_ns: float | None
    tpot_max_ns: float | None
    sampling_ns: Annotated[float | None, note("median time between two calls; not part of TPOT and tokens/s")]
    prefill_tokens_per_s: Annotated[float | None, note("prompt tokens / duration of the prompt's calls; median")]
    decode_tokens_per_s: Annotated[float | None, note("steps / duration of their calls; median")]
    prefill_ns: Annotated[_Times, note("duration of the prompt's calls, per iteration")] = []
    decode_ns: Annotated[_Times, note("duration of the steps' calls, per iteration with all steps")] = []
    step_ns: Annotated[_Times, note("median duration of each step's call over the iterations")] = []


class StoredGeneration(Record, kw_only=True):
    """Result of --generate for a prompt."""

    prompt: Annotated[str, note("name of the prompt")]
    prompt_tokens: Annotated[Tokens, note("token ids; -1 is between the turns of a conversation")]
    forced: Annotated[Tokens, note("tokens that the steps ran, with -1 between turns; empty if the board chose them")]
    tokens: Annotated[
        Tokens,
        note("tokens with the board's largest logit, after the prompt and each step of a turn, with -1 between turns"),
    ]
    steps: Annotated[Count, note("calls after the prompts")]
    chunk: Annotated[Count, note("prompt tokens per call; 0 is all")]
    bound: Annotated[Count | None, note("number of positions in the cache; null if unlimited")]
    fault: StoredFault | None = None
    kl_bound: Annotated[Number, note("permitted divergence of a position; null if not compared")] = None
    error_bound: Annotated[Number, note("permitted difference of a logit; null if not compared")] = None
    positions: Annotated[
        list[StoredPosition], note("wrong positions first if there are more", max_length=MAX_ROWS)
    ] = []
    top1: Annotated[Share, note("share of positions whose largest logit is the reference's")] = None
    top5: Annotated[Share, note("mean share of the reference's five largest logits among the board's")] = None
    top100: Share = None
    perplexity: Annotated[StoredPerplexity | None, note("null without known next tokens")] = None
    first_divergent: Annotated[
        Count | None, note("first chosen token that differs from the reference's, from 0; null if none does")
    ] = None
    cache: Annotated[StoredCacheMap | None, note("null if the cache was not compared")] = None
    notes: list[str] = []
    times: Annotated[GenerationTimes | None, note("null without timed calls")] = None
