"""The probe against devices whose arithmetic is known: published units, profiles, hidden ones, and this processor."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from qwen_quantize.chip_profiles.leaf import Absent
from qwen_quantize.chip_profiles.loader import list_profiles, load_profile
from qwen_quantize.chip_profiles.probe import ProbeResult, probe, probe_matmul
from qwen_quantize.chip_profiles.probe_casts import probe_cast
from qwen_quantize.chip_profiles.probe_decide import MEASURED, NOT_APPLICABLE, UNKNOWN, Parameter
from qwen_quantize.chip_profiles.probe_device import Pair, operand_format
from qwen_quantize.chip_profiles.probe_emulated import EmulatedDevice, emulated_chip
from qwen_quantize.chip_profiles.probe_fit import LONGEST
from qwen_quantize.chip_profiles.probe_output import profile_text
from qwen_quantize.chip_profiles.probe_torch import TorchDevice
from qwen_quantize.chip_profiles.standing import decides
from qwen_quantize.formats.cast_path import CastStep
from qwen_quantize.formats.cast_rule import CastRule, NanResult, Overflow, Rounding, Subnormals
from qwen_quantize.formats.dot_record import DOT_ROUNDINGS, DotUnit, Order, Register
from qwen_quantize.formats.dot_units import PUBLISHED_UNITS
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import BF16, E4M3FN, E5M2, FORMATS, FP16

# One unit of each kind of search, and hidden ones; all others are slow tests.
QUICK = ("hopper-e4m3fn-promoted",)
HIDDEN, HIDDEN_QUICK = range(50), (4,)
# Those that are certified by all of 10^5 dot products; the others by a tenth of them, which is what a probe with
# --quick takes: it is the search that costs the time, and the sample shows that more dots find nothing more.
WHOLE_CORPUS = (
    *QUICK,
    "v100-fp16",
    "t4-fp16-fp16-sum",
    "a100-tf32",
    "hopper-fp16",
    "blackwell-e5m2",
    "mi100-bf16",
    "mi250-fp16",
    "mi300-xf32",
    "mi300-e4m3fnuz",
    "cdna-fp32",
    *(f"hidden-{seed}" for seed in (1, 4, 14, 23, 32, 41)),
)
# They have tests of their own.
APART = ("example", "cpu")
# The parameters that decide bits, and the fields of a unit that they are.
FIELDS = {
    "fraction_bits": "fraction_bits",
    "products_per_step": "products",
    "alignment_rounding": "alignment_rounding",
    "products_normalised": "products_normalised",
    "final_rounding": "final_rounding",
    "output_mantissa_bits": "mantissa_bits",
    "promotion_interval": "promotion_interval",
    "accumulator": "register",
    "flush_inputs": "flush_inputs",
    "nan_bits": "nan_bits",
    "lanes": "lanes",
}
NOT_ALWAYS_OBSERVABLE = ("final_rounding", "output_mantissa_bits", "flush_inputs", "nan_bits")
MUST_BE_FOUND = ("products_per_step", "final_rounding", "output_mantissa_bits", "accumulator")


def check_unit(unit: DotUnit, found: dict[str, Parameter]) -> None:
    """Nothing measured is wrong, and what the vectors can show is measured."""
    for name, key in FIELDS.items():
        item = found.get(name)
        if item is None:
            continue
        true = getattr(unit, key)
        if item.status == MEASURED:
            assert item.value == true or (item.value == "exact" and true is None), (name, item, true)
        elif item.status == NOT_APPLICABLE and name in ("promotion_interval", "fraction_bits"):
            assert true is None, (name, item)
        if unit.order is Order.ALIGNED and name in MUST_BE_FOUND:
            assert item.status == MEASURED, (name, item)
    if unit.fraction_bits is not None:
        for name in ("fraction_bits", "alignment_rounding"):
            assert found[name].status == MEASURED, found[name]


def probe_unit(unit: DotUnit, output: str = "fp32") -> dict[str, Parameter]:
    operands = unit.a_format.name
    device = EmulatedDevice(unit.name, {operands: unit}, {}, outputs=(output,))
    whole = unit.name in WHOLE_CORPUS
    finding = probe_matmul(device, Pair(operands, output), quick=not whole)
    assert finding.explained_fraction == 1.0, finding.unexplained[:1]
    assert finding.dots >= (100_000 if whole else 10_000)
    return {item.name: item for item in finding.parameters}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PUBLISHED_UNITS]
)
def test_every_published_unit_is_found_out(name: str) -> None:
    """Certified by 10^5 dot products where `WHOLE_CORPUS` names the unit, else by 10^4."""
    check_unit(PUBLISHED_UNITS[name], probe_unit(PUBLISHED_UNITS[name]))


def hidden_unit(seed: int) -> DotUnit:
    """A unit that nobody built."""
    draw = random.Random(seed)
    half = draw.random() < 0.2
    products = draw.choice((3, 4, 5, 8, 12, 16, 24, 32, 64))
    fmt = draw.choice((FP16, BF16, E4M3FN, E5M2))
    deepest = 24 if fmt is E4M3FN else 30
    fraction = draw.randint(10, deepest)
    mantissa = draw.randint(7, 10) if half else draw.choice((23, 23, 13, draw.randint(8, 23)))
    return DotUnit(
        f"hidden-{seed}",
        fmt,
        fmt,
        Order.ALIGNED,
        products=products,
        fraction_bits=fraction,
        alignment_rounding=draw.choice(DOT_ROUNDINGS),
        products_normalised=draw.random() < 0.3,
        register=Register.FP16 if half else Register.FP32,
        mantissa_bits=mantissa,
        final_rounding=draw.choice(DOT_ROUNDINGS),
        promotion_interval=draw.choice((None, None, 64, 128)),
        flush_inputs=draw.random() < 0.2,
    )


@pytest.mark.parametrize(
    "seed", [s if s in HIDDEN_QUICK else pytest.param(s, marks=pytest.mark.slow) for s in HIDDEN]
)
def test_a_hidden_unit_is_found_out(seed: int) -> None:
    """Certified by 10^5 dot products where `WHOLE_CORPUS` names the unit, else by 10^4.

    What is not measured gives the same bits as another value: in a wide register nothing is ever rounded, and no
    final rounding shows.
    """
    unit = hidden_unit(seed)
    found = probe_unit(unit)
    for name, key in FIELDS.items():
        item = found.get(name)
        if item is None:
            continue
        if item.status == MEASURED:
            assert item.value == getattr(unit, key), (name, item, unit)
        elif item.status == NOT_APPLICABLE:
            assert name == "promotion_interval", (name, item, unit)
            assert unit.promotion_interval is None, (name, item, unit)
        else:
            assert name in NOT_ALWAYS_OBSERVABLE, (name, item, unit)
            assert item.why.startswith("not observable"), (name, item, unit)


def test_a_narrow_output_does_not_hide_the_unit() -> None:
    found = probe_unit(PUBLISHED_UNITS["hopper-fp16"], "fp16")
    check_unit(PUBLISHED_UNITS["hopper-fp16"], {k: v for k, v in found.items() if k != "nan_bits"})
    assert found["output_rounding"].value == "rne"


def hidden_cast(seed: int) -> tuple[str, tuple[CastStep, ...]]:
    draw = random.Random(1000 + seed)
    target = draw.choice(("e4m3fn", "e5m2", "fp16", "bf16", "int8", "e4m3fnuz"))
    roundings = [r for r in Rounding if r not in (Rounding.STOCHASTIC, Rounding.HYBRID)]
    rule = CastRule(
        draw.choice(roundings),
        draw.choice(list(Overflow)),
        draw.choice(list(Subnormals)),
        draw.choice(list(NanResult)),
    )
    steps = [CastStep(FORMATS[target], rule)]
    if target in ("e4m3fn", "e5m2", "int8") and draw.random() < 0.4:
        wide = draw.choice((FP16, BF16))
        steps.insert(0, CastStep(wide, CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)))
    return target, tuple(steps)


@pytest.mark.parametrize("seed", [s if s < 4 else pytest.param(s, marks=pytest.mark.slow) for s in range(50)])
def test_a_hidden_cast_is_found_out(seed: int) -> None:
    target, path = hidden_cast(seed)
    finding = probe_cast(EmulatedDevice("hidden", {}, {target: path}), target)
    assert finding.explained_fraction == 1.0, finding.unexplained
    found = {item.name: item for item in finding.parameters}
    rule = path[-1].rule
    assert found["rounding"].value == str(rule.rounding), found["rounding"]
    if target != "int8":
        for name, true in (("overflow", rule.overflow), ("subnormals", rule.subnormals), ("nan", rule.nan)):
            assert found[name].value in (str(true), None), (found[name], path)
        assert found["subnormals"].status == MEASURED
    steps = [step.format.name for step in path[:-1]]
    if found["path"].status == MEASURED and found["path"].value != "direct":
        assert str(found["path"].value).split()[:1] == steps


def test_a_stochastic_cast_is_recognised() -> None:
    rule = CastRule(Rounding.STOCHASTIC, Overflow.SATURATE, Subnormals.KEEP)
    finding = probe_cast(EmulatedDevice("lots", {}, {"e4m3fn": (CastStep(E4M3FN, rule),)}), "e4m3fn")
    found = {item.name: item for item in finding.parameters}
    assert found["rounding"].value == "stochastic"
    assert found["overflow"].status == UNKNOWN
    assert finding.path is None


# ---- profiles ----


def stated(name: str) -> list[tuple[str, str, object]]:
    """(product or cast, field, value) of all that decides bits in a profile."""
    profile = load_profile(name)
    facts = []
    for table in (profile.arithmetic.matmul, profile.arithmetic.casts):
        for key, group in table.items():
            for field in type(group).__dataclass_fields__:
                leaf = getattr(group, field)
                if leaf.known and decides(leaf, profile) and not isinstance(leaf.value, Absent):
                    facts.append((key, field, leaf.value))
    return facts


# No dot product and no cast can show these: data sheets and words.
NOT_NUMBERS = ("carry_bits", "order", "modes", "overflow_modes", "switch", "nan_saturating")


def check_profile(name: str, result: ProbeResult) -> None:
    assert all(fraction == 1.0 for what, fraction in result.fractions.items()), result.fractions
    found = {
        key.partition("*")[0] if "*" in key else key: items for key, items in result.parameters().items()
    }
    for key, field, value in stated(name):
        left, star, right = key.partition("*")
        items = found.get(left if star else key)
        if items is None or field in NOT_NUMBERS or (star and left != right):
            continue
        item = items.get(field)
        if item is None:
            continue
        text = " ".join(value) if isinstance(value, tuple) else value
        if item.status == MEASURED:
            assert item.value == text, (name, key, item, value)
        else:  # the only thing said is why no dot product can show it
            assert item.why
            assert item.value is None
            if field in ("fraction_bits", "products_per_step", "rounding"):
                assert star, (name, key, item, value)
                assert sums_are_exact(left), (name, key, item, value)


def sums_are_exact(operands: str) -> bool:
    """Whether float32 holds every sum of the longest dot products: no unit can then show how it cuts."""
    fmt = operand_format(operands)
    if not isinstance(fmt, FloatFormat):
        return False
    smallest = fmt.min_subnormal**2
    return LONGEST * fmt.max**2 / smallest < 2.0**24


@pytest.mark.parametrize("name", ["example@1.2", "example@1.3"])
def test_the_example_chip_is_found_out(name: str) -> None:
    result = probe(emulated_chip(load_profile(name), f"emulated:{name}"))
    check_profile(name, result)
    rounding = result.parameters()["fp32->e4m3fn"]["rounding"]
    assert rounding.value == ("rne" if name.endswith("1.2") else "rtz")
    sums = result.parameters()["e4m3fn*e4m3fn->fp32"]
    assert (sums["fraction_bits"].value, sums["products_per_step"].value) == (23, 16)
    assert result.parameters()["int8*int8->int32"]["overflow"].value == "wrap"


def _states_numbers(name: str) -> bool:
    return any(field in ("fraction_bits", "products_per_step") for _, field, _ in stated(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in list_profiles() if n not in APART and _states_numbers(n)])
def test_every_profile_that_states_numbers_is_found_out(name: str) -> None:
    check_profile(name, probe(emulated_chip(load_profile(name), f"emulated:{name}"), quick=True))


def test_the_layer_loads_over_its_profile_and_alone(tmp_path: Path) -> None:
    result = probe(emulated_chip(load_profile("example@1.3"), "emulated:example@1.3"), quick=True)
    layer, alone = tmp_path / "layer.toml", tmp_path / "alone.toml"
    layer.write_text(profile_text(result, "example"))
    alone.write_text(profile_text(result, None))
    for profile in (load_profile("example@1.2", measured=layer), load_profile(alone)):
        cast = profile.arithmetic.casts["fp32->e4m3fn"]
        assert (cast.rounding.value, cast.rounding.confidence) == ("rtz", "measured")
        assert cast.rounding.sources == ("PROBE",)
        assert profile.arithmetic.matmul["e4m3fn*e4m3fn"].fraction_bits.value == 23
        assert profile.arithmetic.casts["fp32->int8"].path.value == ("fp16",)


# ---- this processor ----


def exact_sum(a: torch.Tensor, b: torch.Tensor) -> Fraction:
    return sum((Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)), Fraction(0))


@pytest.mark.parametrize(
    "operands", ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "fp16"))]
)
def test_claims_about_this_processor_are_true(operands: str) -> None:
    """Each claim is held against rational arithmetic, not against the model that made it."""
    device = TorchDevice("cpu")
    pair = Pair(operands, operands)
    finding = probe_matmul(device, pair, quick=True)
    assert 0.0 <= finding.explained_fraction <= 1.0
    found = {item.name: item for item in finding.parameters}
    generator = torch.Generator().manual_seed(99)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[operands]
    a = torch.randn(64, 64, generator=generator).to(dtype).float()
    b = torch.randn(64, 64, generator=generator).to(dtype).float()
    out = device.matmul(a, b, pair)
    if found["accumulator"].value == "fp32":
        own = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}[operands]
        for i in range(8):
            exact = exact_sum(a[i], b[i])
            size = exact_sum(a[i].abs(), b[i].abs())
            bound = Fraction(own) * 2 * abs(exact) + size * 64 * Fraction(2.0**-24)
            assert abs(Fraction(float(out[i, i])) - exact) <= bound
    if str(found["order"].value).startswith("chain of float32") and operands == "fp32":
        a, b = a[:, :4].contiguous(), b[:, :4].contiguous()
        a, b = (torch.nn.functional.pad(x, (0, 60)) for x in (a, b))
        chained = device.matmul(a, b, pair)
        for i in range(16):
            total = Fraction(0)
            for x, y in zip(a[i].tolist(), b[i].tolist(), strict=True):
                total = nearest_float32(total + Fraction(x) * Fraction(y))
            assert Fraction(float(chained[i, i])) == total
    if found["flush_inputs"].status == MEASURED:
        tiny = torch.zeros(64, 64)
        tiny[:, 0] = 2.0**-130 if operands != "fp16" else 2.0**-20
        ones = torch.zeros(64, 64)
        ones[:, 0] = 128.0
        zero = bool((device.matmul(tiny, ones, pair) == 0).all())
        assert zero == found["flush_inputs"].value


def nearest_float32(x: Fraction) -> Fraction:
    """x rounded to 24 bits, ties to even, for values in the normal range."""
    if x == 0:
        return x
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= int(size < Fraction(2) ** exponent)
    unit = Fraction(2) ** (exponent - 23)
    return round(x / unit) * unit


def test_an_unknown_is_never_given_a_value() -> None:
    unit = replace(PUBLISHED_UNITS["v100-fp16"], name="wide", fraction_bits=60)
    found = probe_unit(unit)
    assert found["fraction_bits"].status == UNKNOWN
    assert "same bits" in found["fraction_bits"].why
