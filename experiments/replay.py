"""How much do drafters, gammas and policies pay on recorded texts, without a target?

A lossless round keeps the drafts that autoregressive decoding would have written, so
its text decides which. Drafters are evaluated on texts that `spec_round.py` wrote, past
stop tokens, in the very loop that runs live. Heads read the target while it runs:
`sweep.py` evaluates them.

    python experiments/spec_round.py --ignore-stop --prompts 50 --out texts.jsonl
    python experiments/replay.py texts.jsonl --drafter ngram,suffix --gamma 2,4

With --round-costs rows also have the expected speed-up, and the regret: how much slower
that is than the best constant gamma in hindsight, of all texts together; and than the
best of the drafters and constant gammas of the run for each text by itself. Texts come
one after the other, as requests of one slot: policies and choices go on with what they
learnt. Exit status: 0 evaluated, 1 the input was unusable.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import (
    cli,
    files,
    flags,
    models,
    policies,
    records,
    results,
    tables,
    terminal,
)
from spec_jax import algorithms, default_gamma, loading
from spec_jax.analysis import metrics
from spec_jax.drafters import choice, each, knowledge, oracle, registry
from spec_jax.engine import checks, forward, protocols, requests as requests_lib
from spec_jax.gamma import costs as costs_lib, policy as policy_lib
from spec_jax.model import decoder, tokenizer
from spec_jax.paging import index
from spec_jax.rules import sampling


SURE = 1e6
"""The logit of a text's own token: no draw's noise lifts another token above it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Prompts with what decoding wrote after them, and how it drew."""

    prompts: list[list[int]]
    generated: list[list[int]]
    about: Mapping[str, Any]  # the summary row of the run

    @property
    def settings(self) -> sampling.SamplingSettings | None:
        """Settings by which the target drew; None: it decoded greedily."""
        made = {name: self.about[name] for name in flags.DRAWS}
        return sampling.make_settings(**made) if made["temperature"] else None

    @property
    def vocab_size(self) -> int:
        """The size of the smallest vocabulary that has all tokens of the texts."""
        return 1 + max(max(ids) for ids in (*self.prompts, *self.generated))

    @property
    def capacity(self) -> int:
        """Positions that the longest text needs, in whole pages."""
        longest = max(map(len, self.prompts)) + self.about["gen_tokens"]
        page_size = self.about["page_size"]
        return index.pages_for(longest, page_size) * page_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A constant gamma, or a policy that chooses one up to `gamma`."""

    gamma: int
    name: str = "fixed"
    policy: policy_lib.GammaPolicy | None = None
    state: policy_lib.State = None  # of the policy, before the first round
    known: knowledge.Knowledge | None = None  # by a choice among drafters


REPLAYED = [name for name in registry.names() if name not in registry.NEED_TARGET]
FLAGS = f"""
    drafters={",".join(REPLAYED)}
    --draft DIR  folder of the draft model (default: that of the embedded pair)
    --gamma TOKENS,...=1,2,4,7  tokens drafted per round: a row for each
    --round-costs T,T,...  what rounds of 0, 1, 2 .. drafts take, in any unit, up to the
        largest gamma
    --lookup-costs T,T,...  the same of drafts that are looked up, in that unit
        (default: --round-costs)
    --gamma-policy POLICY,...  policies that go by these costs, a row for each
    texts FILE  rows of spec_round.py --ignore-stop --out
    [out] one per drafter and gamma, as the table shows them
    """


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Refuses flags of costs without --round-costs."""
    for flag in ("gamma_policy", "lookup_costs"):
        if getattr(args, flag) and not args.round_costs:
            words = "goes by costs: give --round-costs, too"
            parser.error(f"{cli.flag_of(flag)} {words}")


def round_costs(text: str) -> costs_lib.RoundCosts:
    """Parses a list of the times of rounds; the type of a flag."""
    return costs_lib.RoundCosts(round_s=tuple(map(float, text.split(","))))


KINDS = {
    "FILE": pathlib.Path,
    "T,T,...": round_costs,
    "POLICY,...": cli.names(cli.one_of(policies.MEASURED[1:])),
}
parse_args = flags.parser(__doc__, FLAGS, kinds=KINDS, check=check)


def read(path: pathlib.Path) -> Texts:
    """Reads the texts of one run.

    Raises:
      ValueError: the file is not the rows of one run, or a stop token ended its texts.
    """
    again = "give the rows of one run of spec_round.py --ignore-stop --out"
    rows = files.read_rows(path, hint=f"; {again}")
    texts = [row for row in rows if row.get("kind") == "prompt"]
    about = [row for row in rows if row.get("kind") == "summary"]
    is_whole = len(about) == 1 and about[0].get("ignore_stop")
    if not (texts and is_whole and all("prompt_ids" in row for row in texts)):
        raise ValueError(f"{path}: no texts of one run, past stop tokens; {again}")
    return Texts(
        prompts=[row["prompt_ids"] for row in texts],
        generated=[row["plain_ids"] for row in texts],
        about=about[0],
    )


class Config(NamedTuple):
    """The sizes of a model that a replayed text needs."""

    vocab_size: int
    max_position_embeddings: int
    max_rows: int  # of a window


def follow(trace: jax.Array, config: Config, rows: decoder.Rows, forwards: jax.Array):
    """Stands in for the target's forward: the logits of each row choose the text's own
    next token, whichever token the row holds. Counts forwards by their active rows.

    In rows that hold the text, the target would choose the same. No rule reads the rows
    after a draft that differs from the text: no later draft is decided on.
    """
    own = trace.at[rows.positions + 1].get(mode="fill", fill_value=0)
    is_own = jnp.arange(config.vocab_size, dtype=jnp.int32)[None] == own[:, None]
    logits = jnp.where(is_own, jnp.float32(SURE), jnp.float32(0))
    return forwards.at[rows.num_active].add(1), logits


def no_forwards(config: Config, num_slots: int, capacity: int) -> jax.Array:
    """Returns the first counts of `follow`, all 0, `[max_rows + 1] int32`."""
    return jnp.zeros((config.max_rows + 1,), jnp.int32)


def replay(
    texts: Texts, number: int, built: registry.Built, way: Way
) -> tuple[metrics.Counters, np.ndarray, Way]:
    """Replays one prompt by a drafter with its parameters.

    Returns:
      The counters; the forwards that the target would have computed, by the member that
      drafted and by active rows, `[members, gamma_max + 2]`; and the way to replay the
      next text, which keeps what a policy or a choice learnt.
    """
    (drafter, params), prompt = built, texts.prompts[number]
    # All traces have one size, so that no prompt compiles anew.
    trace = checks.text_buffer([*prompt, *texts.generated[number]], texts.capacity)
    vocab_size = protocols.complete(drafter).vocab_size or texts.vocab_size
    target = forward.ForwardTarget(
        forward_rows=follow,
        init_cache=no_forwards,
        config=Config(vocab_size, texts.capacity, drafter.gamma_max + 1),
        slab=drafter.gamma_max + 1,
    )
    algo = algorithms.speculative(target, drafter, policy=way.policy)
    if isinstance(drafter, oracle.Oracle):
        params = oracle.make_trace(trace.tolist())
    both = jnp.asarray(trace), params
    state = algo.init(
        both,
        [prompt],
        max_tokens=len(texts.generated[number]),
        gamma=way.gamma,
        sampling=texts.settings,
        policy_state=way.state,
        capacity=texts.capacity,
        page_size=texts.about["page_size"],
    )
    if way.known is not None:
        known = each.lift(drafter, 1).begun(way.known, 0)
        state = state.replace(memory=state.memory.replace(known=known))
    of_prompt = np.asarray(state.cache.own)
    state = algo.run(both, state)
    slot = requests_lib.slot_of(jax.device_get(state.slots), 0)
    counters = metrics.of_slot(slot, num_tokens=int(slot.length) - len(prompt))
    if policy_lib.keeps_state(way.policy):
        learnt = policy_lib.renewed(way.policy, slot.policy)
        way = dataclasses.replace(way, state=jax.tree.map(jnp.asarray, learnt))
    forwards = (np.asarray(state.cache.own) - of_prompt)[None]
    if isinstance(drafter, choice.Choice):
        plain = forwards.sum()  # Rounds with gamma 0 belong to no member.
        forwards = np.pad(np.asarray(state.memory.known.rounds[0]), ((0, 0), (1, 0)))
        forwards[0, 1] += plain - forwards.sum()
        way = dataclasses.replace(way, known=state.memory.known)
    return counters, forwards, way


def ways_of(args: argparse.Namespace, drafter: Any) -> list[Way]:
    """Returns a way for each gamma and each policy of the flags."""
    ways, most = [Way(gamma=gamma) for gamma in args.gamma], max(args.gamma)
    for name in args.gamma_policy or ():
        costs = costs_lib.highest(costs_of(args, drafter)).upto(most)
        if name == policies.BUDGET:
            chooses = isinstance(drafter, choice.Choice)
            kind = {"looks_up": choice.looks_up(drafter), "chooses": chooses}
            made, state = default_gamma.make(costs, **kind)
        else:
            how = {"gamma": most, "round_s": costs.rising_s}
            made, state = policies.make(name, drafter, **how)
        ways.append(Way(gamma=most, name=name, policy=made, state=state))
    return ways


def costs_of(args: argparse.Namespace, drafter: Any) -> list[costs_lib.RoundCosts]:
    """Returns the costs of a drafter's rounds; for a choice, those of each member."""
    members = drafter.members if isinstance(drafter, choice.Choice) else (drafter,)
    lookup = args.lookup_costs or args.round_costs
    return [lookup if choice.looks_up(m) else args.round_costs for m in members]


def build(args: argparse.Namespace, texts: Texts) -> dict[str, registry.Built]:
    """Returns the drafters by name, as a live run has them; loads no target.

    Raises:
      ValueError: a drafter that reads its target, a draft with fewer tokens than the
        texts have, or a gamma above what a drafter drafts.
    """
    gamma_max, about, vocab_size = max(args.gamma), texts.about, texts.vocab_size

    def load_draft():
        folder = args.draft or loading.EMBEDDED_DRAFT
        how = {"gamma_max": gamma_max, "dtype": about["dtype"], "impl": about["impl"]}
        drafter, params = loading.load_draft(folder, tokenizer.load(folder), **how)
        if drafter.vocab_size < vocab_size:
            raise ValueError(
                f"{folder}: a draft of {drafter.vocab_size} tokens, and the texts have "
                f"token {vocab_size - 1}: give the --draft of {about['target']}"
            )
        return drafter, params

    parts = registry.Parts(
        gamma_max=gamma_max,
        vocab_size=vocab_size,
        load_draft=load_draft,
        draft=args.draft,
        dtype=about["dtype"],
    )
    built = {}
    for name in args.drafter:
        if registry.reads_target(name, args.draft):
            raise ValueError(
                f"--drafter {name} reads its target, which a text does not have: "
                "evaluate it by sweep.py"
            )
        drafter, params = registry.build(name, parts)
        models.check_gamma(name, drafter, gamma_max)
        if args.round_costs and isinstance(drafter, choice.Choice):
            costs = [each.upto(gamma_max) for each in costs_of(args, drafter)]
            params = choice.with_costs(params, costs)
        built[name] = drafter, params
    return built


def row_of(
    texts: Texts,
    done: Sequence[tuple[metrics.Counters, np.ndarray]],
    costs: Sequence[costs_lib.RoundCosts] | None,
) -> dict[str, Any]:
    """Returns the numbers of a row, over all replays of a drafter in one way.

    Args:
      costs: of rounds, by member; None: the row has no `text_s`.
    """
    counted, forwards = zip(*done, strict=True)
    found = {"prompts": len(counted), **metrics.summarise(metrics.total(counted))}
    found.pop("nonfinite_logits")  # A trace has no logits.
    found |= results.by_repetition(texts.generated, counted)
    found["rounds_by_rows"] = np.sum(forwards, axis=(0, 1))
    if costs is not None:
        most = forwards[0].shape[1] - 2
        round_s = np.stack([each.upto(most).rising_s() for each in costs])
        found["text_s"] = [float(np.sum(each[:, 1:] * round_s)) for each in forwards]
    return found


def compare(
    costs: costs_lib.RoundCosts, texts: Texts, rows: Sequence[dict[str, Any]]
) -> None:
    """Adds expected times to rows, and regrets against the best constant gammas."""
    step_s = float(costs.rising_s()[0])
    plain_s = step_s * np.array([len(ids) for ids in texts.generated])
    # A choice varies its gamma, so it is not constant; decoding without drafts is.
    constant = [row for row in rows if row["gamma_policy"] == "fixed"]
    fixed = [row for row in constant if row["drafter"] != "choice"]
    best_s = np.min([plain_s, *(row["text_s"] for row in fixed)], axis=0).sum()
    for row in rows:
        row["expected_s"] = seconds = sum(row["text_s"])
        row["expected_speedup"] = float(plain_s.sum()) / seconds
        own = [r for r in fixed if r["drafter"] == row["drafter"]]
        totals = [sum(other["text_s"]) for other in own or fixed]
        row["regret"] = seconds / min([float(plain_s.sum()), *totals]) - 1
        row["regret_by_text"] = seconds / float(best_s) - 1


def run(args: argparse.Namespace, out: records.JsonLines) -> None:
    """Evaluates the drafters, writes and shows the rows."""
    texts, found = read(args.texts), []
    if args.round_costs:
        args.round_costs.upto(max(args.gamma))  # Raises if there are too few.
    numbers = range(len(texts.prompts))
    names = ("target", "dtype", "impl", "gen_tokens", *flags.DRAWS)
    out.common = {name: texts.about[name] for name in names} | {
        "draft": str(args.draft or "embedded"),
        "texts_sha256": files.sha256(args.texts),
        **records.provenance(),
    }
    for name, built in build(args, texts).items():
        for way in ways_of(args, built[0]):
            done = []
            with terminal.counted(f"{name}, {way.name}", total=len(numbers)) as go:
                for number in numbers:
                    counted, forwards, way = replay(texts, number, built, way)
                    done.append((counted, forwards))
                    go()
            costs = costs_of(args, built[0]) if args.round_costs else None
            row = {"kind": "replay", "drafter": name, "gamma": way.gamma}
            found.append(row | {"gamma_policy": way.name} | row_of(texts, done, costs))
    if args.round_costs:
        compare(args.round_costs, texts, found)
    out.write_all(found)
    columns = COLUMNS | (COSTS if args.round_costs else {})
    tables.print_rows(found, columns)


COLUMNS: dict[str, tables.Column] = {
    "drafter": "",
    "gamma": "d",
    "gamma_policy": "",
    "acceptance": ("acceptance_rate", ".3f"),
    "tokens a round": ("mean_accepted_length", ".2f"),
    "rounds": ",d",
}
COSTS: dict[str, tables.Column] = {
    "expected speed-up": ("expected_speedup", ".2f"),
    "regret": "+.1%",
    "regret by text": ("regret_by_text", "+.1%"),
}

main = records.script("replay.py", parse_args, run)
