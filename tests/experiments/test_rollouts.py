"""The target's own text: that it is greedy, and that a killed run goes on."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_pair

from experiments.lib import terminal
from experiments.pair import rollouts
from spec_jax.model import params as params_lib, sequence


LENGTH, PREFIX = 12, 5
CONFIG = tiny_pair.config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    head_dim=8,
    max_position_embeddings=64,
)


def prefixes(seed: int = 0) -> np.ndarray:
    """Three slabs."""
    random = np.random.default_rng(seed)
    shape = (3 * rollouts.SLOTS, PREFIX)
    return random.integers(0, CONFIG.vocab_size, shape, np.uint16)


def generate(kept, given=None, length=LENGTH) -> np.ndarray:
    slabs = rollouts.Slabs(
        params=params_lib.init(jax.random.key(0), CONFIG, stddev=0.3),
        config=CONFIG,
        prefixes=prefixes() if given is None else given,
        length=length,
        impl="xla",
    )
    return rollouts.generate(slabs, kept=kept)


@pytest.mark.slow
def test_a_killed_run_goes_on_after_its_last_whole_slab(tmp_path, monkeypatch):
    """Fails if slabs are lost, made twice, or the one cut short is kept."""
    whole = generate(tmp_path / "whole")
    np.testing.assert_array_equal(whole[:, :PREFIX], prefixes())
    killed = tmp_path / "killed"
    slab = rollouts.SLOTS * LENGTH
    killed.write_bytes(whole.tobytes()[: 4 * slab + 2 * slab + 3])
    calls = []
    inner = rollouts._continue

    def counted(params, batch, *more, **options):
        calls.append(np.asarray(batch))
        return inner(params, batch, *more, **options)

    monkeypatch.setattr(rollouts, "_continue", counted)
    np.testing.assert_array_equal(generate(killed), whole)
    np.testing.assert_array_equal(np.concatenate(calls), prefixes()[rollouts.SLOTS :])
    # Nothing is left to do, and the file stays as it is.
    calls.clear()
    np.testing.assert_array_equal(generate(killed), whole)
    assert not calls and killed.stat().st_size == whole.nbytes
    # Negative control: what was kept is not made anew.
    changed = whole.copy()
    changed[0, -1] = (changed[0, -1] + 1) % CONFIG.vocab_size
    killed.write_bytes(changed.tobytes()[: 4 * slab])
    np.testing.assert_array_equal(generate(killed), changed)


def test_text_of_other_prefixes_is_refused(tmp_path, monkeypatch, capsys):
    """And fails if rollouts say nothing where no terminal is."""
    kept = tmp_path / "kept"
    monkeypatch.setattr(terminal, "INTERVAL_S", 0.0)
    generate(kept)
    said = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == [f"rollouts: {done} of 3" for done in (1, 2, 3)]
    with pytest.raises(ValueError, match="kept: text of other prefixes"):
        generate(kept, prefixes(1))
    with pytest.raises(ValueError, match="another length; delete it"):
        generate(kept, length=LENGTH - 1)
    with pytest.raises(ValueError, match=r"40 rollouts are not of whole slabs of 16"):
        generate(kept, prefixes()[:40])


@pytest.mark.slow
def test_the_text_is_greedy(tmp_path):
    """Against whole sequences, where the first choice leads by more than rounding."""
    text = generate(tmp_path / "kept")
    params = params_lib.init(jax.random.key(0), CONFIG, stddev=0.3)
    logits = np.asarray(sequence.logits(params, CONFIG, jax.numpy.asarray(text)))
    logits = logits[:, PREFIX - 1 : -1]
    second, first = np.sort(logits, axis=-1)[..., -2:].transpose(2, 0, 1)
    is_clear = first - second > 1e-3
    assert is_clear.mean() > 0.9
    chosen = logits.argmax(axis=-1)
    np.testing.assert_array_equal(chosen[is_clear], text[:, PREFIX:][is_clear])


def test_texts_end_at_the_first_stop_token_that_was_written():
    """Fails if one of the prompt ends a text, the stop token itself is not learned, or
    what is behind it is kept or counted."""
    tokens = np.array([[9, 1, 2, 9, 5, 6], [1, 2, 3, 8, 9, 7], [1, 2, 3, 4, 5, 6]])
    ends, mask = rollouts.ended(tokens, np.array([2, 3, 4]), (9, 8))
    np.testing.assert_array_equal(
        ends, [[9, 1, 2, 9, 9, 9], [1, 2, 3, 8, 8, 8], [1, 2, 3, 4, 5, 6]]
    )
    counted = [np.flatnonzero(row).tolist() for row in mask]
    assert counted == [[1, 2], [2], [3, 4, 5]]
    ends, mask = rollouts.ended(tokens, np.array([2, 3, 4]), ())
    np.testing.assert_array_equal(ends, tokens)
    assert [row.sum() for row in mask] == [5, 4, 3]


def test_a_kept_file_is_named_after_all_that_decides_its_texts():
    """Fails if another target, seed or kernel goes on with the texts of one before."""
    slabs = rollouts.Slabs(
        params=params_lib.init(jax.random.key(0), CONFIG),
        config=CONFIG,
        prefixes=prefixes(),
        length=LENGTH,
        impl="xla",
        seeds=np.full(len(prefixes()), -1),
    )
    others = {
        "params": params_lib.init(jax.random.key(1), CONFIG),
        "config": dataclasses.replace(CONFIG, rms_norm_eps=1e-4),
        "prefixes": prefixes(1),
        "length": LENGTH + 1,
        "impl": "interpret",
        "lengths": np.full(len(prefixes()), PREFIX - 1),
        "seeds": np.arange(len(prefixes())),
        "stop_ids": (3,),
    }
    found = [dataclasses.replace(slabs, **{k: v}).digest for k, v in others.items()]
    assert len({slabs.digest, *found}) == 1 + len(others)
    assert dataclasses.replace(slabs).digest == slabs.digest
