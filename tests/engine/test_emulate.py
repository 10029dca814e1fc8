"""A chip under any torch program: equal to explicit calls, on small modules and on a transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from qwen_quantize.chip_profiles.arithmetic import Arithmetic, resolve_arithmetic
from qwen_quantize.chip_profiles.dot_unit import dot_unit_of
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.engine.emulate import emulate
from qwen_quantize.errors import UserError
from qwen_quantize.formats.codec import encode
from qwen_quantize.formats.dot import emulated_matmul
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import BF16, E4M3FN, FP16, FP32
from tests.tiny_models import make_tiny


def arithmetic_of(chip: str = "cpu", scheme: str = "ue8m0", **assume: str) -> Arithmetic:
    wanted = {key.replace("__", "."): value for key, value in assume.items()}
    return resolve_arithmetic(load_profile(chip), SCHEMES[scheme], wanted)


NARROW = arithmetic_of(accumulator__fraction_bits="9", cast__rounding="rtz")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def explicit(a: Tensor, b: Tensor, fmt: FloatFormat = FP32) -> Tensor:
    """a [M, K] times b [K, N], float32."""
    unit = dot_unit_of(NARROW, fmt, fmt, bit_true=True)
    assert unit is not None
    return emulated_matmul(a.float().contiguous(), b.float().T.contiguous(), unit)


@pytest.mark.parametrize("inference", [False, True])
def test_a_small_module(inference: bool) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 8, bias=False))
    x = draw(5, 3, 40)
    with torch.inference_mode(inference), emulate(NARROW):
        found = module(x)
    first, _, last = module
    with torch.no_grad():
        hidden = (explicit(x.flatten(0, 1), first.weight.T) + first.bias).relu()
        expected = explicit(hidden, last.weight.T).view(5, 3, 8)
    assert torch.equal(found, expected)
    assert not torch.equal(found, module(x))
    with emulate(arithmetic_of()):  # a host's sums are in whatever order
        torch.testing.assert_close(module(x), module(x))


def test_every_kind_of_product() -> None:
    a, b, c = draw(4, 6, 33), draw(4, 33, 5, seed=1), draw(4, 6, 5, seed=2)
    product = torch.stack([explicit(x, y) for x, y in zip(a, b, strict=True)])
    with emulate(NARROW):
        found = {
            "bmm": torch.bmm(a, b),
            "matmul": a @ b,
            "einsum": torch.einsum("bik,bkj->bij", a, b),
            "baddbmm": torch.baddbmm(c, a, b, beta=0.5, alpha=2) - 0,
            "mm": torch.mm(a[0], b[0]),
            "addmm": torch.addmm(c[0], a[0], b[0], beta=0),
            "mv": a[0] @ b[0, :, 0],
            "addmv": torch.addmv(c[0, :, 0], a[0], b[0, :, 0]),
            "dot": a[0, 0] @ b[0, :, 0],
        }
        wide = a.double() @ b.double()
    for name in ("bmm", "matmul", "einsum"):
        assert torch.equal(found[name], product), name
    assert torch.equal(found["baddbmm"], product * 2 + c * 0.5)
    assert torch.equal(found["mm"], product[0])
    assert torch.equal(found["addmm"], product[0])
    assert torch.equal(found["mv"], product[0, :, 0])
    assert torch.equal(found["addmv"], product[0, :, 0] + c[0, :, 0])
    assert torch.equal(found["dot"], product[0, 0, 0])
    assert torch.equal(wide, a.double() @ b.double())  # no operands of a matrix unit


@pytest.mark.parametrize(("dtype", "fmt"), [(torch.bfloat16, BF16), (torch.float16, FP16)])
def test_narrow_operands_and_results(dtype: torch.dtype, fmt: FloatFormat) -> None:
    a, b = draw(4, 40, dtype=dtype), draw(40, 6, seed=1, dtype=dtype)
    with emulate(NARROW):
        found = a @ b
    assert found.dtype is dtype
    assert torch.equal(found, explicit(a, b, fmt).to(dtype))


def test_operands_cast_when_asked() -> None:
    a, b = draw(4, 40), draw(40, 6, seed=1)
    with emulate(NARROW, cast_operands=True):
        found = a @ b
    a, b = (quantize_values(x, E4M3FN, NARROW.activation_cast) for x in (a, b))
    assert torch.equal(found, explicit(a, b, E4M3FN))
    with emulate(arithmetic_of(cast__rounding="rtz"), cast_operands=True):
        wide = draw(4, 40) @ draw(40, 6, seed=1)
    torch.testing.assert_close(wide, a @ b)
    with (
        pytest.raises(UserError, match="no cast"),
        emulate(arithmetic_of(scheme="w4a16"), cast_operands=True),
    ):
        pass


def test_casts_are_the_chips() -> None:
    x = draw(64, 3) * 300
    assert bool((x.abs() > 448).any())
    with emulate(NARROW):
        found, other, half = (
            x.to(torch.float8_e4m3fn),
            x.to(torch.float8_e5m2),
            x.half().to(torch.float8_e4m3fn),
        )
    assert torch.equal(found.view(torch.uint8), encode(x, E4M3FN, NARROW.activation_cast))
    assert not torch.equal(found.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(half.view(torch.uint8), encode(x.half().float(), E4M3FN, NARROW.activation_cast))
    assert torch.equal(
        other.view(torch.uint8), x.to(torch.float8_e5m2).view(torch.uint8)
    )  # of another scheme


def test_int8_by_way_of_fp16() -> None:
    """910B: 2.5001 is 2.5 in fp16 and then 2, where one rounding gives 3."""
    with emulate(arithmetic_of("ascend-910b", "w8a8")):
        found = torch.tensor([2.5001, 300.0, -1.5]).to(torch.int8)
    assert found.tolist() == [2, 127, -2]


def test_gradients_are_products_of_the_unit() -> None:
    a, b = draw(4, 40).requires_grad_(), draw(40, 6, seed=1)
    with emulate(NARROW):
        (a @ b).sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, explicit(torch.ones(4, 6), b.T))


def test_fused_attention_shows_its_products() -> None:
    """Torch's decomposed attention scales both operands by the root of the scale."""
    q, k, v = (draw(1, 2, 7, 16, seed=seed) for seed in range(3))
    with emulate(NARROW):
        found = nn.functional.scaled_dot_product_attention(q, k, v)
    for head in range(2):
        scores = explicit(q[0, head] * 0.5, (k[0, head] * 0.5).T)
        assert torch.equal(found[0, head], explicit(scores.softmax(dim=-1), v[0, head]))


def test_what_is_not_emulated_is_refused() -> None:
    with emulate(NARROW), pytest.raises(UserError, match="convolution"):
        nn.functional.conv1d(draw(1, 2, 9), draw(3, 2, 3))


class ExplicitLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        flat = explicit(x.flatten(0, -2), self.weight.T)
        return (flat if self.bias is None else flat + self.bias).view(*x.shape[:-1], -1)


class EmulatedRotary(nn.Module):
    """Frequencies times positions is a product too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with emulate(NARROW):
            return self.inner(*args, **kwargs)


def explicit_attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    def batched(a: Tensor, b: Tensor) -> Tensor:
        rows = [explicit(x, y) for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True)]
        return torch.stack(rows).unflatten(0, a.shape[:2])

    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    scores = batched(query, key.transpose(2, 3)) * scaling + attention_mask
    return batched(scores.softmax(dim=-1, dtype=torch.float32), value).transpose(1, 2).contiguous(), None


def test_a_transformers_model(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, "llama-biased").eval()
    model.set_attn_implementation("eager")
    tokens = torch.randint(160, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = model(tokens).logits
        with emulate(NARROW):
            found = model(tokens).logits
        AttentionInterface.register("explicit_for_test", explicit_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register("explicit_for_test", eager_mask)
        model.set_attn_implementation("explicit_for_test")
        for name, child in list(model.named_modules()):
            if isinstance(child, nn.Linear):
                model.set_submodule(name, ExplicitLinear(child))
        model.model.rotary_emb = EmulatedRotary(model.model.rotary_emb)
        expected = model(tokens).logits
    assert torch.equal(found, expected)
    assert (found - plain).abs().max() > 1e-3 * plain.abs().max()
