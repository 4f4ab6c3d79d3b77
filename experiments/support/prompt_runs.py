"""A prompt's runs, plain and speculative in turn, and what they show together."""

import dataclasses
from collections.abc import Iterable, Sequence

from experiments.support import model_pair, paired_runs, prompt_files
from spec_jax import session
from spec_jax.analysis import metrics
from spec_jax.model import config as config_lib
from spec_jax.paging import index
from spec_jax.rules import sampling as sampling_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """One prompt: what both runs produced, and `repeats` times of each.

    Attributes:
      mismatches: verified positions with another argmax than decoding's.
      reference: the tokens to match where they are not those of `plain`: a design
        that is timed against our decoding, and judged by a decoding of its own.
    """

    prompt: prompt_files.Prompt
    prompt_ids: list[int]
    plain: list[paired_runs.Plain]
    spec: list[paired_runs.Speculative]
    mismatches: int
    reference: list[int] | None = None

    @property
    def matched(self) -> bool:
        """Whether every run of either kind produced the same tokens.

        Tokens that were chosen from logits that are not finite match nothing.
        """
        if self.nonfinite:
            return False
        if self.reference is not None:
            return all(run.tokens == self.reference for run in self.spec)
        reference = self.plain[0].tokens
        return all(run.tokens == reference for run in (*self.plain, *self.spec))

    @property
    def text(self) -> metrics.TextCounts:
        """What was counted of the first speculative run's text."""
        return metrics.text_counts(self.spec[0].tokens, self.spec[0].counters)

    @property
    def nonfinite(self) -> int:
        """The most tokens of a run that were chosen from logits that are not finite."""
        plain = [run.nonfinite for run in self.plain]
        return max(plain + [run.counters.nonfinite for run in self.spec])

    def row(self) -> dict:
        """The JSON line."""
        counters = self.spec[0].counters
        summary = metrics.summarise(
            counters,
            prompts=1,
            texts=[self.text],
            matched=None,
            verify_decode_mismatches=None,
        )
        return {
            "kind": "prompt",
            "id": self.prompt.id,
            "category": self.prompt.category,
            "prompt_tokens": len(self.prompt_ids),
            "tokens": counters.tokens,
            "matched": self.matched,
            "verify_decode_mismatches": self.mismatches,
            "nonfinite_logits": self.nonfinite,
            "rounds": counters.rounds,
            "proposed": counters.proposed,
            "accepted": counters.accepted,
            "acceptance_rate": summary["acceptance_rate"],
            "repetition": summary["repetition"],
            "accepted_hist": counters.accepted_hist,
            "baseline_e2e_s": [run.timing.e2e_s for run in self.plain],
            "spec_e2e_s": [run.timing.e2e_s for run in self.spec],
            "plain_ids": self.plain[0].tokens,
            "spec_ids": self.spec[0].tokens,
        }


def run_prompt(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    prompt: prompt_files.Prompt,
    prompt_ids: list[int],
    *,
    repeats: int,
) -> PromptResult:
    """Plain and speculative in turn, `repeats` times, then the replay."""
    plain, spec = [], []
    for _ in range(repeats):
        plain.append(paired_runs.run_plain(pair, settings, prompt_ids))
        spec.append(paired_runs.run_speculative(pair, settings, prompt_ids))
    return PromptResult(
        prompt=prompt,
        prompt_ids=prompt_ids,
        plain=plain,
        spec=spec,
        mismatches=mismatches_of(pair, settings, prompt_ids, spec[0]),
    )


def mismatches_of(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    prompt_ids: list[int],
    run: paired_runs.Speculative,
) -> int:
    """What the run counted on its way, or what a replay of its text finds."""
    if run.mismatches is not None:
        return run.mismatches
    return paired_runs.count_mismatches(pair, settings, prompt_ids, run.tokens)


NO_CATEGORY = "none"
"""What the prompts are called that have no category, beside others that do."""

JOINT = "\n\n"
"""Between the messages of a conversation where there is no chat template."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Prompts of one turn each, ready to run.

    Attributes:
      ids: the tokens of each.
      capacity: positions of a cache that fits the longest: whole pages.
    """

    prompts: list[prompt_files.Prompt]
    ids: list[list[int]]
    capacity: int


def prepare(
    pair: model_pair.ModelPair,
    prompts: Sequence[prompt_files.Prompt],
    *,
    raw: bool,
    gen_tokens: int,
    page_size: int,
    sampling: sampling_lib.SamplingSettings | None = None,
) -> Prepared:
    """Makes every turn of every conversation a prompt, and encodes them all.

    A turn's prompt holds the turns before it and their answers: what the target's
    plain decoding writes here, before any clock runs, up to a stop token or
    `gen_tokens`. So all that is run on these prompts answers the same text.

    Args:
      raw: leave out the chat template.
      sampling: of the answers; None is greedy.

    Raises:
      ValueError: a prompt that is empty, or too long for the model's positions.
      MemoryError: out of pages.
    """
    sizes = {"gen_tokens": gen_tokens, "page_size": page_size}
    stop_ids = pair.tokenizer.stop_ids
    turns = [[_numbered(prompt, 1)] for prompt in prompts]
    while True:
        open_turns = [of_one for of_one in turns if of_one[-1].next_turns]
        if not open_turns:
            break
        asked = [of_one[-1] for of_one in open_turns]
        ids = encode(pair, asked, raw=raw)
        settings = paired_runs.Settings(
            gamma=1,
            capacity=capacity_for(pair, asked, ids, **sizes),
            stop_ids=stop_ids,
            sampling=sampling,
            **sizes,
        )
        for of_one, prompt_ids in zip(open_turns, ids, strict=True):
            answer = paired_runs.run_plain(pair, settings, prompt_ids).tokens
            if answer and answer[-1] in stop_ids:
                answer.pop()
            of_one.append(_next(of_one[-1], pair.tokenizer.decode(answer), len(of_one)))
    flat = [prompt for of_one in turns for prompt in of_one]
    ids = encode(pair, flat, raw=raw)
    capacity = capacity_for(pair, flat, ids, **sizes)
    return Prepared(prompts=flat, ids=ids, capacity=capacity)


def _numbered(prompt: prompt_files.Prompt, turn: int) -> prompt_files.Prompt:
    """The prompt under the name of its turn, if it is one of several."""
    if not prompt.next_turns:
        return prompt
    return dataclasses.replace(prompt, id=f"{prompt.id} turn {turn}")


def _next(prompt: prompt_files.Prompt, answer: str, turn: int) -> prompt_files.Prompt:
    """The turn after an answer to turn number `turn`."""
    text, *rest = prompt.next_turns
    name = prompt.id.removesuffix(f" turn {turn}")
    return dataclasses.replace(
        prompt,
        id=f"{name} turn {turn + 1}",
        text=text,
        history=(*prompt.messages, {"role": "assistant", "content": answer}),
        next_turns=tuple(rest),
    )


def encode(
    pair: model_pair.ModelPair, prompts: Sequence[prompt_files.Prompt], *, raw: bool
) -> list[list[int]]:
    """Token ids; through the chat template where the model has one.

    Without one, the messages of a conversation are joined by `JOINT`. Turns that come
    after an answer are left out: `prepare` makes prompts of them.
    """
    tokenizer = pair.tokenizer
    use_chat = tokenizer.has_chat_template and not raw
    texts = [
        tokenizer.apply_chat(prompt.messages)
        if use_chat
        else JOINT.join(message["content"] for message in prompt.messages)
        for prompt in prompts
    ]
    return [tokenizer.encode(text) for text in texts]


def check_lengths(
    config: config_lib.Qwen3Config,
    prompts: Iterable[tuple[str, list[int]]],
    *,
    gen_tokens: int,
    page_size: int,
) -> None:
    """Raises `ValueError` for what the model's positions do not hold.

    Args:
      prompts: what messages call each, and its ids.
    """
    positions = config.max_position_embeddings
    for flag, value, most in (
        ("--gen-tokens", gen_tokens, positions - 1),
        ("--page-size", page_size, positions),
    ):
        if value > most:
            raise ValueError(
                f"{flag} {value} is above {most}: the model has {positions} positions "
                "(max_position_embeddings) for a prompt and what follows"
            )
    for name, ids in prompts:
        if len(ids) > positions - gen_tokens:
            raise ValueError(
                f"{name} has {len(ids)} tokens, and {gen_tokens} are to come: the "
                f"model has {positions} positions (max_position_embeddings). Shorten "
                f"the prompt to {positions - gen_tokens}, or --gen-tokens to "
                f"{max(positions - len(ids), 0)}"
            )
        session.check_prompt(
            ids, vocab_size=config.vocab_size, capacity=positions, what=name
        )


def capacity_for(
    pair: model_pair.ModelPair,
    prompts: Sequence[prompt_files.Prompt],
    ids: Sequence[list[int]],
    *,
    gen_tokens: int,
    page_size: int,
) -> int:
    """Positions of a cache that fits the longest prompt: whole pages.

    Raises:
      ValueError: as `check_lengths`.
    """
    names = [f"prompt {prompt.id!r}" for prompt in prompts]
    check_lengths(
        pair.target.config,
        zip(names, ids, strict=True),
        gen_tokens=gen_tokens,
        page_size=page_size,
    )
    longest = max(len(prompt_ids) for prompt_ids in ids)
    return index.pages_for(longest + gen_tokens, page_size) * page_size


def summarise(results: Sequence[PromptResult]) -> metrics.Metrics:
    """The metric dictionary of finished prompts."""
    return metrics.summarise(
        metrics.total(result.spec[0].counters for result in results),
        prompts=len(results),
        texts=[result.text for result in results],
        baseline=_by_repeat([result.plain for result in results]),
        spec=_by_repeat([result.spec for result in results]),
        matched=all(result.matched for result in results),
        verify_decode_mismatches=sum(result.mismatches for result in results),
    )


def by_category(results: Sequence[PromptResult]) -> dict[str, metrics.Metrics]:
    """Summarises each category apart; empty unless there are several."""
    grouped: dict[str, list[PromptResult]] = {}
    for result in results:
        grouped.setdefault(result.prompt.category or NO_CATEGORY, []).append(result)
    if len(grouped) < 2:
        return {}
    return {name: summarise(of_one) for name, of_one in sorted(grouped.items())}


def _by_repeat(runs: list[list]) -> list[list[metrics.Timing]]:
    """`[prompt][repeat]` runs as `[repeat][prompt]` timings."""
    return [[run.timing for run in repeat] for repeat in zip(*runs, strict=True)]
