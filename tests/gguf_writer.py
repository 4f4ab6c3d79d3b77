"""The metadata of a GGUF file: a model's config, and the embedded pair's tokenizer."""

import json
from typing import Any

import gguf

from spec_jax.model import config as config_lib, tokenizer as tokenizer_lib


def add_config(writer: gguf.GGUFWriter, config: config_lib.ModelConfig) -> None:
    """Adds the sizes and constants of a model."""
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)


def add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: tokenizer_lib.Tokenizer, vocab_size: int
) -> None:
    """Adds tokens, their kinds, the merges in their order, and the stop token."""
    raw: dict[str, Any] = json.loads(tokenizer.path.read_text(encoding="utf-8"))
    kinds = gguf.TokenType
    # Rows of the embedding that have no token, as in Qwen3, get a name of their own.
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [kinds.UNUSED] * vocab_size
    for token, number in raw["model"]["vocab"].items():
        tokens[number], types[number] = token, kinds.NORMAL
    for added in raw.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        is_special = added.get("special")
        types[added["id"]] = kinds.CONTROL if is_special else kinds.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # Newer files store pairs; a space joins them, which no byte-level token has.
    merges = [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokenizer.stop_ids[0])
    writer.add_add_bos_token(False)
