"""Commands that make every published row: the steps of `experiments/reproduce.py`.

This module has commands of the other scripts, and runs nothing.

A step is a line with its file and, after bars, the kinds of rows that it keeps and the
option `mismatches`; the commands under it are indented, and continue where the
indentation is deeper. A command is run once for each of <one; another>. Words in braces
are keys of `WORDS` or `OF_IMPL`, or are filled in where the step is run: {data},
{llama} and {rollouts} are folders of flags, {results} is `records.RESULTS`.
"""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping

from experiments.lib import records


DATA, LLAMA, TEXTS = "{data}", "{llama}", "{rollouts}"
"""The folders of `--data`, `--llama-bin` and `--texts` in a command."""

FETCHED = "--target smollm2"
"""Part of a command that needs the model that `fetch_model.py` downloads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Commands that make a file of results, or several.

    Attributes:
      file: path below `records.RESULTS`; the name of the step.
      runs: commands, each a script and its flags.
      keep: kinds of rows that are kept, of several runs whose rows the file holds.
      mismatches: whether runs that do not match are expected, and no failure.
    """

    file: str
    runs: tuple[str, ...]
    keep: tuple[str, ...] = ()
    mismatches: bool = False

    @property
    def path(self) -> pathlib.Path:
        """The path of the finished file."""
        return records.RESULTS / self.file

    @property
    def flag(self) -> str | None:
        """The flag that names the file; None where a flag names its folder."""
        return {".jsonl": "--out", ".json": "--certificate"}.get(self.path.suffix)


def _each(command: str) -> Iterator[str]:
    """Yields a command for each combination of choices, the last varying fastest."""
    parts = re.split("<(.*?)>", command)
    choices = [part.split(";") if n % 2 else [part] for n, part in enumerate(parts)]
    for chosen in itertools.product(*choices):
        yield " ".join("".join(chosen).split())


WORDS = {
    "kind": "--impl native --dtype bfloat16 --page-size 16 --cache paged",
    # For certificates: greedy and sampled, alone and in batches, short texts.
    "drawn": "--sampling greedy,sampled --batch 1,4",
    "short": "--prompts 8 --gen-tokens 64",
    "set": f"{DATA}/gsm8k/test.jsonl",
    "turns": f"{DATA}/mt_bench/question.jsonl",
    "long": f"{DATA}/spec_bench/question.jsonl",
    "real": f"{FETCHED} --impl native",
    "default": "--drafter hybrid --gamma 7 --gamma-policy budget",
    "texts": "--prompts 20 --gen-tokens 256",
    "heads": "eagle3,dspark,dspark-gated,dspark-rnn,peagle,dflash,dflash2,jetspec",
    "profile": "{results}/profile_dspark_native.jsonl",
    "drawings": " ".join(
        path
        for name in (
            "spec_round_<native;xla>_gamma<1;2;4;7>",
            *("latency_embedded_<native;xla>", "parity_flash"),
        )
        for path in _each(f"{{results}}/{name}.jsonl")
    ),
}

# XLA's steps take six times as long as the native ones, and XLA compiles many programs,
# which takes half a minute each.
OF_IMPL = (
    {"impl": "native", "count": "50", "repeats": "3", "tokens": "256"},
    {"impl": "xla", "count": "5", "repeats": "2", "tokens": "64"},
)

SPEEDS = """
spec_round_{impl}_gamma1.jsonl | summary
  spec_round --impl {impl} --prompts 50 --repeats {repeats} --gamma 1
spec_round_{impl}_gamma2.jsonl | summary
  spec_round --impl {impl} --prompts 50 --repeats {repeats} --gamma 2
spec_round_{impl}_gamma4.jsonl
  spec_round --impl {impl} --prompts 50 --repeats {repeats} --gamma 4
spec_round_{impl}_gamma7.jsonl | summary
  spec_round --impl {impl} --prompts 50 --repeats {repeats} --gamma 7
matched_{impl}.jsonl | summary
  spec_round --impl {impl} --prompts {count} <--gamma 1; --gamma 2; --gamma 3;
    --gamma 7; --page-size 8; --page-size 64 --dtype float32; --gen-tokens 256;
    --prefill batched; --prefill rows>
matched_gsm8k_{impl}.jsonl | summary
  spec_round --impl {impl} --prompts {set}:{count} --gen-tokens {tokens}
latency_embedded_{impl}.jsonl
  latency --impl {impl} --repeats 15 --steps 60
"""

# The second tree at temperature 1 is EAGLE-2's: nodes are scored by probability, and
# children are the most probable tokens.
COMPARISONS = """
latency_qwen3_0.6b_native.jsonl
  latency --impl native --preset qwen3-0.6b --repeats 7 --rows 1,5,8
    --contexts 64 1024 4096
compare_hf.jsonl
  compare_hf
trees_native.jsonl | summary
  spec_round --impl native --prompts 50 --tree <4x8:7@0.6; 4x12:15@0.6; 4x16:31@0.6;
    4x6:15@1>
  spec_round --impl native --prompts 50 --tree <4x6:15@0.7; 4x6:15@1/greedy; 4-2-1>
    --temperature 1
  spec_round --impl native --prompts 50 --gamma 7 --temperature 1
  spec_round --impl native --prompts 50 --gamma 7 --temperature 1 --rule block
rules_native.jsonl | summary
  spec_round --impl native --prompts 50 --repeats 1 --tree 4-2-1
    --temperature <0.3; 0.7; 1> --rule <coupled; rejection; block; multipath>
  spec_round --impl native --prompts 50 --repeats 1 --temperature 1 --gamma 3
    --rule <coupled; rejection; block>
matched_trees_native.jsonl | summary
  spec_round --impl native --tree 4x12:15@0.6 --prompts <50;
    50 --batch 4 --temperature 1; {set}:50; 50 --temperature 0.7; 50 --temperature 1;
    50 --batch 4; {set}:50 --temperature 1 --batch 4;
    {data}/humaneval/HumanEval.jsonl:50; {data}/mbpp/mbpp.jsonl:50;
    {data}/mt_bench/question.jsonl:50>
matched_trees_xla.jsonl | summary
  spec_round --impl xla --tree 4x12:15@0.6
    --prompts <5; 5 --batch 4 --temperature 1; {set}:5>
throughput.jsonl | throughput
  throughput --repeats 5
  throughput --repeats 5 --drafter ngram
dspark_native.jsonl | summary
  spec_round --impl native --drafter dspark --prompts <50 --gamma 4; 50 --gamma 7
    --temperature 0; 50 --gamma 7 --temperature 0.7; 50 --gamma 7 --temperature 1;
    50 --tree 4x7:15@0.6; 50 --tree 4x6:15@0.7 --temperature 1; 50 --gamma 7 --batch 4;
    50 --gamma 7 --batch 16; {set}:50 --gamma 7>
"""

# Prompts are short, since prefill, which no gamma changes, is most of a run of long
# ones. Where little is drafted, times differ little, and more turns are needed.
POLICIES = """
profile_dspark_native.jsonl | step_profile, confidences
  profile_steps --impl native --drafter dspark --gamma 7 --batch 1,4,16
    --contexts 64,256 --steps 10 --repeats 7 --calibrate 0,0.7,1
    --prompts {data}/humaneval/HumanEval.jsonl:100
schedule.jsonl | throughput
  throughput --impl native --drafter dspark --batch 16 --repeats 5 --gamma 1,2,4,7
    --schedule {profile} --prompts <32; {data}/mt_bench/question.jsonl:32@0>
schedule_adversarial.jsonl | throughput
  throughput --impl native --drafter dspark --batch 16 --repeats 11 --gamma 1,2,4,7
    --schedule {profile} --prompts 32 --adversarial
texts.jsonl
  spec_round --impl native --prompts 50 --repeats 1 --gamma 4 --ignore-stop
regret.jsonl | replay
  replay {results}/texts.jsonl --gamma 1,2,4,7 --gamma-policy threshold,goodput,leader
    --drafter draft-model,ngram,suffix,choice
    --round-costs 1,1.69,1.85,1.95,2.06,2.3,2.6,2.89
    --lookup-costs 1,1.1,1.2,1.3,1.4,1.5,1.6,1.7
rollouts_drift.jsonl | reinforce
  rollouts --steps 30 --gen-tokens 32
plan_native.jsonl | plan
  plan --impl native --drafter draft-model --gamma 1,4,7
    --tree 4x8:7@0.6,4x12:15@0.6,4x16:31@0.6 --prompts 10
parity_flash.jsonl | | mismatches
  parity --impl native {texts} --verify-path flash
parity_library_rows.jsonl | | mismatches
  parity --impl native {texts} --verify-path library-rows
parity_paged_decode.jsonl
  parity --impl native {texts} --verify-path paged-decode
"""

# The real model with its head, and prompt lookup beside it. Data sets are sampled, for
# the first prompts of Spec-Bench are those of MT-bench. `fetch_model.py` downloads the
# model, and llama.cpp's llama-quantize writes its other forms.
REAL = """
evaluation.jsonl
  sweep {real} --drafter hybrid,eagle3,ngram --gamma 7 --gamma-policy budget
    --temperature 0,0.7,1 --gen-tokens 256 --prompts {data}:4@0
smollm2.jsonl | summary
  spec_round {real} --gen-tokens 256 <--drafter eagle3; --drafter hybrid> --prompts <
    {set}:6 --gamma 4; {turns}:4 --gamma 4; {turns}:4 --tree 4x6:15@0.6;
    {set}:6 --tree 4x6:15@0.6>
smollm2_q8_0.jsonl | summary, throughput
  spec_round {real} --weights q8_0 --gen-tokens 256 --prompts <
    {set}:6 --drafter eagle3 --gamma 4; {turns}:4 --drafter eagle3 --gamma 4;
    {turns}:4 --drafter eagle3 --tree 4x6:15@0.6;
    {set}:6 {default} --draft-weights q8_0; {turns}:4 {default} --draft-weights q8_0>
  throughput {real} --weights q8_0 --drafter eagle3 --batch 4 --gamma 4 --repeats 3
    --prompts {set}:8
smollm2_q4_1.jsonl | summary
  spec_round {real} --weights q4_1 --gen-tokens 256 --prompts <
    {set}:6 --drafter eagle3 --gamma 4;
    {set}:6 {default} --draft-weights q8_0; {turns}:4 {default} --draft-weights q8_0>
perplexity_smollm2.jsonl
  perplexity {real} --prompts {long}:120@0 --windows 64
smollm2_amx.jsonl | summary
  spec_round {real} --isa <amx; avx512bf16> --gen-tokens 128 --prompts {set}:6 <
    {default}; --drafter eagle3 --gamma 4; --drafter eagle3 --tree 4x6:15>
latency_smollm2_amx.jsonl | step
  latency {real} --isa <amx; avx512bf16> --contexts 128 2048 --rows 1,5,16,64 --steps 8
    --repeats 9
contexts.jsonl
  sweep {real} --drafter eagle3,ngram --gamma 4 --context 128,512,2048,6144
    --gen-tokens 64 --prompts {long}:24@0
compare_hf_smollm2.jsonl | comparison
  compare_hf {real} --dtype bfloat16 --lengths 64 128 512 --per-length 1 --gammas 5
    --gen-tokens 96 --repeats 2 --prompts {long}:40@0
ablation.jsonl | head, sweep
  compare_heads --target smollm2 --texts {rollouts} --work {rollouts}/heads
    --heads {heads} --tree none,4x4:15 --context 128,2048
    --gen-tokens 64
    --prompts {long}:8@0 -- --batch 8 --prompts {rollouts}/prompts.jsonl --samples 2
    --length 512
processors.jsonl | cell
  constrained {real} --drafter eagle3 --table --batch 4 --gen-tokens 32
constrained.jsonl | answers, step
  constrained {real} --answers 100 --batch 4
rollouts.jsonl | rollouts
  rollouts {real} --prompts 8 --samples 4 --gen-tokens 64
rollouts_many.jsonl | rollouts
  rollouts --prompts {set}:64 --samples 16 --batch 16 --repeats 1 --gen-tokens 16
compare_llama_cpp_smollm2.jsonl | comparison
  compare_llama_cpp --target smollm2 --llama-bin {llama} --drafter eagle3,ngram
    --gguf {llama}/smollm2-BF16.gguf,{llama}/smollm2-Q8_0.gguf,{llama}/smollm2-Q4_1.gguf
    --gen-tokens 128 --prompts {set}:6 --repeats 1
"""

CERTIFICATES = """
certificates/default.json
  exactness
certificates/drafters_native_bfloat16.json
  exactness --product --drafter ngram,suffix,hybrid,draft-model,oracle --gamma-policy
    fixed,threshold,goodput --batch 1,4 --sampling greedy,sampled --gamma 4 {kind}
    {short}
certificates/trees_native_bfloat16.json
  exactness --product --tree 2x4:7,4x6:15,4x16:31,4x16:63 {drawn} --drafter draft-model
    --gamma-policy fixed {kind} {short}
certificates/full_native_bfloat16.json
  exactness --full --prompts 12 --gen-tokens 256
certificates/gsm8k_native_bfloat16.json
  exactness --prompts {set}:50 --gen-tokens 64 --impl native --dtype bfloat16
certificates/smollm2_native_bfloat16.json
  exactness --target smollm2 --drafter eagle3 --product --tree none,4x6:15 --gamma 4
    {drawn} --gamma-policy fixed {kind} --isa avx2 {short}
certificates/smollm2_native_q8_0.json
  exactness --target smollm2 --weights q8_0 --drafter eagle3 --product
    --tree none,4x6:15 --gamma 4 {drawn} --gamma-policy fixed {kind} --isa avx2 {short}
certificates/smollm2_native_q4_1.json
  exactness --target smollm2 --weights q4_1 --drafter eagle3 --product
    --tree none,4x6:15 --gamma 4 {drawn} --gamma-policy fixed {kind} --isa avx2 {short}
certificates/dspark_native_bfloat16.json
  exactness --drafter dspark --product --tree none,4x6:15 --gamma 4,7 {drawn}
    --gamma-policy fixed {kind} {short}
certificates/dspark_scheduled_native_bfloat16.json
  exactness --drafter dspark --product --gamma 4,7 {drawn} --gamma-policy schedule
    {kind} {short}
certificates/choice_native_bfloat16.json
  exactness --drafter choice --product --gamma 4,7 {drawn} --gamma-policy fixed {kind}
    --isa avx2 {short}
"""

FIGURES = """
figures/drift.svg
  plot {results}/rollouts_drift.jsonl --figure drift --out {results}/figures
figures/speedup.svg
  plot {drawings} --out {results}/figures
figures/sweep_positions.svg
  plot {results}/evaluation.jsonl --figure sweep_positions --where temperature=0.0 --out
    {results}/figures
figures/sweep_contexts.svg
  plot {results}/contexts.jsonl --figure sweep_contexts --out {results}/figures
"""


def steps() -> Iterator[Step]:
    """Yields every step, in order."""
    for of_impl in OF_IMPL:
        yield from _read(SPEEDS, WORDS | of_impl)
    for text in (COMPARISONS, POLICIES, REAL, CERTIFICATES, FIGURES):
        yield from _read(text, WORDS)


def certificates() -> Iterator[Step]:
    """Yields the steps of certificates as a table names them: without the flags of
    `kind` and `short`, and without folders."""
    shorter = {"kind": "", "short": "", "set": "gsm8k/test.jsonl"}
    return _read(CERTIFICATES, WORDS | shorter)


def _read(text: str, words: Mapping[str, str]) -> Iterator[Step]:
    """Yields the steps of a text."""
    for _ in range(2):  # Words may hold words.
        text = re.sub(r"{(\w+)}", lambda m: words.get(m[1], m[0]), text)
    for block in re.split(r"\n(?=\S)", text.strip()):
        first, *lines = re.sub(r"\n    +", " ", block).splitlines()
        file, keep, option = (*map(str.strip, first.split("|")), "", "")[:3]
        yield Step(
            file=file,
            runs=tuple(run for line in lines for run in _each(line.strip())),
            keep=tuple(keep.split(", ")) if keep else (),
            mismatches=option == "mismatches",
        )
