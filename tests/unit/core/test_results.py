"""The requested device, and notes and errors for programs that ran on another device."""

from __future__ import annotations

import pytest

from hil.core.results import MAX_NAMES, Part, RequestedDevice, format_node_counts
from hil.errors import RanElsewhere

NPU, CPU = Part("npu", 3, ("a", "b", "c")), Part("cpu", 2, ("d (Erf)", "e (Det)"), elsewhere=True)
ASKED, DEFAULT = RequestedDevice("npu", binding=True), RequestedDevice("", binding=False)
XNNPACK, KERNELS = Part("XnnpackBackend", 1), Part("portable", 2, ("aten::erf.out", "aten::foo.out"), elsewhere=True)


def executorch(*flags: str) -> RequestedDevice:
    return RequestedDevice.of("executorch", flags, "cpu")


@pytest.mark.parametrize("no_fallback", [False, True])
def test_requested_device_without_fallback_has_empty_note(no_fallback):
    for asked in (ASKED, DEFAULT):
        assert asked.check((NPU,), no_fallback=no_fallback) == ""
        assert asked.check((), no_fallback=no_fallback) == ""  # zero nodes were computed


@pytest.mark.parametrize("no_fallback", [False, True])
def test_requested_device_without_nodes_raises_fallback_error(no_fallback):
    with pytest.raises(RanElsewhere) as caught:
        ASKED.check((CPU,), no_fallback=no_fallback)
    assert caught.value.message == "all 2 nodes ran on cpu, not on npu"
    assert (caught.value.outcome, caught.value.exit_code) == ("FALLBACK", 3)
    with pytest.raises(RanElsewhere, match="the program ran on cpu, not on npu"):
        ASKED.check((Part("cpu", elsewhere=True),), no_fallback=no_fallback)


def test_requested_device_reports_partial_fallback():
    text = "2 of 5 nodes ran on cpu, not on npu: d (Erf), e (Det)"
    assert ASKED.check((NPU, CPU), no_fallback=False) == text
    with pytest.raises(RanElsewhere) as caught:
        ASKED.check((NPU, CPU), no_fallback=True)
    assert caught.value.message == text
    assert "--no-fallback" in caught.value.hint


def test_default_device_rejects_fallback_only_if_forbidden():
    assert DEFAULT.check((CPU,), no_fallback=False) == DEFAULT.check((NPU, CPU), no_fallback=False) == ""
    for placement in ((CPU,), (NPU, CPU)):
        with pytest.raises(RanElsewhere, match="not on the default device"):
            DEFAULT.check(placement, no_fallback=True)


def test_fallback_ban_rejects_unknown_placement():
    assert ASKED.check(None, no_fallback=False) == ""
    with pytest.raises(RanElsewhere, match="does not report the device"):
        ASKED.check(None, no_fallback=True)


def test_placement_counts_all_nodes_and_lists_first():
    part = Part.of("cpu", [f"n{number}" for number in range(1000)], elsewhere=True)
    assert (part.nodes, len(part.names)) == (1000, MAX_NAMES)
    assert Part.from_json(part.to_json()) == part
    assert ASKED.check((NPU, part), no_fallback=False).endswith("n6, n7 and 992 more")
    assert format_node_counts((one.device, one.nodes) for one in (NPU, part, Part("gpu", 1), Part("x"))) == (
        "npu (3 nodes), cpu (1000 nodes), gpu (1 node), x"
    )


def test_requested_device_binds_only_if_configured():
    assert RequestedDevice.of("onnxruntime", (), "CUDAExecutionProvider") == RequestedDevice(
        "CUDAExecutionProvider", binding=True
    )
    assert RequestedDevice.of("onnxruntime", (), "") == RequestedDevice("", binding=False)


def test_executorch_backend_without_nodes_raises_fallback_error():
    asked = executorch("--backend=xnnpack")
    left = (Part("portable", 2, ("aten::erf.out",)),)  # for a program without delegates the runtime has no more details
    with pytest.raises(RanElsewhere, match="all 2 nodes ran on portable, not on XnnpackBackend"):
        asked.check(asked.mark(left), no_fallback=False)
    assert asked.check(asked.mark((XNNPACK, KERNELS)), no_fallback=False).startswith("2 of 3 nodes ran on portable")


def test_executorch_backend_with_portable_may_take_zero_nodes():
    left = (Part("portable", 2),)
    for flags in (["--backend=xnnpack,portable"], ["--backend=portable"], []):
        asked = executorch(*flags)
        assert asked.check(asked.mark(left), no_fallback=False) == ""
    with pytest.raises(RanElsewhere, match="not on XnnpackBackend"):
        asked = executorch("--backend=xnnpack,portable")
        asked.check(asked.mark(left), no_fallback=True)
    asked = executorch("--backend=portable")
    assert asked.check(asked.mark(left), no_fallback=True) == ""
