"""Rows of results, written by hand: shared by tests of figures."""


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


def tree() -> dict:
    return {
        **{"kind": "tree", "id": "py-01", "round": 2, "target": "embedded"},
        **{"tokens": [5, 6, 7, 8], "parents": [0, 0, 0, 2], "kept": [2, 3], "own": 9},
        **{"pieces": ["def", "a$", "\n", "<b>"], "own_piece": "c"},
    }


PROVENANCE = {
    **{"target": "models/Qwen3-8B", "draft": "models/Qwen3-0.6B", "dtype": "bfloat16"},
    **{"impl": "native", "native_isa": "avx2", "cpu": "Some CPU", "platform": "cpu"},
    **{"jax_version": "0.10.2", "prompt_source": "somewhere/gsm8k/test.jsonl:50"},
    **{"prompts": 25, "gen_tokens": 64},
}
