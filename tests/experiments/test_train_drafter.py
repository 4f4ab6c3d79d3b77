"""Training of drafters: resumed runs, exported heads, and what is made of them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_pair
from head_runs import BLOCKS, args_of, command, job_of, run, with_texts
from script_runs import assert_fails_with, rows_of
from slow_cases import slow

import spec_jax as sj
from experiments import compare_heads, train_drafter
from experiments.heads import families, jobs
from spec_jax import testing
from spec_jax.model import (
    block_files,
    config as config_lib,
    eagle3_files,
    gpt_neox,
    llama,
    load,
)
from spec_jax.training import heads, loop


pytestmark = pytest.mark.usefixtures("optax_promotes")
# Orbax leaves its event loops to the garbage collector.
LEAVES_LOOPS = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


def exported(target, folder, *more):
    """Exports a head; returns its folder and its card."""
    out = folder / "export"
    run(target, folder, "export", *more, "--out", str(out))
    return out, (out / "README.md").read_text()


def weights_of(target, folder, *more):
    """Returns the weights before training, and those of its newest checkpoint."""
    args = args_of(target, folder, *more)
    first = jobs.init(args, jobs.prepare(args))
    return first, loop.restore(jobs.recipe(args), first, args.work)[0]


def losses(folder) -> list:
    rows = map(json.loads, (folder / "log.jsonl").open())
    return [(row["step"], row["loss"], row.get("held_out_agreement_0")) for row in rows]


@LEAVES_LOOPS
@pytest.mark.parametrize(
    ("flags", "goes_on"), [slow([], True), (BLOCKS, False), slow(BLOCKS, True)]
)
def test_a_killed_run_on_a_cache_is_the_run_without(
    target, work, tmp_path, capsys, flags, goes_on
):
    """Fails if resuming, a cache, an export or `--base` changes bits."""
    online, cached = (with_texts(work, tmp_path / name) for name in ("online", "cache"))
    run(target, online, "train", *flags)
    assert "accepted length" in capsys.readouterr().out
    how = [*flags, "--targets", "cache"]
    jobs.train(args_of(target, cached, *how), stop_after=3)
    _, at_stop = weights_of(target, cached, *flags)
    run(target, cached, "train", *how)
    assert losses(cached) == losses(online)
    assert [step for step, *_ in losses(cached)] == [0, 1, 2, 3]
    assert losses(cached)[-1][1] < losses(cached)[0][1]
    _, weights = weights_of(target, cached, *flags)
    testing.assert_same_bits(weights, weights_of(target, online, *flags)[1])
    with pytest.raises(AssertionError):
        testing.assert_same_bits(at_stop, weights)
    out, card = exported(target, cached, *flags, "--note", "Of the tests.")
    facts = "| steps | 4 |", "--seed 0 --", "| agreement 1 | ", "- Of the tests."
    assert [fact for fact in facts if fact not in card] == []
    job = job_of(target, cached, *flags)
    config, head = job.family.files.load(out, *load.load(target))
    assert config == job.config
    # The trained weights read scaled features, and the exported ones the raw features.
    assert np.ptp(job.scale) > 0
    expected = np.asarray(weights.fc) * job.scale
    np.testing.assert_array_equal(head.fc, expected.astype(job.target.dtype))
    if not goes_on:
        lm = sj.load(target, drafter=str(out), impl="native")
        assert lm.drafter.head == config
        return
    if flags:
        assert drafting(target, out).drafter.head == config
    # A run that starts from the export has its weights, and names it in the card.
    flags = [*flags, "--base", str(out), *("--draft-vocab", "7", "--mlp", "8")]
    assert_begins_as(head, target, cached, *flags)
    onwards = with_texts(work, tmp_path / "onwards")
    run(target, onwards, "train", *flags)
    _, card = exported(target, onwards, *flags)
    assert "| went on from, SHA-256 of its weights | " in card and "--mlp 24" in card


@pytest.mark.slow
@LEAVES_LOOPS
def test_the_first_draft_is_trained_alone_at_first(target, work, tmp_path):
    """Fails if later drafts count from another step on, or resuming changes a loss."""
    found, alone = {}, ("--first-alone", "2")
    for name, flags, stops in (
        ("alone", ("--ttt-steps", "1"), (None,)),
        ("both", alone, (None,)),
        ("killed", (*alone, "--eval-every", "1"), (3, None)),
    ):
        folder = with_texts(work, tmp_path / name)
        for stop in stops:
            jobs.train(args_of(target, folder, *flags), stop_after=stop)
        found[name] = [loss for _, loss, _ in losses(folder)]
    assert found["both"] == found["killed"]
    assert found["both"][:2] == found["alone"][:2]
    # From the third step on, deeper drafts count, too.
    assert found["both"][2] > found["both"][1]
    assert found["both"][2:] != found["alone"][2:]


def assert_begins_as(head, target, work, *flags):
    """Asserts that training begins with `head`'s weights, whatever shape flags give."""
    args = args_of(target, work, *flags)
    job = jobs.prepare(args)
    first = jobs.rescaled(jobs.init(args, job), job.scale)
    testing.assert_same_bits(first, heads.trained(job.config, head))
    key = jax.random.key(0)
    anew = job.family.training.init(key, job.config, job.params, job.hot)
    assert jax.tree.structure(anew) == jax.tree.structure(first)
    with pytest.raises(AssertionError):
        testing.assert_same_bits(first, anew)


def drafting(target, out) -> sj.LanguageModel:
    """Asserts that an export drafts; returns the model. `drafters/` tests tokens."""
    lm = sj.load(target, drafter=str(out), impl="native")
    made = sj.generate(lm, "import os", max_tokens=8, gamma=2)
    assert made.metrics["proposed"] > 0
    return lm


@pytest.mark.slow
@LEAVES_LOOPS
@pytest.mark.parametrize(
    ("leaf", "family", "more"),
    [
        ("embed", "--family eagle3", "--width 16"),
        ("fc", "--family eagle3", "--target-head"),
        ("mask_hidden", "--family peagle --ttt-steps 3",
         "--layers 2 --anchors 3 --mask-token 7"),
    ],
)  # fmt: skip
def test_a_head_with_a_leaf_of_its_own(target, work, tmp_path, leaf, family, more):
    """Fails if it is not trained, is lost in the file, or is not scaled as features."""
    family, flags = family.split(), f"{family} {more} --window 5".split()
    run(target, with_texts(work, tmp_path), "train", *flags)
    assert losses(tmp_path)[-1][1] < losses(tmp_path)[0][1]
    out, card = exported(target, tmp_path, *flags)
    config, head = eagle3_files.load(out, *load.load(target))
    job = job_of(target, tmp_path, *flags)
    assert config == job.config and config.window == 5 and "--window 5" in card
    drafting(target, out)
    first, weights = weights_of(target, tmp_path, *flags)
    with pytest.raises(AssertionError):
        testing.assert_same_bits(getattr(weights, leaf), getattr(first, leaf))
    if leaf == "embed":
        assert head.embed.shape == (tiny_pair.VOCAB_SIZE, 16)
        testing.assert_same_bits(head.embed, weights.embed)
    elif leaf == "fc":
        _, of_target = load.load(target)
        assert first.lm_head is None and weights.lm_head is None
        testing.assert_same_bits(head.lm_head, of_target.head[job.hot])
    else:
        read, again = (
            np.asarray(one.fc) @ np.asarray(one.mask_hidden)[0, 0]
            for one in (weights, head)
        )
        np.testing.assert_allclose(again, read, rtol=1e-4, atol=1e-5)
        assert len(head.more) == 1 and np.ptp(job.scale) > 0
    assert_begins_as(head, target, work, *family, "--base", str(out))


def test_a_dspark_without_a_head_is_gone_on_from(target, work, tmp_path, capsys):
    """Fails if it gets the default head, or another family accepts it as its base."""
    out = tiny_pair.write_head(tmp_path / "head", target, kind="dflash")
    _, head = block_files.load(out, *load.load(target))
    with_texts(work, tmp_path)
    assert_begins_as(head, target, tmp_path, "--family", "dspark", "--base", str(out))
    given = command(target, work, "train", "--base", str(out))
    words = "that is known: LlamaForCausalLMEagle3"
    assert_fails_with(train_drafter.main, capsys, given, words)


def test_ablations_of_blocks(target, work):
    """Fails if a flag does not reach config or loss, or a family has other heads."""
    names = "slots head markov_rank has_confidence num_drafts".split()
    dspark, dflash = ("anchor-first", "vanilla", 64), ("fill-in", "none", 0)
    for flags, *expected, terms in (
        ("dspark", *dspark, True, 3, (0.1, 0.9, 1.0)),
        ("dspark --no-tv --no-confidence", *dspark, False, 3, (1.0, 0.0, 1.0)),
        ("dspark --head none", "anchor-first", "none", 0, True, 3, (0.1, 0.9, 1.0)),
        ("dflash2", "fill-in", "selector", 64, False, 2, (1.0, 0.0, 0.0)),
        ("dflash", *dflash, False, 2, (1.0, 0.0, 0.0)),
    ):
        whole = ["--draft-vocab", "264", "--block", "3", "--family", *flags.split()]
        args = args_of(target, work, *whole)
        job = jobs.prepare(args)
        assert [getattr(job.config, name) for name in names] == expected, flags
        assert families.of_loss(args)["terms"] == terms
        if flags == "dflash2":
            assert (job.config.top_k, job.config.conv_group) == (16, 16)


SIZES = [field.name for field in dataclasses.fields(config_lib.ModelConfig)]


def write_target(folder, model_type):
    """Writes a tiny target of another family, with the byte tokenizer."""
    sizes = {name: vars(tiny_pair.config(num_layers=3))[name] for name in SIZES}
    if model_type == "llama":
        factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
        scaling = config_lib.Llama3Scaling(
            **factors, original_max_position_embeddings=64
        )
        config = llama.LlamaConfig(**sizes, scaling=scaling)
    else:
        sizes |= {"num_kv_heads": sizes["num_heads"], "tie_word_embeddings": False}
        config = gpt_neox.GPTNeoXConfig(**sizes, rotary_size=8)
    return tiny_pair.write_model(folder, config, seed=0)


SIZES_OF_OTHERS = ("--length 16", "--batch 2", "--mlp 24", "--compute bfloat16")


@pytest.mark.slow
@LEAVES_LOOPS
@pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        ("llama", "--family dspark --block 3 --layers 1"),
        ("gpt_neox", "--family eagle3 --ttt-steps 2"),
        ("gpt_neox", "--family dflash2 --block 3 --layers 1"),
    ],
)
def test_targets_of_other_families(tmp_path, model_type, flags):
    """Fails if a family is refused, drafts nothing, or has layers of Llama's."""
    flags = flags.split()
    target = write_target(tmp_path / "target", model_type)
    out, given = tmp_path / "head", ["--target", str(target), "--work", str(tmp_path)]
    more = "--taps 0,2 --prompts 4 --prefix 5 --impl native --steps 2 --anchors 3"
    more = " ".join((more, *SIZES_OF_OTHERS)).split()
    for stage in ("rollouts", "train"):
        assert train_drafter.main([*flags, *more, *given, "--stage", stage]) == 0
    # The flags of the training are not given again.
    given += ["--stage", "export", "--out", str(out)]
    assert train_drafter.main([*flags[:2], *given]) == 0
    card = (out / "README.md").read_text()
    assert [size for size in SIZES_OF_OTHERS if size not in card] == []
    drafting(target, out)
    raw = json.loads((out / "config.json").read_text())
    if model_type == "llama":
        assert raw["model_type"] == "qwen3" and raw["num_anchors"] == 3
        assert raw["rope_scaling"]["rope_type"] == "llama3"


def test_flags_that_are_not_those_of_the_training(target, tmp_path):
    """Fails if a card could state flags that the training did not have."""
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    longer = ["--steps", "9"]
    for more in ([], longer):
        jobs.keep_flags(args_of(target, tmp_path, *more))
    for stage, check in (("train", jobs.keep_flags), ("export", jobs.as_trained)):
        args = args_of(target, tmp_path, *longer, "--batch", "2", stage=stage)
        with pytest.raises(ValueError, match="of a training with --batch 4, and this"):
            check(args)


def test_trainings_that_cannot_be(target, work, tmp_path, capsys):
    for flag, value, words in (
        ("--batch", "16", "20 texts are too few for batches of 16"),
        ("--devices", "99", "99"),
    ):
        folder = with_texts(work, tmp_path)
        given = command(target, folder, "train", flag, value)
        assert_fails_with(train_drafter.main, capsys, given, words)


def compared(target, folder, *more) -> list[str]:
    flags = f"--target {target} --texts {folder} --work {folder}/heads --tokens 100 "
    flags += f"--out {folder}/rows.jsonl --draft-vocab 40 --taps 0,1,2 --context 12 "
    flags += "--prompts 2 --gen-tokens 6 --tree none"
    return [*flags.split(), *more, "--", "--mlp", "24", "--batch", "4"]


@pytest.mark.parametrize("head", compare_heads.HEADS)
def test_every_head_has_a_layout(target, tmp_path, head):
    """Fails if a head is trained that no published layout can store."""
    args = compare_heads.parse_args(compared(target, tmp_path))
    told = compare_heads.training_of(args, head, "train")
    config = families.plan(told, families.target_config(told))
    sees = config.attention_of(0) if head == "jetspec" else None
    assert sees is None or (sees.is_causal and sees.window > 4096)


@pytest.mark.slow
@LEAVES_LOOPS
def test_heads_are_compared_on_the_same_texts(target, tmp_path):
    """Fails if a head sees too few tokens, is trained anew, or lacks a row."""
    tokens = np.random.default_rng(0).integers(1, 250, (20, 16))
    mask, greedy = np.arange(16) < np.full((20, 1), 15), np.arange(20) % 2 == 0
    texts = tmp_path
    np.savez(texts / "texts.npz", tokens=tokens, mask=mask, greedy=greedy, samples=2)
    run(target, texts, "cache")
    args = compared(target, texts, "--heads", "peagle,dspark-rnn")
    for _ in range(2):  # The second begins at the end of the first.
        assert compare_heads.main(args) == 0
        rows = rows_of(texts / "rows.jsonl")
        assert [(row["kind"], row["head"]) for row in rows] == [
            *(("head", "peagle"), ("head", "dspark-rnn")),
            *(("sweep", "peagle"),) * 2,
            *(("sweep", "dspark-rnn"),) * 2,
        ]
        for row in rows[:2]:
            lines = rows_of(texts / "heads" / row["head"] / "log.jsonl")
            assert len(lines) == row["steps"]
            assert 100 <= row["tokens_seen"] < 100 + lines[-1]["tokens"]
        assert all(row["matched"] for row in rows[2:])
