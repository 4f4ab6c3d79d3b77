"""Mistakes of users: each ends a script with status 1 and one clear line."""

import shlex
import shutil
import types

import exactness_commands as commands
import pytest
from script_runs import ROOT, assert_fails_with, main_of, models_of

from spec_jax.model import load


SIZES = {
    "spec_round": "--gen-tokens 6 --gamma 2 --prompts 2",
    "sweep": "--gen-tokens 6 --gamma 1,2 --drafter ngram --out sweep.jsonl",
    "throughput": "--gen-tokens 6 --gamma 2 --prompts 2",
    "compare_hf": "--gen-tokens 6 --prompts 4",
    "replay": f"{ROOT}/experiments/results/texts.jsonl --gamma 4",
    "latency": "--contexts 8 --steps 1 --gamma 2",
    "profile_steps": "--prompts 2 --gen-tokens 6 --gamma 2",
    "train_drafter": "--family eagle3 --taps 0,1 --length 16 --prefix 9 --steps 4 "
    "--save-every 2 --draft-vocab 40 --ttt-steps 2 --stage",
}
ROWS = ROOT / "experiments" / "results" / "spec_round_native_gamma4.jsonl"
ALONE = ("plot", "replay", "reproduce", "kernels", "gpu_report", "compare_llama_cpp")
TARGET_ALONE = ("parity", "train_drafter", "compare_heads")
"""Scripts that take no target and draft here, and no draft."""
CASES = (
    ("spec_round", "--gamma -3", "--gamma: -3 must be at least 1"),
    ("spec_round", "--page-size 1000000000", "--page-size 1000000000 is above 2048"),
    ("spec_round", "--impl cuda", "--impl"),
    ("spec_round", "--impl mosaic", "removed"),
    ("spec_round", "--drafter medusa", "package.module:Name"),
    ("spec_round", "--prompts 51", "51"),
    ("spec_round", "--prompts nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("spec_round", "--gen-tokens 2047", "Shorten the prompt to 1, or"),
    ("spec_round", "--seed -1", "--seed -1 is outside"),
    ("spec_round", "--tree 2x2:4 --gamma-policy threshold", "of chains"),
    ("spec_round", "--tree 2x2:4 --rule block --temperature 1", "fixed shape"),
    ("spec_round", "--segments 4", "--segments is of --devices"),
    ("spec_round", "--chat-option x", "is no list of options"),
    ("spec_round", "--processor beam:4", "is not KIND:VALUE, with one of regex, json"),
    ("spec_round", "--processor penalties:high", "--processor penalties:high: could"),
    ("sweep", "--temperature 0,nan", "nan must be a finite number"),
    ("sweep", "--temperature=-1", "negative"),
    ("sweep", "--tree [[0],[1]]", "NAME.json"),
    ("sweep", "--tree none,2x2:4 --drafter ngram,choice", "Choice drafts chains alone"),
    ("sweep", "--tree none,2x2:4 --gamma-policy fixed,threshold", "run them apart"),
    ("plot", f"{ROWS} --out /dev/null/x", "/dev/null"),
    ("throughput", "--tree 2x2:4 --gamma 1,2", "leave the list --gamma out"),
    ("compare_hf", "--lengths 4 9 900", "larger file"),
    ("compare_hf", "--per-length 9", "9 prompts"),
    ("parity", "--gen-tokens 4", "--gen-tokens 4 holds no window of --gamma 4"),
    ("plot", "nowhere.jsonl --out x", "nowhere.jsonl: cannot be read"),
    ("replay", "--drafter dspark", "dspark reads its target"),
    ("replay", "--gamma-policy budget", "give --round-costs"),
    ("replay", "--drafter ngram --round-costs 1,2", "0 .. 1 drafts"),
    ("replay", "--round-costs 1,x", "--round-costs: could not convert string"),
    ("reproduce", "--list --only nothing", "no step is named so: --only nothing"),
    ("spec_round", "--schedule nothing.jsonl", "profile_steps.py writes one"),
    ("spec_round", "--schedule nothing.jsonl --tree 2x2:4", "of chains"),
    ("spec_round", "--top-k 5", "--temperature 0 decodes greedily"),
    ("sweep", "--ray soon", "'soon' is neither auto nor HOST:PORT"),
    ("profile_steps", "--contexts 2040 --batch 1", "fewer --steps or shorter"),
    ("latency", "--contexts 3000", "positions"),
    ("latency", "--forced 39", "between 0 and 1"),
    ("latency", "--forced gsm8k", "--head"),
    ("latency", "--forced 0.5 --temperature 0.7", "--forced decodes greedily"),
    ("latency", "--dry-run", "--dry-run needs a --preset"),
    ("latency", "--device gpu", "--device gpu: JAX runs on"),
    ("kernels", "--preset qwen3-0.7b", "invalid choice"),
    ("compare_heads", "--texts nowhere --taps 0,1 --draft-vocab 40 --work x --out y",
     "nowhere/texts.npz: no such file; run the stage"),
    ("profile_steps", "--drafter ngram --calibrate 0 --prompts 2",
     "no `Proposal.survival`"),
    ("profile_steps", "--calibrate 0 --prompts 1", "give --prompts 2"),
    ("compare_llama_cpp", "", "--llama-bin and --gguf are needed"),
    ("compare_llama_cpp", f"--llama-bin none --gguf {__file__}",
     "none/llama-bench: no such file"),
    ("compare_llama_cpp", "--llama-bin none --gguf x", "error: x: no such file"),
    ("rollouts", "--temperature 0 --samples 2", "are one text: give a temperature"),
    ("rollouts", "--steps 1 --top-k 3 --repeats 1", "leave filters out"),
    ("gpu_report", "--dry-run --only gama --out x", "--list"),
    ("gpu_report", "--dry-run", "--out FOLDER is needed"),
    ("exactness", "--gamma 4", "--gamma 4 needs a slab of 5 rows"),
    ("exactness", "--drafter medusa", "always-right"),
    ("exactness", "--batch 4", "--batch 4 needs 4 prompts"),
    ("exactness", "--certificate .", "directory"),
    ("exactness", "--tree 2x2:4", "run them apart"),
    ("exactness", "--drafter eagle3", "none is given nor shipped"),
    ("exactness", "--drafter dspark,dflash", "2 heads are named"),
    ("exactness", "--limit 1", "--limit goes with --verify"),
    ("exactness", "--verify c.json", "from the certificate alone"),
    ("train_drafter", "train --head rnn --no-tv",
     "--head, --no-tv with --family eagle3"),
    ("train_drafter", "export --family dspark --dialect z-lab --no-copies",
     "are of deepspec alone"),
    ("train_drafter", "rollouts --family dflash", "--draft-vocab 40 with --dialect "
     "z-lab, which has the target's whole vocabulary of 264: leave --draft-vocab out"),
    ("train_drafter", "export --work nowhere",
     "flags.json: no such file; run the stage tr"),
    ("train_drafter", "train --ttt-steps 15", "--length 17 or more"),
    ("train_drafter", "train --taps 0,2", "each must be below 2"),
    *(("train_drafter", f"train --learning-rate={rate}", "finite number above 0")
      for rate in ("0", "-1", "nan", "inf")),
    ("train_drafter", "train --first-alone 3", "a multiple of --save-every 2"),
    ("train_drafter", "rollouts --prefix 16", "leaves nothing to write after --prefix"),
)  # fmt: skip


@pytest.mark.parametrize(("script", "flags", "words"), CASES)
def test_one_line(folders, tmp_path, monkeypatch, capsys, script, flags, words):
    if script == "compare_hf":
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    given = shlex.split(f"{SIZES.get(script, '')} {flags}")
    pair = models_of(folders)
    if script == "exactness":
        given = commands.several_cells(folders, *given)
    elif script in TARGET_ALONE:
        given = [*pair[:2], *given]
    elif script not in ALONE and "--preset" not in flags:
        given = [*pair, *given]
    assert_fails_with(main_of(script), capsys, given, words)


def test_models_that_cannot_be_used(folders, tmp_path, capsys, monkeypatch):
    """Fails if a damaged or too large model runs, or ends in a traceback."""
    target = shutil.copytree(folders[0], tmp_path / "target")
    path, main = target / "model.safetensors", main_of("spec_round")
    path.write_bytes(path.read_bytes()[:-100])
    given = models_of((target, folders[1]))
    assert_fails_with(main, capsys, given, path.name, "again")
    # A model that is too large is refused before a weight is read.
    free = types.SimpleNamespace(available=1000)
    monkeypatch.setattr(load.psutil, "virtual_memory", lambda: free)
    assert_fails_with(main, capsys, models_of(folders), "GiB are free")
