"""`qwen_quantize` and `python -m qwen_quantize`."""

from qwen_quantize.cli.interrupt import end_while_starting


def main() -> None:
    """Entry point of the command."""
    end_while_starting()
    from qwen_quantize.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
