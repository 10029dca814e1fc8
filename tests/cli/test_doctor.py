"""`qwen_quantize doctor`: what it finds, and what it makes of a machine that lacks something."""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import Result

from qwen_quantize.cli.doctor import _NEEDED, chip_named, torch_devices

Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parent.parent.parent


def test_what_is_needed_is_what_pyproject_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [f"{name}>={least}" for name, least in _NEEDED.items()] == project["dependencies"]


def test_a_machine_that_can(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert record["able"] is True
    found = {it["name"]: it for it in record["findings"]}
    assert found["torch"]["value"] == importlib.metadata.version("torch")
    assert {"kernels of formats/kernels.c", "memory available", "disk free here", "datasets"} <= set(found)
    assert "the main job can run here" in result.stderr


def test_without_kernels_it_is_only_slower(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", "0")
    result = run("doctor")
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if "kernels of formats/kernels.c" in line]
    assert line.startswith("less")
    assert "slower torch code computes the same results" in line


@pytest.mark.parametrize("version", [None, "2.7.1"])
def test_without_torch_it_cannot(version: str | None, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def without(name: str) -> str:
        if name != "torch":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", without)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert record["able"] is False
    assert record["devices"] == []
    assert re.search(r"^MISSING\s+torch: .*pip install \"torch>=2\.8\"$", result.stderr, re.MULTILINE)


def test_devices_that_torch_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda index: ("Ascend910B3", "Something Else")[index],
        get_device_properties=lambda _index: SimpleNamespace(total_memory=64 << 30),
    )
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    found = [it for it in torch_devices() if it.device.startswith("npu")]
    assert [(it.device, it.chip) for it in found] == [("npu:0", "ascend-910b"), ("npu:1", "unknown")]
    assert found[0].memory_bytes == 64 << 30


@pytest.mark.parametrize(
    ("title", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100"),
        ("NVIDIA H20", "nvidia-h20"),
        ("Tesla V100-SXM2-16GB", "nvidia-v100"),
        ("NVIDIA GeForce RTX 4090", "nvidia-ada"),
        ("NVIDIA GeForce GTX 1080", "unknown"),
        ("Ascend310P3", "ascend-310p"),
        ("MLU370-X8", "cambricon-mlu370"),
        ("MTT S4000", "moorethreads-s4000"),
        ("AMD Instinct MI300X", "amd-mi300x"),
        ("H100 or A100", "unknown"),
        ("", "unknown"),
    ],
)
def test_the_chip_behind_a_name(title: str, chip: str) -> None:
    assert chip_named(title) == chip
