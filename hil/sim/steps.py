"""Faults of a simulated board that runs a decoder step by step.

The faults change the inputs and outputs of calls, because they cannot change the program itself. The slot of a cache
entry is its index on the cache's axis of positions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hil.core.stepped_program import DecoderProgram, SteppedProgram
from hil.core.steps import StepRule, StepsPlan
from hil.core.tensors import Array
from hil.errors import UsageError
from hil.sim.faults import Fault

# The ``wrong_layer`` fault negates every fourth channel of a cache entry, and every eighth logit.
_CHANNELS = 4
_LOGITS = 8


@dataclass(frozen=True)
class _DecoderCall:
    """Call of the program: position and slot of its first token, and number of tokens."""

    position: int
    slot: int
    count: int


class SimSteps(SteppedProgram):
    """Stepped program with faults.

    Args:
        program: a :class:`hil.sim.runtime.SimProgram`.
        faults: faults of the board. Faults that do not concern steps are ignored.

    Raises:
        UsageError: a fault can never affect this program.
    """

    def __init__(self, program: Any, plan: StepsPlan, faults: Sequence[Fault]) -> None:
        keys = {fault.name: fault.keys for fault in faults}
        super().__init__(program, plan)
        self._faults = [kind(program, plan, keys[name]) for name, kind in _KINDS.items() if name in keys]
        if any(fault.needs_single_tokens for fault in self._faults):
            self._plan = replace(plan, chunk=1)
        self._trigger = program.trigger
        self._argmax, self._slow, self._is_stale = keys.get("argmax"), keys.get("slow_token"), "stale_cache" in keys
        if self._is_stale:
            _check_cache(plan.feedback, "stale_cache")

    def bind(self, inputs: Sequence[Array]) -> None:
        """Set the prompts and the constant inputs. Raises UsageError if the cache is too small for two prompts."""
        super().bind(inputs)
        self._kept = 0
        total = len(self._other) + self._total
        if self._is_stale and 0 < self._plan.bound < total:
            raise UsageError(f"fault stale_cache: {total} tokens exceed the cache of {self._plan.bound} tokens")

    def renew(self) -> None:
        """Prepare a run. With the ``stale_cache`` fault, the run continues in the cache of the other prompt."""
        follows, self._kept = self._has_run and self._is_stale, 0
        super().renew()
        if follows:
            self._kept = len(self._other)

    def start_cache(self) -> dict[int, Any]:
        """Return the cache of the previous prompt with ``stale_cache``, else an empty cache."""
        return self._cache if self._kept else super().start_cache()

    def make_feeds(self, program: DecoderProgram, tokens: Sequence[int], position: int) -> list[Any]:
        """Return the inputs, changed by the faults of masks and positions."""
        feeds = super().make_feeds(program, tokens, position + self._kept)
        for fault in self._faults:
            fault.change_feeds(feeds, _DecoderCall(position, position + self._kept + self._hidden, len(tokens)))
        return feeds

    def run_step(self, program: DecoderProgram, feeds: Sequence[Any], count: int, position: int) -> Sequence[Any]:
        """Run the program with the faults of calls, of the cache and of layers."""
        positions = range(position, position + count)
        self._trigger(positions)
        if self._slow and self._slow["position"] in positions:
            time.sleep(self._slow["seconds"])
        values = list(super().run_step(program, feeds, count, position))
        for fault in self._faults:
            fault.change_values(values, _DecoderCall(position, position + self._kept + self._hidden, count))
        return values

    def pick_token(self, row: Array, position: int) -> int:
        """Return the token with the largest logit, or the second largest with the ``argmax`` fault."""
        # The fault's position is the token's position, one after the position of the logits.
        if self._argmax and position > self._argmax["position"]:
            return int(np.argsort(-row, kind="stable")[1])
        return super().pick_token(row, position)


class _StepFault:
    """Fault that changes the inputs and outputs of calls.

    Raises UsageError if the fault can never affect the program.
    """

    needs_single_tokens = False

    def __init__(self, program: Any, plan: StepsPlan, keys: Mapping[str, Any]) -> None:
        self._program = program
        self._plan = plan
        self._keys = keys
        # Cache output -> axis of the slots. Recurrent states have no slots, so the faults skip them.
        axes = zip(plan.feedback, plan.find_axes(program.inputs), strict=True)
        self._axes = {output: axis for (_, output), axis in axes if axis is not None}
        self._cached = [(place, output) for place, output in plan.feedback if output in self._axes]

    def change_feeds(self, feeds: list[Any], call: _DecoderCall) -> None:
        """Change the inputs of a call."""

    def change_values(self, values: list[Any], call: _DecoderCall) -> None:
        """Change the outputs of a call."""

    def _find_input(self, rule: StepRule, name: str) -> int:
        found = next((place for place, own in self._plan.rules if own is rule), None)
        if found is None:
            raise UsageError(f"fault {name}: the program has no input for the {rule}")
        return found

    def _copy_array(self, values: list[Any], place: int, output: int) -> Array:
        """Replace ``values[place]``, a value of output ``output``, by a copy as an array. Return the array."""
        copy = np.array(self._program.to_array(output, values[place]), order="C")
        values[place] = copy
        return copy

    def _copy_entries(self, values: list[Any], place: int, output: int) -> Array:
        """Replace ``values[place]`` by a copy. Return a view of the copy's cache entries [slots, ...]."""
        copy = self._copy_array(values, place, output)
        return np.moveaxis(copy, self._axes[output], 0)


class _LostSlot(_StepFault):
    """Fault: each step writes its cache entry one slot early.

    The previous entry is lost, and the step's slot stays zero.

    Attention does not depend on the order of entries. To simulate the fault, the previous entry becomes zero before the
    call, and the last two entries are swapped after the call.
    """

    def __init__(self, program: Any, plan: StepsPlan, keys: Mapping[str, Any]) -> None:
        super().__init__(program, plan, keys)
        _check_cache(self._cached, "kv_slot")

    def change_feeds(self, feeds: list[Any], call: _DecoderCall) -> None:
        for place, output in self._cached if self._is_hit(call) else ():
            self._copy_entries(feeds, place, output)[call.slot - 1] = 0

    def change_values(self, values: list[Any], call: _DecoderCall) -> None:
        for _, output in self._cached if self._is_hit(call) else ():
            entries = self._copy_entries(values, output, output)
            entries[[call.slot - 1, call.slot]] = entries[[call.slot, call.slot - 1]]

    def _is_hit(self, call: _DecoderCall) -> bool:
        return call.count == 1 and call.position >= max(self._keys["position"], 1)


class _WrongMask(_StepFault):
    """Fault: the mask hides each token from itself, or shows each token the next token of the call."""

    def __init__(self, program: Any, plan: StepsPlan, keys: Mapping[str, Any]) -> None:
        super().__init__(program, plan, keys)
        self._place = self._find_input(StepRule.MASK, "mask")
        # A mask without a row per token can hide a token from itself only if the call has a single token.
        self.needs_single_tokens = len(program.inputs[self._place].shape) < 3
        if self.needs_single_tokens and keys["how"] == "show-next":
            raise UsageError("fault mask: how=show-next needs a mask with a row per token")

    def change_feeds(self, feeds: list[Any], call: _DecoderCall) -> None:
        feeds[self._place] = mask = np.array(feeds[self._place])
        rows = mask.reshape(-1, mask.shape[-1])[-call.count :]
        for slot, row in enumerate(rows, call.slot):
            if self._keys["how"] == "show-next" and slot + 1 < call.slot + call.count:
                row[slot + 1] = row[slot]
            elif self._keys["how"] == "hide-newest" and slot:
                row[slot] = row.dtype.type(0) if row.dtype.kind in "biu" else -np.inf


class _ShiftedPosition(_StepFault):
    """Fault: positions are one too small."""

    def __init__(self, program: Any, plan: StepsPlan, keys: Mapping[str, Any]) -> None:
        super().__init__(program, plan, keys)
        self._place = self._find_input(StepRule.POSITIONS, "rope")

    def change_feeds(self, feeds: list[Any], call: _DecoderCall) -> None:
        first = self._keys["position"] + call.slot - call.position
        feeds[self._place] = feeds[self._place] - (feeds[self._place] >= first)


class _WrongLayer(_StepFault):
    """Fault: steps return wrong logits, and wrong cache entries in all layers above a given layer."""

    name = "wrong_layer"
    is_decode_only = True

    def __init__(self, program: Any, plan: StepsPlan, keys: Mapping[str, Any]) -> None:
        super().__init__(program, plan, keys)
        _check_cache(self._cached, self.name)
        layers = _number_layers([program.inputs[place].name for place, _ in plan.feedback])
        self._above = [
            output
            for (_, output), layer in zip(plan.feedback, layers, strict=True)
            if layer > keys["layer"] and output in self._axes
        ]
        if not self._above:
            raise UsageError(
                f"fault {self.name}: no layer above {keys['layer']} has cache entries; "
                f"the program has {max(layers) + 1} layers"
            )

    def change_values(self, values: list[Any], call: _DecoderCall) -> None:
        """Change the cache entries and the logits from the fault's position on."""
        count = call.position + call.count - max(self._keys["position"], call.position)
        if count <= 0 or (self.is_decode_only and call.count > 1):
            return
        end = call.slot + call.count
        for output in self._above:
            self._damage(self._copy_entries(values, output, output)[end - count : end], _CHANNELS)
        if values[self._plan.logits] is not None:
            logits = self._copy_array(values, self._plan.logits, self._plan.logits)
            self._damage(logits.reshape(-1, logits.shape[-1])[: call.count][-count:], _LOGITS)

    def _damage(self, rows: Array, stride: int) -> None:
        rows[..., ::stride] *= -1


class _Overflow(_WrongLayer):
    """Fault: the logits, and the cache entries in all layers above a given layer, are NaN."""

    name = "overflow"
    is_decode_only = False

    def _damage(self, rows: Array, stride: int) -> None:
        rows[...] = np.nan


_KINDS: Mapping[str, type[_StepFault]] = {
    "kv_slot": _LostSlot,
    "mask": _WrongMask,
    "rope": _ShiftedPosition,
    "overflow": _Overflow,
    "wrong_layer": _WrongLayer,
}


def _check_cache(feedback: Sequence[tuple[int, int]], name: str) -> None:
    if not feedback:
        raise UsageError(f"fault {name}: the program has no cache inputs")


def _number_layers(names: Sequence[str]) -> list[int]:
    """Return the layer of each cache tensor, from 0.

    Use the last number in the names, or else two tensors per layer.
    """
    numbers = [int(found[-1]) if (found := re.findall(r"\d+", name)) else -1 for name in names]
    layers = sorted(set(numbers))
    if -1 in layers or len(layers) == len(names):
        return [place // 2 for place in range(len(names))]
    return [layers.index(number) for number in numbers]
