"""How often a program was run on the same inputs, and the distinct answers that it gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hil.core.digest import Hasher
from hil.core.tensors import Array, dtype_name, to_bytes

_SHOWN = 4


@dataclass(frozen=True, eq=False)
class Answer:
    """One of the distinct answers to the same inputs."""

    iterations: int  # that gave it
    first: int  # the number of the first of them, from 0, warm-ups included
    outputs: Mapping[str, Array] | None = None  # None where they were not fetched
    is_kept: bool = True  # whether the board has kept them


@dataclass(frozen=True, eq=False)
class Repetition:
    """The iterations whose answers were compared with each other, warm-ups included, and what they gave."""

    answers: tuple[Answer, ...]  # in the order in which they first appeared
    is_sampled: bool = False  # whether the outputs were compared in blocks, as they are large
    others: int = 0  # iterations with further answers, which were not told apart
    differing: tuple[str, ...] = ()  # the names of the outputs that differ

    @property
    def iterations(self) -> int:
        """How many were compared."""
        return sum(answer.iterations for answer in self.answers) + self.others

    @property
    def is_stable(self) -> bool:
        """Whether all of them gave the same answer."""
        return len(self.answers) <= 1 and not self.others

    @property
    def text(self) -> str:
        """Describe it in a line: how many of the iterations gave which answer."""
        total = self.iterations
        how = " (compared in samples: the outputs are larger than 1 MiB)" if self.is_sampled else ""
        if self.is_stable:
            return f"{total} of {total} iterations gave the same answer{how}"
        at_least = "at least " if self.others else ""
        counts = sorted((answer.iterations for answer in self.answers), reverse=True)
        # What is not all of them never reads as 100 %.
        shares = [f"{count} ({min(100 * count / total, 99.9):.3g} %)" for count in counts[:_SHOWN]]
        more = ", ..." if len(counts) > _SHOWN or self.others else ""
        distinct = len(self.answers) + bool(self.others)
        return f"{at_least}{distinct} different answers in {total} iterations: {', '.join(shares)}{more}{how}"

    def converted(self, convert: Callable[[Mapping[str, Array]], Mapping[str, Array]]) -> Repetition:
        """Return it with other outputs, which ``convert`` makes of an answer's."""
        answers = tuple(
            one if one.outputs is None else replace(one, outputs=convert(one.outputs)) for one in self.answers
        )
        return replace(self, answers=answers)

    def renamed(self, names: Mapping[str, str]) -> Repetition:
        """Return it with other names of outputs."""
        found = self.converted(lambda outputs: {names[name]: array for name, array in outputs.items()})
        return replace(found, differing=tuple(names[name] for name in self.differing))

    def record(self) -> dict[str, Any]:
        """Return what run.json has of it."""
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
    """Join the repetitions of several calls with the same inputs; None of none.

    Answers of different calls are the same where their outputs are; of answers without outputs nothing is known, and
    each counts as one of its own.
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
            dict.fromkeys([*differing_outputs(joined), *(name for part in found for name in part.differing)])
        ),
    )


def merge_known(first: Repetition | None, second: Repetition | None) -> Repetition | None:
    """Join two repetitions, either of which may be unknown."""
    return merge(part for part in (first, second) if part is not None)


def differing_outputs(answers: Sequence[Answer]) -> list[str]:
    """Return the names of the outputs that differ from the first answer's, among answers whose outputs are known."""
    first, *others = [answer.outputs for answer in answers if answer.outputs is not None] or [{}]
    names = dict.fromkeys(name for outputs in (first, *others) for name in outputs)
    return [name for name in names if len({_digest_of(outputs.get(name)) for outputs in (first, *others)}) > 1]


def digest_of(outputs: Mapping[str, Array]) -> str:
    """Return a digest of an answer: of the names, dtypes, shapes and bytes of all outputs."""
    return " ".join(f"{name!r} {_digest_of(array)}" for name, array in outputs.items())


def _digest_of(array: Array | None) -> str:
    if array is None:
        return ""
    hasher = Hasher()
    hasher.update(to_bytes(array))
    return f"{dtype_name(array.dtype)} {array.shape} {hasher.digest()}"
