"""Convert click's usage errors to hil's: the value and the expected values, then a hint with similar names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click

from hil.errors import UsageError, did_you_mean

_INVALID_VALUE = re.compile(r"(['\"])(?P<value>.*)\1 is not (?:one of|a valid (?P<kind>\w+))", re.S)
_KINDS: Mapping[str, str] = {"integer": "a whole number", "float": "a number", "boolean": "true or false"}


def convert_usage_error(error: click.ClickException) -> UsageError:
    """Return a usage error with the message and the hint for an error of click."""
    context = getattr(error, "ctx", None)
    hint = f"{context.command_path} --help lists the options" if context is not None else ""
    if isinstance(error, click.NoSuchOption) and context is not None:
        return UsageError(_clean_message(error.message), hint=_suggest_option(error.option_name, context) + hint)
    if isinstance(error, click.BadParameter) and error.param is not None and error.message:
        return _convert_value_error(error, error.param, hint)
    return UsageError(_clean_message(error.format_message()), hint=hint)


def _suggest_option(name: str, context: click.Context) -> str:
    """Return the start of a hint for an unknown option. Dashes do not count, because all options begin with them."""
    params = [one for one in context.command.get_params(context) if isinstance(one, click.Option)]
    known = {one.lstrip("-"): one for param in params for one in (*param.opts, *param.secondary_opts)}
    similar = did_you_mean(name.lstrip("-"), known)
    return re.sub(r"'([^']*)'", lambda found: repr(known[found[1]]), similar)


def _convert_value_error(error: click.BadParameter, param: click.Parameter, hint: str) -> UsageError:
    name = param.opts[0] if isinstance(param, click.Option) else str(param.name).upper()
    found = _INVALID_VALUE.match(error.message)
    if found and isinstance(param.type, click.Choice):
        known = list(map(str, param.type.choices))
        similar = did_you_mean(found["value"], known)
        expected = f"expected {known[0]}" if len(known) == 1 else f"expected one of {', '.join(known)}"
        return UsageError(f"invalid {name} {found['value']!r}: {expected}", hint=similar + hint)
    if found and found["kind"] in _KINDS:
        return UsageError(f"invalid {name} {found['value']!r}: expected {_KINDS[found['kind']]}", hint=hint)
    return UsageError(f"invalid {name}: {_clean_message(error.message)}", hint=hint)


def _clean_message(text: str) -> str:
    """Return a message in lower case and without a full stop."""
    text = text.strip().rstrip(".")
    return text[:1].lower() + text[1:]
