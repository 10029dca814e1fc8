"""Which modules a quantization config leaves out, held against which ones are quantized."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from qwen_quantize.checkpoint.compressed_inputs import rank_of_match
from qwen_quantize.checkpoint.contract_folder import ModelFolder, shown_json
from qwen_quantize.checkpoint.contract_linear import PLAIN, LayoutCheck
from qwen_quantize.checkpoint.finding import Finding, warning
from qwen_quantize.errors import UserError

# Method -> the keys that list what stays; the first that is there counts.
_KEYS = {
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "compressed-tensors": ("ignore",),
    "awq": ("modules_to_not_convert",),
    "hif8": ("modules_to_not_convert",),
    "mxfp4": ("modules_to_not_convert",),
}
_HEAD = "lm_head"


def check_ignored(
    folder: ModelFolder, settings: Mapping[str, Any], linears: Sequence[str], check: LayoutCheck
) -> list[Finding]:
    """linears: the modules that are linears of the model, quantized or not."""
    method = settings.get("quant_method")
    entries = _entries(settings, str(method))
    if entries is None:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return [
            Finding(
                "config.json",
                "config-value",
                f"the list of modules that stay is {shown_json(entries)}; engines expect names",
                "write a list of module names",
            )
        ]
    try:
        return _compare(folder, entries, method == "awq", linears, check)
    except UserError as error:
        return [
            Finding(
                "config.json",
                "config-value",
                folder.say(error),
                "name the modules, or write a plainer pattern",
            )
        ]


def _entries(settings: Mapping[str, Any], method: str) -> object:
    """The names, patterns as "re:...". None where the method has no such list."""
    if method == "gptq":
        dynamic = settings.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            return dynamic
        left = ["re:" + str(key)[2:] for key in dynamic if str(key).startswith("-:")]
        return left if settings.get("lm_head") else [*left, _HEAD]
    if method not in _KEYS:
        return None
    return next((settings[key] for key in _KEYS[method] if settings.get(key) is not None), [])


def _compare(
    folder: ModelFolder, entries: list[str], anywhere: bool, linears: Sequence[str], check: LayoutCheck
) -> list[Finding]:
    """anywhere: an entry matches wherever it stands in a name (AutoAWQ's rule)."""
    findings = []
    modules = dict.fromkeys((*folder.modules, *linears))
    covered: set[str] = set()
    for entry in entries:
        matched = _matched(entry, modules, anywhere)
        if not matched and entry != _HEAD:
            findings.append(
                warning(
                    entry,
                    "ignore-unmatched",
                    "it is in the list of modules that stay and there is no such module; a misspelt name leaves "
                    "the one that "
                    "was meant to be quantized",
                    "correct the name, or remove it",
                )
            )
        covered.update(matched)
    for module in check.linears:
        if module in covered:
            findings.append(
                Finding(
                    module,
                    "ignore-quantized",
                    "the config lists it among the modules that stay and it is stored quantized; engines build a "
                    "plain "
                    "linear and load codes as weights, or stop",
                    "remove it from the list, or store it in high precision",
                )
            )
    for module in linears:
        info = folder.info(f"{module}.weight")
        if module in check.linears or module in covered or info is None or info.dtype not in PLAIN:
            continue
        findings.append(
            Finding(
                module,
                "ignore-missing",
                "it is stored in high precision and the config does not list it among the modules that stay; "
                "engines build "
                "a quantized linear and look for its scales",
                "add it to the list",
            )
        )
    return findings


def _matched(entry: str, modules: Mapping[str, None], anywhere: bool) -> list[str]:
    if entry.startswith("re:"):
        return [module for module in modules if rank_of_match(module, [entry]) == 1]
    if "*" in entry:
        return [m for m in modules if fnmatch.fnmatchcase(m, entry) or fnmatch.fnmatchcase(m, entry + ".*")]
    if anywhere:
        return [module for module in modules if entry in module]
    if entry in modules and not entry.endswith("_proj"):
        within = entry + "."
        return [module for module in modules if module == entry or module.startswith(within)]
    return [m for m in modules if m == entry or m.startswith(entry + ".") or m.endswith("." + entry)]
