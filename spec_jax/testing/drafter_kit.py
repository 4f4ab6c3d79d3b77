"""The contract kit: whether a drafter keeps what `engine.protocols.Drafter` promises.

On the tiny target of `bench` or on another one. Each clause can be called alone.
"""

import copy
import functools
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import tree
from spec_jax.drafters import each
from spec_jax.engine import checks, protocols, requests as requests_lib, rows
from spec_jax.testing import bench as bench_lib, compare, one_slot


Bench = bench_lib.Bench

INTERVAL_S = 10.0
"""Seconds between two lines of progress."""


def check_drafter(
    drafter: protocols.Drafter, params: Any, bench: Bench | None = None
) -> tuple[str, ...]:
    """Raises `AssertionError` unless the drafter keeps all of `protocols.Drafter`.

    The message begins with the clause that is broken. The check takes about a minute,
    and prints its progress to standard error.

    Args:
      drafter: of one sequence, or with `for_slots`.
      params: the drafter's.
      bench: `bench.tiny` where it is None. A drafter whose parameters know a text or a
        vocabulary needs one of its own.

    Returns:
      The names of the clauses that were checked.

    Raises:
      ValueError: a drafter that does not fit the target, see `checks.check_pair`.
    """
    bench = bench or bench_lib.tiny(drafter.gamma_max)
    checks.check_pair(rows.SlotRows(model=bench.target, num_slots=1), drafter)
    said_s = time.monotonic()
    for number, check in enumerate(CLAUSES.values(), 1):
        check(drafter, params, bench)
        if time.monotonic() - said_s >= INTERVAL_S:
            said_s = time.monotonic()
            done = f"{number} of {len(CLAUSES)} clauses"
            print(f"check_drafter: {done}", file=sys.stderr, flush=True)
    return tuple(CLAUSES)


def fail_if(is_broken: bool, clause: str, why: str) -> None:
    """Raises `AssertionError` that names the clause, if it is broken."""
    if is_broken:
        raise AssertionError(f"{clause}: {why}")


def shapes_of(tree) -> Any:
    """Returns shape, dtype and weakness of each leaf, and the structure."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda x: x, tree))
    return [(x.shape, x.dtype.name, x.weak_type) for x in leaves], structure


def check_static(drafter: protocols.Drafter, params: Any, bench: Bench) -> None:
    """Checks that it is hashable; memory and proposal keep their shapes and dtypes."""
    clause = "static shapes"
    try:
        hash(drafter)
    except TypeError as error:
        raise AssertionError(
            f"{clause}: the drafter is not hashable: {error}"
        ) from None
    one = one_slot.OneSlot(drafter=drafter, params=params, bench=bench)
    fresh = one.init()
    for leaf in jax.tree.leaves(fresh):
        is_array = isinstance(leaf, jax.Array)
        fail_if(not is_array, clause, f"the memory holds {leaf!r}, not an array")
    expected = shapes_of(fresh)
    gamma_max, number = drafter.gamma_max, jax.ShapeDtypeStruct((), jnp.int32)
    tokens = jax.ShapeDtypeStruct((bench.capacity + 1,), jnp.int32)
    for prompt in bench.prompts:
        memory = one.begin(prompt)
        proposed, proposal = jax.eval_shape(
            one.propose, params, memory, tokens, number, number
        )
        handed = one.committed(one.table(prompt))
        committed = jax.eval_shape(one.commit, params, memory, number, handed)
        memories = {"prefill": memory, "propose": proposed, "commit": committed}
        for name, made in memories.items():
            shapes = shapes_of(made)
            why = f"{name} makes a memory of {shapes} from one of {expected}"
            fail_if(shapes != expected, clause, why)
        drafts, count = proposal.tokens, proposal.num_drafted
        is_right = (drafts.shape, count.shape) == ((gamma_max,), ())
        is_right &= drafts.dtype == count.dtype == jnp.int32
        why = f"{proposal} is not int32 tokens [{gamma_max}] and an int32 number"
        fail_if(not is_right, clause, why)
        _check_parents(drafter, proposal)
        if proposal.probs is not None:
            probs, rows = proposal.probs, (gamma_max, bench.target.config.vocab_size)
            is_right = probs.shape == rows and probs.dtype == jnp.float32
            why = f"probs {probs} are not float32 {list(rows)}"
            fail_if(not is_right, clause, why)


def _check_parents(drafter: protocols.Drafter, proposal: Any) -> None:
    """Checks that a drafter names parents exactly if it says how deep its trees are."""
    clause, parents = "static shapes", proposal.parents
    known = protocols.complete(drafter)
    why = f"depth_max={known.depth_max} and parents {parents}"
    fail_if((parents is None) == protocols.is_tree(drafter), clause, why)
    if parents is not None:
        is_right = parents.shape == (drafter.gamma_max,) and parents.dtype == jnp.int32
        why = f"parents {parents} are not int32 [{drafter.gamma_max}]"
        fail_if(not is_right, clause, why)


def check_pure(drafter: protocols.Drafter, params: Any, bench: Bench) -> None:
    """Checks that only arguments matter, and nothing calls back to the host."""
    one = one_slot.OneSlot(drafter=drafter, params=params, bench=bench)
    prompt, number = bench.prompts[0], jnp.int32(1)
    memory, tokens = one.begin(prompt), one.buffer(prompt)
    handed = one.committed(one.table(prompt))
    check_programs(
        propose=(one.propose, params, memory, tokens, number, number),
        commit=(one.commit, params, memory, number, handed),
    )


def check_programs(**traced: tuple[Any, ...]) -> None:
    """Checks that functions, given with arguments, trace alike and without the host."""
    for name, (function, *arguments) in traced.items():
        # A new function each time, as a trace of the same one would be found again.
        first, second = (
            jax.make_jaxpr(functools.partial(function))(*arguments) for _ in range(2)
        )
        call = re.search(r"\b\w*callback\b", str(first.jaxpr))
        why = f"{name} calls the host by {call and call[0]}"
        fail_if(call is not None, "no host", why)
        why = f"two traces of {name} with the same arguments differ"
        fail_if(not _same_program(first, second), "pure functions", why)


def _same_program(first: Any, second: Any) -> bool:
    """Returns whether two traces have the same operations and the same constants."""
    # Addresses of functions are printed too, and mean nothing.
    texts = [re.sub("0x[0-9a-f]+", "", str(x.jaxpr)) for x in (first, second)]
    try:
        compare.assert_same_bits(first.consts, second.consts)
    except AssertionError:
        return False
    return texts[0] == texts[1]


def _drafts(proposal: protocols.Proposal) -> list[int]:
    return np.asarray(proposal.tokens)[: int(proposal.num_drafted)].tolist()


def check_proposals(drafter: protocols.Drafter, params: Any, bench: Bench) -> None:
    """Checks for at most gamma tokens, of the vocabulary, from committed text alone.

    If there are probabilities, checks that the tokens can have been drawn with them.
    """
    vocab_size = bench.target.config.vocab_size
    one = one_slot.OneSlot(drafter=drafter, params=params, bench=bench)
    for prompt in bench.prompts:
        text = bench.plain(prompt)
        text = text[: (len(prompt) + len(text)) // 2]
        after_text = functools.partial(one.after, one.begin(text), text)
        for gamma in range(drafter.gamma_max + 1):
            _, proposal = after_text(gamma=gamma)
            num_drafted, drafts = int(proposal.num_drafted), _drafts(proposal)
            why = f"{num_drafted} tokens for {gamma=}"
            fail_if(not 0 <= num_drafted <= gamma, "number drafted", why)
            is_known = all(0 <= token < vocab_size for token in drafts)
            why = f"{drafts} are not all in [0, {vocab_size})"
            fail_if(not is_known, "vocabulary", why)
            _check_probs(proposal)
            _check_tree(drafter, proposal)
            # The text again: a drafter that looks tokens up finds these, too.
            for behind in ([1], [vocab_size - 1], text):
                changed = _drafts(after_text(gamma=gamma, behind=behind)[1])
                what = behind[0] if len(behind) == 1 else "the text again"
                why = f"{what} behind the text turns {drafts} into {changed}"
                fail_if(changed != drafts, "reads past the end", why)


def _check_tree(drafter: protocols.Drafter, proposal: protocols.Proposal) -> None:
    """Checks that every draft has a parent before it, and none is too deep."""
    if proposal.parents is None:
        return
    parents = np.asarray(proposal.parents)[: int(proposal.num_drafted)]
    try:
        tree.check(np.append(0, parents), depth_max=protocols.depth_max(drafter))
    except ValueError as error:
        raise AssertionError(f"tree: {error}") from None


def _check_probs(proposal: protocols.Proposal) -> None:
    """Checks rows that a draft can be drawn from: probabilities that sum to one."""
    if proposal.probs is None:
        return
    for row, token in enumerate(_drafts(proposal)):
        probs = np.asarray(proposal.probs[row], np.float64)
        name, total = f"row {row} of the probabilities", probs.sum()
        wrong = probs[~(probs >= 0)]
        why = f"{name} holds {wrong[0] if wrong.size else None}"
        fail_if(wrong.size > 0, "probabilities", why)
        why = f"{name} sums to {total}, not 1"
        fail_if(not abs(total - 1) <= 1e-3, "probabilities", why)
        why = f"{name} gives the draft {token}, which was drawn, {probs[token]}"
        fail_if(not probs[token] > 0, "probabilities", why)


def check_memory(drafter: protocols.Drafter, params: Any, bench: Bench) -> None:
    """Checks that the memory is only its leaves, and all of them can be donated."""
    clause, number = "memory round trip", jnp.int32(1)
    one = one_slot.OneSlot(drafter=drafter, params=params, bench=bench)
    for prompt in bench.prompts:
        memory = one.begin(prompt)
        held = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(memory) if x.size]
        is_shared = len(set(held)) < len(held)
        why = "two leaves share a buffer, and could not both be donated"
        fail_if(is_shared, clause, why)
        # Closed over, a memory does not go through its leaves.
        whole, copied = (
            jax.make_jaxpr(functools.partial(one.propose, params, held))(
                one.buffer(prompt), number, number
            )
            for held in (memory, jax.tree.map(jnp.array, memory))
        )
        why = "a memory that is put together from its leaves drafts otherwise"
        fail_if(not _same_program(whole, copied), clause, why)


def check_truncation(drafter: protocols.Drafter, params: Any, bench: Bench) -> None:
    """Checks that a commit leaves no trace of any text but what was committed, besides
    what a drafter learns of rounds (`Drafter.taught`)."""
    one = one_slot.OneSlot(drafter=drafter, params=params, bench=bench)
    commit = jax.jit(one.commit)
    for prompt in bench.prompts:
        text, length = bench.plain(prompt), len(prompt)
        memory, table = one.begin(prompt), one.table(text)
        for number in range(len(text)):
            fresh = one.taught(one.begin(text[:length]), memory)
            (memory, found), (_, right) = (
                one.after(held, text[:length]) for held in (memory, fresh)
            )
            drafts, expected = _drafts(found), _drafts(right)
            why = f"{drafts} after {number} rounds, {expected} from a fresh memory"
            fail_if(drafts != expected, "truncation", why)
            agrees = [d == t for d, t in zip(drafts, text[length:], strict=False)]
            accepted = [*agrees, False].index(False)
            # Now and then fewer are committed than the target would have kept.
            before = length
            length += 1 + min(accepted, number % (drafter.gamma_max + 1))
            if length >= len(text):
                break
            handed = one.committed(table, before - 1, length - 1)
            memory = commit(params, memory, jnp.int32(length), handed)


def check_features(drafter: protocols.Drafter, params: Any, bench: Bench) -> None:
    """Checks that drafts depend on features of committed rows alone, each in its place.

    Features of one position early or late, or of rejected rows, must make a difference
    somewhere: otherwise a drafter reads no features, or others than it is handed.
    """
    if not protocols.taps_of(drafter):
        return
    one = one_slot.OneSlot(drafter=drafter, params=params, bench=bench)
    texts = [bench.plain(prompt) for prompt in bench.prompts]
    tables = [np.asarray(one.table(text)) for text in texts]
    size = bench.target.config.vocab_size
    others = [[(token + 1) % size for token in text] for text in texts]
    drafts = functools.partial(_drafts_by_features, one, texts)
    right = drafts(tables)
    why = "what is after the features of committed rows changes drafts"
    fail_if(drafts(tables, rest=np.nan) != right, "features", why)
    fresh = drafts(tables, anew=True)
    why = f"{right} in rounds, {fresh} from fresh memories"
    fail_if(right != fresh, "features", why)
    wrong = {
        "one position early": [np.roll(table, -1, axis=0) for table in tables],
        "one position late": [np.roll(table, 1, axis=0) for table in tables],
        "of rejected rows": [one.table(text) for text in others],
    }
    for name, moved in wrong.items():
        why = f"features {name} change no draft"
        fail_if(drafts(moved) == right, "features", why)


def _drafts_by_features(one, texts, tables, *, rest=0, anew=False):
    """Returns the drafts of rounds of different lengths, with features from `tables`:
    by prefill `anew` in each round, or by commits."""
    commit, found = jax.jit(one.commit), []
    for prompt, text, table in zip(one.bench.prompts, texts, tables, strict=True):
        memory, length, number = one.begin(prompt, table), len(prompt), 0
        while length < len(text):
            memory, proposal = one.after(memory, text[:length])
            found.append(_drafts(proposal))
            before, number = length, number + 1
            length += 1 + number % (1 + protocols.depth_max(one.drafter))
            if length >= len(text):
                break
            if anew:
                memory = one.begin(text[:length], table)
                continue
            handed = one.committed(table, before - 1, length - 1, rest)
            memory = commit(one.params, memory, jnp.int32(length), handed)
    return found


def check_lossless(drafter: protocols.Drafter, params: Any, bench: Bench) -> None:
    """Checks that rounds commit the tokens of decoding, all by one executable.

    Every prompt with every gamma; limits of one and two tokens, a stop token, and a
    cache that is full before the limit.
    """
    traces: list = []
    known = None
    for prompt in bench.prompts:
        text = bench.plain(prompt)
        middle = text[(len(prompt) + len(text)) // 2]
        cases: list[tuple[int, int, tuple[int, ...]]] = [
            (gamma, bench.max_tokens, ()) for gamma in range(drafter.gamma_max + 1)
        ]
        cases += [(drafter.gamma_max, few, ()) for few in (1, 2, bench.capacity)]
        cases += [(drafter.gamma_max, bench.max_tokens, (middle,))]
        for gamma, max_tokens, stop_ids in cases:
            ends: dict[str, Any] = {"max_tokens": max_tokens, "stop_ids": stop_ids}
            # A copy is the same drafter, and so the same executable.
            slots = each.lift(copy.deepcopy(drafter), 1)
            watched = one_slot.Watched(inner=slots, traces=traces)
            request = requests_lib.Request(prompt=list(prompt), gamma=gamma, **ends)
            written = _written("lossless", bench, watched, params, [request])[0]
            expected = bench.plain(prompt, **ends)
            why = f"{written} with {gamma=}, {ends}, decoding {expected}"
            fail_if(written != expected, "lossless", why)
            known = known or len(traces)
            why = f"traced again for {gamma=}, {ends}, a prompt of {len(prompt)} tokens"
            fail_if(len(traces) > known, "no retrace", why)


def check_slots(drafter: protocols.Drafter, params: Any, bench: Bench) -> None:
    """Checks that a sequence in a slot is what it is alone: beside others, with its own
    gamma and stop token, and in a slot that another sequence left."""
    requests, expected = [], []
    for number, prompt in enumerate(bench.prompts * 2):
        text = bench.plain(prompt)
        # In the second turn some end early, by a stop token of their own.
        stop_ids = (
            (text[-min(3, len(text))],)
            if number % 2 and number >= len(bench.prompts)
            else ()
        )
        gamma = number % (drafter.gamma_max + 1)
        ends: dict[str, Any] = {"max_tokens": max(1, bench.max_tokens - number)}
        ends["stop_ids"] = stop_ids
        request = requests_lib.Request(prompt=list(prompt), gamma=gamma, **ends)
        requests.append(request)
        expected.append(bench.plain(prompt, **ends))
    num_slots = max(2, len(bench.prompts) - 1)
    slots = each.lift(drafter, num_slots)
    written = _written("slots", bench, slots, params, requests)
    for number, (found, right) in enumerate(zip(written, expected, strict=True)):
        why = f"request {number} in {num_slots} slots: {found}, decoding {right}"
        fail_if(found != right, "slots", why)


def _written(clause, bench, slots, params, requests) -> list[list[int]]:
    """Returns the tokens that rounds write for requests, or fails `clause`."""
    try:
        return bench.rounds(slots, params, requests)
    except (MemoryError, RuntimeError) as error:
        raise AssertionError(f"{clause}: {error}, {requests}") from None


CLAUSES: dict[str, Callable[[protocols.Drafter, Any, Bench], None]] = {
    "static": check_static,
    "pure": check_pure,
    "proposals": check_proposals,
    "memory": check_memory,
    "truncation": check_truncation,
    "features": check_features,
    "lossless": check_lossless,
    "slots": check_slots,
}
"""The checks of `check_drafter`, cheapest first."""
