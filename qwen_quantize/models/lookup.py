"""From an architecture's name to its family. A new family is a record and its line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Blueprint, Family
from qwen_quantize.models.config import parse_model_config
from qwen_quantize.models.config_values import shown
from qwen_quantize.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32
from qwen_quantize.models.gemma import GEMMA2, GEMMA3
from qwen_quantize.models.glm import GLM, GLM4
from qwen_quantize.models.llama import LLAMA
from qwen_quantize.models.mistral import MISTRAL
from qwen_quantize.models.mixtral import MIXTRAL
from qwen_quantize.models.phi import PHI3
from qwen_quantize.models.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from qwen_quantize.models.qwen_hybrid import QWEN3_NEXT, QWEN35, QWEN35_MOE, QWEN35_VISION

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN2,
    QWEN3,
    MISTRAL,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GEMMA2,
    GEMMA3,
    GLM,
    GLM4,
    PHI3,
    QWEN3_NEXT,
    QWEN35,
    QWEN35_VISION,
    QWEN35_MOE,
)

BY_ARCHITECTURE: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first entry of `architectures`; raises UserError when config.json names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(
            "config.json names no architecture: the key 'architectures' must hold a list of names such as "
            f'["Qwen3ForCausalLM"], found {shown(names)}'
        )
    return str(names[0])


def find_blueprint(config: Mapping[str, Any]) -> Blueprint | None:
    """The blueprint for this config, or None for an architecture that has none."""
    architecture = architecture_of(config)
    family = BY_ARCHITECTURE.get(architecture)
    if family is None:
        return None
    return Blueprint(family, parse_model_config(config, architecture, family.rules))


def require_blueprint(config: Mapping[str, Any]) -> Blueprint:
    """As `find_blueprint`, but an unsupported architecture is a UserError that says what is supported."""
    blueprint = find_blueprint(config)
    if blueprint is None:
        architecture = architecture_of(config)
        near = difflib.get_close_matches(architecture, BY_ARCHITECTURE, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise UserError(
            f"config.json: the architecture {shown(architecture)} is not supported{hint}; "
            f"supported are {', '.join(sorted(BY_ARCHITECTURE))}"
        )
    return blueprint
