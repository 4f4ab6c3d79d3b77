"""Drafters by their names on the command line."""

import json

import pytest
import tiny_pair

from experiments import spec_round
from experiments.support import drafters, model_pair, paired_runs
from spec_jax.drafters import hybrid, oracle
from spec_jax.model import load


GAMMA = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


def load_pair(folders, drafter: str) -> model_pair.ModelPair:
    return model_pair.load_pair(
        *folders,
        gamma_max=GAMMA,
        slab=GAMMA + 1,
        dtype=None,
        impl="auto",
        drafter=drafter,
    )


@pytest.mark.parametrize("name", sorted(set(drafters.DRAFTERS) - {"draft-model"}))
def test_runs_match_with_every_drafter(folders, tmp_path, name):
    """Fails if a name builds nothing that runs, or its tokens are others."""
    out, (target, draft) = tmp_path / "out.jsonl", folders
    status = spec_round.main(
        [
            *("--target", str(target), "--draft", str(draft), "--out", str(out)),
            *("--gen-tokens", "6", "--gamma", str(GAMMA), "--prompts", "2"),
            *("--drafter", name, "--ignore-stop"),
        ]
    )
    assert status == spec_round.MATCHED
    *prompts, summary = [json.loads(line) for line in out.read_text().splitlines()]
    assert summary["drafter"] == name and summary["matched"] is True
    assert len(prompts) == 2
    if name == "oracle":
        assert summary["accepted"] == summary["proposed"] > 0


def test_a_draft_is_read_only_where_it_drafts(folders, monkeypatch):
    """Fails if lookup pays for the weights of a model that it never runs."""
    real, read = load.load, []

    def watched(folder, **arguments):
        read.append(folder)
        return real(folder, **arguments)

    monkeypatch.setattr(load, "load", watched)
    load_pair(folders, "ngram")
    assert read == [folders[0]]
    assert isinstance(load_pair(folders, "hybrid").drafter, hybrid.Hybrid)
    assert read == [folders[0], *folders]


def test_an_oracle_knows_each_prompt(folders):
    """Fails if one prompt's trace serves another."""
    pair = load_pair(folders, "oracle")
    settings = paired_runs.Settings(gamma=2, gen_tokens=5, capacity=32, page_size=16)
    for prompt in ([3, 4, 5], [9, 8, 7, 6]):
        run = paired_runs.Rounds(pair, settings, prompt)
        plain = paired_runs.run_plain(pair, settings, prompt)
        trace = run.params[1]
        assert isinstance(trace, oracle.Trace) and trace.tokens.shape == (33,)
        text = [*prompt, *plain.tokens]
        assert trace.tokens[: len(text)].tolist() == text
        assert (
            paired_runs.run_speculative(pair, settings, prompt).tokens == plain.tokens
        )


def test_an_unknown_name_is_refused(folders):
    with pytest.raises(
        ValueError, match="drafter 'medusa' is not one of draft-model, "
    ):
        load_pair(folders, "medusa")
