"""What the user asked for, frozen: everything that decides the written bytes, and nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from qwen_quantize.calibrators.experts import ExpertPolicy
from qwen_quantize.calibrators.problem import Effort


@dataclass(frozen=True, slots=True)
class Rule:
    """What is asked for the linears that a pattern matches; what is None stays as it was before the rule.

    match: as for `--ignore`. group_size: 0 for one scale per output channel. ignore: they stay as they are.
    """

    match: str
    method: str | None = None
    scheme: str | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    ignore: bool | None = None

    def as_record(self) -> dict[str, object]:
        """What it says, without what it leaves."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One quantization request. Paths and sizes as given; what is None is left to the plan.

    statistics: a folder that takes the place of dataset, samples, length and seed. scheme: for methods that fill
    any; group_size: 0 for one scale per output channel. rules: for some linears, later ones over earlier ones. rotate:
    of the features before anything else, see `Rotating`.
    """

    model_path: str
    device: str
    method: str
    dataset: str | None = None
    column: str | None = None
    statistics: str | None = None
    samples: int = 16
    length: int = 512
    seed: int = 0
    expert_policy: ExpertPolicy = ExpertPolicy.SHRINK
    ignore: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    block_size: int | None = None
    scheme: str | None = None
    group_size: int | None = None
    asymmetric: bool = False
    layout: str | None = None
    kv_cache: str | None = None
    versions: tuple[tuple[str, str], ...] = ()
    assume: tuple[tuple[str, str], ...] = ()
    with_claims: bool = False
    allow_unsupported: bool = False
    max_memory: int | None = None
    max_shard_bytes: int = 4_500_000_000
    rules: tuple[Rule, ...] = ()
    effort: Effort = Effort.NORMAL
    rotate: str = "none"

    @property
    def calibrates(self) -> bool:
        """Whether what the model's inputs are like is known, from text or from collected statistics."""
        return self.dataset is not None or self.statistics is not None

    def as_record(self) -> dict[str, object]:
        """Every field, as JSON can hold it: a resumed run must ask for exactly the same."""
        record = asdict(self)
        record["expert_policy"] = self.expert_policy.value
        record["effort"] = self.effort.value
        record["versions"] = dict(self.versions)
        record["assume"] = dict(self.assume)
        record["ignore"], record["include"] = list(self.ignore), list(self.include)
        record["rules"] = [rule.as_record() for rule in self.rules]
        return record


@dataclass(frozen=True, slots=True)
class Output:
    """Where the result goes and what to do with what is there; does not change the bytes."""

    path: Path
    resume: bool = False
    overwrite: bool = False
