"""Stop texts: where a text that grows token by token comes to its end.

Functions here know bytes, and no tokenizer or model. A stop text may begin and end
inside tokens, which need not be whole characters. The stop text that is complete first
ends the text; where several are complete at one byte, the longest one. So the end is a
matter of the text alone, however it is cut into tokens. No character is cut, since
UTF-8 has no character's bytes inside others.
"""

import collections
from collections.abc import Callable, Iterable, Sequence


class Search:
    """Looks for stop texts in a text that grows.

    Attributes:
      is_found: whether a stop text is complete.
      open: the end of the text that is not settled: the longest one that begins a stop
        text; where one is complete, all from its first byte on.
    """

    def __init__(self, stops: Sequence[bytes]):
        self._stops = stops
        self._longest = max(map(len, stops), default=1)
        self.is_found, self.open = False, b""

    def push(self, raw: bytes) -> None:
        """Adds the bytes of a token."""
        self.open += raw
        if self.is_found:
            return
        # Bytes that were settled before begin no stop text, and so none is missed.
        places = [(self.open.find(stop), len(stop)) for stop in self._stops]
        ends = [(at + size, at) for at, size in places if at >= 0]
        if ends:
            self.is_found, self.open = True, self.open[min(ends)[1] :]
        else:
            self.open = self._beginning(self.open)

    def _beginning(self, text: bytes) -> bytes:
        """Returns the longest end of a text that begins a stop text."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                return text[at:]
        return b""


class Ends:
    """Finds the last token of each text of a run, while the texts grow.

    Args:
      bytes_of: returns the bytes of a token.
      stops: stop texts.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], stops: Sequence[bytes]):
        self._bytes_of = bytes_of
        self._searches: dict[int, Search] = collections.defaultdict(
            lambda: Search(stops)
        )
        self._num_seen: collections.Counter[int] = collections.Counter()

    def __call__(self, number: int, tokens: Sequence[int]) -> int | None:
        """Returns how many of a text's tokens stay; None: no stop text is complete.

        The token that completes a stop text stays.

        Args:
          number: of the text.
          tokens: all of the text so far.
        """
        search = self._searches[number]
        for count in range(self._num_seen[number], len(tokens)):
            search.push(self._bytes_of(tokens[count]))
            if search.is_found:
                return count + 1
        self._num_seen[number] = len(tokens)
        return None


def before_stop(raws: Iterable[bytes], stops: Sequence[bytes]) -> list[bytes]:
    """Returns the bytes of each token that stand before the first stop text."""
    raws, search = list(raws), Search(stops)
    for raw in raws:
        search.push(raw)
    rest = sum(map(len, raws)) - (len(search.open) if search.is_found else 0)
    kept = []
    for raw in raws:
        kept.append(raw[: max(rest, 0)])
        rest -= len(raw)
    return kept


def encode(text: str) -> bytes:
    """Returns the bytes of a stop text.

    Raises:
      ValueError: an empty text, or one that is no UTF-8.
    """
    if not text:
        raise ValueError("stop has an empty text, which every text has: leave it out")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"stop text {text!r} has half a character, which no text has: leave it out"
        ) from None
