"""The pair that ships with the package: whole, small, trained, and lossless."""

import json

from experiments import spec_round
from spec_jax import loading
from spec_jax.model import config as config_lib, tokenizer


def test_the_default_run_matches_and_the_draft_is_of_use(tmp_path):
    """Fails if an asset is missing or was not trained: a random draft accepts 0."""
    out = tmp_path / "out.jsonl"
    flags = ["--prompts", "2", "--gen-tokens", "24", "--out", str(out)]
    assert spec_round.main(flags) == spec_round.MATCHED
    summary = json.loads(out.read_text().splitlines()[-1])
    assert summary["verify_decode_mismatches"] == 0
    assert summary["acceptance_rate"] > 0.2


def test_the_folders_are_complete_and_small():
    target, draft = loading.EMBEDDED_TARGET, loading.EMBEDDED_DRAFT
    for folder in (target, draft):
        assert config_lib.read(folder / "config.json").dtype == "bfloat16"
        assert tokenizer.load(folder).stop_ids == (0,)
    tokenizer.check_same_vocabulary(tokenizer.load(target), tokenizer.load(draft))
    files = [path for path in loading.ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 30e6
    assert [path.parent for path in files if path.name == "tokenizer.json"] == [target]
    card = (loading.ASSETS / "README.md").read_text(encoding="utf-8")
    for fact in ("held-out loss", "tokens seen", "sha256", "LICENSE-PSF.txt"):
        assert fact in card
    notice = (loading.ASSETS / "LICENSE-PSF.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in notice
