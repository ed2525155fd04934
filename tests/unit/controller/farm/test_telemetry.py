from __future__ import annotations

import sys
import time

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")

from support.spans import receiving

from hil.controller.farm import telemetry


def test_telemetry_joins_stages_of_job_in_trace() -> None:
    with receiving() as receiver:
        with telemetry.record_span("submit", user="anna", jobs=3) as submit:
            pass
        began = time.time() - 5
        telemetry.record("queue", submit.traceparent, began, began + 2, job="17.3")
        with (
            telemetry.record_span("job", submit.traceparent, board="rpi") as job,
            telemetry.record_span("run", job.traceparent) as run,
        ):
            run.set(outcome="PASS")
        telemetry.record("alone", "", began, began + 2)
        telemetry.flush()
        found = receiver.by_name
    assert set(found) == {"submit", "queue", "job", "run"}
    assert len({span.trace_id for span in found.values()}) == 1
    assert found["queue"].parent_span_id == found["job"].parent_span_id == found["submit"].span_id
    assert found["run"].parent_span_id == found["job"].span_id
    assert found["queue"].end_time_unix_nano - found["queue"].start_time_unix_nano == pytest.approx(2e9, rel=1e-3)
    told = {one.key: one.value.string_value or one.value.int_value for one in found["submit"].attributes}
    assert told == {"hil.user": "anna", "hil.jobs": 3}
    assert {one.key for one in found["run"].attributes} == {"hil.outcome"}


def test_span_records_and_raises_error() -> None:
    with receiving() as receiver:
        with pytest.raises(ValueError, match="broken"), telemetry.record_span("run"):
            raise ValueError("broken")
        telemetry.flush()
    assert receiver.by_name["run"].status.code == 2
    assert "broken" in receiver.by_name["run"].status.message


@pytest.mark.parametrize("parent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_span_starts_trace_for_invalid_parent(parent: str) -> None:
    with receiving() as receiver:
        with telemetry.record_span("submit", parent) as span:
            assert span.traceparent.startswith("00-")
        telemetry.flush()
    assert receiver.by_name["submit"].parent_span_id == b""


@pytest.mark.parametrize("why", ["no endpoint", "disabled", "not installed"])
def test_telemetry_stays_off_without_receiver(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    if why != "no endpoint":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    if why == "disabled":
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    if why == "not installed":
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    telemetry._get_provider.cache_clear()
    try:
        with telemetry.record_span("submit", "00-1", user="anna") as span:
            span.set(outcome="PASS")
            assert span.traceparent == "00-1"  # the parent of other processes is passed on
        telemetry.record("queue", span.traceparent, 0, 1)
        telemetry.flush()
        assert telemetry._get_provider() is None
    finally:
        telemetry._get_provider.cache_clear()
