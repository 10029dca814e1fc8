"""What `generate` and `bench` are asked about the key-value cache, and the plan in words."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from qwen_quantize.chip_profiles.leaf import Absent
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.engine.cache_pages import CacheLayout, CacheOptions, CachePlan
from qwen_quantize.errors import UserError
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.report.numbers import human_bytes


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """memory: --cache-memory in bytes; layout: --cache-layout; context: --context. None: not given."""

    memory: int | None = None
    layout: str | None = None
    context: int | None = None

    def options(self, chip: ChipProfile) -> CacheOptions:
        """With the layout asked for, else the one that the chip prefers; UserError for a layout that is none."""
        if self.layout is not None and self.layout not in tuple(CacheLayout):
            raise UserError(f"--cache-layout {self.layout!r} is none of {', '.join(CacheLayout)}")
        wanted = chip.facts.tiles.cache_layout.text() if self.layout is None else self.layout
        return CacheOptions(self.memory, None if isinstance(wanted, Absent) else CacheLayout(wanted))

    def why_layout(self, chip: ChipProfile) -> str:
        """Where the layout of `options` comes from."""
        if self.layout is not None:
            return "asked for"
        leaf = chip.facts.tiles.cache_layout
        if leaf.known:
            return f"preferred by {chip.name}, {leaf.confidence} ({', '.join(leaf.sources)})"
        return f"the fastest here; what {chip.name} prefers is {leaf.status.replace('_', ' ')}"

    def check_length(self, prompt: int, new: int, config: ModelConfig, hint: str = "") -> None:
        """UserError for more tokens than the model's context, or than --context allows."""
        if self.context is not None and prompt + new > self.context:
            raise UserError(f"{prompt} + {new} tokens are more than --context {self.context}")
        if self.context is None and prompt + new > config.max_position:
            raise UserError(
                f"{prompt} + {new} tokens are more than this model's context of {config.max_position}{hint}; "
                "--context N goes beyond it"
            )

    def warning(self, config: ModelConfig) -> str | None:
        """What to say of a context beyond the model's own."""
        if self.context is None or self.context <= config.max_position:
            return None
        return (
            f"warning: --context {self.context} is more than the {config.max_position} positions that this model was "
            "made for; what it says beyond them may mean little"
        )


NOTHING_ASKED = CacheRequest()


def plan_words(plan: CachePlan, tokens: int) -> str:
    """One line of what a cache takes, and where."""
    whole = f"key-value cache: {human_bytes(plan.total)} for {tokens} tokens"
    if plan.file == 0:
        return f"{whole}, all in memory"
    return (
        f"{whole}, {human_bytes(plan.memory)} of the newest in memory, {human_bytes(plan.file)} in a temporary file "
        f"in {tempfile.gettempdir()}"
    )
