"""Monitoring of a farm: Prometheus configuration and alert rules, and a Grafana dashboard.

All expressions use metrics of :mod:`hil.controller.farm.gateway.metrics`. Several gateways report the same state of the
farm, so the expressions take the maximum of all gateways.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hil.controller.farm.install.settings import InstallSettings

_JOB = "hil-farm"
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3


@dataclass(frozen=True)
class _Alert:
    """Alert rule of Prometheus."""

    name: str
    expression: str
    lasts: str  # time for which the expression must be true
    severity: str
    summary: str


ALERTS = (
    _Alert("HilGatewayDown", f'up{{job="{_JOB}"}} == 0', "2m", "critical", "gateway {{ $labels.instance }} is down"),
    _Alert("HilDatabaseDown", "hil_farm_database_up == 0", "2m", "critical", "the farm's database does not respond"),
    _Alert(
        "HilHostDown",
        "max by (host, site) (hil_farm_host_boards_online) == 0 and max by (host, site) (hil_farm_host_boards) > 0",
        "10m",
        "critical",
        "no board of host {{ $labels.host }} is online",
    ),
    _Alert(
        "HilBoardOffline",
        'max by (board) (hil_farm_board_state{state="offline"}) == 1',
        "15m",
        "warning",
        "board {{ $labels.board }} is offline",
    ),
    _Alert(
        "HilBoardQuarantined",
        'max by (board) (hil_farm_board_state{state="quarantined"}) == 1',
        "15m",
        "warning",
        "board {{ $labels.board }} failed its checks: hil farm events --board {{ $labels.board }}",
    ),
    _Alert(
        "HilCertificateExpires",
        "hil_farm_certificate_expires_timestamp_seconds - time() < 7 * 86400",
        "15m",
        "warning",
        "the certificate of gateway {{ $labels.instance }} expires in {{ $value | humanizeDuration }}",
    ),
    _Alert(
        "HilJobsWait",
        "max by (priority) (hil_farm_oldest_job_seconds) > 3600",
        "5m",
        "warning",
        "a {{ $labels.priority }} job has waited for {{ $value | humanizeDuration }}",
    ),
    _Alert(
        "HilLeasesExpire",
        "sum(increase(hil_farm_leases_expired_total[1h])) > 5",
        "0m",
        "warning",
        "{{ $value }} leases ended in the last hour because heartbeats stopped",
    ),
    _Alert(
        "HilBoardFailsJobs",
        'sum by (board) (increase(hil_farm_board_results_total{outcome=~"BOARD_.*"}[1h])) > 3',
        "0m",
        "warning",
        "board {{ $labels.board }} was lost in {{ $value }} jobs of the last hour",
    ),
)


@dataclass(frozen=True)
class _Panel:
    """Panel of the dashboard: lines of a chart, as (expression, legend)."""

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"


PANELS = (
    _Panel("Boards by state", (("max by (state) (hil_farm_boards)", "{{state}}"),)),
    _Panel("Jobs", (('max by (state) (hil_farm_jobs{state=~"queued|running"})', "{{state}}"),)),
    _Panel("Oldest waiting job", (("max by (priority) (hil_farm_oldest_job_seconds)", "{{priority}}"),), "s"),
    _Panel("Results", (("sum by (outcome) (rate(hil_farm_results_total[15m])) * 3600", "{{outcome}} per hour"),)),
    _Panel(
        "Waiting time",
        (
            ("histogram_quantile(0.5, sum by (le) (rate(hil_farm_queue_wait_seconds_bucket[1h])))", "median"),
            ("histogram_quantile(0.95, sum by (le) (rate(hil_farm_queue_wait_seconds_bucket[1h])))", "95th percentile"),
        ),
        "s",
    ),
    _Panel("Queue", (("max by (priority) (hil_farm_queue)", "{{priority}}"),)),
    _Panel("Board use", (("avg_over_time(hil_farm_board_busy[1h])", "{{board}}"),), "percentunit"),
    _Panel("Boards out of service", (("max by (board) (hil_farm_board_online) == 0", "{{board}}"),)),
    _Panel("Failed checks in a row", (("max by (board) (hil_farm_board_failed_checks) > 0", "{{board}}"),)),
    _Panel(
        "Time since the last passed check",
        (("time() - max by (board) (hil_farm_board_last_check_timestamp_seconds)", "{{board}}"),),
        "s",
    ),
    _Panel("Online boards by host", (("max by (host) (hil_farm_host_boards_online)", "{{host}}"),)),
    _Panel(
        "Results by board",
        (("sum by (board, outcome) (increase(hil_farm_board_results_total[1h]))", "{{board}} {{outcome}}"),),
    ),
    _Panel("Grants", (("sum by (kind) (rate(hil_farm_grants_total[15m])) * 3600", "{{kind}} per hour"),)),
    _Panel("Expired leases", (("sum(increase(hil_farm_leases_expired_total[1h]))", "per hour"),)),
    _Panel(
        "Calls",
        (
            (
                "histogram_quantile(0.99, sum by (le, call) (rate(hil_farm_rpc_seconds_bucket[5m])))",
                "99th percentile {{call}}",
            ),
        ),
        "s",
    ),
    _Panel("Failed calls", (("sum by (call, code) (rate(hil_farm_rpc_errors_total[5m]))", "{{call}} {{code}}"),)),
    _Panel("Attached boards by gateway", (("hil_farm_attending", "{{instance}}"),)),
    _Panel("Database", (("hil_farm_database_up", "{{instance}}"),)),
    _Panel(
        "Time until the certificate expires",
        (("hil_farm_certificate_expires_timestamp_seconds - time()", "{{instance}}"),),
        "s",
    ),
)


def make_monitoring(settings: InstallSettings) -> dict[str, str]:
    """Return file name -> content of the monitoring's files."""
    return {
        "prometheus.yaml": _make_scrape_config(settings),
        "alerts.yaml": _make_alerts(),
        "grafana-dashboard.json": json.dumps(_make_dashboard(), indent=1) + "\n",
    }


def _make_scrape_config(settings: InstallSettings) -> str:
    return (
        "rule_files: [alerts.yaml]\n"
        "scrape_configs:\n"
        f"  - job_name: {_JOB}\n"
        "    static_configs:\n"
        f"      - targets: [{json.dumps(settings.metrics)}]\n"
    )


def _make_alerts() -> str:
    rules = [
        f"      - alert: {alert.name}\n"
        f"        expr: {json.dumps(alert.expression)}\n"
        f"        for: {alert.lasts}\n"
        f"        labels: {{severity: {alert.severity}}}\n"
        f"        annotations: {{summary: {json.dumps(alert.summary)}}}\n"
        for alert in ALERTS
    ]
    return f"groups:\n  - name: {_JOB}\n    rules:\n{''.join(rules)}"


def _make_dashboard() -> dict[str, Any]:
    """Return the dashboard for import in Grafana, which asks for the data source."""
    return {
        "__inputs": [
            {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"},
        ],
        "uid": "hil-farm",
        "title": "hil farm",
        "tags": ["hil"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-24h", "to": "now"},
        "panels": [_make_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _make_panel(number: int, panel: _Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    place = {"x": number % _PER_ROW * _WIDTH, "y": number // _PER_ROW * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
    return {
        "id": number + 1,
        "title": panel.title,
        "type": panel.kind,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": source}
            for index, (expression, legend) in enumerate(panel.lines)
        ],
    }
