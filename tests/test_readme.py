"""Runs of the code that the README shows, as it stands there."""

import pytest
from readme_blocks import (
    HEADING,
    README,
    bigram,
    printed_output,
    python_blocks,
    run_blocks,
    shown_output,
)

from spec_jax import loading
from spec_jax.native import build
from spec_jax.testing import bench


def test_the_first_lines_of_the_readme_print_what_it_shows():
    """Fails if the first block does not run, or prints another text than is shown; then
    `python tests/readme_blocks.py` writes the new text."""
    text = README.read_text()
    isa, shown = shown_output(text)
    if isa not in build.available_isas():
        pytest.skip(f"this processor lacks the instruction set {isa}")
    assert printed_output(text) == shown
    assert shown.count("  equal") == 3 * 4 and "differ" not in shown


def test_a_readme_without_output_is_seen():
    """Negative control: a README that shows no output is refused."""
    text = README.read_text()
    with pytest.raises(LookupError, match="0 outputs are shown"):
        shown_output(text.replace("SPEC_JAX_ISA", "ISA"))


def test_the_drafter_of_the_readme_keeps_the_contract():
    assert "Bigram" in run_blocks(python_blocks(README.read_text(), HEADING))


def test_the_drafter_of_the_readme_goes_through_the_front_door():
    """Fails if `load` changes the drafter, or if that takes 50 lines or more."""
    text, check = python_blocks(README.read_text(), HEADING)
    assert len(text.splitlines()) < 50 and "testing.check_drafter(" in check
    vocab_size = loading.load(drafter="ngram").target.config.vocab_size
    drafter = bigram(gamma_max=4, vocab_size=vocab_size)
    assert loading.load(drafter=drafter).drafter is drafter
    with pytest.raises(ValueError, match="different vocabularies: 96 and"):
        loading.load(drafter=bigram(gamma_max=4, vocab_size=bench.TINY.vocab_size))


FAULTS = {
    "reads past the end": ("at < length - 1, at", "at < length + 3, at"),
    "number drafted": ("jnp.minimum(gamma, num_known)", "num_known"),
}


@pytest.mark.parametrize("clause", FAULTS)
def test_a_fault_in_the_readme_is_caught(clause):
    """Negative control: a fault in the text is caught, so the kit runs that text."""
    drafter, check = python_blocks(README.read_text(), HEADING)
    old, new = FAULTS[clause]
    assert drafter.count(old) == 1
    with pytest.raises(AssertionError, match=clause):
        run_blocks([drafter.replace(old, new), check])
