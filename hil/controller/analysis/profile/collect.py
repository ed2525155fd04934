"""Build a finished case's profile, and write it with a trace to a directory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hil.controller.analysis.profile.compilation.compile_time import profile_compile
from hil.controller.analysis.profile.compilation.estimate import Estimate, Estimates, estimate
from hil.controller.analysis.profile.rows import DISPATCHES, EXECUTABLES, PASSES, write_csv
from hil.controller.analysis.profile.runtimes.etdump_profile import iter_etdump_rows, read_events
from hil.controller.analysis.profile.runtimes.firmware_profile import FirmwareSteps
from hil.controller.analysis.profile.runtimes.iree_profile import DISPATCH, IreeEvents, read_ireeprof
from hil.controller.analysis.profile.runtimes.onnxruntime_profile import HOLDERS, OnnxRuntimeEvents, read_onnxruntime
from hil.controller.analysis.profile.runtimes.operations_profile import iter_operation_rows
from hil.controller.analysis.profile.sites import DispatchSite, Sites, dispatch_sites
from hil.controller.analysis.profile.store import HEAD, TABLE, TRACE, StoredRows, write_profile
from hil.controller.analysis.profile.trace import write_trace
from hil.controller.analysis.roofline.profile_files import write_roofline_data
from hil.controller.devices.board_client import ProfilePass
from hil.controller.models.compiling import CachedCall, IsolatedCall
from hil.controller.models.conversions import convert_to_onnx
from hil.controller.pipeline.capture import PROFILED
from hil.controller.pipeline.case import Capture, Case
from hil.controller.pipeline.records.energy_text import describe_energy
from hil.controller.pipeline.settings.options import COMPILE_TIMEOUT_SECONDS
from hil.controller.records.outputs import ProfileDirectory
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import PROFILE_FOLDERS, convert_write_errors
from hil.core.clock import ClockFit
from hil.core.mcu_config import MCU_RUNTIME
from hil.core.scratch import make_temporary_folder
from hil.core.timeline import InvokeTiming, OpRow, Profile, Sample, Span, Ticks
from hil.errors import HilError, StorageError, UsageError
from hil.formats import etdump
from hil.formats.firmware import read_firmware
from hil.formats.operations import OPERATIONS_FILE, read_operations

IREE_FILE, ONNXRUNTIME_FILE, ETDUMP_FILE = "profile.ireeprof", "onnxruntime.json", etdump.FILE
# Files of runtimes' profilers that hil can read.
READABLE = (IREE_FILE, ONNXRUNTIME_FILE, ETDUMP_FILE, OPERATIONS_FILE)
RAW = "raw"
COMPUTE, RUNTIME = "compute", "runtime"

# Track of a compilation's trace with a slice per operation. A slice's length is its share of the estimated time.
_ESTIMATED = "operations by estimated time"

Made = TypeVar("Made")

# Kind of profile -> files that identify its directory. Even an interrupted profile has at least one of these files.
_KNOWN_BY = {"run": (HEAD, TABLE, RAW), "compile": (PASSES, DISPATCHES, EXECUTABLES)}


def collect(case: Case, capture: Capture, folder: Path, *, run: str, context: RunContext) -> list[str]:
    """Write a case's profile and the raw profiler files to a directory; return notes on data that cannot be collected.

    Raises:
        StorageError: the directory cannot be written.
    """
    notes = list(capture.notes)
    rows: Sequence[OpRow] = ()
    # Samples of an emulated board have no host times, because its clock counts instructions.
    samples: list[Sample] = list(capture.counters) if capture.icount_shift < 0 else []
    devices: list[str] = []
    with make_temporary_folder("hil-profile-") as place:
        raw, scratch = folder / RAW, Path(place)
        with convert_write_errors(raw):
            for name in READABLE:  # from an older profile
                (raw / name).unlink(missing_ok=True)
            for name, content in capture.taken.files.items() if capture.taken else ():
                raw.mkdir(parents=True, exist_ok=True)
                (raw / Path(name).name).write_bytes(content)
        ticks = None
        if capture.taken is not None:
            reader = _ProfileReader(
                case, capture.taken, raw, scratch, {"run": run, "board": capture.board}, context, notes, devices
            )
            if capture.icount_shift >= 0:
                ticks = reader.read_ticks(capture.icount_shift)
        if capture.taken is not None and capture.icount_shift < 0:
            with convert_write_errors(scratch):
                # Store the rows in a file that every pass reads, because there may be a million rows.
                rows = StoredRows(scratch / TABLE, write_csv(reader.read_rows(samples), scratch / TABLE))
        profile = Profile(
            run=run,
            model=case.name,
            board=capture.board,
            runtime=case.result.source.partition(": ")[2] if case.result else "",
            rows=rows,
            stages=sorted(case.spans, key=lambda span: span.start_ns),
            transfers=sorted([*_split_upload(case), *capture.transfers], key=lambda span: span.start_ns),
            calls=_list_calls(capture, rows),
            counters=sorted(samples, key=lambda sample: sample.at_ns),
            clock=_fit_clock(capture, rows),
            console=capture.console,
            notes=notes,
            device="".join(devices),
            ticks=ticks,
            energy=[f"{name} {text}" for name, text in describe_energy(case.energy)] if case.energy else (),
            stack=_map_stack(case),
            flags=case.artifact.flags if case.artifact else (),
        )
        write_profile(profile, folder)
        log = case.folder / "logs" / "profile.log"
        how = _make_cached_call(context, log)
        try:
            write_roofline_data(profile, case.model, folder, how)
        except HilError as error:
            notes.append(f"no data for a roofline: {error.message}")
    return notes


def _map_stack(case: Case) -> dict[str, str]:
    """Return part -> version of the board's stack."""
    parts = case.result.provenance.get("stack", ()) if case.result else ()
    return {str(part["name"]): str(part["version"]) for part in parts}


@dataclass(frozen=True)
class _ProfileReader:
    """Reads the runtime profiler's files."""

    case: Case
    taken: ProfilePass
    raw: Path
    scratch: Path
    labels: Mapping[str, str]  # ``run`` and ``board`` for every row
    context: RunContext
    notes: list[str]
    devices: list[str]  # receives the device whose clock timed the rows

    @property
    def how(self) -> IsolatedCall:
        log = self.case.folder / "logs" / "profile.log"
        return {"isolated": self.context.isolated, "timeout": COMPILE_TIMEOUT_SECONDS, "log": log}

    @property
    def passed(self) -> dict[str, Any]:
        taken = self.taken
        return {"warmup": taken.warmup, "iterations": taken.iterations, "clock": taken.clock_pairs}

    def read_rows(self, samples: list[Sample]) -> Iterator[OpRow]:
        """Return the operations as rows; append the counters in the profiler's files to ``samples``."""
        readers = (
            (IREE_FILE, self._read_iree),
            (ONNXRUNTIME_FILE, self._read_onnxruntime),
            (ETDUMP_FILE, self._read_etdump),
            (OPERATIONS_FILE, self._read_operations),
        )
        for name, read in readers:
            if name in self.taken.files:
                return self._call_or_note("no profile of the operations", functools.partial(read, samples)) or iter(())
        names = ", ".join(self.taken.files) or "no files"
        self.notes.append(f"no profile of the operations: unsupported profiler output ({names})")
        return iter(())

    def _read_iree(self, samples: list[Sample]) -> Iterator[OpRow]:
        events = read_ireeprof(self.raw / IREE_FILE, folder=self.scratch, **self.how, **self.passed)
        self.notes.extend(events.notes)
        sites, case = Sites((), {}), self.case
        if case.model is not None and case.artifact is not None:
            find = functools.partial(dispatch_sites, case.model, case.artifact, cache=self.context.cache, **self.how)
            sites = self._call_or_note("the operations are not matched to model nodes", find) or sites
        self.notes.extend(sites.notes)
        samples += events.iter_memory()
        if events.timed_by_device:
            self.devices.append(self._describe_device())
        return iter_iree_rows(events, sites, **self.labels, notes=self.notes)

    def _describe_device(self) -> str:
        provenance = self.case.result.provenance if self.case.result else {}
        software = [part["software"] for part in provenance.get("placement") or () if part.get("software")]
        device = str(provenance.get("device", ""))
        if software:
            self.notes.append(f"{device} is a software device ({software[0]}): its times are not GPU times")
        return f"{device}, software ({software[0]})" if software else device

    def _read_onnxruntime(self, samples: list[Sample]) -> Iterator[OpRow] | None:
        if self.case.model is None:
            return None
        cache, isolated = self.context.cache, self.context.isolated
        model = convert_to_onnx(self.case.model, cache=cache, isolated=isolated, log=self.how["log"])
        events = read_onnxruntime(self.raw / ONNXRUNTIME_FILE, model, **self.how, **self.passed)
        self.notes.extend(events.notes)
        make = functools.partial(estimate, model, cache=cache, **self.how)
        return iter_onnxruntime_rows(events, self._call_or_note("no estimates", make) or Estimates(), **self.labels)

    def _read_etdump(self, samples: list[Sample]) -> Iterator[OpRow]:
        taken = self.taken
        events = read_events(self.raw / ETDUMP_FILE)
        run, board = self.labels["run"], self.labels["board"]
        return iter_etdump_rows(events, run=run, board=board, clock=taken.clock_pairs, warmup=taken.warmup)

    def read_ticks(self, icount_shift: int) -> Ticks | None:
        """Return the ticks of a microcontroller's profile, or None with a note."""
        steps = self._call_or_note("no ticks of the operations", self._read_firmware_steps)
        artifact = self.case.artifact
        if steps is None or artifact is None:
            return None
        if not steps.operations or any(one.ticks is None for one in steps.operations):
            self.notes.append("no ticks of the operations: the board did not report any")
            return None
        tick_hz = read_firmware(artifact.files[artifact.main]).tick_hz
        return steps.sum_ticks(1e9 / tick_hz / 2**icount_shift)

    def _read_firmware_steps(self) -> FirmwareSteps:
        """Return the steps of a microcontroller's profile, without warm-up runs."""
        model, artifact, warmup = self.case.model, self.case.artifact, self.taken.warmup
        found = [one for one in read_operations(self.raw / OPERATIONS_FILE) if one.run >= warmup]
        keys = [one.name for one in found if one.run == warmup and not one.is_overhead]
        sites = Sites((), {})
        if model is not None and artifact is not None:
            find = functools.partial(dispatch_sites, model, artifact, cache=self.context.cache, **self.how)
            sites = self._call_or_note("the operations are not matched to model nodes", find) or sites
        placed, notes = sites.match_schedule(keys) if sites.regions else ((), [])
        self.notes.extend((*sites.notes, *notes))
        return FirmwareSteps(found, placed, sites.op_types)

    def _read_operations(self, samples: list[Sample]) -> Iterator[OpRow]:
        model, artifact = self.case.model, self.case.artifact
        if artifact is not None and artifact.runtime == MCU_RUNTIME:
            steps = self._read_firmware_steps()
            return steps.iter_rows(runtime=artifact.runtime, warmup=self.taken.warmup, **self.labels)
        estimates = Estimates()
        if model is not None:
            make = functools.partial(estimate, model, cache=self.context.cache, **self.how)
            estimates = self._call_or_note("no estimates", make) or estimates
        runtime = artifact.runtime if artifact is not None else ""
        operations = read_operations(self.raw / OPERATIONS_FILE)
        return iter_operation_rows(operations, estimates, runtime=runtime, warmup=self.taken.warmup, **self.labels)

    def _call_or_note(self, without: str, make: Callable[[], Made]) -> Made | None:
        try:
            return make()
        except HilError as error:
            self.notes.append(f"{without}: {error.message}")
            return None


def _split_upload(case: Case) -> Iterable[Span]:
    """Yield the parts of the upload. The first part starts with the push stage."""
    began = next((span.start_ns for span in case.spans if span.name == "push"), 0)
    before = 0
    for at, sent in case.sent:
        yield Span("upload", began, at, {"bytes_out": sent - before, "bytes_in": 0})
        began, before = at, sent


def _list_calls(capture: Capture, rows: Sequence[OpRow]) -> list[InvokeTiming]:
    """Return the calls. If the board reports no times, the profiled call spans all operations."""
    taken = capture.taken
    if taken is None or taken.board is not None or not rows:
        return capture.calls
    end = max(row.start_ns + row.duration_ns for row in rows)
    return [*capture.calls, InvokeTiming(PROFILED, taken.host, Span("run", rows[0].start_ns, end))]


def _fit_clock(capture: Capture, rows: Sequence[OpRow]) -> ClockFit:
    """Return the fit of the board's clock to the host's clock.

    Without an agent, hil knows only the call's host times.
    """
    if capture.clock is not None:
        return capture.clock
    host = capture.taken.host if capture.taken else None
    if host is None or not rows:
        return ClockFit(0, 0.0, 0, 0)
    return ClockFit(rows[0].start_ns - host.start_ns, 0.0, host.start_ns, host.end_ns - host.start_ns)


def check_folder(folder: Path, kind: str) -> None:
    """Create a profile's directory before anything runs.

    The directory may contain an older profile of the same kind, ``run`` or ``compile``.

    Raises:
        UsageError: the directory cannot be created, or contains other files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UsageError(f"cannot use {folder} as profile directory: {error.strerror or error}") from error
    if held and [one for one, names in _KNOWN_BY.items() if not held.isdisjoint(names)] != [kind]:
        raise UsageError(f"profile directory {folder} contains other files", hint="choose a new or empty directory")


def write_profiles(
    case: Case, folders: Mapping[str, Path], *, run_id: str, context: RunContext
) -> Iterator[tuple[ProfileDirectory, ...]]:
    """Write a finished case's profiles; report data that cannot be collected in notes.

    Args:
        folders: ``compile`` and ``run`` -> profile directory.
        run_id: the profiles' name. A link in the case's directory points to the run's profile.

    Yields:
        The profiles for the record, once before the first profile is written, and again after every profile.
    """
    write = {"compile": _write_compile_profile, "run": _write_run_profile}
    # The record keeps this note if Ctrl-C interrupts the writing.
    interrupted = "the profile is incomplete: interrupted"
    profiles = [ProfileDirectory(kind=kind, folder=str(one), notes=[interrupted]) for kind, one in folders.items()]
    yield tuple(profiles)
    for number, (kind, folder) in enumerate(folders.items()):
        try:
            notes = write[kind](case, folder, run_id, context)
        except HilError as error:
            notes = [f"the profile is incomplete: {error.message}"]
        profiles[number] = ProfileDirectory(kind=kind, folder=str(folder), notes=notes)
        yield tuple(profiles)


def _make_cached_call(context: RunContext, log: Path) -> CachedCall:
    return {
        "cache": context.cache,
        "isolated": context.isolated,
        "timeout": COMPILE_TIMEOUT_SECONDS,
        "log": log,
    }


def _write_compile_profile(case: Case, folder: Path, run_id: str, context: RunContext) -> list[str]:
    if case.model is None or case.artifact is None:
        return ["no compiler profile: the model was not compiled"]
    log = case.folder / "logs" / "compile-profile.log"
    how = _make_cached_call(context, log)
    artifact = case.artifact
    made = profile_compile(case.model, runtime=artifact.runtime, flags=artifact.flags, folder=folder, **how)
    tracks = {folder.name: made.spans, _ESTIMATED: made.operations}
    write_trace([], folder / TRACE, compilations={name: spans for name, spans in tracks.items() if spans})
    return list(made.notes)


def _write_run_profile(case: Case, folder: Path, run_id: str, context: RunContext) -> list[str]:
    if case.capture is None:
        return ["no run profile: the model did not run"]
    notes = collect(case, case.capture, folder, run=run_id, context=context)
    link = case.folder / PROFILE_FOLDERS["run"]
    if link == folder:
        return notes
    try:
        with convert_write_errors(link):
            link.unlink(missing_ok=True)
            link.symlink_to(folder.resolve(), target_is_directory=True)
    except StorageError as error:
        notes.append(f"cannot link the stored run to the profile: {error.message}")
    return notes


def iter_iree_rows(events: IreeEvents, sites: Sites, *, run: str, board: str, notes: list[str]) -> Iterator[OpRow]:
    """Yield an IREE profile's rows by start, without events outside iterations.

    Args:
        notes: receives a line for every uncertain node match, before the first row.
    """
    submitted, which = events.group_submissions()
    matched = [sites.match(submissions) for submissions in submitted]
    notes += dict.fromkeys(note for _, doubts in matched for note in doubts)
    for event in events.events():
        if event.iteration < 0:
            continue
        site = DispatchSite(event.key, ())
        if event.ordinal is not None:
            site = matched[which[event.iteration]][0][event.submission][event.ordinal]
        yield OpRow(
            run=run,
            iteration=event.iteration,
            board=board,
            runtime="iree",
            op=event.key or event.op,
            kind=COMPUTE if event.op == DISPATCH else RUNTIME,
            onnx_nodes=site.nodes,
            op_types=tuple(sites.op_types.get(node, "") for node in site.nodes),
            start_ns=event.start_ns,
            duration_ns=event.duration_ns,
            tiles=event.tiles,
            tile_time_ns=event.tile_time_ns,
            shapes=site.shapes,
            bytes=site.bytes if event.op == DISPATCH else event.bytes or None,
            flops=site.flops,
            bound_estimate=Estimate(site.flops, site.bytes).bound,
        )


def iter_onnxruntime_rows(events: OnnxRuntimeEvents, estimates: Estimates, *, run: str, board: str) -> Iterator[OpRow]:
    """Yield an ONNX Runtime profile's rows by start."""
    for event in events.events():
        # Do not count a kernel that contains other kernels as an operation.
        is_compute = event.op_type not in HOLDERS
        nodes = event.nodes if is_compute else ()
        estimate = estimates.estimate(nodes if event.computes else ())
        yield OpRow(
            run=run,
            iteration=event.iteration,
            board=board,
            runtime="onnxruntime",
            op=event.name,
            kind=COMPUTE if is_compute else RUNTIME,
            onnx_nodes=nodes,
            op_types=tuple(estimates.nodes[node].op_type if node in estimates.nodes else "" for node in nodes),
            start_ns=event.start_ns,
            duration_ns=event.duration_ns,
            shapes=event.shapes,
            bytes=estimate.bytes,
            flops=estimate.flops,
            bound_estimate=estimate.bound,
        )
