"""Meters that deliver CSV lines: the output of a program, or a file that another program writes."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import threading
from pathlib import Path
from typing import BinaryIO, Protocol

from hil.controller.devices.metering.csv_samples import MAX_GARBAGE, CsvParser
from hil.controller.devices.metering.sample_buffer import SampleBuffer
from hil.controller.devices.metering.samples import PowerSamples
from hil.core.clock import get_time_ns
from hil.core.files import open_file
from hil.core.meter_config import MeterConfig
from hil.core.processes import exit_text, signal_group, wait_or_kill
from hil.core.text import escape_controls
from hil.errors import UsageError

_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 4096
_MAX_ERROR_BYTES = 1 << 14
# Time for the program to exit after SIGTERM, and for the thread to end.
_END_SECONDS = 1.0
# Interval for looking for new lines in a file, and for the end of the measurement.
_LOOK_SECONDS = 0.02


class ByteSource(Protocol):
    """Source of a meter's lines. Only the reading thread calls :meth:`read`."""

    def read(self, timeout_s: float) -> bytes | None:
        """Return new bytes, b"" after the timeout, or None at the end."""

    def explain_end(self) -> str:
        """Return why the source ended."""

    def close(self) -> None:
        """Close the source."""


class StreamMeter:
    """Meter that reads CSV lines in a thread. Subclasses open the source."""

    def __init__(self, config: MeterConfig) -> None:
        self._config = config
        self._buffer = SampleBuffer(config.clock)
        self._parser = CsvParser(config.columns, self._buffer)
        self._source: ByteSource | None = None
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._problem = ""

    def start(self) -> None:
        """Open the source, and start to read. Raises UsageError if the source cannot be opened."""
        self._source = self._open_source()
        self._thread = threading.Thread(target=self._collect, daemon=True, name="hil-meter")
        self._thread.start()

    def read(self) -> PowerSamples:
        """Return the samples so far."""
        return self._buffer.read(has_time=self._parser.has_time, problem=self._problem)

    def stop(self) -> None:
        """Stop to read, and close the source."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        if self._source is not None:
            self._source.close()

    def _open_source(self) -> ByteSource:
        raise NotImplementedError

    def _collect(self) -> None:
        assert self._source is not None
        rest = b""
        while not self._leaving.is_set():
            try:
                data = self._source.read(_LOOK_SECONDS)
            except OSError as error:
                self._problem = f"reading the meter failed: {error.strerror or error}"
                return
            if data is None:
                self._problem = self._source.explain_end()
                return
            arrived_ns = get_time_ns()
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-_MAX_LINE_BYTES:]
            for line in lines:
                self._parser.feed(line.decode("utf-8", errors="replace"), arrived_ns)
            if self._parser.garbage >= MAX_GARBAGE and not self._parser.samples:
                last = escape_controls(self._parser.last_garbage)
                self._problem = f"the meter prints no samples, for example {last!r}"
                return


class CommandMeter(StreamMeter):
    """Meter whose program prints CSV lines."""

    def _open_source(self) -> ByteSource:
        try:
            return _ProgramSource(self._config.command)
        except OSError as error:
            raise UsageError(
                f"cannot start the meter's command {shlex.join(self._config.command)}: {error.strerror or error}",
                hint="check [meter] command in the board's config",
            ) from error


class FileMeter(StreamMeter):
    """Meter whose program appends CSV lines to a file. Lines from before the start do not count."""

    def _open_source(self) -> ByteSource:
        path = Path(self._config.path)
        try:
            return _FileSource(path, self._read_header_line(path))
        except OSError as error:
            raise UsageError(
                f"cannot read the meter's file {path}: {error.strerror or error}",
                hint="start the program that writes the file first, or correct [meter] path",
            ) from error

    def _read_header_line(self, path: Path) -> int:
        """Parse the first line of the file, which may be a header. Return the size of the file."""
        with open_file(path) as file:
            first = file.readline(_MAX_LINE_BYTES)
            end = file.seek(0, os.SEEK_END)
        probe = SampleBuffer(self._config.clock)
        header = CsvParser(self._config.columns, probe)
        header.feed(first.decode("utf-8", errors="replace"), 0)
        if not header.samples and not header.garbage:
            self._parser.feed(first.decode("utf-8", errors="replace"), 0)
        return end


class _ProgramSource:
    """Output of a program. It runs in its own process group."""

    def __init__(self, argv: tuple[str, ...]) -> None:
        self._argv = argv
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._output, self._errors = self._process.stdout, self._process.stderr
        self._error_text = b""
        self._selector = selectors.DefaultSelector()
        for stream in (self._output, self._errors):
            self._selector.register(stream, selectors.EVENT_READ)

    def read(self, timeout_s: float) -> bytes | None:
        """Return new bytes of stdout: see :class:`ByteSource`."""
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, _CHUNK_BYTES)
            if key.fileobj is self._errors:
                self._error_text = (self._error_text + data)[-_MAX_ERROR_BYTES:]
                if not data:
                    self._selector.unregister(self._errors)
            else:
                return data or None
        return b""

    def explain_end(self) -> str:
        """Return the exit code and the last line on stderr."""
        try:
            how = exit_text(self._process.wait(_END_SECONDS))
        except subprocess.TimeoutExpired:
            how = "closed its output"
        with contextlib.suppress(OSError, ValueError):
            os.set_blocking(self._errors.fileno(), False)
            self._error_text += os.read(self._errors.fileno(), _CHUNK_BYTES)
        lines = self._error_text.decode("utf-8", errors="replace").strip().splitlines()
        more = f": {escape_controls(lines[-1][:200])}" if lines else ""
        return f"the meter's command {self._argv[0]} {how}{more}"

    def close(self) -> None:
        """Stop the program with all processes of its group."""
        if self._process.poll() is None:
            signal_group(self._process.pid, signal.SIGTERM)
        wait_or_kill(self._process, _END_SECONDS, group=True)
        signal_group(self._process.pid)
        self._selector.close()
        for stream in (self._output, self._errors):
            with contextlib.suppress(OSError):
                stream.close()


class _FileSource:
    """New bytes of a file from a position on. A truncated file is read from its start."""

    def __init__(self, path: Path, position: int) -> None:
        self._file: BinaryIO = open_file(path)
        self._position = position
        self._wait = threading.Event()

    def read(self, timeout_s: float) -> bytes | None:
        """Return new bytes: see :class:`ByteSource`."""
        size = os.fstat(self._file.fileno()).st_size
        if size < self._position:
            self._position = 0
        data = os.pread(self._file.fileno(), _CHUNK_BYTES, self._position)
        self._position += len(data)
        if not data:
            self._wait.wait(timeout_s)
        return data

    def explain_end(self) -> str:
        """Return "": a file does not end."""
        return ""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
