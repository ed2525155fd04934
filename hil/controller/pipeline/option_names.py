"""Rename options in messages: errors name them as ``hil run`` does, pytest and the library have names of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from hil.controller.pipeline.options import Options, flag_of, specs_of
from hil.errors import HilError

# Returns what an interface calls an option, from its flag and the value after it (" N=1", "" without one).
Rename = Callable[[str, str], str]
# A command of hil's, which stays as it is; or an option, with its value: what is no word of a sentence.
_NAMED = re.compile(
    r"(?P<command>`[^`]*`|\bhil (?:[a-z]+ )+[^,;]*)"
    r"|(?P<flag>(?<![\w-])--[a-z][a-z-]*)(?P<value>[ =][^\s,;:]*[^\sa-z,;:][^\s,;:]*| [a-z-]+(?=$|[,;]))?"
)


def rename_options(text: str, rename: Rename) -> str:
    """Return a message with the options that an interface names in its own way."""

    def one(found: re.Match[str]) -> str:
        return found[0] if found["command"] else rename(found["flag"], found["value"] or "")

    return _NAMED.sub(one, text)


def rename_in_error(error: HilError, rename: Rename) -> HilError:
    """Rename the options in an error's message and hint; returns the error itself."""
    error.args = (rename_options(error.message, rename), *error.args[1:])
    error.hint = rename_options(error.hint, rename)
    return error


def by_table(names: Mapping[str, str]) -> Rename:
    """Return a renaming by a table: flag -> name."""
    return lambda flag, value: names.get(flag, flag) + value


def as_keyword(flag: str, value: str) -> str:
    """Return an option as a keyword of :func:`hil.run`, ``dims={'N': 1}``; others as they are."""
    spec = _KEYWORDS.get(flag)
    if spec is None:
        return flag + value
    name, repeats = spec
    given = value[1:]
    if not given:
        return name
    key, equals, size = given.partition("=")
    if name == "dims" and equals:
        return f"{name}={{{key!r}: {size}}}"
    return f"{name}=[{given!r}]" if repeats else f"{name}={given}"


_KEYWORDS = {flag_of(name, spec): (name, spec.repeats) for name, spec in specs_of(Options).items()}
