"""The files that are written: bytes known in advance, equal to the safetensors library's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from qwen_quantize.checkpoint.shards import OutputTensor, index_bytes, plan_shards
from qwen_quantize.checkpoint.tensor_info import DTYPES, torch_shape
from qwen_quantize.checkpoint.writer import OutputFolder

GOLDEN = (
    b"\xd8\x00\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"format":"pt"},'
    b'"scale":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
    b'"norm":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},'
    b'"weight":{"dtype":"F8_E4M3","shape":[1,3],"data_offsets":[12,15]}}'
    b"\x20"
    b"\x00\x00\x80\x3f\x00\x00\x00\x3f"  # 1.0, 0.5
    b"\x80\x3f\x00\x40"  # 1.0, 2.0
    b"\x38\x7e\xfe"  # 1.0, 448, -448
)


def test_golden_bytes(tmp_path: Path) -> None:
    tensors = {
        "weight": torch.tensor([[1.0, 448.0, -448.0]]).to(torch.float8_e4m3fn),
        "scale": torch.tensor([[1.0, 0.5]]),
        "norm": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    }
    plan = plan_shards(
        [
            OutputTensor("weight", "F8_E4M3", (1, 3)),
            OutputTensor("scale", "F32", (1, 2)),
            OutputTensor("norm", "BF16", (2,)),
        ]
    )
    with OutputFolder(tmp_path / "out", plan, resume=False, overwrite=False) as folder:
        for name, tensor in tensors.items():
            folder.write(name, tensor)
        folder.finish()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == GOLDEN


DTYPE_NAMES = [name for name, stored in DTYPES.items() if stored.torch is not None]
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=6).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPE_NAMES), st.lists(st.integers(0, 3), max_size=3)),
    min_size=1,
    max_size=8,
)


def even(dtype: str, sizes: list[int]) -> tuple[int, ...]:
    """F4 needs an even last dimension."""
    if dtype != "F4":
        return tuple(sizes)
    return (*sizes[:-1], 2 * sizes[-1]) if sizes else (2,)


@given(TENSORS)
def test_a_file_is_the_librarys(tensors: dict[str, tuple[str, list[int]]]) -> None:
    outputs = [OutputTensor(name, dtype, even(dtype, sizes)) for name, (dtype, sizes) in tensors.items()]
    (shard,) = plan_shards(outputs)
    zeros = {
        o.name: torch.zeros(o.nbytes, dtype=torch.uint8)
        .view(DTYPES[o.dtype].torch)
        .reshape(torch_shape(o.dtype, o.shape))
        for o in outputs
    }
    expected = save(zeros, metadata={"format": "pt"})
    assert shard.header == expected[: len(shard.header)]
    assert shard.nbytes == len(expected)


def test_every_tensor_is_aligned_to_its_element() -> None:
    outputs = [OutputTensor(f"t{n}", dtype, (3, 2)) for n, dtype in enumerate(DTYPES) if "F6" not in dtype]
    (shard,) = plan_shards(outputs)
    assert len(shard.header) % 8 == 0
    for output in outputs:
        assert shard.offsets[output.name] % max(DTYPES[output.dtype].bits // 8, 1) == 0


def test_shards_fill_in_the_order_given() -> None:
    outputs = [OutputTensor(f"t{n}", "U8", (size,)) for n, size in enumerate((40, 60, 1, 500, 99, 2))]
    plan = plan_shards(outputs, 100)
    assert [list(shard.tensors) for shard in plan] == [["t0", "t1"], ["t2"], ["t3"], ["t4"], ["t5"]]
    assert [shard.file for shard in plan] == [f"model-0000{n}-of-00005.safetensors" for n in range(1, 6)]
    assert plan == plan_shards(outputs, 100)


def test_index() -> None:
    plan = plan_shards([OutputTensor("b", "U8", (80,)), OutputTensor("a", "F32", (20,))], 100)
    assert json.loads(index_bytes(plan)) == {
        "metadata": {"total_size": 160},
        "weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
    }


@pytest.mark.parametrize(
    "outputs",
    [
        [OutputTensor("a", "F32", (1,)), OutputTensor("a", "F32", (1,))],
        [OutputTensor("__metadata__", "F32", (1,))],
        [OutputTensor("a", "float32", (1,))],
        [OutputTensor("a", "F4", (3,))],
        [OutputTensor("a", "F32", (-1,))],
    ],
)
def test_a_plan_that_cannot_be(outputs: list[OutputTensor]) -> None:
    with pytest.raises(ValueError, match=r"'(a|__metadata__)'"):
        plan_shards(outputs)


def test_no_tensor_at_all(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out", plan_shards([]), resume=False, overwrite=False) as folder:
        folder.finish()
    assert load_file(tmp_path / "out" / "model.safetensors") == {}
