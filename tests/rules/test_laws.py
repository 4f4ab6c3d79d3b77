"""The exact laws of rules by uniforms over tiny vocabularies: of trees, and of chains
under a processor or a schedule. See `enumeration`.

Trees that may not be drawn go through the same sums. The rules are given what rounds
give them: rows that `processing.process_rows` made of a window's logits, along its
paths. The true law is computed by definition, in float64; drafts are drawn with the
processor or without.

No draft may be left out by a schedule because of its own token. The example is the
paper's: one slot, two drafts, survival 0.8 of the first; whether the second is worth
its row depends on the first one's token alone.
"""

import dataclasses
import itertools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processors import test_built_in
from slow_cases import slow

from spec_jax.engine import processing, protocols
from spec_jax.gamma import schedule as schedule_lib
from spec_jax.processors import built_in, processor as processor_lib
from spec_jax.rules import acceptance, multi_path, traversal, tree_acceptance


V = 3
SHAPES = {
    "chain": (0, 1),
    "two children": (0, 0),
    "2x2": (0, 0, 1, 1, 2, 2),
    "1-2-1": (0, 1, 1, 2),
    "mixed": (0, 0, 2, 1, 2),
    "2-1-1": (0, 0, 1, 2, 3, 4),
    "3-1": (0, 0, 0, 1, 2, 3),
}
BIASED = 1e-2


RULES = enumeration.OF_TREES
COMPILED = {
    "rejection": tree_acceptance.accept_tree,
    "block": traversal.accept_traversal,
    "multipath": multi_path.accept_multi_path,
}
COMPILED = {
    name: jax.jit(accept, static_argnames="depth_max")
    for name, accept in COMPILED.items()
}


def decide(rule, tokens, parents, draft, target, *, number=None, **how):
    """Returns what a rule keeps of one tree; more is wanted than any path has."""
    number = len(tokens) if number is None else number
    tokens, parents = (jnp.asarray(x, jnp.int32) for x in (tokens, parents))
    wanted = jnp.int32(9)
    return COMPILED[rule](
        tokens, parents, draft, target, jnp.int32(number), wanted, **how
    )


def make_case(rule, shape, rng, **kinds) -> enumeration.Case:
    """Returns a case whose siblings are drawn as the rule needs them."""
    kinds.setdefault("with_replacement", rule == "multipath")
    depth, parents = 0, SHAPES[shape]
    column = len(parents)
    while column:
        depth, column = depth + 1, parents[column - 1]
    rows = lambda n: rng.dirichlet(np.ones(V), size=n)
    target = enumeration.table(rows, V, depth + 1)
    draft = enumeration.table(rows, V, depth)
    return enumeration.honest(target, draft, parents, **kinds)


def bias(rule: str, case: enumeration.Case, *num_drafted, **how) -> float:
    return enumeration.bias(RULES[rule], case, *num_drafted, **how)


def mean_accepted(rule: str, case: enumeration.Case) -> float:
    """Returns the expected number of drafts that stay."""
    return enumeration.outcomes(RULES[rule], case).mean


LAWS = [
    *itertools.product(("rejection", "block"), ("2x2", "mixed", "certain")),
    ("multipath", "2-1-1"),
    *(slow(rule, "two children") for rule in ("rejection", "block")),
    *(slow("multipath", shape) for shape in ("2x2", "3-1")),
]


@pytest.mark.parametrize("rule, shape", LAWS)
def test_the_output_has_the_targets_distribution(rule, shape, rng):
    is_certain = shape == "certain"
    shape = "mixed" if is_certain else shape
    case = make_case(rule, shape, rng, is_certain=is_certain)
    for wanted in (9, 1, 0):
        assert bias(rule, case, wanted=wanted) < enumeration.ROUNDING


def test_the_best_of_paths_need_not_be_the_best_to_verify(rng):
    """Checks `accept_multi_path`'s docstring: it keeps more than `accept_block` does of
    one path, but not where the draft is the target, and one path is kept whole."""
    gains = []
    for _ in range(4):
        case = make_case("multipath", "2x2", rng)
        alone = dataclasses.replace(case, parents=SHAPES["chain"])
        gains.append(mean_accepted("multipath", case) - mean_accepted("block", alone))
    assert min(gains) > BIASED
    same = enumeration.honest(
        case.target, case.target[:-1], case.parents, with_replacement=True
    )
    alone = dataclasses.replace(same, parents=SHAPES["chain"])
    assert mean_accepted("block", alone) == pytest.approx(2)
    assert mean_accepted("multipath", same) < 2 - BIASED
    assert bias("multipath", same) < enumeration.ROUNDING


@pytest.mark.parametrize(
    "shape, is_certain",
    [slow("two children", False), ("mixed", False), ("mixed", True)],
)
def test_whole_paths_keep_at_least_as_many(shape, is_certain, rng):
    """Fails if verifying whole paths keeps fewer drafts than token by token."""
    gains = []
    for _ in range(4):
        case = make_case("block", shape, rng, is_certain=is_certain)
        token_by_token = mean_accepted("rejection", case)
        gains.append(mean_accepted("block", case) - token_by_token)
    assert min(gains) > -enumeration.ROUNDING
    # The rules are the same where each path has one draft, or where drafts are certain:
    # then none is less likely in the draft's row than in the target's.
    assert (max(gains) > BIASED) == (shape == "mixed" and not is_certain)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("planted", ("other siblings", "drops"))
def test_trees_that_may_not_be_drawn(planted, rule, rng):
    """Negative control: siblings are drawn with replacement, or under "multipath"
    without it; or a child is left out because of its token."""
    kinds, num_drafted = {}, lambda tokens: len(tokens) - (tokens[-1] == 1)
    if planted == "other siblings":
        kinds, num_drafted = {"with_replacement": rule != "multipath"}, None
    shape = "3-1" if rule == "multipath" else "two children"
    cases = [make_case(rule, shape, rng, **kinds) for _ in range(3)]
    assert max(bias(rule, case, num_drafted) for case in cases) > BIASED


@pytest.mark.parametrize(
    "rule, is_certain",
    [*itertools.product(("rejection", "block"), (False, True)), ("multipath", False)],
)
def test_on_a_chain_it_is_the_rule_of_chains(is_certain, rule, rng):
    """Compares the number kept and all tokens with the rule for chains, as integers."""
    gamma, of_chains = 3, "block" if rule == "multipath" else rule
    accept = jax.jit(getattr(acceptance, f"accept_{of_chains}"))
    for _ in range(40):
        tokens = jnp.asarray(rng.integers(0, V + 2, gamma), jnp.int32)
        draft, target = (
            jnp.asarray(rng.dirichlet(np.ones(V), size=n), jnp.float32)
            for n in (gamma, gamma + 1)
        )
        if is_certain:
            draft = jax.nn.one_hot(tokens, V, dtype=jnp.float32)
        number = jnp.int32(rng.integers(0, gamma + 1))
        noise = {
            "uniforms": jnp.asarray(rng.random(gamma), jnp.float32),
            "noise": jnp.asarray(rng.gumbel(size=V), jnp.float32),
        }
        told = None if is_certain else draft
        how = noise | {"number": number, "depth_max": gamma}
        found = decide(rule, tokens, range(gamma), told, target, **how)
        expected = accept(tokens, draft, target, number, **noise)
        assert found.num_accepted == expected.num_accepted
        np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("rule", RULES)
def test_children_that_are_too_deep_are_not_tried(rule):
    """Fails if a child deeper than `depth_max`, which is not tried, changes the own
    token after its parent. With a larger `depth_max` it is tried, and not kept."""
    draft = jnp.asarray([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    target = jnp.asarray([[0.0, 0.0, 1.0]] + [[0.6, 0.3, 0.1]] * 3)
    noise = {"uniforms": jnp.array([0.5, 0.9, 0.9]), "noise": jnp.zeros((V,))}
    args = rule, [2, 0, 0], [0, 1, 3], draft, target
    for depth_max, own in ((1, 0), (3, 1)):
        found = decide(*args, number=2, depth_max=depth_max, **noise)
        assert found.tokens[:2].tolist() == [2, own]


@pytest.mark.parametrize("rule", RULES)
def test_what_no_draw_can_have(rule):
    """Fails if a draft is kept that has no probability or is not in the vocabulary."""
    target = jnp.full((4, V), 1 / V, jnp.float32)
    noise = dict.fromkeys(("uniforms", "noise"), jnp.zeros((3,), jnp.float32))
    for wrong in (jnp.nan, -1.0, 0.0):
        draft = jnp.full((3, V), wrong, jnp.float32)
        tokens = [V, -1, 0]
        outcome = decide(rule, tokens, [0] * 3, draft, target, depth_max=1, **noise)
        assert int(outcome.num_accepted) == 0
        assert 0 <= int(outcome.tokens[0]) < V


CHAINS = enumeration.RULES
GAMMA = 2
PROMPT = [1, 2]
PENALTIES = {"repetition": 1.6, "presence": 0.5, "frequency": 0.7}
WORDS = [[0, 1], [2, 2, 0]]


def made() -> processor_lib.Processor:
    return processor_lib.chain(
        built_in.penalties(**PENALTIES), built_in.bad_words(WORDS)
    )


def by_definition(answer, logits) -> np.ndarray:
    """Returns the law of the token after the prompt and an answer, by definition."""
    given = PROMPT, answer
    row = test_built_in.expected("penalties", *given, logits, penalties=PENALTIES)
    row = test_built_in.expected("words", *given, row, words=WORDS)
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def table_of(logits: list[np.ndarray], law) -> list[np.ndarray]:
    """Returns the table with `law(prefix, logits)` after each prefix."""
    found = [np.empty_like(entry) for entry in logits]
    for depth, entry in enumerate(logits):
        for prefix in itertools.product(range(V), repeat=depth):
            found[depth][prefix] = law(prefix, entry[prefix])
    return found


@jax.jit
def _rows(state, tokens, logits):
    """Returns the distributions of a window's columns, as rounds make them."""
    columns = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    count = jnp.int32(tokens.shape[0])
    window = protocols.Window(
        tokens=tokens[None],
        start=jnp.array([len(PROMPT) - 1], jnp.int32),
        num_active=count[None],
    )
    verified = protocols.Verified(
        logits=logits,
        slots=jnp.zeros_like(columns),
        positions=columns,
        num_active=count,
        at=columns[None],
    )
    return jax.nn.softmax(processing.process_rows(state, verified, window).logits)


def processed(logits: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the table that rounds compute: each prefix is a window's path."""
    text = np.array([*PROMPT, 0, 0, 0], np.int32)
    one = processing.begin(made(), text, np.int32(len(PROMPT)), vocab_size=V)
    state, most = processing.of_slots(one, 1), len(logits)

    def law(prefix, row):
        tokens = np.zeros((most,), np.int32)
        tokens[: len(prefix) + 1] = [PROMPT[-1], *prefix]
        padded = np.zeros((most, V), np.float32)
        for i in range(len(prefix) + 1):
            padded[i] = logits[i][prefix[:i]]
        return np.asarray(_rows(state, tokens, padded))[len(prefix)]

    return table_of(logits, law)


def raw(logits: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the table without a processor."""
    return [np.asarray(jax.nn.softmax(entry), np.float32) for entry in logits]


def case_of(rng, target=processed, draft=processed) -> enumeration.Case:
    logits = enumeration.table(lambda n: 2 * rng.standard_normal((n, V)), V, GAMMA + 1)
    near = [x + rng.standard_normal(x.shape).astype(np.float32) for x in logits[:GAMMA]]
    case = enumeration.honest(target(logits), draft(near))
    return dataclasses.replace(case, truth=table_of(logits, by_definition))


@pytest.mark.parametrize("draft", [processed, raw])
@pytest.mark.parametrize("rule", CHAINS)
def test_chains_have_the_processed_law(rule, draft, rng):
    """Checks chains whose drafts were drawn with the processor, or without it."""
    case = case_of(rng, draft=draft)
    for num_drafted in range(GAMMA + 1):
        found = enumeration.bias(CHAINS[rule], case, num_drafted)
        assert found < 2 * enumeration.ROUNDING


def test_what_is_not_processed_or_cut_is_caught(rng):
    """Negative controls: drawn drafts are cut because of their tokens, which
    `processing.cut` must not do; and the target's rows are not processed."""
    case = case_of(rng, draft=raw)

    def cut(chain):
        rows = [case.target[i][tuple(chain[:i])][chain[i]] > 0 for i in range(GAMMA)]
        return [*rows, False].index(False)

    assert enumeration.bias(enumeration.REJECTION, case, cut) > BIASED
    assert enumeration.bias(enumeration.BLOCK, case_of(rng, target=raw)) > BIASED


DEAR, CHEAP = (1.0, 1.0, 1 / 0.5, 1 / 0.45), (1.0, 1.0, 1.6, 1.7)
"""The seconds of a step by its rows; more rows cost less in the second."""

CASE = enumeration.honest(
    target=[np.array(p, np.float32) for p in ([0.7, 0.3], [[0.7, 0.3]] * 2)]
    + [np.full((2, 2, 2), 0.5, np.float32)],
    draft=[np.full((2,) * n, 0.5, np.float32) for n in (1, 2)],
)
A = 0  # The token that the target prefers.


def verified(survival_of, step_s=DEAR, *, stops_early=True):
    """Returns a function: how many drafts of a chain are verified, by its survivals."""

    def num_drafted(chain):
        counts = schedule_lib.schedule(
            jnp.asarray([survival_of(chain)], jnp.float32),
            jnp.array([2], jnp.int32),
            jnp.array([True]),
            jnp.asarray(step_s, jnp.float32),
            stops_early=stops_early,
        )
        return int(counts[0])

    return num_drafted


def known_before(chain):
    """Returns survivals: the first is fixed, the second depends on the first token."""
    return 0.8, 0.8 * (0.9 if chain[0] == A else 0.0)


def of_itself(chain):
    """Plants survivals of which the first depends on the first token itself."""
    first = 0.99 if chain[0] == A else 0.1
    return first, first * 0.99


def counts_of(num_drafted):
    return {num_drafted(chain) for chain in itertools.product(range(2), repeat=2)}


def law_of(num_drafted, rule):
    found = enumeration.outcomes(CHAINS[rule], CASE, num_drafted)
    return found.law(CASE.truth).sum(axis=(1, 2))


@pytest.mark.parametrize("rule", CHAINS)
def test_the_papers_example_is_exact_with_the_stop_alone(rule):
    """Checks for (0.7, 0.3) by the stop, the paper's (0.85, 0.15) by the maximum."""
    stop = verified(known_before)
    assert counts_of(stop) == {0}
    np.testing.assert_allclose(law_of(stop, rule), [0.7, 0.3], atol=1e-6)
    everything = verified(known_before, stops_early=False)
    assert everything([A, A]) == 2 and everything([1 - A, A]) == 0
    np.testing.assert_allclose(law_of(everything, rule), [0.85, 0.15], atol=1e-6)


@pytest.mark.parametrize("rule", CHAINS)
def test_a_schedule_may_see_the_tokens_before(rule):
    """Fails if the law is not exact; negative control: a draft's own confidence."""
    honest = verified(known_before, CHEAP)
    assert counts_of(honest) == {1, 2}
    bias_of = lambda number: enumeration.bias(CHAINS[rule], CASE, number)
    assert bias_of(honest) < enumeration.ROUNDING
    assert bias_of(verified(of_itself, CHEAP)) > 1000 * enumeration.ROUNDING
