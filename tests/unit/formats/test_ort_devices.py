"""ONNX Runtime's providers have short names and options."""

from __future__ import annotations

import pytest

from hil.formats.ort_devices import find_provider, parse_provider_options, shorten_provider, suggest_device

PROVIDERS = ["CPUExecutionProvider", "TensorrtExecutionProvider", "QNNExecutionProvider", "DmlExecutionProvider"]


@pytest.mark.parametrize(
    ("device", "provider"),
    [
        ("cpu", "CPUExecutionProvider"),
        ("CPUExecutionProvider", "CPUExecutionProvider"),
        ("qnn://backend_path=/lib/libQnnHtp.so", "QNNExecutionProvider"),
        ("TensorRT", "TensorrtExecutionProvider"),
        ("trt", "TensorrtExecutionProvider"),
        ("directml", "DmlExecutionProvider"),
        ("cuda", ""),
        ("", ""),
    ],
)
def test_find_provider_accepts_short_names(device, provider):
    assert find_provider(device, PROVIDERS) == provider


def test_shorten_provider_keeps_names_of_other_devices():
    assert [shorten_provider(one) for one in ("local-task", "vulkan://GPU-6d")] == ["local-task", "vulkan"]


def test_parse_provider_options_reads_keys_and_plain_values():
    assert parse_provider_options("cuda") == {}
    assert parse_provider_options("cuda://1") == {"device_id": "1"}
    assert parse_provider_options("OpenVINOExecutionProvider://GPU,num_streams=2") == {
        "device_type": "GPU",
        "num_streams": "2",
    }
    assert parse_provider_options("qnn://backend_path=/a=b.so") == {"backend_path": "/a=b.so"}


@pytest.mark.parametrize("device", ["cuda://device_id=", "cuda://=1"])
def test_parse_provider_options_rejects_missing_parts(device):
    with pytest.raises(ValueError, match="expected KEY=VALUE"):
        parse_provider_options(device)


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("CUDAExecutionProvider", ""),
        ("OpenVINOExecutionProvider", ""),
        ("gpu", ""),
        ("qn", "did you mean 'qnn'? "),
        ("QMNExecutionProvider", "did you mean 'qnn'? "),
        ("CPUExecutionProvidr", "did you mean 'CPUExecutionProvider'? "),
        ("cpuu", "did you mean 'cpu'? "),
    ],
)
def test_suggested_device_is_similar_without_suffix(device, hint):
    assert suggest_device(device, PROVIDERS) == hint
    assert suggest_device("local-tusk", ["local-task", "vulkan"]) == "did you mean 'local-task'? "
