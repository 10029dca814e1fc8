"""Chat templates: Jinja programs that come with a model, run in a sandbox because nobody vouches for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from qwen_quantize.errors import UserError


class ChatTemplate:
    """A compiled chat template; what templates may call is what transformers offers them.

    `where` names the folder in errors. Raises UserError for a template that is not Jinja.
    """

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        try:
            self._template = _environment().from_string(text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"the chat template of {where} cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
    ) -> str:
        """The rendered conversation. UserError with the template's own words where it refuses it."""
        if not messages:
            raise UserError(f"the chat template of {self._where} cannot render an empty conversation")
        try:
            return self._template.render(
                {
                    **special_tokens,
                    "messages": list(messages),
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (
            jinja2.TemplateError,
            # What the expressions of a faulty template raise from Python itself.
            ArithmeticError,
            AttributeError,
            LookupError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise UserError(f"the chat template of {self._where} refuses a conversation: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's words for training; it only groups here."""

    tags = {"generation"}  # noqa: RUF012 - the base class's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(Namespace):
    """A template's `namespace(...)` without names that Python gives a meaning."""

    def __init__(self, *pairs: object, **values: object) -> None:
        attributes = _new_dict(*pairs, **values)
        for name in attributes:
            _refuse_underscore(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} in a namespace")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _new_dict(*pairs: object, **values: object) -> dict[str, object]:
    return dict(*pairs, **values)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML, which no model expects."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        # A function in place of the class: a class would hand out its attributes.
        dict=_new_dict,
        namespace=_PlainNamespace,
    )
    return environment
