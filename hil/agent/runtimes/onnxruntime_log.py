"""Find out why ONNX Runtime did not use an execution provider, from its log.

ONNX Runtime and the providers report the reasons only in the log of a session's creation, at a level that slows down
every run of the session. So hil creates another session in a separate process. The memory of the measured process
does not change.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hil.agent.runtimes.onnxruntime_providers import ProviderDevice, open_session, register_libraries
from hil.core.placement_reasons import MAX_REASON_CHARS

# The time limit of a run, usually 60 s, includes this time.
TIME_LIMIT_SECONDS = 20
_MAX_LINE = 4096
# Maximum numbers of nodes with a reason, and of errors.
_MAX_NODES, _MAX_ERRORS = 10_000, 20
# The time limit also covers the imports.
_START = (
    "import signal, sys; signal.alarm(int(sys.argv[1])); from hil.agent.runtimes.onnxruntime_log import main; main()"
)
_HEAD = re.compile(r"(?:\x1b\[[\d;]*m)?\S+ \S+ \[([VIWEF]):[^\]]*\] ?")
_COLOUR_END = "\x1b[m"
# Code in front of the message of an error, after the source location.
_ERROR_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
# GetCapability of CUDA, ROCm, MIGraphX, WebGPU and others.
_NO_KERNEL = " kernel not found in registries"
_KERNEL_NODE = re.compile(r" for Op type: (\S+)(?: node name: (.*))?")
# core/framework/fallback_cpu_capability.cc, and the same function for providers in plugin libraries.
_FORCED = "Force fallback to CPU execution"
_FORCED_NODE = re.compile(r" for node:? (.*?) (because .*)")
# GetSupportedNodes of NNAPI, CoreML, XNNPACK and WebNN, in two orders of the same words.
_REFUSED = "supported: [0]"
_REFUSED_NODE = re.compile(r"(?:Node supported: \[0\] )?Operator type: \[([^\]]*)\] index: \[\d+\] name: \[([^\]]*)\]")
_REFUSED_UNIT = re.compile(r"Node supported: \[0\] index: \[\d+\] name: \[([^\]]*)\] Operator type: \[([^\]]*)\]")
# LogNodeSupport of QNN. A message of several lines, of which only the first has a head.
_UNIT_FAILED = "Validation FAILED for "
_UNIT_NODE = re.compile(r"\s*Operator type: (\S*) Node name: (.*) Node index: \d+\s*$")
_UNIT_REASON = "REASON : "
_OR = " or: "


@dataclass
class ProviderLog:
    """What the log of a session's creation says.

    Attributes:
        reasons: (name, operator) of a node -> why the provider did not take it. The operator is "" if the log does not
            contain it.
        errors: messages of errors, in order.
    """

    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    _unit: list[tuple[str, str]] | None = None  # nodes of a message of QNN that began

    def find_reason(self, name: str, operator: str) -> str:
        """Return why a node did not run on the provider, or ""."""
        return self.reasons.get((name, operator)) or (self.reasons.get((name, ""), "") if name else "")

    def add_line(self, line: str) -> None:
        """Take the facts of a line."""
        head = _HEAD.match(line)
        if head is None:
            self._add_continuation(line)
            return
        text = line[head.end() :].removesuffix(_COLOUR_END)
        self._unit = [] if text.startswith(_UNIT_FAILED) else None
        if head[1] in "EF" and len(self.errors) < _MAX_ERRORS:
            self.errors.append(_ERROR_CODE.split(text, maxsplit=1)[-1])
        self._add_refusal(text)

    def _add_refusal(self, text: str) -> None:
        if (at := text.find(_NO_KERNEL)) >= 0:
            end = at + len(_NO_KERNEL)
            if found := _KERNEL_NODE.match(text, end):
                self._add_reason(found[2] or "", found[1], text[:end])
        elif (at := text.find(_FORCED)) >= 0:
            if found := _FORCED_NODE.match(text, at + len(_FORCED)):
                self._add_reason(found[1], "", f"{_FORCED} {found[2]}")
        elif _REFUSED in text:
            why = f"the provider's check returned `{_REFUSED}`"
            if found := _REFUSED_NODE.match(text):
                self._add_reason(found[2], found[1], why)
            elif found := _REFUSED_UNIT.match(text):
                self._add_reason(found[1], found[2], why)

    def _add_continuation(self, line: str) -> None:
        if self._unit is None:
            return
        if found := _UNIT_NODE.match(line):
            if len(self._unit) < _MAX_NODES:
                self._unit.append((found[2], found[1]))
        elif _UNIT_REASON in line:
            for name, operator in self._unit:
                self._add_reason(name, operator, line.partition(_UNIT_REASON)[2])

    def _add_reason(self, name: str, operator: str, why: str) -> None:
        before = self.reasons.get((name, operator), "")
        if not before and len(self.reasons) < _MAX_NODES:
            self.reasons[name, operator] = why
        elif before and not name and why not in before.split(_OR) and len(before) < MAX_REASON_CHARS:
            # The log does not contain which node without a name is which.
            self.reasons[name, operator] = before + _OR + why
        # For a node with a name, the first message is the most specific: providers may examine the nodes repeatedly.


def parse_log(lines: Iterable[str]) -> ProviderLog:
    """Return the facts of a log."""
    found = ProviderLog()
    for line in lines:
        found.add_line(line)
    return found


def read_provider_log(
    model: Path, provider: ProviderDevice, folder: Path, *, seconds: int = TIME_LIMIT_SECONDS
) -> ProviderLog:
    """Create a session in a separate process, and return the facts of its log.

    The result is empty if the process cannot start, and incomplete if it fails or exceeds the time limit.

    Args:
        folder: working directory, which the provider may write to.
        seconds: time limit of the process. It ends itself, because a sandboxed worker cannot send signals.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = [f"{key}={value}" for key, value in provider.options.items()]
    command = [sys.executable, "-c", _START, str(seconds), str(model.absolute()), provider.name, *options]
    found = ProviderLog()
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except OSError:
        return found
    with process:
        assert process.stderr is not None
        while line := process.stderr.readline(_MAX_LINE):
            found.add_line(line.decode(errors="replace").rstrip("\r\n"))
    return found


def main() -> None:
    """Create a session with all log messages on stderr."""
    import onnxruntime as ort

    model, name, *options = sys.argv[2:]
    ort.set_default_logger_severity(0)
    register_libraries()
    settings = ort.SessionOptions()
    settings.log_severity_level = 0
    open_session(Path(model), ProviderDevice(name, dict(one.split("=", 1) for one in options)), settings)
