"""What TensorFlow's errors say, in a line: without the user's code that they quote, and the graph's nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

_LENGTH = 400
# What an error of autograph's is about, after the code that it quotes: `    ValueError: ...`.
_RAISED = re.compile(r"^ {4}(?P<name>\w+): ", re.M)
_QUOTED = re.compile(r'^\s*File ".*", line \d+, in .*$', re.M)
_COLOR = re.compile(r"\x1b\[\d+m")
# How XLA's message is wrapped, and from where on nobody reads it.
_XLA = "Failed getting HLO text: '"
_BEFORE = ("Graph execution error", "Detected at node", "<stack traces")
_AFTER = ("The op is created at", "Stack trace", "tf2xla conversion failed", "Arguments received by", "[[")
# `... compatible with node {{node Eig}}){{node Eig}}`
_NODE_AGAIN = re.compile(r"(?<=\))\{\{node [^}]*\}\}")
_FUNCTION_NODE = re.compile(r"\{\{function_node [^}]*\}\}\s*")
_NODE = re.compile(r"\{\{node ([^}]*)\}\}")
_OPERATION = re.compile(r"\s*\[Op:\w+\].*$")
# `loc(callsite(fused["Erf:", ...)): 'tf.Erf' op is ...`
_LOCATION = re.compile(r"^loc\(.*?\): ")


def words(error: Exception) -> str:
    """The kind of an error and its own message, in a line."""
    name, text = type(error).__name__, _COLOR.sub("", str(error))
    if text.startswith("in user code:") and (raised := _RAISED.search(text)):
        name, text = raised["name"], text[raised.end() :]
    message = " ".join(_message(_QUOTED.split(text)[-1] if text.startswith(_BEFORE) else text))
    for pattern, instead in ((_NODE_AGAIN, ""), (_FUNCTION_NODE, ""), (_NODE, r"\1"), (_OPERATION, "")):
        message = pattern.sub(instead, message)
    message = message.removeprefix(_XLA)[:_LENGTH]
    return f"{name}: {message}" if message else name


def converter_words(error: Exception) -> str:
    """What the TFLite converter refused, in a line."""
    lines = [line.partition("error: ")[2].strip() for line in str(error).splitlines() if "error: " in line]
    told = [_LOCATION.sub("", line) for line in lines]
    return "; ".join(dict.fromkeys(told))[:_LENGTH] or words(error)


def _message(text: str) -> Iterator[str]:
    lines = (line.strip() for line in text.splitlines())
    told = (line for line in lines if line and not line.startswith(_BEFORE))
    return takewhile(lambda line: not line.startswith(_AFTER), told)
