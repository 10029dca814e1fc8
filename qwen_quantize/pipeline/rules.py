"""A recipe's rules, applied in order: what is asked for each linear."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qwen_quantize.calibrators.methods import METHODS
from qwen_quantize.errors import UserError
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.pipeline.recipe import Recipe, Rule
from qwen_quantize.pipeline.selection import matching


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked for one linear beside the request's own; what is None, or False, is as there.

    own_grid: group_size and symmetric are these, even where they are None, and not the request's.
    """

    method: str | None = None
    scheme: str | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    ignore: bool | None = None
    own_grid: bool = False

    @property
    def is_default(self) -> bool:
        """Whether the linear is quantized as the request says for all."""
        return replace(self, ignore=None) == Settings()

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The request as if it were for such linears alone."""
        if self.is_default:
            return recipe
        method = self.method or recipe.method
        scheme = scheme_name(recipe, self)
        group, asymmetric = recipe.group_size, recipe.asymmetric
        if self.own_grid or self.group_size is not None:
            group = self.group_size
        if self.own_grid or self.symmetric is not None:
            asymmetric = self.symmetric is False
        same = method == recipe.method
        return replace(
            recipe,
            method=method,
            scheme=scheme,
            group_size=group,
            asymmetric=asymmetric,
            block_size=recipe.block_size if same else None,
        )


def scheme_name(recipe: Recipe, settings: Settings) -> str:
    """The name of the scheme that is asked for, not known to be one."""
    method = METHODS.get(settings.method or recipe.method)
    own = "" if method is None else method.scheme
    if settings.scheme is not None:
        return settings.scheme
    if recipe.scheme is not None and (method is None or method.any_scheme or recipe.scheme == own):
        return recipe.scheme
    return own


def with_rule(recipe: Recipe, settings: Settings, rule: Rule) -> Settings:
    """The settings after one more rule.

    A rule that changes the scheme, by its name or through a method that makes another, starts anew with the grid:
    a group size that was chosen for 4 bits says nothing of 8.
    """
    before = scheme_name(recipe, settings)
    after = replace(
        settings,
        method=settings.method if rule.method is None else rule.method,
        scheme=settings.scheme if rule.scheme is None else rule.scheme,
        ignore=settings.ignore if rule.ignore is None else rule.ignore,
    )
    if rule.scheme is None and rule.method is not None:
        method = METHODS.get(rule.method)
        if method is not None and after.scheme != method.scheme and not method.any_scheme:
            after = replace(after, scheme=None)
    if scheme_name(recipe, after) != before:
        after = replace(after, group_size=None, symmetric=None, own_grid=True)
    return replace(
        after,
        group_size=after.group_size if rule.group_size is None else rule.group_size,
        symmetric=after.symmetric if rule.symmetric is None else rule.symmetric,
    )


def settings_of(recipe: Recipe, names: Sequence[str]) -> dict[str, Settings]:
    """What the recipe's rules ask for each linear, later ones over earlier ones.

    UserError for a rule that matches none of them, or names a method or scheme that is none.
    """
    found = dict.fromkeys(names, Settings())
    for number, rule in enumerate(recipe.rules, start=1):
        where = f"rule {number} of the recipe ({rule.match!r})"
        for what, name, known in (("method", rule.method, METHODS), ("scheme", rule.scheme, SCHEMES)):
            if name is not None and name not in known:
                raise UserError(f"{where}: {name!r} is not one of the {what}s: {', '.join(known)}")
        matched = [rule.match] if rule.match in found else matching(rule.match, names)
        if not matched:
            raise UserError(f"{where} matches no linear of this model; {near_names(rule.match, names)}")
        for name in matched:
            found[name] = with_rule(recipe, found[name], rule)
    return found


def near_names(pattern: str, names: Sequence[str]) -> str:
    """What a pattern that matches nothing may have meant, as half a sentence."""
    last = dict.fromkeys(name.rpartition(".")[2] for name in names)
    words = pattern.removeprefix("re:").removeprefix("*").strip("^$.*")
    near = difflib.get_close_matches(words, [*last, *names], n=3, cutoff=0.6)
    near += difflib.get_close_matches(words.rpartition(".")[2], list(last), n=3, cutoff=0.6)
    if near:
        return "near it are " + ", ".join(repr(name) for name in list(dict.fromkeys(near))[:3])
    return f"one is {names[0]!r}"
