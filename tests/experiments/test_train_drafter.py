"""Training of drafters: resumed runs, exported heads, and runs that start from one."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_pair
from head_runs import BLOCKS, args_of, command, job_of, run, with_texts
from script_runs import assert_fails_with
from slow_cases import slow

import spec_jax as sj
from experiments import train_drafter
from experiments.heads import jobs
from spec_jax import testing
from spec_jax.model import (
    block_files,
    config as config_lib,
    eagle3_files,
    gpt_neox,
    head_dialects,
    llama,
    load,
)
from spec_jax.training import loop


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
    """Fails if resuming or a cache changes a bit of the head or draws other anchors, or
    if an export is another head, or a run from it (`--base`) has other first weights.
    """
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
    # From the third step on, deeper drafts count, too.
    assert found["both"][2] > found["both"][1]
    assert found["both"][2:] != found["alone"][2:]


def assert_begins_as(head, target, work, *flags):
    """Asserts that training begins with `head`'s weights, whatever shape flags give."""
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
    """Asserts that an export drafts; returns the model. `drafters/` tests tokens."""
    lm = sj.load(target, drafter=str(out), impl="native")
    made = sj.generate(lm, "import os", max_tokens=8, gamma=2)
    assert made.metrics["proposed"] > 0
    return lm


def trained_and_exported(target, work, folder, *flags):
    """Trains, exports; returns folder, config, head, and first and last weights."""
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
    """Fails if the embedding is not trained, is lost in the file, or the target's."""
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
    then read another mask."""
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


def test_a_dspark_without_a_head_is_gone_on_from(target, work, tmp_path, capsys):
    """Fails if it gets the default head, or another family accepts it as its base."""
    out = tiny_pair.write_block(tmp_path / "head", target, kind="dflash")
    _, head = block_files.load(out, *load.load(target))
    with_texts(work, tmp_path)
    assert_begins_as(head, target, tmp_path, "--family", "dspark", "--base", str(out))
    given = command(target, work, "train", "--base", str(out))
    words = "that is known: LlamaForCausalLMEagle3"
    assert_fails_with(train_drafter.main, capsys, given, words)


def test_ablations_of_blocks(target, work):
    """Fails if a flag does not reach config or loss, or a family has other heads."""

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
    """Writes a tiny target of another family, with the byte tokenizer."""
    qwen3 = tiny_pair.config(num_layers=3)
    names = [field.name for field in dataclasses.fields(config_lib.ModelConfig)]
    sizes = {name: getattr(qwen3, name) for name in names}
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


def of_others(target, *flags) -> list[str]:
    more = "--taps 0,2 --prompts 4 --prefix 5 --impl native --steps 2 --anchors 3"
    sizes = "--length 16 --batch 2 --mlp 24 --compute bfloat16"
    return [*flags, *more.split(), *sizes.split(), "--target", str(target)]


OF_OTHERS = pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        ("llama", ("--family", "dspark", "--block", "3", "--layers", "1")),
        ("gpt_neox", ("--family", "eagle3", "--ttt-steps", "2")),
        ("gpt_neox", ("--family", "dflash2", "--block", "3", "--layers", "1")),
    ],
)


@OF_OTHERS
def test_heads_of_other_families_are_read_back(work, tmp_path, model_type, flags):
    """Fails if training cannot begin, or a Llama target's block drafter is written as
    one of Llama's layers."""
    target = write_target(tmp_path / "target", model_type)
    given = [*of_others(target, *flags), "--work", str(work), "--stage", "train"]
    args = train_drafter.parse_args(given)
    job = jobs.prepare(args)
    drafter = job.family.training.complete(jobs.init(args, job), job.teacher)
    origin = head_dialects.Origin(target=job.target, num_anchors=args.anchors)
    how = {"dialect": args.dialect, "origin": origin}
    job.family.files.save(tmp_path, job.config, drafter, **how)
    config, again = job.family.files.load(tmp_path, job.target, job.params)
    assert config == job.config
    testing.assert_same_bits(again, drafter)
    raw = json.loads((tmp_path / "config.json").read_text())
    if model_type == "llama":
        assert raw["model_type"] == "qwen3" and raw["num_anchors"] == 3
        assert raw["rope_scaling"]["rope_type"] == "llama3"


@pytest.mark.slow
@LEAVES_LOOPS
@OF_OTHERS
def test_targets_of_other_families(tmp_path, model_type, flags):
    """Fails if a family is refused, a default does not work, or an export
    drafts nothing."""
    target = write_target(tmp_path / "target", model_type)
    work = ["--work", str(tmp_path)]
    for stage in ("rollouts", "train"):
        given = [*of_others(target, *flags), *work, "--stage", stage]
        assert train_drafter.main(given) == 0
    out = tmp_path / "head"
    # The flags of the training are not given again.
    places = ["--target", str(target), "--stage", "export", "--out", str(out)]
    assert train_drafter.main([*flags[:2], *work, *places]) == 0
    card = (out / "README.md").read_text()
    sizes = ("--length 16", "--batch 2", "--mlp 24", "--compute bfloat16")
    assert [size for size in sizes if size not in card] == []
    drafting(target, out)


def test_flags_that_are_not_those_of_the_training(target, tmp_path):
    """Fails if a card could state flags that the training did not have."""
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    longer = ["--steps", "9"]
    for more in ([], longer):
        jobs.keep_flags(args_of(target, tmp_path, *more))
    for stage, check in (
        ("train", jobs.keep_flags),
        ("export", jobs.as_trained),
    ):
        more = [*longer, "--batch", "2"]
        args = args_of(target, tmp_path, *more, stage=stage)
        with pytest.raises(ValueError, match="of a training with --batch 4, and this"):
            check(args)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--batch", "16"), "20 texts are too few for batches of 16"),
        (("--devices", "99"), "99"),
    ],
)
def test_trainings_that_cannot_be(target, work, tmp_path, capsys, flags, words):
    given = command(target, with_texts(work, tmp_path), "train", *flags)
    assert_fails_with(train_drafter.main, capsys, given, words)
