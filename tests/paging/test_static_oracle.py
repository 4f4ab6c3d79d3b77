"""Keys and values from Hugging Face's `DynamicCache` and back: bits, and decoding.

The cache of one library continues in the other; the model is a tiny random one that
Hugging Face saved.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import autoregressive, session, testing
from spec_jax.model import load as load_lib, params as params_lib, row_model
from spec_jax.paging import static


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle
torch.set_num_threads(1)

PROMPT = [7, 3, 90, 41, 5, 66, 23, 8, 14, 2, 77]
STEPS = 8
SIZES = {"capacity": 48, "page_size": 8}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One model on both sides."""

    oracle: object
    target: row_model.RowModel
    params: params_lib.Params

    def prefilled(self) -> static.StaticKV:
        """Our cache of all prompt tokens but the last."""
        kv = self.target.new_cache(**SIZES)
        return session.prefill(self.target, self.params, kv, PROMPT)

    def prefilled_oracle(self) -> "transformers.DynamicCache":
        """Theirs of the same."""
        past = transformers.DynamicCache(config=self.oracle.config)
        with torch.no_grad():
            self.oracle(torch.tensor([PROMPT[:-1]]), past_key_values=past)
        return past

    def decode(self, kv) -> list[int]:
        """What we generate from a cache of the prompt."""
        text = jnp.asarray(PROMPT + [0] * STEPS, jnp.int32)
        length = jnp.int32(len(PROMPT))
        state = autoregressive.init_state(
            text, length=length, limit=length + STEPS, cache=kv
        )
        state = autoregressive.generate(
            self.target,
            self.params,
            state,
            stop_ids=session.stop_array(()),
            max_steps=jnp.int32(STEPS),
        )
        session.check_state(state)
        return np.asarray(state.tokens)[len(PROMPT) :].tolist()

    def decode_oracle(self, past) -> list[int]:
        """What they generate from a cache of the prompt."""
        tokens = [PROMPT[-1]]
        with torch.no_grad():
            for _ in range(STEPS):
                outputs = self.oracle(torch.tensor([tokens[-1:]]), past_key_values=past)
                tokens.append(int(outputs.logits[0, -1].argmax()))
        return tokens[1:]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    """A tiny random model that Hugging Face saved, float32."""
    folder = tmp_path_factory.mktemp("float32")
    config = transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(0)
    oracle = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in oracle.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise + (1.0 if parameter.ndim == 1 else 0.0))
    oracle.save_pretrained(folder)
    oracle = transformers.Qwen3ForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    ).eval()
    config, params = load_lib.load(folder)
    target = row_model.RowModel(config=config, impl="auto", slab=2, cache="static")
    return Pair(oracle=oracle, target=target, params=params)


def pairs_of(past) -> list[tuple]:
    """Per-layer tuples of a `DynamicCache`."""
    return [(layer.keys, layer.values) for layer in past.layers]


def to_dynamic(kv) -> "transformers.DynamicCache":
    """Their cache with the content of slot 0."""
    tuples = static.to_tuples(kv, row_model.SLOT)
    return transformers.DynamicCache(
        [tuple(map(torch.from_dlpack, pair)) for pair in tuples]
    )


def test_our_decoding_continues_from_a_dynamic_cache(pair):
    """Fails if a token differs from theirs, or from our own after our own prefill."""
    past = pair.prefilled_oracle()
    kv = static.from_tuples(pair.target.new_cache(**SIZES), 0, pairs_of(past))
    tokens = pair.decode(kv)
    assert tokens == pair.decode_oracle(pair.prefilled_oracle())
    assert tokens == pair.decode(pair.prefilled())
    # Negative control: keys and values exchanged.
    exchanged = [layer[::-1] for layer in pairs_of(past)]
    kv = static.from_tuples(pair.target.new_cache(**SIZES), 0, exchanged)
    assert pair.decode(kv) != tokens


def test_their_decoding_continues_from_a_static_cache(pair):
    """The other way round; and our own bits after a conversion there and back."""
    kv = pair.prefilled()
    tokens = pair.decode_oracle(to_dynamic(kv))
    assert tokens == pair.decode(pair.prefilled())
    # Negative control: keys in the place of values.
    assert tokens != pair.decode_oracle(to_dynamic(kv.replace(v=kv.k)))
    back = static.from_tuples(
        pair.target.new_cache(**SIZES), 0, pairs_of(to_dynamic(kv))
    )
    forward = jax.jit(row_model.RowModel.forward, static_argnums=0)
    window = {
        "tokens": jnp.asarray(PROMPT[-1:], jnp.int32),
        "start": jnp.int32(len(PROMPT) - 1),
        "num_live": jnp.int32(1),
    }
    logits = [forward(pair.target, pair.params, x, **window)[1] for x in (back, kv)]
    testing.assert_same_bits(logits[0][0], logits[1][0])


def test_tensors_that_cannot_be_handed_over(pair):
    """Fails if the message does not say how to mend it."""
    kv = pair.prefilled()
    tuples = pairs_of(pair.prefilled_oracle())
    for wrong, message in (
        (lambda x: x.double(), "layer 0's keys are float64: hand over arrays of float"),
        (lambda x: x[:, :, :4], "layer 0's keys cannot be read .*contiguous"),
        (lambda x: x.requires_grad_(), "layer 0's keys cannot be read .*detached"),
    ):
        planted = [tuple(map(wrong, layer)) for layer in tuples]
        with pytest.raises(ValueError, match=message):
            static.from_tuples(kv, 0, planted)
