"""What ranks do in tests of several of them; see `ranks.together`."""

from fastbrain import train


def program(words: list[str]) -> int:
    """Train as the command line says; the exit code."""
    return train.main(words)
