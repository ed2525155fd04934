"""A suite over many boards: split into jobs when it is submitted, one run again when its parts have ended."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil.controller.farm.packing import Parcel, affinity
from hil.controller.farm.words import Kind, Result, Spec
from hil.controller.models.flows import load_flow
from hil.controller.models.flows.named import BESIDE, flows
from hil.controller.models.importers import SAVED_MODEL, import_model
from hil.controller.pipeline.case import Workshop
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.workloads.bundles.flagfile import is_flagfile
from hil.controller.workloads.suites.folder import models_at
from hil.controller.workloads.suites.job import suite_of
from hil.controller.workloads.suites.model_cases import SuiteModel
from hil.controller.workloads.suites.record import CaseRecord
from hil.controller.workloads.suites.reports import write_reports
from hil.controller.workloads.suites.request import Request
from hil.controller.workloads.suites.sources import BUILT_IN
from hil.controller.workloads.suites.spec import CaseSpec, Suite
from hil.controller.workloads.suites.store import SuiteRun, versions
from hil.core.results import Outcome, exit_code_of
from hil.core.text import jsonable
from hil.errors import EXIT_INTERRUPTED, EXIT_NOTHING_RAN, HilError, StorageError, UsageError

# A board has several parts, so that the slowest is not waited for long, but none too small: each reads the models anew.
PARTS_A_BOARD, CASES_A_PART = 4, 8


def split(cases: Sequence[CaseSpec], parts: int) -> list[tuple[CaseSpec, ...]]:
    """Cases in at most so many parts of about the same size, each in the suite's order.

    A model and its layers stay together, since layers run on what the reference computed for the whole of it; but a
    model that has more cases than a part should is cut.

    Args:
        cases: in the suite's order.
        parts: how many to aim at.
    """
    if not cases:
        return []
    parts = max(1, min(parts, len(cases)))
    most = -(-len(cases) // parts)
    groups: dict[str, list[CaseSpec]] = {}
    for case in cases:
        groups.setdefault(case.model, []).append(case)
    pieces = [piece for group in groups.values() for piece in _cut(group, -(-len(group) // most))]
    bins: list[list[CaseSpec]] = [[] for _ in range(parts)]
    for piece in sorted(pieces, key=len, reverse=True):
        min(bins, key=len).extend(piece)
    order = {case.id: number for number, case in enumerate(cases)}
    made = [tuple(sorted(one, key=lambda case: order[case.id])) for one in bins if one]
    return sorted(made, key=lambda part: order[part[0].id])


def _cut(group: list[CaseSpec], pieces: int) -> list[list[CaseSpec]]:
    """A list in so many pieces of about the same length."""
    ends = [len(group) * number // pieces for number in range(pieces + 1)]
    return [group[start:end] for start, end in itertools.pairwise(ends)]


def parts_for(cases: int, boards: int) -> int:
    """In how many parts to run so many cases on so many boards: a part or more for each, none of them tiny."""
    boards = max(1, boards)
    return min(PARTS_A_BOARD * boards, max(boards, -(-cases // CASES_A_PART)))


@dataclass(frozen=True)
class Plan:
    """A suite as jobs.

    Attributes:
        title: the suite's and the flow's names.
        specs: a job each.
        parcel: the files that all of them need.
    """

    title: str
    specs: tuple[Spec, ...]
    parcel: Parcel = field(default_factory=Parcel)


def plan_suite(request: Request, boards: int) -> Plan:
    """Read a suite's models and cut it into jobs; there are none where no case was chosen.

    Args:
        request: as `hil suite run` has it, without boards.
        boards: how many can take part.

    Raises:
        UsageError: there is no such suite or flow, or a file cannot be read.
    """
    flow = load_flow(request.flow)
    with Isolated(request.jobs) as isolated:
        shop = Workshop(Cache(), isolated, logs=False)
        suite = suite_of(request, flow, shop)
        parcel = Parcel()
        source = _packed_source(request, suite, shop, parcel)
    options = {**jsonable(request.to_json()), **source, **_packed_flow(request, parcel)}
    typed = {
        **{"source": request.source, "flow": request.flow, "filters": list(request.filters)},
        **{"suite": suite.name, "flow_name": flow.name, "runtime": flow.runtime},
        "expected": str(suite.expected.absolute()) if suite.expected else None,
        "left_out": list(suite.left_out),
    }
    digests = parcel.digests()
    warm = affinity(request.source, *sorted(digests.values()), repr(flow))
    selected = [one for one in suite.cases if request.selects(one)]
    chosen = split(selected, parts_for(len(selected), boards))
    specs = [
        Spec(
            Kind.SUITE,
            {
                **options,
                "needs": flow.runtime,
                "filters": [f"={case.id}" for case in part],
                "cases": [[case.id, case.model, case.layer, case.op] for case in part],
                "typed": typed,
            },
            digests,
            warm,
        )
        for part in chosen
    ]
    return Plan(f"{suite.name} {flow.name}", tuple(specs), parcel)


def _packed_source(request: Request, suite: Suite, shop: Workshop, parcel: Parcel) -> dict[str, str]:
    """The models at a path of the user's, under the folder's own name: that is the suite's."""
    path = Path(request.source)
    if suite.source in BUILT_IN and not path.exists():
        return {}
    root = path if path.is_dir() else path.parent
    below = f"suite/{root.resolve().name or 'models'}"
    for model in models_at(path):
        for file in (*_files_of(model, shop), *model.beside):
            if file.is_file():
                parcel.add(file, f"{below}/{_below(file, root)}")
    if suite.expected and suite.expected.is_file():
        parcel.add(suite.expected, f"{below}/{suite.expected.name}")
    return {"source": below if path.is_dir() else f"{below}/{path.name}"}


def _below(file: Path, root: Path) -> Path:
    """A file's place below the suite's folder; its place on a board's host is the same.

    Raises:
        UsageError: it is elsewhere, or a flag file that names files by absolute paths, which are no one's there.
    """
    hint = "make a bundle of it, which holds all its files: hil bundle import FOLDER --from flagfile"
    if is_flagfile(file.name) and re.search(
        r"^--(module|parameters|input|expected_output)=(.*[=@])?/", file.read_text(), re.M
    ):
        raise UsageError(f"{file} names files by absolute paths, which a board's host has not", hint=hint)
    here = Path(os.path.normpath(file))
    if not here.is_relative_to(os.path.normpath(root)):
        raise UsageError(f"{file} lies outside {root}, the suite's folder", hint=hint)
    return here.relative_to(os.path.normpath(root))


def _files_of(model: SuiteModel, shop: Workshop) -> Iterable[Path]:
    """A model's file and its data; of a model that cannot be read here the file alone: its case will tell."""
    if model.path.name == SAVED_MODEL:
        return [file for file in sorted(model.path.parent.rglob("*")) if file.is_file()]
    try:
        return import_model(model.path, isolated=shop.isolated, cache=shop.cache).files.values()
    except StorageError:
        raise
    except HilError:
        return [model.path]


def _packed_flow(request: Request, parcel: Parcel) -> dict[str, Any]:
    """A flow of a file goes along with the job; hil's own and those of packages are at the hosts."""
    beside = Path(BESIDE)
    name, text = request.flow, request.flow
    if name in flows(Path(os.devnull)):
        return {}
    if beside.is_file() and name in flows():
        text = f"{beside}:{name}"
    file, found, chosen = text.rpartition(".toml:")
    path = Path(f"{file}.toml") if found else Path(text)
    at = parcel.add(path, f"flows/{path.name}")
    return {"flow": f"{at}:{chosen}" if found else at, "flow_is_file": True}


@dataclass(frozen=True)
class Ended:
    """A part of a suite that has ended: what it was to do, and how it went."""

    spec: Spec
    result: Result


def merge(parts: Sequence[Ended], folder: Path) -> SuiteRun:
    """One suite run of all parts, with its reports; every case has exactly one record.

    The cases of a part that came to no record are lost, for the part's reason; those of a cancelled one are missing.

    Args:
        parts: all of the submission's.
        folder: the run's, which must not hold one already. What the cases kept is not fetched.

    Raises:
        UsageError: the folder holds a run.
        StorageError: it cannot be written.
    """
    heads = [part.result.record for part in parts if part.result.record.get("cases") is not None]
    run = SuiteRun.create(folder, _head(parts, heads, folder))
    request = Request.of_json(run.head["request"])
    found: dict[str, CaseRecord] = {}
    for part in parts:
        found |= {record.id: record for record in _records(part, run, request)}
    with run.writing():
        for case_id in run.head["ids"]:
            if case_id in found:
                run.append(found[case_id])
    outcomes = [Outcome(record.outcome) for record in found.values()]
    code = exit_code_of(outcomes) if outcomes else EXIT_NOTHING_RAN
    cut = any(part.result.exit_code == EXIT_INTERRUPTED for part in parts)
    started = [head["started"] for head in heads if head.get("started")]
    ended = [head["finished"] for head in heads if head.get("finished")]
    run.head.update(
        started=min(started, default=run.head["started"]),
        finished=None if cut else max(ended, default=time.time()),
        interrupted=cut,
        exit_code=EXIT_INTERRUPTED if cut else code,
    )
    run.save()
    write_reports(folder)
    return run


def _head(parts: Sequence[Ended], heads: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    options = parts[0].spec.options
    typed = options["typed"]
    known = {one.name for one in dataclasses.fields(Request)}
    asked = Request.of_json({name: value for name, value in options.items() if name in known})
    asked = replace(asked, source=typed["source"], flow=typed["flow"], filters=tuple(typed["filters"]))
    listed = [case[0] for part in parts for case in part.spec.options["cases"]]
    all_ids = next((list(head["suite_ids"]) for head in heads if head.get("suite_ids")), listed)
    order = {case_id: number for number, case_id in enumerate(all_ids)}
    return {
        "request": asked.to_json(),
        "id": folder.name,
        "source": typed["source"],
        "suite": typed["suite"],
        "flow": typed["flow_name"],
        "runtime": typed["runtime"],
        "boards": sorted({board for head in heads for board in head.get("boards", ())}),
        "board_info": {board: info for head in heads for board, info in head.get("board_info", {}).items()},
        "command": "",
        "versions": next((head["versions"] for head in heads if head.get("versions")), versions()),
        "ids": sorted(listed, key=lambda case_id: order.get(case_id, len(order))),
        "suite_ids": all_ids,
        "expected": typed["expected"],
        "left_out": typed.get("left_out", []),
    }


def _records(part: Ended, run: SuiteRun, request: Request) -> Iterable[CaseRecord]:
    """A part's records, as if its cases had run here."""
    was = str(part.result.record.get("folder", ""))
    ended = {}
    for line in part.result.record.get("cases") or ():
        record = CaseRecord.of_json(line)
        diff = record.diff.replace(was, str(run.folder)) if was else record.diff
        ended[record.id] = replace(record, repeat=request.command(record.id), diff=diff)
    cancelled = part.result.exit_code == EXIT_INTERRUPTED
    for case in part.spec.options["cases"]:
        if case[0] in ended:
            yield ended[case[0]]
        elif not cancelled:
            yield _lost(case, part.result, run, request)


def _lost(case: Sequence[str], result: Result, run: SuiteRun, request: Request) -> CaseRecord:
    """The record of a case that never came to a board, or never came back from one."""
    known = {outcome.value for outcome in Outcome if outcome.exit_code}
    outcome = result.outcome if result.outcome in known and not result.infrastructure else Outcome.BOARD_LOST.value
    case_id, model, layer, op = case
    where = {name: run.head[name] for name in ("suite", "flow", "runtime", "started")}
    message, repeat = result.reason or "the job came to no result", request.command(case_id)
    return CaseRecord(
        case_id, model, **where, outcome=outcome, ended=outcome, layer=layer, op=op, message=message, repeat=repeat
    )
