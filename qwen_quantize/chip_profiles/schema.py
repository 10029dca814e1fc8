"""The shape of a chip profile.

Every field of the groups below is a `Leaf`, a mapping from a name to leaves, or a further group; the file
reader, the override resolver and `chips show` all walk these declarations, so a field is declared once, here.
A field that a file does not mention is unknown. `example.toml` explains each field in use.
"""

# ruff: noqa: RUF009  the calls in class bodies below make dataclass fields

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar, cast

from qwen_quantize.chip_profiles.leaf import UNSTATED, Leaf, LeafKind, LeafSpec, Status
from qwen_quantize.formats.cast_rule import NanResult, Overflow, Rounding, Subnormals

# Names of element types in profiles: the number formats plus types that only data sheets speak of.
DTYPES = (
    *("fp64", "fp32", "tf32", "hf32", "fp16", "bf16", "e5m2", "e4m3fn", "e4m3fnuz", "e5m2fnuz", "hif8"),
    *("e3m2", "e2m3", "e2m1", "e1m2", "e8m0", "int32", "int16", "int8", "uint8", "int4", "int2"),
)
# The rules of formats.scales.ScaleRule by name: that module imports torch, and listing chips must not.
SCALE_RULES = ("floor", "ceil", "rceil", "even", "search")
# Those of engine.cache_pages.CacheLayout, which stands on a floor above.
CACHE_LAYOUTS = ("head-major", "interleaved")
ACCUMULATORS = ("fp16", "fp32", "int32")
COMPONENTS = ("firmware", "driver", "toolkit", "framework", "op-package")
_ROUNDINGS = tuple(Rounding)
_FLAG = LeafSpec(LeafKind.FLAG)
_INTEGER = LeafSpec(LeafKind.INTEGER)
_TEXT = LeafSpec(LeafKind.TEXT)
_TEXTS = LeafSpec(LeafKind.TEXTS)
_BYTES = LeafSpec(LeafKind.INTEGER, ("bytes",))
_RATE = LeafSpec(LeafKind.NUMBER, ("TFLOPS", "TOPS"))


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """What stands in one field: a leaf, leaves by name, one group, or groups by name.

    `keys` restricts the names: "dtype", "cast" (fp32->e4m3fn), "pair" (e4m3fn*e4m3fn), "peak" (dtype or
    dtype@bin), or "" for any name without a dot.
    """

    spec: LeafSpec | None = None
    group: type | None = None
    many: bool = False
    keys: str = ""


def _leaf(spec: LeafSpec) -> Leaf:
    leaf: Leaf = field(default=UNSTATED, metadata={"place": Place(spec=spec)})
    return leaf


def _choice(choices: tuple[str, ...]) -> Leaf:
    return _leaf(LeafSpec(LeafKind.TEXT, choices=choices))


def _leaves(spec: LeafSpec, keys: str = "") -> Mapping[str, Leaf]:
    place = Place(spec=spec, many=True, keys=keys)
    return cast("Mapping[str, Leaf]", field(default_factory=dict, metadata={"place": place}))


def _group(group: type[T]) -> T:
    made: T = field(default_factory=group, metadata={"place": Place(group=group)})
    return made


def _groups(group: type[T], keys: str = "") -> Mapping[str, T]:
    place = Place(group=group, many=True, keys=keys)
    return cast("Mapping[str, T]", field(default_factory=dict, metadata={"place": place}))


@dataclass(frozen=True, slots=True)
class Identity:
    """How to recognise the chip."""

    products: Leaf = _leaf(_TEXTS)  # boards and bins that this profile covers
    arch_codes: Leaf = _leaf(_TEXTS)  # dav-c220, gfx928, mp_31, ivcore11 ...
    soc_ids: Leaf = _leaf(LeafSpec(LeafKind.INTEGERS))
    name_trap: Leaf = _leaf(_TEXT)  # a name or id that looks like this chip and is another one
    dies_per_device: Leaf = _leaf(_INTEGER)
    torch_device: Leaf = _leaf(_TEXT)
    dispatch_key: Leaf = _leaf(_TEXT)
    answers_cuda: Leaf = _leaf(_FLAG)  # torch calls the device "cuda" although it is not NVIDIA's
    smi: Leaf = _leaf(_TEXT)  # the vendor's management command


@dataclass(frozen=True, slots=True)
class Component:
    """One versioned part of the stack."""

    query: Leaf = _leaf(_TEXT)  # the command or call that tells its version
    versions: Leaf = _leaf(_TEXTS)  # versions that sources mention


@dataclass(frozen=True, slots=True)
class Switch:
    """A setting that changes numbers at run time."""

    kind: Leaf = _choice(("environment", "register", "call"))
    default: Leaf = _leaf(_TEXT)
    effect: Leaf = _leaf(_TEXT)


@dataclass(frozen=True, slots=True)
class Software:
    """The vendor's stack."""

    stack: Leaf = _leaf(_TEXTS)
    components: Mapping[str, Component] = _groups(Component, "component")
    switches: Mapping[str, Switch] = _groups(Switch)


@dataclass(frozen=True, slots=True)
class Capability:
    """What the chip can do with one element type."""

    storage: Leaf = _leaf(_FLAG)
    convert: Leaf = _leaf(_FLAG)
    vector: Leaf = _leaf(_FLAG)
    matrix: Leaf = _leaf(_FLAG)  # the matrix unit takes it as an operand
    scale: Leaf = _leaf(_FLAG)  # the matrix unit applies block scales of this type
    output: Leaf = _leaf(_FLAG)
    emulated: Leaf = _leaf(_FLAG)  # available, but computed in a wider type


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense arithmetic rates; the sparse one never stands in for the dense one."""

    dense: Leaf = _leaf(_RATE)
    with_vector: Leaf = _leaf(_RATE)  # matrix and vector units together
    sparse: Leaf = _leaf(_RATE)
    relative_to_fp16: Leaf = _leaf(LeafSpec(LeafKind.NUMBER))


@dataclass(frozen=True, slots=True)
class Compute:
    """Units and clock."""

    matrix_cores: Leaf = _leaf(_INTEGER)
    vector_cores: Leaf = _leaf(_INTEGER)
    clock: Leaf = _leaf(LeafSpec(LeafKind.NUMBER, ("GHz",)))
    threads_per_wave: Leaf = _leaf(_INTEGER)
    structured_sparsity: Leaf = _leaf(_FLAG)  # 4:2 sparse operands


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory and what lies between it and the units."""

    capacity: Leaf = _leaf(LeafSpec(LeafKind.NUMBER, ("GB", "GiB")))
    kind: Leaf = _leaf(_TEXT)
    bandwidth: Leaf = _leaf(LeafSpec(LeafKind.NUMBER, ("GB/s",)))
    l2_size: Leaf = _leaf(_BYTES)
    l2_line: Leaf = _leaf(_BYTES)
    l2_sector: Leaf = _leaf(_BYTES)
    buffers: Mapping[str, Leaf] = _leaves(_BYTES)  # on-chip, per core unless the note says otherwise
    alignment: Mapping[str, Leaf] = _leaves(_BYTES)  # of an address in the named place


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shapes and layouts the matrix unit works in."""

    mnk: Mapping[str, Leaf] = _leaves(LeafSpec(LeafKind.INTEGERS), "dtype")  # (M, N, K) of one step
    k_multiple: Mapping[str, Leaf] = _leaves(_INTEGER, "dtype")
    weight_layout: Leaf = _leaf(_TEXT)
    scale_layout: Leaf = _leaf(_TEXT)
    cache_layout: Leaf = _choice(CACHE_LAYOUTS)  # of cached keys, if the chip prefers one


@dataclass(frozen=True, slots=True)
class Cast:
    """How the chip turns one type into another; `modes` are all that exist, `rounding` the default."""

    rounding: Leaf = _choice(_ROUNDINGS)
    modes: Leaf = _leaf(LeafSpec(LeafKind.TEXTS, choices=_ROUNDINGS))
    overflow: Leaf = _choice(tuple(Overflow))
    overflow_modes: Leaf = _leaf(LeafSpec(LeafKind.TEXTS, choices=tuple(Overflow)))
    subnormals: Leaf = _choice(tuple(Subnormals))
    nan: Leaf = _choice(tuple(NanResult))
    nan_saturating: Leaf = _choice(tuple(NanResult))  # the same, where it differs while overflow saturates
    switch: Leaf = _leaf(_TEXT)  # what selects another mode
    path: Leaf = _leaf(
        LeafSpec(LeafKind.TEXTS, choices=DTYPES)
    )  # intermediate types, where there is no direct cast


@dataclass(frozen=True, slots=True)
class Matmul:
    """One matrix product. Fraction bits, step and roundings are those of the aligned-sum model:

    the exact products of one step and the accumulator are shifted to the largest exponent, cut to
    `fraction_bits` by `alignment_rounding`, summed, and rounded to the accumulator by `final_rounding`.
    """

    accumulator: Leaf = _choice(ACCUMULATORS)  # the type that sums are stored in
    fraction_bits: Leaf = _leaf(_INTEGER)
    products_per_step: Leaf = _leaf(_INTEGER)
    alignment_rounding: Leaf = _choice(_ROUNDINGS)
    final_rounding: Leaf = _choice(_ROUNDINGS)
    output_mantissa_bits: Leaf = _leaf(
        _INTEGER
    )  # of the accumulator, fewer than its type has where bits stay 0
    promotion_interval: Leaf = _leaf(
        _INTEGER
    )  # products after which the partial sum moves to a wider register
    carry_bits: Leaf = _leaf(_INTEGER)
    order: Leaf = _leaf(_TEXT)
    overflow: Leaf = _choice(("saturate", "wrap", "infinity"))


@dataclass(frozen=True, slots=True)
class ScaleFacts:
    """Scales of static and of run-time quantization."""

    static_format: Leaf = _choice(("fp32", "fp19", "fp16", "bf16", "e8m0"))  # fp19: 1 + 8 + 10 bits
    static_rounding: Leaf = _choice(_ROUNDINGS)  # how a wider scale becomes the static format
    dynamic_rule: Leaf = _choice(SCALE_RULES)  # power-of-two scales of activations
    dynamic_rules: Leaf = _leaf(LeafSpec(LeafKind.TEXTS, choices=SCALE_RULES))  # all that the chip offers
    amax_epsilon: Leaf = _leaf(LeafSpec(LeafKind.NUMBER))  # lower bound of the largest magnitude
    offset_bits: Leaf = _leaf(_INTEGER)  # of an integer path's zero point
    exponent_range: Leaf = _leaf(LeafSpec(LeafKind.INTEGERS))


@dataclass(frozen=True, slots=True)
class ArithmeticFacts:
    """Everything that decides bits."""

    casts: Mapping[str, Cast] = _groups(Cast, "cast")
    matmul: Mapping[str, Matmul] = _groups(Matmul, "pair")
    scale: ScaleFacts = _group(ScaleFacts)
    subnormals: Mapping[str, Leaf] = _leaves(LeafSpec(LeafKind.TEXT, choices=tuple(Subnormals)))  # by unit
    float_overflow: Leaf = _choice(("inf_nan", "saturate"))  # 16-bit float results beyond the largest value


@dataclass(frozen=True, slots=True)
class ServingStack:
    """What one serving engine loads on this chip."""

    formats: Leaf = _leaf(_TEXTS)
    refuses: Leaf = _leaf(_TEXTS)
    kv_cache: Leaf = _leaf(_TEXTS)
    flags: Leaf = _leaf(_TEXTS)
    constraints: Leaf = _leaf(_TEXT)


@dataclass(frozen=True, slots=True)
class ChipFacts:
    """The leaves of a profile."""

    identity: Identity = _group(Identity)
    software: Software = _group(Software)
    dtypes: Mapping[str, Capability] = _groups(Capability, "dtype")
    dtypes_complete: Leaf = _leaf(_FLAG)  # a document lists all types, so that the others are refused
    compute: Compute = _group(Compute)
    peaks: Mapping[str, Peak] = _groups(Peak, "peak")
    memory: Memory = _group(Memory)
    tiles: Tiles = _group(Tiles)
    arithmetic: ArithmeticFacts = _group(ArithmeticFacts)
    serving: Mapping[str, ServingStack] = _groups(ServingStack)


@dataclass(frozen=True, slots=True)
class ChipName:
    """What a chip is called. `generation` orders a family: its newest member has the largest."""

    name: str
    title: str
    vendor: str
    family: str
    generation: int
    aliases: tuple[str, ...] = ()
    family_aliases: tuple[str, ...] = ()
    default_component: str = "firmware"  # what the version in `name@version` speaks of


@dataclass(frozen=True, slots=True)
class Override:
    """Another value of one leaf for a range of versions of one component."""

    component: str
    versions: str
    path: tuple[str, ...]
    leaf: Leaf


@dataclass(frozen=True, slots=True)
class ChipProfile:
    """One chip at one tuple of versions: its names, its facts, and what the versions decided.

    `undecided` maps the path of each leaf that hangs on a version nobody stated to that component.
    """

    chip: ChipName
    facts: ChipFacts
    versions: Mapping[str, str]
    with_claims: bool
    overrides: tuple[Override, ...]
    undecided: Mapping[str, str]
    origin: str

    @property
    def name(self) -> str:
        return self.chip.name

    @property
    def family(self) -> str:
        return self.chip.family

    @property
    def arithmetic(self) -> ArithmeticFacts:
        return self.facts.arithmetic

    @property
    def memory(self) -> Memory:
        return self.facts.memory

    @property
    def dtypes(self) -> Mapping[str, Capability]:
        return self.facts.dtypes

    def capability(self, dtype: str, what: str) -> Leaf:
        """The leaf `what` (storage, matrix, scale, ...) of `dtype`; false when a complete list omits it."""
        listed = self.facts.dtypes.get(dtype)
        leaf: Leaf = UNSTATED if listed is None else getattr(listed, what)
        complete = self.facts.dtypes_complete
        if listed is None and complete.known and complete.value is True:
            return Leaf(False, Status.KNOWN, complete.confidence, complete.sources, note=complete.note)
        return leaf

    def leaves(self) -> Iterator[tuple[str, Leaf]]:
        """Every leaf with its dotted path, unstated ones included."""
        return _walk(self.facts, "")

    def stated_leaves(self) -> Iterator[tuple[str, Leaf]]:
        """The leaves that the files mention."""
        return ((path, leaf) for path, leaf in self.leaves() if leaf != UNSTATED)


def place_of(group: type, name: str) -> Place | None:
    """What stands in field `name` of `group`, None when there is no such field."""
    for item in fields(group):
        if item.name == name:
            place: Place = item.metadata["place"]
            return place
    return None


def field_names(group: type) -> tuple[str, ...]:
    """The fields of a group in their order."""
    return tuple(item.name for item in fields(group))


def _walk(node: object, path: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(node, Leaf):
        yield path, node
        return
    if isinstance(node, Mapping):
        items = list(node.items())
    else:
        items = [(name, getattr(node, name)) for name in field_names(type(node))]
    for name, child in items:
        yield from _walk(child, f"{path}.{name}" if path else str(name))
