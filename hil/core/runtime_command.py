"""The ``[runtime]`` table of a board config: how programs are run on a board that has no agent.

A board of ``kind = "command"`` is served through SSH by the runtime's own command: ``iree-run-module``, or a vendor's
fork of it, or any program that reads and writes files. The command is a list of arguments, never a line for a shell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hil.errors import UsageError

KINDS = ("agent", "command")
TENSORS = ("auto", "bin", "npy")
DEFAULT_FLAGS = (
    "--device={device}",
    "--module={module}",
    "--function={function}",
    "{parameters}",
    "{inputs}",
    "{outputs}",
)
# What a placeholder may be, where; those of "flags" that stand for several arguments have to be a whole flag.
_SEVERAL = ("inputs", "outputs", "parameters")
_PLACEHOLDERS = {
    "flags": ("device", "module", "function", "folder", *_SEVERAL),
    "input": ("value", "type", "file"),
    "output": ("file",),
    "parameter": ("scope", "file"),
}
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class RuntimeCommand:
    """How a board without an agent runs a program.

    Attributes:
        kind: ``agent``: hil's agent runs programs, where the board can have it; ``command``: this command always does.
        program: the program on the board, by name or path; "" is the ``iree-run-module`` that hil puts there.
        file: a program on the host, relative to the config, that hil puts there in place of ``program``.
        flags: its arguments. ``{device}``, ``{module}``, ``{function}`` and ``{folder}`` (the run's own, where it
            starts) are filled in; a flag that is ``{inputs}``, ``{outputs}`` or ``{parameters}`` becomes one a tensor.
        input: an input's argument: ``{value}`` is what iree-run-module takes (``2x3xf32=@FILE``, ``@FILE.npy`` or a
            number), ``{type}`` is ``2x3xf32``, ``{file}`` a file.
        output: an output's argument: ``{file}`` is the file to write.
        parameter: the argument for a file of weights: ``{scope}`` and ``{file}``.
        tensors: how files hold tensors: ``bin`` (elements alone), ``npy``, or ``auto``: what iree-run-module does best.
        environment: variables for the command.
        version: what the record calls the runtime's version; "" where it is not known.
    """

    kind: str = "agent"
    program: str = ""
    file: str = ""
    flags: tuple[str, ...] = DEFAULT_FLAGS
    input: str = "--input={value}"
    output: str = "--output=@{file}"
    parameter: str = "--parameters={scope}={file}"
    tensors: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is the iree-run-module that hil puts there."""
        return not self.program and not self.file

    def runs(self, runtime: str) -> bool:
        """Whether it may run the programs of a runtime: of one that the config names, nothing is known."""
        return runtime == "iree" or not self.is_ours


def parse_runtime(values: Mapping[str, Any], path: Path) -> RuntimeCommand:
    """The ``[runtime]`` table of a board config.

    Args:
        values: the table.
        path: the config, for messages.

    Raises:
        UsageError: a key, a value or a placeholder is none that hil knows.
    """
    made = dict(values)
    for key, value in values.items():
        if key not in {one.name for one in fields(RuntimeCommand)}:
            raise _wrong(path, f"has no {key!r}", f"it takes {', '.join(one.name for one in fields(RuntimeCommand))}")
        if key == "flags":
            if not isinstance(value, list) or not all(isinstance(flag, str) for flag in value):
                raise _wrong(path, "flags must be a list of texts")
            made[key] = tuple(value)
        elif key == "environment":
            if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
                raise _wrong(path, "environment must be a table of texts")
            for name in value:
                if not _VARIABLE.fullmatch(name):
                    raise _wrong(path, f"environment has a variable {name!r} that cannot be")
        elif not isinstance(value, str):
            raise _wrong(path, f"{key} must be text")
        texts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
        if any("\0" in text for text in texts):
            raise _wrong(path, f"{key} holds a character that no argument can")
        for text in texts:
            _check_placeholders(path, key, text)
    runtime = RuntimeCommand(**made)
    for key, allowed in (("kind", KINDS), ("tensors", TENSORS)):
        if getattr(runtime, key) not in allowed:
            raise _wrong(path, f"{key} is {getattr(runtime, key)!r}", f"one of {', '.join(allowed)}")
    if runtime.program and runtime.file:
        raise _wrong(path, "names both a program on the board and a file to put there", "leave one of them out")
    if "/" in runtime.program and not runtime.program.startswith("/"):
        raise _wrong(path, f"program {runtime.program!r} must be a name or an absolute path on the board")
    return runtime


def fill(pattern: str, values: Mapping[str, str]) -> str:
    """A pattern with its placeholders filled in, in one pass: a value that holds braces stays as it is."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), pattern)


def _check_placeholders(path: Path, key: str, text: str) -> None:
    if key not in _PLACEHOLDERS:
        return
    for name in _PLACEHOLDER.findall(text):
        known = _PLACEHOLDERS[key]
        if name not in known:
            said = ", ".join(f"{{{one}}}" for one in known)
            raise _wrong(path, f"{key} has no {{{name}}}", f"it has {said}")
        if name in _SEVERAL and text != f"{{{name}}}":
            raise _wrong(path, f"{{{name}}} stands for several arguments: it must be a flag of its own")


def _wrong(path: Path, what: str, hint: str = "") -> UsageError:
    return UsageError(f"{path}: [runtime] {what}", hint=hint)
