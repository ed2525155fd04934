"""The variables of a TensorFlow module under test: which there are, and what they hold after each call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from hil.core.tensors import Array
from hil.testing.traces.structure import as_numpy


class Variables:
    """The variables of one making of a module, by name.

    A variable keeps the name that it had in the first making: the Nth that is created is the same one in each making.
    Its name alone would not tell, for Keras numbers names over all that it ever made.

    Args:
        names: of the variables in the order of their creation; the first making fills it, later ones read it.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._created = 0
        self._found: dict[str, Any] = {}
        self._values: dict[str, Array] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it every variable that is created is found."""
        import tensorflow as tf

        def create(following: Any, **settings: Any) -> Any:
            variable = following(**settings)
            if self._created == len(self._names):
                self._names.append(_unique(_own_name(variable), self._names))
            self._found[self._names[self._created]] = variable
            self._created += 1
            return variable

        with tf.variable_creator_scope(create):
            yield

    def add(self, variables: Iterable[Any]) -> None:
        """Take in variables that a method uses, of which some may be older than the module: those keep their names."""
        for variable in variables:
            if not any(variable is known for known in self._found.values()):
                self._found[_unique(_own_name(variable), self._found)] = variable

    def name(self, variable: Any) -> str:
        """What a variable that was found is called."""
        return next(name for name, known in self._found.items() if known is variable)

    def read(self) -> tuple[Mapping[str, Array], tuple[str, ...]]:
        """What every variable holds now, and the names of those that hold something else than when this was last read.

        The same array is given again where nothing changed.
        """
        values, changed = {}, []
        for name, variable in self._found.items():
            if not variable.is_initialized():  # a function that creates it was traced and not called
                continue
            now, before = as_numpy(f"the variable {name}", variable), self._values.get(name)
            same = before is not None and _same(now, before)
            if before is not None and not same:
                changed.append(name)
            values[name] = before if before is not None and same else now
        self._values = values
        return values, tuple(changed)


def _own_name(variable: Any) -> str:
    return str(variable.name).split(":")[0]


def _unique(name: str, taken: Iterable[str]) -> str:
    others, number, unique = set(taken), 0, name
    while unique in others:
        number += 1
        unique = f"{name}_{number}"
    return unique


def _same(one: Array, other: Array) -> bool:
    """Whether two arrays have the same bits: a NaN is itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind == "O":
        return bool((one == other).all())
    return bool(np.array_equal(_bytes(one), _bytes(other)))


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
