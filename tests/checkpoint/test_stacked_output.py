"""Experts written one by one into tensors of all experts: the bytes, in any order, over a crash."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qwen_quantize.checkpoint.mx_oss_layout import MX_OSS, stack_experts
from qwen_quantize.checkpoint.shards import OutputTensor, plan_shards
from qwen_quantize.checkpoint.stacked_output import StackedFolder
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import E2M1
from tests.checkpoint.quantized_samples import same, sample, weight_only

SCHEME: Scheme = weight_only(SCHEMES["mxfp4"])
SHAPES = {"gate_proj": (3, 64), "up_proj": (3, 64), "down_proj": (64, 32)}
MODULES = {f"l.experts.{number}.{part}": shape for number in range(2) for part, shape in SHAPES.items()}
OUTPUTS = (
    OutputTensor("norm", "F32", (2,)),
    *(output for module, shape in MODULES.items() for output in MX_OSS.outputs(module, shape, SCHEME)),
)
SHARDS, PARTS = stack_experts(OUTPUTS)


def opened(target: Path, *, resume: bool = False) -> StackedFolder:
    return StackedFolder(target, plan_shards(SHARDS, 700), PARTS, resume=resume, overwrite=False)


def linears() -> dict[str, QuantizedTensor]:
    return {module: sample(SCHEME, shape, seed) for seed, (module, shape) in enumerate(MODULES.items())}


def stored(target: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_golden_bytes(tmp_path: Path) -> None:
    """Two experts of one gate row, one up row: the gate's row comes first, the even element is the low nibble."""
    shape = (1, 32)
    plan, parts = stack_experts(
        [
            output
            for expert, part in itertools.product((0, 1), ("gate_proj", "up_proj"))
            for output in MX_OSS.outputs(f"m.experts.{expert}.{part}", shape, SCHEME)
        ]
    )
    assert [(one.name, one.dtype, one.shape) for one in plan] == [
        ("m.experts.gate_up_proj_blocks", "U8", (2, 2, 1, 16)),
        ("m.experts.gate_up_proj_scales", "U8", (2, 2, 1)),
    ]
    with StackedFolder(tmp_path / "out", plan_shards(plan), parts, resume=False, overwrite=False) as folder:
        for number, (part, expert) in enumerate(itertools.product(("up_proj", "gate_proj"), (1, 0))):
            codes = torch.zeros(shape, dtype=torch.uint8)
            codes[0, 0], codes[0, 1], codes[0, 31] = number + 1, 10, 15
            one = QuantizedTensor(
                codes, torch.tensor([[2.0 ** (number - 2)]]), None, E2M1, Granularity.group(32), shape
            )
            for name, tensor in MX_OSS.pack(f"m.experts.{expert}.{part}", one, SCHEME).items():
                folder.write(name, tensor)
        folder.finish()
    found = stored(tmp_path / "out")
    rows = [bytes([0xA0 + low, *[0] * 14, 0xF0]) for low in (4, 2, 3, 1)]
    assert found["m.experts.gate_up_proj_blocks"].numpy().tobytes() == b"".join(rows)
    assert found["m.experts.gate_up_proj_scales"].flatten().tolist() == [128, 126, 127, 125]


@pytest.mark.parametrize("order", [1, -1])
def test_any_order_gives_the_same_and_reads_back(tmp_path: Path, order: int) -> None:
    with opened(tmp_path / "out") as folder:
        folder.write("norm", torch.ones(2))
        for number, (module, one) in enumerate(list(linears().items())[::order]):
            for name, tensor in MX_OSS.pack(module, one, SCHEME).items():
                assert not folder.is_written(name)
                folder.write(name, tensor)
                assert folder.is_written(name)
            if number % 3 == 0:
                folder.sync()
        for module, one in linears().items():
            parts = {
                output.name: folder.read(output.name)
                for output in MX_OSS.outputs(module, MODULES[module], SCHEME)
            }
            assert same(MX_OSS.unpack(module, parts, MODULES[module], SCHEME), one)
        folder.finish()
    found = stored(tmp_path / "out")
    assert found.keys() == {one.name for one in SHARDS}
    assert found["l.experts.gate_up_proj_blocks"].shape == (2, 6, 2, 16)
    gate = MX_OSS.pack("l.experts.1.gate_proj", linears()["l.experts.1.gate_proj"], SCHEME)
    rows = found["l.experts.gate_up_proj_blocks"][1, 0::2].flatten(1)
    assert torch.equal(rows, gate["l.experts.1.gate_proj.weight_packed"])


def test_a_crash_loses_what_no_sync_has_written(tmp_path: Path) -> None:
    modules = list(MODULES)
    with opened(tmp_path / "out") as folder:
        folder.write("norm", torch.ones(2))
        for module in modules[:4]:  # the gate of the second expert, without its up
            for name, tensor in MX_OSS.pack(module, linears()[module], SCHEME).items():
                folder.write(name, tensor)
        folder.sync()
        for name, tensor in MX_OSS.pack(modules[5], linears()[modules[5]], SCHEME).items():
            folder.write(name, tensor)
    with opened(tmp_path / "out", resume=True) as folder:
        known = [module for module in modules if folder.is_written(f"{module}.weight_packed")]
        assert known == modules[:4]
        with pytest.raises(ValueError, match="not written"):
            folder.finish()
        for module in modules[4:]:
            for name, tensor in MX_OSS.pack(module, linears()[module], SCHEME).items():
                folder.write(name, tensor)
        folder.finish()
    whole = tmp_path / "whole"
    with opened(whole) as folder:
        folder.write("norm", torch.ones(2))
        for module, one in linears().items():
            for name, tensor in MX_OSS.pack(module, one, SCHEME).items():
                folder.write(name, tensor)
        folder.finish()
    names = sorted(file.name for file in whole.iterdir())
    assert names == sorted(file.name for file in (tmp_path / "out").iterdir())
    assert all((whole / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in names)


def test_a_lost_shard_with_experts_on_record_is_refused(tmp_path: Path) -> None:
    module = "l.experts.0.down_proj"
    with opened(tmp_path / "out") as folder:
        for name, tensor in MX_OSS.pack(module, linears()[module], SCHEME).items():
            folder.write(name, tensor)
        folder.sync()
        staging = folder.staging
    for file in staging.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match="lost files"):
        opened(tmp_path / "out", resume=True)


def test_what_makes_no_stack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="quantize or keep all experts"):
        stack_experts([one for one in OUTPUTS if ".experts.0.up_proj" not in one.name])
    with pytest.raises(UserError, match="no multiple of 32"):
        MX_OSS.outputs("l.experts.0.up_proj", (4, 48), SCHEME)
    with pytest.raises(UserError, match="holds routed experts"):
        MX_OSS.outputs("l.shared_experts.up_proj", (4, 64), SCHEME)
    with opened(tmp_path / "out") as folder:
        name = "l.experts.0.up_proj.weight_packed"
        with pytest.raises(ValueError, match="was planned as U8"):
            folder.write(name, torch.zeros((3, 31), dtype=torch.uint8))
        with pytest.raises(ValueError, match="not written"):
            folder.read(name)
        folder.discard()
