"""How fast is decoding compared with Hugging Face's, and are its tokens the same?

The same weights on both sides, in turns, in one process: autoregressive decoding,
drafts of the draft model, if there is one, and drafts looked up in the text. Exit
status: 0 every drafted token of ours is that of our decoding, and in float32 that is
Hugging Face's greedy one; 2 not; 1 the input was unusable.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from experiments.lib import (
    bench,
    cli,
    compare,
    flags,
    models as models_lib,
    processes,
    prompts as prompts_lib,
    records,
    results,
    tables,
    terminal,
)
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.drafters import ngram
from spec_jax.model import hub


EXACT_DTYPE = "float32"
"""The dtype with equal tokens: in bfloat16 two correct libraries round differently."""

THEIRS = "transformers"
THEIR_PLAIN = compare.Run(side=THEIRS, method=compare.PLAIN)
DRAFT_MODEL, PROMPT_LOOKUP = "draft model", "prompt lookup"

MATCHED_NGRAM = 2
"""Most tokens that prompt lookup matches: their own default, made explicit."""


FLAGS = f"""
    [models] target draft impl isa
        --dtype TYPE={EXACT_DTYPE}  dtype of all models
    [runs] raw page-size prompts=50 gen-tokens=32 repeats=3
        --lengths TOKENS+=32,128,512  of the prompts of each class: short, medium, long
        --gammas K,K,...=3,5,7,10  tokens drafted per round, K
        --per-length N=2  prompts of each class
        --ignore-stop  do not end at stop tokens, on either side
    [out] one per prompt as it finishes, one per way to generate, a summary
    """


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Refuses lengths that are not one for each class."""
    args.weights = args.draft_weights = None  # As in each folder.
    if len(args.lengths) != len(prompts_lib.LENGTHS):
        parser.error(f"--lengths: {', '.join(prompts_lib.LENGTHS)} are three numbers")


KINDS = {"TYPE": ("float32", "bfloat16")}
parse_args = flags.parser(__doc__, FLAGS, kinds=KINDS, check=check)


class Theirs(NamedTuple):
    """Hugging Face's models on torch, which decode greedily.

    torch and transformers are imported when they are needed: importing them starts
    pools of threads.
    """

    target: Any  # a causal language model
    draft: Any  # the assistant, where there is one
    description: dict[str, Any]  # versions and threads, for the rows of the results

    @classmethod
    def load(
        cls, target: pathlib.Path, draft: pathlib.Path | None, *, dtype: str
    ) -> "Theirs":
        """Loads the folders in `dtype`, for the kind of device that JAX computes on;
        torch computes on all cores of this process.

        Raises:
          ValueError: a folder that transformers cannot load, or a device that torch
            lacks.
        """
        # Threads of OpenMP spin for a while when their work is done, unless told to
        # sleep: they would take the cores from JAX, and from each other where there
        # are more threads than free cores. torch reads the variable once, when it is
        # loaded.
        wait_policy = None
        if "torch" not in sys.modules:
            wait_policy = os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(processes.usable_cores())
        device = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"JAX computes on a GPU and torch {torch.__version__} finds none; set "
                "JAX_PLATFORMS=cpu, or install a torch that has it"
            )

        how = {"dtype": getattr(torch, dtype), "device": device}
        assistant = draft and _model(draft, **how)
        if assistant is not None:
            # The assistant's own settings decide how much is drafted. Its confidence
            # would end a draft early.
            settings = assistant.generation_config
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0
        described = {
            "torch_version": torch.__version__,
            "transformers_version": transformers.__version__,
            "torch_num_threads": torch.get_num_threads(),
            "omp_wait_policy": wait_policy,
        }
        return cls(_model(target, **how), assistant, described)

    def generate(
        self,
        run: compare.Run,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> list[int]:
        """Returns at most `max_tokens` tokens; a stop token, if any, is the last.

        The draft model ends a draft at a stop token, and prompt lookup proposes what it
        finds: both may draft fewer tokens than `run.gamma`.
        """
        import torch

        options: dict[str, Any] = {}
        if run.method == DRAFT_MODEL:
            self.draft.generation_config.num_assistant_tokens = run.gamma
            options["assistant_model"] = self.draft
        elif run.method == PROMPT_LOOKUP:
            options["prompt_lookup_num_tokens"] = run.gamma
            options["max_matching_ngram_size"] = MATCHED_NGRAM
        ids = torch.tensor([list(prompt)], device=self.target.device)
        with torch.inference_mode():
            output = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                eos_token_id=list(stop_ids) or None,
                **options,
            )
        return output[0, len(prompt) :].tolist()


def _model(folder: pathlib.Path, *, dtype: Any, device: str) -> Any:
    """Loads a model that decodes greedily."""
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        )
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{folder}: transformers cannot load it: {error}") from None
    # Replaces the folder's own settings, which may sample or stop.
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    return model.to(device).eval().requires_grad_(False)


def load(
    args: argparse.Namespace,
) -> tuple[compare.Sides, models_lib.Subject, dict[str, Any]]:
    """Returns both sides, on one kind of device, our side with the prompts of every
    class, and what describes theirs.

    A target that is named without a draft has no draft model. All values of K share one
    slab, because gamma is data.
    """
    cli.require("oracle")
    is_alone = args.target is not None and args.draft is None
    name = "ngram" if is_alone else "draft-model"
    lm = models_lib.load(args, drafter=name, gamma_max=max(args.gammas))
    lengths = dict(zip(prompts_lib.LENGTHS, args.lengths, strict=True))
    how = {"lengths": lengths, "per_length": args.per_length}
    subject = models_lib.prepare(args, lm, args.prompts, **how)
    settings = subject.settings
    limits = {"max_tokens": settings.gen_tokens, "stop_ids": settings.stop_ids}
    # This drafter makes the same drafts as Hugging Face's prompt lookup.
    sizes = {"gamma_max": settings.gamma, "n_max": MATCHED_NGRAM}
    lookup = ngram.hugging_face(**sizes, stop_ids=settings.stop_ids)
    lms = {} if is_alone else {DRAFT_MODEL: lm}
    lms[PROMPT_LOOKUP] = lm.with_drafter(lookup)
    draft = None if is_alone else args.draft or loading.EMBEDDED_DRAFT
    with tempfile.TemporaryDirectory() as name:
        target = hub.locate(args.target or loading.EMBEDDED_TARGET)
        if not target.is_dir():  # `Theirs` reads folders, no files.
            target = pathlib.Path(name)
            lm.save(target)
        theirs = Theirs.load(target, draft, dtype=args.dtype)

    def generate(run: compare.Run, prompt: list[int]) -> compare.Generated:
        started = time.perf_counter()
        tokens = theirs.generate(run, prompt, **limits)
        seconds = time.perf_counter() - started
        return compare.Generated(count=len(tokens), ids=tokens, decode_s=seconds)

    own = {"lms": lms, "settings": settings}
    sides = compare.Sides(**own, program=THEIRS, theirs=generate)
    return sides, subject, theirs.description


def row_of(prompts: Sequence[compare.PromptRuns], run: compare.Run) -> dict[str, Any]:
    """Returns the row of a run, over the prompts of a class of lengths.

    `tok_s` is the tokens per second of all prompts of a repeat: the median over the
    repeats, with percentiles. `vs_hf` is how many times faster a token is than in
    Hugging Face's greedy decoding in the same turn; `vs_plain`, than in its side's own.
    """
    own, ratios = compare.per_token(prompts, run), {}
    for name, side in (("vs_plain", run.side), ("vs_hf", THEIRS)):
        plain = compare.Run(side=side, method=compare.PLAIN)
        found = bench.ratios(compare.per_token(prompts, plain), own)
        ratios |= bench.spread_fields(name, found)
    differences = [prompt.first_difference(run) for prompt in prompts]
    counters = compare.counted(prompts, run)
    rate = counters and metrics.ratio(counters.accepted, counters.proposed)
    return {
        "kind": "comparison",
        "length": prompts[0].prompt.category,
        "prompt_tokens": [len(one.prompt.ids) for one in prompts],
        **dataclasses.asdict(run),
        **bench.spread_fields("tok_s", [1 / seconds for seconds in own]),
        **ratios,
        # None for runs without drafts, and for theirs, whose drafts are not counted.
        **compare.drafts(counters),
        "accepted_hist": counters and counters.accepted_hist,
        "acceptance_rate": rate,
        "repetition": results.mean_repetition([p.every[run][0].ids for p in prompts]),
        "identical": differences.count(None),
        "prompts": len(prompts),
        "n": len(own),
    }


COLUMNS = {
    "run": lambda row: f"{row['side']} {row['method']}",
    "K": ("gamma", "d"),
    "tok/s": ("tok_s", ",.1f"),
    "p10": ("tok_s_p10", ",.1f"),
    "p90": ("tok_s_p90", ",.1f"),
    "vs plain": ("vs_plain", ".2f"),
    "vs HF": ("vs_hf", ".2f"),
    "accepted": ("acceptance_rate", ".3f"),
    "rep": ("repetition", ".3f"),
    "same": ("identical", "d"),
}
"""The columns of the table, for `tables.print_rows`."""

NOTE = (
    "tok/s: prefill included, median and percentiles over the turns; vs plain, HF: "
    "times autoregressive decoding of that side, and Hugging Face's; accepted: of the "
    "proposed; rep: share of repeated 4-grams in the texts; same: prompts of which "
    "every token is that of Hugging Face's greedy decoding in this dtype"
)


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Loads models, measures, writes and prints rows; returns whether all is well."""
    sides, subject, described = load(args)
    out.common = models_lib.common(args, sides.settings.lm) | {
        "stop_ids": sides.settings.stop_ids,
        "matched_ngram": MATCHED_NGRAM,
        "hf": described,
    }
    ways = sides.ways(args.gammas)
    how = {"reference": THEIR_PLAIN, "repeats": args.repeats}
    done = compare.run_prompts(sides, ways, subject, out, **how)
    for length in dict.fromkeys(one.prompt.category for one in done):
        of_length = [one for one in done if one.prompt.category == length]
        compared = [row_of(of_length, way) for way in ways]
        out.write_all(compared)
        lengths = sorted({*compared[0]["prompt_tokens"]})
        tokens = " and ".join(map(str, lengths))
        title = f"{length}: {len(of_length)} x {tokens} tokens"
        tables.print_rows(compared, COLUMNS, title=title)
    tables.print_note(NOTE)
    same = [one.first_difference(compare.OUR_PLAIN) is None for one in done]
    matched = all(one.matched for one in done)
    out.write(
        {
            "kind": "summary",
            "prompts": len(done),
            "gen_tokens": args.gen_tokens,
            "compared_dtype": args.dtype,
            "greedy_identical": sum(same),
            "matched": matched,
            "nonfinite_logits": sum(one.nonfinite for one in done),
        }
    )
    terminal.show(
        f"{args.dtype}: {sum(same)} of {len(done)} prompts as Hugging Face's greedy "
        f"decoding; drafted as without drafts: {str(matched).lower()}"
    )
    return matched and (all(same) or args.dtype != EXACT_DTYPE)


main = records.script("compare_hf.py", parse_args, run)
