"""JUnit XML, which every CI server reads: one test case for each check of a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree


@dataclass(frozen=True, slots=True)
class Case:
    """One check; `failure` is None where it passed, `output` is shown either way."""

    name: str
    failure: str | None
    output: str


def junit_xml(suite: str, cases: Sequence[Case], seconds: float) -> bytes:
    """A `testsuites` document in UTF-8. Characters that XML has no place for become U+FFFD."""
    failures = str(sum(case.failure is not None for case in cases))
    counted = {"tests": str(len(cases)), "failures": failures, "errors": "0", "time": f"{seconds:.3f}"}
    root = ElementTree.Element("testsuites", counted)
    branch = ElementTree.SubElement(root, "testsuite", {"name": _clean(suite), **counted})
    for case in cases:
        # The time of the whole run stands in the suite: the checks share one pass over the text.
        leaf = ElementTree.SubElement(
            branch, "testcase", {"name": _clean(case.name), "classname": _clean(suite), "time": "0"}
        )
        if case.failure is not None:
            words = _clean(case.failure)
            ElementTree.SubElement(leaf, "failure", {"message": words, "type": "regression"}).text = words
        if case.output:
            ElementTree.SubElement(leaf, "system-out").text = _clean(case.output)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _clean(text: str) -> str:
    return "".join(c if _allowed(ord(c)) else "�" for c in text)


def _allowed(code: int) -> bool:
    """XML 1.0, production 2 (Char)."""
    return code in (0x9, 0xA, 0xD) or 0x20 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or code >= 0x10000
