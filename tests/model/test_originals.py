"""Heads compared with their publishers' PyTorch code: files, rows, chains and losses.

`docs/testing.md` says how the official packages are installed; tests of a missing
package are skipped.
"""

import dataclasses
import functools
import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import head_layouts as layouts, test_eagle3_head as heads
from model.head_layouts import TARGET

from spec_jax.model import (
    block_draft,
    block_heads,
    eagle3,
    families,
    save as save_lib,
)
from spec_jax.training import (
    block,
    eagle3 as eagle3_training,
    heads as training_heads,
    targets,
)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # from their code
]

SPECFORGE = "specforge.modeling.draft"
MODELS = {
    "z-lab": "dflash.model.DFlashDraftModel",
    "SpecForge dflash": f"{SPECFORGE}.dflash.DFlashDraftModel",
    "SpecForge dspark": f"{SPECFORGE}.dspark.DSparkDraftModel",
    "SpecForge eagle3": f"{SPECFORGE}.llama3_eagle.LlamaForCausalLMEagle3",
    "speculators dflash": "speculators.models.dflash.DFlashDraftModel",
    "speculators dspark": "speculators.models.dspark.DSparkDraftModel",
    "speculators dflash2": "speculators.models.dflash2.DFlash2DraftModel",
    "speculators eagle3": "speculators.models.eagle3.Eagle3DraftModel",
    "speculators peagle": "speculators.models.peagle.PEagleDraftModel",
}
# The layout of the head's files, and the owner's class that opens them.
BLOCKS = {
    "z-lab": ("z-lab", "z-lab"),
    "SpecForge dflash": ("z-lab", "SpecForge dflash"),
    "SpecForge vanilla": ("specforge vanilla", "SpecForge dspark"),
    "SpecForge gated": ("specforge", "SpecForge dspark"),
    "SpecForge rnn": ("specforge rnn", "SpecForge dspark"),
    "speculators dflash": ("speculators dflash", "speculators dflash"),
    "speculators dflash2": ("speculators dflash2", "speculators dflash2"),
    "speculators dspark": ("speculators", "speculators dspark"),
    "speculators dspark, whole": ("speculators, whole", "speculators dspark"),
}
EAGLES = {
    "SpecForge": ("midlayer", "SpecForge eagle3"),
    "speculators": ("speculators plain", "speculators eagle3"),
    "speculators of Qwen3": ("speculators of Qwen3", "speculators eagle3"),
    "parallel": ("parallel", "speculators peagle"),
    "parallel of Qwen3": ("parallel of Qwen3", "speculators peagle"),
}
CASES = layouts.CASES | {
    "specforge vanilla": ("specforge", layouts.with_heads("vanilla")),
    "specforge rnn": ("specforge", layouts.with_heads("rnn")),
    "speculators, whole": ("speculators", layouts.with_heads("rnn", slots="fill-in")),
    # Heads of speculators go without the norm before `fc`.
    "speculators plain": (
        "speculators", dataclasses.replace(layouts.EAGLE, norm_before_residual=True)),
}  # fmt: skip
# Tensors that a reader takes from the target, or does not have.
FROM_TARGET = {"embed_tokens.weight", "lm_head.weight", "t2d", "d2t"}
FROM_TARGET |= {"verifier_lm_head.weight", "verifier_norm.weight"}
T, ANCHOR = 14, 8
TOKENS = np.random.default_rng(2).integers(1, 95, (1, T)).astype(np.int32)
MASK = np.arange(T)[None] >= 3  # rows that are not the prompt's


def original(name: str):
    """Imports an owner's class; skips the test if a package is missing."""
    path, _, class_name = MODELS[name].rpartition(".")
    package = path.partition(".")[0]
    pytest.importorskip("torch", reason="torch is not installed (extra 'originals')")
    pytest.importorskip(package, reason=f"{package} is not installed (docs/testing.md)")
    return getattr(importlib.import_module(path), class_name)


def drawn(width, *, seed=3):
    """Draws a row of that width for each token of the text."""
    rows = np.random.default_rng(seed).normal(size=(1, T, width))
    return rows.astype(np.float32)


def opened(folder, case):
    """Saves a head's files. Returns its config, its weights, the model that the owner's
    own loader reads, and features of the text."""
    files, name = (BLOCKS | EAGLES)[case]
    dialect, config = CASES[files]
    params, model_class = layouts.make_params(config), original(name)
    save_lib.save(folder / "target", TARGET, layouts.target_params())
    origin = dataclasses.replace(
        layouts.ORIGIN, target_name=str(folder / "target"), ttt_length=3
    )
    kind = layouts.files_of(config)
    kind.save(folder / "head", config, params, dialect=dialect, origin=origin)
    if name.startswith("speculators"):
        speculators = importlib.import_module("speculators")
        theirs = speculators.SpeculatorModelConfig.from_pretrained(folder / "head")
        theirs.transformer_layer_config._attn_implementation = "eager"
        # A tensor that it does not find is NaN, and so are the rows.
        model = model_class.from_pretrained(folder / "head", config=theirs)
        return config, params, model.eval(), drawn(config.features_size)
    model, info = model_class.from_pretrained(folder / "head", output_loading_info=True)
    assert set(info["missing_keys"]) <= FROM_TARGET
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    if name.endswith("eagle3"):  # transformers 5 does not fill its RoPE tables.
        model.midlayer.self_attn._init_rope()
    return config, params, model.float().eval(), drawn(config.features_size)


def tensor(x):
    import torch

    x = np.array(x)
    return torch.from_numpy(x.astype(np.int64) if x.dtype == np.int32 else x)


def close(ours, theirs, bound=5e-6):
    """Fails beyond float32's rounding; another computation is off by tenths."""
    theirs = np.asarray(theirs.detach() if hasattr(theirs, "detach") else theirs)
    assert np.shape(ours) == theirs.shape
    assert np.abs(np.asarray(ours) - theirs).max() <= bound * np.abs(theirs).max()


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks(tmp_path, case, monkeypatch):
    """Fails if an owner refuses a folder, or computes a row of a block differently."""
    config, params, model, features = opened(tmp_path, case)

    def ours(anchor):
        given = jnp.asarray(TOKENS), jnp.asarray(features), jnp.asarray([[anchor]])
        return block_draft.forward_sequence(params, config, *given)[0][0, 0]

    if case.startswith("speculators"):
        theirs = speculators_rows(model, features, monkeypatch)
    else:
        masks = [config.mask_token_id] * (config.block_size - 1)
        ids = [int(TOKENS[0, ANCHOR]), *masks]
        embed = np.asarray(layouts.target_params().embed)[ids][None]
        theirs = model(
            position_ids=tensor(np.arange(ANCHOR + config.block_size)[None]),
            noise_embedding=tensor(embed),
            target_hidden=tensor(features[:, :ANCHOR]),
        )
    close(ours(ANCHOR), theirs[0])
    with pytest.raises(AssertionError):  # Negative control: one position later.
        close(ours(ANCHOR + 1), theirs[0])


def batch_of(mask, features, final, tokens=TOKENS):
    """Returns a batch of one text; `mask` marks the rows that count."""
    batch = {"tokens": tokens, "mask": mask, "features": features, "final": final}
    return batch | {"greedy": np.ones(1, bool)}


def anchored(config, batch):
    """Draws three anchors of blocks for a batch."""
    draw = block.Anchors(num_drafts=config.num_drafts, seed=0, count=3)
    return draw(batch, np.arange(1), 1)


def block_loss(config, params, batch) -> float:
    """Returns our own loss, with the terms of the head's kind."""
    trained = training_heads.trained(config, params)
    teacher = targets.teacher_of(layouts.target_params(), None)
    terms = block.DSPARK if config.head != "none" else block.DFLASH
    batch = jax.tree.map(jnp.asarray, batch)
    return float(block.loss(config, trained, batch, teacher, terms=terms))


def speculators_rows(model, features, monkeypatch):
    """Returns hidden states of one block, by the model's own training forward."""
    import torch

    core = importlib.import_module("speculators.models.dflash.core")
    fixed = torch.tensor([ANCHOR]), torch.tensor([True])
    monkeypatch.setattr(core, "select_anchors", lambda *args: fixed)
    final = torch.zeros(1, T, TARGET.hidden_size)
    return model._backbone_forward(
        tensor(features), tensor(TOKENS), torch.ones(1, T), final,
        torch.zeros(1, T, dtype=torch.long), max_anchors=1,
    )[0]  # fmt: skip


@pytest.mark.parametrize("case", [name for name in BLOCKS if name.startswith("SpecF")])
def test_specforge_losses_of_blocks(tmp_path, case, monkeypatch):
    """Fails if a term, its weight or the row that it reads differs. Greedy drafts of
    the sequential heads are equal, too, since their logits are."""
    import torch

    config, params, model, features = opened(tmp_path, case)
    algorithms = pytest.importorskip("specforge.algorithms.common.dflash_family_model")
    target = layouts.target_params()
    head = torch.nn.Linear(config.hidden_size, 96, bias=False)
    head.weight.data = tensor(target.head)
    embed = torch.nn.Embedding.from_pretrained(tensor(target.embed))
    is_dspark = config.head != "none"
    kind = algorithms.OnlineDSparkModel if is_dspark else algorithms.OnlineDFlashModel
    theirs = kind(
        model, head, embed, config.mask_token_id, block_size=config.block_size,
        attention_backend="sdpa", num_anchors=3, loss_decay_gamma=4.0,
    )  # fmt: skip
    final = drawn(config.hidden_size, seed=5)
    batch = anchored(config, batch_of(MASK, features, final))
    anchors = tensor(batch["anchors"])
    fixed = anchors, torch.ones_like(anchors, dtype=torch.bool)
    monkeypatch.setattr(theirs, "_sample_anchor_positions", lambda *args: fixed)
    told = {"target_last_hidden_states": tensor(final)} if is_dspark else {}
    # `loss_mask` marks tokens, and our mask the rows before them.
    loss_mask = torch.ones(1, T)
    loss_mask[:, :4] = 0
    found = theirs(
        input_ids=tensor(TOKENS), hidden_states=tensor(features), loss_mask=loss_mask,
        **told,
    )  # fmt: skip
    close(block_loss(config, params, batch), found[0])


def speculators_losses(*names_and_weights):
    """Returns their terms, by the formulas beside their Triton kernels."""
    eager = importlib.import_module("speculators.losses.eager")
    return {
        name: (getattr(eager, f"{name}_loss"), weight)
        for name, weight in names_and_weights
    }


def logits_of(final) -> np.ndarray:
    """Returns the target's logits after each row."""
    return final @ np.asarray(layouts.target_params().head).T


def best_of(final):
    """Returns the target's most likely token after each row."""
    return logits_of(final).argmax(-1).astype(np.int32)


def last_states():
    """Draws outputs of the last layer; returns them raw and normed by the target."""
    raw, params = drawn(TARGET.hidden_size, seed=5), layouts.target_params()
    normed = families.of(TARGET).sequence_norm(params, TARGET, jnp.asarray(raw))
    return raw, np.asarray(normed)


@pytest.mark.parametrize("case", ["speculators dflash", "speculators dspark, whole"])
def test_speculators_losses_of_blocks(tmp_path, case, monkeypatch):
    """Fails if a term, its weight or the row that it reads differs.

    The target wrote the text greedily: their labels are its choices, and ours the text.
    They divide by the number of drafts, and we by the sum of weights. With a draft
    vocabulary they renormalise the target; we count the tokens that it lacks as lost.
    """
    import torch

    config, params, model, features = opened(tmp_path, case)
    is_dspark = config.head != "none"
    raw, final = last_states()
    choices = best_of(final)
    tokens = np.concatenate([TOKENS[:, :1], choices[:, :-1]], axis=1)
    places = np.arange(T)[None]
    mask = (places >= 3) & (places < T - config.block_size)
    batch = anchored(config, batch_of(mask, features, final, tokens))
    anchors = batch["anchors"][0]
    core = importlib.import_module("speculators.models.dflash.core")
    fixed = tensor(anchors), torch.ones(3, dtype=torch.bool)
    monkeypatch.setattr(core, "select_anchors", lambda *args: fixed)
    terms = [("ce", 0.1), ("tv", 1.8)] if is_dspark else [("ce", 1.0)]
    told = {"loss_config": speculators_losses(*terms), "gamma": 4.0, "max_anchors": 3}
    if is_dspark:
        told["tv_loss_fn"] = speculators_losses(("tv", 1.0))["tv"][0]

    def theirs(shift):
        """Returns their loss; its mask marks tokens, and ours the rows before them."""
        loss_mask = np.roll(mask, shift, axis=1)
        return model(
            tensor(features), tensor(tokens), tensor(loss_mask.astype(np.float32)),
            tensor(raw), torch.zeros(1, T, dtype=torch.long), **told,
        )[1]  # fmt: skip

    counts = batch["weights"][0] > 0
    weights = counts * np.exp(-np.arange(config.num_drafts) / 4.0)
    scaled = block_loss(config, params, batch) * weights.sum() / counts.sum()
    np.testing.assert_allclose(scaled, float(theirs(1)), rtol=1e-5)
    assert abs(scaled / float(theirs(2)) - 1) > 1e-3  # Negative control: a column later


def eagle_losses(config, params, features, final, num_steps) -> list[float]:
    """Returns our own losses, with these numbers of steps."""
    batch = batch_of(MASK, features, final) | {"best": best_of(final)}
    batch = jax.tree.map(jnp.asarray, batch)
    teacher = targets.teacher_of(layouts.target_params(), params.hot)
    loss = functools.partial(
        eagle3_training.loss, config, training_heads.trained(config, params), batch
    )
    return [float(loss(teacher, steps=steps)) for steps in num_steps]


def unrolled(config, params, features, steps):
    """Returns the logits of each drafting step after the text's own tokens."""
    tokens = jnp.asarray(np.pad(TOKENS, ((0, 0), (0, steps - 1))))
    given = jnp.asarray(features), tokens, steps - 1
    return [np.asarray(x.logits) for x in heads.sequences(params, config, *given)]


@pytest.mark.parametrize(
    "case", [name for name in EAGLES if not name.startswith("parallel")]
)
def test_eagle3_steps(tmp_path, case):
    """Fails if an owner refuses a folder, or computes a drafting step differently."""
    import torch

    config, params, model, features = opened(tmp_path, case)
    ours = unrolled(config, params, features, 3)
    if case == "SpecForge":
        hidden = model.project_hidden_states(tensor(features))
        kept = [[], []]
        length = torch.full((1, 1, T, T), torch.finfo(torch.float32).min).triu(1)
        for j, logits in enumerate(ours):
            pairs = tensor(np.pad(TOKENS[:, j:], ((0, 0), (0, j))))
            embed = tensor(params.embed)[pairs]
            hidden = model.backbone(
                embed, hidden, kept, length, tensor(np.arange(T)[None])
            )
            close(logits[:, : T - j], model.compute_logits(hidden)[:, : T - j])
        return
    drafts = model(
        tensor(features), tensor(TOKENS), torch.zeros(1, T, dtype=torch.long),
        ttt_steps=3,
    )  # fmt: skip
    for j, (logits, theirs) in enumerate(zip(ours, drafts, strict=True)):
        chosen = logits.argmax(-1)[:, : T - j]
        np.testing.assert_array_equal(chosen, theirs[:, : T - j])
    assert (ours[0].argmax(-1)[:, 1:] != drafts[0][:, :-1].numpy()).any()


@pytest.mark.parametrize("case", ["parallel", "parallel of Qwen3"])
def test_speculators_parallel_head(tmp_path, case, monkeypatch):
    """Fails if speculators refuses a file, or computes a pair, or one of the two masks
    after pairs 3 and 5, differently."""
    import torch

    config, params, model, features = opened(tmp_path, case)
    known = {}
    core = importlib.import_module("speculators.models.peagle.core")
    rows = [*range(T - 1), 3, 5, 3, 5], [0] * (T - 1) + [1, 1, 2, 2]
    monkeypatch.setattr(
        core, "generate_cod_sample_indices", lambda **told: map(torch.tensor, rows)
    )
    monkeypatch.setattr(
        core, "compute_metrics", lambda **told: (known.update(told), None)
    )
    model(
        tensor(features[:, :-1]), tensor(TOKENS[:, 1:]),
        torch.zeros(1, T - 1, dtype=torch.long), num_depths=3,
        verifier_last_hidden_states=torch.zeros(1, T - 1, 48),
    )  # fmt: skip
    theirs = known["logits"][0]
    for late in (0, 1):
        pairs, masks = eagle3.forward_parallel(
            params, config, jnp.asarray(TOKENS[:, 1:]), jnp.asarray(features[:, :-1]),
            jnp.asarray([[3 + late, 5 + late]]), num_masks=2,
        )  # fmt: skip
        head = np.asarray(params.lm_head).T
        close(pairs[0] @ head, theirs[: T - 1])
        ours = np.swapaxes(np.asarray(masks[0]), 0, 1).reshape(4, -1) @ head
        if late:  # Negative control: masks after the next pair.
            with pytest.raises(AssertionError):
                close(ours, theirs[T - 1 :])
        else:
            close(ours, theirs[T - 1 :])


def test_speculators_selector(tmp_path, monkeypatch):
    """Fails if the candidates, or the selector's terms for them, differ."""
    config, params, model, features = opened(tmp_path, "speculators dflash2")
    hidden = speculators_rows(model, features, monkeypatch)[0]
    tokens = np.array([ANCHOR, 3, 8, 2], np.int32)
    logits = hidden @ tensor(params.lm_head).T
    ids, scores = model.candidate_selector.select(logits, hidden, tensor(tokens))
    _, bias, _ = block_heads.correct(
        params, config, block_heads.first_state(config, (4,)), jnp.asarray(tokens),
        jnp.asarray(hidden.detach().numpy()),
        product=lambda x, w: x @ jnp.asarray(w).T,
    )  # fmt: skip
    unary = jnp.asarray(logits.detach().numpy())
    ours = np.asarray(block_heads.candidates(config, unary) + bias)
    np.testing.assert_array_equal(np.isfinite(ours).sum(axis=1), config.top_k)
    close(np.take_along_axis(ours, ids.numpy(), axis=1), scores)


def without_triton(monkeypatch):
    """Imports SpecForge's trainer, with a plain formula of its cross-entropy."""
    import torch

    def loss(logits, target_p, mask):
        return -(mask * target_p * torch.log_softmax(logits.float(), 2)).sum(2).mean()

    module = types.ModuleType("specforge.core.loss")
    module.LogSoftmaxLoss = types.SimpleNamespace(apply=loss)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return importlib.import_module("specforge.algorithms.eagle3.model")


def test_specforge_loss_of_eagle3(tmp_path, monkeypatch):
    """Fails if a step, its weight, or the token that a column predicts differs.

    Theirs is the mean over T columns, of which the last predicts nothing. It masks
    columns whose own token is the prompt's; ours masks columns that predict one.
    """
    import torch

    config, params, model, features = opened(tmp_path, "SpecForge")
    algorithm = without_triton(monkeypatch)
    model.embed_tokens.weight.data = tensor(params.embed)
    theirs = algorithm.OnlineEagle3Model(model, length=3)
    final = drawn(48, seed=5)
    (ours,) = eagle_losses(config, params, features, final, [3])
    # Column i: its token is i + 1, and the target's row i + 1 predicts the token after.
    shift = lambda x: np.concatenate([x[:, 1:], np.zeros_like(x[:, :1])], axis=1)
    logits = logits_of(final)
    found = theirs(
        input_ids=tensor(shift(TOKENS)), attention_mask=torch.ones(1, T),
        target=tensor(shift(logits)), hidden_states=tensor(features),
        loss_mask=tensor(shift(MASK).astype(np.float32))[..., None],
    )  # fmt: skip
    losses = found[0]
    total = sum(0.8**j * float(loss) for j, loss in enumerate(losses))
    np.testing.assert_allclose(ours * (T - 1) / T, total, rtol=1e-5)


def test_speculators_loss_of_eagle3(tmp_path):
    """Fails if a step, its weight, or the token that a column predicts differs.

    Theirs is a divergence, ours a cross-entropy: they differ by the entropy of the
    target. They divide by the columns that count in each step, and we by all.
    """
    import torch

    config, params, model, features = opened(tmp_path, "speculators")
    steps, (raw, final) = 3, last_states()
    losses = eagle_losses(config, params, features, final, range(steps + 1))
    logits = logits_of(final)[:, 1:]
    hot = np.arange(96) if params.hot is None else np.asarray(params.hot)
    # They count positions whose best token the draft vocabulary lacks; ours are masked.
    counted = MASK[:, 1:] & np.isin(logits.argmax(-1), hot)
    probs = np.asarray(jax.nn.softmax(jnp.asarray(logits[..., hot])))
    entropy = -(probs * np.log(probs)).sum(-1)

    def theirs(decay):
        """Returns the sums over the columns of each step."""
        _, _, found = model(
            tensor(features[:, :-1]), tensor(TOKENS[:, 1:]),
            torch.zeros(1, T - 1, dtype=torch.long), loss_mask=tensor(counted),
            verifier_last_hidden_states=tensor(raw[:, 1:]), ttt_steps=steps,
            ttt_step_loss_decay=decay, loss_config=speculators_losses(("kl_div", 1.0)),
        )  # fmt: skip
        means = [float(found[f"loss_{j}_sum"]) for j in range(steps)]
        return [mean * counted[:, j:].sum() for j, mean in enumerate(means)]

    ours = [
        (losses[j + 1] - losses[j]) * (T - 1)
        - 0.8**j * entropy[:, j:][counted[:, j:]].sum()
        for j in range(steps)
    ]
    np.testing.assert_allclose(ours, theirs(0.8), rtol=1e-4)
    others = theirs(0.9)  # Negative control.
    assert np.isclose(ours, others, rtol=1e-4).tolist() == [True, False, False]
