"""What is recorded of the software below torch, on this processor and on packages that are not here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from qwen_quantize.chip_profiles.device_versions import device_versions


def test_this_processor_names_its_libraries() -> None:
    found = device_versions("cpu")
    assert f"BLAS_INFO={found['blas']}" in torch.__config__.show()
    assert found["threads"] == str(torch.get_num_threads())
    assert all(text and text.isprintable() for text in found.values())


def test_an_emulated_chip_has_none() -> None:
    assert device_versions("emulated:example@1.3") == {}


def test_a_device_without_its_package_is_left_out() -> None:
    for device in ("npu:0", "mlu:0", "musa:0", "gcu:0", "xpu", "mps"):
        assert set(device_versions(device)) <= {"toolkit"}


def fake_npu(cann: object) -> tuple[ModuleType, SimpleNamespace]:
    """A torch_npu with the calls that its documentation has."""
    package = ModuleType("torch_npu")
    npu = SimpleNamespace(
        get_soc_version=lambda: 223,
        get_device_properties=lambda index: SimpleNamespace(name=f"Ascend{index}", total_memory=1),
    )
    package.__dict__.update(__version__="2.6.0", npu=npu, utils=SimpleNamespace(get_cann_version=cann))
    return package, npu


def test_an_ascend_device_tells_its_toolkit_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"CANN": "8.3.RC1", "DRIVER": "25.2\n", "OPP": ""}

    def version(part: str) -> str:
        if part not in parts:
            raise RuntimeError("no such part")
        return parts[part]

    package, npu = fake_npu(version)
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    expected = {"torch_npu": "2.6.0", "soc": "223", "toolkit": "8.3.RC1", "driver": "25.2"}
    assert device_versions("npu:0") == expected
    del package.utils
    assert device_versions("npu:0") == {"torch_npu": "2.6.0", "soc": "223"}


def test_a_musa_device_tells_its_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(major=3, minor=1 + index))
    monkeypatch.setattr(torch, "musa", module, raising=False)
    monkeypatch.setattr(torch.version, "musa", "4.3.0", raising=False)
    assert device_versions("musa:0") == {"toolkit": "4.3.0", "compute capability": "3.1"}


def test_a_cuda_device_tells_its_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=9, minor=0, gcnArchName="")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = device_versions("cuda:0")
    assert (found["toolkit"], found["compute capability"]) == ("12.8", "9.0")
    assert "architecture" not in found
