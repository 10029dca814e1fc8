"""Hashes of outputs for fixed inputs: the same everywhere, different where the arithmetic is, and cheap."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from qwen_quantize.chip_profiles.arithmetic import resolve_arithmetic
from qwen_quantize.chip_profiles.behaviour import (
    OUTPUTS,
    Behaviour,
    behaviour_of,
    device_behaviour,
    differing,
    read_behaviour,
    unnamed_changes,
    version_changes,
)
from qwen_quantize.chip_profiles.behaviour_vectors import cast_inputs, dot_operands
from qwen_quantize.chip_profiles.difference import difference
from qwen_quantize.chip_profiles.loader import list_profiles, load_profile
from qwen_quantize.chip_profiles.probe_device import Pair
from qwen_quantize.chip_profiles.probe_emulated import EmulatedDevice, emulated_chip
from qwen_quantize.chip_profiles.probe_torch import TorchDevice
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_path import CastStep
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode, encode
from qwen_quantize.formats.dot_record import DotUnit, Order
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.spec import FloatFormat, IntFormat
from qwen_quantize.formats.tables import E4M3FN, E5M2, FORMATS

UE8M0 = SCHEMES["ue8m0"]
CAST, PRODUCT = "fp32->e4m3fn", "e4m3fn*e4m3fn->fp32"


def behaviour(chip: str, **assume: str) -> Behaviour:
    wanted = {key.replace("__", "."): value for key, value in assume.items()}
    return behaviour_of(resolve_arithmetic(load_profile(chip), UE8M0, wanted), UE8M0, {})


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [n for n, fmt in FORMATS.items() if fmt.bits <= 16 and n != "e8m0"])
def test_inputs_of_casts_keep_to_their_group(name: str) -> None:
    fmt = FORMATS[name]
    for group, inputs in cast_inputs(fmt).items():
        assert inputs.dtype == torch.float32
        assert inputs.isnan().all() == (group == "nan")
        assert group == "nan" or not inputs.isnan().any()
        values = decode(encode(inputs, fmt, RNE_SATURATE), fmt)
        if group == "overflow":
            assert (inputs.abs() > fmt.max).all()
        elif group != "nan":
            assert (inputs.abs() <= max(fmt.max, -float(decode_lowest(fmt)))).all()
        if group == "values":
            assert torch.equal(values, inputs + 0.0) or torch.equal(values, inputs)
        if group == "ties":
            up = decode(encode(inputs, fmt, CastRule(Rounding.CEIL, Overflow.SATURATE, Subnormals.KEEP)), fmt)
            down = decode(
                encode(inputs, fmt, CastRule(Rounding.FLOOR, Overflow.SATURATE, Subnormals.KEEP)), fmt
            )
            assert torch.equal(up.double() - inputs.double(), inputs.double() - down.double())


def decode_lowest(fmt: object) -> float:
    return float(fmt.minimum) if isinstance(fmt, IntFormat) else -fmt.max  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "fp16", "bf16", "fp32", "e2m1", "int8"])
def test_operands_are_values_of_their_format(name: str) -> None:
    fmt = FORMATS[name]
    assert isinstance(fmt, FloatFormat | IntFormat)
    for a, b in dot_operands(fmt).values():
        for x in (a, b):
            assert torch.equal(decode(encode(x, fmt, RNE_SATURATE), fmt), x)
            assert x.shape[0] % 16 == 0
            assert x.shape[1] % 16 == 0


@pytest.mark.usefixtures("one_thread")
def test_the_same_with_one_thread_and_quickly() -> None:
    """A manifest must not depend on the number of threads, and nobody must wait for this."""
    single = behaviour("nvidia-h100")
    torch.set_num_threads(2)
    begin = time.process_time()
    double = behaviour("nvidia-h100")
    assert time.process_time() - begin < 0.5
    assert single.record() == double.record()


def test_the_bits_of_this_corpus_do_not_move() -> None:
    """The digest is compared with those in files: a change of an input needs another `CORPUS`."""
    found = behaviour("example@1.2")
    assert set(found.hashes) == {CAST, PRODUCT}
    assert found.digest == "90ba53a659d554ef4e257aced7ff3c2a7049ac1b8ba852fd24ca3847c3794219"


def test_the_kernels_and_their_twin_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = behaviour("nvidia-h100")
    monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", "0")
    twin = behaviour("nvidia-h100")
    assert twin.versions["kernels"] == "twin"
    assert twin.hashes == compiled.hashes


@pytest.mark.parametrize(
    ("key", "value", "cast", "product"),
    [
        ("cast__rounding", "rtz", {"ties", "near_ties", "subnormals", "overflow", "corpus"}, False),
        ("cast__overflow", "nonsaturate", {"overflow"}, False),
        ("cast__subnormals", "flush", {"values", "ties", "near_ties", "subnormals", "corpus"}, False),
        ("cast__nan", "zero", {"nan"}, False),
        ("accumulator__fraction_bits", "13", set(), True),
        ("accumulator__products_per_step", "32", set(), True),
        ("accumulator__alignment_rounding", "rne", set(), True),
        ("accumulator__final_rounding", "rtz", set(), True),
        ("accumulator__output_mantissa_bits", "13", set(), True),
        ("accumulator__promotion_interval", "128", set(), True),
    ],
)
def test_every_field_shows_and_accounts_for_what_it_changes(
    key: str, value: str, cast: set[str], product: bool
) -> None:
    narrow = {"accumulator__fraction_bits": "13", "accumulator__promotion_interval": "never"}
    # With 13 bits nothing is left to round at the end, with 23 no promotion and no step shows.
    base = narrow if key.endswith(("products_per_step", "alignment_rounding", "interval")) else {}
    before, after = behaviour("example@1.2", **base), behaviour("example@1.2", **{**base, key: value})
    found = differing(before, after)
    # A flush or a truncation moves further groups only where their inputs are that small.
    assert set(found.get(CAST, ())) <= cast
    assert bool(found.get(CAST)) == bool(cast)
    assert (PRODUCT in found) == product
    first, second = (
        resolve_arithmetic(
            load_profile("example@1.2"), UE8M0, {k.replace("__", "."): v for k, v in wanted.items()}
        ).fields()
        for wanted in (base, {**base, key: value})
    )
    named = difference(first, second).changed
    assert named
    assert unnamed_changes(before, after, named, "e4m3fn") == ()
    (kind,) = {PRODUCT} if product else {CAST}
    (unnamed,) = unnamed_changes(before, after, (), "e4m3fn")
    assert unnamed.field == f"{OUTPUTS}{kind}"
    assert unnamed.before != unnamed.after
    assert ("product e4m3*e4m3->fp32" if product else "cast fp32->e4m3") in unnamed.text


def test_a_change_of_the_cast_does_not_account_for_the_product() -> None:
    before = behaviour("example@1.2")
    after = behaviour("example@1.3", accumulator__fraction_bits="13")
    named = difference({"cast.rounding": "rne"}, {"cast.rounding": "rtz"}).changed
    (unnamed,) = unnamed_changes(before, after, named, "e4m3fn")
    assert unnamed.field == OUTPUTS + PRODUCT
    nan = difference({"cast.nan": "propagate"}, {"cast.nan": "zero"}).changed
    assert [change.field for change in unnamed_changes(before, after, nan, "e4m3fn")] == [
        OUTPUTS + PRODUCT,
        OUTPUTS + CAST,
    ]


# What the emulated device reads otherwise than the arithmetic of a method, and which fields say so.
NAMED = {"ascend-950": "cast.nan", "nvidia-h100": "promotion_interval", "nvidia-ada": "promotion_interval"}


@pytest.mark.parametrize(
    "name", [*(n for n in list_profiles() if n not in NAMED), "example@1.2", "example@1.3"]
)
def test_a_profile_and_its_device_give_the_same_bits(name: str) -> None:
    device = emulated_chip(load_profile(name), name)
    pairs = [pair for pair in device.pairs() if pair.operands == "e4m3fn"]
    observed = device_behaviour(device, pairs, [c for c in device.casts() if c == "e4m3fn"])
    assert differing(behaviour(name), observed) == {}


def test_only_what_repeats_and_is_there_is_hashed() -> None:
    random = CastStep(E5M2, CastRule(Rounding.STOCHASTIC, Overflow.SATURATE, Subnormals.KEEP))
    unit = DotUnit("u", E4M3FN, E4M3FN, Order.ALIGNED, products=16, fraction_bits=13)
    device = EmulatedDevice(
        "x", {"e4m3fn": unit}, {"e5m2": (random,), "e4m3fn": (CastStep(E4M3FN, RNE_SATURATE),)}
    )
    wanted = (Pair("e4m3fn", "fp32"), Pair("int8", "int32"))
    assert set(device_behaviour(device, wanted, ("e5m2", "e4m3fn", "int8")).hashes) == {CAST, PRODUCT}
    stochastic = behaviour("example@1.2", cast__rounding="stochastic")
    assert set(stochastic.hashes) == {PRODUCT}
    assert set(behaviour("ascend-950").hashes) == {CAST}  # its matrix unit is not published


def test_this_processor_casts_to_bfloat16_as_emulated() -> None:
    """A real device and the emulation meet: torch rounds to nearest even, and overflows to infinity."""
    rule = CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)
    ours = EmulatedDevice("x", {}, {"bf16": (CastStep(FORMATS["bf16"], rule),)})
    seen = device_behaviour(TorchDevice("cpu"), (), ("bf16",))
    expected = device_behaviour(ours, (), ("bf16",))
    assert seen.hashes
    assert differing(seen, expected) == {}


def test_a_record_comes_back_and_a_changed_one_is_refused() -> None:
    found = behaviour("example@1.2")
    record = json.loads(json.dumps(found.record()))
    assert read_behaviour(record, "x") == found
    assert read_behaviour(None, "x") is None
    record["hashes"][CAST]["ties"] = "0" * 64
    with pytest.raises(UserError, match="digest"):
        read_behaviour(record, "x")
    for bad in (
        [],
        "",
        {},
        {"hashes": {}},
        {**record, "hashes": {CAST: []}},
        {**record, "versions": {"a": 1}},
    ):
        with pytest.raises(UserError, match="not one that this program wrote"):
            read_behaviour(bad, "x")


def test_outputs_of_other_inputs_do_not_compare() -> None:
    before = behaviour("example@1.2")
    assert differing(before, replace(behaviour("example@1.3"), corpus="0")) == {}
    assert differing(before, replace(behaviour("example@1.3"), hashes={})) == {}


def test_versions_in_words() -> None:
    assert version_changes({"torch": "1", "a": "x", "b": "y"}, {"torch": "2", "a": "x"}) == ("torch: 1 -> 2",)
