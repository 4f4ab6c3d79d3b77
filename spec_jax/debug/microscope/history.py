"""A history: the keys and values that a path's own windows left behind.

A path without the row contract starts a window from what its earlier windows wrote,
and that is not what decoding would have written. Here it is written again.
"""

import itertools
from collections.abc import Sequence

from spec_jax.debug.microscope import record
from spec_jax.model import params as params_lib
from spec_jax.paging import allocator, cache


def write(
    path: record.Path,
    params: params_lib.Params,
    kv: cache.PagedKV,
    *,
    tokens: Sequence[int],
    starts: Sequence[int],
) -> cache.PagedKV:
    """Runs a committed text, window by window, as the rounds that committed it did.

    The keys and values of a row depend on its own prefix and on the height of its
    window, not on the drafts behind it: the tokens that were committed stand for those
    and for drafts that were rejected, whose rows are left dead here. So nothing has to
    be truncated, and `path.window_rows` must be that of the rounds.

    Args:
      kv: holds the positions `[0, starts[0])`.
      tokens: the text, `[0, starts[-1])` or more of it.
      starts: positions of the windows' pending tokens, and of the one to come.

    Raises:
      ValueError: a cache of another length, or a window that does not fit.
      MemoryError: a cache without room for the text.
    """
    for start, stop in itertools.pairwise(starts):
        for where in record.calls(path, tokens[start:stop], start):
            kv, _ = record.run(path, params, kv, **where)
    allocator.check(kv)
    return kv
