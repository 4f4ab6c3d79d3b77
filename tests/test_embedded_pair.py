"""The pair that ships with the package: whole, small, trained, and lossless."""

import pytest
from script_runs import rows_from
from slow_cases import slow

import spec_jax as sj
from experiments import spec_round
from spec_jax import loading
from spec_jax.drafters import registry
from spec_jax.model import config as config_lib, hub, tokenizer


HEADS = [*registry.shipped(loading.ASSETS), "smollm2/eagle3"]


def test_the_folders_are_complete_and_small():
    target, draft = loading.EMBEDDED_TARGET, loading.EMBEDDED_DRAFT
    for folder in (target, draft):
        assert config_lib.read(folder / "config.json").dtype == "bfloat16"
        assert tokenizer.load(folder).stop_ids == (0,)
    assert tokenizer.load(target).fingerprint == tokenizer.load(draft).fingerprint
    files = [path for path in loading.ASSETS.rglob("*") if path.is_file()]
    in_heads = [path for path in files if path.parent.name in registry.NEED_TARGET]
    assert sum(path.stat().st_size for path in files) < 42e6
    assert max(path.stat().st_size for path in in_heads) < 12e6
    assert [path.parent for path in files if path.name == "tokenizer.json"] == [target]
    facts = {name: ("held-out", "SHA-256", "licence") for name in HEADS}
    facts["."] = ("held-out loss", "tokens seen", "sha256", "LICENSE-PSF.txt")
    for name, said in facts.items():
        card = (loading.ASSETS / name / "README.md").read_text(encoding="utf-8")
        assert [fact for fact in said if fact not in card] == [], name
    notice = (loading.ASSETS.parents[1] / "NOTICE").read_text()
    for part in ("weights, heads and tokenizer", "spec_jax/assets/LICENSE-PSF.txt"):
        assert part in notice
    notice = (loading.ASSETS / "LICENSE-PSF.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in notice


@pytest.mark.parametrize("name", [None, *map(slow, HEADS[:-1])])
def test_what_is_shipped_matches_and_is_of_use(name, tmp_path):
    """Fails if an asset is missing, of another target, or random: it would accept 0."""
    flags = ["--prompts", "2", "--gen-tokens", "24"]
    flags += ["--drafter", name] if name else []
    *_, summary = rows_from(spec_round.main, tmp_path, flags)
    assert summary["verify_decode_mismatches"] == 0
    assert summary["acceptance_rate"] > 0.2


SMOLLM2 = hub.cache() / hub.FETCHED["smollm2"]
fetched = pytest.mark.skipif(
    not SMOLLM2.is_file(), reason="python experiments/fetch_model.py smollm2"
)
QUESTIONS = ("What is the capital of France?", "Count from one to ten in words.")


@fetched
@pytest.mark.slow
def test_the_real_model_answers_with_its_head():
    """Fails if its template, its stop tokens or its head are of another model."""
    lm = sj.load("smollm2")
    assert type(lm.drafter.draft).__name__ == "Eagle3"
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    outs = sj.generate(lm, chats, max_tokens=48, gamma=4)
    assert outs[0].text == "The capital of France is Paris."
    assert [out.tokens for out in outs] == [
        out.tokens for out in sj.decode(lm, chats, max_tokens=48)
    ]
    assert min(out.metrics["acceptance_rate"] for out in outs) > 0.1
