"""Scripts at their smallest sizes: the exit status, and fields of the last row."""

import re
import shlex

import pytest
from script_runs import ROOT, main_of, models_of, rows_from


OURS = "spec_jax.drafters.ngram:PromptLookup"
PAIR = "--target {target} --draft {draft}"
SIZES = {
    "spec_round": "--gen-tokens 6 --gamma 2 --prompts 2 --temperature 0",
    "throughput": "--gen-tokens 6 --gamma 2 --prompts 3 --repeats 1",
    "rollouts": f"{PAIR} --gen-tokens 6 --gamma 2 --prompts 2 --repeats 1 --samples 2",
    "constrained": "--gen-tokens 130 --answers 3 --batch 2 --repeats 1",
    "sweep": "--gen-tokens 6 --prompts 1",
    "perplexity": "--window 8 --windows 2 --prompts 3",
    "latency": "--contexts 8 --steps 1 --repeats 1",
}
slow = pytest.mark.slow
MATCHED = {"matched": True}
HEAD = "--preset tiny --impl xla --no-steps --forced 0.5 --gen-tokens 12 --head"
BYTES = "--weights q8_0 --draft-weights q8_0"
FORMS = {"weights": "q8_0", "draft_weights": "q8_0"}
RUNS = (
    # A target alone, with drafters that need no draft.
    ("spec_round", "--target {target} --drafter ngram --processor penalties:1.2 "
     "--processor min-tokens:4 --temperature 0.7",
     MATCHED | {"draft": None, "processor": ["penalties:1.2", "min-tokens:4"]}),
    ("spec_round", f"--target {{target}} --drafter {OURS} --batch 2", MATCHED, slow),
    ("latency", "--target {target}", {"kind": "summary", "draft": None}),
    # Settings that change no token.
    ("spec_round", f"{PAIR} --cache static --prefill rows", MATCHED),
    ("throughput",
     f"{PAIR} --batch 2 --processor bias:5=-2,7=1 --processor bad-words:3",
     {"prompts_equal": 3}, slow),
    ("throughput", f"{PAIR} --batch 2 --adversarial",
     {"prompts_equal": 3, "adversarial": True}, slow),
    ("spec_round", f"{PAIR} --drafter ngram --gamma-policy budget", MATCHED, slow),
    ("spec_round", f"{PAIR} --tree 2x3:5 --drafter ngram --batch 2",
     MATCHED | {"tree": "2x3:5@0.4"}, slow),
    ("throughput", f"{PAIR} --batch 2 --tree 2x3:5",
     {"way": "tree 2x3:5@0.4, batch 2", "gamma": 5, "prompts_equal": 3}, slow),
    ("rollouts", "--drafter ngram --prompts 1",
     {"way": "tree", "rollouts": 2, "equal": 2}),
    ("rollouts", "--drafter draft-model --steps 2",
     {"kind": "reinforce", "step": 1, "ratio": 1}, slow),
    ("constrained", "--target {target} --drafter ngram",
     {"kind": "step", "way": "rounds", "processor": "penalties"}),
    ("sweep", f"{PAIR} --drafter ngram --gamma 1,2 --tree none,2-1",
     MATCHED | {"tree": "2-1", "gamma": 4}),
    ("sweep", "--target {target} --gamma 1", {"draft": None} | MATCHED, slow),
    ("sweep", "--target {target} --draft {head} --drafter {head},hybrid --gamma 1",
     MATCHED, slow),
    # Eight bits: a tree of a head, cells, a batch, a head of random weights.
    ("spec_round", f"--target {{target}} --draft {{head}} {BYTES} --tree 2x3:5",
     MATCHED | FORMS, slow),
    ("sweep", f"{PAIR} --drafter draft-model,ngram --gamma 1 {BYTES}", MATCHED | FORMS),
    ("perplexity", "--target {target}", {"weights": "q4_1", "tokens": 2 * 3}),
    ("latency", f"{HEAD} dspark {BYTES}",
     {"matched": True, "differing_kv": 0} | FORMS, slow),
    # Heads and presets of random weights, at forced acceptance.
    *(("latency", f"{HEAD} {head}",
       {"matched": True, "differing_kv": 0, "gamma": gamma}, slow)
      for head, gamma in (("dspark", 7), ("eagle3 --head-tree 9", 8), ("dflash", 15))),
    ("latency", "--preset qwen3-8b --draft-preset qwen3-0.6b --dry-run --device gpu",
     {"kind": "compile", "program": "rounds"}, slow),
)  # fmt: skip


@pytest.mark.parametrize(
    ("script", "flags", "last"),
    [pytest.param(*run[:3], marks=run[3:], id=f"{run[0]} {run[1]}") for run in RUNS],
)
def test_a_run(script, flags, last, folders, head, tmp_path, request):
    """Fails if a flag does nothing, or a script ends in an error or without its row."""
    if last.get("kind") == "reinforce":
        request.getfixturevalue("optax_promotes")
    target, draft = folders
    words = {"target": target, "draft": draft, "head": head}
    given = shlex.split(f"{SIZES[script]} {flags}".format(**words))
    *_, row = rows_from(main_of(script), tmp_path, given)
    assert last.items() <= row.items(), {name: row.get(name) for name in last}


def test_the_script_of_the_documentation_runs(folders, tmp_path):
    """Fails if the code in docs/scripts.md no longer runs."""
    text = (ROOT / "docs" / "scripts.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {"__name__": "shown"}
    exec(code, names)
    sizes = "--drafter ngram --gen-tokens 6 --gamma 2 --prompts 2".split()
    rows = rows_from(names["main"], tmp_path, [*models_of(folders), *sizes])
    assert [row["matched"] for row in rows] == [True, True]


def test_what_would_be_run_is_listed(capsys):
    """Fails if `--list` leaves a step or a call out."""
    for script, called in (
        ("reproduce", "spec_round"),
        ("gpu_report", "rows of kernels 8b"),
    ):
        assert main_of(script)(["--list"]) == 0
        assert called in capsys.readouterr().out
