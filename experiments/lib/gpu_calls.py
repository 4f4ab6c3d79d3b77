"""What `gpu_report.py` calls: scripts and their flags, the most telling first."""

import dataclasses
import re
import shlex

from spec_jax.pallas import early_launch


SECTIONS = {
    "0": "first light",
    "a": "rows",
    "b": "kernels",
    "c": "steps",
    "d": "rounds",
    "e": "transformers",
    "f": "compile",
}

DEVICE = "gpu"

ON_EITHER_DEVICE = ("kernels", "latency", "compare_hf")
"""Scripts that take `--device`."""

ANEW = "anew"
"""A mark of a call that takes nothing that another one compiled."""

HALF = "half"
"""A mark of a call that leaves half of the GPU's memory to torch."""

XLA_FLAGS = "--xla_enable_command_buffers_during_profiling=true"
"""Of every call: a trace is to show the launches that are timed."""

# Section, seconds, name, command; then flags of XLA, variables, or a mark. Until a call
# measures anything 8 to 25 s go by (H200, jax 0.11).
_CALLS = """
0 | 20 | a step 0.6b | {small} --contexts 128 --repeats 3 --trace {out}/trace
c | 70 | steps 8b | {large} {all} --trace {out}/trace
c | 50 | steps 0.6b | {small} {all}
d | 35 | rounds gamma 4 | {large} {forced} --gammas 4
d | 30 | rounds gamma 2 | {large} {forced} --gammas 2
d | 40 | rounds of the embedded pair | spec_round --prompts 5 --impl {pair}
a | 85 | exactness | exactness --prompts 4 --gen-tokens 32 --gamma 4 --impl {pair}
a | 95 | rows of kernels 0.6b | {kernels_0.6b} --check rows {checked} | anew
e | 110 | transformers 8b | {compared} --impl {impl} {presets} {one} | half
a | 130 | rows of kernels 8b | {kernels_8b} --check rows {checked}
0 | 30 | each kernel once 0.6b | {kernels_0.6b} --check once --contexts 128
a | 30 | each kernel once 8b | {kernels_8b} --check once --contexts 300 | anew
c | 90 | long contexts and prompts 8b | {large} {long}
b | 45 | kernels 8b | {kernels_8b} {turns} --rows 1,5,16,32,64
b | 40 | kernels 0.6b | {kernels_0.6b} {turns} --rows 1,5,16,32,64
b | 90 | plans 8b | {kernels_8b} {turns} --rows 5 {plans} {products}
b | 80 | plans 0.6b | {kernels_0.6b} {turns} --rows 5 {plans} {products}
b | 60 | plans of attention 8b | {kernels_8b} {turns} --rows 5 {plans} {attention}
c | 70 | steps 8b, {other} | {large_other} {all} --trace {out}/trace-{other}
c | 50 | steps 0.6b, {other} | {small_other} {all}
c | 25 | no early launch 0.6b | {small} {brief} | {not_early}
c | 35 | no early launch 8b | {large} {brief} | {not_early}
c | 35 | no early launch 8b, {other} | {large_other} {brief} | {not_early}
c | 25 | no programmatic launch 0.6b | {small} {brief} | {no_pdl}
c | 35 | no programmatic launch 8b | {large} {brief} | {no_pdl}
c | 25 | loops in command buffers 0.6b | {small} {brief} | {loops}
c | 35 | loops in command buffers 8b | {large} {brief} | {loops}
c | 35 | sampling 8b | {large} {brief} --temperature 0.7 --top-k 20 --top-p 0.8
d | 40 | rounds gamma 4, {other} | {large_other} {forced} --gammas 4
d | 30 | rounds gamma 1 | {large} {forced} --gammas 1
d | 30 | rounds gamma 3 | {large} {forced} --gammas 3
d | 30 | rounds gamma 5 | {large} {forced} --gammas 5
d | 30 | rounds gamma 6 | {large} {forced} --gammas 6
d | 30 | rounds gamma 7 | {large} {forced} --gammas 7
e | 60 | transformers, embedded pair | {compared} --impl {pair} | half
f | 45 | compile 8b | {large} --dry-run --contexts 128 32768 | anew
"""

_WORDS = {
    "kernels_8b": "kernels --shapes qwen3-8b",
    "kernels_0.6b": "kernels --shapes qwen3-0.6b",
    "presets": "--preset qwen3-8b --draft-preset qwen3-0.6b",
    "large": "latency {presets} --steps 64 --impl {impl}",
    "small": "latency --preset qwen3-0.6b --steps 64 --impl {impl}",
    "large_other": "latency {presets} --steps 64 --impl {other}",
    "small_other": "latency --preset qwen3-0.6b --steps 64 --impl {other}",
    "compared": "compare_hf --gammas 4 --lengths 32 128 512 --no-memory",
    "one": "--dtype bfloat16 --per-length 1",
    "checked": "--contexts 300,4096,16384",
    "products": "--only '^(qkv|att|gate|down|head)'",
    "attention": "--contexts 128,16384 --only context",
    "brief": "--repeats 10 --contexts 128 --rows 1,5",
    "no_pdl": "--xla_gpu_enable_pdl=false",
    "not_early": f"{early_launch.VARIABLE}=0",
    "loops": "--xla_gpu_enable_command_buffer=+WHILE",
    "turns": "--repeats 20",
    "plans": "--plans 12",
    "all": "--repeats 10 --contexts 128 4096 --rows 1,5,8",
    "long": "--repeats 10 --contexts 1024 16384 32768 --rows 1,5 "
    "--prefill 128,1024,4096",
    "forced": "--no-steps --contexts 128 --forced 0.39,0.6,0.8 --gen-tokens 128 "
    "--repeats 5",
}
_QUICK = {
    "turns": "--repeats 5",
    "plans": "--plans 4",
    "all": "--repeats 5 --contexts 128 16384 --rows 1,2,5,8 --prefill 1024",
    "forced": "--no-steps --contexts 128 --forced 0.39,0.6 --gen-tokens 48 --repeats 3",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A script with its flags."""

    section: str
    name: str  # unique
    script: str
    arguments: tuple[str, ...]  # `{out}` in them is the folder of the report
    seconds: float  # that it needs; it may have more where others leave it
    xla_flags: str = ""  # besides those that are set
    variables: tuple[str, ...] = ()  # of the environment: NAME=VALUE
    marks: tuple[str, ...] = ()  # `ANEW` and `HALF`

    @property
    def file(self) -> str:
        """The name of its files, without a suffix."""
        return f"{self.section}-{re.sub('[^a-z0-9.]+', '-', self.name)}"

    @property
    def can_dry_run(self) -> bool:
        """Whether it compiles programs that no other call does, without weights."""
        is_ours = self.script in ("kernels", "latency")
        is_other = self.xla_flags or self.variables or "--no-steps" in self.arguments
        return is_ours and not is_other


def all_calls(*, impl: str, quick: bool) -> list[Call]:
    """Every call of the report, in order.

    Args:
      impl: of steps and rounds; another of ours is measured beside it. Mosaic's take
        no heads as small as those of the embedded pair.
      quick: fewer repeats, plans, contexts and rates.
    """
    words = _WORDS | {"impl": impl} | (_QUICK if quick else {})
    words["other"] = "triton" if impl == "mosaic" else "mosaic"
    words["pair"] = "triton" if impl == "mosaic" else impl
    calls = []
    for line in _CALLS.strip().splitlines():
        for _ in range(3):  # Words that hold words.
            line = re.sub(r"{([\w.]+)}", lambda m: words.get(m[1], m[0]), line)
        section, seconds, name, command, *special = map(str.strip, line.split(" | "))
        script, *arguments = shlex.split(command)
        words_of = " ".join(special).split()
        marks = tuple(word for word in words_of if word in (ANEW, HALF))
        xla_flags = " ".join(word for word in words_of if word.startswith("--"))
        variables = tuple(w for w in words_of if w not in marks and w[0] != "-")
        calls.append(
            Call(
                section=section,
                name=name,
                script=script,
                arguments=tuple(arguments),
                seconds=float(seconds),
                xla_flags=xla_flags,
                variables=variables,
                marks=marks,
            )
        )
    return calls
