"""Training of drafters: texts, targets, loss, a killed run, and its head."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_pair
from model import eagle3_oracle as oracle

import spec_jax as sj
from experiments import compare_heads, train_drafter
from experiments.heads import export as head_export, families, jobs, rollouts
from spec_jax import testing
from spec_jax.engine import rows as rows_lib
from spec_jax.model import (
    block_files,
    checkpoint_files as files,
    config as config_lib,
    eagle3_files,
    gpt_neox,
    head_dialects,
    llama,
    load,
    row_model,
    sequence,
    tokenizer,
)
from spec_jax.training import eagle3, loop, targets


STEPS = 3  # of drafting, where the loss is looked at
TARGET = tiny_pair.config(num_layers=3)
FLAGS = [
    *("--family", "eagle3", "--taps", "0,1,2", "--ttt-steps", "2"),
    *("--prompts", "10", "--prefix", "9", "--length", "16", "--draft-vocab", "40"),
    *("--batch", "4", "--steps", "4", "--save-every", "2", "--eval-every", "2"),
    *("--impl", "native", "--mlp", "24"),
]


pytestmark = pytest.mark.usefixtures("optax_promotes")
# Orbax leaves its event loops to the garbage collector.
LEAVES_LOOPS = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "target"
    return tiny_pair.write_model(folder, TARGET, seed=0)


@pytest.fixture(scope="module")
def work(target, tmp_path_factory):
    """Rollouts and a cache."""
    folder = tmp_path_factory.mktemp("work")
    for stage in ("rollouts", "cache"):
        run(target, folder, stage)
    return folder


def command(target, work, stage, *more) -> list[str]:
    places = ["--target", str(target), "--work", str(work), "--stage", stage]
    return [*FLAGS, *places, *more]


def run(target, work, stage, *more) -> None:
    assert train_drafter.main(command(target, work, stage, *more)) == 0


def args_of(target, work, *more):
    return train_drafter.parse_args(command(target, work, "train", *more))


def job_of(target, work, *more):
    return jobs.prepare(args_of(target, work, *more))


def with_texts(work, folder):
    """The folder, with the same rollouts."""
    folder.mkdir(exist_ok=True)
    shutil.copy(work / "texts.npz", folder)
    return folder


def exported(target, folder, *more):
    """The folder of a head, and its card."""
    out = folder / "export"
    run(target, folder, "export", *more, "--out", str(out))
    return out, (out / "README.md").read_text()


def weights_of(target, folder, *more):
    """The weights that training begins with, and those of its newest checkpoint."""
    args = args_of(target, folder, *more)
    first = jobs.init(args, jobs.prepare(args))
    return first, loop.restore(jobs.recipe(args), first, args.work)[0]


def test_rollouts_are_half_greedy(target, work):
    """Against whole sequences, where the first choice leads by more than rounding."""
    texts = job_of(target, work).online.texts
    assert texts.tokens.shape == (20, 16)
    config, params = load.load(target)
    logits = np.asarray(sequence.logits(params, config, jnp.asarray(texts.tokens)))
    is_first = logits[:, :-1].argmax(axis=-1) == texts.tokens[:, 1:]
    written = texts.mask[:, :-1]
    shares = [row[mask].mean() for row, mask in zip(is_first, written, strict=True)]
    assert sum(share == 1 for share in shares) == 10
    assert sum(share < 0.9 for share in shares) >= 8


def store_of(folder, online):
    return targets.store_of(folder, online.params, online.config, online.taps)


def test_a_cache_has_the_bits_of_the_target(target, work):
    job = job_of(target, work)
    online, store = job.online, store_of(work / "cache", job.online)
    cached = targets.Cached(store, online)
    assert targets.missing(store, online.texts) == []
    rows = np.array([7, 0, 19])
    for name, array in online[rows].items():
        testing.assert_same_bits(cached[rows][name], array, what=name)
    turned = dataclasses.replace(online.config, rope_theta=5e5)  # The same weights.
    other_taps = job_of(target, work, "--taps", "0,2,1").online
    for what, other in (
        ("taps", other_taps),
        ("target_config", dataclasses.replace(online, config=turned)),
    ):
        with pytest.raises(ValueError, match=f"cache.json: of another {what}; delete"):
            store_of(work / "cache", other)


def test_texts_and_cache_may_be_in_another_folder(target, work, tmp_path):
    args = args_of(target, tmp_path, "--texts", str(work))
    online = jobs.prepare(args).online
    assert targets.missing(jobs.store_of(args, online), online.texts) == []


def test_a_cache_goes_on_where_it_was_killed(target, work, tmp_path):
    """Half a text, and texts that are added later."""
    online = job_of(target, work).online
    store, first = store_of(tmp_path, online), online.texts.read(0)
    with pytest.raises(ValueError, match=r"rows float32\[3, 4\] of a text of "):
        store.add(first, np.zeros((3, 4), np.float32))
    store.add(first, online.rows_of(0))
    (whole,) = tmp_path.glob("*.rows")
    half = store._path(online.texts.read(1))
    half.with_name(f"{half.name}.partial").write_bytes(whole.read_bytes()[:10])
    store, made = store_of(tmp_path, online), []
    with pytest.raises(ValueError, match="lacks 19 of 20 texts; run the stage cache"):
        targets.Cached(store, online)
    targets.write(store, online, after_text=lambda: made.append(None))
    assert len(made) == 19
    for again in (store, store_of(tmp_path, online)):
        every = np.arange(20)
        for name, array in online[every].items():
            cached = targets.Cached(again, online)[every]
            testing.assert_same_bits(cached[name], array, what=name)


def test_rollouts_record_what_decoding_computes(target, work, tmp_path):
    """The same texts with `--targets cache`: rows of the target, bit for bit."""
    run(target, tmp_path, "rollouts", "--targets", "cache")
    online = job_of(target, tmp_path).online
    testing.assert_same_bits(
        online.texts.tokens, job_of(target, work).online.texts.tokens
    )
    store = store_of(tmp_path / "cache", online)
    assert targets.missing(store, online.texts) == []
    model = row_model.RowModel(config=online.config, impl="native", slab=8)
    slots = rows_lib.SlotRows(model=model, num_slots=1)
    taps = *online.taps, online.config.num_layers
    for row in range(0, 20, 5):
        text = online.texts.read(row)
        prompt = [*map(int, text), 0]
        kv = slots.new_cache(capacity=len(prompt), page_size=16)
        _, recorded = slots.prefill_features(
            online.params, kv, prompt, slot=0, taps=taps, by_rows=True
        )
        recorded = np.asarray(recorded)[: len(text)]
        made = targets.stored(online.params, online.config, recorded)
        testing.assert_same_bits(store[text], made, what=f"text {row}: ")


def test_the_loss_is_that_of_drafting(target, work, tmp_path):
    """Against pairs one by one, as they are drafted: fails on a shift of any kind."""
    job = job_of(target, work)
    batch = job.online[np.arange(2)] | {"greedy": np.ones(2, bool)}
    teacher = targets.teacher_of(job.params, job.hot)
    params = eagle3.init(jax.random.key(3), job.config, job.target, job.params, job.hot)
    head, hot = reference(tmp_path, job, params), np.asarray(job.hot)
    tokens = jnp.asarray(batch["tokens"])
    of_target = np.asarray(sequence.logits(job.params, job.target, tokens), float)
    expected, agrees = [], []
    for b, logits in enumerate(of_target):
        for first in range(15):
            found = drafted(head, batch, b, first)
            row_agrees = []
            for j, draft in enumerate(found):
                row = logits[first + j + 1]
                is_counted = batch["mask"][b, first + j + 1]
                best = int(row.argmax())
                p = np.exp(row[hot] - row[hot].max())
                p /= p.sum()
                q = draft - np.log(np.sum(np.exp(draft)))
                is_kept = is_counted and best in hot
                expected.append(0.8**j * (-np.sum(p * q) if is_kept else 0.0))
                row_agrees.append(bool(hot[draft.argmax()] == best and is_counted))
            agrees.append(row_agrees)
    loss_of, measure = (
        jax.jit(functools.partial(function, job.config, steps=STEPS))
        for function in (eagle3.loss, eagle3.measure)
    )
    loss = loss_of(params, batch, teacher)
    np.testing.assert_allclose(float(loss), np.sum(expected) / 30, rtol=1e-4)
    found = measure(params, batch, teacher)
    tokens = rounds = 0
    for b in range(2):
        counted = np.flatnonzero(batch["mask"][b, 1:])
        tokens, at = tokens + len(counted), counted[0]
        while at <= counted[-1]:  # Each round follows from what the one before kept.
            row_agrees = agrees[15 * b + at]
            rounds += 1
            at += 1 + int(np.cumprod(row_agrees).sum())
    np.testing.assert_array_equal(found["accepted_length"], [tokens, rounds])
    # Negative control: features of the next position are another loss.
    moved = batch | {"features": np.roll(batch["features"], -1, axis=1)}
    other = loss_of(params, moved, teacher)
    assert abs(float(other) - float(loss)) > 1e-3


def drafted(head, batch, b, first):
    """Logits of the drafts after pair `first`, in float64, pair by pair."""
    tokens = np.asarray(batch["tokens"][b])
    own = min(STEPS - 1, 14 - first)
    features = np.asarray(batch["features"][b, : first + 1], float)
    made = oracle.run(head, features, tokens[1 : first + 2 + own], num_own=own)
    return made[1][first:]


def reference(folder, job, params):
    """The float64 head of these weights, by the file that is written of them."""
    whole = params.replace(embed=job.params.embed, hot=job.hot)
    origin = head_dialects.Origin(target=job.target)
    eagle3_files.save(folder, job.config, whole, dialect="midlayer", origin=origin)
    return oracle.Head(
        config=json.loads((folder / "config.json").read_text()),
        tensors=safetensors.numpy.load_file(folder / files.SINGLE_FILE),
        embed=np.asarray(job.params.embed),
    )


def losses(folder) -> list:
    rows = map(json.loads, (folder / "log.jsonl").open())
    return [(row["step"], row["loss"], row.get("held_out_agreement_0")) for row in rows]


@LEAVES_LOOPS
def test_a_killed_run_on_a_cache_is_the_run_without(target, work, tmp_path, capsys):
    """Fails if resuming, or reading what was cached, changes a bit of the head."""
    online = with_texts(work, tmp_path / "online")
    run(target, online, "train")
    assert "accepted length" in capsys.readouterr().out
    cached = "--targets", "cache"
    jobs.train(args_of(target, work, *cached), stop_after=3)
    run(target, work, "train", *cached)
    assert losses(work) == losses(online)
    assert [step for step, *_ in losses(work)] == [0, 1, 2, 3]
    assert losses(work)[-1][1] < losses(work)[0][1]
    made = []
    for folder in (work, online):
        out, card = exported(target, folder)
        made.append(eagle3_files.load(out, *load.load(target)))
        facts = "| steps | 4 |", "--ttt-steps 2", "--seed 0 --ttt", "| agreement 1 | "
        assert [fact for fact in facts if fact not in card] == []
    assert made[0][0] == job_of(target, work).config
    testing.assert_same_bits(made[0][1], made[1][1])
    # What was trained reads features of one size, and the export as they are.
    job, (_, weights) = job_of(target, work), weights_of(target, work)
    assert np.ptp(job.scale) > 0
    expected = np.asarray(weights.fc) * job.scale
    np.testing.assert_array_equal(made[0][1].fc, expected.astype(job.target.dtype))
    # A run that goes on from it begins with its weights, and its card says so.
    flags = ["--base", str(out), *("--draft-vocab", "7", "--mlp", "8")]
    assert_begins_as(made[0][1], target, work, *flags)
    onwards = with_texts(work, tmp_path / "onwards")
    run(target, onwards, "train", *flags)
    _, card = exported(target, onwards, *flags)
    assert "| went on from, SHA-256 of its weights | " in card and "--mlp 24" in card


def test_a_head_begins_without_an_opinion(target, work):
    """Fails if first logits are those of a target that was handed noise."""
    job = job_of(target, work)
    made = eagle3.init(jax.random.key(0), job.config, job.target, job.params, job.hot)
    hidden = np.random.default_rng(0).normal(size=(500, job.config.hidden_size))
    logits = (hidden * np.asarray(made.final_norm)) @ np.asarray(made.lm_head).T
    assert 0.8 < logits.std() < 1.25


@pytest.mark.slow
@LEAVES_LOOPS
def test_the_first_draft_is_trained_alone_at_first(target, work, tmp_path):
    """Fails if the loss changes at another step, or resuming changes a bit."""
    found = {}
    for name, flags, stops in (
        ("alone", ("--ttt-steps", "1"), (None,)),
        ("both", ("--first-alone", "2"), (None,)),
        ("killed", ("--first-alone", "2", "--eval-every", "1"), (3, None)),
    ):
        folder = with_texts(work, tmp_path / name)
        for stop in stops:
            jobs.train(args_of(target, folder, *flags), stop_after=stop)
        found[name] = [loss for _, loss, _ in losses(folder)]
    assert found["both"] == found["killed"]
    assert found["both"][:2] == found["alone"][:2]
    # Deeper steps count, too, from the third on.
    assert found["both"][2] > found["both"][1]
    assert found["both"][2:] != found["alone"][2:]


def assert_begins_as(head, target, work, *flags):
    """Of the drafter of `--base` all that is trained, whatever shape the flags ask."""
    args = args_of(target, work, *flags)
    job = jobs.prepare(args)
    first = jobs.rescaled(jobs.init(args, job), job.scale)
    testing.assert_same_bits(first, job.family.training.trained(job.config, head))
    anew = job.family.training.init(
        jax.random.key(0), job.config, job.target, job.params, job.hot
    )
    assert jax.tree.structure(anew) == jax.tree.structure(first)
    with pytest.raises(AssertionError):
        testing.assert_same_bits(first, anew)


def drafting(target, out) -> sj.LanguageModel:
    """The model with an export, which drafts; what it cannot change: `drafters`."""
    lm = sj.load(target, drafter=str(out), impl="native")
    made = sj.generate(lm, "import os", max_tokens=8, gamma=2)
    assert made.metrics["proposed"] > 0
    return lm


def trained_and_exported(target, work, folder, *flags):
    """The folder of a head, what is read of it, and its weights before and after."""
    run(target, with_texts(work, folder), "train", *flags)
    assert losses(folder)[-1][1] < losses(folder)[0][1]
    out, _ = exported(target, folder, *flags)
    config, head = eagle3_files.load(out, *load.load(target))
    assert config == job_of(target, folder, *flags).config
    drafting(target, out)
    return out, config, head, *weights_of(target, folder, *flags)


@pytest.mark.slow
@LEAVES_LOOPS
def test_a_narrower_head_has_an_embedding_of_its_own(target, work, tmp_path):
    """Fails if it is not trained, is lost in the file, or is taken for the target's."""
    flags = ["--width", "16", "--window", "5"]
    made = trained_and_exported(target, work, tmp_path, *flags)
    out, config, head, first, _ = made
    assert "--width 16 --window 5" in (out / "README.md").read_text()
    assert config.window == 5 and head.embed.shape == (tiny_pair.VOCAB_SIZE, 16)
    with pytest.raises(AssertionError):
        testing.assert_same_bits(head.embed, first.embed)
    assert_begins_as(head, target, work, "--base", str(out))


PARALLEL = [
    *("--family", "peagle", "--ttt-steps", "3", "--layers", "2", "--anchors", "3"),
    *("--mask-token", "7", "--window", "5"),
]


@pytest.mark.slow
@LEAVES_LOOPS
def test_a_parallel_head_is_trained_exported_and_drafts(target, work, tmp_path):
    """Fails if its mask is not trained, or not scaled as features are: the export would
    read another one."""
    made = trained_and_exported(target, work, tmp_path, *PARALLEL)
    out, config, head, first, weights = made
    assert config.is_parallel and len(head.more) == 1
    with pytest.raises(AssertionError):
        testing.assert_same_bits(weights.mask_hidden, first.mask_hidden)
    read = np.asarray(weights.fc) @ np.asarray(weights.mask_hidden)[0, 0]
    again = np.asarray(head.fc) @ np.asarray(head.mask_hidden)[0, 0]
    np.testing.assert_allclose(again, read, rtol=1e-4, atol=1e-5)
    assert np.ptp(job_of(target, tmp_path, *PARALLEL).scale) > 0
    assert_begins_as(head, target, work, *PARALLEL[:4], "--base", str(out))


BLOCKS = [
    *("--family", "dspark", "--head", "rnn", "--rank", "4", "--taps", "0,2"),
    *("--block", "3", "--layers", "1", "--anchors", "3", "--dialect", "speculators"),
]


@LEAVES_LOOPS
def test_blocks_are_trained_resumed_exported_and_drafted(
    target, work, tmp_path, capsys
):
    """Fails if a resumed run draws other anchors, or has other weights by a bit, or an
    export drafts otherwise."""
    whole, killed = (with_texts(work, tmp_path / name) for name in ("whole", "killed"))
    done = jobs.train(args_of(target, whole, *BLOCKS))
    assert done["held_out_accepted_length"] >= 1
    # On targets of the disk, which have the bits of those that are made.
    run(target, killed, "cache", *BLOCKS)
    flags = [*BLOCKS, "--targets", "cache"]
    jobs.train(args_of(target, killed, *flags), stop_after=3)
    _, at_stop = weights_of(target, killed, *BLOCKS)
    run(target, killed, "train", *flags)
    assert losses(killed) == losses(whole)
    _, uninterrupted = weights_of(target, whole, *BLOCKS)
    testing.assert_same_bits(weights_of(target, killed, *BLOCKS)[1], uninterrupted)
    with pytest.raises(AssertionError):
        testing.assert_same_bits(at_stop, uninterrupted)
    assert losses(killed)[-1][1] < losses(killed)[0][1]
    out, card = exported(target, killed, *BLOCKS, "--note", "Of the tests.")
    for fact in ("SHA-256", "| steps | 4 |", "held-out texts", "- Of the tests."):
        assert fact in card
    assert drafting(target, out).drafter.head == job_of(target, whole, *BLOCKS).config
    # Its weights alone are gone on from.
    flags = [*BLOCKS, "--base", str(out), "--block", "5"]
    _, head = block_files.load(out, *load.load(target))
    assert_begins_as(head, target, killed, *flags)
    args = command(target, work, "train", "--base", str(out))
    assert train_drafter.main(args) == 1
    assert "that is known: LlamaForCausalLMEagle3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_normalizer_stands_for_the_logits_of_the_whole_vocabulary(target, work):
    """Fails if a draft's distance to the target's distribution is another with it."""
    args = args_of(target, work, *BLOCKS)
    job = jobs.prepare(args)
    rows = np.arange(4)
    drawn = job.family.draw(args, job.config, job.hot)(job.online[rows], rows, 0)
    batch = jax.tree.map(jnp.asarray, drawn)
    params = job.family.training.complete(jobs.init(args, job), job.teacher)

    def loss(batch):
        told = job.family.of_loss(args)
        return job.family.training.loss(job.config, params, batch, job.teacher, **told)

    assert job.online.normalizers and job.hot is not None
    without = {name: x for name, x in batch.items() if name != "normalizer"}
    np.testing.assert_allclose(loss(batch), loss(without), rtol=1e-5)
    neighbours = batch | {"normalizer": jnp.roll(batch["normalizer"], 1, 1)}
    assert abs(loss(neighbours) - loss(without)) > 1e-4 * loss(without)


def compared(target, work, out, *more) -> list[str]:
    return [
        *("--target", str(target), "--texts", str(work), "--work", str(out / "heads")),
        *("--out", str(out / "rows.jsonl"), "--draft-vocab", "40", "--taps", "0,1,2"),
        *("--prompts", "2", "--gen-tokens", "6", "--context", "12", "--tree", "none"),
        *("--tokens", "100", *more, "--", "--mlp", "24", "--batch", "4"),
    ]


@pytest.mark.parametrize("head", compare_heads.HEADS)
def test_every_head_has_a_layout(target, work, tmp_path, head):
    """Fails if one is trained that no published layout can store."""
    args = compare_heads.parse_args(compared(target, work, tmp_path))
    told = compare_heads.training_of(args, head, "train")
    config = families.plan(told, families.target_config(told))
    sees = config.attention_of(0) if head == "jetspec" else None
    assert sees is None or (sees.is_causal and sees.window > 4096)


@pytest.mark.slow
@LEAVES_LOOPS
def test_heads_are_compared_on_the_same_texts(target, work, tmp_path):
    """Fails if a head sees fewer tokens than asked, or is trained again when it is
    done, or a row is lost."""
    args = compared(target, work, tmp_path, "--heads", "eagle3,dspark-rnn")
    for _ in range(2):  # The second goes on from the end of the first.
        assert compare_heads.main(args) == 0
        rows = [json.loads(x) for x in (tmp_path / "rows.jsonl").open()]
        kinds = [(row["kind"], row["head"]) for row in rows]
        assert kinds == [
            *(("head", "eagle3"), ("head", "dspark-rnn")),
            *(("sweep", "eagle3"),) * 2,
            *(("sweep", "dspark-rnn"),) * 2,
        ]
        for row in rows[:2]:
            lines = (tmp_path / "heads" / row["head"] / "log.jsonl").read_text()
            assert lines.count("\n") == row["steps"]
            last = json.loads(lines.splitlines()[-1])["tokens"]
            assert 100 <= row["tokens_seen"] < 100 + last
        assert all(row["matched"] for row in rows[2:])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--texts", "nowhere"), "nowhere/texts.npz: no such file; run the stage"),
        (("--taps", "0,1"), "of another taps; delete the folder"),
    ],
)
def test_heads_that_cannot_be_compared(target, work, tmp_path, capsys, more, says):
    assert compare_heads.main(compared(target, work, tmp_path, *more)) == 1
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_dspark_without_a_head_is_gone_on_from(target, work, tmp_path):
    """Fails if it is taken for one with the default's head."""
    out = tiny_pair.write_block(tmp_path / "head", target, kind="dflash")
    _, head = block_files.load(out, *load.load(target))
    with_texts(work, tmp_path)
    assert_begins_as(head, target, tmp_path, "--family", "dspark", "--base", str(out))


def test_ablations_of_blocks(target, work):
    """Fails if a flag is read by no loss, or a family has another's heads."""

    def trained(*flags):
        whole = "--draft-vocab", "264", *flags, "--block", "3"
        args = args_of(target, work, *whole)
        job = jobs.prepare(args)
        return job.config, job.family.of_loss(args)["terms"]

    config, terms = trained("--family", "dspark")
    assert (config.head, config.markov_rank) == ("vanilla", 64)
    assert config.slots == "anchor-first"
    assert config.has_confidence and terms == (0.1, 0.9, 1.0)
    config, terms = trained("--family", "dspark", "--no-tv", "--no-confidence")
    assert not config.has_confidence and terms == (1.0, 0.0, 1.0)
    config, _ = trained("--family", "dspark", "--head", "none")
    assert config.has_confidence and config.markov_rank == 0
    config, terms = trained("--family", "dflash2")
    assert (config.head, config.top_k, config.conv_group) == ("selector", 16, 16)
    assert config.slots == "fill-in" and terms == (1.0, 0.0, 0.0)
    config, terms = trained("--family", "dflash")
    assert (config.slots, config.num_drafts) == ("fill-in", 2)
    assert not config.has_confidence and terms == (1.0, 0.0, 0.0)


def write_target(folder, model_type):
    """A tiny target of another family, with the byte tokenizer."""
    sizes = {
        field.name: getattr(TARGET, field.name)
        for field in dataclasses.fields(config_lib.ModelConfig)
    }
    if model_type == "llama":
        scaling = config_lib.Llama3Scaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
        config = llama.LlamaConfig(**sizes, scaling=scaling)
    else:
        sizes |= {"num_kv_heads": sizes["num_heads"], "tie_word_embeddings": False}
        config = gpt_neox.GPTNeoXConfig(**sizes, rotary_size=8)
    return tiny_pair.write_model(folder, config, seed=0)


@LEAVES_LOOPS
@pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        ("llama", ("--family", "dspark", "--block", "3", "--layers", "1")),
        *(
            pytest.param("gpt_neox", flags, marks=pytest.mark.slow)
            for flags in (
                ("--family", "eagle3", "--ttt-steps", "2"),
                ("--family", "dflash2", "--block", "3", "--layers", "1"),
            )
        ),
    ],
)
def test_targets_of_other_families(tmp_path, model_type, flags):
    """Fails if a family is refused, a default does not work, or an export is not read
    back: of a Llama target it was written as a block drafter of Llama's layers."""
    target = write_target(tmp_path / "target", model_type)
    places = ["--target", str(target), "--work", str(tmp_path)]
    sizes = ("--length 16", "--batch 2", "--mlp 24", "--compute bfloat16")
    more = "--taps 0,2 --prompts 4 --prefix 5 --impl native --steps 2 --anchors 3"
    given = [*flags, *more.split(), *" ".join(sizes).split()]
    for stage in ("rollouts", "train"):
        assert train_drafter.main([*given, *places, "--stage", stage]) == 0
    out = tmp_path / "head"
    # The flags of the training are not given again.
    places += ["--stage", "export", "--out", str(out)]
    assert train_drafter.main([*flags[:2], *places]) == 0
    card = (out / "README.md").read_text()
    assert [size for size in sizes if size not in card] == []
    raw = json.loads((out / "config.json").read_text())
    if model_type == "llama":
        assert raw["model_type"] == "qwen3" and raw["num_anchors"] == 3
        assert raw["rope_scaling"]["rope_type"] == "llama3"
    drafting(target, out)


def test_flags_that_are_not_those_of_the_training(target, tmp_path, capsys):
    """Fails if a card could state flags that the training did not have."""
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    longer = ["--steps", "9"]
    for more in ([], longer):
        head_export.keep_flags(args_of(target, tmp_path, *more))
    for stage, check in (
        ("train", head_export.keep_flags),
        ("export", head_export.as_trained),
    ):
        more = [*longer, "--batch", "2"]
        args = train_drafter.parse_args(command(target, tmp_path, stage, *more))
        with pytest.raises(ValueError, match="of a training with --batch 4, and this"):
            check(args)


def test_a_chat_is_not_cut(target, tmp_path, capsys):
    """Fails if a chat loses its beginning, or one that leaves nothing to write runs."""
    folder = tmp_path / "chat"
    shutil.copytree(target, folder)
    (folder / "chat_template.jinja").write_text(tiny_pair.TEMPLATE)
    args = train_drafter.parse_args(
        command(folder, tmp_path, "rollouts", "--length", "4000")
    )
    ids = rollouts.prompt_ids(args, tokenizer.load(folder))
    assert min(map(len, ids)) > args.prefix
    args.raw = True
    assert max(map(len, rollouts.prompt_ids(args, tokenizer.load(folder)))) == 9
    assert train_drafter.main(command(folder, tmp_path, "rollouts")) == 1
    assert "10 of 10 prompts have up to" in capsys.readouterr().err
    # Options reach the template.
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ tools }}")
    option = ["--length", "4000", "--chat-option", '{"tools": [7]}']
    args = train_drafter.parse_args(command(folder, tmp_path, "rollouts", *option))
    shown = tokenizer.load(folder).encode("[7]")
    assert train_drafter.writer_of(args).prompts[0][-len(shown) :] == shown


REFUSED = (
    ("train", "--head rnn --no-tv", "--head, --no-tv with --family eagle3"),
    ("train", "--causal", "--causal with --family eagle3"),
    ("train", "--family peagle --causal", "--causal with --family peagle"),
    ("train", "--family peagle --width 9", "--width with --family peagle"),
    ("train", "--family peagle --mask-token 264", "mask_token_id=264 must be below"),
    ("train", "--family peagle --dialect deepspec --draft-vocab 264",
     "deepspec has no parallel heads"),
    ("train", "--family dflash --dialect z-lab --window 3 --draft-vocab 264",
     "sliding_window=3 is below the 7 rows of a block"),
    ("train", "--family dspark --width 9", "--width with --family dspark"),
    ("export", "--family dspark --dialect z-lab --no-copies", "are of deepspec alone"),
    ("train", "--dialect speculators --family dspark --mask-token 999999",
     "mask_token_id"),
    ("train", "--family dflash --draft-vocab 264 --block 1", "drafts no token"),
    ("train", "--devices 99", "99"),
    ("train", "--family dflash --dialect midlayer", "one of z-lab"),
    ("rollouts", "--family dflash", "--draft-vocab 40 with --dialect z-lab, which has "
     "the target's whole vocabulary of 264: leave --draft-vocab out"),
    ("export", "--work nowhere", "flags.json: no such file; run the stage tr"),
    ("train", "--batch 16", "20 texts are too few for batches of 16"),
    ("train", "--ttt-steps 15", "--length 17 or more"),
    ("train", "--taps 0,1,3", "each must be below 3"),
    ("train", "--first-alone 3", "a multiple of --save-every 2"),
    ("rollouts", "--prefix 16", "leaves nothing to write after --prefix 16"),
)  # fmt: skip


@pytest.mark.parametrize(("stage", "flags", "message"), REFUSED)
def test_bad_flags_are_refused(
    target, work, tmp_path, monkeypatch, capsys, stage, flags, message
):
    monkeypatch.chdir(tmp_path)  # Folders are made of relative paths.
    assert train_drafter.main(command(target, work, stage, *flags.split())) != 0
    assert message in capsys.readouterr().err
