"""Find out why ONNX Runtime did not use an execution provider, from its log.

ONNX Runtime and its providers report the reasons only in the log of a session's creation, at a level that slows down
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

TIME_LIMIT_SECONDS = 60
_MAX_LINE = 4096
# Maximum numbers of nodes with a reason, and of errors.
_MAX_NODES, _MAX_ERRORS = 10_000, 20
# The time limit also covers the imports.
_START = (
    "import signal, sys; signal.alarm(int(sys.argv[1])); from hil.agent.runtimes.onnxruntime_log import main; main()"
)
_HEAD = re.compile(r"^(?:\x1b\[[\d;]*m)?\S+ \S+ \[(?P<level>[VIWEF]):[^\]]*\] ?(?P<text>.*?)(?:\x1b\[m)?$")
# Source location and code in front of the message of an error.
_ORIGIN = re.compile(r"^.*\[ONNXRuntimeError\] : \d+ : \w+ : ")
# CUDA, ROCm, MIGraphX, WebGPU, JavaScript and DirectML: GetCapability.
_NO_KERNEL = re.compile(
    r"^(?P<why>.* kernel not found in registries) for Op type: (?P<op>\S+) node name: (?P<name>.*)$"
)
# core/framework/fallback_cpu_capability.cc, and the same function for providers in plugin libraries.
_ON_CPU = re.compile(r"(?P<why>Force fallback to CPU execution) for node:? (?P<name>.*?) (?P<because>because .*)$")
# NNAPI, CoreML, XNNPACK, WebNN: GetSupportedNodes. Two orders of the same words.
_REFUSED = re.compile(r"^Operator type: \[(?P<op>[^\]]*)\] index: \[\d+\] name: \[(?P<name>[^\]]*)\] supported: \[0\]")
_REFUSED_UNIT = re.compile(
    r"^Node supported: \[0\] (?:Operator type: \[(?P<op1>[^\]]*)\] )?index: \[\d+\] name: \[(?P<name>[^\]]*)\]"
    r"(?: Operator type: \[(?P<op2>[^\]]*)\])?"
)
# QNN: LogNodeSupport. A message of several lines, of which only the first has a head.
_UNIT_FAILED = re.compile(r"^Validation FAILED for \d+ nodes in ")
_UNIT_NODE = re.compile(r"^\s*Operator type: (?P<op>\S*) Node name: (?P<name>.*?) Node index: \d+\s*$")
_UNIT_REASON = re.compile(r"^\s*REASON : (?P<why>.*)$")


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
        text = head["text"]
        self._unit = [] if _UNIT_FAILED.match(text) else None
        if head["level"] in "EF" and len(self.errors) < _MAX_ERRORS:
            self.errors.append(_ORIGIN.sub("", text))
        if found := _NO_KERNEL.match(text):
            self._add_reason(found["name"] or "", found["op"], found["why"])
        elif found := _ON_CPU.search(text):
            self._add_reason(found["name"], "", f"{found['why']} {found['because']}")
        elif found := _REFUSED.match(text):
            self._add_reason(found["name"], found["op"], "the provider's check returned `supported: [0]`")
        elif found := _REFUSED_UNIT.match(text):
            operator = found["op1"] or found["op2"] or ""
            self._add_reason(found["name"], operator, "the provider's check returned `supported: [0]`")

    def _add_continuation(self, line: str) -> None:
        if self._unit is None:
            return
        if found := _UNIT_NODE.match(line):
            if len(self._unit) < _MAX_NODES:
                self._unit.append((found["name"], found["op"]))
        elif found := _UNIT_REASON.match(line):
            for name, operator in self._unit:
                self._add_reason(name, operator, found["why"])

    def _add_reason(self, name: str, operator: str, why: str) -> None:
        # Providers may examine the nodes repeatedly. The first message is the most specific.
        if len(self.reasons) < _MAX_NODES:
            self.reasons.setdefault((name, operator), why)


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
