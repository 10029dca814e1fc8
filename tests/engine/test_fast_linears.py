"""Products with packed weights against float64, by the kernel in all its forms and by torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from qwen_quantize.engine.fast_linear import (
    OPTIONS,
    SOURCE,
    FastGroup,
    Input,
    Kind,
    PackedWeight,
    Pool,
    cast_input,
    native_library,
    pack_weight,
    quantize_rows,
    run_linear,
)
from qwen_quantize.formats.codec import decode
from qwen_quantize.formats.native import load_native
from qwen_quantize.formats.tables import E4M3FN

# rows, columns, group (None: the row), with zero points: odd rows, columns that fill no vector, groups cut short.
SHAPES = [
    (37, 100, 32, True),
    (64, 192, 64, False),
    (16, 200, 128, True),
    (30, 77, None, False),
    (1, 5, None, True),
]
# What the compiler may assume of the machine: everything it has, no AVX-512, no vectors of bytes at all.
FORMS = {
    "machine": (),
    "avx2": ("-mno-avx512f",),
    "plain": ("-mno-avx2", "-mno-avx512f", "-mno-f16c"),
}


def drawn(kind: Kind, rows: int, columns: int, group: int | None, zeros: bool) -> tuple[PackedWeight, Tensor]:
    """A packed weight and its float64 values, computed here from the codes."""
    torch.manual_seed(rows + columns)
    top = 16 if kind is Kind.INT4 else 256
    codes = torch.randint(top, (rows, columns), dtype=torch.uint8)
    codes[0, : min(columns, 4)] = torch.tensor([0, top - 1, 1, top - 2], dtype=torch.uint8)[:columns]
    if kind is Kind.E4M3:
        codes[(codes & 127) == 127] = 3
    groups = 1 if group is None else -(-columns // group)
    scale = torch.rand(rows, groups) + 0.1
    zero = None
    if zeros and kind is not Kind.E4M3:
        zero = torch.randint(top, (rows, groups), dtype=torch.uint8)
    place = torch.arange(columns) // (group or columns)
    if kind is Kind.E4M3:
        values = decode(codes, E4M3FN).double()
    else:
        values = codes.double() - (top // 2 if zero is None else zero[:, place].double())
    return pack_weight(kind, codes, scale, zero, group), values * scale[:, place].double()


def bound(x: Tensor, weight: Tensor) -> Tensor:
    """What float32 sums may be off by."""
    return 4e-6 * (x.double().abs() @ weight.abs().t()) + 1e-6


@pytest.fixture(params=FORMS)
def kernel(request: pytest.FixtureRequest) -> Pool:
    if native_library() is None:
        pytest.skip("no C compiler")
    options = (*OPTIONS, *FORMS[request.param])
    try:
        library = load_native(SOURCE, libraries=options)
    except RuntimeWarning as warning:  # not a machine of the kind that has these options
        pytest.skip(str(warning))
    assert library is not None
    library.qq_pool_new.restype = ctypes.c_void_p
    library.qq_pool_free.restype = None
    return Pool(library, 2)


@pytest.mark.parametrize("kind", [Kind.INT4, Kind.INT8, Kind.E4M3])
@pytest.mark.parametrize("given", list(Input))
def test_the_kernel_computes_what_the_codes_say(kernel: Pool, kind: Kind, given: Input) -> None:
    if kind is Kind.E4M3 and given is not Input.FLOAT:
        pytest.skip("E4M3 weights take inputs as they are")
    for shape in SHAPES:
        weight, values = drawn(kind, *shape)
        for count in (1, 3, 6):
            x = torch.randn(count, shape[1])
            x[0, 0] = 30.0
            wanted = cast_input(x, given).double() @ values.t()
            off = (run_linear(kernel, weight.struct(None, given), x).double() - wanted).abs()
            assert bool((off <= bound(x, values)).all()), (shape, count)


@pytest.mark.parametrize("kind", [Kind.INT4, Kind.INT8, Kind.E4M3])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_decodes_the_same_tiles(kind: Kind, shape: tuple[int, int, int | None, bool]) -> None:
    weight, values = drawn(kind, *shape)
    assert torch.allclose(weight.decode().double(), values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("given", list(Input))
def test_without_a_compiler_torch_gives_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, given: Input
) -> None:
    weight, values = drawn(Kind.INT4, 40, 96, 32, True)
    bias = torch.randn(40)
    group = FastGroup(weight, bias, (30, 10), given)
    x = torch.randn(2, 3, 96)
    here = group(x)
    monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", "0")
    there = group(x)
    assert [part.shape for part in here] == [(2, 3, 30), (2, 3, 10)]
    room = bound(x.view(-1, 96), values).view(2, 3, 40)
    assert bool(((torch.cat(here, -1) - torch.cat(there, -1)).abs() <= room).all())


@pytest.mark.parametrize(
    ("given", "most"), [(Input.FLOAT, 0.0), (Input.INT16_BLOCKS, 1 / 32512), (Input.INT8_BLOCKS, 1 / 254)]
)
def test_inputs_err_by_half_a_step_of_their_block(given: Input, most: float) -> None:
    x = torch.randn(5, 96) * torch.logspace(-3, 3, 96)
    largest = x.view(5, 3, 32).abs().amax(-1, keepdim=True).expand(5, 3, 32).reshape(5, 96)
    off = (cast_input(x, given) - x).abs()
    assert bool((off <= most * largest * 1.001).all())
    assert given is Input.FLOAT or bool((off > 0.5 * most * largest).any())


def test_many_inputs_and_few_give_the_same() -> None:
    weight, values = drawn(Kind.INT4, 48, 64, 32, False)
    group = FastGroup(weight, None, (48,))
    x = torch.randn(64, 64)
    (many,) = group(x)
    few = torch.cat([group(row.unsqueeze(0))[0] for row in x])
    assert bool(((many - few).abs() <= bound(x, values)).all())


def test_zeros_and_rows_of_zeros_stay_zero() -> None:
    weight = quantize_rows(torch.cat((torch.zeros(3, 64), torch.ones(2, 64))))
    for given in Input:
        (y,) = FastGroup(weight, None, (5,), given)(torch.zeros(2, 64))
        assert bool((y == 0).all())
        (y,) = FastGroup(weight, None, (5,), given)(torch.ones(1, 64))
        assert bool((y[:, :3] == 0).all())
        assert torch.allclose(y[:, 3:], torch.tensor(64.0), rtol=1e-4)


def test_rows_made_int8_err_by_half_a_step() -> None:
    weight = torch.randn(20, 100)
    off = (quantize_rows(weight).decode() - weight).abs()
    assert bool((off <= weight.abs().max() / 254 * 1.001).all())


def test_what_was_int8_in_the_same_blocks_is_kept() -> None:
    codes = torch.randint(-127, 128, (8, 64)).float()
    codes[:, ::32] = 127
    weight = codes * (torch.rand(8, 1) + 0.5).half().float()
    assert torch.allclose(quantize_rows(weight).decode(), weight, rtol=3e-7, atol=0)


def test_groups_that_fit_no_block_are_refused() -> None:
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="groups of 48"):
        pack_weight(Kind.INT4, codes, torch.ones(4, 2), None, 48)
    with pytest.raises(ValueError, match="scales"):
        pack_weight(Kind.INT4, codes, torch.ones(4, 3), None, 32)
