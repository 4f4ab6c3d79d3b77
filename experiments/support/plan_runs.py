"""Several designs on the same prompts, in turn with one plain decoding."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

from experiments.support import model_pair, paired_runs, prompt_files, prompt_runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Design:
    """A way to speculate; all designs of a comparison have the same target."""

    pair: model_pair.ModelPair
    settings: paired_runs.Settings


Results = dict[Hashable, list[prompt_runs.PromptResult]]
"""The results of each design, in the order of the prompts."""


def load_pairs(
    names: Sequence[str], load: Callable[[str], model_pair.ModelPair]
) -> dict[str, model_pair.ModelPair]:
    """The pairs of several drafters, with one copy of the target's weights.

    Args:
      names: of drafters.
      load: loads the pair of one.
    """
    pairs: dict[str, model_pair.ModelPair] = {}
    for name in names:
        pair = load(name)
        if pairs:
            target_params = next(iter(pairs.values())).params[0]
            pair = dataclasses.replace(pair, params=(target_params, pair.params[1]))
        pairs[name] = pair
    return pairs


def run(
    designs: Mapping[Hashable, Design],
    prompts: Sequence[prompt_files.Prompt],
    ids: Sequence[list[int]],
    *,
    repeats: int,
    after_prompt: Callable[[], None] = lambda: None,
) -> Results:
    """Plain decoding and every design in turn, `repeats` times each prompt."""
    results: Results = {name: [] for name in designs}
    first = next(iter(designs.values()))
    for prompt, prompt_ids in zip(prompts, ids, strict=True):
        plain = []
        spec: dict[Hashable, list[paired_runs.Speculative]] = {n: [] for n in designs}
        for _ in range(repeats):
            plain.append(paired_runs.run_plain(first.pair, first.settings, prompt_ids))
            for name, design in designs.items():
                spec[name].append(
                    paired_runs.run_speculative(
                        design.pair, design.settings, prompt_ids
                    )
                )
        # One replay of each text: that of a matched run is the same for all.
        replays: dict[tuple[int, ...], int] = {}
        for name, design in designs.items():
            text = tuple(spec[name][0].tokens)
            if text not in replays:
                replays[text] = prompt_runs.mismatches_of(
                    design.pair, design.settings, prompt_ids, spec[name][0]
                )
            results[name].append(
                prompt_runs.PromptResult(
                    prompt=prompt,
                    prompt_ids=prompt_ids,
                    plain=plain,
                    spec=spec[name],
                    mismatches=replays[text],
                )
            )
        after_prompt()
    return results
