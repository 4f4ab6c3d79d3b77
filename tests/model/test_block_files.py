"""Published block drafters: read, written, refused, and run against float64."""

import dataclasses
import json
import pathlib

import block_oracle as oracle
import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from spec_jax import testing
from spec_jax.model import (
    block_dialects as dialects,
    block_draft,
    block_files,
    block_params,
    checkpoint_files as files,
    config as config_lib,
    decoder,
    params as params_lib,
    row_model,
)
from spec_jax.paging import allocator


CONFIGS = pathlib.Path(__file__).parents[2].parent / "shared" / "data" / "configs"
TARGET = decoding.make_config(num_layers=4)
LAYER = decoding.make_config(num_heads=6, tie_word_embeddings=False)  # N * H is not D
DFLASH = block_params.BlockConfig(
    layer=LAYER,
    draft_vocab_size=96,
    taps=(2, 1, 3),
    block_size=4,
    slots="fill-in",
    mask_token_id=95,
).validate()


def with_heads(head, **changes):
    """DSpark's sequential and confidence heads on the same backbone."""
    own = {"markov_rank": 8, "has_confidence": True, "confidence_with_markov": True}
    own |= {"slots": "anchor-first", "head": head} | changes
    return dataclasses.replace(DFLASH, **own)


CASES = {
    "z-lab": ("z-lab", DFLASH),
    "deepspec": ("deepspec", with_heads("vanilla")),
    "deepspec dflash": ("deepspec", dataclasses.replace(DFLASH, slots="anchor-first")),
    "specforge": ("specforge", with_heads("gated", confidence_with_markov=False)),
    "speculators": (
        "speculators",
        with_heads(
            "rnn",
            draft_vocab_size=32,
            slots="fill-in",
            confidence_temperatures=(0.5, 1.0, 2.0),
        ),
    ),
    "speculators dflash": ("speculators", DFLASH),
}


@pytest.fixture(scope="module")
def target_params():
    return params_lib.init(jax.random.key(9), TARGET, stddev=0.3)


def make_params(config, target_params) -> block_params.BlockParams:
    """Random weights, norms and biases too, so that one that is left out shows."""
    hot, size = None, config.draft_vocab_size
    if size < 96:
        hot = jnp.sort(jax.random.permutation(jax.random.key(4), 96)[:size])
    made = block_params.init(
        jax.random.key(0),
        config,
        embed=target_params.embed,
        lm_head=target_params.head,
        hot=hot,
        stddev=0.3,
    )
    keys = iter(jax.random.split(jax.random.key(1), 60))
    shared = {name: getattr(made, name) for name in ("hot", "embed", "lm_head")}

    def moved(leaf):
        return leaf + 0.3 * jax.random.normal(next(keys), leaf.shape, leaf.dtype)

    own = jax.tree.map(moved, made.replace(**dict.fromkeys(shared)))
    return own.replace(**shared)


def saved(folder, case, target_params):
    """A case's config and weights, in a folder of its layout."""
    dialect, config = CASES[case]
    params = make_params(config, target_params)
    block_files.save(folder, config, params, dialect=dialect)
    return config, params


def test_copies_of_the_target_may_be_left_out(target_params, tmp_path):
    """Fails if they are stored, or what is read then are not the target's."""
    dialect, config = CASES["deepspec"]
    params = make_params(config, target_params)
    block_files.save(tmp_path, config, params, dialect=dialect, copies=False)
    held = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(held)
    found = block_files.load(tmp_path, TARGET, target_params)
    assert found[0] == config
    testing.assert_same_bits(found[1], params)


@pytest.mark.parametrize("case", ["deepspec", "specforge", "speculators"])
def test_temperatures_are_written_into_a_config(case, target_params, tmp_path):
    """Fails if older ones stay, another field changes, or wrong ones are stored."""
    config, _ = saved(tmp_path, case, target_params)
    path = tmp_path / "config.json"
    read = lambda: dialects.read_config(path, TARGET)[1]
    given = tuple(0.5 + draft for draft in range(config.num_drafts))
    for temperatures in (given, given[::-1], ()):
        dialects.write_temperatures(path, TARGET, temperatures)
        assert read() == dataclasses.replace(
            config, confidence_temperatures=temperatures
        )
    if case == "specforge":  # As others may have written it.
        raw = json.loads(path.read_text())
        raw["dflash_config"]["confidence_temperatures"] = list(given)
        path.write_text(json.dumps(raw))
    dialects.write_temperatures(path, TARGET, given[::-1])
    before = path.read_bytes()
    for wrong in (given[1:], (-1.0, *given[1:])):
        with pytest.raises(files.CheckpointError, match="one for each draft"):
            dialects.write_temperatures(path, TARGET, wrong)
    assert path.read_bytes() == before and read().confidence_temperatures == given[::-1]
    assert {each.name for each in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
    }


def oracle_of(folder, target_params) -> oracle.Head:
    return oracle.Head(
        config=json.loads((folder / "config.json").read_text()),
        tensors=safetensors.numpy.load_file(folder / files.SINGLE_FILE),
        embed=np.asarray(target_params.embed),
        lm_head=np.asarray(target_params.head),
    )


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_is_the_same(tmp_path, target_params, case):
    config, params = saved(tmp_path, case, target_params)
    loaded = block_files.load(tmp_path, TARGET, target_params)
    assert loaded[0] == config
    testing.assert_same_bits(loaded[1], params)
    assert loaded[1].embed is target_params.embed
    assert (loaded[1].lm_head is target_params.head) == (params.hot is None)
    raw = json.loads((tmp_path / "config.json").read_text())
    has_heads = config.head != "none"
    assert dialects.kind_of(raw) == ("dspark" if has_heads else "dflash")


_append = jax.jit(block_draft.append_context, static_argnames=("config", "impl"))
_block = jax.jit(block_draft.forward_block, static_argnames=("config", "impl"))


class Slots:
    """Three slots of a drafter's cache, of which the last is used."""

    def __init__(self, params, config, impl):
        self.params, self.config, self.impl = params, config, impl
        slab = row_model.slab_for(impl, 2 * config.block_size)
        model = row_model.RowModel(config=config.layer, impl=impl, slab=slab)
        self.slab = slab
        self.kv = model.new_slots(3, capacity=32, page_size=8)

    def rows(self, tokens, start):
        pad = self.slab - len(tokens)
        positions = start + np.arange(len(tokens))
        self.kv = allocator.reserve(self.kv, 2, int(start + len(tokens)))
        return decoder.Rows(
            tokens=jnp.asarray(np.pad(tokens, (0, pad)), jnp.int32),
            slots=jnp.full((self.slab,), 2, jnp.int32),
            positions=jnp.asarray(np.pad(positions, (0, pad)), jnp.int32),
            num_active=jnp.int32(len(tokens)),
        )

    def append(self, features):
        start = int(self.kv.length[2])
        rows = self.rows([0] * len(features), start)
        padded = np.full((self.slab, features.shape[1]), np.nan, np.float32)
        padded[: len(features)] = features
        self.kv = _append(
            self.params, self.config, rows, jnp.asarray(padded), self.kv, impl=self.impl
        )
        self.kv = allocator.extend(self.kv, 2, start + len(features))

    def block(self, anchor):
        config = self.config
        tokens = [anchor] + [config.mask_token_id] * (config.block_size - 1)
        rows = self.rows(tokens, int(self.kv.length[2]))
        self.kv, hidden, logits = _block(
            self.params, config, rows, self.kv, impl=self.impl
        )
        return hidden[: len(tokens)], logits[: len(tokens)]


def inputs(config, count: int = 9):
    """Features of a target."""
    rng = np.random.default_rng(3)
    return rng.normal(size=(count, config.features_size)).astype(np.float32)


def drafted(params, config, impl, hidden, logits, anchor):
    """What the heads make of a block, greedily; as the drafter does, slot by slot."""
    product = block_draft.row_product(impl)
    state, before = block_draft.first_state(config, (1,)), jnp.asarray([anchor])
    tokens, rows, logit = [], [], []
    for k in range(config.block_size):
        state, bias, confidence = block_draft.correct(
            params, config, state, before, hidden[k : k + 1], product=product
        )
        if k < config.first_slot:
            continue
        rows.append(logits[k] if bias is None else logits[k] + bias[0])
        token = jnp.argmax(rows[-1]).astype(jnp.int32)
        before = (token if params.hot is None else params.hot[token])[None]
        tokens.append(int(before[0]))
        logit.append(jnp.zeros(()) if confidence is None else confidence[0])
    return tokens, np.stack(rows), block_draft.survival(config, jnp.stack(logit))


@pytest.mark.parametrize("impl", ["xla", "native"])
@pytest.mark.parametrize("case", CASES)
def test_parity_with_float64(tmp_path, target_params, case, impl):
    """Fails if a tensor is taken for another, or a step is left out."""
    decoding.needs(impl)
    saved(tmp_path, case, target_params)
    head = oracle_of(tmp_path, target_params)
    config, params = block_files.load(tmp_path, TARGET, target_params, impl=impl)
    features, anchor = inputs(config), 17
    slots = Slots(params, config, impl)
    slots.append(features[:6])
    slots.append(features[6:])
    hidden, logits = slots.block(anchor)
    near = {"dtype": "float32", "reduction": 300}
    expected = oracle.backbone(head, features, anchor)
    testing.assert_rows_close(hidden, expected[0], **near)
    testing.assert_rows_close(logits, expected[1], **near)
    tokens, rows, survival = drafted(params, config, impl, hidden, logits, anchor)
    expected = oracle.draft(head, features, anchor)
    assert tokens == expected[0] and len(tokens) == config.num_drafts
    testing.assert_rows_close(rows, expected[1], **near)
    if config.has_confidence:
        np.testing.assert_allclose(survival, expected[2], rtol=1e-4)
    # Negative control: one slot late is far.
    with pytest.raises(AssertionError, match="are off"):
        testing.assert_rows_close(rows[1:], expected[1][:-1], **near)


@pytest.mark.slow
def test_pallas_rows_see_their_block():
    """By the interpreter: the branches that say it are those of its kernels, too."""
    config = dataclasses.replace(
        DFLASH, layer=dataclasses.replace(LAYER, num_layers=1, dtype="bfloat16")
    )
    target = params_lib.init(
        jax.random.key(9), dataclasses.replace(TARGET, dtype="bfloat16"), stddev=0.3
    )
    params = make_params(config, target)

    def hidden(impl):
        slots = Slots(params, config, impl)
        slots.append(inputs(config, 7))
        return np.asarray(slots.block(17)[0], np.float32)

    ours, theirs = hidden("interpret"), hidden("xla")
    size = np.linalg.norm(theirs, axis=1)
    assert (np.linalg.norm(ours - theirs, axis=1) < 0.02 * size).all()
    assert (np.linalg.norm(ours[1:] - theirs[:-1], axis=1) > 0.2 * size[1:]).all()


def test_features_of_another_width_are_refused(target_params):
    slots = Slots(make_params(DFLASH, target_params), DFLASH, "xla")
    with pytest.raises(
        ValueError, match="features of width 143: the drafter reads 144"
    ):
        slots.append(inputs(DFLASH, 2)[:, 1:])


def changed(tensors, **changes):
    """Tensors with some replaced, or left out where the change is None."""
    merged = tensors | {name.replace("__", "."): x for name, x in changes.items()}
    return {name: x for name, x in merged.items() if x is not None}


BAD_TENSORS = {
    "missing": (
        "z-lab",
        lambda t: changed(t, fc__weight=None),
        "missing tensors: fc.weight",
    ),
    "bias": (
        "z-lab",
        lambda t: changed(t, fc__bias=np.zeros(48, np.float32)),
        "fc.bias: heads with biases are not supported",
    ),
    "unknown": (
        "z-lab",
        lambda t: changed(t, other=np.zeros(3, np.float32)),
        "unexpected tensors: other",
    ),
    "shape": (
        "z-lab",
        lambda t: changed(t, fc__weight=np.zeros((48, 96), np.float32)),
        r"fc.weight has shape \[48, 96\], config.json for this target asks for \[48,",
    ),
    "not finite": (
        "z-lab",
        lambda t: changed(t, norm__weight=np.full(48, np.nan, np.float32)),
        "norm.weight.* is nan",
    ),
    "no head": (
        "deepspec",
        lambda t: changed(t, markov_head__markov_w2__weight=None),
        "missing tensors: markov_head.markov_w2",
    ),
    "another embedding": (
        "deepspec",
        lambda t: t | {"embed_tokens.weight": t["embed_tokens.weight"] + 1},
        "embed_tokens.weight is not the target's: it is a drafter for another",
    ),
    "no own projection": (
        "speculators",
        lambda t: changed(t, lm_head__weight=None),
        "missing tensors: lm_head.weight",
    ),
    "no d2t": ("speculators", lambda t: changed(t, d2t=None), "missing tensors: d2t"),
    "d2t too large": (
        "speculators",
        lambda t: changed(t, d2t=t["d2t"] + 90),
        r"d2t\[\d+\]=\d+ makes draft token \d+ the token \d+, of a vocabulary of 96",
    ),
}


@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_bad_tensors_are_refused(tmp_path, target_params, fault):
    case, change, message = BAD_TENSORS[fault]
    saved(tmp_path, case, target_params)
    path = tmp_path / files.SINGLE_FILE
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(change(tensors), path)
    with pytest.raises(files.CheckpointError, match=message):
        block_files.load(tmp_path, TARGET, target_params)


def test_truncated_files_and_another_dtype_are_refused(tmp_path, target_params):
    saved(tmp_path, "z-lab", target_params)
    with pytest.raises(ValueError, match="shares matrices with a target of float32"):
        block_files.load(tmp_path, TARGET, target_params, dtype="bfloat16")
    mask = tmp_path / "mask_embedding.pt"
    mask.touch()
    with pytest.raises(files.CheckpointError, match="mask has an embedding of its own"):
        block_files.load(tmp_path, TARGET, target_params)
    mask.unlink()
    path = tmp_path / files.SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(files.CheckpointError, match="truncated"):
        block_files.load(tmp_path, TARGET, target_params)


def test_variants_of_files_are_read(tmp_path, target_params):
    """SpecForge's early prefix, and a confidence head without bias."""
    _, params = saved(tmp_path, "specforge", target_params)
    path = tmp_path / files.SINGLE_FILE
    tensors = safetensors.numpy.load_file(path)
    del tensors["confidence_head.proj.bias"]
    renamed = {
        f"logit_head.{name}" if "_head." in name else name: x
        for name, x in tensors.items()
    }
    safetensors.numpy.save_file(renamed, path)
    loaded = block_files.load(tmp_path, TARGET, target_params)[1]
    no_bias = jnp.zeros_like(params.confidence_bias)
    testing.assert_same_bits(loaded, params.replace(confidence_bias=no_bias))


def nested(**changes):
    """A change of what is under `dflash_config`."""
    return lambda raw: raw | {"dflash_config": raw["dflash_config"] | changes}


BAD_CONFIGS = {
    "architecture": (
        "z-lab",
        lambda raw: raw | {"architectures": ["DominoDraftModel"]},
        "DominoDraftModel.* no layout of DFlash or DSpark.*DFlashDraftModel.*Qwen3DS",
    ),
    "no dflash_config": (
        "z-lab",
        lambda raw: raw | {"dflash_config": None},
        "dflash_config is missing",
    ),
    "mask": ("z-lab", nested(mask_token_id=96), "mask_token_id=96 is outside"),
    "no mask": ("z-lab", nested(mask_token_id=None), "mask_token_id=None must be a"),
    "last tap": ("z-lab", nested(target_layer_ids=[0, 3]), r"taps=\(1, 4\) of a"),
    "taps": ("z-lab", nested(target_layer_ids="1"), "must be a list of layers"),
    "same taps": ("z-lab", nested(target_layer_ids=[1, 1]), "must be different"),
    "softcap": (
        "z-lab",
        nested(final_logit_softcapping=30.0),
        "final_logit_softcapping=30.0 is not supported",
    ),
    "heads": (
        "z-lab",
        nested(markov_rank=8, markov_head_type="vanilla"),
        "z-lab's layout is of DFlash",
    ),
    "contradiction": (
        "z-lab",
        lambda raw: nested(block_size=5)(raw),
        "block_size=4, and in dflash_config 5",
    ),
    "domino": ("specforge", nested(projector_type="domino"), "projector_type='domino'"),
    "window": (
        "z-lab",
        lambda raw: raw | {"layer_types": ["sliding_attention"] * 2},
        "only full_attention",
    ),
    "layers of another": (
        "deepspec",
        lambda raw: raw | {"num_target_layers": 36},
        "num_target_layers=36, the target has 4: it is a drafter for another",
    ),
    "vocabulary": (
        "deepspec",
        lambda raw: raw | {"vocab_size": 97},
        "a vocabulary of 97, the target has 48 and 96",
    ),
    "width": (
        "deepspec",
        lambda raw: raw | {"hidden_size": 64},
        "of width 64 .* head for another target",
    ),
    "block": ("deepspec", lambda raw: raw | {"block_size": 0}, "drafts no token"),
    "head": (
        "deepspec",
        lambda raw: raw | {"markov_head_type": "gru"},
        "markov_head_type='gru' is not one of vanilla, gated, rnn",
    ),
    "flag": (
        "deepspec",
        lambda raw: raw | {"enable_confidence_head": "yes"},
        "enable_confidence_head='yes' must be true or false",
    ),
    "fill-in": (
        "deepspec",
        lambda raw: raw | {"sample_from_anchor": False},
        "deepspec's slots are anchor-first",
    ),
    "unstated slots": (
        "speculators",
        lambda raw: {k: x for k, x in raw.items() if k != "sample_from_anchor"},
        "no sample_from_anchor, and both kinds",
    ),
    "flags apart": (
        "speculators",
        lambda raw: raw | {"query_zero_predicts_next": True},
        "contradict each other",
    ),
    "type": (
        "speculators",
        lambda raw: raw | {"speculators_model_type": "dflash"},
        "each with its own architecture",
    ),
    "temperatures": (
        "speculators",
        lambda raw: raw | {"confidence_temperatures": [1.0, 0.0, 1.0]},
        "must be 3 numbers above 0",
    ),
}


def test_slots_are_said_where_each_reader_looks():
    """Fails if the flag is in `dflash_config` alone: llama.cpp's converter looks beside
    it, and would take fill-in slots for anchor-first ones."""
    config = with_heads("vanilla", slots="fill-in")
    raw, key = dialects.to_dict(config, "specforge"), "sample_from_anchor"
    assert raw[key] is raw["dflash_config"][key] is False
    # What a layout's slots are anyhow is said nowhere.
    raw = dialects.to_dict(with_heads("vanilla"), "specforge")
    assert key not in raw and key not in raw["dflash_config"]


@pytest.mark.parametrize("fault", BAD_CONFIGS)
def test_bad_configs_are_refused(tmp_path, fault):
    case, change, message = BAD_CONFIGS[fault]
    dialect, config = CASES[case]
    path = tmp_path / "config.json"
    raw = dialects.to_dict(config, dialect)
    path.write_text(json.dumps(raw))
    dialects.read_config(path, TARGET)
    path.write_text(json.dumps(change(raw)))
    with pytest.raises(files.CheckpointError, match=message):
        dialects.read_config(path, TARGET)


@pytest.mark.parametrize(
    ("dialect", "config", "message"),
    [
        ("other", DFLASH, "dialect='other' is not one of z-lab, deepspec, specforge"),
        ("z-lab", with_heads("vanilla"), "DFlash, which has no heads"),
        ("deepspec", DFLASH, "deepspec's slots are anchor-first"),
        (
            "specforge",
            with_heads("vanilla", draft_vocab_size=32),
            "specforge has the whole vocabulary",
        ),
    ],
)
def test_a_layout_without_words_for_a_drafter(dialect, config, message):
    with pytest.raises(ValueError, match=message):
        dialects.check_config(config, dialect)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": "anchor"}, "slots='anchor' is not one of fill-in, anchor-first"),
        ({"block_size": 1}, "drafts no token"),
        ({"draft_vocab_size": 97}, "draft_vocab_size=97 must be from 1"),
        ({"head": "rnn"}, "head='rnn' with markov_rank=0"),
        ({"confidence_with_markov": True}, "no head that embeds the token before"),
    ],
)
def test_configs_of_no_drafter_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DFLASH, **changes).validate()


PUBLISHED = [
    ("released/z-lab_Qwen3-4B-DFlash-b16.config.json", "4B", 15, 1_074_854_400),
    ("specforge/qwen3-4b-dflash.json", "4B", 15, 1_074_854_400),
    ("specforge/qwen3-8b-dflash.json", "8B", 15, 2_097_252_864),
    ("specforge/qwen3-4b-dspark.json", "4B", 7, None),
    ("specforge/qwen3-8b-dspark.json", "8B", 7, None),
    ("derived_deepspec/dspark_qwen3_4b_block7.derived.json", "4B", 7, 2_786_267_138),
    ("derived_deepspec/dspark_qwen3_8b_block7.derived.json", "8B", 7, 4_742_163_458),
]


@pytest.mark.skipif(not CONFIGS.exists(), reason="no published configs here")
@pytest.mark.parametrize(("name", "size", "num_drafts", "num_bytes"), PUBLISHED)
def test_published_configs(name, size, num_drafts, num_bytes):
    """The bytes are those of the published files: fails on any wrong shape."""
    target = config_lib.read(CONFIGS / "qwen3" / f"Qwen3-{size}.config.json")
    dialect, config = dialects.read_config(CONFIGS / name, target)
    assert config.taps == (2, 10, 18, 26, 34) and config.num_drafts == num_drafts
    assert dialects.default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    shapes = block_params.shapes(config)
    if dialect != "deepspec":
        shapes = shapes.replace(embed=None, lm_head=None)
    assert num_bytes in (None, params_lib.num_bytes(shapes))


@pytest.mark.skipif(not CONFIGS.exists(), reason="no published configs here")
def test_published_configs_of_other_drafters_are_refused():
    target = config_lib.read(CONFIGS / "qwen3" / "Qwen3-8B.config.json")
    with pytest.raises(files.CheckpointError, match="no layout of DFlash or DSpark"):
        dialects.read_config(CONFIGS / "specforge/qwen3-8b-domino.json", target)
