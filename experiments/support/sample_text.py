"""The text that a run shows: one prompt, drawn speculatively and by plain decoding."""

import dataclasses

from rich import console as rich_console, text as rich_text

from experiments.support import model_pair, paired_runs, prompt_runs, report
from spec_jax.rules import sampling


SETTINGS = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
"""How the text is drawn where the measured runs are greedy and nothing was asked for:
greedy texts of small models repeat themselves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One generated text.

    Attributes:
      how: the settings that drew it, in words.
      run: the speculative run.
      plain: tokens of plain decoding under the same settings.
      is_measured: whether the metrics count this run.
    """

    prompt_id: str
    prompt_ids: list[int]
    how: str
    run: paired_runs.Speculative
    plain: list[int]
    is_measured: bool

    @property
    def matched(self) -> bool:
        """Whether the text is that of plain decoding."""
        return self.run.tokens == self.plain


def draw(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    first: prompt_runs.PromptResult,
    *,
    seed: int,
) -> Sample:
    """Draws a text for a prompt, by `SETTINGS`, once speculatively and once plainly.

    Args:
      pair: a greedy pair.
      settings: of the measured runs.
      first: the result whose prompt is taken.
    """
    drawn = sampling.make_settings(**SETTINGS, min_p=0.0, seed=seed)
    pair = model_pair.with_sampling(pair, drawn)
    settings = dataclasses.replace(settings, sampling=drawn)
    return Sample(
        prompt_id=first.prompt.id,
        prompt_ids=first.prompt_ids,
        how=describe(**SETTINGS, seed=seed),
        run=paired_runs.run_speculative(pair, settings, first.prompt_ids),
        plain=paired_runs.run_plain(pair, settings, first.prompt_ids).tokens,
        is_measured=False,
    )


def of_measured(first: prompt_runs.PromptResult, *, how: str) -> Sample:
    """The text of a measured run; its settings in words are the caller's."""
    return Sample(
        prompt_id=first.prompt.id,
        prompt_ids=first.prompt_ids,
        how=how,
        run=first.spec[0],
        plain=first.plain[0].tokens,
        is_measured=True,
    )


def describe(
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    seed: int,
) -> str:
    """The settings of a draw in words, those that do nothing left out."""
    if temperature == 0:
        return "greedy"
    words = [f"temperature {temperature:g}"]
    words += [f"top-p {top_p:g}"] if top_p < 1 else []
    words += [f"top-k {top_k}"] if top_k is not None else []
    words += [f"min-p {min_p:g}"] if min_p > 0 else []
    return ", ".join([*words, f"seed {seed}"])


def show(
    sample: Sample, pair: model_pair.ModelPair, console: rich_console.Console
) -> None:
    """Prints a heading, and the text, its tokens told apart by where they came from."""
    heading = rich_text.Text(f"Prompt {sample.prompt_id}: {sample.how}; ", style="bold")
    if sample.matched:
        heading.append("equal to plain decoding")
    else:
        pairs = enumerate(zip(sample.run.tokens, sample.plain, strict=False))
        shorter = min(len(sample.run.tokens), len(sample.plain))
        place = next((i for i, (ours, plain) in pairs if ours != plain), shorter)
        heading.append(f"NOT EQUAL to plain decoding at token {place}", "bold red")
    if not sample.is_measured:
        heading.append(" (the numbers below are of the measured, greedy runs)")
    console.print(heading, soft_wrap=True, highlight=False)
    origins = [report.Origin.PROMPT] * len(sample.prompt_ids)
    pieces = pair.tokenizer.decode_pieces([*sample.prompt_ids, *sample.run.tokens])
    report.sample_text(pieces, [*origins, *sample.run.origins], console)
