"""How good the text of a target is: does it repeat itself, and is it Python?

Texts are continued by decoding of the shipped bfloat16 weights, greedily and
drawn, so that the measures do not depend on a drafter.
"""

import ast
import dataclasses
import pathlib
from collections.abc import Sequence

from experiments.lib import prompt_files, prompts as prompts_lib, runs, samples
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.rules import sampling


NUM_TOKENS, PAGE_SIZE, SEED = 64, 16, 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """Measures of the texts that continue the bundled prompts."""

    num_prompts: int
    num_tokens: int
    # Share of repeated 4-grams, see `metrics.repetition`; the mean over the texts,
    # weighted by tokens
    repetition: float
    # Share of texts, prompt included, whose longest prefix of whole lines passes
    # `ast.parse`
    parses: float


def measure(assets: pathlib.Path, *, impl: str) -> dict[str, Quality]:
    """Measures the target in `assets`: texts decoded `greedy`, and texts `drawn`.

    Drawn texts have the settings `samples.SETTINGS` and the seed `SEED`.
    """
    lm = loading.load(
        assets / "target", draft=assets / "draft", gamma_max=4, slab=8, impl=impl
    )
    prompts = prompt_files.parse(str(prompt_files.BUNDLED), default_file="")
    drawn = sampling.make_settings(**samples.SETTINGS, min_p=0.0, seed=SEED)
    return {
        "greedy": _measure(lm, prompts, None),
        "drawn": _measure(lm, prompts, drawn),
    }


def _measure(
    lm: loading.LanguageModel,
    prompts: Sequence[prompt_files.Prompt],
    settings: sampling.SamplingSettings | None,
) -> Quality:
    ids = prompts_lib.encode(lm, prompts, raw=False)
    run_settings = runs.Settings(
        gamma=0,
        gen_tokens=NUM_TOKENS,
        page_size=PAGE_SIZE,
        capacity=prompts_lib.capacity_for(
            lm, prompts, ids, gen_tokens=NUM_TOKENS, page_size=PAGE_SIZE
        ),
        stop_ids=lm.stop_ids,
        sampling=settings,
    )
    texts = [runs.run_plain(lm, run_settings, one).tokens for one in ids]
    num_tokens = sum(len(text) for text in texts)
    repeated = sum(len(text) * metrics.repetition(text) for text in texts)
    pairs = zip(ids, texts, strict=True)
    whole = (lm.tokenizer.decode([*one, *text]) for one, text in pairs)
    return Quality(
        num_prompts=len(texts),
        num_tokens=num_tokens,
        repetition=repeated / num_tokens,
        parses=sum(parses(text) for text in whole) / len(texts),
    )


def parses(text: str) -> bool:
    """Whether the longest prefix of whole lines passes `ast.parse`."""
    try:
        ast.parse(text[: text.rfind("\n") + 1])
    except (SyntaxError, ValueError):  # ValueError: a null byte.
        return False
    return True
