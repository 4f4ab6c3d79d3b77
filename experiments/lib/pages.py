"""Pages of commands, as `experiments/reproduction.md`: their sections and words."""

import pathlib
import re


def sections(page: pathlib.Path) -> dict[str, str]:
    """Returns the block of text of each section of a page, by its heading."""
    section = r"^## (\w+)\n.*?^```text\n(.*?)^```$"
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(section, text, re.MULTILINE | re.DOTALL))


def filled(text: str, words: str, **more: str) -> str:
    """Returns the text with words in the place of their names in braces; names that
    are not known stay.

    Args:
      words: lines `name: text`; words may hold words.
      more: words that replace those of the same name.
    """
    known = dict(line.split(": ", 1) for line in words.splitlines()) | more
    for _ in range(4):
        text = re.sub(r"{([\w.]+)}", lambda m: known.get(m[1], m[0]), text)
    return text
