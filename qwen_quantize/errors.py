"""The errors a user can cause. The command line prints their one sentence and ends with exit code 2."""

from __future__ import annotations


class UserError(Exception):
    """Input that cannot be used: the message says what is wrong, where, and what to do."""


class ResumableError(UserError):
    """Something outside the input stopped a run (a full disk): what is finished is kept for --resume."""
