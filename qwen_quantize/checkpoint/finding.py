"""What a check of a model folder finds: which rule, on what, what an engine would do, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """error: an engine refuses the folder or computes something else; warning: it may, or something is lost."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of a contract.

    tensor: the tensor, module, key of a config or file that is meant. engine: the engine whose rule it is, None
    for what holds everywhere.
    """

    tensor: str
    rule: str
    message: str
    remedy: str
    severity: Severity = Severity.ERROR
    engine: str | None = None

    def record(self) -> dict[str, Any]:
        return {
            "tensor": self.tensor,
            "rule": self.rule,
            "message": self.message,
            "remedy": self.remedy,
            "severity": self.severity.value,
            "engine": self.engine,
        }


def warning(tensor: str, rule: str, message: str, remedy: str, engine: str | None = None) -> Finding:
    return Finding(tensor, rule, message, remedy, Severity.WARNING, engine)
