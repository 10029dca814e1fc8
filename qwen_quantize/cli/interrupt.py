"""Ctrl-C before a command has begun: one line and exit code 130, as later.

Imports little, as it is there for the time in which everything else is imported.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def end_while_starting() -> None:
    """Let Ctrl-C end the program at once, until `command_begins`; where it is ignored, as by nohup, it stays so.

    Nothing is open yet that would have to be closed, and an exception in the midst of an import can be lost in it or
    come out of it as another one.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def command_begins() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
