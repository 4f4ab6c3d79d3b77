"""Runs of the code that the README shows, as it stands there."""

import pytest
import readme_blocks
from readme_blocks import HEADING, README

from spec_jax import loading
from spec_jax.native import build
from spec_jax.testing import bench


def test_the_first_lines_of_the_readme_print_what_it_shows():
    """Fails if they print another text; `python tests/readme_blocks.py` writes it."""
    text = README.read_text()
    isa, shown = readme_blocks.shown_output(text)
    if isa not in build.available_isas():
        pytest.skip(f"this processor lacks the instruction set {isa}")
    assert readme_blocks.printed_output(text) == shown
    assert shown.count("  equal") == 3 * 4 and "differ" not in shown


def test_the_drafter_of_the_readme_goes_through_the_front_door():
    """Fails if it breaks the contract, `load` changes it, or it is no longer short."""
    blocks = readme_blocks.python_blocks(README.read_text(), HEADING)
    made = readme_blocks.run_blocks(blocks)["Bigram"]
    assert len(blocks[0].splitlines()) < 50 and "testing.check_drafter(" in blocks[1]
    vocab_size = loading.load(drafter="ngram").target.config.vocab_size
    drafter = made(gamma_max=4, vocab_size=vocab_size)
    assert loading.load(drafter=drafter).drafter is drafter
    with pytest.raises(ValueError, match="different vocabularies: 96 and"):
        loading.load(drafter=made(gamma_max=4, vocab_size=bench.TINY.vocab_size))


@pytest.mark.parametrize(
    ("clause", "old", "new"),
    [
        ("reads past the end", "at < length - 1, at", "at < length + 3, at"),
        ("number drafted", "jnp.minimum(gamma, num_known)", "num_known"),
    ],
)
def test_a_fault_in_the_readme_is_caught(clause, old, new):
    """Negative control: a fault in the text is caught, so the kit runs that text."""
    drafter, check = readme_blocks.python_blocks(README.read_text(), HEADING)
    assert drafter.count(old) == 1
    with pytest.raises(AssertionError, match=clause):
        readme_blocks.run_blocks([drafter.replace(old, new), check])
