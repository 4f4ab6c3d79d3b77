"""Tables of what `gpu_report.py` measured, each of the published rows."""

from collections.abc import Callable, Mapping

from experiments.lib import table_rows


GPU = "`python -m experiments.gpu_report`"


def gpu_heads() -> table_rows.Lines:
    """Rounds of the shape of Qwen3-8B with heads, at the acceptance published of them;
    and what a proposal takes, beside a read of its bytes."""
    yield (
        f"{GPU}, Qwen3-8B with a head, accepted as on",
        *("tokens per target step", "a proposal, ms (times its read)"),
        *("plain, ms/token", "a round, ms", "speed-up (quartiles)", "differing K/V"),
    )
    files = "gpu/h-*.jsonl"
    steps = table_rows.rows_of(files, "step")
    passes = {row["draft"]: row for row in steps if "pass_bytes" in row}
    reads = {row["draft"]: row for row in table_rows.rows_of(files, "summary")}
    for row in table_rows.rows_of(files, "rounds"):
        head = row["draft"]
        pass_ms = passes[head]["ms"] * passes[head]["drafts"]
        read_ms = passes[head]["pass_bytes"] / reads[head]["read_gb_s"] / 1e6
        yield (
            f"{head}: {row['forced_rate']}",
            f"{row['tokens_per_target_step']:.2f}",
            f"{pass_ms:.2f} ({pass_ms / read_ms:.2f})",
            *(f"{row[name]:.2f}" for name in ("plain_ms", "round_ms")),
            table_rows.QUARTILES.format_map(row),
            f"{row['differing_kv']}",
        )


def gpu_rows() -> table_rows.Lines:
    """How many bits were compared, of kernels and of rounds, and how many differed."""
    yield GPU, "cases", "elements", "differing", "planted fault"
    total = lambda rows, key: sum(row[key] for row in rows)
    for name in ("0.6b", "8b"):
        file = f"gpu/a-rows-of-kernels-{name}.jsonl"
        rows = table_rows.rows_of(file, "bitwise")
        (control,) = table_rows.rows_of(file, "control")
        kernels = ", ".join(dict.fromkeys(row["check"].split(":")[0] for row in rows))
        yield (
            f"kernels of qwen3-{name}: {kernels}",
            *(f"{total(rows, key):,}" for key in ("cases", "elements", "differing")),
            "seen" if control["seen"] else "NOT SEEN",
        )
    for name, whose in (("", "pair"), ("-dspark", "pair with DSpark")):
        prompts = table_rows.rows_of(f"gpu/a-exactness{name}.jsonl", "prompt")
        cells = {row["cell"] for row in prompts}
        yield (
            f"rounds of the embedded {whose}, {len(cells)} cells of `exactness.py`",
            f"{len(prompts):,}",
            f"{total(prompts, 'tokens'):,} tokens, with logits and K/V",
            f"{sum(len(row['differences']) for row in prompts)}",
            "",
        )


def gpu_traces() -> table_rows.Lines:
    """Own times of the kernels of a plain step: from the end of the one before."""
    yield GPU, "launches a step", "us each", "us a step"
    for name in ("0.6b", "8b"):
        rows = table_rows.rows_of(f"gpu/t-trace-{name}.jsonl", "trace")
        (steps,) = (row["calls"] for row in rows if row["event"] == "append_each")
        for row in rows:
            if row["event"].startswith(("paged_", "skinny_", "rms_", "memcpy32")):
                yield (
                    f"{row['target']}: `{row['event']}`",
                    f"{row['calls'] / steps:.1f}",
                    f"{row['own_us'] / row['calls']:.2f}",
                    f"{row['own_us'] / steps:.0f}",
                )


TABLES: Mapping[str, Callable[[], table_rows.Lines]] = {
    "gpu_steps": table_rows.steps(
        GPU,
        "gpu/c-steps-0.6b.jsonl",
        "gpu/c-steps-8b.jsonl",
        "gpu/c-long-contexts-8b.jsonl",
        "gpu/c-steps-*7b.jsonl",
        "gpu/c-steps-llama*.jsonl",
    ),
    "gpu_sampling": table_rows.steps(
        f"{GPU}, at T = 0.7, top-k 20, top-p 0.8", "gpu/c-sampling-8b.jsonl"
    ),
    "gpu_traces": gpu_traces,
    "gpu_rounds": table_rows.Table(
        [("gpu/d-rounds-*.jsonl", "rounds")],
        {
            f"{GPU}, Qwen3-8B drafted for by 0.6B": (
                "gamma {gamma}, {forced_rate:.0%} of drafts kept"
            ),
            "tokens per target step": "{tokens_per_target_step:.2f}",
            "plain, ms/token": "{plain_ms:.2f}",
            "speculative, ms/token": "{spec_ms:.2f}",
            "a round, ms": "{round_ms:.2f}",
            "speed-up (quartiles)": table_rows.QUARTILES,
            "differing K/V": "{differing_kv}",
        },
    ),
    "gpu_heads": gpu_heads,
    "gpu_rows": gpu_rows,
}
