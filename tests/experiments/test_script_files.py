"""What every script writes to and reads from is checked before the work."""

import os

import pytest
from script_runs import REQUIRED, ROOT, last_line, main_of, models_of

from experiments.lib import cli, files


OUTPUTS = {
    "ablate_heads": ("--out",),
    "compare_hf": ("--out", "--plot"),
    "compare_llama_cpp": ("--out",),
    "exactness": ("--out", "--certificate"),
    "fit_scores": ("--out",),
    "kernels": ("--out",),
    "latency": ("--out",),
    "multi_process": ("--out",),
    "parity": ("--out", "--heatmap", "--save-bundle"),
    "plan": ("--out",),
    "profile_steps": ("--out",),
    "regret": ("--out",),
    "replay": ("--out", "--record"),
    "history": ("--out", "--dump-verify-mismatches"),
    "sweep": ("--out",),
    "throughput": ("--out",),
}
"""Flags that name a file to be written."""

SOURCES = {
    "exactness": ("--prompts", "--verify"),
    "kernels": ("--shapes",),
    "latency": ("--target",),
    "multi_process": ("--target",),
    "parity": ("--prompts", "--mismatch", "--bundle"),
    "profile_steps": ("--target",),
    "replay": ("--prompts", "traces", "--costs"),
}
"""Flags that name a file to be read; `--prompts` where none are named here."""


def refused(name: str, arguments: list[str], capsys) -> str:
    """The line of a usage error."""
    with pytest.raises(SystemExit) as error:
        main_of(name)(arguments)
    assert error.value.code == cli.UNUSABLE == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "output", "source"),
    [
        (name, output, source)
        for name, outputs in OUTPUTS.items()
        for output in outputs
        for source in SOURCES.get(name, ("--prompts",))
        if (name, output, source)
        not in (
            ("exactness", "--certificate", "--verify"),  # not together
            ("replay", "--record", "traces"),
            ("replay", "--record", "--costs"),
        )
    ],
)
def test_no_output_replaces_an_input(name, output, source, tmp_path, capsys):
    """Fails if a file of prompts is overwritten by the rows of its run."""
    path, link = tmp_path / "input.svg", tmp_path / "link.svg"
    path.write_text("a prompt")
    os.link(path, link)
    named = str(path)
    if source == "--prompts":
        named += ":1"
    if source == "--shapes":
        named = str(tmp_path)
    given = [named] if source == "traces" else [source, named]
    required = [*REQUIRED.get(name, ())]
    if name in ("sweep", "replay"):
        required = []
    if (name, output) == ("replay", "--out") and source == "--prompts":
        (tmp_path / "traces").touch()
        given.append(str(tmp_path / "traces"))
    line = refused(name, [*required, output, str(link), *given], capsys)
    assert f"{output} {link} would replace what {source} reads" in line
    assert path.read_text() == "a prompt"


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_output_replaces_what_comes_with_the_package(name, capsys):
    prompts = ROOT / "experiments" / "prompts" / "python_50.jsonl"
    before = prompts.read_bytes()
    required = ["x"] if name == "replay" else []
    line = refused(name, [*required, "--out", str(prompts)], capsys)
    assert "would replace what the script reads" in line
    assert prompts.read_bytes() == before


@pytest.mark.parametrize(
    "name", sorted({*OUTPUTS} - {"ablate_heads", "kernels", "parity"})
)
def test_no_output_replaces_a_model(name, folders, capsys):
    out = folders[1] / "model.safetensors"
    arguments = [*models_of(folders), "--out", str(out)]
    required = ["x"] if name == "replay" else []
    line = refused(name, [*required, *arguments], capsys)
    assert f"{out} would replace what --draft reads" in line


@pytest.mark.parametrize(
    ("name", "output", "source"),
    [
        ("train_drafter", "--out", "--target"),
        ("train_drafter", "--out", "--base"),
        ("train_pair", "--assets", "--base"),
        ("train_pair", "--assets", "--before"),
    ],
)
@pytest.mark.parametrize("kind", ["the same", "a link", "a linked file"])
def test_no_export_replaces_what_it_is_made_of(
    name, output, source, kind, tmp_path, capsys
):
    """By identity: a link to the folder is it, and so is one to what is in it."""
    read, written = tmp_path / "read", tmp_path / "written"
    read.mkdir()
    (read / "README.md").write_text("a card")
    if kind == "the same":
        written = tmp_path / "no" / ".." / ".." / tmp_path.name / "read"
        (tmp_path / "no").mkdir()
    elif kind == "a link":
        written.symlink_to(read)
    else:
        written.mkdir()
        os.link(read / "README.md", written / "card.md")
    family = ["--family", "eagle3"] if name == "train_drafter" else []
    value = f"mine={read}" if source == "--before" else str(read)
    work = ["--work", str(tmp_path / "work")]
    arguments = [*family, *work, "--stage", "export", output, str(written)]
    assert main_of(name)([*arguments, source, value]) == cli.UNUSABLE
    assert f"{output} {written} would replace what {source}" in last_line(capsys)
    assert [path.name for path in read.iterdir()] == ["README.md"]


def test_an_export_beside_what_it_is_made_of(tmp_path):
    """Negative control: folders that share nothing, one within the other too."""
    (tmp_path / "target" / "export").mkdir(parents=True)
    for folder in (tmp_path / "export", tmp_path / "target" / "export"):
        files.check_apart("--out", folder, {"--target": tmp_path / "target"})
    with pytest.raises(ValueError, match="would replace what --target reads"):
        files.check_apart("--out", folder, {"--target": folder})


@pytest.mark.parametrize("name", ["compare_hf", "exactness", "parity", "spec_round"])
def test_two_outputs_are_two_files(name, tmp_path, capsys):
    first, second = OUTPUTS[name][:2]
    path = str(tmp_path / "out.svg")
    line = refused(name, [first, path, second, path], capsys)
    assert {first, second} <= set(line.split()) and "write to one file" in line


@pytest.mark.parametrize(
    ("name", "flag"), [(name, flag) for name in OUTPUTS for flag in OUTPUTS[name]]
)
def test_outputs_are_checked_before_the_work(name, flag, tmp_path, capsys):
    """Names that are too long, too, which raised; and figures, once at the end."""
    for path, words in (
        (tmp_path / "no" / "x.svg", "does not exist; make it first"),
        (tmp_path / ("x" * 300 + ".svg"), "too long"),
    ):
        line = refused(name, [flag, str(path)], capsys)
        assert f"error: argument {flag}: {path}" in line
        assert words in line


@pytest.mark.parametrize(
    ("name", "flag"), [("parity", "--heatmap"), ("compare_hf", "--plot")]
)
def test_figures_are_checked_before_the_work(name, flag, tmp_path, monkeypatch, capsys):
    line = refused(name, [flag, str(tmp_path / "x.txt")], capsys)
    assert "x.txt: not a .png or .svg file" in line
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    line = refused(name, [flag, str(tmp_path / "x.svg")], capsys)
    assert "needs matplotlib" in line


def test_one_sweep_writes_to_a_file(tmp_path, capsys):
    """Fails if two sweeps on one file both run everything."""
    out = tmp_path / "sweep.jsonl"
    with files.open_output(out):
        assert "is writing to it; wait" in refused("sweep", ["--out", str(out)], capsys)


def test_nobody_reads_what_has_no_end(folders, capsys):
    """Fails if a device is read until memory ends."""
    assert main_of("sweep")(["--out", "/dev/full", *models_of(folders)]) == cli.UNUSABLE
    assert "/dev/full: is a device or a pipe" in last_line(capsys)


@pytest.mark.parametrize("name", ["spec_round", "throughput", "sweep", "replay"])
@pytest.mark.parametrize("more", [("--top-k", "5"), ("--top-p", "0.5")])
def test_sampling_without_a_temperature(name, more, tmp_path, capsys):
    """Fails if a flag is ignored."""
    required = [
        str(tmp_path / word) if "." in word else word for word in REQUIRED.get(name, ())
    ]
    line = refused(name, [*required, *more], capsys)
    assert f"{more[0]} is of sampling, and --temperature 0 decodes greedily" in line


def test_half_a_character(capsys):
    line = refused("parity", ["--prompt", "a\udcff"], capsys)
    assert "--prompt: character 1 is half of a surrogate pair" in line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--steps", "0"), "argument --steps: 0 must be at least 1"),
        (("--stage", "nothing"), "argument --stage"),
    ],
)
def test_training_that_cannot_be(more, words, capsys):
    """Fails if no steps are 200 steps, or the status is 2."""
    assert words in refused("train_pair", ["--stage", "draft", *more], capsys)


@pytest.mark.parametrize("work", ["/proc/x", "/dev/null"])
def test_a_folder_of_training_that_cannot_be_written(work, capsys):
    arguments = ["--stage", "target", "--work", work]
    assert main_of("train_pair")(arguments) == cli.UNUSABLE
    assert f"{work}: no folder that can be written to" in last_line(capsys)
