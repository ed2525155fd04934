"""Plan of a decoder's run: a prompt, then one token per step.

A :class:`StepsPlan` defines the inputs of each call. :class:`hil.core.stepped_program.SteppedProgram` executes the
plan.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from hil.core.tensors import Array, TensorSpec, get_float_limits, parse_dtype
from hil.errors import UsageError

# Inputs of a stepped program, before the program's constant inputs.
PROMPT, FORCED, OTHER_PROMPT = INPUTS = ("prompt", "forced", "other_prompt")
# Outputs of a stepped program, before the cache.
LOGITS, POSITIONS, TOKENS = OUTPUTS = ("logits", "positions", "tokens")
MAX_STEPS = 1 << 16
# Separates the turns of a conversation in prompts, forced tokens and chosen tokens.
TURN_END = -1
# Maximum number of calls whose times are recorded.
MAX_CALLS = 50_000
# Maximum number of functions for prompts.
MAX_PROMPT_FUNCTIONS = 64
_SEQUENCES = ("rules", "feedback", "shapes", "stop", "prompts")
# Value of a hidden position in an additive mask. Minus infinity would result in NaN for a row without visible
# positions.
_MASKED = -3.4028234663852886e38
# Names of recurrent states, which have no axis of positions: convolutions, state space models, linear attention.
_STATE = re.compile(r"conv|ssm|state|recurrent")


class StepRule(str, Enum):
    """Content of a program's input in each call. The call has S new tokens after n earlier tokens."""

    TOKENS = "tokens"  # the new tokens
    POSITIONS = "positions"  # n to n + S - 1; only n if the input has a single element
    MASK = "mask"  # visible positions: for all tokens [.., n + S], or for each new token [.., S, n + S]
    LENGTH = "length"  # n + S
    LAST = "last"  # n + S - 1

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class PromptFunction:
    """Another function of the program, for multiple tokens of a prompt.

    Attributes:
        name: Name of the function.
        inputs: For each input of the program, the number of this function's input; -1 if missing.
        outputs: For each output of the program, the number of this function's output; -1 if missing.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class StepsPlan:
    """Plan to run a program repeatedly. Inputs and outputs are numbered from 0.

    Attributes:
        rules: Input -> rule. Exactly one input has the tokens.
        feedback: (input, output): the input is the output of the previous call.
        logits: Output with the logits, either of all tokens of a call or only of the last token.
        steps: Maximum number of calls after the prompt, in each turn.
        chunk: Number of prompt tokens per call; 0 runs the whole prompt in one call.
        stop: Tokens that end a turn.
        bound: Maximum number of tokens in the cache; 0 if unlimited.
        shapes: Shape of each empty cache tensor, in the order of ``feedback``.
        prompts: Functions that process the prompt except its last token. Each function has a number of tokens per call.
    """

    rules: tuple[tuple[int, StepRule], ...]
    feedback: tuple[tuple[int, int], ...]
    logits: int
    steps: int
    chunk: int = 0
    stop: tuple[int, ...] = ()
    bound: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    prompts: tuple[PromptFunction, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        rules = [[place, rule.value] for place, rule in self.rules]
        return {**vars(self), "rules": rules, "prompts": [vars(one) for one in self.prompts]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StepsPlan:
        """Create a plan from the result of :meth:`to_json`. Raises UsageError for other values."""
        try:
            rules = tuple((_number(place), StepRule(rule)) for place, rule in values["rules"])
            feedback = tuple((_number(place), _number(output)) for place, output in values["feedback"])
            stop = tuple(map(_number, values["stop"]))
            shapes = tuple(tuple(map(_number, shape)) for shape in values["shapes"])
            prompts = tuple(
                PromptFunction(
                    str(one["name"]), tuple(map(_number, one["inputs"])), tuple(map(_number, one["outputs"]))
                )
                for one in values["prompts"]
            )
            numbers = {name: _number(value) for name, value in values.items() if name not in _SEQUENCES}
            return cls(rules=rules, feedback=feedback, shapes=shapes, stop=stop, prompts=prompts, **numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"invalid steps: {error}") from error

    @property
    def tokens(self) -> int:
        """Number of the input with the tokens."""
        return next(place for place, rule in self.rules if rule is StepRule.TOKENS)

    def takes_single_tokens(self, inputs: Sequence[TensorSpec]) -> bool:
        """Return True if a program with these inputs takes one token per call."""
        return inputs[self.tokens].shape[-1:] in ((), (1,))

    def find_axes(self, inputs: Sequence[TensorSpec]) -> list[int | None]:
        """Return the axis of the positions of each cache tensor, in the order of ``feedback``; None for a state."""
        names = [inputs[place].name for place, _ in self.feedback]
        return [
            shape.index(0) if 0 in shape else find_fixed_axis(name, shape, self.bound) if self.bound else None
            for name, shape in zip(names, self.shapes, strict=True)
        ]

    def can_hide_entry(self, inputs: Sequence[TensorSpec]) -> bool:
        """Return True if the cache may start with an entry that the mask hides, instead of being empty.

        The program then needs explicit positions. Otherwise, the entry could change the positions of the tokens.
        """
        rules = {rule: inputs[place] for place, rule in self.rules}
        mask = rules.get(StepRule.MASK)
        is_possible = mask is not None and bool(mask.shape) and not isinstance(mask.shape[-1], int)
        others = rules.keys() - {StepRule.TOKENS, StepRule.POSITIONS, StepRule.MASK}
        is_empty = [shape.count(0) for shape in self.shapes]
        return is_possible and StepRule.POSITIONS in rules and not others and max(is_empty, default=0) == 1

    def check(self, inputs: int, outputs: int) -> None:
        """Raise UsageError if the plan does not fit a program with this many inputs and outputs."""
        used = [place for place, _ in (*self.rules, *self.feedback)]
        made = [self.logits, *(place for _, place in self.feedback)]
        if sorted(set(used)) != sorted(used) or not all(0 <= place < inputs for place in used):
            raise UsageError(
                f"invalid steps: inputs {used} are repeated or out of range; the program has {inputs} inputs"
            )
        if not all(0 <= place < outputs for place in made):
            raise UsageError(f"invalid steps: outputs {made} are out of range; the program has {outputs} outputs")
        if len(self.shapes) != len(self.feedback):
            raise UsageError(f"invalid steps: {len(self.shapes)} shapes for {len(self.feedback)} cache tensors")
        if [rule for _, rule in self.rules].count(StepRule.TOKENS) != 1:
            raise UsageError("invalid steps: one input must take the tokens")
        if not 0 <= self.steps <= MAX_STEPS or self.chunk < 0 or self.bound < 0:
            raise UsageError(f"invalid steps: {self.steps} steps, maximum {MAX_STEPS}")
        if len(self.prompts) > MAX_PROMPT_FUNCTIONS:
            raise UsageError(f"invalid steps: {len(self.prompts)} prompt functions, maximum {MAX_PROMPT_FUNCTIONS}")
        fed = [self.tokens, *(place for place, _ in self.feedback)]
        for one in self.prompts:
            if len(one.inputs) != inputs or min(one.inputs[place] for place in fed) < 0:
                raise UsageError(f"invalid steps: function {one.name!r} has invalid inputs {one.inputs}")
            if len(one.outputs) != outputs or any(one.outputs[place] < 0 for _, place in self.feedback):
                raise UsageError(f"invalid steps: function {one.name!r} has invalid outputs {one.outputs}")


@dataclass
class StepCall:
    """Call of the program: number of tokens, and start and end on the board's clock in nanoseconds."""

    tokens: int
    start_ns: int
    end_ns: int


def find_fixed_axis(name: str, shape: Sequence[int | str | None], bound: int) -> int | None:
    """Return the axis of positions of a cache tensor with known sizes, or None for a recurrent state.

    The axis has the size ``bound``. If multiple axes have this size, the second axis from the end takes precedence. If
    ``bound`` is 0, the function returns the second axis from the end.
    """
    if _STATE.search(name.lower()):
        return None
    usual = max(len(shape) - 2, 0)
    places = [axis for axis, size in enumerate(shape) if axis and size == bound]
    return usual if usual in places or not bound else next(iter(places), None)


def make_empty_cache(inputs: Sequence[TensorSpec], plan: StepsPlan, hidden: int = 0) -> dict[int, Array]:
    """Return the cache before the first call of a prompt: output -> content.

    Args:
        hidden: Number of entries that the mask hides, see :meth:`StepsPlan.can_hide_entry`.
    """
    return {
        output: np.zeros([size or hidden for size in shape], parse_dtype(inputs[place].dtype))
        for (place, output), shape in zip(plan.feedback, plan.shapes, strict=True)
    }


def make_rule_inputs(
    inputs: Sequence[TensorSpec], plan: StepsPlan, tokens: Sequence[int], position: int, hidden: int = 0
) -> dict[int, Array]:
    """Compute the inputs with a rule for new tokens: number of the input -> array.

    Args:
        position: Position of the first token.
        hidden: Number of entries at the start of the cache that the mask hides.
    """
    return {
        place: _make_mask(inputs[place], tokens, position, hidden)
        if rule is StepRule.MASK
        else _MAKERS[rule](inputs[place], tokens, position)
        for place, rule in plan.rules
    }


def split_turns(tokens: Iterable[int]) -> list[list[int]]:
    """Return the tokens of each turn."""
    turns: list[list[int]] = [[]]
    for token in map(int, tokens):
        if token == TURN_END:
            turns.append([])
        else:
            turns[-1].append(token)
    return turns


def join_turns(turns: Iterable[Iterable[int]]) -> list[int]:
    """Return the tokens of all turns, separated by :data:`TURN_END`."""
    return [token for number, turn in enumerate(turns) for token in (*[TURN_END] * bool(number), *turn)]


@dataclass(frozen=True)
class TokenPlaces:
    """Positions of a run's tokens.

    Attributes:
        chosen: Position of the logits from which each token was chosen.
        steps: Position of each step's token.
    """

    chosen: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def from_turns(cls, prompt: Iterable[int], tokens: Iterable[int]) -> TokenPlaces:
        """Compute the positions from a prompt and from the tokens that a stepped program returned."""
        chosen: list[int] = []
        steps: list[int] = []
        position = 0
        for turn, picked in zip(split_turns(prompt), split_turns(tokens), strict=False):
            position += len(turn)
            chosen += range(position - 1, position - 1 + len(picked))
            steps += range(position, position - 1 + len(picked))
            position += max(len(picked) - 1, 0)
        return cls(tuple(chosen), tuple(steps))

    def step_of(self, position: int) -> int:
        """Return the number of the step at a position, counted from 1; 0 in a prompt."""
        place = bisect.bisect_left(self.steps, position)
        return place + 1 if self.steps[place : place + 1] == (position,) else 0


def make_stepped_outputs(outputs: Sequence[TensorSpec], plan: StepsPlan) -> tuple[TensorSpec, ...]:
    """Return the output specs of :class:`hil.core.stepped_program.SteppedProgram` for a decoder with these outputs."""
    logits = outputs[plan.logits]
    return (
        TensorSpec(LOGITS, logits.dtype, ("rows", logits.shape[-1] if logits.shape else "vocabulary")),
        TensorSpec(POSITIONS, "int64", ("rows",)),
        TensorSpec(TOKENS, "int64", ("steps",)),
        *(outputs[output] for _, output in plan.feedback),
    )


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected a whole number, got {value!r:.40}")
    return value


def _reshape(spec: TensorSpec, array: Array) -> Array:
    """Convert an array to the spec's dtype and rank. Missing leading dimensions become 1."""
    rank = len(spec.shape)
    if not rank:
        return array.astype(parse_dtype(spec.dtype)).reshape(())
    return np.ascontiguousarray(array.astype(parse_dtype(spec.dtype))).reshape((1,) * (rank - array.ndim) + array.shape)


def _make_tokens(spec: TensorSpec, tokens: Sequence[int], position: int) -> Array:
    return _reshape(spec, np.array(tokens, np.int64))


def _make_positions(spec: TensorSpec, tokens: Sequence[int], position: int) -> Array:
    if not spec.shape:
        return np.array(position, parse_dtype(spec.dtype))
    count = 1 if spec.shape[-1] == 1 else len(tokens)
    return _reshape(spec, np.arange(position, position + count, dtype=np.int64))


def _make_mask(spec: TensorSpec, tokens: Sequence[int], position: int, hidden: int = 0) -> Array:
    position += hidden
    total = position + len(tokens)
    size = spec.shape[-1] if spec.shape and isinstance(spec.shape[-1], int) else total
    last = np.arange(position, total)[:, None] if len(spec.shape) > 2 else np.array(total - 1)
    seen = (np.arange(size) <= last) & (np.arange(size) >= hidden)
    if parse_dtype(spec.dtype).kind in "biu":
        return _reshape(spec, seen)
    lowest = max(_MASKED, float(get_float_limits(parse_dtype(spec.dtype)).min))
    return _reshape(spec, np.where(seen, 0.0, lowest))


def _make_length(spec: TensorSpec, tokens: Sequence[int], position: int) -> Array:
    return _fill(spec, position + len(tokens))


def _make_last(spec: TensorSpec, tokens: Sequence[int], position: int) -> Array:
    return _fill(spec, position + len(tokens) - 1)


def _fill(spec: TensorSpec, value: int) -> Array:
    return np.full([size if isinstance(size, int) else 1 for size in spec.shape], value, parse_dtype(spec.dtype))


_MAKERS: dict[StepRule, Callable[[TensorSpec, Sequence[int], int], Array]] = {
    StepRule.TOKENS: _make_tokens,
    StepRule.POSITIONS: _make_positions,
    StepRule.LENGTH: _make_length,
    StepRule.LAST: _make_last,
}
