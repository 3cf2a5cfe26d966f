"""The demo's text: the prose behind Python's own `help()`, which every interpreter carries."""

import re
from pydoc_data.topics import topics

STARTS = ["A class", "If the", "The value of"]
QUESTIONS = {
    "What is a tuple?": "A sequence that never changes.",
    "What does lambda make?": "A function without a name.",
    "When does the else of a loop run?": "When no break ended the loop.",
    "Who reads a docstring?": "Whoever calls help.",
}

# typographic quotes and dashes as a keyboard has them, so that samples print on any terminal
PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "-"})


def documents() -> list[str]:
    """One document to a topic, one paragraph to a line; headings, code and tables are left out.

    Topics quote one another at length, and a held-out paragraph that training has seen would
    look well learned: each paragraph is kept only where it comes first.
    """
    seen: set[str] = set()
    found = []
    for topic in topics.values():
        paragraphs = []
        for lines in re.split(r"\n\s*\n", topic):
            paragraph = " ".join(lines.split()).translate(PLAIN)
            if is_prose(paragraph) and paragraph not in seen:
                seen.add(paragraph)
                paragraphs.append(paragraph)
        if paragraphs:
            found.append("\n".join(paragraphs))
    return found


def is_prose(paragraph: str) -> bool:
    """Whether this is a sentence or more, and neither grammar nor a session of the interpreter."""
    sentences = re.fullmatch(r"""["'`*(0-9A-Z].{30,}[.:)]""", paragraph)
    return bool(sentences) and paragraph.isascii() and not re.search("::=|>>>", paragraph)
