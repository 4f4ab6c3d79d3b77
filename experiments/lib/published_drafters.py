"""Tables of trees, heads and schedules, each a function of the published rows."""

import pathlib

from experiments.lib import published_rows
from spec_jax.drafters import tree_shapes


COMMAND = "`python experiments/spec_round.py --prompts 50`"


def trees() -> published_rows.Lines:
    """Chains and trees of the embedded pair: tokens, rows and speed."""
    chains = published_rows.rows_of("spec_round_native_gamma*.jsonl", "summary")
    rows = [row for row in chains if row["gamma"] in (4, 7)]
    rows += published_rows.rows_of("trees_native.jsonl", "summary")
    shape = lambda row: (
        f"--tree {tree_shapes.parse(row['tree'])}"
        if row["tree"]
        else f"--gamma {row['gamma']}"
    )
    columns: dict[str, published_rows.Cell] = {
        COMMAND: lambda row: f"`{shape(row)}{published_rows.drawn(row)}`",
        "tokens a round": "{mean_accepted_length:.2f}",
        "rows of the target a round": "{rows_per_round:.1f}",
        "speed-up": "{speedup_e2e:.2f}",
    }
    return published_rows.table(columns, rows)


def heads() -> published_rows.Lines:
    """Rounds of heads, the shipped ones first: tokens a round, what is kept, speed."""
    every = ("dspark", "dflash")
    names = [f"{head}_{impl}.jsonl" for impl in ("native", "xla") for head in every]
    return _rounds_of(names, COMMAND)


def real() -> published_rows.Lines:
    """Rounds of fixed drafts of the head of SmolLM2, as `heads`."""
    command = "`python experiments/spec_round.py --target smollm2 --gen-tokens 256`"
    return _rounds_of(["smollm2.jsonl"], command)


def _rounds_of(names: list[str], command: str) -> published_rows.Lines:
    kept = lambda row: ", ".join(f"{x:.2f}" for x in row["conditional_acceptance"][:4])
    columns: dict[str, published_rows.Cell] = {
        command: lambda row: f"`{_flags_of(row)}`",
        "tokens a round": "{mean_accepted_length:.2f}",
        "drafts kept, by position": lambda row: "" if row["tree"] else kept(row),
        "repeated 4-grams": published_rows.repeated,
        "speed-up": _speedup,
        "matched": published_rows.matched,
    }
    return published_rows.table(columns, published_rows.of_files(names))


def _flags_of(row: published_rows.Row) -> str:
    """The flags of `spec_round.py` by which a row was made, if not those of others."""
    flags = "--impl xla " if row["impl"] == "xla" else ""
    flags += f"--drafter {pathlib.PurePath(row['drafter']).name} "
    if row["draft"] not in (None, "embedded"):
        flags += f"--draft {pathlib.PurePath(row['draft']).name} "
    flags += f"--tree {row['tree']}" if row["tree"] else f"--gamma {row['gamma']}"
    flags += published_rows.drawn(row)
    if row["gamma_policy"] not in (None, "fixed"):
        flags += f" --gamma-policy {row['gamma_policy']}"
    if row.get("schedule"):
        flags += " --schedule FILE"
    if row["batch"]:
        flags += f" --batch {row['batch']}"
    if row["prompt_source"] != "50":
        flags += f" --prompts {row['prompt_source']}"
    return flags


def _speedup(row: published_rows.Row) -> str:
    """With XLA a few short texts are compared, and no time is looked at."""
    return "-" if row["impl"] == "xla" else f"{row['speedup_e2e']:.2f}"


def beyond_dspark() -> published_rows.Lines:
    """DSpark scheduled, in a hybrid, and as trees whose nodes goodput chooses."""
    scheduled = [f"dspark_scheduled_{impl}.jsonl" for impl in ("native", "xla")]
    names = (*scheduled, "hybrid_dspark_native.jsonl", "rank_goodput_dspark.jsonl")
    columns: dict[str, published_rows.Cell] = {
        COMMAND: lambda row: f"`{_flags_of(row)}`",
        "tokens a round": "{mean_accepted_length:.2f}",
        "rows of the target a round": "{rows_per_round:.1f}",
        "speed-up": _speedup,
        "matched": published_rows.matched,
    }
    return published_rows.table(columns, published_rows.of_files(names))


def llama_cpp_heads() -> published_rows.Lines:
    """What either side keeps of the drafts of shipped heads."""
    command = "`--drafter dspark --gamma 4,7 --no-steps --repeats 1`"
    yield (
        *(command, "llama.cpp", "spec_jax", "repeated 4-grams here"),
        *("same text", "there", "here"),
    )
    for row in published_rows.rows_of("compare_llama_cpp_heads.jsonl", "comparison"):
        if "drafts" not in row:
            continue
        drafts, same = row["drafts"], row["drafts"]["same"]
        kept = [drafts[side]["accepted_per_round"] for side in ("theirs", "ours")]
        of_same = [same[side] for side in ("theirs", "ours")]
        yield (
            row["figure"].partition(":")[0],
            *(f"{number:.3f}" for number in kept),
            published_rows.repeated(drafts["ours"]),
            f"{same['prompts']} of {row['prompts']}",
            *("" if number is None else f"{number:.3f}" for number in of_same),
        )


Cells = dict[tuple[str, float], dict[str, published_rows.Row]]


def _by_drafter() -> tuple[Cells, list[str]]:
    """The evaluation's rows by drafter, temperature and data set; and the data sets."""
    found: Cells = {}
    for row in published_rows.rows_of("evaluation.jsonl", "sweep"):
        cells = found.setdefault((row["drafter"], row["temperature"]), {})
        cells[row["prompt_source"].split("/")[0]] = row
    return found, sorted({name for cells in found.values() for name in cells})


def evaluation() -> published_rows.Lines:
    """Tokens a round and speed-up of every drafter on every data set."""
    found, sets = _by_drafter()
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


def positions() -> published_rows.Lines:
    """Of the drafts of those rounds, how many are kept by their place in a chain."""
    found, sets = _by_drafter()
    yield "drafts 1, 2, 4 and 7 kept, if all before were", *sets
    for (drafter, temperature), cells in found.items():
        yield (
            f"`{drafter}`, T = {temperature:g}",
            *(_by_place(cells[name]) for name in sets),
        )


def _by_place(row: published_rows.Row) -> str:
    """The shares that are kept of drafts 1, 2, 4 and 7, each of the rounds that kept
    those before; a dash where none was drafted."""
    kept = row.get("conditional_acceptance")
    if kept is None:  # Rows of an earlier version.
        return ""
    shares = [kept[place - 1] if place <= len(kept) else None for place in (1, 2, 4, 7)]
    return ", ".join("-" if share is None else f"{share:.2f}" for share in shares)


def ablations() -> published_rows.Lines:
    """DSpark's variants, trained for the same steps: what they agree, what is kept."""
    yield (
        "`python experiments/ablate_heads.py --prompts 20`",
        *("steps", "held-out accepted length", "agreement of slots 1, 2, 4, 7"),
        *("tokens a round, T = 0", "T = 1", "drafts 1, 2, 4, 7 kept, T = 0"),
        "all matched",
    )
    found: dict[str, dict[float, published_rows.Row]] = {}
    for row in published_rows.rows_of("ablations.jsonl", "ablation"):
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
            _by_place(greedy),
            "yes" if greedy["matched"] and drawn["matched"] else "no",
        )


def calibration() -> published_rows.Lines:
    """Errors of the shipped head's confidences, before and after they are scaled."""
    yield (
        "draft",
        *("error before", "by temperatures alone (STS)", "by temperature and shift"),
        *("ROC-AUC before", "after"),
    )
    names = ("ece_before", "ece_sts", "ece", "roc_auc_before", "roc_auc")
    for row in published_rows.rows_of("calibration.jsonl", "confidences"):
        for draft in range(row["gamma"]):
            yield str(draft + 1), *(f"{row[name][draft]:.3f}" for name in names)


def step_profile() -> published_rows.Lines:
    """Milliseconds of a step of so many rows, which a schedule weighs."""
    rows = (1, 4, 8, 16, 32, 64, 128)
    command = "`python experiments/profile_steps.py --drafter dspark --batch 1,4,16`"
    counts = ("1 row", *(f"{count} rows" for count in rows[1:]))
    yield command, *counts, "drafting adds"
    for row in published_rows.rows_of("profile_dspark_native.jsonl", "step_profile"):
        cells = [
            f"{1e3 * row['step_s'][count - 1]:.2f}" if count in row["rows"] else ""
            for count in rows
        ]
        about = f"batch {row['num_slots']}, context {row['context']}, ms"
        yield about, *cells, f"{1e3 * row['draft_s']:.2f}"


def schedule() -> published_rows.Lines:
    """Batches of 16 with DSpark: fixed gammas, and a schedule of what is verified."""
    found: dict[str, dict[str, published_rows.Row]] = {}
    for row in published_rows.rows_of("schedule*.jsonl", "throughput"):
        if row["batch"]:
            way, prompts = row["way"].split(",")[0], row["prompt_source"]
            prompts += ", `--adversarial`" if row.get("adversarial") else ""
            found.setdefault(way, {})[prompts] = row
    sets = list(dict.fromkeys(name for cells in found.values() for name in cells))
    command = "throughput.py --drafter dspark --batch 16 --gamma 1,2,4,7"
    yield f"`python experiments/{command}`", *sets
    for way, cells in found.items():
        yield way, *(f"{cells[name]['ratio']:.2f}x" for name in sets)


TABLES = (
    *(trees, heads, real, llama_cpp_heads, evaluation, positions),
    *(ablations, calibration, step_profile, schedule, beyond_dspark),
)
