"""Tables of speeds and certificates, each a function of the published rows."""

import json
from collections.abc import Sequence

from experiments.lib import files, published_rows


def rounds() -> published_rows.Lines:
    """Speculative rounds of the embedded pair at gamma 4, with XLA and native."""
    found = published_rows.rows_of("spec_round*.jsonl", "summary")
    found = [row for row in found if row["gamma"] == 4]
    thirds = lambda row: ", ".join(f"{x:.2f}" for x in row["tercile_acceptance_rate"])
    names = {"xla": "with `--impl xla --repeats 2`"}
    columns: dict[str, published_rows.Cell] = {
        "`python experiments/spec_round.py --prompts 50 --repeats 3`": lambda row: (
            names.get(row["impl"], "native kernels, the default")
        ),
        "acceptance (of texts that repeat least, more, most)": lambda row: (
            f"{row['acceptance_rate']:.3f} ({thirds(row)})"
        ),
        "repeated 4-grams": published_rows.repeated,
        "tokens per target step": "{tokens_per_target_step:.2f}",
        "plain": "{baseline_e2e_tpot_ms:.2f} ms/token",
        "speculative": "{spec_e2e_tpot_ms:.2f} ms/token",
        "speed-up (p10 to p90)": published_rows.SPREAD,
        "without prefill": "{speedup_decode:.2f}",
    }
    return published_rows.table(columns, sorted(found, key=lambda r: r["impl"])[::-1])


def hugging_face() -> published_rows.Lines:
    """Speeds over Hugging Face's greedy decoding, by length of the prompts."""
    speeds = {
        (row["side"], row["method"], row["gamma"], row["length"]): row["vs_hf"]
        for row in published_rows.rows_of("compare_hf.jsonl", "comparison")
    }
    command = "`python experiments/compare_hf.py`"
    yield command, "32 prompt tokens", "128", "512"
    for method, gamma in (("plain", None), ("draft model", 5), ("prompt lookup", 5)):
        cells = []
        for place, length in enumerate(("short", "medium", "long")):
            ours = f"{speeds['spec_jax', method, gamma, length]:.1f}x"
            if gamma:
                theirs = f"{speeds['transformers', method, gamma, length]:.2f}x"
                ours += f" ({'' if place else 'theirs: '}{theirs})"
            cells.append(ours)
        yield f"{method}, K = {gamma}" if gamma else method, *cells


def llama_cpp() -> published_rows.Lines:
    """SmolLM2, the embedded pair and the shape of Qwen3-0.6B beside llama.cpp."""
    ends = ("_smollm2", "", "_qwen3_0.6b")
    files = [f"compare_llama_cpp{end}.jsonl" for end in ends]
    shape = lambda row: "" if row["target"] == "embedded" else f"{row['target']}: "
    columns: dict[str, published_rows.Cell] = {
        "`python experiments/compare_llama_cpp.py --llama-bin DIR`": lambda row: (
            f"{shape(row)}{row['figure']}, {row['unit']}"
        ),
        "llama.cpp": "{theirs:.3f}",
        "spec_jax": "{ours:.3f}",
        "times faster (p10 to p90)": "{ratio:.2f} ({ratio_p10:.2f} to {ratio_p90:.2f})",
    }
    rows = published_rows.of_files(files, "comparison")
    return published_rows.table(columns, rows)


def preset_steps() -> published_rows.Lines:
    """Steps of the shape of Qwen3-0.6B: of more rows, and of longer contexts."""
    command = "`latency.py --preset qwen3-0.6b --rows 1,5,8 --contexts 64 1024 4096`"
    yield command, "ms", "times (p10 to p90)", "of"
    file = "latency_qwen3_0.6b_native.jsonl"
    found = {row["step"]: row for row in published_rows.rows_of(file, "step")}
    for count in (5, 8):
        row = found[f"{count} active rows"]
        ends = (row[f"ratio_{end}"] for end in ("p10", "p90"))
        yield f"{count} rows, context 64", *_times(row, row["ratio"], *ends), "1 row"
    read = "a read of weights and K/V"
    plain, rate = found["plain step"], found["read of its bytes"]
    ends = (1 / rate[f"ratio_{end}"] for end in ("p90", "p10"))
    yield "plain step, context 64", *_times(plain, 1 / rate["ratio"], *ends), read
    for context in (1024, 4096):
        row = found[f"plain step at {context}"]
        times = _times(row, rate["gb_s"] / row["gb_s"])
        yield f"plain step, context {context:,}", *times, read
        more = found[f"8 active rows at {context}"]
        times = _times(more, more["ms"] / row["ms"])
        yield f"8 rows, context {context:,}", *times, "1 row"


def _times(row: published_rows.Row, ratio: float, *ends: float) -> Sequence[str]:
    spread = f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""
    return f"{row['ms']:.1f}", f"{ratio:.2f}{spread}"


def designs() -> published_rows.Lines:
    """Ways to verify a window: choices that are not decoding's, and the operation."""
    first = lambda row: (
        row["first"] and (f"{row['first']['operation']}, layer {row['first']['layer']}")
    )
    columns: dict[str, published_rows.Cell] = {
        "`python experiments/parity.py --prompts 20 --gen-tokens 256`": (
            "`--verify-path {verify[path]}`"
        ),
        "texts that match": "{matched_prompts}/{prompts}",
        "choices that differ": "{mismatches} of {choices:,}",
        "first operation that differs": lambda row: first(row) or "none",
    }
    rows = published_rows.rows_of("parity_*.jsonl", "parity")
    return published_rows.table(columns, rows)


def certificates() -> published_rows.Lines:
    """Exactness certificates: what was run, and whether all was equal."""
    yield "certificate", "cells", "prompts x tokens", "equal"
    commands = {
        "default": "python experiments/exactness.py --certificate FILE",
        "drafters_native_bfloat16": "... --product --drafter "
        "ngram,suffix,hybrid,draft-model,oracle --gamma-policy "
        "fixed,threshold,goodput --batch 1,4 --sampling greedy,sampled",
        "trees_native_bfloat16": "... --product --tree 2x4:7,4x6:15,4x16:31,4x16:63 "
        "--sampling greedy,sampled --batch 1,4",
        "full_native_bfloat16": "... --full --prompts 12 --gen-tokens 256",
        "gsm8k_native_bfloat16": "... --prompts gsm8k/test.jsonl:50 --gen-tokens 64",
        "smollm2_native_bfloat16": "... --target smollm2 --isa avx2 --drafter eagle3 "
        "--product --tree none,4x6:15 --gamma 4 --sampling greedy,sampled --batch 1,4",
        "dspark_native_bfloat16": "... --drafter dspark --product --tree none,4x6:15 "
        "--gamma 4,7 --sampling greedy,sampled --batch 1,4",
        "dflash_native_bfloat16": "... --drafter FOLDER, a DFlash",
        "dspark_scheduled_native_bfloat16": "... --drafter dspark --product "
        "--gamma-policy schedule --gamma 4,7 --sampling greedy,sampled --batch 1,4",
    }
    for name, command in commands.items():
        path = published_rows.RESULTS / "certificates" / f"{name}.json"
        if not path.exists():  # Of a head that was not there yet.
            continue
        found = json.loads(files.read(path))
        sizes = f"{found['prompts']['count']} x {found['settings']['gen_tokens']}"
        cells, equal = len(found["cells"]), "all" if found["exact"] else "not all"
        yield f"`{command}` (`{name}.json`)", str(cells), sizes, equal


def batches() -> published_rows.Lines:
    """Tokens a second in batches, over one prompt after the other."""
    sizes = (1, 2, 4, 8, 16)
    command = "`throughput.py --repeats 5`, with `--drafter ngram` too"
    yield command, *map(str, sizes)
    rows = published_rows.rows_of("throughput.jsonl", "throughput")
    ratios = {
        (row["drafter"], row["gamma"], row["batch"]): row["ratio"] for row in rows
    }
    for name, drafter, gamma in (
        ("plain", "ngram", 0),
        ("plain, with a draft model that takes in the prompts", "draft-model", 0),
        ("prompt lookup, gamma 4", "ngram", 4),
        ("draft model, gamma 4", "draft-model", 4),
    ):
        cells = [ratios.get((drafter, gamma, size)) for size in sizes]
        yield name, *("" if cell is None else f"{cell:.2f}x" for cell in cells)


def instruction_sets() -> published_rows.Lines:
    """The embedded pair by the kernels of two instruction sets, and by XLA, on one
    processor."""
    yield (
        "`python experiments/latency.py`, `spec_round.py --prompts 50`",
        *("plain step, ms", "of a read of its bytes", "5 rows", "draft step"),
        *("of a round of gamma 4 not model", "speed-up end to end (p10 to p90)"),
    )
    for isa, names in {
        "the widest": (
            "latency_embedded_native.jsonl",
            "spec_round_native_gamma4.jsonl",
        ),
        "`--isa avx2`": ("embedded_native_avx2.jsonl",) * 2,
        "`--impl xla`": ("latency_embedded_xla.jsonl", "spec_round_xla_gamma4.jsonl"),
    }.items():
        steps = {row["step"]: row for row in published_rows.rows_of(names[0], "step")}
        rounds = [
            row
            for row in published_rows.rows_of(names[1], "summary")
            if "speedup_e2e" in row
        ]
        if not steps or not rounds:
            continue
        low, high = (rounds[0][f"speedup_e2e_{end}"] for end in ("p10", "p90"))
        ms = {name: row["ms"] for name, row in steps.items()}
        models = ms["5 active rows"] + 4 * ms["draft step"]
        yield (
            f"{isa}: {rounds[0]['native_isa']}" if isa == "the widest" else isa,
            f"{ms['plain step']:.3f}",
            f"{1 / steps['read of its bytes']['ratio']:.2f}",
            *(
                f"{steps[name]['ratio']:.2f}"
                for name in ("5 active rows", "draft step")
            ),
            f"{1 - models / ms['round, gamma 4']:.1%}",
            f"{rounds[0]['speedup_e2e']:.2f} ({low:.2f} to {high:.2f})",
        )


def adaptive() -> published_rows.Lines:
    """Drafters whose gamma is chosen by goodput."""
    command = "spec_round.py --prompts 50 --repeats 3 --gamma 7 --gamma-policy goodput"
    columns: dict[str, published_rows.Cell] = {
        f"`python experiments/{command}`": "`--drafter {drafter}`",
        "tokens a round": "{mean_accepted_length:.2f}",
        "rows of the target a round": "{rows_per_round:.1f}",
        "speed-up (p10 to p90)": published_rows.SPREAD,
        "matched": published_rows.matched,
    }
    rows = published_rows.rows_of("adaptive_native.jsonl", "summary")
    return published_rows.table(columns, rows)


def plans() -> published_rows.Lines:
    """Predicted and measured speed-ups of the embedded pair."""
    yield (
        "`python experiments/plan.py --impl native`",
        *("tokens a round, predicted", "speed-up, predicted"),
        "speed-up, measured (p10 to p90)",
    )
    for row in published_rows.rows_of("plan_native.jsonl", "plan"):
        drafted = (
            f"--tree {row['tree']}" if "tree" in row else f"--gamma {row['gamma']}"
        )
        low, high = (row[f"measured_speedup_{end}"] for end in ("p10", "p90"))
        yield (
            f"`{drafted}`",
            f"{row['predicted_tokens_per_round']:.2f}",
            f"{row['predicted_speedup']:.2f}",
            f"{row['measured_speedup']:.2f} ({low:.2f} to {high:.2f})",
        )


TABLES = (
    *(rounds, hugging_face, llama_cpp, preset_steps, designs),
    *(certificates, batches, instruction_sets, adaptive, plans),
)
