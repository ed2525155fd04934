from __future__ import annotations

import asyncio
import urllib.request
from typing import Any

import pytest
from support.fake_farm_client import board, parsed

pytest.importorskip("prometheus_client", reason="needs the extra `farm`")

from hil.controller.farm.database.database import DatabaseAway
from hil.controller.farm.gateway.metrics import FarmSnapshot, Metrics
from hil.controller.records.lab.farm import FarmStats, QueuePercentiles
from hil.errors import UsageError

_STATS = FarmStats(
    jobs={"queued": 2, "running": 1, "done": 40, "cancelled": 0},
    boards={"online": 3, "quarantined": 1},
    queue={"high": 0, "normal": 2, "low": 0},
    waiting_s=QueuePercentiles(p50=None, p95=None),
    users=[],
)


async def scraped(metrics: Metrics, read: Any) -> dict[str, float]:
    address = metrics.serve("127.0.0.1:0", read)
    try:
        text = await asyncio.to_thread(_get, f"http://{address}/metrics")
    finally:
        await asyncio.to_thread(metrics.stop)
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def test_metrics_report_farm_state_and_gateway_calls() -> None:
    metrics = Metrics()
    metrics.count_call("Farm.Submit", "OK", 0.004)
    metrics.count_call("Farm.Submit", "UNAVAILABLE", 5.0)
    metrics.count_call("Hosts.Attend", "UNAVAILABLE", None)
    metrics.count_grant("run", "normal", 0.03)
    metrics.count_result("rpi", "PASS", is_final=True)
    metrics.count_result("rpi", "NONE", is_final=True)
    metrics.count_result("rpi", "BOARD_LOST", is_final=False)
    metrics.expired.inc(2)
    metrics.attending.set(7)

    async def read() -> Any:
        boards = [
            parsed("boards", [board("rpi", "online", host="lab", job="7", checked_at="2026-11-21T12:00:00+00:00")])[0],
            parsed("boards", [board("pi2", "quarantined", host="lab", failures=2)])[0],
            parsed("boards", [board("jetson", "offline", host="attic")])[0],
        ]
        return FarmSnapshot(_STATS, boards, {"normal": 12.5})

    found = asyncio.run(scraped(metrics, read))
    assert found["hil_farm_database_up"] == 1
    assert found['hil_farm_jobs{state="queued"}'] == 2 and found['hil_farm_jobs{state="done"}'] == 40
    assert found['hil_farm_boards{state="quarantined"}'] == 1
    assert found['hil_farm_queue{priority="normal"}'] == 2
    assert found['hil_farm_rpc_seconds_count{call="Farm.Submit",code="OK"}'] == 1
    assert found['hil_farm_rpc_errors_total{call="Farm.Submit",code="UNAVAILABLE"}'] == 1
    assert 'hil_farm_rpc_errors_total{call="Farm.Submit",code="OK"}' not in found
    assert found['hil_farm_rpc_errors_total{call="Hosts.Attend",code="UNAVAILABLE"}'] == 1
    assert 'hil_farm_rpc_seconds_count{call="Hosts.Attend",code="UNAVAILABLE"}' not in found
    assert found['hil_farm_queue_wait_seconds_bucket{le="0.02",priority="normal"}'] == 0
    assert found['hil_farm_queue_wait_seconds_bucket{le="0.05",priority="normal"}'] == 1
    assert found['hil_farm_grants_total{kind="run"}'] == 1
    assert found['hil_farm_board_results_total{board="rpi",outcome="BOARD_LOST"}'] == 1
    assert 'hil_farm_results_total{outcome="BOARD_LOST"}' not in found
    assert found['hil_farm_results_total{outcome="PASS"}'] == found['hil_farm_results_total{outcome="NONE"}'] == 1
    assert found["hil_farm_leases_expired_total"] == 2
    assert found["hil_farm_attending"] == 7
    assert found['hil_farm_oldest_job_seconds{priority="normal"}'] == 12.5
    assert found['hil_farm_board_online{board="rpi",host="lab",site="lab",type="rpi5"}'] == 1
    assert found['hil_farm_board_online{board="pi2",host="lab",site="lab",type="rpi5"}'] == 0
    assert found['hil_farm_board_state{board="pi2",state="quarantined"}'] == 1
    assert found['hil_farm_board_state{board="pi2",state="online"}'] == 0
    assert found['hil_farm_board_busy{board="rpi"}'] == 1 and found['hil_farm_board_busy{board="pi2"}'] == 0
    assert found['hil_farm_board_failed_checks{board="pi2"}'] == 2
    assert found['hil_farm_board_last_check_timestamp_seconds{board="rpi"}'] == 1795262400
    assert found['hil_farm_host_boards{host="lab",site="lab"}'] == 2
    assert found['hil_farm_host_boards_online{host="attic",site="lab"}'] == 0


def test_metrics_report_database_outage_without_error() -> None:
    async def read() -> Any:
        raise DatabaseAway("gone")

    found = asyncio.run(scraped(Metrics(), read))
    assert found["hil_farm_database_up"] == 0
    assert not [name for name in found if name.startswith("hil_farm_jobs")]


@pytest.mark.parametrize("listen", ["9090", "127.0.0.1:http", "127.0.0.1:99999", "203.0.113.1:0"])
def test_metrics_reject_unusable_listen_address(listen: str) -> None:
    async def read() -> Any:
        return _STATS

    async def serve() -> None:
        Metrics().serve(listen, read)

    with pytest.raises(UsageError, match=r"serve metrics at|metrics address"):
        asyncio.run(serve())


@pytest.mark.parametrize(("listen", "host"), [(":0", "127.0.0.1"), ("0.0.0.0:0", "0.0.0.0")])
def test_metrics_listen_on_loopback_by_default(listen: str, host: str) -> None:
    async def served() -> None:
        metrics = Metrics()
        try:
            assert metrics.serve(listen, lambda: None).startswith(f"{host}:")
            assert metrics._server.server_address[0] == host
        finally:
            await asyncio.to_thread(metrics.stop)

    asyncio.run(served())
