"""Thousands of operations on a cache of any kind, and on a model of it in Python lists;
mutants (`PAGES`) are negative controls.

After every operation `check_integrity` finds no page lost, and none held by two slots
unless the cache counts both as its owners. The tables and the bytes of each slot are
equal to the model's, bit for bit, and no other byte of the pool has changed. Bytes that
belong to no token are NaN.
"""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import page_tables
import pytest

from spec_jax import testing
from spec_jax.paging import allocator, cache


LAYERS, SLOTS, PAGES, PAGE_SIZE, WIDTH, HEADS, HEAD_DIM = 2, 3, 9, 4, 5, 1, 2
CAPACITY = WIDTH * PAGE_SIZE
SIZES = {
    "num_layers": LAYERS, "num_slots": SLOTS, "page_size": PAGE_SIZE,
    "pages_per_slot": WIDTH, "num_kv_heads": HEADS, "head_dim": HEAD_DIM,
    "dtype": "float32",
}  # fmt: skip
ROWS = 7  # rows of one slot's append, at the most
ROWS_SHAPE = (LAYERS, SLOTS * ROWS, HEADS, HEAD_DIM)
LARGEST = 2**31 - 1


def append(kv, numbers, asked, k, v, *, impl="xla"):
    """Makes room for rows, and writes them, as a model does. `k` and `v`: [L, R, K, H].

    Args:
      numbers: how many rows of each slot, and by how much they begin too late `[S, 2]`.
    """
    counts = jnp.where(asked, numbers[:, 0], 0)
    up_to = kv.length + counts + numbers[:, 1]
    how = {"num_rows": SLOTS * ROWS, "impl": impl}
    kv, counts, slots, positions = allocator.append_each(kv, up_to, counts, **how)
    where = {"slots": slots, "positions": positions, "num_active": counts.sum()}
    for layer in range(LAYERS):
        kv = cache.write(kv, layer, k=k[layer], v=v[layer], **where)
    return kv


def share(kv, slot, source, length):
    """Calls `allocator.share`, but takes the slot that changes as the first one."""
    return allocator.share(kv, source, slot, length)


def each(operation):
    return lambda kv, numbers, asked, **how: operation(kv, numbers, asked=asked, **how)


OF_SEVERAL = {
    "append": append,
    "reserve_each": each(allocator.reserve_each),
    "extend_each": each(allocator.extend_each),
    "truncate": each(allocator.truncate_each),
}
"""Operations on all slots at once: their numbers, `[S]`, and which slots are asked."""
OF_ONE = {"reserve": allocator.reserve, "extend": allocator.extend, "share": share}


@functools.cache
def compiled(impl: str) -> dict:
    """Returns all operations, compiled."""
    with_kernels = {
        name: functools.partial(OF_SEVERAL[name], impl=impl)
        for name in ("append", "truncate")
    }
    every = OF_SEVERAL | OF_ONE | with_kernels
    return {name: jax.jit(function) for name, function in every.items()}


class Model:
    """The expected state of the cache: each slot's token bytes and page names."""

    def __init__(self, *, num_pages: int, least: int):
        """Makes an empty model; a slot keeps at least `least` pages, and has one."""
        self.num_pages, self.least = num_pages, least
        self.names = itertools.count()
        # [L, 2, K, H] per token
        self.tokens: dict[int, list[np.ndarray]] = {slot: [] for slot in range(SLOTS)}
        self.pages: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
        for slot in range(SLOTS):
            self._take(slot, max(least, 1))
        self.out_of_pages: set[int] = set()

    @property
    def num_free(self) -> int:
        return self.num_pages - len(set().union(*self.pages.values()))

    def owned(self, slot) -> int:
        return len(self.pages.get(slot, ()))

    def _take(self, slot, count):
        self.pages[slot] += itertools.islice(self.names, count)

    def _is_shared(self, slot, page) -> bool:
        return any(page in held for n, held in self.pages.items() if n != slot)

    def reserve(self, slot, up_to):
        if slot not in self.tokens or up_to < 0:
            return "refused"
        missing = max(-(-up_to // PAGE_SIZE) - self.owned(slot), 0)
        if self._is_out_of_pages(slot, missing > self.num_free or up_to > CAPACITY):
            return "out_of_pages"
        self._take(slot, missing)
        return "done"

    def extend(self, slot, new_len):
        if slot not in self.tokens:
            return "refused"
        tokens = self.tokens[slot]
        if not len(tokens) <= new_len <= self.owned(slot) * PAGE_SIZE:
            return "refused"
        unwritten = np.full((LAYERS, 2, HEADS, HEAD_DIM), np.nan, np.float32)
        tokens.extend([unwritten] * (new_len - len(tokens)))
        return "done"

    def truncate(self, slot, new_len):
        if slot not in self.tokens or not 0 <= new_len <= len(self.tokens[slot]):
            return "refused"
        if new_len % PAGE_SIZE:
            if self._is_shared(slot, self.pages[slot][new_len // PAGE_SIZE]):
                return "refused"
        del self.tokens[slot][new_len:]
        del self.pages[slot][max(-(-new_len // PAGE_SIZE), self.least) :]
        return "done"

    def share(self, slot, source, length):
        if slot not in self.tokens or source not in self.tokens or slot == source:
            return "refused"
        if self.tokens[slot] or not 0 <= length <= len(self.tokens[source]):
            return "refused"
        full, is_cut = length // PAGE_SIZE, length % PAGE_SIZE > 0
        free = self.num_free + self.owned(slot)
        if self._is_out_of_pages(slot, is_cut and free < 1):
            return "out_of_pages"
        self.tokens[slot] = self.tokens[source][:length]
        self.pages[slot] = self.pages[source][:full]
        self._take(slot, int(is_cut))
        return "done"

    def append(self, slot, count, late, k, v):
        start = len(self.tokens[slot]) + late
        outcome = self.reserve(slot, start + count) if count else "nothing"
        if outcome == "done":
            self.extend(slot, start)
            self.tokens[slot].extend(
                np.stack([k, v], axis=1).swapaxes(0, 2).swapaxes(1, 2)
            )
        return outcome

    def _is_out_of_pages(self, slot, out_of_pages):
        (self.out_of_pages.add if out_of_pages else self.out_of_pages.discard)(slot)
        return out_of_pages


RELATIVE = {"rollback": "truncate", "declare": "extend", "fork": "share"}
"""Requests whose numbers are relative to a slot's length."""


class Walk:
    """One walk. It holds the cache as NumPy arrays, so that all of it is compared."""

    def __init__(self, operations, kind="paged"):
        self.is_paged, shares = kind != "static", kind == "shared"
        if self.is_paged:
            kv = cache.init(num_pages=PAGES, shares=shares, **SIZES)
            kv = page_tables.shuffled(kv, np.random.default_rng(0))
            self.model = Model(num_pages=PAGES, least=int(not shares))
        else:  # A slot has all its pages for good.
            kv = cache.init(**SIZES)
            self.model = Model(num_pages=SLOTS * WIDTH, least=WIDTH)
        self.kv = jax.tree.map(np.asarray, kv)
        self.operations = operations
        self.rng = np.random.default_rng(1)
        self._poison()

    def step(self, name, asked) -> list[str]:
        """Runs one operation, compares everything and returns the outcome of each slot.

        Args:
          asked: numbers of the slots that are asked, in order; of one slot, which need
            not exist, for an operation of `OF_ONE`.
        """
        asked = {slot: self._absolute(name, slot, *x) for slot, x in asked.items()}
        name = RELATIVE.get(name, name)
        before, rows, outcomes, first = self.kv, (), {}, 0
        if name == "append":
            rows = tuple(self.rng.standard_normal((2, *ROWS_SHAPE), np.float32))
        if name in OF_SEVERAL:
            none = (0,) * len(next(iter(asked.values())))
            numbers = np.array([asked.get(n, none) for n in range(SLOTS)], np.int32)
            is_asked = np.isin(np.arange(SLOTS), list(asked))
            given = [numbers if rows else numbers[:, 0], is_asked]
        else:
            given = [np.int32(x) for slot in asked for x in (slot, *asked[slot])]
        after = self.operations[name](before, *given, *rows)
        self.kv = after = jax.tree.map(np.asarray, after)
        is_refused = dict.fromkeys(range(SLOTS), False)
        for slot, own in asked.items():
            more = tuple(x[:, first : first + own[0]] for x in rows)
            expected = getattr(self.model, name.removesuffix("_each"))
            outcomes[slot] = outcome = expected(slot, *own, *more)
            first += own[0] * bool(rows and outcome == "done")
            flagged = outcome == "refused" or bool(rows and all(own))
            for each in [slot] if slot in is_refused else is_refused:
                is_refused[each] |= flagged

        assert self._tables() == self._expected_tables(is_refused)
        page_tables.check_integrity(after)
        if "done" not in outcomes.values():
            flags = {"refused": before.refused, "out_of_pages": before.out_of_pages}
            testing.assert_same_bits(after.replace(**flags), before, what=name)
        is_copied = name == "share" and "done" in outcomes.values()
        self._check_pool(before, slot, own if is_copied else None)
        if name in ("truncate", "share"):
            self._poison()
        # The flag `refused` stays until it is cleared: the next step starts anew.
        self.kv = self.kv.replace(refused=before.refused)
        return [*outcomes.values()]

    def _absolute(self, name, slot, *numbers):
        """Returns the numbers of an operation that is given relative ones."""
        start = len(self.model.tokens.get(slot, ()))
        if name == "rollback":
            return (start - numbers[0],)
        if name == "declare":
            return (start + numbers[0],)
        if name == "fork":
            source, length = numbers
            return source, min(length, len(self.model.tokens.get(source, ())))
        if name == "append" and numbers[1] == LARGEST:  # Rows end at this position.
            return numbers[0], LARGEST - numbers[0] - start
        return numbers

    def _tables(self):
        kv = self.kv
        tables = kv.length, kv.refused, kv.out_of_pages
        pages = (kv.num_owned.tolist(), int(kv.num_free)) if self.is_paged else ()
        return *(table.tolist() for table in tables), *pages

    def _expected_tables(self, is_refused):
        model, slots = self.model, range(SLOTS)
        return (
            [len(model.tokens.get(each, ())) for each in slots],
            [*is_refused.values()],
            [each in model.out_of_pages for each in slots],
            *([[model.owned(n) for n in slots], model.num_free] * self.is_paged),
        )

    def _check_pool(self, before, slot, shared):
        """Checks that the pool changed only in tokens of the model, and in a copied
        page: the last of `shared`, a source and a length that cuts this page."""
        expected = pool_of(before)
        if shared and shared[1] % PAGE_SIZE:
            source, place = shared[0], shared[1] // PAGE_SIZE
            page = self.kv.page_table[slot, place]
            expected[:, :, page] = expected[:, :, before.page_table[source, place]]
        testing.assert_same_bits(pool_of(self.kv), self._with_tokens(expected))

    def _with_tokens(self, pool):
        """Puts the model's tokens into a pool, where the page tables have them."""
        for slot, tokens in self.model.tokens.items():
            if tokens:
                at = np.arange(len(tokens))
                page = self.kv.page_table[slot, at // PAGE_SIZE]
                pool[:, :, page, at % PAGE_SIZE] = np.stack(tokens, axis=2)
        return pool

    def _poison(self):
        """Writes NaN to all bytes that belong to no token."""
        pool = self._with_tokens(np.full_like(pool_of(self.kv), np.nan))
        k, v = pool.swapaxes(0, 1)
        self.kv = self.kv.replace(k=tuple(k), v=tuple(v))


def pool_of(kv) -> np.ndarray:
    """Returns all keys and values of the pool: [L, 2, P, C, K, H]."""
    return np.stack([kv.k, kv.v], axis=1)


NUM_WALKS, WALK_LENGTH = 40, 60
LATE = {5: 1, 9: LARGEST}
REQUESTS = {
    "append": (13, lambda n: (n % (ROWS + 1), LATE.get(n, 0))),
    "rollback": (4, lambda n: (n % 6 - 1,)),
    "declare": (2, lambda n: (n % 6 - 1,)),
    "truncate": (3, lambda n: (n - 2,)),
    "reserve": (2, lambda n: (n - 1 if n < 23 else LARGEST,)),
    "reserve_each": (2, lambda n: (n - 3,)),
    "extend_each": (2, lambda n: (n - 1,)),
    "share": (2, lambda n: (n % (SLOTS + 1), n)),
    "fork": (5, lambda n: (n % SLOTS, n // 2)),
}
"""How often each is made, and its numbers, made of one in `0 .. 23`: some are wrong."""


def walk_of(rng, kind):
    """Yields the requests of a walk, mostly valid; some slots do not exist."""
    names = [name for name, (often, _) in REQUESTS.items() for _ in range(often)]
    if kind != "shared":
        names = [name for name in names if name not in ("share", "fork")]
    slots = [*range(SLOTS)] * 6 + [-1, SLOTS]
    for name in rng.choice(names, WALK_LENGTH).tolist():
        asked = [int(rng.choice(slots))]
        if RELATIVE.get(name, name) in OF_SEVERAL:
            asked = np.flatnonzero(rng.random(SLOTS) < 0.5).tolist() or [0]
        if name == "fork":  # Only an empty slot can.
            yield "truncate", {asked[0] % SLOTS: (0,)}
        yield name, {slot: REQUESTS[name][1](int(rng.integers(24))) for slot in asked}
    if kind == "shared":
        yield "truncate", dict.fromkeys(range(SLOTS), (0,))
        yield from [("append", {0: (ROWS, 0)})] * 2
        yield "reserve_each", {0: (CAPACITY,), 1: (CAPACITY - PAGE_SIZE,)}
        # No page is free for a copy, which full pages do not need.
        yield from [("share", {2: (0, 6)}), ("share", {2: (0, 8)})]


def run(operations, kind, num_walks=NUM_WALKS) -> collections.Counter:
    """Returns how often each operation was done, refused and out of pages."""
    rng, outcomes = np.random.default_rng(2), collections.Counter()
    for _ in range(num_walks):
        walk = Walk(operations, kind)
        for name, asked in walk_of(rng, kind):
            outcomes.update((name, outcome) for outcome in walk.step(name, asked))
    return outcomes


@pytest.mark.parametrize(
    ("kind", "impl"),
    [
        ("paged", "xla"), ("paged", "interpret"), ("static", "xla"),
        ("static", "interpret"), ("shared", "xla"),
    ],
)  # fmt: skip
def test_random_walks(kind, impl):
    """Fails if any sequence of operations loses a page, or a token's bits."""
    outcomes = run(compiled(impl), kind)
    # The walks are not vacuous: every operation was done and refused, often.
    for name in REQUESTS:
        if name not in ("share", "fork", "append"):
            assert outcomes[name, "done"] >= 5, name
            assert outcomes[name, "refused"] >= 5, name
    assert outcomes["reserve", "out_of_pages"] >= 5
    if kind != "static":
        assert outcomes["append", "out_of_pages"] >= 20
    if kind == "shared":
        assert outcomes["fork", "done"] >= 20 and outcomes["share", "refused"] >= 10
        assert outcomes["share", "out_of_pages"] >= NUM_WALKS
        assert outcomes["share", "done"] >= NUM_WALKS


def test_a_cache_that_counts_no_owners_shares_no_page():
    with pytest.raises(ValueError, match="counts no owners: make it with shares=True"):
        allocator.share(Walk({}).kv, 0, 1, 4)


def test_pages_return_in_the_order_of_a_stack():
    """Fails if rollback and re-reservation wander through the pool: the page that was
    freed last must be the next one handed out."""
    kv = jax.tree.map(jnp.asarray, Walk({}).kv)
    state = allocator.reserve(kv, 0, 9)
    kv = page_tables.truncate(allocator.extend(state, 0, 9), 0, 1)
    kv = allocator.reserve(kv, 0, 9)
    np.testing.assert_array_equal(kv.page_table, state.page_table)
    np.testing.assert_array_equal(kv.free_pages, state.free_pages)
