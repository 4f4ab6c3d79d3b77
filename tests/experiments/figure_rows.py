"""Rows of results, written by hand, and the figures that they make: shared by tests."""

import dataclasses
from collections.abc import Callable

from experiments import plot
from spec_jax.gamma import theory


def summary(gamma: int, **changes) -> dict:
    speed = {"speedup_e2e": 1.5, "speedup_e2e_p10": 1.2, "speedup_e2e_p90": 1.9}
    rounds = [3 - (i > 2) for i in range(gamma + 1)]
    return {
        **{"kind": "summary", "impl": "xla", "dtype": "float32", "gamma": gamma},
        **{"prompt_source": "50", "repeats": 1, "acceptance_rate": 0.5},
        "conditional_acceptance": [0.9 - 0.01 * gamma] * (gamma - 1) + [None],
        **{"accepted_hist": rounds, "rounds": sum(rounds), "mean_accepted_length": 2.5},
        **speed,
        **changes,
    }


def step(num_active: int, **changes) -> dict:
    name = "1 active row" if num_active == 1 else f"{num_active} active rows"
    spread = {"ms": 2.0, "ms_p10": 1.5, "ms_p90": 2.5}
    spread |= {"ratio": 1.0, "ratio_p10": 0.9, "ratio_p90": 1.1}
    row = {"kind": "step", "step": name, "num_active": num_active, "impl": "xla"}
    return row | spread | changes


def comparison() -> list[dict]:
    """As large as a comparison gets: four values of K, a drafter more on our side."""
    speed = {"tok_s": 90.0, "tok_s_p10": 80.0, "tok_s_p90": 95.0}
    runs = [
        (side, method, gamma)
        for side in ("spec_jax", "transformers")
        for method in ("plain", "draft model", "prompt lookup")
        for gamma in ((None,) if method == "plain" else (3, 5, 7, 10))
    ]
    return [
        {"kind": "comparison", "length": length, "prompt_tokens": [tokens] * 2}
        | {"side": side, "method": method, "gamma": gamma}
        | speed
        for length, tokens in (("short", 32), ("medium", 128), ("long", 512))
        for side, method, gamma in runs
    ]


def parity(num_layers: int = 28) -> dict:
    def cell(layer: int, operation: int) -> dict | None:
        if (layer, operation) == (1, 1):
            return None
        ulp = 0 if layer < 3 else 2 ** (layer % 20)
        return {
            **{"differing": ulp, "elements": 64, "max_ulp": ulp},
            "relative": 10.0 ** (layer % 20 - 20) if ulp else 0.0,
        }

    return {
        "kind": "parity",
        "operations": [f"operation_{i}" for i in range(14)],
        "layers": list(range(num_layers)),
        "cells": [[cell(i, j) for j in range(14)] for i in range(num_layers)],
        "outside": {name: cell(4, 0) for name in ("embed", "final_norm", "logits")},
        "first": {"layer": 3, "operation": "operation_0", "position": 41},
    }


def cell(drafter: str, gamma: int, category: str | None, **changes) -> dict:
    """Two rounds of a sweep's cell, timed once."""
    kept = (1, *[0] * (gamma - 1), 1)
    counters = {"tokens": 2 + gamma, "rounds": 2, "proposed": 2 * gamma}
    counters |= {"accepted": gamma, "cut": 0, "accepted_hist": kept}
    counters |= {"proposed_at": [2, *[1] * (gamma - 1)], "accepted_at": [1] * gamma}
    row = {
        **{"kind": "sweep", "drafter": drafter, "gamma": gamma, "category": category},
        **{"prompt_source": "data/questions.jsonl", "temperature": 0.0},
        **{"gamma_policy": "fixed", "acceptance_rate": 0.5, "counters": counters},
        **{"prompts": 1, "matched": True, "verify_decode_mismatches": 0},
        "plain_timings": [[[0.1, 0.9, 2 + gamma]]],
        "spec_timings": [[[0.1, 0.4, 2 + gamma]]],
    }
    return row | changes


def cells() -> list[dict]:
    """As large as a sweep gets: eight curves, Spec-Bench's categories."""
    return [
        cell(drafter, gamma, category, gamma_policy=policy)
        for drafter in ("draft-model", "ngram", "suffix", "hybrid")
        for policy in ("fixed", "goodput")
        for gamma in (1, 2, 4, 7)
        for category in (f"category_{i}" for i in range(13))
    ]


def ablation(variant: str, temperature: float) -> dict:
    kept = {"conditional_acceptance": [0.8, 0.5, None]}
    of_cell = {"temperature": temperature, "gamma": 3, "mean_accepted_length": 2.2}
    return {"kind": "ablation", "variant": variant} | of_cell | kept


def tree() -> dict:
    return {
        **{"kind": "tree", "id": "py-01", "round": 2, "target": "embedded"},
        **{"tokens": [5, 6, 7, 8], "parents": [0, 0, 0, 2], "kept": [2, 3], "own": 9},
        **{"pieces": ["def", "a$", "\n", "<b>"], "own_piece": "c"},
    }


def confidences() -> dict:
    bins = {"rounds": [6, 0, 4], "chance": [0.2, 0.0, 0.9], "kept": [0.5, 0.0, 0.75]}
    found = {"ece": [0.04, 0.02], "ece_before": [0.3, 0.1]}
    for name, values in bins.items():
        found |= {f"bin_{name}": values, f"bin_{name}_before": values[::-1]}
    return {"kind": "confidences", "gamma": 2, "temperature": 0.7} | found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of these tests."""

    rows: list[dict]
    says: tuple[str, ...]  # units and labels that are in it
    change: Callable[[list[dict]], None]  # to rows of which it is another figure


def of_first(**values) -> Callable[[list[dict]], None]:
    """Other values in the first row."""
    return lambda rows: rows[0].update(values)


def nothing_kept(rows: list[dict]) -> None:
    """In the last row, of the largest gamma."""
    none, last = [0] * 7, rows[-1]
    last["counters"] |= {"tokens": 2, "accepted": 0, "accepted_hist": [2, *none]}
    last["counters"] |= {"accepted_at": none, "proposed_at": [2, *none[1:]]}
    for timings in ("plain_timings", "spec_timings"):
        last[timings] = [[[0.1, 0.9, 2]]]


FIGURES = {
    "speedup": Figure(
        rows=[summary(1), summary(4), summary(2), summary(2, impl="native")]
        + [summary(4, impl="native", speedup_e2e_p10=None)],
        says=("times", "gamma (tokens drafted per round)", "native"),
        change=of_first(speedup_e2e=1.7),
    ),
    "acceptance": Figure(
        rows=[summary(4), summary(2)],
        says=("P(kept", "position in the draft (token)", "n = 13 to 7 rounds"),
        change=of_first(conditional_acceptance=[0.1, 0.2, 0.3, 0.4]),
    ),
    "accepted_lengths": Figure(
        rows=[summary(4), summary(4, impl="native")],
        says=("rounds (%)", "2.50 tokens a round"),
        change=of_first(accepted_hist=[9, 0, 0, 0, 4]),
    ),
    "step_cost": Figure(
        rows=[step(i, impl=impl) for impl in ("xla", "native") for i in (2, 1)],
        says=("(ms)", "active rows"),
        change=of_first(ms=2.2),
    ),
    "hugging_face": Figure(
        rows=comparison(),
        says=("tokens/s", "long: 512 tokens", "transformers prompt lookup"),
        change=of_first(tok_s=91.0),
    ),
    "divergence": Figure(
        rows=[parity()],
        says=("(ULP)", "layer 3, operation_0, position 41", "logits")
        + ("relative difference", "5e5", "128"),
        change=lambda rows: rows[0]["cells"][5][3].update(max_ulp=1),
    ),
    "sweep_speedup": Figure(
        rows=cells(),
        says=("(times)", "tokens a round", "hybrid, goodput"),
        change=of_first(plain_timings=[[[0.1, 1.9, 3]]]),
    ),
    "sweep_categories": Figure(
        rows=cells(),
        says=("accepted / proposed", "category_12", "gamma 7"),
        change=lambda rows: rows[-1].update(acceptance_rate=0.6),
    ),
    "sweep_positions": Figure(
        rows=cells(),
        says=("P(kept", "position (token)", "gamma 7", "n = 26 to 13 rounds"),
        change=nothing_kept,
    ),
    "ablations": Figure(
        rows=[ablation(name, t) for name in ("vanilla", "no-tv") for t in (0.0, 1.0)],
        says=("P(kept", "position (token)", "gamma 3", "T = 1", "no-tv"),
        change=of_first(conditional_acceptance=[0.5, 0.4, 0.2]),
    ),
    "improvement": Figure(
        rows=theory.improvement_rows(plot.THEORY, gamma_max=plot.GAMMA_MAX),
        says=("expected speed-up (times)", "a = 0.3", "c = 0.05"),
        change=of_first(improvement=1.1),
    ),
    "tree": Figure(
        rows=[tree()],
        says=("depth (drafts", "def", "a$", "\\n", "<b>", "target's own token"),
        change=of_first(kept=[1]),
    ),
    "reliability": Figure(
        rows=[confidences()],
        says=("before: calibration error 0.200", "share of rounds")
        + ("fitted: calibration error 0.030", "gamma 2, temperature 0.7"),
        change=of_first(bin_kept=[0.4, 0.0, 0.75]),
    ),
}


PROVENANCE = {
    **{"target": "models/Qwen3-8B", "draft": "models/Qwen3-0.6B", "dtype": "bfloat16"},
    **{"impl": "native", "native_isa": "avx2", "cpu": "Some CPU", "platform": "cpu"},
    **{"jax_version": "0.10.2", "prompt_source": "somewhere/gsm8k/test.jsonl:50"},
    **{"prompts": 25, "gen_tokens": 64},
}
