"""The training of the embedded pair: its data, and that a killed run resumes."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tiny_pair

from experiments import train_pair
from experiments.pair import corpus, export, quality
from spec_jax import loading, testing
from spec_jax.model import load, params as params_lib, tokenizer
from spec_jax.training import batches, loop, losses, targets


CONFIG = tiny_pair.config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    head_dim=8,
    max_position_embeddings=64,
)
RECIPE = loop.Recipe(steps=6, batch_size=2, warmup_steps=2, eval_every=3, save_every=2)
LOSS = functools.partial(losses.text_loss, CONFIG)


pytestmark = pytest.mark.usefixtures("optax_promotes")


def data() -> np.ndarray:
    """Eight windows of a sequence that can be learnt."""
    stream = np.arange(8 * 12 + 1) * 5 % 32
    return corpus.windows(stream.astype(np.uint16), 12)


def init():
    return params_lib.init(jax.random.key(0), CONFIG)


def logged(folder) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").open()]
    return [(row["step"], row["loss"]) for row in rows]


def test_a_log_is_read_to_the_checkpoint(tmp_path):
    """Fails if a card states what its weights have not seen, or half a line ends it."""
    rows = [{"step": step, "tokens": 10} for step in range(4)]
    rows[1]["held_out_loss"], rows[3]["held_out_loss"] = 2.0, 1.0
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "log.jsonl").write_text(text + '{"step": 4, "to')
    assert loop.tokens_seen(tmp_path) == 40 and loop.tokens_seen(tmp_path, 3) == 30
    assert loop.last_held_out(tmp_path) == rows[3]
    assert loop.last_held_out(tmp_path, 3) == rows[1]
    with pytest.raises(ValueError, match="no held-out text was measured yet"):
        loop.last_held_out(tmp_path, 1)
    assert loop.log_of(tmp_path / "nowhere") == []


# Orbax leaves its event loops to the garbage collector.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_killed_run_resumes_with_the_same_losses(tmp_path):
    """Fails if the batch order, the schedule or the moments start anew."""
    whole = loop.run("a", RECIPE, init(), LOSS, data(), data(), tmp_path / "whole")
    killed = tmp_path / "killed"
    loop.run("b", RECIPE, init(), LOSS, data(), data(), killed, stop_after=5)
    # The kill came after a step that no checkpoint holds, and cut a line in half.
    with (killed / "log.jsonl").open("a") as log:
        log.write('{"step": 5, "lo')
    resumed = loop.run("b", RECIPE, init(), LOSS, data(), data(), killed)
    assert logged(killed) == logged(tmp_path / "whole")
    assert [step for step, _ in logged(killed)] == list(range(6))
    testing.assert_same_bits(resumed, whole)
    assert logged(killed)[-1][1] < logged(killed)[0][1]
    assert loop.last_held_out(killed)["held_out_loss"] > 0
    assert loop.tokens_seen(killed) == 6 * 2 * 12
    # Negative control: another seed is another curve.
    other = tmp_path / "other"
    recipe = dataclasses.replace(RECIPE, seed=1)
    loop.run("c", recipe, init(), LOSS, data(), data(), other)
    assert logged(other) != logged(killed)
    with pytest.raises(ValueError, match="no checkpoint"):
        loop.restore(RECIPE, init(), tmp_path / "nothing")


@pytest.mark.slow
def test_distillation_is_least_where_draft_and_teacher_agree():
    """Fails if teacher and student change places, or positions are shifted."""
    loss = functools.partial(losses.distillation_loss, CONFIG)
    teacher, other = init(), params_lib.init(jax.random.key(1), CONFIG, stddev=0.3)
    tokens = data()[:2]
    texts = targets.Texts(tokens=tokens, mask=np.ones(tokens.shape, bool))
    taught = targets.Online(texts=texts, params=teacher, config=CONFIG, taps=())
    batch = jax.tree.map(jax.numpy.asarray, taught[np.arange(2)])
    head = teacher.head
    assert float(loss(teacher, batch, head)) < float(loss(other, batch, head))
    grads = jax.grad(loss)(teacher, batch, head)
    largest = max(float(abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    assert largest < 1e-5


def test_a_tokenizer_of_another_pair_is_refused(tmp_path):
    """Fails if windows of one vocabulary are handed to weights of another."""
    (tmp_path / "tokenizer.json").write_text("{}")
    flags = ["--stage", "target", "--work", str(tmp_path)]
    args = train_pair.parse_args([*flags, "--base", str(loading.ASSETS)])
    with pytest.raises(ValueError, match="not the tokenizer of --base"):
        train_pair.prepare(args)


def test_windows_overlap_by_the_label():
    windows = corpus.windows(np.arange(10, dtype=np.uint16), 3)
    np.testing.assert_array_equal(windows, [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]])


def test_every_window_comes_once_an_epoch():
    windows = np.arange(6)[:, None]
    epochs = [
        [batches.of_step(windows, size=2, step=3 * epoch + i, seed=0) for i in range(3)]
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert sorted(np.concatenate(epoch).ravel().tolist()) == list(range(6))
    assert not np.array_equal(epochs[0], epochs[1])
    with pytest.raises(ValueError, match="batch size 7 exceeds the 6 windows"):
        batches.of_step(windows, size=7, step=0, seed=0)


class _OfColumns:
    """Sequences that are their own numbers."""

    def __init__(self, columns):
        self.columns = np.asarray(columns)

    def __len__(self):
        return len(self.columns)

    def __getitem__(self, rows):
        return np.asarray(rows)


COLUMNS = np.random.default_rng(0).permutation(
    np.repeat([128, 256, 640, 384], [63, 33, 32, 4])
)


@pytest.mark.parametrize(
    ("draw", "counts"),
    [(None, {128: 20, 256: 10, 384: 4, 640: 4}), (lambda batch, rows, step: batch, {})],
)
def test_batches_hold_about_as_much(draw, counts):
    """Fails if one mixes lengths, has more than its longest, or a text comes twice; or
    if long ones come one after the other."""
    step = functools.partial(
        batches.of_step, _OfColumns(COLUMNS), size=4, seed=0, unit=2, draw=draw
    )
    per_epoch = sum(
        np.count_nonzero(COLUMNS == width) // counts.get(width, 4)
        for width in (128, 256, 384, 640)
    )
    found = [step(step=number) for number in range(per_epoch)]
    rows = np.concatenate(found)
    assert len(set(rows.tolist())) == len(rows)
    widths = [set(COLUMNS[of].tolist()) for of in found]
    assert all(len(width) == 1 for width in widths)
    widths = [width.pop() for width in widths]
    assert [len(of) for of in found] == [counts.get(width, 4) for width in widths]
    assert not (np.diff(widths) >= 0).all()
    np.testing.assert_array_equal(step(step=5), found[5])
    again = np.concatenate([step(step=per_epoch + n) for n in range(per_epoch)])
    assert not np.array_equal(again, rows)


def test_the_tokenizer_keeps_every_byte():
    texts = ("def f(x):\n\treturn x  # é\n",) * 3
    trained = corpus.train_tokenizer(texts)
    stream = corpus.encode(trained, texts[:1])
    assert trained.token_to_id(corpus.END_OF_TEXT) == 0 == stream[-1]
    assert trained.decode(stream[:-1].tolist()) == texts[0]


def test_the_export_can_be_loaded(tmp_path):
    """Fails if the card or a folder lacks what a user needs."""
    path = tmp_path / "tokenizer.json"
    tiny_pair.byte_tokenizer().save(str(path))
    model = export.Model(
        name="target",
        config=CONFIG,
        params=init(),
        held_out_loss=3.25,
        stages={"target": 4096},
    )
    description = {
        "corpus": "standard library of Python 0.0",
        "corpus_sha256": "abc",
        "train_files": 1,
        "held_out_files": 1,
        "train_bytes": 10,
        "train_tokens": 20,
        "held_out_tokens": 30,
    }
    export.write(tmp_path, path, [model, dataclasses.replace(model, name="draft")])
    config, params = load.load(tmp_path / "target")
    assert config.dtype == "bfloat16"
    testing.assert_same_bits(params, params_lib.cast(init(), "bfloat16"))
    path.unlink()  # The folders need nothing outside them, and hold one copy.
    texts = [tokenizer.load(tmp_path / name) for name in ("target", "draft")]
    assert [text.stop_ids for text in texts] == [(0,), (0,)]
    tokenizer.check_same_vocabulary(*texts)
    assert len(list(tmp_path.rglob("tokenizer.json"))) == 1
    measured = quality.Quality(
        num_prompts=1, num_tokens=8, repetition=0.125, parses=0.5
    )
    drawn = dataclasses.replace(measured, repetition=0.25)
    texts = {"this pair": {"greedy": measured}, "before": {"drawn": drawn}}
    losses = {"this pair": 3.25, "before": 4.5, "of others": None}
    card = export.card([model], description, texts, losses, ["It is small."])
    for fact in ("3.2500", "4,096 (target)", "abc", "- It is small."):
        assert fact in card
    for row in ("this pair, greedy | 0.125 | 50%", "before, drawn | 0.250 | 50%"):
        assert f"| {row} |" in card
    for row in ("this pair | 3.2500", "before | 4.5000", "of others | -"):
        assert f"| {row} |" in card
    path.write_text(card, encoding="utf-8")
    assert export.tokens_seen(path, "target") == {"target": 4096}
    with pytest.raises(ValueError, match="no row of the tokens that the draft saw"):
        export.tokens_seen(path, "draft")


def test_a_published_pair_stands_for_the_stages_before(tmp_path):
    """Fails if a draft is aligned from other weights, or its tokens are forgotten."""
    args = train_pair.parse_args(
        ["--stage", "align", "--work", str(tmp_path), "--base", str(loading.ASSETS)]
    )
    for stage, name in (("target", "target"), ("distill", "draft")):
        found, step = train_pair.restore(args, stage)
        _, expected = load.load(loading.ASSETS / name)
        testing.assert_same_bits(params_lib.cast(found, "bfloat16"), expected)
        assert step == 0 and found.embed.dtype == np.float32
    seen = export.tokens_seen(loading.ASSETS / "README.md", "draft")
    assert set(seen) == {"draft", "distill", "align"} and min(seen.values()) > 1_000_000
    # A stage with a folder of its own is read there, and adds to the base's tokens.
    folder = tmp_path / "aligned"
    folder.mkdir()
    (folder / "log.jsonl").write_text('{"step": 0, "loss": 1.0, "tokens": 100}\n')
    now = train_pair._tokens_seen(args, "draft", ("draft", "distill", "align"))
    assert now == seen | {"align": seen["align"] + 100}
    with pytest.raises(ValueError, match="no checkpoint"):
        train_pair.restore(args, "align")


@pytest.mark.parametrize("stage", ["target", "draft"])
def test_text_is_learned_on_from_a_published_pair(stage, tmp_path, monkeypatch):
    """Fails if a stage of text begins anew where there is a model to go on from."""
    begun = []
    monkeypatch.setattr(
        train_pair.loop,
        "run",
        lambda name, recipe, init, *rest, **more: begun.append(init),
    )
    monkeypatch.setattr(
        train_pair.loop, "last_held_out", lambda folder: {"held_out_loss": 0.0}
    )
    text = np.zeros((1, 3), np.int32)
    description = {"corpus": "none", "train_tokens": 2}
    monkeypatch.setattr(train_pair, "prepare", lambda args: (text, text, description))
    flags = ["--stage", stage, "--work", str(tmp_path)]
    for more in (["--base", str(loading.ASSETS)], []):
        train_pair.train(train_pair.parse_args([*flags, *more]))
    _, expected = load.load(loading.ASSETS / stage)
    published, anew = (params_lib.cast(init, "bfloat16") for init in begun)
    testing.assert_same_bits(published, expected)
    with pytest.raises(AssertionError):
        testing.assert_same_bits(anew, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\ny = (", True),  # The unfinished line is left out.
        ("def f():\n    retu", False),  # A function needs a body.
        ("def f():\n    return 1\n", True),
        ("x = = 1\n", False),
        ("x = 1\n\0\n", False),
        ("no line ends here", True),
    ],
)
def test_a_text_parses_as_far_as_its_whole_lines_go(text, expected):
    assert quality.parses(text) == expected
