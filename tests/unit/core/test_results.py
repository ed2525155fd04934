"""Where a program was told to run, and what is said of one that ran elsewhere."""

from __future__ import annotations

import pytest

from hil.core.results import MOST_NAMES, Part, RequestedDevice, placement_text
from hil.errors import RanElsewhere

NPU, CPU = Part("npu", 3, ("a", "b", "c")), Part("cpu", 2, ("d (Erf)", "e (Det)"), elsewhere=True)
ASKED, DEFAULT = RequestedDevice("npu", binding=True), RequestedDevice("", binding=False)
XNNPACK, KERNELS = Part("XnnpackBackend", 1), Part("portable", 2, ("aten::erf.out", "aten::foo.out"), elsewhere=True)


def executorch(*flags: str) -> RequestedDevice:
    return RequestedDevice.of("executorch", flags, "cpu")


@pytest.mark.parametrize("no_fallback", [False, True])
def test_all_of_it_there_is_worth_no_word(no_fallback):
    for asked in (ASKED, DEFAULT):
        assert asked.check((NPU,), no_fallback=no_fallback) == ""
        assert asked.check((), no_fallback=no_fallback) == ""  # nothing was computed at all


@pytest.mark.parametrize("no_fallback", [False, True])
def test_none_of_it_there_is_an_error(no_fallback):
    with pytest.raises(RanElsewhere) as caught:
        ASKED.check((CPU,), no_fallback=no_fallback)
    assert caught.value.message == "all 2 nodes ran on cpu, not on npu"
    assert (caught.value.outcome, caught.value.exit_code) == ("FALLBACK", 3)
    with pytest.raises(RanElsewhere, match="the program ran on cpu, not on npu"):
        ASKED.check((Part("cpu", elsewhere=True),), no_fallback=no_fallback)


def test_a_part_elsewhere_is_a_note_with_the_share_and_the_nodes_or_an_error_where_none_is_allowed():
    text = "2 of 5 nodes ran on cpu, not on npu: d (Erf), e (Det)"
    assert ASKED.check((NPU, CPU), no_fallback=False) == text
    with pytest.raises(RanElsewhere) as caught:
        ASKED.check((NPU, CPU), no_fallback=True)
    assert caught.value.message == text
    assert "--no-fallback" in caught.value.hint


def test_where_nobody_asked_for_a_device_only_no_fallback_minds():
    assert DEFAULT.check((CPU,), no_fallback=False) == DEFAULT.check((NPU, CPU), no_fallback=False) == ""
    for placement in ((CPU,), (NPU, CPU)):
        with pytest.raises(RanElsewhere, match="not on the default device"):
            DEFAULT.check(placement, no_fallback=True)


def test_a_runtime_that_does_not_tell_cannot_keep_what_no_fallback_promises():
    assert ASKED.check(None, no_fallback=False) == ""
    with pytest.raises(RanElsewhere, match="does not tell where"):
        ASKED.check(None, no_fallback=True)


def test_many_nodes_are_counted_and_some_named():
    part = Part.of("cpu", [f"n{number}" for number in range(1000)], elsewhere=True)
    assert (part.nodes, len(part.names)) == (1000, MOST_NAMES)
    assert Part.of_json(part.to_json()) == part
    assert ASKED.check((NPU, part), no_fallback=False).endswith("n6, n7 and 992 more")
    assert placement_text([one.to_json() for one in (NPU, part, Part("gpu", 1), Part("x"))]) == (
        "npu (3 nodes), cpu (1000 nodes), gpu (1 node), x"
    )


def test_the_boards_device_binds_and_its_absence_does_not():
    assert RequestedDevice.of("onnxruntime", (), "CUDAExecutionProvider") == RequestedDevice(
        "CUDAExecutionProvider", binding=True
    )
    assert RequestedDevice.of("onnxruntime", (), "") == RequestedDevice("", binding=False)


def test_a_backend_that_was_asked_for_and_took_nothing_is_a_fallback():
    asked = executorch("--backend=xnnpack")
    left = (Part("portable", 2, ("aten::erf.out",)),)  # of a program without delegates the runtime knows no better
    with pytest.raises(RanElsewhere, match="all 2 nodes ran on portable, not on XnnpackBackend"):
        asked.check(asked.mark(left), no_fallback=False)
    assert asked.check(asked.mark((XNNPACK, KERNELS)), no_fallback=False).startswith("2 of 3 nodes ran on portable")


def test_a_backend_beside_the_portable_kernels_may_take_nothing():
    left = (Part("portable", 2),)
    for flags in (["--backend=xnnpack,portable"], ["--backend=portable"], []):
        asked = executorch(*flags)
        assert asked.check(asked.mark(left), no_fallback=False) == ""
    with pytest.raises(RanElsewhere, match="not on XnnpackBackend"):
        asked = executorch("--backend=xnnpack,portable")
        asked.check(asked.mark(left), no_fallback=True)
    asked = executorch("--backend=portable")
    assert asked.check(asked.mark(left), no_fallback=True) == ""
