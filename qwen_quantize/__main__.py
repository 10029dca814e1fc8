"""`qwen_quantize` and `python -m qwen_quantize`."""

import os

from qwen_quantize.cli.interrupt import end_while_starting


def main() -> None:
    """Entry point of the command."""
    end_while_starting()
    # Read once, when torch is imported: a thread of OpenMP that waits for work otherwise spins, a quarter of the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from qwen_quantize.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
