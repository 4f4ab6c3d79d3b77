"""What makes a drafter's scores and confidences chances?

Decodes each prompt with the target alone, greedily and by each --temperature, runs the
draft model over the text, and fits tau to the tokens that the target wrote; where it
drew them the draft's weights include the noise of that draw, as in a search for a
tree. Prints one row a temperature, with the shares of tokens among the draft's first 1,
2, 4 and 8 children. With --gamma it runs rounds, too, and fits a temperature and a
shift for the confidence of each draft, so that their products are the chances a prefix
is kept. Half of the prompts fit; nats, errors of calibration and ROC-AUC are of the
other half.
Exit status: 0 fitted, 2 logits are not finite, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import (
    confidences,
    flags,
    models,
    prompt_files,
    records,
    runs,
    tables,
    terminal,
)
from spec_jax import loading
from spec_jax.analysis import calibration
from spec_jax.drafters import draft_model
from spec_jax.model import sequence
from spec_jax.rules import sampling


FITTED = 0
CHILDREN = (1, 2, 4, 8)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unusable ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add_models(parser.add_argument_group("models"))
    runs_group = parser.add_argument_group("texts")
    flags.add_prompts(runs_group, default="50")
    flags.add_gen_tokens(runs_group, default=64)
    flags.add_page_size(runs_group)
    flags.add_raw(runs_group)
    cli.add(
        runs_group,
        """
        --temperature T,...=0,0.7,1  of the target's draws; 0 is greedy
        --seed I=0  of the draws
        --gamma TOKENS  drafts a round whose confidences are calibrated (default: none)
        """,
        **{"T,...": flags.temperatures},
    )
    flags.add_drafter(runs_group)
    flags.add_out(parser, rows="one per temperature, of scores and of confidences")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    if args.gamma is None and args.drafter != "draft-model":
        parser.error(
            f"--drafter {args.drafter} has no tau: give --gamma, of confidences"
        )
    return args


def fit(subject: models.Subject, temperature: float, *, seed: int) -> dict[str, Any]:
    """Returns the row of a temperature."""
    lm, settings = subject.lm, None
    if temperature:
        settings = sampling.make_settings(temperature=temperature, seed=seed)
    run = dataclasses.replace(subject.settings, sampling=settings)
    taus = np.asarray(calibration.TAUS, np.float32)
    sums, tokens = np.zeros((2, len(taus))), np.zeros(2, int)
    ranks: list[np.ndarray] = []
    for number, prompt in enumerate(subject.ids):
        written = runs.write(lm, run, prompt)
        text = [*prompt, *written]
        found, at = _along(lm, settings, jnp.asarray(taus), text, len(prompt))
        sums[number % 2] += np.asarray(found, np.float64)
        tokens[number % 2] += len(written)
        ranks.append(np.asarray(at))
    half = calibration.fit(sums[0], taus, num_tokens=int(tokens[0]))
    other = sums[1] / max(1, tokens[1])
    every = np.concatenate(ranks)
    row = {"kind": "fitted_scores", "temperature": temperature, "tau": half.tau}
    row |= {
        "tokens": int(tokens.sum()),
        "nats": float(other[taus == np.float32(half.tau)][0]),
        "nats_at_tau_1": float(np.interp(1.0, taus, other)),
        "is_inside": half.is_inside,
    }
    return row | {f"first_{n}": float(np.mean(every < n)) for n in CHILDREN}


def _along(lm: loading.LanguageModel, settings, taus, text: list[int], start: int):
    """The likelihoods of a text from `start` on, and the ranks of its tokens."""
    # Few lengths, so that few programs are compiled; what is behind changes nothing.
    padded = np.zeros(-(-len(text) // 64) * 64, np.int32)
    padded[: len(text)] = text
    return _score(
        lm.drafter.model.config,
        lm.drafter_params,
        jnp.asarray(padded),
        settings,
        taus,
        first=jnp.int32(start),
        count=len(text) - start,
    )


@functools.partial(jax.jit, static_argnames=("config", "count"))
def _score(config, params, text, settings, taus, *, first, count):
    """As `_along`, of a padded text of which `count` tokens from `first` on count."""
    logits = sequence.logits(params, config, text[None])[0]
    rows = jax.lax.dynamic_slice_in_dim(logits, first - 1, count)
    tokens = jax.lax.dynamic_slice_in_dim(text, first, count)
    if settings is not None:
        positions = first + jnp.arange(count, dtype=jnp.int32)
        noisy = lambda row: sampling.noisy_weights(row[0], settings, row[1])
        rows = jax.lax.map(noisy, (rows, positions))
    likelihoods = calibration.negative_log_likelihood(rows, tokens, taus)
    return likelihoods, calibration.ranks(rows, tokens)


def run(args: argparse.Namespace) -> int:
    """Fits and shows all temperatures; returns the exit status."""
    console = terminal.console()
    lm = models.load(args, drafter=args.drafter, gamma_max=args.gamma or 1)
    # A head is no model of a text alone.
    scores = type(lm.drafter) is draft_model.DraftModel
    subject = models.prepare(args, lm, args.prompts)
    confidences.check_prompts(subject)
    models.announce(args, subject, console)
    rows: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    with records.open_out(args) as out:
        about = models.describe(args, lm) | {"prompts": len(subject.ids)}
        about |= {"drafter": args.drafter}
        about |= {"drafter_sha256": models.drafter_sha256(lm)}
        about |= {"prompt_source": prompt_files.without_folders(args.prompts)}
        about |= records.provenance()
        for temperature in args.temperature:
            if scores:
                found = fit(subject, temperature, seed=args.seed)
                rows.append(about | found)
                out.write(rows[-1])
            if args.gamma:
                found = confidences.fit(subject, temperature, seed=args.seed)
                out.write(about | found)
                lines += confidences.by_draft(found)
    shares = {f"first {n}": (f"first_{n}", ".2f") for n in CHILDREN}
    columns = {"temperature": "g", "tau": ".2f", "nats": ".3f"}
    columns |= {"at tau 1": ("nats_at_tau_1", ".3f"), **shares}
    if rows:
        tables.print_rows(rows, columns, console)
    if lines:
        tables.print_rows(lines, confidences.COLUMNS, console)
    return FITTED


main = cli.script("fit_scores.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
