"""Run a decoder step by step: a prompt, then one token per step.

A decoder maps tokens and a cache to logits and a new cache. :class:`SteppedProgram` wraps a decoder as a program that
maps a prompt to the logits of all positions. The agent uses this class for programs on the board, and the controller
uses the class for references. So both make the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from hil.core.clock import get_time_ns
from hil.core.steps import (
    INPUTS,
    MAX_CALLS,
    TURN_END,
    PromptFunction,
    StepCall,
    StepsPlan,
    make_empty_cache,
    make_rule_inputs,
    make_stepped_outputs,
    split_turns,
)
from hil.core.tensors import Array, TensorSpec, shape_text
from hil.errors import RunFailed, UsageError

# Token that pads a call to a fixed number of tokens.
_PADDING = 0
# Maximum number of elements in an empty cache tensor.
_MAX_EMPTY = 1 << 40


class DecoderProgram(Protocol):
    """Program that :class:`SteppedProgram` can run. :class:`hil.agent.runtimes.Program` documents the methods."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    function: str

    def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run once with arrays, or with values that an earlier step returned. Return values of the runtime."""

    def to_array(self, place: int, value: Any) -> Array:
        """Convert a value that a step returned for output ``place``."""


class _PromptProgram:
    """Function for a prompt, adapted to the inputs and outputs of the main function. Missing outputs are None.

    Raises UsageError if the function does not fit.
    """

    def __init__(self, function: PromptFunction, opened: DecoderProgram, main: DecoderProgram) -> None:
        used = sorted(place for place in function.inputs if place >= 0)
        if used != list(range(len(opened.inputs))) or max(function.outputs) >= len(opened.outputs):
            raise UsageError(
                f"invalid steps: function {function.name!r} has {len(opened.inputs)} inputs and {len(opened.outputs)} "
                f"outputs, but the steps use inputs {function.inputs} and outputs {function.outputs}"
            )
        pairs = zip(function.inputs, main.inputs, strict=True)
        self.inputs = tuple(opened.inputs[place] if place >= 0 else spec for place, spec in pairs)
        self.outputs = main.outputs
        self.function = function.name
        self._opened, self._places = opened, function

    def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the function once."""
        given = {place: value for place, value in zip(self._places.inputs, inputs, strict=True) if place >= 0}
        made = self._opened.step([given[place] for place in range(len(given))])
        return [made[place] if place >= 0 else None for place in self._places.outputs]

    def to_array(self, place: int, value: Any) -> Array:
        """Convert a value that a step returned."""
        return self._opened.to_array(self._places.outputs[place], value)


class SteppedProgram:
    """Program that runs a prompt and then one token per step.

    Inputs: the prompt (int64 [P]), forced tokens (int64 [F]), another prompt (int64 [Q], may be empty), and the
    program's constant inputs. Each step takes the next forced token. Without forced tokens, each step takes the token
    with the largest logit. If multiple tokens have this logit, the step takes the lowest token.

    A conversation has multiple turns, separated by :data:`TURN_END` in the prompt and the forced tokens. Each turn runs
    its prompt and the steps after the tokens of the earlier turns.

    Outputs: logits [rows, vocabulary], the position of each row (int64 [rows]), tokens (int64 [calls after the prompt
    + 1] per turn: the token with the largest logit after the prompt and after each step), and the cache after the last
    step.

    The other prompt runs before every run except the first, outside the timed section. A program whose cache depends
    on earlier prompts then returns different outputs.

    If a device rejects empty tensors (``rejects_empty`` of the program), the cache starts with an entry that the mask
    hides. The returned cache does not contain this entry.
    """

    def __init__(self, program: Any, plan: StepsPlan) -> None:
        plan.check(len(program.inputs), len(program.outputs))
        self._program = make_step_program(program)
        self._plan = plan
        self._check_cache(self._program)
        self.function: str = program.function
        driven = {place for place, _ in (*plan.rules, *plan.feedback)}
        self._constant = [place for place in range(len(program.inputs)) if place not in driven]
        self._fixed_size = _get_fixed_size(program.inputs[plan.tokens])
        self._prompts = self._open_prompts()
        # Padding needs a cache of fixed size without recurrent states. In a growing cache, padding would stay before
        # later entries. In a recurrent state, padding would count as tokens.
        axes = plan.find_axes(program.inputs)
        self._axes = axes
        needs_entry = getattr(program, "rejects_empty", False) and plan.can_hide_entry(program.inputs)
        self._hidden = int(needs_entry)
        self._can_pad = plan.bound > 0 and all(
            axis is not None and shape[axis] == plan.bound for axis, shape in zip(axes, plan.shapes, strict=True)
        )
        # Number of cache entries from earlier turns, before the prompt's entries.
        self._kept = 0
        ids = tuple(TensorSpec(name, "int64", (f"{name}_tokens",)) for name in INPUTS)
        self.inputs = (*ids, *(program.inputs[place] for place in self._constant))
        self.outputs = make_stepped_outputs(program.outputs, plan)
        self._turns: list[list[int]] = []
        self._forced: list[list[int]] | None = None
        # Maximum number of tokens that a run puts into the cache.
        self._total = 0
        self._other: list[int] = []
        self._given: dict[int, Array] = {}
        self._has_run = False
        self._cache: dict[int, Any] = {}
        self._logits: list[tuple[int, Array]] = []
        self._picked: list[int] = []
        self._step = 0
        self.calls: list[StepCall] = []
        # Function to call before each call of the program, with the first position and the step (0 in a prompt).
        self.note_call: Callable[[int, int], None] = lambda position, step: None

    def _check_cache(self, program: DecoderProgram) -> None:
        """Raise UsageError if a function does not take the empty cache."""
        for (place, _), shape in zip(self._plan.feedback, self._plan.shapes, strict=True):
            spec, dtype = program.inputs[place], self._program.inputs[place].dtype
            if not spec.accepts(dtype, shape) or math.prod(shape) > _MAX_EMPTY or min(shape, default=0) < 0:
                raise UsageError(f"input {spec} does not take an empty cache of shape {shape_text(shape)}")

    def _open_prompts(self) -> list[tuple[int, DecoderProgram]]:
        """Return (number of tokens per call, function) for every prompt function.

        0 means any number of tokens. Raises UsageError if the program lacks a function, or a function does not fit.
        """
        found: list[tuple[int, DecoderProgram]] = []
        for function in self._plan.prompts:
            make = getattr(self._program, "open_function", None)
            if make is None:
                raise UsageError(f"this runtime cannot run function {function.name!r} on the prompt")
            opened = _PromptProgram(function, make_step_program(make(function.name)), self._program)
            self._check_cache(opened)
            tokens = opened.inputs[self._plan.tokens].shape
            size = tokens[-1] if tokens else 1
            found.append((size if isinstance(size, int) else 0, opened))
        return found

    def bind(self, inputs: Sequence[Array]) -> None:
        """Set the prompts and the constant inputs."""
        prompt, forced, other, *constant = inputs
        self._turns, self._other = split_turns(prompt), [int(one) for one in other]
        self._forced = split_turns(forced) if forced.size else None
        self._given = dict(zip(self._constant, constant, strict=True))
        if not all(self._turns):
            raise UsageError("the prompt is empty")
        if self._forced is not None and len(self._forced) != len(self._turns):
            raise UsageError(
                f"got forced tokens for {len(self._forced)} turns, but the prompt has {len(self._turns)} turns"
            )
        self._total = sum(map(len, self._turns)) + sum(map(self._count_steps, range(len(self._turns))))
        if self._plan.bound and max(self._total, len(self._other)) > self._plan.bound:
            raise UsageError(f"{self._total} tokens exceed the cache of {self._plan.bound} tokens")
        self._has_run = False

    def renew(self) -> None:
        """Prepare a run.

        Before the first run, restore the program's state; before each later run, run the other prompt.
        """
        if not self._has_run:
            getattr(self._program, "renew", lambda: None)()
            self._prompts = self._open_prompts()  # a renewed program may have replaced its state
        elif self._other:
            self._start()
            self._run_prompt(self._other, 0)

    def run(self) -> None:
        """Run the prompt and the steps."""
        self._has_run = True
        self._start()
        position = 0
        for number, turn in enumerate(self._turns):
            self._picked += [TURN_END] * bool(number)
            token = self._run_prompt(turn, position)
            position += len(turn)
            self._picked.append(token)
            for step in range(self._count_steps(number)):
                if self._forced is not None:
                    token = self._forced[number][step]
                elif token in self._plan.stop:
                    break
                self._step += 1
                token = self._call(self._program, [token], position, self._step)
                position += 1
                self._picked.append(token)

    def fetch(self) -> list[Array]:
        """Return the outputs of the last run."""
        rows = [row for _, logits in self._logits for row in logits]
        positions = [first + number for first, logits in self._logits for number in range(len(logits))]
        cache = [
            self._remove_hidden(self._program.to_array(output, self._cache[output]), axis, shape)
            for (_, output), axis, shape in zip(self._plan.feedback, self._axes, self._plan.shapes, strict=True)
        ]
        return [np.stack(rows), np.array(positions, np.int64), np.array(self._picked, np.int64), *cache]

    def _remove_hidden(self, array: Array, axis: int | None, shape: Sequence[int]) -> Array:
        """Return a cache tensor without the hidden entry. ``shape`` is the tensor's shape in the plan."""
        if not self._hidden or axis is None or 0 not in shape:
            return array
        return array[(*[slice(None)] * axis, slice(self._hidden, None))]

    def placement(self) -> Any:
        """Return the placement of the program, or None if unknown."""
        return getattr(self._program, "placement", lambda: None)()

    def _count_steps(self, turn: int) -> int:
        """Return the maximum number of steps of a turn."""
        return self._plan.steps if self._forced is None else min(self._plan.steps, len(self._forced[turn]))

    def _start(self) -> None:
        """Prepare the first call of a prompt."""
        self.calls, self._logits, self._picked, self._step = [], [], [], 0
        self._cache = self.start_cache()

    def _run_prompt(self, prompt: Sequence[int], position: int) -> int:
        """Run a prompt whose first token has position ``position``.

        Return the token with the largest logit after the prompt.
        """
        token = 0
        for begin, end, program, padding in self._split_prompt(len(prompt), position):
            token = self._call(program, prompt[begin:end], position + begin, 0, padding)
        return token

    def _split_prompt(self, total: int, position: int) -> Iterator[tuple[int, int, DecoderProgram, int]]:
        """Yield the calls of a prompt at ``position``: first token, end, function, and number of padding tokens.

        As in LiteRT-LM, prompt functions process all tokens except the last. Each call uses the largest function. The
        last of these calls uses the smallest function that is large enough for the remaining tokens. If padding is
        impossible, the remaining tokens run one per call.
        """
        begin, most = 0, self._plan.chunk or total
        while self._prompts and begin < total - 1:
            left = min(total - 1 - begin, most)
            # A call beyond the cache would overwrite earlier entries.
            room = self._plan.bound - self._kept - position - begin if self._can_pad else left
            sized = [(size or left, program) for size, program in self._prompts]
            fitting = [(1, self._program), *((size, program) for size, program in sized if size <= room)]
            size, program = min(fitting, key=lambda one: (one[0] < left, abs(one[0] - left)))
            count = min(size, left)
            yield begin, begin + count, program, size - count
            begin += count
        for first, end in _iter_chunks(total - begin, self._fixed_size or self._plan.chunk):
            yield begin + first, begin + end, self._program, 0

    def start_cache(self) -> dict[int, Any]:
        """Return the cache before the first call of a prompt: output -> content."""
        return dict(make_empty_cache(self._program.inputs, self._plan, self._hidden))

    def _call(self, program: DecoderProgram, tokens: Sequence[int], position: int, step: int, padding: int = 0) -> int:
        """Run the program, or its function for prompts. Return the token with the largest logit, or 0 without logits.

        Args:
            padding: Number of padding tokens to add. Their cache entries are masked until the next calls overwrite
                them.
        """
        feeds = self.make_feeds(program, [*tokens, *[_PADDING] * padding], position)
        self.note_call(position, step)
        start = get_time_ns()
        values = self.run_step(program, feeds, len(tokens), position)
        made = values[self._plan.logits]
        logits = None if made is None else program.to_array(self._plan.logits, made)
        end = get_time_ns()
        if len(self.calls) < MAX_CALLS:
            self.calls.append(StepCall(len(tokens), start, end))
        self._cache = {output: values[output] for _, output in self._plan.feedback}
        if logits is None:
            return 0
        # Copy the logits, because the runtime may reuse their memory in the next call.
        rows = np.array(logits).reshape(-1, logits.shape[-1] if logits.ndim else 1)
        if len(rows) not in (1, len(tokens) + padding):
            raise RunFailed(f"the program returned {len(rows)} rows of logits for {len(tokens) + padding} tokens")
        if padding:
            rows = rows[: len(tokens)] if len(rows) > 1 else rows[:0]  # a single row belongs to the padding
        self._logits.append((position + len(tokens) - len(rows), rows))
        return self.pick_token(rows[-1], position + len(tokens)) if len(rows) else 0

    def run_step(self, program: DecoderProgram, feeds: Sequence[Any], count: int, position: int) -> Sequence[Any]:
        """Run a function for ``count`` new tokens. Return its outputs as values of the runtime."""
        return program.step(feeds)

    def pick_token(self, row: Array, position: int) -> int:
        """Return the token for a position: the lowest token with the largest logit."""
        return int(np.argmax(row))

    def make_feeds(self, program: DecoderProgram, tokens: Sequence[int], position: int) -> list[Any]:
        """Return a function's inputs for new tokens. The first token has position ``position``."""
        given: dict[int, Any] = dict(self._given)
        given |= make_rule_inputs(program.inputs, self._plan, tokens, position, self._hidden)
        for place, output in self._plan.feedback:
            given[place] = self._cache[output]
        return [given[place] for place in range(len(self._program.inputs))]


class BoundSteps:
    """Adapter for a program that has only ``bind``, ``run`` and ``fetch``. Each step copies the cache."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.inputs: tuple[TensorSpec, ...] = program.inputs
        self.outputs: tuple[TensorSpec, ...] = program.outputs
        self.function: str = program.function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run once."""
        self._program.bind(list(inputs))
        self._program.run()
        return [np.array(array) for array in self._program.fetch()]

    def to_array(self, place: int, value: Any) -> Array:
        """Return the value, which is an array."""
        return np.asarray(value)


def make_step_program(program: Any) -> DecoderProgram:
    """Return a loaded program in a form that :class:`SteppedProgram` can run."""
    return program if hasattr(program, "step") else BoundSteps(program)


def _iter_chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    size = size or total
    for begin in range(0, total, size):
        yield begin, min(begin + size, total)


def _get_fixed_size(spec: TensorSpec) -> int:
    """Return the number of tokens per call: 1, or 0 for any number. Raises UsageError for other numbers."""
    size = spec.shape[-1] if spec.shape else 1
    if not isinstance(size, int):
        return 0
    if size != 1:
        raise UsageError(
            f"input {spec} takes {size} tokens per call, expected 1 or any number",
            hint="export the program with a dynamic number of tokens, or one token per call",
        )
    return 1
