"""Profiles: operations with a trace, a comparison of two, and a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hil.controller.analysis.profile.compilation.compile_totals import read_compilation
from hil.controller.analysis.profile.diff import OpDiff
from hil.controller.analysis.profile.ticks.columns import TITLES
from hil.controller.analysis.profile.ticks.show_ticks import group_ticks
from hil.controller.analysis.profile.totals import GROUPS, make_shortener, run_times
from hil.controller.analysis.roofline.show import list_facts
from hil.controller.records.pages.analyses import (
    CompilationDocument,
    ProfileDocument,
    ProfilesComparedDocument,
    ProfilesDocument,
    TraceOnlyDocument,
)
from hil.controller.web.index import sessions
from hil.controller.web.index.profiles import (
    StoredProfile,
    check_compilation,
    find_profile,
    list_named_profiles,
    list_profiles,
    make_show_hint,
    open_profile,
    trace_file,
)
from hil.controller.web.pages.traces import operations
from hil.controller.web.pages.traces.perfetto import make_viewer_hint
from hil.controller.web.pages.traces.roofline_chart import place_chart
from hil.controller.web.session.records import read_detail
from hil.controller.web.site import WebSite, get_site
from hil.controller.web.templating import format_time
from hil.controller.web.text.csv_answer import MAX_ROWS, respond_with_rows
from hil.controller.web.text.documents import describe
from hil.controller.web.text.names import escape_name
from hil.controller.web.text.parameters import InvalidParameter
from hil.controller.web.text.requests import SESSION, count_rows, list_fields, number_of, parse_filter
from hil.errors import UsageError

router = APIRouter()
# Maximum profiles to offer for a comparison. The list of traces contains all profiles.
_CHOICES = 200
_LISTED = 500
# Maximum rows in the table of a roofline. The CSV file contains all rows.
_ROOFLINE_ROWS = 50


@dataclass(frozen=True)
class TimeLine:
    """Frame with Perfetto's UI."""

    query: str  # query of the viewer's URL; "" without a trace
    reason: str  # reason why the trace cannot be shown, or ""
    bytes: int = 0


@router.get("/traces")
def traces(request: Request) -> Response:
    """List all profiles in the served directories."""
    site = get_site(request)
    with site.reader.open_snapshot() as database:
        listed = list_profiles(database, site.roots, count_rows(request, _LISTED))
    return site.render_page(request, "traces.html", found=listed.found, total=listed.total)


@router.get("/trace")
def trace(request: Request) -> Response:
    """Show a profile, ``?profile=KEY`` or ``?id=...&case=...&kind=run``, or compare two, ``?a=KEY&b=KEY``."""
    query = request.query_params
    if query.get("a") or query.get("b"):
        return _render_comparison(request)
    if query.get("profile"):
        return _render_profile(request, find_profile(get_site(request).roots, query["profile"]), "")
    return _render_case_profile(request)


def _render_case_profile(request: Request) -> Response:
    site, query = get_site(request), request.query_params
    with site.reader.open_snapshot() as database:
        session = sessions.resolve_session(database, query.get("id", ""), number_of(request, "root"))
        row = sessions.find_case(database, session, query.get("case", ""))
    found = list_named_profiles(site.roots, Path(session.folder), str(row["name"]), read_detail(session, row).profiles)
    wanted = query.get("kind") or next((one.kind for one in found if one.kind == "run"), "")
    profile = next((one for one in found if one.kind == wanted), found[0] if found and not wanted else None)
    if profile is None:
        hint = "hil run MODEL --profile DIR writes a profile, hil suite run --profile DIR writes a profile per case"
        raise UsageError(f"{row['name']} has no {f'{wanted} ' if wanted else ''}profile", hint=hint)
    if not profile.key:
        raise UsageError("cannot show this profile", hint=make_show_hint(profile))
    return _render_profile(request, profile, escape_name(Path(session.folder).name))


def _render_profile(request: Request, profile: StoredProfile, run: str) -> Response:
    """Show a profile.

    Args:
        run: expected session of the profile; "" accepts any.
    """
    site, wanted = get_site(request), parse_filter(request, operations.TableQuery)
    common: dict[str, Any] = {
        "profile": profile,
        "asked": wanted,
        "fixed": f"{urlencode({'profile': profile.key})}&",
        "line": _make_time_line(site, {"profile": profile.key}, [profile]),
    }
    if profile.kind == "trace":
        return site.render_page(request, "trace_only.html", **common)
    if profile.kind == "compile":
        found = read_compilation(check_compilation(site.roots, profile))
        return site.render_page(request, "trace_compile.html", found=found, most=count_rows(request, 50), **common)
    head = open_profile(site.roots, profile)
    sums = operations.read_totals(profile.folder, wanted.by)
    with site.reader.open_snapshot() as database:
        others = list_profiles(database, site.roots, _CHOICES, kind="run", but=profile.key).found
    roofline = operations.read_roofline(profile.folder, wanted.by)
    return site.render_page(
        request,
        "trace.html",
        head=head,
        roofline=roofline,
        roofline_facts=[] if roofline is None else list_facts(roofline),
        roofline_chart=None if roofline is None else place_chart(roofline),
        roofline_most=_ROOFLINE_ROWS,
        times=run_times(head),
        ticks=group_ticks(head.ticks, wanted.by) if head.ticks else [],
        other_run=bool(run) and head.run.split(" ")[0] != run,
        found=operations.select_totals(sums, wanted, count_rows(request, operations.PAGE_ROWS)),
        short=make_shortener(sums),
        groups=GROUPS,
        title=TITLES[wanted.by],
        others=others,
        **common,
    )


def _render_comparison(request: Request) -> Response:
    site, wanted = get_site(request), parse_filter(request, operations.TableQuery)
    a, b = _find_profile_pair(site, request.query_params)
    keys = {"a": a.key, "b": b.key}
    heads = [open_profile(site.roots, one) for one in (a, b)]
    diff = operations.read_diff(a.folder, b.folder)
    return site.render_page(
        request,
        "trace_diff.html",
        a=a,
        b=b,
        heads=heads,
        diff=diff,
        asked=wanted,
        found=operations.select_diffs(diff.ops, wanted, count_rows(request, operations.PAGE_ROWS)),
        fixed=f"{urlencode(keys)}&",
        swapped=urlencode({"a": b.key, "b": a.key}),
        line=_make_time_line(site, keys, []),
    )


def _find_profile_pair(site: WebSite, query: Mapping[str, str]) -> tuple[StoredProfile, StoredProfile]:
    """Return the two requested profiles. Raises UsageError if one is missing or is not from a run."""
    keys = [query.get(name, "") for name in ("a", "b")]
    if not all(keys):
        raise UsageError(
            "a comparison requires two profiles, A and B", hint="choose both profiles in the list of traces"
        )
    a, b = (find_profile(site.roots, key) for key in keys)
    for one in (a, b):
        if one.kind != "run":
            raise UsageError(f"cannot compare {one.name}: not a profile of a run", hint="open each profile separately")
    return a, b


def _make_time_line(site: WebSite, query: dict[str, str], profiles: Sequence[StoredProfile]) -> TimeLine:
    """Return the frame for a trace. The merged trace of two profiles is created when the frame requests it."""
    try:
        size = sum(trace_file(site.roots, one).stat().st_size for one in profiles)
    except (UsageError, OSError):
        return TimeLine("", "The trace of this profile is missing: hil writes a trace with each profile.")
    return TimeLine(urlencode(query), make_viewer_hint(), size)


_TOTAL = (
    *("name", "kind", "run_ns", "share", "calls", "total_ns", "mean_ns", "p50_ns", "parallelism", "flops_per_s"),
    *("bytes_per_s", "intensity", "bound_estimate", "onnx_nodes", "op_types", "ops"),
)
_TICKS = ("name", "others", "p50", "share", "calls", "minimum", "maximum")
_DIFF = (
    *(
        "name",
        "kind",
        "change",
        "a_p50_ns",
        "b_p50_ns",
        "a_share",
        "b_share",
        "change_ns",
        "ratio",
        "ratio_low",
        "ratio_high",
    ),
)


@router.get("/trace.csv")
def trace_csv(request: Request) -> Response:
    """Return the operations of one or two profiles in the requested order. Raises the same errors as the page."""
    site, wanted, query = get_site(request), parse_filter(request, operations.TableQuery), request.query_params
    if query.get("a") or query.get("b"):
        a, b = _find_profile_pair(site, query)
        for one in (a, b):
            open_profile(site.roots, one)
        diff = operations.read_diff(a.folder, b.folder)
        sums = [diff.timed] if diff.incomparable else [diff.timed, diff.total]
        changes = operations.select_diffs(diff.ops, wanted, MAX_ROWS + 1).rows
        return respond_with_rows(f"{a.name} and {b.name}", _DIFF, [_change_row(one) for one in (*sums, *changes)])
    profile = find_profile(site.roots, query.get("profile", ""))
    if profile.kind != "run":
        raise UsageError(f"operations unavailable: {profile.name} is not a profile of a run")
    head = open_profile(site.roots, profile)
    if head.ticks:
        if wanted.by not in GROUPS:
            raise InvalidParameter.choose("grouping", wanted.by, GROUPS)
        rows = [[getattr(one, name) for name in _TICKS] for one in group_ticks(head.ticks, wanted.by)]
        return respond_with_rows(profile.name, _TICKS, rows)
    found = operations.select_totals(operations.read_totals(profile.folder, wanted.by), wanted, MAX_ROWS + 1).rows
    return respond_with_rows(profile.name, _TOTAL, [[getattr(one, name) for name in _TOTAL] for one in found])


def _change_row(one: OpDiff) -> tuple[Any, ...]:
    times = [(cost.p50_ns, cost.share) if cost else (None, None) for cost in (one.a, one.b)]
    (a, of_a), (b, of_b) = times
    return (one.name, one.kind, one.change, a, b, of_a, of_b, one.change_ns, one.ratio, one.low, one.high)


_ROOFLINE = (
    *("name", "kind", "dtype", "time_ns", "share", "flops", "bytes", "intensity", "flops_per_s", "bytes_per_s"),
    *("bound", "roof_flops_per_s", "shortest_ns", "attained", "attained_low", "attained_high", "is_above"),
)


@router.get("/trace/roofline.csv")
def roofline_csv(request: Request) -> Response:
    """Return the rows of a profile's roofline. The first row is the whole model."""
    site, query = get_site(request), request.query_params
    profile = find_profile(site.roots, query.get("profile", ""))
    if profile.kind != "run":
        raise UsageError(f"no roofline: {profile.name} is not a profile of a run")
    open_profile(site.roots, profile)
    found = operations.read_roofline(profile.folder, query.get("by", "op"))
    if found is None:
        raise UsageError(f"{profile.name} has no peaks", hint=f"run: hil profile roofline {profile.folder}")
    rows = [
        {
            **{name: getattr(one, name, None) for name in _ROOFLINE},
            "attained_low": one.interval.low if one.interval else None,
            "attained_high": one.interval.high if one.interval else None,
        }
        for one in (found.whole, *found.rows)
    ]
    return respond_with_rows(f"roofline of {profile.name}", _ROOFLINE, [list(row.values()) for row in rows])


_STEPS = {
    "phases": ("name", "seconds", "share"),
    "passes": ("name", "phase", "seconds", "share", "runs"),
    "operations": ("name", "share", "seconds", "flops", "bytes", "bound"),
}


@router.get("/trace/compilation.csv")
def compilation_csv(request: Request) -> Response:
    """Return a table of a compilation's profile: phases, passes or operations."""
    site, wanted = get_site(request), request.query_params.get("table", "")
    if wanted not in _STEPS:
        raise InvalidParameter.choose("compilation table", wanted, _STEPS)
    profile = find_profile(site.roots, request.query_params.get("profile", ""))
    found = read_compilation(check_compilation(site.roots, profile))
    rows = [[getattr(one, name) for name in _STEPS[wanted]] for one in getattr(found, wanted)]
    return respond_with_rows(f"{wanted} of {profile.name}", _STEPS[wanted], rows)


@router.get("/traces.csv")
def traces_csv(request: Request) -> Response:
    """Return the list of profiles."""
    site = get_site(request)
    with site.reader.open_snapshot() as database:
        found = list_profiles(database, site.roots, MAX_ROWS + 1).found
    rows = [(one.name, one.key, one.kind, format_time(one.changed)) for one in found]
    return respond_with_rows("profiles", ("name", "key", "kind", "written"), rows)


# URL parameters by path.
PARAMETERS = {
    "/trace": (*SESSION, "case", "kind", "profile", "a", "b", *list_fields(operations.TableQuery)),
    "/trace.csv": ("profile", "a", "b", *list_fields(operations.TableQuery)),
    "/trace/compilation.csv": ("profile", "table"),
    "/trace/roofline.csv": ("profile", "by"),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/traces": {"traces.html": describe(ProfilesDocument, profiles="found")},
    "/trace": {
        "trace.html": describe(
            ProfileDocument, ticks="head.ticks", operations="found.rows", total="found.total", pages="found.pages"
        ),
        "trace_only.html": describe(TraceOnlyDocument),
        "trace_compile.html": describe(
            CompilationDocument,
            seconds="found.seconds",
            phases="found.phases",
            passes=lambda values: values["found"].passes[: values["most"]],
            operations=lambda values: values["found"].operations[: values["most"]],
            dispatches="found.dispatches",
            program_bytes="found.program_bytes",
        ),
        "trace_diff.html": describe(
            ProfilesComparedDocument,
            incomparable="diff.incomparable",
            timed="diff.timed",
            operations="found.rows",
            total="found.total",
            pages="found.pages",
        ),
    },
}
