"""A draft model with a tokenizer of its own, which drafts in the target's vocabulary.

Two tokenizers have many tokens in common, under other ids. The draft is asked for these
alone: its logits are put in the target's order, and tokens that it does not have are
never drafted (token-level intersection, TLI; Timor et al. 2025,
https://arxiv.org/abs/2502.05202). Nothing else knows of it, and so every rule, trees,
batches and processors take such a draft as they take any.

Where a text has a token that the draft lacks, the draft reads the last of the tokens
of its own that make up the same letters: positions stay those of the target. Drafts are
verified like any others.
"""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from spec_jax import pytree
from spec_jax.model import decoder, params as params_lib, row_model, tokenizer
from spec_jax.paging import cache as paged


class TranslatedParams(pytree.Node):
    """A draft's weights, and its token for each of the target's."""

    model: params_lib.Params
    read: jax.Array  # [V] int32: the draft's token that it reads for a target's token
    drafted: jax.Array  # [V] int32: the draft's equal token; its vocabulary size: none


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedModel(row_model.RowModel):
    """A `RowModel` whose tokens and logits are those of another vocabulary.

    Attributes:
      config: the draft's, with the size of the target's vocabulary.
      own_size: of the draft's vocabulary.
    """

    own_size: int

    @functools.cached_property
    def own(self) -> row_model.RowModel:
        """The model in its own vocabulary."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        config = dataclasses.replace(self.config, vocab_size=fields.pop("own_size"))
        return row_model.RowModel(**fields | {"config": config})

    @property
    def runs_chains(self) -> bool:
        """False: each draft is translated to the target's ids before the next."""
        return False

    def forward_rows(
        self,
        params: Any,
        rows: decoder.Rows,
        kv: paged.PagedKV,
        **how: Any,
    ) -> tuple[paged.PagedKV, decoder.RowOutputs]:
        """Runs a slab of rows; logits of tokens that the draft lacks are -inf."""
        rows = rows.replace(tokens=params.read.at[rows.tokens].get(mode="clip"))
        kv, outputs = self.own.forward_rows(params.model, rows, kv, **how)
        logits = outputs.logits.at[:, params.drafted].get(
            mode="fill", fill_value=-jnp.inf
        )
        return kv, outputs.replace(logits=logits)

    def prefill(
        self,
        params: Any,
        kv: paged.PagedKV,
        tokens: list[int],
        **how: Any,
    ) -> tuple[paged.PagedKV, Float[jax.Array, "T taps D"] | None]:
        """Implements `RowModel.prefill`."""
        own = np.asarray(params.read)[np.asarray(tokens, np.int32)].tolist()
        return self.own.prefill(params.model, kv, own, **how)


def translate(
    model: row_model.RowModel,
    params: params_lib.Params,
    own: tokenizer.Tokenizer,
    target: tokenizer.Tokenizer,
    *,
    vocab_size: int,
) -> tuple[TranslatedModel, TranslatedParams]:
    """Returns a draft model in the vocabulary of a target, and says what they share.

    Args:
      own: the draft's tokenizer.
      vocab_size: entries of the target's model.

    Raises:
      ValueError: the tokenizers have no token in common.
    """
    size = model.config.vocab_size
    read, drafted = tables(target, own, num_entries=vocab_size, size=size)
    shared = np.count_nonzero(drafted < size)
    if not shared:
        raise ValueError(
            f"{own.path} and {target.path} have no token in common: take a draft model "
            "of the target's family, or a drafter that needs none, such as 'ngram'"
        )
    logging.getLogger(__name__).warning(
        f"{own.path} is not the target's tokenizer: the draft model drafts the "
        f"{shared:,} of {vocab_size:,} tokens that both have"
    )
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    config = dataclasses.replace(model.config, vocab_size=vocab_size)
    translated = TranslatedModel(**fields | {"config": config, "own_size": size})
    return translated, TranslatedParams(
        model=params, read=jnp.asarray(read), drafted=jnp.asarray(drafted)
    )


def tables(
    target: tokenizer.Tokenizer,
    own: tokenizer.Tokenizer,
    *,
    num_entries: int,
    size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `read` and `drafted` of `TranslatedParams`.

    Tokens are the same if they stand for the same bytes, and both or neither are
    special.
    """
    ids: dict[tuple[bytes, bool], int] = {}
    for token in range(min(own.num_ids, size)):
        ids.setdefault(_key(own, token), token)
    ids = {key: token for key, token in ids.items() if key[0]}
    keys = [_key(target, token) for token in range(min(target.num_ids, num_entries))]
    drafted = np.full((num_entries,), size, np.int32)
    drafted[: len(keys)] = [ids.get(key, size) for key in keys]
    read = np.where(drafted < size, drafted, 0).astype(np.int32)
    missing = [token for token, key in enumerate(keys) if key not in ids]
    texts = [keys[token][0].decode(errors="replace") for token in missing]
    pieces = own.backend.encode_batch(texts, add_special_tokens=False)
    read[missing] = [piece.ids[-1] if piece.ids else 0 for piece in pieces]
    return read, drafted


def _key(words: tokenizer.Tokenizer, token: int) -> tuple[bytes, bool]:
    return words.bytes_of(token), token in words.special_ids
