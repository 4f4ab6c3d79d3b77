"""Which command makes every published row: the steps of `experiments/reproduce.py`.

Knows the flags of the other scripts, and which heads are shipped. Runs nothing.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

from experiments.lib import records
from spec_jax import loading
from spec_jax.drafters import registry


DATA = "{data}"
LLAMA = "{llama}"
WORK = "{work}"
DFLASH = "{dflash}"
"""In a command: the folders of `--data`, `--llama-bin`, `--work` and `--dflash`."""

# XLA's steps take six times as long as the native ones, and it compiles many programs,
# for half a minute each.
_COUNT = {"native": 50, "xla": 5}
_GSM8K = {impl: f"{DATA}/gsm8k/test.jsonl:{n}" for impl, n in _COUNT.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What makes a file of results, or several.

    Attributes:
      file: below `records.RESULTS`; the name of the step.
      runs: commands, each a script and its flags; {results} in them is
        `records.RESULTS`.
      flag: which names the file; None where the script writes it without being told.
      keep: of several runs whose rows the file holds, the kinds that are kept.
      totals: whether the categories of each set of prompts of a sweep become one row.
      mismatches: whether runs that do not match are expected, and no failure.
      made: where the script leaves the file, if it cannot be told; a copy is published.
    """

    file: str
    runs: tuple[str, ...]
    flag: str | None = "--out"
    keep: tuple[str, ...] = ()
    totals: bool = False
    mismatches: bool = False
    made: str | None = None

    @property
    def path(self) -> pathlib.Path:
        """Where the file is in the end."""
        return records.RESULTS / self.file


GAMMAS = (1, 2, 4, 7)
_MATCHED = (
    *("--gamma 1", "--gamma 2", "--gamma 3", "--gamma 7", "--page-size 8"),
    *("--page-size 64 --dtype float32", "--gen-tokens 256", "--prefill batched"),
    "--prefill rows",
)
_ONE_KIND = "--impl native --dtype bfloat16 --page-size 16 --cache paged"
_DRAFTERS = (
    "--product --drafter ngram,suffix,hybrid,draft-model,oracle --gamma-policy "
    "fixed,threshold,goodput --batch 1,4 --sampling greedy,sampled --gamma 4 "
    f"{_ONE_KIND} --prompts 8 --gen-tokens 64"
)
_FULL = "--full --prompts 12 --gen-tokens 256"
_TREES = (
    "--product --tree 2x4:7,4x6:15,4x16:31,4x16:63 --sampling greedy,sampled --batch "
    f"1,4 --drafter draft-model --gamma-policy fixed {_ONE_KIND} --prompts 8 "
    "--gen-tokens 64"
)
_GREEDY_TREES = ("4x8:7@0.6", "4x12:15@0.6", "4x16:31@0.6", "4x6:15@1")
# The second is EAGLE-2's: scored by probability, the most probable children.
_SAMPLED_TREES = ("4x6:15@0.7", "4x6:15@1/greedy", "4-2-1")
_MATCHED_TREES = ("", " --batch 4 --temperature 1")
_MATCHED_TREES_NATIVE = (" --temperature 0.7", " --temperature 1", " --batch 4")
_HELD = ("humaneval/HumanEval.jsonl", "mbpp/mbpp.jsonl", "mt_bench/question.jsonl")
"""Data sets on which nothing was ever chosen."""
_HEAD = (
    "--product --tree none,4x6:15 --gamma 4,7 --sampling greedy,sampled --batch 1,4 "
    f"--gamma-policy fixed {_ONE_KIND} --prompts 8 --gen-tokens 64"
)
_SCHEDULED = (
    "--product --gamma 4,7 --sampling greedy,sampled --batch 1,4 --gamma-policy "
    f"schedule {_ONE_KIND} --prompts 8 --gen-tokens 64"
)
_TREES_OF_HEADS = {
    "eagle3": ("4x12:15@0.6", "4x16:31@0.6"),
    "dspark": ("4x7:15@0.6", "4x7:31@0.6"),  # No deeper than a block.
}
_TREES_OF_HEADS["dflash"] = _TREES_OF_HEADS["dspark"]
_TEMPERATURES = (0, 0.7, 1)
_SCHEDULED_BATCHES = {"native": (1, 4, 16), "xla": (16,)}


def steps() -> Iterator[Step]:
    """Every step, in order."""
    yield from _speeds()
    yield from _comparisons()
    yield from _heads()
    yield from _trainings()
    yield from _certificates()
    rounds = [f"spec_round_{i}_gamma{g}" for i in ("native", "xla") for g in GAMMAS]
    names = [*rounds, "latency_embedded_native", "latency_embedded_xla"]
    names += ["compare_hf", "parity_flash", "calibration"]
    listed = " ".join(f"{{results}}/{name}.jsonl" for name in names)
    command = f"plot {listed} --out {{results}}/figures --theory"
    yield Step(file="figures/speedup.svg", runs=(command,), flag=None)
    if loading.shipped_heads():
        command = "plot {results}/evaluation.jsonl --figure sweep_positions --where "
        command += "temperature=0.0 --out {results}/figures"
        file = "figures/sweep_positions.svg"
        yield Step(file=file, runs=(command,), flag=None)
        command = "plot {results}/ablations.jsonl --out {results}/figures"
        yield Step(file="figures/ablations.svg", runs=(command,), flag=None)


def _speeds() -> Iterator[Step]:
    """Rounds, steps and kernels of both implementations."""
    for impl, repeats in (("native", 3), ("xla", 2)):
        for gamma in GAMMAS:
            command = f"spec_round --impl {impl} --prompts 50 --repeats {repeats}"
            yield Step(
                file=f"spec_round_{impl}_gamma{gamma}.jsonl",
                runs=(f"{command} --gamma {gamma}",),
                keep=() if gamma == 4 else ("summary",),  # One with each prompt's row.
            )
        command = f"spec_round --impl {impl} --prompts"
        runs = tuple(f"{command} {_COUNT[impl]} {more}" for more in _MATCHED)
        yield Step(file=f"matched_{impl}.jsonl", runs=runs, keep=("summary",))
        tokens = 256 if impl == "native" else 64
        runs = (f"{command} {_GSM8K[impl]} --gen-tokens {tokens}",)
        yield Step(file=f"matched_gsm8k_{impl}.jsonl", runs=runs, keep=("summary",))
        command = f"latency --impl {impl}"
        # Of fewer steps a call, what a call costs is a tenth of a plain step.
        embedded = f"{command} --repeats 15 --steps 60"
        preset = f"{command} --preset qwen3-0.6b"
        yield Step(file=f"latency_embedded_{impl}.jsonl", runs=(embedded,))
        sizes = "--rows 1,5,8 --contexts 64 1024 4096" if impl == "native" else ""
        yield Step(
            file=f"latency_qwen3_0.6b_{impl}.jsonl",
            runs=(f"{preset} --repeats 7 {sizes}".rstrip(),),
        )
    # What a processor without AVX-512 has, on one that has it.
    isa, kept = "--impl native --isa avx2", ("step", "summary")
    steps = f"latency {isa} --repeats 15 --steps 60"
    runs = (steps, f"spec_round {isa} --prompts 50 --repeats 3")
    yield Step(file="embedded_native_avx2.jsonl", runs=runs, keep=kept)
    command = "spec_round --impl native --prompts 50 --repeats 3 --gamma 7"
    command += " --gamma-policy goodput"
    names = ("ngram", "suffix", "hybrid", "draft-model", *loading.shipped_heads())
    runs = tuple(f"{command} --drafter {name}" for name in names)
    yield Step(file="adaptive_native.jsonl", runs=runs, keep=("summary",))
    yield Step(file="compare_hf.jsonl", runs=("compare_hf",))
    yield Step(file="kernels_embedded.jsonl", runs=("kernels",))
    command = "kernels --shapes qwen3-0.6b --rows 1,5,8 --repeats 8 --contexts "
    command += "256,1024,4096,16384,32768"
    yield Step(file="kernels_qwen3_0.6b.jsonl", runs=(command,))


def _trees() -> Iterator[Step]:
    """Rounds of trees: greedy, and drawn; what their rows cost; and that they match,
    everywhere."""
    command = "latency --impl native --tree-rows 8,16,32,64 --repeats 20"
    yield Step(file="latency_trees_native.jsonl", runs=(command,))
    yield Step(file="fit_scores.jsonl", runs=("fit_scores --impl native",))
    command = "spec_round --impl native --prompts 50 --tree"
    runs = [f"{command} {tree}" for tree in _GREEDY_TREES]
    runs += [f"{command} {tree} --temperature 1" for tree in _SAMPLED_TREES]
    chain = "spec_round --impl native --prompts 50 --gamma 7 --temperature 1"
    runs += [f"{chain}{rule}" for rule in ("", " --rule block")]
    yield Step(file="trees_native.jsonl", runs=tuple(runs), keep=("summary",))
    for impl, count in _COUNT.items():
        sets = [*(f"{count}{more}" for more in _MATCHED_TREES), _GSM8K[impl]]
        if impl == "native":
            sets += [f"{count}{more}" for more in _MATCHED_TREES_NATIVE]
            sets += [f"{_GSM8K[impl]} --temperature 1 --batch 4"]
            sets += [f"{DATA}/{name}:{count}" for name in _HELD]
        command = f"spec_round --impl {impl} --tree 4x12:15@0.6 --prompts"
        runs = [f"{command} {prompts}" for prompts in sets]
        yield Step(
            file=f"matched_trees_{impl}.jsonl", runs=tuple(runs), keep=("summary",)
        )


def _heads() -> Iterator[Step]:
    """Rounds and a certificate of each shipped head, and all of them on data sets."""
    names = loading.shipped_heads()
    for name, drafter in {**{name: name for name in names}, "dflash": DFLASH}.items():
        for impl in ("native", "xla"):
            command = f"spec_round --impl {impl} --drafter {drafter} --prompts"
            runs = tuple(f"{command} {more}" for more in _rounds_of_head(name, impl))
            yield Step(file=f"{name}_{impl}.jsonl", runs=runs, keep=("summary",))
        yield Step(
            file=f"certificates/{name}_native_bfloat16.json",
            runs=(f"exactness --drafter {drafter} {_HEAD}",),
            flag="--certificate",
        )
    if "dspark" in names:
        yield from _beyond_dspark()
    if names:
        listed = ",".join((*names, "draft-model", "ngram", "suffix"))
        command = f"sweep --impl native --drafter {listed} --gamma 7 --temperature 0,1"
        command += " --repeats 3"  # Of one, a disturbed prompt is the speed-up.
        # Samples: the first prompts of Spec-Bench are those of MT-bench.
        yield Step(
            file="evaluation.jsonl",
            runs=(f"{command} --prompts {DATA}:20@0",),
            totals=True,
        )


def _beyond_dspark() -> Iterator[Step]:
    """What the paper has not: DSpark in a hybrid, and trees whose number of nodes is
    chosen by goodput."""
    command = "spec_round --impl native --prompts 50"
    hybrid = f"{command} --drafter hybrid --draft {{dspark}} --gamma 7 --temperature"
    tree = f"{command} --drafter dspark --gamma-policy goodput --tree"
    runs = [f"{hybrid} {t}{more}" for t in (0, 0.7, 1) for more in ("", " --batch 4")]
    yield Step(file="hybrid_dspark_native.jsonl", runs=tuple(runs), keep=("summary",))
    runs = [f"{tree} {name}" for name in _TREES_OF_HEADS["dspark"]]
    runs += [f"{tree} 4x6:15@0.7 --temperature {t}" for t in (0.7, 1)]
    yield Step(file="rank_goodput_dspark.jsonl", runs=tuple(runs), keep=("summary",))


def _trainings() -> Iterator[Step]:
    """The calibration of the shipped DSpark, on texts that are not part of this
    checkout; and its variants, trained from nothing: hours, on rollouts that are none
    either."""
    command = f"train_drafter --family dspark --stage calibrate --work {WORK} --raw"
    yield Step(
        file="calibration.jsonl",
        runs=(f"{command} --out {WORK}/head --prompts {WORK}/pieces.jsonl",),
        flag=None,
        made=f"{WORK}/calibration.jsonl",
    )
    command = f"ablate_heads --work {WORK} --prompts 20 --out {{scratch}}_swept.jsonl"
    training = "--draft-vocab 4096 --mlp 384 --steps 160 --seed 3"
    yield Step(
        file="ablations.jsonl",
        runs=(f"{command} -- {training}",),
        flag=None,
        made=f"{WORK}/ablations.jsonl",
    )


def _rounds_of_head(name: str, impl: str) -> Iterator[str]:
    """The prompts and the flags of each run of a head; with XLA the least that has each
    temperature, each batch and a tree."""
    trees, drawn_tree = _TREES_OF_HEADS.get(name, ()), "--tree 4x6:15@0.7 --temperature"
    if impl == "xla":
        few = "4 --gen-tokens 32"
        yield from (f"{few} --gamma 7 --temperature {t}" for t in _TEMPERATURES)
        yield f"{few} --gamma 7 --batch 4 --temperature 0.7"
        yield "16 --gen-tokens 16 --gamma 7 --batch 16 --temperature 1"
        yield f"{few} {drawn_tree} 1"
        return
    n, gsm8k = _COUNT[impl], _GSM8K[impl]
    yield f"{n} --gamma 4"
    yield from (f"{n} --gamma 7 --temperature {t}" for t in _TEMPERATURES)
    yield from (f"{n} --tree {tree}" for tree in trees)
    yield f"{n} {drawn_tree} 1"
    for batch in (4, 16):
        for t in _TEMPERATURES:
            yield f"{n} --gamma 7 --batch {batch} --temperature {t}"
    yield f"{gsm8k} --gamma 7"
    yield f"{n} --gamma 7 --temperature 1 --rule block"
    yield from (f"{n} --gamma 4 --temperature {t}" for t in (0.7, 1))
    yield from (f"{n} --tree {tree} --batch 4" for tree in trees[:1])
    yield f"{n} {drawn_tree} 0.7"
    yield f"{n} --tree 4x7:31@0.7 --temperature 1"
    yield f"{gsm8k} --gamma 7 --temperature 1"


def _comparisons() -> Iterator[Step]:
    """Trees, designs, batches, policies, traces, and a path that mismatches."""
    yield from _trees()
    yield from _beside_llama()
    command = "history --prompts 20"
    yield Step(file="history.jsonl", runs=(command,), keep=("history",))
    command = "throughput --repeats 5"
    runs = (command, f"{command} --drafter ngram")
    yield Step(file="throughput.jsonl", runs=runs, keep=("throughput",))
    if "dspark" in loading.shipped_heads():
        yield from _schedules()
    command = "regret --prompts 6 --gen-tokens 96 --live --repeats 2"
    yield Step(file="regret.jsonl", runs=(command,))
    yield Step(file="regret_drawn.jsonl", runs=("regret_drawn",))
    yield from _plans()
    # Recordings of other settings do not go into one file.
    record = "replay --record {{scratch}}_{} --prompts 50 --gamma 7{}"
    names = [name for name in registry.BUILDERS if name not in registry.NEED_TARGET]
    drafters = ",".join((*names, *loading.shipped_heads()))
    sampled = " --temperature 0.7 --top-k 20 --top-p 0.8"
    yield Step(
        file="replay_check.jsonl",
        runs=tuple(
            run
            for name, more in (("greedy", ""), ("drawn", sampled))
            for run in (
                record.format(name, more),
                f"replay {{scratch}}_{name} --check --drafter {drafters}",
            )
        ),
        keep=("replay",),
    )
    yield Step(
        file="mismatches_flash.jsonl",
        runs=("history --impl native --prompts 20",),
        flag="--dump-verify-mismatches",
        mismatches=True,
    )
    yield Step(
        file="parity_flash.jsonl",
        runs=("parity --mismatch {results}/mismatches_flash.jsonl:1",),
        mismatches=True,
    )


def _plans() -> Iterator[Step]:
    """Predicted speed-ups beside measured ones: of the pair, and of a preset."""
    trees = ",".join(_GREEDY_TREES[:-1])
    pair = f"--drafter draft-model --gamma 1,4,7 --tree {trees} --prompts 10"
    preset = "--preset qwen3-0.6b --draft-preset draft-60m --gamma 2,4"
    for name, more, kind in (
        ("plan_native", pair, "plan"),
        ("plan_qwen3_0.6b", preset, "plan_forced"),
    ):
        command = f"plan --impl native {more}"
        yield Step(file=f"{name}.jsonl", runs=(command,), keep=(kind,))


def _schedules() -> Iterator[Step]:
    """What steps cost; and by that a batch of 16 with what is verified scheduled: in
    turn with fixed gammas, on code and on prompts of all kinds; with a drafter that is
    always wrong; and that its tokens match, greedy and drawn. And a certificate, by
    times that it states."""
    of_impl = {impl: f"profile_dspark_{impl}.jsonl" for impl in _COUNT}
    for impl, file in of_impl.items():
        kinds = ("step_profile", "confidences")
        yield Step(file=file, runs=tuple(_profile(impl)), keep=kinds)
    gammas = ",".join(map(str, GAMMAS))
    command = "throughput --impl native --drafter dspark --batch 16 --repeats 5"
    command += f" --gamma {gammas} --schedule {{results}}/{of_impl['native']} --prompts"
    # Short ones: prefill, which no gamma changes, is most of a run of long ones.
    sets = ("32", f"{DATA}/mt_bench/question.jsonl:32@0")
    runs = tuple(f"{command} {prompts}" for prompts in sets)
    yield Step(file="schedule.jsonl", runs=runs, keep=("throughput",))
    # More in turn: where little is drafted, steps differ less than a machine does.
    runs = (f"{command} 32 --adversarial".replace("--repeats 5", "--repeats 11"),)
    yield Step(file="schedule_adversarial.jsonl", runs=runs, keep=("throughput",))
    for impl, file in of_impl.items():
        count = _COUNT[impl] if impl == "native" else "16 --gen-tokens 16"
        command = f"spec_round --impl {impl} --drafter dspark --prompts {count}"
        command += f" --gamma 7 --schedule {{results}}/{file} --batch"
        runs = tuple(
            f"{command} {batch} --temperature {temperature}"
            for batch in _SCHEDULED_BATCHES[impl]
            for temperature in _TEMPERATURES
        )
        yield Step(file=f"dspark_scheduled_{impl}.jsonl", runs=runs, keep=("summary",))
    yield Step(
        file="certificates/dspark_scheduled_native_bfloat16.json",
        runs=(f"exactness --drafter dspark {_SCHEDULED}",),
        flag="--certificate",
    )


def _profile(impl: str) -> Iterator[str]:
    """What schedules read: step times of batches at contexts, and a calibration for
    each temperature. The shipped one is of drawn texts."""
    about = f"--impl {impl} --drafter dspark --gamma {GAMMAS[-1]}"
    # Of XLA's only tokens are looked at: confidences as the head says them.
    is_native = impl == "native"
    batches = ",".join(map(str, _SCHEDULED_BATCHES[impl]))
    sizes = f"--batch {batches} --contexts {'64,256' if is_native else '128'}"
    turns = "--steps 10 --repeats 7" if is_native else "--steps 2 --repeats 2"
    yield f"profile_steps {about} {sizes} {turns}"
    of_others = f"--prompts {DATA}/{_HELD[0]}:100"
    for temperature in _TEMPERATURES if is_native else ():
        yield f"fit_scores {about} --temperature {temperature} {of_others}"


def _beside_llama() -> Iterator[Step]:
    """Speeds beside llama.cpp, of the pair and of a preset, and what it keeps of the
    drafts of shipped heads."""
    runs = {"": "--repeats 5", "_qwen3_0.6b": "--preset qwen3-0.6b --repeats 5"}
    if heads := loading.shipped_heads():
        kept = "--gamma 4,7 --no-steps --repeats 1"
        runs["_heads"] = f"--drafter {','.join(heads)} {kept}"
    for name, more in runs.items():
        command = f"compare_llama_cpp --llama-bin {LLAMA} {more}"
        file = f"compare_llama_cpp{name}.jsonl"
        yield Step(file=file, runs=(command,), keep=("comparison",))


def _certificates() -> Iterator[Step]:
    gsm8k = f"--prompts {_GSM8K['native']} --gen-tokens 64"
    for name, more in {
        "default": "",
        "drafters_native_bfloat16": f" {_DRAFTERS}",
        "trees_native_bfloat16": f" {_TREES}",
        "full_native_bfloat16": f" {_FULL}",
        "gsm8k_native_bfloat16": f" {gsm8k} --impl native --dtype bfloat16",
    }.items():
        yield Step(
            file=f"certificates/{name}.json",
            runs=(f"exactness{more}",),
            flag="--certificate",
        )
