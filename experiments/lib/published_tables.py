"""The tables of README and docs by their names, each of the published rows."""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

from experiments.lib import files, gpu_tables, table_rows, terminal
from spec_jax.drafters import tree_shapes


SPREAD = "{speedup_e2e:.2f} ({speedup_e2e_p10:.2f} to {speedup_e2e_p90:.2f})"
ROUNDS = "`python experiments/spec_round.py --prompts 50`"


def _repeated(row: table_rows.Row) -> str:
    """How far a row's texts repeat themselves; rows of earlier versions do not say."""
    return terminal.format_value(row.get("repetition"), ".0%")


def _matched(row: table_rows.Row) -> str:
    """Returns "-" where a rule that keeps the distribution has texts of its own."""
    return {None: "-", True: "yes", False: "no"}[row["matched"]]


def _drawn(row: table_rows.Row) -> str:
    """The flags by which tokens are drawn, and kept."""
    flags = f" --temperature {row['temperature']:g}" if row["temperature"] else ""
    return flags if row["rule"] == "coupled" else f"{flags} --rule {row['rule']}"


def _terciles(row: table_rows.Row) -> str:
    thirds = ", ".join(f"{x:.2f}" for x in row["tercile_acceptance_rate"])
    return f"{row['acceptance_rate']:.3f} ({thirds})"


def _heads(command: str) -> dict[str, table_rows.Cell]:
    """Columns of rounds of a head: tokens a round, what is kept, speed."""
    return {
        command: lambda row: f"`{_flags_of(row)}`",
        "tokens a round": "{mean_accepted_length:.2f}",
        "drafts kept, by position": lambda row: (
            "" if row["tree"] else _by_place(row, (1, 2, 3, 4))
        ),
        "repeated 4-grams": _repeated,
        "speed-up": "{speedup_e2e:.2f}",
        "matched": _matched,
    }


def _flags_of(row: table_rows.Row) -> str:
    """The flags of `spec_round.py` by which a row was made, if not those of others."""
    flags = f"--drafter {pathlib.PurePath(row['drafter']).name} "
    if row["draft"] not in (None, "embedded"):
        flags += f"--draft {pathlib.PurePath(row['draft']).name} "
    flags += f"--tree {row['tree']}" if row["tree"] else f"--gamma {row['gamma']}"
    flags += _drawn(row)
    if row["gamma_policy"] not in (None, "fixed"):
        flags += f" --gamma-policy {row['gamma_policy']}"
    if row["batch"]:
        flags += f" --batch {row['batch']}"
    if "draft_weights" in row:
        flags += f" --draft-weights {row['draft_weights']}"
    if row["prompt_source"] != "50":
        flags += f" --prompts {row['prompt_source']}"
    return flags


def _of_tree(row: table_rows.Row) -> str:
    drafted = f"--gamma {row['gamma']}"
    if row["tree"]:
        drafted = f"--tree {tree_shapes.parse(row['tree'])}"
    return f"`{drafted}{_drawn(row)}`"


def _by_place(row: table_rows.Row, places: Sequence[int] = (1, 2, 4, 7)) -> str:
    """The shares that are kept of these drafts, each of the rounds that kept those
    before; a dash where none was drafted."""
    kept = row["conditional_acceptance"]
    shares = [kept[place - 1] if place <= len(kept) else None for place in places]
    return ", ".join("-" if share is None else f"{share:.2f}" for share in shares)


def _evaluation(
    heading: str, cell: table_rows.Cell, **ends: Callable
) -> table_rows.Pivot:
    """A line for each drafter and temperature, a column for each data set."""
    return table_rows.Pivot(
        heading,
        [("evaluation.jsonl", "sweep")],
        line="`{drafter}`, T = {temperature:g}",
        column=lambda row: row["prompt_source"].split("/")[0],
        cell=cell,
        ends={name.replace("_", " "): end for name, end in ends.items()},
    )


def _beside_hugging_face(row: table_rows.Row) -> str:
    """How many times as fast as their decoding; theirs in brackets behind ours."""
    if row["side"] == "spec_jax":
        return f"{row['vs_hf']:.1f}x"
    note = "theirs: " if row["length"] == "short" else ""
    return f"({note}{row['vs_hf']:.2f}x)"


def _hugging_face(heading: str, file: str) -> table_rows.Pivot:
    """A line for each way to decode, a column for each length of prompts."""
    return table_rows.Pivot(
        heading,
        [(file, "comparison")],
        line=lambda row: (
            f"{row['method']}, K = {row['gamma']}" if row["gamma"] else row["method"]
        ),
        column=lambda row: (
            f"{row['prompt_tokens'][0]}{' prompt tokens' * (row['length'] == 'short')}"
        ),
        cell=_beside_hugging_face,
        keep=lambda row: (
            row["gamma"] == 5 or (row["side"], row["gamma"]) == ("spec_jax", None)
        ),
    )


_WAYS = {
    ("ngram", 0): "plain",
    ("draft-model", 0): "plain, with a draft model that takes in the prompts",
    ("ngram", 4): "prompt lookup, gamma 4",
    ("draft-model", 4): "draft model, gamma 4",
}


def _planned(row: table_rows.Row) -> str:
    drafted = f"gamma {row['gamma']}" if "tree" not in row else f"tree {row['tree']}"
    return f"`--{drafted}`"


def certificates() -> table_rows.Lines:
    """Exactness certificates: what was run, and whether all was equal."""
    yield "certificate", "cells", "prompts x tokens", "equal"
    drawn = "--sampling greedy,sampled --batch 1,4"
    for name, command in {
        "default": "python experiments/exactness.py --certificate FILE",
        "drafters_native_bfloat16": "... --product --drafter "
        "ngram,suffix,hybrid,draft-model,oracle --gamma-policy "
        "fixed,threshold,goodput --batch 1,4 --sampling greedy,sampled",
        "trees_native_bfloat16": "... --product --tree 2x4:7,4x6:15,4x16:31,4x16:63 "
        f"{drawn}",
        "full_native_bfloat16": "... --full --prompts 12 --gen-tokens 256",
        "gsm8k_native_bfloat16": "... --prompts gsm8k/test.jsonl:50 --gen-tokens 64",
        "smollm2_native_bfloat16": "... --target smollm2 --isa avx2 --drafter eagle3 "
        f"--product --tree none,4x6:15 --gamma 4 {drawn}",
        "smollm2_native_q8_0": "... --target smollm2 --weights q8_0 --isa avx2 "
        f"--drafter eagle3 --product --tree none,4x6:15 --gamma 4 {drawn}",
        "smollm2_native_q4_1": "... --target smollm2 --weights q4_1 --isa avx2 "
        f"--drafter eagle3 --product --tree none,4x6:15 --gamma 4 {drawn}",
        "dspark_native_bfloat16": "... --drafter dspark --product --tree none,4x6:15 "
        f"--gamma 4,7 {drawn}",
        "dspark_scheduled_native_bfloat16": "... --drafter dspark --product "
        f"--gamma-policy schedule --gamma 4,7 {drawn}",
        "choice_native_bfloat16": "... --isa avx2 --drafter choice --product "
        f"--gamma 4,7 {drawn}",
    }.items():
        path = table_rows.RESULTS / "certificates" / f"{name}.json"
        found = json.loads(files.read(path))
        sizes = f"{found['prompts']['count']} x {found['settings']['gen_tokens']}"
        cells, equal = len(found["cells"]), "all" if found["exact"] else "not all"
        yield f"`{command}` (`{name}.json`)", str(cells), sizes, equal


def _first_difference(row: table_rows.Row) -> str:
    first = row["first"]
    return f"{first['operation']}, layer {first['layer']}" if first else "none"


TABLES: Mapping[str, Callable[[], table_rows.Lines]] = {
    "rounds": table_rows.Table(
        [(f"spec_round_{impl}_gamma4.jsonl", "summary") for impl in ("xla", "native")],
        {
            "`python experiments/spec_round.py --prompts 50 --repeats 3`": lambda row: (
                "with `--impl xla --repeats 2`"
                if row["impl"] == "xla"
                else "native kernels, the default"
            ),
            "acceptance (of texts that repeat least, more, most)": _terciles,
            "repeated 4-grams": _repeated,
            "tokens per target step": "{tokens_per_target_step:.2f}",
            "plain": "{baseline_e2e_tpot_ms:.2f} ms/token",
            "speculative": "{spec_e2e_tpot_ms:.2f} ms/token",
            "speed-up (p10 to p90)": SPREAD,
            "without prefill": "{speedup_decode:.2f}",
        },
    ),
    "heads": table_rows.Table([("dspark_native.jsonl", "summary")], _heads(ROUNDS)),
    "real": table_rows.Table(
        [("smollm2.jsonl", "summary")],
        _heads("`python experiments/spec_round.py --target smollm2 --gen-tokens 256`"),
    ),
    **{
        name: table_rows.Table(
            [(f"smollm2_{form}.jsonl", "summary")],
            _heads(
                f"`spec_round.py --target smollm2 --weights {form} --gen-tokens 256`"
            )
            | {"plain, ms/token": "{baseline_e2e_tpot_ms:.2f}"},
        )
        for name, form in (("eight_bits", "q8_0"), ("four_bits", "q4_1"))
    },
    "perplexity": table_rows.Table(
        [("perplexity_smollm2.jsonl", "perplexity")],
        {
            "`python experiments/perplexity.py --target smollm2`": "{weights}",
            "perplexity": "{perplexity:.3f}",
            "of the dense one's": "{ratio:.4f} +- {ratio_error:.4f}",
            "same greedy choice": "{same_choice:.1%}",
        },
    ),
    "evaluation": _evaluation(
        "`python experiments/sweep.py`",
        "{mean_accepted_length:.2f} ({speedup_e2e:.2f}x)",
        all_matched=lambda rows: "yes" if all(row["matched"] for row in rows) else "no",
    ),
    "positions": _evaluation(
        "drafts 1, 2, 4 and 7 kept, if all before were", _by_place
    ),
    "trees": table_rows.Table(
        [
            *((f"spec_round_native_gamma{n}.jsonl", "summary") for n in (4, 7)),
            ("trees_native.jsonl", "summary"),
        ],
        {
            ROUNDS: _of_tree,
            "tokens a round": "{mean_accepted_length:.2f}",
            "rows of the target a round": "{rows_per_round:.1f}",
            "speed-up": "{speedup_e2e:.2f}",
        },
    ),
    "rules": table_rows.Pivot(
        "tokens a round, `spec_round.py --prompts 50`",
        [("rules_native.jsonl", "summary")],
        line="`--rule {rule}`",
        column=lambda row: "`{} --temperature {:g}`".format(
            f"--tree {row['tree']}" if row["tree"] else f"--gamma {row['gamma']}",
            row["temperature"],
        ),
        cell="{mean_accepted_length:.2f}",
    ),
    "regret": table_rows.Pivot(
        "regret, `replay.py texts.jsonl --gamma 1,2,4,7`",
        [("regret.jsonl", "replay")],
        line=lambda row: (
            f"always {row['gamma']}"
            if row["gamma_policy"] == "fixed"
            else f"`--gamma-policy {row['gamma_policy']}`"
        ),
        column="{drafter}",
        cell="{regret:+.1%} ({regret_by_text:+.1%})",
    ),
    "hugging_face": _hugging_face(
        "`python experiments/compare_hf.py`", "compare_hf.jsonl"
    ),
    "hugging_face_real": _hugging_face(
        "`compare_hf.py --target smollm2 --dtype bfloat16`", "compare_hf_smollm2.jsonl"
    ),
    "llama_cpp": table_rows.Table(
        [("compare_llama_cpp_smollm2.jsonl", "comparison")],
        {
            "`compare_llama_cpp.py --target smollm2`": "{figure}, {unit}",
            "llama.cpp": "{theirs:.3f}",
            "spec_jax": "{ours:.3f}",
            "times faster (p10 to p90)": table_rows.RATIO,
        },
    ),
    "preset_steps": table_rows.steps(
        "`latency.py --preset qwen3-0.6b --rows 1,5,8 --contexts 64 1024 4096`",
        "latency_qwen3_0.6b_native.jsonl",
    ),
    "designs": table_rows.Table(
        [("parity_*.jsonl", "parity")],
        {
            "`python experiments/parity.py --prompts 20 --gen-tokens 256`": (
                "`--verify-path {verify[path]}`"
            ),
            "texts that match": "{matched_prompts}/{prompts}",
            "choices that differ": "{mismatches} of {choices:,}",
            "first operation that differs": _first_difference,
        },
    ),
    "certificates": certificates,
    "processors": table_rows.Pivot(
        "`constrained.py --target smollm2 --drafter eagle3 --table --batch 4`",
        [("processors.jsonl", "cell")],
        line="{processor}",
        column="{shape}: tokens / rounds at T = 0, 0.7, 1",
        cell="{tokens_compared}/{rounds}",
        ends={
            "equal": lambda rows: (
                "all" if all(map(table_rows.is_equal, rows)) else "not all"
            )
        },
    ),
    "answers": table_rows.Table(
        [("constrained.jsonl", "answers")],
        {
            "`constrained.py --target smollm2 --answers 100 --batch 4`": (
                "{answers} answers"
            ),
            "parse": "{parsed}",
            "different": "{different}",
            "tokens": "{tokens:,}",
            "rounds": "{rounds:,}",
        },
    ),
    "processor_costs": table_rows.Table(
        [("constrained.jsonl", "step")],
        {
            "`constrained.py --target smollm2 --answers 100 --batch 4`": (
                "{way}, {processor}"
            ),
            "ms a step": "{ms:.2f}",
            "times none (p10 to p90)": table_rows.RATIO.replace(".2f", ".3f"),
            "median, 95 %": "{median_low:.3f} to {median_high:.3f}",
        },
    ),
    "batches": table_rows.Pivot(
        "`throughput.py --repeats 5`, with `--drafter ngram` too",
        [("throughput.jsonl", "throughput")],
        line=lambda row: _WAYS[row["drafter"], row["gamma"]],
        column="{batch}",
        cell="{ratio:.2f}x",
        keep=lambda row: row["batch"] and (row["drafter"], row["gamma"]) in _WAYS,
        order=tuple(_WAYS.values()),
    ),
    "schedule": table_rows.Pivot(
        "`python experiments/throughput.py --drafter dspark --batch 16 "
        "--gamma 1,2,4,7`",
        [("schedule*.jsonl", "throughput")],
        line=lambda row: row["way"].split(",")[0],
        column=lambda row: (
            row["prompt_source"] + ", `--adversarial`" * bool(row["adversarial"])
        ),
        cell="{ratio:.2f}x",
        keep=lambda row: row["batch"],
    ),
    "plans": table_rows.Table(
        [("plan_native.jsonl", "plan")],
        {
            "`python experiments/plan.py --impl native`": _planned,
            "tokens a round, predicted": "{predicted_tokens_per_round:.2f}",
            "speed-up, predicted": "{predicted_speedup:.2f}",
            "speed-up, measured (p10 to p90)": (
                "{measured_speedup:.2f} "
                "({measured_speedup_p10:.2f} to {measured_speedup_p90:.2f})"
            ),
        },
    ),
    **gpu_tables.TABLES,
}
