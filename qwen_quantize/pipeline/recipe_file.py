"""Recipes in files: TOML that somebody wrote, or the manifest of an earlier run, which is to be run again."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from qwen_quantize.calibrators.experts import ExpertPolicy
from qwen_quantize.calibrators.problem import Effort
from qwen_quantize.checkpoint.json_file import RECORD_BYTES, read_object
from qwen_quantize.chip_profiles.loader import split_versions
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.recipe import Recipe, Rule

_MOST_TOML = 4 << 20

_Check = tuple[Callable[[Any], bool], str]


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(part, str) for pair in value.items() for part in pair)


_TEXT: _Check = (lambda value: isinstance(value, str) and bool(value), "a text")
_SIZE: _Check = (lambda value: _integer(value) and value >= 0, "a whole number, not negative")
_YES: _Check = (lambda value: isinstance(value, bool), "true or false")
_NAMES: _Check = (
    lambda value: isinstance(value, list) and all(isinstance(item, str) and item for item in value),
    "a list of texts",
)
_PAIRS: _Check = (_texts, "a table of texts")

_RULE: dict[str, _Check] = {
    "match": _TEXT,
    "method": _TEXT,
    "scheme": _TEXT,
    "group_size": _SIZE,
    "symmetric": _YES,
    "ignore": _YES,
}
_DEFAULTS: dict[str, _Check] = {
    "method": _TEXT,
    "scheme": _TEXT,
    "group_size": _SIZE,
    "symmetric": _YES,
    "layout": _TEXT,
    "rotate": _TEXT,
}
# Fields of a request in a manifest; those in the second table may be null.
_REQUEST: dict[str, _Check] = {
    "model_path": _TEXT,
    "device": _TEXT,
    "method": _TEXT,
    "samples": _SIZE,
    "length": _SIZE,
    "seed": (_integer, "a whole number"),
    "expert_policy": (lambda value: value in tuple(ExpertPolicy), "a policy"),
    "ignore": _NAMES,
    "include": _NAMES,
    "asymmetric": _YES,
    "versions": _PAIRS,
    "assume": _PAIRS,
    "with_claims": _YES,
    "allow_unsupported": _YES,
    "max_shard_bytes": _SIZE,
    "effort": (lambda value: value in tuple(Effort), "normal or high"),
    "rotate": _TEXT,
}
_OPTIONAL: dict[str, _Check] = {
    "dataset": _TEXT,
    "column": _TEXT,
    "statistics": _TEXT,
    "block_size": _SIZE,
    "scheme": _TEXT,
    "group_size": _SIZE,
    "layout": _TEXT,
    "kv_cache": _TEXT,
    "max_memory": _SIZE,
}
_NEEDED = ("model_path", "device", "method")


def with_recipe(recipe: Recipe, path: Path, given: Set[str]) -> Recipe:
    """The request of the command line laid over that of a file, whose rules are kept.

    given: the fields of `recipe` that the user set himself; UserError for whatever is no recipe.
    """
    if not path.is_file():
        raise UserError(
            f"--recipe {path} is no file; name a .toml recipe or the qwen_quantize.json of a result"
        )
    found = _manifest_recipe(path) if path.suffix == ".json" else _toml_recipe(path, recipe)
    own = {name: getattr(recipe, name) for name in sorted(given)}
    if "versions" in own and _chip(own.get("device", found.device)) in (_chip(found.device), None):
        own["versions"] = tuple(sorted({**dict(found.versions), **dict(recipe.versions)}.items()))
    return replace(found, **own)


def _chip(device: str) -> str | None:
    """The name of a chip; None for a file."""
    return None if device.endswith(".toml") else split_versions(device)[0]


def _toml_recipe(path: Path, recipe: Recipe) -> Recipe:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_TOML + 1)
        if len(data) > _MOST_TOML:
            raise UserError(f"{path} is larger than {_MOST_TOML} bytes, which no recipe needs")
        record = tomllib.loads(data.decode())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no TOML: {error}") from error
    _known(record, ("defaults", "rule"), str(path))
    defaults = record.get("defaults", {})
    if not isinstance(defaults, dict):
        raise UserError(f"{path}: 'defaults' must be a table, [defaults]")
    values = _checked(defaults, _DEFAULTS, f"{path}: [defaults]")
    if "symmetric" in values:
        values["asymmetric"] = not values.pop("symmetric")
    return replace(recipe, **values, rules=_rules(record.get("rule", []), str(path)))


def _manifest_recipe(path: Path) -> Recipe:
    record = read_object(path, RECORD_BYTES)
    request = record.get("request")
    if not isinstance(request, dict) or not isinstance(record.get("tool"), dict):
        raise UserError(f"{path} is no manifest of this program: it holds no request to run again")
    return recipe_of_request(request, f"{path}: the request")


def recipe_of_request(request: Mapping[str, Any], where: str) -> Recipe:
    """The recipe that a manifest holds as `request`; UserError, which begins with `where`, for what is none."""
    names = tuple(field.name for field in fields(Recipe))
    _known(request, names, where)
    missing = [name for name in _NEEDED if name not in request]
    if missing:
        raise UserError(f"{where} has no {missing[0]!r}, so it cannot be run again")
    values = {key: value for key, value in request.items() if not (key in _OPTIONAL and value is None)}
    rules = _rules(values.pop("rules", []), where)
    found = _checked(values, _REQUEST | _OPTIONAL, where)
    for key in ("versions", "assume"):
        found[key] = tuple(sorted(found.get(key, {}).items()))
    for key in ("ignore", "include"):
        found[key] = tuple(found.get(key, ()))
    for key, kind in (("expert_policy", ExpertPolicy), ("effort", Effort)):
        if key in found:
            found[key] = kind(found[key])
    return Recipe(**found, rules=rules)


def _rules(found: object, where: str) -> tuple[Rule, ...]:
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UserError(f"{where}: rules must be tables, each under [[rule]]")
    rules = []
    for number, one in enumerate(found, start=1):
        place = f"{where}: rule {number}"
        values = _checked(one, _RULE, place)
        if "match" not in values:
            raise UserError(f"{place} has no 'match': the pattern of the linears that it is for")
        if len(values) == 1:
            raise UserError(f"{place} ({values['match']!r}) says nothing beside its 'match'")
        rules.append(Rule(**values))
    return tuple(rules)


def _known(record: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    unknown = [key for key in record if key not in keys]
    if unknown:
        raise UserError(f"{where} has the unknown key {unknown[0]!r:.60}; known are {', '.join(keys)}")


def _checked(record: Mapping[str, Any], checks: Mapping[str, _Check], where: str) -> dict[str, Any]:
    _known(record, tuple(checks), where)
    for key, value in record.items():
        fits, words = checks[key]
        if not fits(value):
            raise UserError(f"{where}: {key!r} must be {words}, found {value!r:.60}")
    return dict(record)
