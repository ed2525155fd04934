"""Results of repeated runs with the same inputs. An answer is a distinct result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hil.core.digest import Hasher
from hil.core.tensors import Array, get_dtype_name, to_bytes

_SHOWN = 4


@dataclass(frozen=True, eq=False)
class Answer:
    """Distinct set of outputs for the same inputs."""

    iterations: int  # number of iterations with these outputs
    first: int  # first such iteration, counted from 0 and including warm-ups
    outputs: Mapping[str, Array] | None = None  # None if not fetched
    is_kept: bool = True  # True if the board stores them


@dataclass(frozen=True, eq=False)
class Repetition:
    """Comparison between the outputs of all iterations, including warm-ups."""

    answers: tuple[Answer, ...]  # in order of first appearance
    is_sampled: bool = False  # True if large outputs were compared only in sampled blocks
    others: int = 0  # iterations with further outputs that were not distinguished
    differing: tuple[str, ...] = ()  # names of outputs that differ

    @property
    def iterations(self) -> int:
        """Number of compared iterations."""
        return sum(answer.iterations for answer in self.answers) + self.others

    @property
    def is_stable(self) -> bool:
        """True if all iterations gave the same outputs."""
        return len(self.answers) <= 1 and not self.others

    @property
    def text(self) -> str:
        """Text line with the share of iterations for every distinct result."""
        total = self.iterations
        how = " (hil compared samples: the outputs are larger than 1 MiB)" if self.is_sampled else ""
        if self.is_stable:
            return f"{total} of {total} iterations gave the same answer{how}"
        at_least = "at least " if self.others else ""
        counts = sorted((answer.iterations for answer in self.answers), reverse=True)
        # A share below 100 % must not be rounded to 100 %.
        shares = [f"{count} ({min(100 * count / total, 99.9):.3g} %)" for count in counts[:_SHOWN]]
        more = ", ..." if len(counts) > _SHOWN or self.others else ""
        distinct = len(self.answers) + bool(self.others)
        return f"{at_least}{distinct} different answers in {total} iterations: {', '.join(shares)}{more}{how}"

    def convert(self, convert: Callable[[Mapping[str, Array]], Mapping[str, Array]]) -> Repetition:
        """Return a copy with ``convert`` applied to the outputs of each answer."""
        answers = tuple(
            one if one.outputs is None else replace(one, outputs=convert(one.outputs)) for one in self.answers
        )
        return replace(self, answers=answers)

    def rename(self, names: Mapping[str, str]) -> Repetition:
        """Return a copy with output names mapped by ``names``."""
        found = self.convert(lambda outputs: {names[name]: array for name, array in outputs.items()})
        return replace(found, differing=tuple(names[name] for name in self.differing))

    def record(self) -> dict[str, Any]:
        """Return the fields for run.json."""
        return {
            "iterations": self.iterations,
            "distinct": len(self.answers) + bool(self.others),
            "sampled": self.is_sampled,
            "others": self.others,
            "differing": list(self.differing),
            "answers": [
                {"iterations": one.iterations, "share": one.iterations / self.iterations, "first": one.first}
                for one in self.answers
            ],
            "text": self.text,
        }


def merge(parts: Iterable[Repetition]) -> Repetition | None:
    """Merge repetitions from calls with the same inputs. Return None if there are no repetitions.

    Answers are merged if their outputs are equal. Answers without outputs stay separate.
    """
    found = [part for part in parts if part.iterations]
    if len(found) < 2:
        return found[0] if found else None
    answers: dict[Any, Answer] = {}
    base = 0
    for part in found:
        for answer in part.answers:
            key = object() if answer.outputs is None else digest_of(answer.outputs)
            known = answers.get(key, replace(answer, iterations=0, first=base + answer.first))
            answers[key] = replace(known, iterations=known.iterations + answer.iterations)
        base += part.iterations
    joined = tuple(sorted(answers.values(), key=lambda answer: answer.first))
    return Repetition(
        joined,
        is_sampled=any(part.is_sampled for part in found),
        others=sum(part.others for part in found),
        differing=tuple(
            dict.fromkeys([*list_differing_outputs(joined), *(name for part in found for name in part.differing)])
        ),
    )


def merge_known(first: Repetition | None, second: Repetition | None) -> Repetition | None:
    """Merge two repetitions; None means unknown."""
    return merge(part for part in (first, second) if part is not None)


def list_differing_outputs(answers: Sequence[Answer]) -> list[str]:
    """Return the names of outputs whose values differ between answers.

    Answers without stored outputs (``outputs`` is None) are ignored.
    """
    first, *others = [answer.outputs for answer in answers if answer.outputs is not None] or [{}]
    names = dict.fromkeys(name for outputs in (first, *others) for name in outputs)
    return [name for name in names if len({_digest_of(outputs.get(name)) for outputs in (first, *others)}) > 1]


def digest_of(outputs: Mapping[str, Array]) -> str:
    """Return a digest over names, dtypes, shapes and bytes of all outputs."""
    return " ".join(f"{name!r} {_digest_of(array)}" for name, array in outputs.items())


def _digest_of(array: Array | None) -> str:
    if array is None:
        return ""
    hasher = Hasher()
    hasher.update(to_bytes(array))
    return f"{get_dtype_name(array.dtype)} {array.shape} {hasher.digest()}"
