"""Mismatches: verified positions at which decoding chooses another token.

A run only counts them. Here a prompt is run again, round by round, with the logits of
every window kept, and its committed text is replayed through plain decoding with a
recorder: one line a mismatch, which `experiments/parity.py` can take up.
"""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments.support import model_pair, paired_runs
from spec_jax import autoregressive, session
from spec_jax.debug import recorder
from spec_jax.model import fingerprint


TOP = 5


def ulp(value: float, dtype: str) -> float:
    """The distance of neighbouring numbers of `dtype` around a finite `value`."""
    info = ml_dtypes.finfo(dtype)
    exponent = math.frexp(max(abs(value), float(info.smallest_normal)))[1] - 1
    return math.ldexp(1.0, exponent - info.nmant)


@functools.partial(jax.jit, static_argnames=("verifier", "drafter"))
def _next_window(verifier, drafter, params, state, gamma):
    """The next round's window, its logits, choices and live rows; nothing is kept."""
    target_params, draft_params = params
    n = state.length
    gamma = jnp.clip(jnp.minimum(gamma, state.limit - n - 1), 0, drafter.gamma_max)
    _, proposal = drafter.propose(
        draft_params, state.memory, tokens=state.tokens, length=n, gamma=gamma
    )
    window = jnp.concatenate([state.tokens[n - 1][None], proposal.tokens])
    num_live = proposal.num_drafted + 1
    _, logits = verifier.forward(
        target_params, state.cache, tokens=window, start=n - 1, num_live=num_live
    )
    chosen = verifier.choose(logits, num_live)
    return window, num_live, logits[: window.shape[0]], chosen[: window.shape[0]]


def _windows(
    pair: model_pair.ModelPair, settings: paired_runs.Settings, prompt: list[int]
) -> tuple[list[int], list[dict]]:
    """The whole text of a run, and for each of its committed rows what it saw."""
    run = paired_runs.Rounds(pair, settings, prompt)
    state = run.begin()
    seen = []
    while not bool(paired_runs.inner_state(state).done):
        before = paired_runs.inner_state(state)
        start = int(before.length) - 1
        window, num_live, logits, chosen = jax.device_get(
            _next_window(
                pair.verifier,
                pair.drafter,
                run.params,
                before,
                jnp.int32(settings.gamma),
            )
        )
        state = run.generate(state, max_rounds=jnp.int32(1))
        committed = int(paired_runs.inner_state(state).length) - 1 - start
        seen += [
            {
                "start": start,
                "row": row,
                "window": window[:num_live].tolist(),
                "window_rows": len(window),
                "logits": logits[row],
                "chosen": int(chosen[row]),
            }
            for row in range(committed)
        ]
    inner = paired_runs.inner_state(state)
    paired_runs.check_state(inner)
    return np.asarray(inner.tokens)[: int(inner.length)].tolist(), seen


def _decoded(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    text: list[int],
    num_prompt: int,
) -> recorder.Recording:
    """What plain decoding sees at each position of a given text."""
    kv = pair.target.new_cache(capacity=settings.capacity, page_size=settings.page_size)
    state = session.begin_plain(
        pair.target,
        pair.params[0],
        kv,
        text[:num_prompt],
        max_tokens=settings.gen_tokens,
        prefill_by_rows=settings.prefill_by_rows,
    )
    recording = recorder.Recorder(target=pair.target, window=1, top=TOP)
    tokens = np.array(state.tokens)
    tokens[: len(text)] = text
    cache, _ = autoregressive.replay(
        recording,
        pair.params[0],
        recording.attach(state).cache,
        tokens=jnp.asarray(tokens),
        start=jnp.int32(num_prompt),
        stop=jnp.int32(len(text)),
    )
    return jax.device_get(cache.replace(cache=None))


def find(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    prompt: list[int],
    *,
    name: str,
    verify_path: str,
) -> list[dict]:
    """The mismatches of one prompt, as JSON rows.

    Args:
      name: of the prompt.
      verify_path: the name of `pair.verifier`.

    Returns:
      Rows of `kind` "mismatch". `position` is that of the row whose argmax differs:
      it decides the token after it. `window` is the pending token and the drafts,
      `window_rows` the height of the array they came in, `start` the position of the
      first, `tokens` what was generated before it, and `starts` the positions of all
      windows up to this one: with verification that is not by rows, the K/V before it
      is theirs. `margin_ulp` is how far the verify argmax lies above decoding's, in
      the logits of verification; `decode_margin_ulp` the other way round in those of
      decoding, None where they are not both among its highest. Both in units of the
      last place of the models' dtype, at the higher logit.
    """
    text, seen = _windows(pair, settings, prompt)
    decoded = _decoded(pair, settings, text, len(prompt))
    description = _describe(pair, settings, verify_path)
    rows = []
    for entry in seen:
        position = entry["start"] + entry["row"]
        if entry["chosen"] == int(decoded.chosen[position]):
            continue
        rows.append(
            {
                "kind": "mismatch",
                "id": name,
                "prompt_ids": prompt,
                "tokens": text[len(prompt) : entry["start"]],
                "start": entry["start"],
                "starts": sorted(
                    {e["start"] for e in seen if e["start"] <= entry["start"]}
                ),
                "window": entry["window"],
                "window_rows": entry["window_rows"],
                "position": position,
                "drafted_token": _drafted(entry),
                **_compare(entry, decoded, position, pair),
                **description,
            }
        )
    return rows


def _describe(
    pair: model_pair.ModelPair, settings: paired_runs.Settings, verify_path: str
) -> dict:
    """What the bits of the rounds depend on."""
    by_rows = settings.prefill_by_rows
    if by_rows is None:
        by_rows = pair.target.prefills_by_rows
    return {
        "verify_path": verify_path,
        "acceptance": settings.acceptance,
        "impl": pair.target.impl,
        "dtype": pair.target.config.dtype,
        "slab": pair.target.slab,
        "page_size": settings.page_size,
        "prefill": "rows" if by_rows else "batched",
        "weights_sha256": fingerprint.of_params(pair.params[0]),
    }


def _drafted(entry: dict) -> int | None:
    """The draft that the row judges; None for the last row, which has none."""
    following = entry["row"] + 1
    return entry["window"][following] if following < len(entry["window"]) else None


def _compare(entry, decoded, position, pair) -> dict:
    """Both choices, both highest logits with the tokens' texts, and the margins."""
    dtype, decode = pair.target.config.dtype, pair.tokenizer.decode
    logits, theirs = entry["logits"], int(decoded.chosen[position])
    highest = np.argsort(-logits, kind="stable")[:TOP]
    decode_top = list(
        zip(
            decoded.top_ids[position].tolist(),
            decoded.top_logits[position].tolist(),
            strict=True,
        )
    )
    by_token = dict(decode_top)
    ours = entry["chosen"]
    margin = None
    if ours in by_token:
        margin = (by_token[theirs] - by_token[ours]) / ulp(by_token[theirs], dtype)
    return {
        "verify_argmax": ours,
        "decode_argmax": theirs,
        "verify_top5": [[int(i), float(logits[i])] for i in highest],
        "decode_top5": [[token, logit] for token, logit in decode_top],
        "verify_top5_texts": [decode([int(token)]) for token in highest],
        "decode_top5_texts": [decode([token]) for token, _ in decode_top],
        "margin_ulp": float(logits[ours] - logits[theirs])
        / ulp(float(logits[ours]), dtype),
        "decode_margin_ulp": margin,
    }
