"""Tables of README and docs, generated from the rows of `experiments/results`.

A page has a table between `<!-- rows: NAME -->` and `<!-- end of rows -->`; what stands
there is replaced by what the function of that name makes of the rows.
"""

import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.lib import files, terminal
from spec_jax.drafters import tree_shapes


ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGES = (
    *("README.md", "docs/measurements.md", "docs/batch_invariance.md"),
    "docs/trees.md",
)
"""Pages with such tables, below `ROOT`."""

Row = Mapping[str, Any]
Lines = Iterator[Sequence[str]]
"""The cells of each line, the heading first."""

_PLACE = re.compile(
    r"(<!-- rows: (?P<name>\w+) -->\n\n).*?(\n<!-- end of rows -->)", re.DOTALL
)


def rows_of(pattern: str, kind: str) -> list[Row]:
    """The rows of a kind, of the files of results of that name, in order."""
    return [
        row
        for path in sorted(RESULTS.glob(pattern))
        for row in files.read_rows(path).values()
        if row.get("kind") == kind
    ]


def rounds() -> Lines:
    """Speculative rounds of the embedded pair at gamma 4, with XLA and native."""
    yield (
        "`python experiments/spec_round.py --prompts 50 --repeats 3`",
        "acceptance (of texts that repeat least, more, most)",
        *("repeated 4-grams", "tokens per target step", "plain", "speculative"),
        *("speed-up (p10 to p90)", "without prefill"),
    )
    names = {
        "xla": "with `--impl xla --repeats 2`",
        "native": "native kernels, the default",
    }
    found = {
        row["impl"]: row
        for row in rows_of("spec_round*.jsonl", "summary")
        if row["gamma"] == 4
    }
    for impl, name in names.items():
        row = found[impl]
        low, high = row["speedup_e2e_p10"], row["speedup_e2e_p90"]
        thirds = ", ".join(f"{rate:.2f}" for rate in row["tercile_acceptance_rate"])
        yield (
            name,
            f"{row['acceptance_rate']:.3f} ({thirds})",
            _repeated(row),
            f"{row['tokens_per_target_step']:.2f}",
            f"{row['baseline_e2e_tpot_ms']:.2f} ms/token",
            f"{row['spec_e2e_tpot_ms']:.2f} ms/token",
            f"{row['speedup_e2e']:.2f} ({low:.2f} to {high:.2f})",
            f"{row['speedup_decode']:.2f}",
        )


def _repeated(row: Row) -> str:
    """How far a row's texts repeat themselves; rows of earlier versions do not say."""
    return terminal.format_value(row.get("repetition"), ".0%")


def hugging_face() -> Lines:
    """Speeds over Hugging Face's greedy decoding, by length of the prompts."""
    speeds = {
        (row["side"], row["method"], row["gamma"], row["length"]): row["vs_hf"]
        for row in rows_of("compare_hf.jsonl", "comparison")
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


def llama_cpp() -> Lines:
    """The embedded pair beside llama.cpp, and the shape of Qwen3-0.6B."""
    command = "`python experiments/compare_llama_cpp.py --llama-bin DIR`"
    yield command, "llama.cpp", "spec_jax", "times faster (p10 to p90)"
    for name in ("", "_qwen3_0.6b"):
        for row in rows_of(f"compare_llama_cpp{name}.jsonl", "comparison"):
            shape = f"{row['target']}: " if name else ""
            low, high = row["ratio_p10"], row["ratio_p90"]
            yield (
                f"{shape}{row['figure']}, {row['unit']}",
                *(f"{row[side]:.3f}" for side in ("theirs", "ours")),
                f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
            )


def llama_cpp_heads() -> Lines:
    """What either side keeps of the drafts of shipped heads."""
    command = "`--drafter eagle3,dspark --gamma 4,7 --no-steps --repeats 1`"
    yield (
        *(command, "llama.cpp", "spec_jax", "repeated 4-grams here"),
        *("same text", "there", "here"),
    )
    for row in rows_of("compare_llama_cpp_heads.jsonl", "comparison"):
        if "drafts" not in row:
            continue
        drafts, same = row["drafts"], row["drafts"]["same"]
        kept = [drafts[side]["accepted_per_round"] for side in ("theirs", "ours")]
        of_same = [same[side] for side in ("theirs", "ours")]
        yield (
            row["figure"].partition(":")[0],
            *(f"{number:.3f}" for number in kept),
            _repeated(drafts["ours"]),
            f"{same['prompts']} of {row['prompts']}",
            *("" if number is None else f"{number:.3f}" for number in of_same),
        )


def kernels() -> Lines:
    """Products at the shapes of Qwen3-0.6B: bandwidth, and the time of more rows."""
    yield (
        "`python experiments/kernels.py --shapes qwen3-0.6b`",
        *("native, 1 row", "5 rows", "8 rows", "XLA's product, 2 rows"),
    )
    found = {
        (row["subject"], row["impl"], row["rows"]): row
        for row in rows_of("kernels_qwen3_0.6b.jsonl", "kernel")
        if row.get("plan") is None
    }
    for name in ("qkv", "attention out", "gate and up", "down", "head"):
        native = [found[name, "native", count] for count in (1, 5, 8)]
        shape = " x ".join(f"{size:,}" for size in native[0]["shape"])
        yield (
            f"{name}, {shape}",
            f"{native[0]['read_share']:.0%}",
            *(f"{row['time_ratio']:.2f}x" for row in native[1:]),
            f"{found[name, 'xla', 1]['read_share']:.0%}",
        )


def designs() -> Lines:
    """The designs that came before, and what was published of them."""
    yield (
        "`python experiments/history.py --prompts 20`",
        *("matched", "mismatches", "tokens per target forward", "speed-up"),
        "published, 8B + 0.6B on an RTX 5090",
    )
    names = {
        "decoding decides": "decoding decides, the batched path is compared",
        "flash decides": "the batched path decides",
        "row loop": "rows, one at a time",
        "library rows": "rows together, library products",
        "row contract": "rows together, batch-invariant",
    }
    for row in rows_of("history.jsonl", "history"):
        words = row["published"].replace("x,", ",").replace("unmatched", "not matched")
        yield (
            names[row["rung"]],
            f"{row['matched_prompts']}/{row['prompts']}",
            str(row["verify_decode_mismatches"]),
            f"{row['tokens_per_target_step']:.2f}",
            f"{row['speedup_e2e']:.2f}",
            words.removeprefix("-"),
        )


def certificates() -> Lines:
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
        "eagle3_native_bfloat16": "... --drafter eagle3 --product --tree none,4x6:15 "
        "--gamma 4,7 --sampling greedy,sampled --batch 1,4",
        "dspark_native_bfloat16": "... --drafter dspark, and so the others",
    }
    for name, command in commands.items():
        path = RESULTS / "certificates" / f"{name}.json"
        found = json.loads(files.read(path))
        sizes = f"{found['prompts']['count']} x {found['settings']['gen_tokens']}"
        cells, equal = len(found["cells"]), "all" if found["exact"] else "not all"
        yield f"`{command}` (`{name}.json`)", str(cells), sizes, equal


def batches() -> Lines:
    """Tokens a second in batches, over one prompt after the other."""
    sizes = (1, 2, 4, 8, 16)
    command = "`python experiments/throughput.py --repeats 5`"
    yield command, *map(str, sizes)
    rows = rows_of("throughput.jsonl", "throughput")
    ratios = {(row["batch"], bool(row["gamma"])): row["ratio"] for row in rows}
    for name, is_drafted in (("plain", False), ("draft model, gamma 4", True)):
        yield name, *(f"{ratios[size, is_drafted]:.2f}x" for size in sizes)


def schedule() -> Lines:
    """Batches of 16 with DSpark: fixed gammas, and a schedule of what is verified."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows_of("schedule.jsonl", "throughput"):
        if row["batch"]:
            way = row["way"].split(",")[0]
            found.setdefault(way, {})[row["prompt_source"]] = row
    sets = list(dict.fromkeys(name for cells in found.values() for name in cells))
    command = "throughput.py --drafter dspark --batch 16 --gamma 1,2,4,7"
    yield f"`python experiments/{command}`", *sets
    for way, cells in found.items():
        yield way, *(f"{cells[name]['ratio']:.2f}x" for name in sets)


def trees() -> Lines:
    """Chains and trees of the embedded pair: tokens, rows and speed."""
    yield (
        "`python experiments/spec_round.py --prompts 50`",
        *("tokens a round", "rows of the target a round", "speed-up"),
    )
    rows = [
        row
        for row in rows_of("spec_round_native_gamma*.jsonl", "summary")
        if row["gamma"] in (4, 7)
    ]
    for row in (*rows, *rows_of("trees_native.jsonl", "summary")):
        flags = f"--gamma {row['gamma']}"
        if row["tree"]:
            flags = f"--tree {tree_shapes.parse(row['tree'])}"
        yield (
            f"`{flags}{_drawn(row)}`",
            f"{row['mean_accepted_length']:.2f}",
            f"{row['rows_per_round']:.1f}",
            f"{row['speedup_e2e']:.2f}",
        )


def heads() -> Lines:
    """Rounds of the shipped heads: tokens a round, what is kept, speed."""
    yield (
        "`python experiments/spec_round.py --prompts 50`",
        *("tokens a round", "drafts kept, by position", "repeated 4-grams"),
        *("speed-up", "matched"),
    )
    both = ("eagle3", "dspark")
    names = [f"{head}_{impl}.jsonl" for impl in ("native", "xla") for head in both]
    for row in (row for name in names for row in rows_of(name, "summary")):
        flags = "--impl xla " if row["impl"] == "xla" else ""
        flags += f"--drafter {row['drafter']} "
        flags += f"--tree {row['tree']}" if row["tree"] else f"--gamma {row['gamma']}"
        flags += _drawn(row)
        if row["batch"]:
            flags += f" --batch {row['batch']}"
        if row["prompt_source"] != "50":
            flags += f" --prompts {row['prompt_source']}"
        kept = ", ".join(f"{x:.2f}" for x in row["conditional_acceptance"][:4])
        yield (
            f"`{flags}`",
            f"{row['mean_accepted_length']:.2f}",
            "" if row["tree"] else kept,
            _repeated(row),
            f"{row['speedup_e2e']:.2f}",
            # A rule that keeps the distribution has texts of its own.
            "-" if row["matched"] is None else "yes" if row["matched"] else "no",
        )


def _drawn(row: Row) -> str:
    """The flags by which tokens are drawn, and kept."""
    flags = f" --temperature {row['temperature']:g}" if row["temperature"] else ""
    return flags if row["rule"] == "coupled" else f"{flags} --rule {row['rule']}"


def evaluation() -> Lines:
    """Tokens a round and speed-up of every drafter on every data set."""
    found: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows_of("evaluation.jsonl", "sweep"):
        cells = found.setdefault((row["drafter"], row["temperature"]), {})
        cells[row["prompt_source"].split("/")[0]] = row
    sets = sorted({name for cells in found.values() for name in cells})
    yield "`python experiments/sweep.py`", *sets, "all matched"
    for (drafter, temperature), cells in found.items():
        yield (
            f"`{drafter}`, T = {temperature:g}",
            *(
                f"{cells[name]['mean_accepted_length']:.2f} "
                f"({cells[name]['speedup_e2e']:.2f}x)"
                for name in sets
            ),
            "yes" if all(row["matched"] for row in cells.values()) else "no",
        )


def ablations() -> Lines:
    """DSpark's variants, trained for the same steps: what they agree, what is kept."""
    yield (
        "`python experiments/ablate_heads.py --prompts 20`",
        *("steps", "held-out accepted length", "agreement of slots 1, 2, 4, 7"),
        *("tokens a round, T = 0", "T = 1", "all matched"),
    )
    found: dict[str, dict[float, Row]] = {}
    for row in rows_of("ablations.jsonl", "ablation"):
        found.setdefault(row["variant"], {})[row["temperature"]] = row
    for variant, by_temperature in found.items():
        greedy, drawn = by_temperature[0], by_temperature[1]
        slots = [greedy[f"held_out_agreement_{slot - 1}"] for slot in (1, 2, 4, 7)]
        yield (
            f"`{variant}`",
            str(greedy["steps"]),
            f"{greedy['held_out_accepted_length']:.2f}",
            ", ".join(f"{share:.2f}" for share in slots),
            *(f"{row['mean_accepted_length']:.2f}" for row in (greedy, drawn)),
            "yes" if greedy["matched"] and drawn["matched"] else "no",
        )


def regret() -> Lines:
    """Regret of policies of gamma, and adversarial prompts in real rounds."""
    sets = ("easy", "hard", "mixed", "adversarial")
    yield (
        "`python experiments/regret.py --prompts 6 --gen-tokens 96 --live --repeats 2`",
        *sets,
        "adversarial, real rounds, speed-up",
    )
    found = {
        # Rows of an earlier version call that set hostile.
        (kind, row["policy"], row["set"].replace("hostile", "adversarial")): row
        for kind in ("regret", "regret_live")
        for row in rows_of("regret.jsonl", kind)
    }
    for policy in ("threshold", "goodput", "fixed 4", "fixed 0"):
        speedup = found["regret_live", policy, "adversarial"]["speedup"]
        shares = [100 * found["regret", policy, name]["regret"] for name in sets]
        yield (
            policy.replace("fixed", "always"),
            *(f"{share:.1f}%" if share else "0%" for share in shares),
            f"{speedup:.2f}x",
        )


def plans() -> Lines:
    """Predicted and measured speed-ups: of the embedded pair, and of a preset at forced
    acceptance."""
    yield (
        "`python experiments/plan.py --impl native`",
        *("tokens a round, predicted", "speed-up, predicted"),
        "speed-up, measured (p10 to p90)",
    )
    for row in rows_of("plan_native.jsonl", "plan"):
        drafted = (
            f"--tree {row['tree']}" if "tree" in row else f"--gamma {row['gamma']}"
        )
        yield _plan(f"`{drafted}`", row, "measured_speedup", ("p10", "p90"))
    for row in rows_of("plan_qwen3_0.6b.jsonl", "plan_forced"):
        name = f"`--preset {row['target']} --draft-preset {row['draft']}`, "
        name += f"gamma {row['gamma']}, {row['forced_rate']:.0%} of drafts kept"
        yield _plan(name, row, "speedup", ("q1", "q3"))


def _plan(name: str, row: Row, measured: str, ends: Sequence[str]) -> Sequence[str]:
    low, high = (row[f"{measured}_{end}"] for end in ends)
    return (
        name,
        f"{row['predicted_tokens_per_round']:.2f}",
        f"{row['predicted_speedup']:.2f}",
        f"{row[measured]:.2f} ({low:.2f} to {high:.2f})",
    )


TABLES: Mapping[str, Callable[[], Lines]] = {
    made.__name__: made
    for made in (
        *(rounds, hugging_face, llama_cpp, llama_cpp_heads, kernels, designs),
        *(certificates, batches, schedule, trees, heads, evaluation, ablations),
        *(regret, plans),
    )
}


def table(name: str) -> str:
    """The table of that name, Markdown; one sentence where no rows are published."""
    heading, *lines = (f"| {' | '.join(cells)} |" for cells in TABLES[name]())
    if not lines:
        return "No rows are published yet; `experiments/reproduce.py` makes them.\n"
    rule = "|" + " --- |" * (heading.count(" | ") + 1)
    return "\n".join([heading, rule, *lines]).replace("|  |", "| |") + "\n"


def update(text: str) -> str:
    """The page with its tables made of the rows."""
    return _PLACE.sub(lambda m: m[1] + table(m["name"]) + m[3], text)


def update_pages() -> list[pathlib.Path]:
    """Writes the tables of all pages; returns the pages that changed."""
    changed = []
    for path in (ROOT / name for name in PAGES):
        text = path.read_text(encoding="utf-8")
        new = update(text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed
