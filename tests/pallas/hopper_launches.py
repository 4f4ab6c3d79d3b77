"""The launches of an executable, and the place of its pools: shared by tests."""

import re

import hopper_models as models
import ptxas_log


KERNELS = {"kKernel", "kCustomKernel", "kCustomCall"}
SLACK = 5  # launches, more or less than stated
OF_A_LAYER = 7  # launches

DEPTH = {"qwen3-0.6b": 28, "qwen3-8b": 36}
ROUND = {"qwen3-0.6b": 1054, "qwen3-8b": 1110}
"""Launches of a round of gamma 4 with a draft of `models.DRAFT`."""

MOST_OF_A_ROUND = {"qwen3-0.6b": 1056, "qwen3-8b": 1112}


def nested(thunks) -> list:
    """Returns pairs `(thunk, nested thunks)`, the latter pairs as well."""
    found = []
    for i, thunk in enumerate(thunks):
        if thunk.depth == thunks[0].depth:
            rest = thunks[i + 1 :]
            ends = [n for n, each in enumerate(rest) if each.depth <= thunk.depth]
            found.append((thunk, nested(rest[: ends[0] if ends else None])))
    return found


def count(tree, turns) -> int:
    """Counts launches of `tree`; each loop in turn takes its number from `turns`."""
    total = 0
    for thunk, inside in tree:
        if thunk.kind == "kWhile":
            times = turns.pop(0)
            # The condition comes first: one kernel, evaluated once more than the body;
            # or no kernel, where the body evaluates it.
            has_condition = inside[0][0].kind in KERNELS
            total += (times + 1) * has_condition
            total += times * count(inside[has_condition:], turns)
        else:
            total += (thunk.kind in KERNELS) + count(inside, turns)
    return total


def launches(report, *turns) -> int:
    """Counts launches of an executable whose loops, in order, turn `turns` times."""
    turns = list(turns)
    total = count(nested(report.thunks), turns)
    assert not turns
    return total


def assert_in_place(report, *targets, copies=1, num_slots=1) -> None:
    """Asserts that pools are aliased and not copied, and that scratch memory is small.

    It may hold `copies` of the logits and 1 MiB more.
    """
    pools = sum(2 * m.config.num_layers * models.pool_bytes(m) for m in targets)
    assert report.alias_bytes >= num_slots * pools
    logits = max(4 * m.slab * m.config.vocab_size for m in targets)
    assert report.temp_bytes < copies * logits + 2**20
    num_pages = num_slots * models.CAPACITY // models.PAGE_SIZE
    for config in (each.config for each in targets):
        heads = rf"{config.num_kv_heads},{config.head_dim}"
        pool = rf"bf16\[{num_pages},{models.PAGE_SIZE},{heads}\]"
        assert re.search(pool, report.hlo)
        assert not re.search(rf"{pool}\S* (copy|fusion)", report.hlo)


def flat(tree):
    for thunk, inside in tree:
        yield thunk
        yield from flat(inside)


def assert_launched_early(report) -> None:
    """Asserts that our kernels wait before they use memory, then release the next."""
    kernels = [each for each in report.kernels if each.is_ours]
    assert kernels
    for kernel in kernels:
        assert not kernel.ahead(*ptxas_log.ACCESSES), kernel.name


def assert_near(found: int, stated: int, what: str) -> None:
    """Asserts that the launches are as many as stated, up to `SLACK`."""
    print(f"{what}: {found} launches, {stated} are stated")
    assert abs(found - stated) <= SLACK, f"{what}: {found} launches, not {stated}"


def assert_few_launches(report, name, depth, draft_depth) -> None:
    """Asserts the launches of a round of models as deep as they are released."""
    gamma = models.GAMMA_MAX
    without, once = (launches(report, times) for times in (0, 1))
    step = once - without + OF_A_LAYER * (DEPTH[models.DRAFT] - draft_depth)
    rest = without + OF_A_LAYER * (DEPTH[name] - depth)
    total = rest + gamma * step
    assert_near(total, ROUND[name], f"a round of {name}, {gamma} * {step}")
    assert total <= MOST_OF_A_ROUND[name]
