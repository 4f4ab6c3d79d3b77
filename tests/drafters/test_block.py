"""DFlash and DSpark of random weights: lossless, and their proposals an oracle's.

The oracle is float64 NumPy, `block_oracle`, on the files of the same drafter.
"""

import dataclasses
import itertools
import json

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import test_eagle3 as eagle
from decoding import SMALL
from model import block_oracle as oracle
from rules import enumeration

import spec_jax as sj
from spec_jax import loading, testing
from spec_jax.drafters import (
    block,
    each,
    features as features_lib,
    tree_shapes,
)
from spec_jax.gamma import schedule
from spec_jax.model import (
    block_files,
    block_heads,
    block_params,
    head_dialects,
    row_model,
)
from spec_jax.rules import sampling as sampling_lib


LAYER = decoding.make_config(num_layers=1, tie_word_embeddings=False)
DFLASH = block_params.BlockConfig(
    layer=LAYER,
    draft_vocab_size=96,
    taps=(1, 0),  # of two layers
    block_size=4,
    slots="fill-in",
    mask_token_id=95,
).validate()
DSPARK = dataclasses.replace(
    DFLASH,
    slots="anchor-first",
    head="vanilla",
    markov_rank=8,
    has_confidence=True,
    confidence_with_markov=True,
).validate()
RNN = dataclasses.replace(DSPARK, slots="fill-in", head="rnn", draft_vocab_size=64)
TARGET = decoding.TARGET_PARAMS


def params_of(head) -> block_params.BlockParams:
    made = block_params.init(
        jax.random.key(3), head, embed=TARGET.embed, lm_head=TARGET.head, stddev=0.3
    )
    bias = made.confidence_bias
    return made.replace(confidence_bias=None if bias is None else bias + 0.5)


def make(head, impl=SMALL.target.impl, **changes) -> block.BlockDrafter:
    model = row_model.RowModel(config=head.layer, impl=impl, slab=head.block_size)
    own = {"head": head, "model": model, "gamma_max": head.num_drafts}
    return block.BlockDrafter(**own | changes)


HEADS = {"dflash": DFLASH, "dspark": DSPARK, "rnn": RNN}
PARAMS = {name: params_of(head) for name, head in HEADS.items()}


def oracle_of(folder, name) -> oracle.Head:
    dialect = "z-lab" if name == "dflash" else "speculators"
    origin = head_dialects.Origin(target=SMALL.target.config)
    block_files.save(folder, HEADS[name], PARAMS[name], dialect=dialect, origin=origin)
    return oracle.Head(
        config=json.loads((folder / "config.json").read_text()),
        tensors=safetensors.numpy.load_file(folder / "model.safetensors"),
        embed=np.asarray(TARGET.embed),
        lm_head=np.asarray(TARGET.head),
    )


def of_oracle(head, features, length, **drawn):
    flat = features.reshape(len(features), -1)[: length - 1]
    return oracle.draft(head, flat, eagle.TEXT[length - 1], **drawn)


QUICK = (
    ("native", 1, "dflash", eagle.PLAIN, "coupled"),
    ("native", 4, "dspark", eagle.PLAIN, "coupled"),
    ("native", 4, "dspark", eagle.PLAIN, "rejection"),
    ("xla", 4, "dspark", (), "coupled"),
)
CASES = itertools.product(
    ("native", "xla"),
    (1, 4, 16),
    ("dflash", "dspark", "rnn"),
    ((), eagle.WARM, eagle.PLAIN),
    ("coupled", "rejection"),
)
REST = [pytest.param(*x, marks=eagle.SLOW) for x in CASES if x not in QUICK]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("impl", "num_asks", "name", "sampling", "rule"), [*QUICK, *REST]
)
def test_tokens_are_those_of_decoding(impl, num_asks, name, sampling, rule):
    """Fails if a drafter can change a token, or the K/V of the target.

    Rejection draws others at a temperature: it runs to its end, with pages in order.
    """
    setting = eagle.setting_of(impl)
    drafter = make(HEADS[name], impl)
    asks = list(eagle.drawn(sampling) if sampling else eagle.ASKS)
    asks = (asks * -(-num_asks // len(asks)))[:num_asks]
    asks = [dataclasses.replace(ask, gamma=min(ask.gamma, 3)) for ask in asks]
    state = eagle.run(setting, drafter, asks, params=PARAMS[name], rule=rule)
    if rule == "coupled" or not sampling:
        decoding.assert_as_decoded(setting, state, asks)
    assert int(state.slots.num_proposed[0]) > 0
    decoding.check_cache(state.memory.kv)


SCHEDULED_QUICK = (("native", 4, eagle.PLAIN), ("xla", 16, ()))
SCHEDULED = itertools.product(
    ("native", "xla"), (1, 4, 16), ((), eagle.WARM, eagle.PLAIN)
)
SCHEDULED_REST = [
    pytest.param(*x, marks=eagle.SLOW) for x in SCHEDULED if x not in SCHEDULED_QUICK
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("impl", "num_slots", "sampling"), [*SCHEDULED_QUICK, *SCHEDULED_REST]
)
def test_scheduled_tokens_are_those_of_decoding(impl, num_slots, sampling):
    """Fails if a schedule of a block's drafts can change a token, or K/V.

    Some are verified, and not all: rows cost something, and all of a block is asked
    for while any is. By the account that is soon nothing, for the weights are random.
    """
    setting, drafter = eagle.setting_of(impl), make(HEADS["dspark"], impl)
    asks = eagle.drawn(sampling) if sampling else eagle.ASKS
    asks = [dataclasses.replace(ask, gamma=None) for ask in (*asks,) * 4][:num_slots]
    proposed, rounds = {}, {}
    for credit in (np.inf, 8.0):
        chosen = schedule.Schedule(gamma_max=drafter.gamma_max, credit=credit)
        rows = np.arange(num_slots * (drafter.gamma_max + 1) + 1)
        state = eagle.run(
            setting,
            drafter,
            asks,
            params=PARAMS["dspark"],
            gamma_policy=chosen,
            policy_state=chosen.init(1 + 0.4 * rows / num_slots, draft_s=0.2),
        )
        decoding.assert_as_decoded(setting, state, asks)
        decoding.check_cache(state.memory.kv)
        proposed[credit] = int(state.slots.num_proposed.sum())
        rounds[credit] = int(state.slots.num_rounds.sum())
    always, weighed = proposed.values()
    assert 0 < weighed < 0.8 * always < 0.8 * drafter.gamma_max * rounds[np.inf]


@pytest.mark.parametrize("name", ["dspark", pytest.param("dflash", marks=eagle.SLOW)])
def test_contract(name):
    checked = testing.check_drafter(make(HEADS[name]), PARAMS[name], eagle.BENCH)
    assert checked == tuple(testing.CLAUSES)


def features_of(taps=DFLASH.taps) -> np.ndarray:
    return np.asarray(eagle.BENCH.features(eagle.TEXT[:-1], taps))


def drafts_of(head, params, features, lengths, *, impl=SMALL.target.impl, **asked):
    """What a drafter proposes after prefixes of a text."""
    drafter = make(head, impl)
    rounds = eagle.rounds_of(drafter, features, lengths, params=params, **asked)
    return [proposal for _, proposal in rounds]


LENGTHS = (7, 8, 11, 12)
FROM_ONE = (1, 3, 4)  # One token has no context, and drafts all the same.


@pytest.mark.few(4)
@pytest.mark.parametrize("impl", ["native", "xla"])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_the_oracles(tmp_path, name, impl):
    """Fails if context is at another place, or a slot predicts another token."""
    decoding.needs(impl)
    head, features = oracle_of(tmp_path, name), features_of()
    made = [
        (length, proposal)
        for lengths in (LENGTHS, FROM_ONE)
        for length, proposal in zip(
            lengths,
            drafts_of(HEADS[name], PARAMS[name], features, lengths, impl=impl),
            strict=True,
        )
    ]
    for length, proposal in made:
        tokens, _, survival = of_oracle(head, features, length)
        assert proposal.num_drafted == len(tokens) == HEADS[name].num_drafts
        assert proposal.tokens.tolist() == tokens
        if HEADS[name].has_confidence:
            np.testing.assert_allclose(proposal.survival, survival, rtol=1e-3)
        else:
            assert proposal.survival is None


def test_a_proposal_is_one_pass_of_the_backbone(monkeypatch):
    """Fails if the backbone runs for each draft; of no drafts it does not run."""
    passes, real = [], block.SlotBlock._run_block

    def counted(self, *inputs):
        jax.debug.callback(lambda: passes.append(1))
        return real(self, *inputs)

    monkeypatch.setattr(block.SlotBlock, "_run_block", counted)
    # A head of its own: what others compiled is not counted.
    head = dataclasses.replace(DFLASH, mask_token_id=94)
    for gamma, expected in ((3, len(LENGTHS)), (0, 0)):
        passes.clear()
        asked = {"gammas": (gamma,) * len(LENGTHS)}
        made = drafts_of(head, PARAMS["dflash"], features_of(), LENGTHS, **asked)
        jax.effects_barrier()
        assert {int(proposal.num_drafted) for proposal in made} == {gamma}
        assert len(passes) == expected


GATED = dataclasses.replace(DSPARK, head="gated", draft_vocab_size=64)


@pytest.mark.slow  # The kernels of both are compared call by call, and both by oracles.
@pytest.mark.parametrize("head", [RNN, GATED], ids=["rnn", "gated"])
def test_native_drafts_are_those_of_xla(head):
    """Fails if the one call draws with other noise, or mixes otherwise.

    No promise of bits: sums of these two differ, and a tie might be decided otherwise.
    """
    decoding.needs("native")
    params, features = params_of(head), features_of()
    params = params.replace(markov=params.markov.replace(out=8 * params.markov.out))

    def drawn(impl, seed, temperature):
        one = sampling_lib.make_settings(temperature=temperature, seed=seed)
        told = {"sampling": jax.tree.map(lambda x: jnp.broadcast_to(x, (2,)), one)}
        rounds = eagle.rounds_of(
            make(head, impl), features, LENGTHS, params=params, **told
        )
        return [proposal.tokens.tolist() for _, proposal in rounds]

    for seed, temperature in ((0, 0.0), (1, 4.0), (2, 9.0)):
        found = drawn("native", seed, temperature)
        assert found == drawn("xla", seed, temperature)
        # Negative control: it is the noise that decides.
        assert (found == drawn("xla", seed + 1, temperature)) == (temperature == 0)


def swapped(config):
    slots = "fill-in" if config.slots == "anchor-first" else "anchor-first"
    return dataclasses.replace(config, slots=slots)


def with_norms(params, **changes):
    layers = tuple(layer.replace(**changes) for layer in params.layers)
    return params.replace(layers=layers)


SHIFTS = {
    "slot convention": lambda head, params, x: (swapped(head), params, x),
    "layer index": lambda head, params, x: (head, params, features_of((2, 1))),
    "order of layers": lambda head, params, x: (head, params, x[:, ::-1]),
    "position": lambda head, params, x: (head, params, np.roll(x, 1, axis=0)),
    "mask": lambda head, params, x: (
        dataclasses.replace(head, mask_token_id=94),
        params,
        x,
    ),
    "norm of features": lambda head, params, x: (
        head,
        params.replace(hidden_norm=params.hidden_norm * 3),
        x,
    ),
    "norm of keys": lambda head, params, x: (
        head,
        with_norms(params, k_norm=params.layers[0].k_norm * 3),
        x,
    ),
}


@pytest.fixture(scope="module")
def right():
    features = features_of()
    made = drafts_of(DSPARK, PARAMS["dspark"], features, LENGTHS)
    return [proposal.tokens[:3].tolist() for proposal in made]


@pytest.mark.few(3)
@pytest.mark.parametrize("shift", SHIFTS)
def test_a_planted_shift_changes_the_drafts(right, shift):
    """What alarms have to notice: each shift drafts something else."""
    head, params, features = SHIFTS[shift](DSPARK, PARAMS["dspark"], features_of())
    made = drafts_of(head, params, features, LENGTHS)
    assert [proposal.tokens[:3].tolist() for proposal in made] != right


def test_a_slot_that_sits_out_takes_in_before_its_ring_is_full(tmp_path, monkeypatch):
    """Fails if features are lost, or are taken in by every round."""
    monkeypatch.setattr(features_lib, "RING_ROWS", 4)  # and 5 of a round
    features, lengths = features_of(), (3, 4, 7, 9, 10, 14, 15, 17)
    *_, last = drafts_of(
        DSPARK, PARAMS["dspark"], features, lengths, gammas=(0,) * 7 + (2,)
    )
    expected = of_oracle(oracle_of(tmp_path, "dspark"), features, 17)[0]
    assert last.num_drafted == 2
    assert last.tokens[:2].tolist() == expected[:2]


@pytest.mark.parametrize("impl", ["native", "xla"])
def test_independent_draws_are_from_the_probabilities_they_state(tmp_path, impl):
    """Fails if a token is drawn from another array than the rule judges it by."""
    decoding.needs(impl)
    drafter = each.lift(make(DSPARK, impl), 2, rule="rejection").drafter
    testing.CLAUSES["proposals"](drafter, PARAMS["dspark"], eagle.BENCH)
    head, features, seed = oracle_of(tmp_path, "dspark"), features_of(), 5
    one = sampling_lib.make_settings(temperature=1.5, seed=seed)
    settings = jax.tree.map(lambda x: jnp.broadcast_to(x, (2,)), one)
    rounds = eagle.rounds_of(
        drafter, features, LENGTHS, params=PARAMS["dspark"], sampling=settings
    )
    greedy = []
    for length, proposal in rounds:
        for i, (probs, token) in enumerate(
            zip(proposal.probs, proposal.tokens, strict=True)
        ):
            noise = sampling_lib.noise(
                jnp.uint32(seed),
                jnp.int32(length),
                vocab_size=96,
                stream=sampling_lib.Stream.DRAFT,
                offset=i,
            )
            assert token == np.argmax(np.log(probs) + noise)
        _, logits, survival = of_oracle(head, features, length, drawn=proposal.tokens)
        expected = np.exp((logits - logits.max(axis=1, keepdims=True)) / 1.5)
        expected /= expected.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(proposal.probs, expected, atol=1e-4)
        np.testing.assert_allclose(proposal.survival, survival, rtol=1e-3)
        greedy.append(of_oracle(head, features, length)[0] == proposal.tokens.tolist())
    assert not all(greedy)  # They were drawn.


def test_rejection_by_a_heads_probabilities_is_exact():
    """Enumerated: the law of what is committed is the target's, to rounding.

    Fails if the rule is told what the head's tokens were not drawn from: without its
    correction, or rounded to bfloat16 as some drafters draw (DeepSpec issue 31).
    """
    layer = dataclasses.replace(LAYER, vocab_size=4)
    head = dataclasses.replace(
        DSPARK, layer=layer, draft_vocab_size=4, mask_token_id=3, head="gated"
    )
    embed = jnp.zeros((4, 48))
    params = block_params.init(
        jax.random.key(1), head, embed=embed, lm_head=embed, stddev=0.5
    )
    keys = jax.random.split(jax.random.key(2), 4)
    logits, hidden = (
        jax.random.normal(keys[0], (2, 4)),
        jax.random.normal(keys[1], (2, 48)),
    )
    one = sampling_lib.make_settings(temperature=0.8)

    def entries(is_corrected):
        """What each slot's token is drawn from, after each token before it."""
        found = []
        for k, before in enumerate((jnp.asarray([2]), jnp.arange(4))):
            count = len(before)
            state = block_heads.first_state(head, (count,))
            _, bias, _ = block_heads.correct(
                params,
                head,
                state,
                before,
                jnp.broadcast_to(hidden[k], (count, 48)),
                product=block_heads.row_product("xla"),
            )
            rows = jnp.broadcast_to(logits[k], (count, 4)) + bias * is_corrected
            found.append(np.asarray(sampling_lib.distribution(rows, one)))
        return [found[0][0], found[1]]

    draw = lambda n: jax.nn.softmax(jax.random.normal(keys[2], (n, 4)))
    target, drawn = enumeration.table(draw, 4, 3), entries(1.0)
    honest = enumeration.honest(target, drawn)
    assert enumeration.bias(enumeration.REJECTION, honest) < enumeration.ROUNDING
    rounded = [np.asarray(jnp.bfloat16(q), np.float32) for q in drawn]
    for told in (entries(0.0), rounded):
        lie = dataclasses.replace(honest, draft=told)
        assert enumeration.bias(enumeration.REJECTION, lie) > 1e-4


def test_a_draft_ends_before_a_token_without_confidence(tmp_path):
    head, features, threshold = oracle_of(tmp_path, "dspark"), features_of(), 0.6
    drafter = make(DSPARK, min_confidence=threshold)
    rounds = eagle.rounds_of(drafter, features, LENGTHS, params=PARAMS["dspark"])
    counts = set()
    for length, proposal in rounds:
        survival = of_oracle(head, features, length)[2]
        each_ = survival / np.concatenate([[1.0], survival[:-1]])
        expected = int(np.cumprod(each_ >= threshold).sum())
        assert proposal.num_drafted == expected
        counts.add(expected)
    assert len(counts) > 1


@pytest.mark.slow
def test_loads_by_name_and_by_folder(tmp_path, monkeypatch):
    """Fails if a drafter is not found by its folder, or runs under another's name."""
    lm = sj.load(gamma_max=3)
    config = dataclasses.replace(
        lm.target.config, num_layers=1, intermediate_size=64, tie_word_embeddings=False
    )
    entries = config.vocab_size
    changes = {"layer": config, "draft_vocab_size": entries, "taps": (2, 5)}
    for name, dialect in (("dflash", "deepspec"), ("dspark", "specforge")):
        head = dataclasses.replace(HEADS[name], slots="anchor-first", **changes)
        params = block_params.init(
            jax.random.key(0), head, embed=lm.params.embed, lm_head=lm.params.head
        )
        origin = head_dialects.Origin(target=lm.target.config)
        folder = tmp_path / name
        block_files.save(folder, head, params, dialect=dialect, origin=origin)
        by_folder = sj.load(drafter=str(tmp_path / name))
        by_name = sj.load(drafter=name, draft=tmp_path / name)
        assert by_folder.drafter == by_name.drafter
        assert by_folder.drafter.kind == name
        assert by_folder.gamma_max == 4  # of 7 that `load` allows
        assert by_folder.drafter_params.embed is by_folder.params.embed
    out = sj.generate(by_folder, "import os", max_tokens=6)
    assert out.tokens == sj.decode(lm, "import os", max_tokens=6).tokens
    assert out.metrics["proposed"] > 0
    with pytest.raises(ValueError, match="is of 'dspark': name that one"):
        sj.load(drafter="dflash", draft=tmp_path / "dspark")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "ASSETS", tmp_path / "nothing")
        with pytest.raises(ValueError, match="needs a head, and none is given nor"):
            sj.load(drafter="dspark")
    with pytest.raises(ValueError, match="no layout of DFlash or DSpark"):
        sj.load(drafter="dspark", draft=loading.EMBEDDED_DRAFT)
    path = tmp_path / "dspark" / "config.json"
    raw = json.loads(path.read_text()) | {"architectures": ["MedusaModel"]}
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"MedusaModel.*DFlashDraftModel, Qwen3DSpark"):
        sj.load(drafter=str(tmp_path / "dspark"))


def test_a_proposal_copies_no_pool():
    slots = make(DSPARK).for_slots(2)
    memory = slots.init(capacity=20_000, page_size=8)
    decoding.assert_proposes_in_place(slots, PARAMS["dspark"], memory, memory.kv)


def test_settings_that_no_drafter_has():
    with pytest.raises(ValueError, match="gamma_max=4 of a drafter whose block of 4"):
        make(DFLASH, gamma_max=4)
    with pytest.raises(ValueError, match="without a confidence head"):
        make(DFLASH, min_confidence=0.5)
    with pytest.raises(ValueError, match="depth of tree 2-1-1-1-1=5 of a drafter wh"):
        make(DSPARK).for_tree(tree_shapes.parse("2-1-1-1-1"))
    assert make(DFLASH).for_tree(tree_shapes.parse("2-1-1")).gamma_max == 6
    with pytest.raises(ValueError, match="4x4:7@0.4=4 of a drafter .* drafts 3 token"):
        make(DFLASH).for_tree(tree_shapes.parse("4x4:7"))
    with pytest.raises(ValueError, match="not that of the head's layer"):
        make(DSPARK, model=SMALL.target)
    model = row_model.RowModel(config=LAYER, impl="interpret", slab=16)
    high = dataclasses.replace(DFLASH, block_size=65)
    with pytest.raises(
        NotImplementedError, match="block of 65 rows .* the 64 that imp"
    ):
        make(high, model=model).for_slots(1)
    assert make(high).for_slots(2).gamma_max == 64
