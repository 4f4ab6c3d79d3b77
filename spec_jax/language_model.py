"""A target, a drafter and a tokenizer that fit together: the input of `generation`."""

import dataclasses
import math
import pathlib
from typing import Any

import jax

from spec_jax.drafters import tree_shapes
from spec_jax.engine import checks, protocols, rows
from spec_jax.model import (
    config as config_lib,
    params as params_lib,
    row_model,
    save as save_lib,
    tokenizer,
)
from spec_jax.ops import dispatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A target, a drafter that fits it, and a tokenizer.

    Attributes:
      target: the model; holds config, implementation and slab height.
      params: the target's weights.
      drafter: for one sequence, or with a form for slots (`for_slots`).
      drafter_params: None for a drafter without parameters.
      tokenizer: with the chat template and stop tokens; None for a model of random
        weights, which takes token ids alone.
    """

    target: row_model.RowModel
    params: params_lib.Params = dataclasses.field(repr=False)
    drafter: protocols.Drafter
    drafter_params: Any = dataclasses.field(repr=False)
    tokenizer: tokenizer.Tokenizer | None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, as the target's folder names them."""
        return () if self.tokenizer is None else self.tokenizer.stop_ids

    @property
    def gamma_max(self) -> int:
        """The most tokens that are drafted in a round."""
        return self.drafter.gamma_max

    def save(
        self, folder: str | pathlib.Path, *, max_shard_bytes: int | None = None
    ) -> None:
        """Writes the target as a Hugging Face folder: weights, configs, tokenizer.

        `load` and transformers open it; weights, tokens and chats are the same, bit for
        bit. The drafter and a folder's settings of sampling are not written.

        Args:
          folder: made if it is not there; a checkpoint in it is replaced.
          max_shard_bytes: most bytes of weights in a file; None: all are in one.

        Raises:
          ValueError: a model without a tokenizer, or on a mesh; or a size below 1.
          CheckpointError: the files cannot be written.
        """
        if self.tokenizer is None:
            raise ValueError(
                "the model has no tokenizer, without which its folder cannot be "
                "loaded: write its weights alone with spec_jax.model.save.save"
            )
        if self.target.layout is not None:
            raise ValueError(
                "the model's weights are shared out over a mesh: load it without "
                "`mesh`, and save that"
            )
        save_lib.save(
            folder,
            self.target.config,
            self.params,
            tokenizer=self.tokenizer,
            max_shard_bytes=max_shard_bytes,
        )

    def with_drafter(self, drafter: protocols.Drafter, params: Any = None):
        """Returns the same target with another drafter.

        Raises:
          ValueError: a drafter that does not fit the target.
        """
        checks.check_pair(rows.SlotRows(model=self.target, num_slots=1), drafter)
        return dataclasses.replace(self, drafter=drafter, drafter_params=params)

    def with_tree(self, tree: tree_shapes.AnyTree | str) -> "LanguageModel":
        """Returns the same pair with a drafter of trees.

        Args:
          tree: the trees' shape, or its text, which `tree_shapes.parse` reads.

        Raises:
          ValueError: no such tree, or a drafter that drafts chains alone.
        """
        if isinstance(tree, str):
            tree = tree_shapes.parse(tree)
        drafter = protocols.complete(self.drafter).for_tree(tree)
        return self.with_drafter(drafter, self.drafter_params)

    def card(self) -> str:
        """Returns a description in five lines, which `print` shows."""
        config, words = self.target.config, self.tokenizer
        shapes = params_lib.shapes(config)
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        kernels = [self.target.impl, dispatch.instruction_set(self.target.impl)]
        text = "none: token ids alone"
        if words is not None:
            chat = "a chat template" if words.has_chat_template else "no chat template"
            text = f"{words.vocab_size:,} tokens, {chat}, stop ids {[*words.stop_ids]}"
        return "\n".join(
            [
                f"target: {config.model_type}, {config.num_layers} layers of width "
                f"{config.hidden_size}, {config.num_heads} heads and "
                f"{config.num_kv_heads} of keys and values of {config.head_dim}",
                f"weights: {count / 1e6:,.1f} M in {_kind(config)}, vocabulary "
                f"{config.vocab_size:,}, {config.max_position_embeddings:,} positions",
                f"kernels: {' '.join(filter(None, kernels))}, slabs of "
                f"{self.target.slab} rows, {self.target.cache} cache",
                f"drafter: {type(self.drafter).__name__}, {self.gamma_max} drafts a "
                "round at most",
                f"tokenizer: {text}",
            ]
        )

    __str__ = card


def _kind(config: config_lib.ModelConfig) -> str:
    """Returns the forms of the weights, and their dtype, in words."""
    forms = {"dense": "", "q4_1": "q4_1, q8_0 of the vocabulary, and "}
    return forms.get(config.weights, f"{config.weights} and ") + config.dtype
