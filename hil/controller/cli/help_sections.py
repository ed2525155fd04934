"""Group the options in the help of commands with many options into sections.

rich-click can do this too, but importing rich-click and rich takes longer than printing the whole help with click.
"""

from __future__ import annotations

from collections.abc import Iterable

import click

# Commands with fewer options list them without sections.
MIN_OPTIONS = 13
# Section -> parameter names. Help lists the sections in this order. In a section, options are in the command's order.
SECTIONS = {
    "Board": (
        *("selector", "board", "boards", "hw_type", "each_board", "identity", "known_hosts", "accept_new_host_key"),
        *("second_board", "runtime", "device", "wait_s"),
    ),
    "Judgement": ("baseline", "commit", "chosen", "fail_on", "known", "budget_s", "bisect", "over", "build_timeout_s"),
    "Services": (
        *(
            "parts",
            "services",
            "user",
            "home",
            "command",
            "listen",
            "tls_cert",
            "tls_key",
            "gateway",
            "tls_ca",
            "metrics",
            "web",
        ),
        *("db", "artifacts", "site", "sims", "backups", "allow_commands"),
    ),
    "Queue": ("priority", "timeout_s", "max_attempts", "project", "wait"),
    "Cases": (
        *("as_suite", "flow", "filters", "layers", "group", "layer_inputs", "merge", "only_expected_failures"),
        *("artifact_model", "isolated", "cumulative", "methods", "cases", "files", "random", "compilers", "only"),
        *("case", "key", "keep", "sent", "count"),
        *("start", "end", "dispatches", "keys"),
    ),
    "Model and inputs": (
        *("function", "functions", "dims", "inputs", "seed", "input_range", "generate", "dataset"),
        *("steps", "flagfile"),
        *("compile_flags", "recompute"),
    ),
    "References and criteria": (
        *("references", "expected", "against", "require_independent", "rtol", "atol", "accept", "arithmetic"),
        *("metric", "scored_output", "max_drop", "reference_model"),
        *("allow_blind", "allow_flush", "allow_unstable", "no_fallback", "no_check"),
    ),
    "Measurement": (
        *(
            "iterations",
            "runs",
            "warmup",
            "instructions",
            "energy",
            "dtypes",
            "min_time_s",
            "memory_mib",
            "sustained_s",
            "settle_s",
            "concurrency",
            "repeat",
            "fresh_load",
            "recompile",
            "confirm",
        ),
        *("min_effect", "fail_if_slower", "timeout", "jobs", "slow", "max_runs", "profile", "compile_time_profile"),
    ),
    "Debugging": ("verbose", "debug_ir", "debug_ir_passes", "faults", "sandbox", "fresh"),
    "Output": (
        *("save", "node_data", "by", "values", "stored"),
        *(
            "output",
            "out",
            "signing_key",
            "keep_all",
            "labels",
            "plot",
            "benchmark_out",
            "markdown",
            "junit",
            "sarif",
            "resume",
            "dry_run",
            "force",
            "as_json",
        ),
    ),
}
_SECTION_OF = {name: section for section, names in SECTIONS.items() for name in names}
_LAST = "Output"


def write_options(params: Iterable[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the help of options.

    If there are many, use sections; the last section has options that no section lists.
    """
    options = [one for one in params if isinstance(one, click.Option) and not one.hidden]
    # Do not count --help, whose parameter name depends on the version of click.
    is_long = sum("--help" not in one.opts for one in options) >= MIN_OPTIONS
    sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *SECTIONS)}
    for one in options:
        title = _SECTION_OF.get(str(one.name), _LAST) if is_long else "Options"
        if record := one.get_help_record(ctx):
            sections[title].append(record)
    for title, lines in sections.items():
        if lines:
            with formatter.section(title):
                formatter.write_dl(lines)
