"""A target without a draft: what a drafter needs decides what must be given."""

import json

import pytest
from script_runs import assert_fails_with, main_of, rows_of

from experiments.lib import flags, models
from spec_jax import loading


SHORT = ("--prompts", "2", "--gen-tokens", "6")
OURS = "spec_jax.drafters.ngram:PromptLookup"


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        *(
            ("spec_round", (*SHORT, "--gamma", "2", "--temperature", "0", *chosen))
            for chosen in (("--drafter", "ngram"), ("--drafter", OURS))
        ),
        ("latency", ("--contexts", "8", "--steps", "1", "--repeats", "1")),
        ("plan", (*SHORT, "--gamma", "1", "--repeats", "1", "--cost-repeats", "1")),
    ],
)
def test_what_needs_no_draft_runs_without_one(script, arguments, folders, tmp_path):
    """Fails if a draft must be given, or rows name one where there is none."""
    out = tmp_path / "rows.jsonl"
    more = ("--target", str(folders[0]), "--out", str(out))
    assert main_of(script)([*arguments, *more]) == 0
    rows = [row for row in rows_of(out) if "draft" in row]
    assert rows and {row["draft"] for row in rows} == {None}
    assert {row["target"] for row in rows} == {str(folders[0])}
    # Of drafters by default, those that need none.
    assert {row.get("drafter") for row in rows} <= {None, "ngram", "suffix", OURS}
    if script == "latency":
        steps = [row["step"] for row in rows if row["kind"] == "step"]
        assert "plain step" in steps and not any("draft" in name for name in steps)


def test_a_certificate_of_a_target_alone(folders, tmp_path, monkeypatch, capsys):
    """Fails if a draft is loaded, or the certificate cannot be verified without one, by
    the same command from the same folder."""
    certificate, main = tmp_path / "run.json", main_of("exactness")
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "some/folder/below/prompts.txt"
    prompts.parent.mkdir(parents=True)
    prompts.write_text("def f(x):\nimport os\n")
    arguments = ["--target", str(folders[0])]
    sizes = ("--impl", "xla", "--dtype", "float32", "--cache", "paged", "--batch", "1")
    sizes += ("--sampling", "greedy", "--gamma", "2", "--gamma-policy", "fixed")
    more = (
        "--prompts",
        str(prompts),
        "--gen-tokens",
        "6",
        *sizes,
        "--page-size",
        "128",
        "--slab",
        "4",
        "--allow-dirty",
    )
    assert main([*arguments, *more, "--certificate", str(certificate)]) == 0
    written = json.loads(certificate.read_text())
    assert written["settings"]["draft"] is None
    assert [*written["weights"]["float32"]] == ["target"]
    drafters = [cell["cell"]["drafter"] for cell in written["cells"]]
    assert drafters == ["oracle", "ngram"]
    arguments += ["--verify", str(certificate)]
    assert main(arguments) == 0
    prompts.rename(tmp_path / "elsewhere.txt")
    words = ("prompts some/folder/below/prompts.txt", "not found", "--prompts")
    assert_fails_with(main, capsys, arguments, *words)
    assert main([*arguments, "--prompts", "elsewhere.txt"]) == 0


@pytest.mark.parametrize(
    ("drafter", "target", "draft", "named"),
    [
        ("draft-model", None, None, "embedded"),
        ("ngram", None, None, None),
        ("ngram", "t", "d", None),
        ("draft-model", "t", "d", "d"),
        ("eagle3", None, "d", "d"),
        (OURS, "t", None, None),
        (OURS, "t", "d", "d"),
        (("ngram", "hybrid"), "t", "d", "d"),
        (("ngram", "suffix"), "t", None, None),
    ],
)
def test_rows_name_a_draft_where_there_is_one(drafter, target, draft, named):
    parser = flags.cli.Parser("")
    flags.add_folders(parser)
    args = parser.parse_args([])
    args.drafter, args.target, args.draft = drafter, target, draft
    assert models.draft_of(args) == named


def test_one_draft_model_is_read_once(folders, monkeypatch):
    """Fails if each drafter that has one reads its own copy."""
    read, real = [], loading.load_draft
    monkeypatch.setattr(
        loading, "load_draft", lambda *a, **k: read.append(1) or real(*a, **k)
    )
    parser = flags.cli.Parser("")
    flags.add_models(parser, has_mesh=False)
    args = parser.parse_args(
        ["--target", *map(str, (folders[0], "--draft", folders[1]))]
    )
    for names in (("draft-model", "hybrid"), ("ngram", "hybrid", "draft-model")):
        read.clear()
        models.load_drafters(args, names, gamma_max=2)
        assert len(read) == 1
