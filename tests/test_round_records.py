"""What a round writes down besides the tokens: padding is no token, no round without
a page is counted."""

import decoding
import jax.numpy as jnp
from decoding import Ask, Setting

from spec_jax.rules import acceptance


SETTING = Setting()


def test_padding_is_no_stop_token():
    """Fails if what fills an outcome after its tokens ends the sequence.

    The padding is a token of the vocabulary, and may be the one that stops.
    """
    text = decoding.text(decoding.decoded(SETTING, Ask()))
    assert acceptance.PAD not in text[len(decoding.PROMPT) :]
    state = decoding.run(SETTING, [Ask(run=1, stop_ids=(acceptance.PAD,))])
    slots = state.slots
    assert int(slots.num_accepted[0]) < int(slots.num_proposed[0])  # There was padding.
    assert decoding.text(state) == text


def test_a_round_without_a_page_is_not_counted():
    """Fails if a round that commits nothing shows in the statistics."""
    truth = decoding.decoded(SETTING, Ask()).tokens
    made, state = decoding.begin_scripted(truth, target=SETTING.target)
    kv = state.cache.replace(num_free=jnp.int32(0))
    slots = decoding.slot_of(decoding.generate(made, state.replace(cache=kv)))
    assert int(slots.status) == decoding.Status.OUT_OF_PAGES
    committed = int(slots.length) - len(decoding.PROMPT)
    assert committed == int(slots.num_accepted + slots.num_rounds) > 0
    assert int(slots.num_cut) == 0
    assert int(slots.accepted_hist.sum()) == int(slots.num_rounds)
