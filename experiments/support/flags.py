"""What the command lines of the scripts share: exit statuses and kinds of flags."""

import argparse
import sys


UNUSABLE, INTERRUPTED = 1, 130


class Parser(argparse.ArgumentParser):
    """Exits with status 1 on a usage error, as on all unusable input.

    (`argparse` takes 2, which is "tokens differ" here.)
    """

    def error(self, message: str):
        self.print_usage(sys.stderr)
        self.exit(UNUSABLE, f"{self.prog}: error: {message}\n")


def positive(text: str) -> int:
    """The type of a flag that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value
