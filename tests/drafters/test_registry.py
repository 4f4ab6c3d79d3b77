"""Drafters by name, and drafters of other packages: how they are found or refused."""

import importlib
import shutil
import sys

import pytest
import test_readme
import tiny_pair

import spec_jax as sj
from spec_jax import loading, testing
from spec_jax.drafters import eagle3, hybrid, ngram, registry, suffix
from spec_jax.model import hub


GAMMA_MAX = 3


def load_with(folders, drafter, **changes) -> sj.LanguageModel:
    target, draft = folders
    return sj.load(target, draft=draft, drafter=drafter, gamma_max=GAMMA_MAX, **changes)


MORE = """

class NeedsMore(Bigram):
    depth: int

    def __init__(self, *, gamma_max, depth):
        pass


def make(parts):
    return Bigram(gamma_max=parts.gamma_max, vocab_size=parts.vocab_size), {"made": 1}


def nothing(parts):
    return 3


READY = Bigram(gamma_max=2, vocab_size=264)
"""


ENTRY_POINTS = """[spec_jax.drafters]
bigram = otherdrafters.bigram:Bigram
broken = otherdrafters.nowhere:Bigram
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package with the README's drafter; yields the name of its module."""
    drafter, _ = test_readme.python_blocks(
        test_readme.README.read_text(), test_readme.HEADING
    )
    for name, text in {
        "otherdrafters/__init__.py": "",
        "otherdrafters/bigram.py": drafter + MORE,
        "otherdrafters-1.0.dist-info/METADATA": "Name: otherdrafters\nVersion: 1.0\n",
        "otherdrafters-1.0.dist-info/entry_points.txt": ENTRY_POINTS,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "otherdrafters.bigram"
    for name in [name for name in sys.modules if name.startswith("otherdrafters")]:
        del sys.modules[name]


def test_drafters_of_another_package(folders, installed):
    """Checks names of an entry point, and of a class, a function of the parts and a
    drafter in a module. `test_readme` checks their drafts."""
    assert "bigram" in registry.names()
    kind = importlib.import_module(installed).Bigram
    by_class = kind(gamma_max=GAMMA_MAX, vocab_size=tiny_pair.VOCAB_SIZE)
    for name in ("bigram", f"{installed}:Bigram"):
        assert load_with(folders, name).drafter == by_class
    made = load_with(folders, f"{installed}:make")
    assert made.drafter == by_class and made.drafter_params == {"made": 1}
    ready = load_with(folders, f"{installed}:READY")
    assert ready.gamma_max == 2
    assert load_with(folders, ready.drafter).drafter is ready.drafter


UNKNOWN = {
    "medusa": "eagle3, dflash, dspark, oracle, bigram, broken, nor written as package.",
    "broken": "drafter 'broken': No module named 'otherdrafters.nowhere'",
    "nosuchpackage.it:X": "drafter 'nosuchpackage.it:X': No module named 'nosuch",
    "otherdrafters.bigram:Trigram": "has no attribute 'Trigram'",
    "otherdrafters.bigram:": "nor written as package.module:Name",
    "otherdrafters.bigram:NeedsMore": "'depth', which is not one of draft, dtype,",
    "otherdrafters.bigram:nothing": "is no drafter: it has no gamma_max, init, prefill",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_names_that_are_none_are_refused_in_one_line(folders, installed, name):
    with pytest.raises(ValueError) as caught:
        load_with(folders, name)
    assert UNKNOWN[name] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("draft", "shipped", "expected"),
    [
        ("draft", ("eagle3",), "draft-model"),  # a named draft comes first
        ("head", (), "eagle3"),
        (None, ("dspark", "eagle3"), "hybrid"),
        (None, ("dspark",), "hybrid"),
        (None, (), "ngram"),
        (None, None, "ngram"),
    ],
)
def test_a_drafter_that_is_not_named(folders, tmp_path, draft, shipped, expected):
    """Fails if the default is not the drafter that `load` documents."""
    target, draft_model = folders
    head = tiny_pair.write_head(tmp_path / "head", target)
    named = {"draft": draft_model, "head": head, None: None}[draft]
    heads = None if shipped is None else tmp_path / "shipped"
    for name in shipped or ():
        shutil.copytree(head, heads / name)
    assert registry.default_name(named, heads) == expected


def test_a_hybrid_takes_the_head_that_is_shipped(folders, tmp_path, monkeypatch):
    """Fails if a shipped head is not found, or a draft model is required beside it."""
    tiny_pair.write_head(tmp_path / "eagle3", folders[0])
    monkeypatch.setattr(loading, "heads_for", lambda target: tmp_path)
    found = sj.load(folders[0]).drafter
    assert isinstance(found, hybrid.Hybrid)
    assert isinstance(found.draft, eagle3.Eagle3)
    assert sj.load(folders[0], tree="2x3:5").drafter.draft.tree.nodes == 5
    members = sj.load(folders[0], drafter="choice").drafter.members
    assert [type(one) for one in members] == [suffix.SuffixDecoding, eagle3.Eagle3]
    for name in registry.TAKE_HEAD:
        assert not loading.lacks_draft(name, folders[0], None)
    assert loading.lacks_draft("draft-model", folders[0], None)
    monkeypatch.setattr(loading, "heads_for", lambda target: None)
    for name in registry.TAKE_HEAD:
        assert loading.lacks_draft(name, folders[0], None)
    with pytest.raises(ValueError, match="needs a draft model, and none is given"):
        sj.load(folders[0], drafter="hybrid")


def test_shipped_heads_are_of_one_target(folders, tmp_path, monkeypatch):
    """Fails if a fetched model's heads are not found by its name, or others' are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "ASSETS", tmp_path / "assets")
    assert loading.heads_for(folders[0]) is None
    file = hub.cache() / hub.FETCHED["smollm2"]
    file.parent.mkdir()
    file.touch()
    (tmp_path / "assets" / "smollm2").mkdir(parents=True)
    assert loading.heads_for("smollm2") == tmp_path / "assets" / "smollm2"
    assert loading.heads_for(None) == tmp_path / "assets"
    assert loading.heads_for(folders[0]) is None
    assert isinstance(sj.load(folders[0]).drafter, ngram.PromptLookup)


def test_loads_by_name_and_by_folder(tmp_path, monkeypatch):
    """Fails if a head is not found by its folder, or is loaded for another target. The
    name alone stands for the shipped head, for the embedded target only."""
    folder = tiny_pair.write_head(tmp_path / "eagle3", loading.EMBEDDED_TARGET)
    by_folder = sj.load(drafter=str(folder), gamma_max=3)
    by_name = sj.load(drafter="eagle3", draft=folder, gamma_max=3)
    monkeypatch.setattr(loading, "ASSETS", tmp_path)
    for target in (None, loading.EMBEDDED_TARGET):
        shipped = sj.load(target, drafter="eagle3", gamma_max=3)
        assert shipped.drafter == by_folder.drafter == by_name.drafter
        testing.assert_same_bits(shipped.drafter_params.fc, by_folder.drafter_params.fc)
    assert by_folder.drafter.taps == (1, 0)
    mixed = sj.load(drafter="hybrid", draft=folder, gamma_max=3)
    assert mixed.drafter.draft == by_name.drafter and mixed.drafter.taps == (1, 0)
    other = shutil.copytree(loading.EMBEDDED_TARGET, tmp_path / "other")
    for target, drafter, draft, words in (
        (None, "dspark", None, "none is given nor shipped for"),
        (other, "eagle3", None, "nor shipped for this target: name a"),
        (None, "eagle3", loading.EMBEDDED_DRAFT, "is no dialect of EAGLE-3"),
        (None, str(loading.EMBEDDED_DRAFT), None, "is no head that drafts"),
    ):
        with pytest.raises(ValueError, match=words):
            sj.load(target, drafter=drafter, draft=draft)
    parts = registry.Parts(gamma_max=3, vocab_size=96, load_draft=lambda: None)
    with pytest.raises(ValueError, match="reads the features of a target"):
        registry.build(str(folder), parts)
