"""Hugging Face folders of a tiny random target and draft, for tests of scripts."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import spec_jax as sj
from spec_jax.model import (
    block_files,
    block_params,
    config as config_lib,
    eagle3_files,
    eagle3_params,
    gpt_neox,
    head_dialects,
    head_params,
    load,
    params as params_lib,
    save as save_lib,
)


END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 264  # a few rows more than the tokenizer has entries, as in Qwen3


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Returns a tokenizer with a token a byte, after end-of-text; it has no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([END_OF_TEXT, *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def config(**changes) -> config_lib.Qwen3Config:
    """Returns the config of a model with one small layer."""
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
        "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
        "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "dtype": "float32",
    }  # fmt: skip
    return config_lib.Qwen3Config(**(sizes | changes))


def neox_config(**changes) -> gpt_neox.GPTNeoXConfig:
    """Returns the config of a model with one small layer, of a family without GQA."""
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
        "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16,
        "rotary_size": 4, "max_position_embeddings": 2048, "dtype": "float32",
    }  # fmt: skip
    return gpt_neox.GPTNeoXConfig(**(sizes | changes))


def write_model(
    folder: pathlib.Path, model_config: config_lib.ModelConfig, *, seed=0, params=None
) -> pathlib.Path:
    """Writes a model folder with the byte tokenizer; without params, random weights."""
    if params is None:
        params = params_lib.init(jax.random.key(seed), model_config, stddev=0.3)
    save_lib.save(folder, model_config, params)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def write_scaled(
    folder: pathlib.Path, *, final_norm: float = 1.0, others: float = 1.0
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes the models of `write` with all their weights scaled. With `final_norm` of
    3e38 the weights are finite and the logits overflow; with `others` of 0 all logits
    are equal."""
    folders = write(folder)
    for model in folders:
        model_config, params = load.load(model)
        params = jax.tree.map(lambda weight: weight * others, params)
        norm = params.final_norm * final_norm
        save_lib.save(model, model_config, params.replace(final_norm=norm))
    return folders


def write(
    folder: pathlib.Path, kind: str = "draft-model"
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes a target of two layers, and its head of a kind or a draft of one layer."""
    target = write_model(folder / "target", config(num_layers=2), seed=0)
    if kind in WRITE_HEAD:
        return target, WRITE_HEAD[kind](folder / "head", target)
    return target, write_model(folder / "draft", config(), seed=1)


def write_head(
    folder: pathlib.Path,
    target: pathlib.Path,
    *,
    kind: str = "eagle3",
    seed: int = 2,
    **changes,
) -> pathlib.Path:
    """Writes a head of random weights for that target of two layers."""
    layer, params = load.load(target)
    own = dataclasses.replace(layer, num_layers=1, tie_word_embeddings=False)
    files, dialect, given = block_files, "deepspec", {"lm_head": params.head}
    if kind == "eagle3":
        files, dialect = eagle3_files, "midlayer"
        given = {"hot": jnp.arange(64, dtype=jnp.int32) * 4}
        sizes = {"draft_vocab_size": 64, "target_hidden_size": layer.hidden_size}
        head = eagle3_params.Eagle3Config(layer=own, taps=(1, 0), **sizes, **changes)
    else:
        sizes = {"draft_vocab_size": layer.vocab_size, "block_size": 4}
        if kind == "dspark":
            sizes |= {"head": "vanilla", "markov_rank": 8, "has_confidence": True}
        how = {"slots": "anchor-first", "mask_token_id": 0}
        head = block_params.BlockConfig(layer=own, taps=(1,), **sizes, **how).validate()
    given |= {"embed": params.embed, "stddev": 0.3}
    made = head_params.init(jax.random.key(seed), head, **given)
    origin = head_dialects.Origin(target=layer)
    files.save(folder, head, made, dialect=dialect, origin=origin)
    return folder


WRITE_HEAD = {
    kind: functools.partial(write_head, kind=kind)
    for kind in ("eagle3", "dflash", "dspark")
}
"""Functions that write a head of each kind, by its drafter's name."""


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A chat template of one line."""


def write_chat(folder: pathlib.Path) -> pathlib.Path:
    """Writes a model of one layer and random weights, with a chat template."""
    write_model(folder, config(tie_word_embeddings=False), seed=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


CYCLE = "añ日🙂"
"""Characters of one byte to four; no byte occurs twice."""


def load_cycle(folder: pathlib.Path, text: str = CYCLE) -> sj.LanguageModel:
    """Returns a model that decodes to `text` again and again, with a lookup drafter. It
    knows which byte follows each byte of the text, all of which must differ. Its layers
    add nothing: the head looks up the last token."""
    ids = byte_tokenizer().encode(text, add_special_tokens=False).ids
    if len(set(ids)) < len(ids):
        raise ValueError(f"{text!r} has a byte twice")
    model_config = config(tie_word_embeddings=False)
    params = params_lib.init(jax.random.key(3), model_config, stddev=1.0)
    layers = tuple(
        layer.replace(attention_out=layer.attention_out * 0, down=layer.down * 0)
        for layer in params.layers
    )
    unit = params.embed / jnp.linalg.norm(params.embed, axis=-1, keepdims=True)
    head = (unit * 0).at[jnp.array(ids[1:] + ids[:1])].set(unit[jnp.array(ids)])
    params = params.replace(embed=unit, layers=layers, lm_head=head)
    write_model(folder, model_config, params=params)
    return sj.load(folder, drafter="ngram", gamma_max=4)


def streamed(lm, prompt, **settings) -> tuple[list[sj.Piece], sj.Generation]:
    """Returns the pieces of a stream, and its result, to which they must add up."""
    stream, pieces = sj.stream(lm, prompt, **settings), []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            out = end.value
            break
    assert "".join(piece.text for piece in pieces) == out.text
    assert [token for piece in pieces for token in piece.tokens] == out.tokens
    return pieces, out
