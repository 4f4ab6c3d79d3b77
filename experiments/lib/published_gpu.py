"""Tables of what `gpu_report.py` measured, each a function of the published rows."""

import statistics
from collections.abc import Sequence

from experiments.lib import published_rows


COMMAND = "`python -m experiments.gpu_report`"


def gpu_steps() -> published_rows.Lines:
    """Steps of the shapes of Qwen3-0.6B and 8B: of more rows, of a longer context."""
    yield COMMAND, "ms (p10 to p90)", "times", "of"
    for size in ("0.6B", "8B"):
        yield from _steps(size)


def _steps(size: str) -> published_rows.Lines:
    rows = published_rows.rows_of(f"gpu/c-steps-{size.lower()}.jsonl", "step")
    found = {row["step"]: row for row in rows}
    read, one = "a read of its bytes", "1 row"
    names = {
        "plain step": ("plain step, context 128", "read of its bytes", read),
        "plain step at 1024": ("plain step, context 1,024", "read of its bytes", read),
        "plain step at 4096": ("plain step, context 4,096", "read of its bytes", read),
        "1 active row": ("1 row", "read of its bytes", read),
        "5 active rows": ("5 rows", "1 active row", one),
        "8 active rows": ("8 rows", "1 active row", one),
        "draft step": ("a draft by 0.6B", "plain step", "a plain step"),
        "16 active rows": ("16 rows", "1 active row", one),
        "prefill of 128": ("prompt of 128 tokens", "1 active row", one),
        "prefill of 1024": ("prompt of 1,024 tokens", "1 active row", one),
    }
    for step, (name, other, of) in names.items():
        if step not in found:  # Of an earlier report, or a later one.
            continue
        row = found[step]
        ends = f"{row['ms_p10']:.2f} to {row['ms_p90']:.2f}"
        times = f"{row['ms'] / found[other]['ms']:.2f}"
        yield f"Qwen3-{size}: {name}", f"{row['ms']:.2f} ({ends})", times, of


def gpu_kernels() -> published_rows.Lines:
    """What each kernel of a step takes of the time, from the end of the one before."""
    yield f"{COMMAND}, a traced step of Qwen3-0.6B", "launches", "us each"
    (step, *_) = published_rows.rows_of("gpu/t-trace-0.6b.jsonl", "step")
    found = {
        row["event"]: row
        for row in published_rows.rows_of("gpu/t-trace-0.6b.jsonl", "trace")
    }
    # A call of `steps_per_call` steps is traced after one that warms the caches.
    steps = 2 * step["steps_per_call"]
    for name, event in {
        "queries, keys and values": "skinny_gemm",
        "attention": "paged_attention",
        "its output, in 4 splits": "skinny_gemm__1",
        "sum of these, and norm": "rms_norm__1",
        "gate and up": "skinny_gemm_gate",
        "down, in 6 splits": "skinny_gemm__2",
        "sum of these, and norm of the next layer": "rms_norm__2",
        "logits": "skinny_gemm__3",
    }.items():
        row = found[event]
        each = row["own_us"] / row["calls"]
        yield name, f"{row['calls'] // steps}", f"{each:.1f}"


def gpu_rounds() -> published_rows.Lines:
    """Rounds of the shapes of Qwen3-8B and 0.6B at a given share of drafts kept."""
    yield (
        f"{COMMAND}, Qwen3-8B drafted for by 0.6B",
        *("tokens per target step", "plain, ms/token", "speculative, ms/token"),
        *("a round, ms", "speed-up (quartiles)", "differing K/V"),
    )
    for row in published_rows.rows_of("gpu/d-rounds-*.jsonl", "rounds"):
        ends = f"{row['speedup_q1']:.2f} to {row['speedup_q3']:.2f}"
        yield (
            f"gamma {row['gamma']}, {row['forced_rate']:.0%} of drafts kept",
            f"{row['tokens_per_target_step']:.2f}",
            *(f"{row[name]:.2f}" for name in ("plain_ms", "spec_ms", "round_ms")),
            f"{row['speedup']:.2f} ({ends})",
            f"{row['differing_kv']}",
        )


def gpu_heads() -> published_rows.Lines:
    """Rounds of the shape of Qwen3-8B with heads, at the acceptance published of them;
    and what a proposal takes, beside a read of its bytes."""
    yield (
        f"{COMMAND}, Qwen3-8B with a head, accepted as on",
        *("tokens per target step", "a proposal, ms (times its read)"),
        *("plain, ms/token", "a round, ms", "speed-up (quartiles)", "differing K/V"),
    )
    files = "gpu/h-*.jsonl"
    steps = published_rows.rows_of(files, "step")
    passes = {row["draft"]: row for row in steps if "pass_bytes" in row}
    reads = {row["draft"]: row for row in published_rows.rows_of(files, "summary")}
    for row in published_rows.rows_of(files, "rounds"):
        head = row["draft"]
        pass_ms = passes[head]["ms"] * passes[head]["drafts"]
        read_ms = passes[head]["pass_bytes"] / reads[head]["read_gb_s"] / 1e6
        ends = f"{row['speedup_q1']:.2f} to {row['speedup_q3']:.2f}"
        yield (
            f"{head}: {row['forced_rate']}",
            f"{row['tokens_per_target_step']:.2f}",
            f"{pass_ms:.2f} ({pass_ms / read_ms:.2f})",
            *(f"{row[name]:.2f}" for name in ("plain_ms", "round_ms")),
            f"{row['speedup']:.2f} ({ends})",
            f"{row['differing_kv']}",
        )


def gpu_rows() -> published_rows.Lines:
    """How many bits were compared, of kernels and of rounds, and how many differed."""
    yield COMMAND, "cases", "elements", "differing", "planted fault"
    for name in ("qwen3-0.6b", "qwen3-8b"):
        file = f"gpu/a-rows-of-kernels-{name.removeprefix('qwen3-')}.jsonl"
        rows = published_rows.rows_of(file, "bitwise")
        (control,) = published_rows.rows_of(file, "control")
        yield (
            f"kernels of {name}: {_kernels(rows)}",
            *(f"{_total(rows, key):,}" for key in ("cases", "elements", "differing")),
            "seen" if control["seen"] else "NOT SEEN",
        )
    prompts = published_rows.rows_of("gpu/a-exactness.jsonl", "prompt")
    cells = {row["cell"] for row in prompts}
    yield (
        f"rounds of the embedded pair, {len(cells)} cells of `exactness.py`",
        f"{len(prompts):,}",
        f"{_total(prompts, 'tokens'):,} tokens, with logits and K/V",
        f"{sum(len(row['differences']) for row in prompts)}",
        "",
    )


def _kernels(rows: Sequence[published_rows.Row]) -> str:
    """Which kernels they are, by name and in their order."""
    names = dict.fromkeys(row["check"].split(":")[0] for row in rows)
    return ", ".join(names)


def _total(rows: Sequence[published_rows.Row], key: str) -> int:
    return sum(row[key] for row in rows)


def gpu_transformers() -> published_rows.Lines:
    """One prompt of 32 tokens and 32 after it, beside Hugging Face's `generate`."""
    heading = f"{COMMAND}, Qwen3-8B and 0.6B, random weights"
    yield heading, "spec_jax, ms/token", "transformers, ms/token", "times faster"
    for prompt in published_rows.rows_of("gpu/e-transformers-8b.jsonl", "prompt"):
        found = {(run["side"], run["method"]): run for run in prompt["runs"]}
        for method in dict.fromkeys(run["method"] for run in prompt["runs"]):
            ours, theirs = (
                1e3 * statistics.median(run["seconds"]) / run["tokens"]
                for run in (
                    found[side, method] for side in ("spec_jax", "transformers")
                )
            )
            gamma = found["spec_jax", method]["gamma"]
            name = f"{method}, gamma {gamma}" if gamma else method
            yield name, f"{ours:.2f}", f"{theirs:.1f}", f"{theirs / ours:.1f}"


TABLES = (
    *(gpu_steps, gpu_kernels, gpu_rounds, gpu_heads, gpu_rows),
    gpu_transformers,
)
