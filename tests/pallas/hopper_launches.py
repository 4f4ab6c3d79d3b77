"""The launches of an executable, and the place of its pools: shared by tests."""

import re

import hopper_models as models


SLACK = 5  # launches, more or less than stated


def split(report) -> tuple[list, list[list]]:
    """Returns the thunks outside of loops, and those inside of each outermost loop."""
    outside, inside, depth = [], [], None
    for thunk in report.thunks:
        if depth is not None and thunk.depth > depth:
            inside[-1].append(thunk)
            continue
        outside.append(thunk)
        depth = None
        if thunk.kind == "kWhile":
            depth = thunk.depth
            inside.append([])
    return outside, inside


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


def assert_launched_early(report) -> None:
    """Asserts that our kernels wait before they use memory, then release the next."""
    kernels = [each for each in report.kernels if each.is_ours]
    assert kernels
    for kernel in kernels:
        assert not kernel.ahead(), kernel.name


def assert_near(found: int, stated: int, what: str) -> None:
    """Asserts that the launches are as many as stated, up to `SLACK`."""
    print(f"{what}: {found} launches, {stated} are stated")
    assert abs(found - stated) <= SLACK, f"{what}: {found} launches, not {stated}"
