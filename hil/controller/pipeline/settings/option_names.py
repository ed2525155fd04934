"""Rename options in messages. Errors use the names of ``hil run``; pytest and the library have different names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache

from hil.controller.pipeline.settings.options import Options, flag_of, list_specs
from hil.core.arithmetic import ARITHMETICS
from hil.core.runtimes import list_known_runtimes
from hil.errors import HilError

# Function that returns an interface's name for an option. Arguments: the flag, and the value after it (" N=1", or "").
Rename = Callable[[str, str], str]
# A command of hil, which is not changed; or an option with the next word, which may be its value.
_NAMED = re.compile(
    r"(?P<command>`[^`]*`|\bhil (?:[a-z]+ )+[^,;]*)"
    r"|(?P<flag>(?<![\w-])--[a-z][a-z-]*)"
    r"""(?P<value>[ =](?:"[^"]*"|'[^']*'|[^\s,;:()"'`]+(?::[^\s,;:()"'`]+)*))?"""
)
_PUNCTUATION = ".!?"
# Characters that occur in values, but not in prose: digits, capitals, symbols.
_NOT_PROSE = re.compile(r"[0-9A-Z=/<>\"'*]|\.\w")


def rename_options(text: str, rename: Rename) -> str:
    """Return a message with the option names of an interface."""

    def rename_option(found: re.Match[str]) -> str:
        if found["command"]:
            return found[0]
        flag, after = found["flag"], found["value"] or ""
        value = after.rstrip(_PUNCTUATION)
        if not _is_value(flag, value):
            value = ""
        return rename(flag, value) + after[len(value) :]

    return _NAMED.sub(rename_option, text)


def _is_value(flag: str, text: str) -> bool:
    """Return True if the word after an option is the value, not the next word of the sentence."""
    name, _ = _KEYWORDS.get(flag, ("", False))
    if not name or isinstance(getattr(Options(), name), bool):
        return False
    if name == "dims":
        return "=" in text[1:]
    return text.startswith("=") or bool(_NOT_PROSE.search(text)) or text[1:] in _list_known_values()


@cache
def _list_known_values() -> frozenset[str]:
    """Return option values that are ordinary words."""
    from hil.controller.backends.references import load_references

    return frozenset([*list_known_runtimes(), *ARITHMETICS, *load_references()])


def rename_in_error(error: HilError, rename: Rename) -> HilError:
    """Rename the options in an error's message and hint. Returns the same error."""
    error.args = (rename_options(error.message, rename), *error.args[1:])
    error.hint = rename_options(error.hint, rename)
    return error


def make_renamer(names: Mapping[str, str]) -> Rename:
    """Return a renaming function for a table flag -> name."""
    return lambda flag, value: names.get(flag, flag) + value


def format_keyword(flag: str, value: str) -> str:
    """Return an option as a keyword argument of :func:`hil.run`, ``dims={'N': 1}``. Other options are unchanged."""
    spec = _KEYWORDS.get(flag)
    if spec is None:
        return flag + value
    name, repeats = spec
    given = value[1:].strip("\"'")
    if not given:
        return name
    if name == "dims":
        key, _, size = given.partition("=")
        return f"{name}={{{key!r}: {_format_literal(size)}}}"
    if name == "input_range":
        return f"{name}=({', '.join(given.split(':'))})"
    return f"{name}=[{given!r}]" if repeats else f"{name}={_format_literal(given)}"


def _format_literal(text: str) -> str:
    """Return a value as a Python literal. Placeholders, such as DIR, are unchanged."""
    try:
        float(text)
    except ValueError:
        return text if text.isupper() else repr(text)
    return text


_KEYWORDS = {flag_of(name, spec): (name, spec.repeats) for name, spec in list_specs(Options).items()}
