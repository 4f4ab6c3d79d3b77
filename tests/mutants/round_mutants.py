"""Faults of the rounds: what is drafted, accepted, committed, cut and counted."""

from mutant import Mutant


_ROUND = "spec_jax.rounds:run_round"
_COMMIT = "spec_jax.rounds:commit_verdict"
_COUNT = "spec_jax.rounds:_count"
_TEACH = "spec_jax.rounds:teach_policy"
_ACCEPT = "spec_jax.acceptance:accept_exact"
_DRAFT_COMMIT = "spec_jax.drafters.draft_model:DraftModel.commit"
_STATE = "spec_jax.session:check_state"
_METRICS = "spec_jax.metrics:_counted"

ROUNDS = (
    Mutant(
        name="a window runs past the limit",
        where=_ROUND,
        old="state.limit - n - 1",
        new="state.limit - n",
        caught_by=("limit",),
    ),
    Mutant(
        name="the token before the pending one is verified",
        where=_ROUND,
        old="state.tokens[n - 1][None]",
        new="state.tokens[n - 2][None]",
        caught_by=("mixed drafts",),
    ),
    Mutant(
        name="the target's cache is cut one short",
        where=_ROUND,
        old="target.truncate(cache, state.length - 1)",
        new="target.truncate(cache, state.length - 2)",
        caught_by=("mixed drafts",),
    ),
    Mutant(
        name="the target's cache is cut one long",
        where=_ROUND,
        old="target.truncate(cache, state.length - 1)",
        new="target.truncate(cache, state.length)",
        caught_by=("mixed drafts",),
    ),
    Mutant(
        name="the target's cache is not cut",
        where=_ROUND,
        old="target.truncate(cache, state.length - 1)",
        new="cache",
        caught_by=("mixed drafts",),
    ),
    Mutant(
        name="a stop token is ignored inside a window",
        where=_COMMIT,
        old="jnp.argmax(is_stop) + 1",
        new="verdict.num_accepted + 1",
        caught_by=("stop tokens",),
    ),
    Mutant(
        name="the stop token itself is lost",
        where=_COMMIT,
        old="jnp.argmax(is_stop) + 1",
        new="jnp.argmax(is_stop)",
        caught_by=("stop tokens",),
    ),
    Mutant(
        name="a stop token does not end the sequence",
        where=_COMMIT,
        old="starved | jnp.any(is_stop) |",
        new="starved |",
        caught_by=("stop tokens",),
    ),
    Mutant(
        name="padding is taken for a stop token",
        where=_COMMIT,
        old="is_stop & (offsets <= verdict.num_accepted)",
        new="is_stop",
        caught_by=("padding as stop",),
    ),
    Mutant(
        name="the limit is met one token late",
        where=_COMMIT,
        old="length >= state.limit",
        new="length > state.limit",
        caught_by=("limit",),
    ),
    Mutant(
        name="a starved round commits a token",
        where=_COMMIT,
        old="jnp.where(starved, 0, num_kept)",
        new="jnp.where(starved, 1, num_kept)",
        caught_by=("out of pages",),
    ),
    Mutant(
        name="a starved round is counted",
        where=_COMMIT,
        old="rounds=~starved",
        new="rounds=starved | ~starved",
        caught_by=("starved counters",),
    ),
    Mutant(
        name="corrections and bonus tokens are exchanged",
        where="spec_jax.rounds:_origins",
        old="Origin.BONUS, Origin.CORRECTION",
        new="Origin.CORRECTION, Origin.BONUS",
        caught_by=("origins",),
    ),
    Mutant(
        name="the target's own token is called a draft",
        where="spec_jax.rounds:_origins",
        old="< verdict.num_accepted",
        new="<= verdict.num_accepted",
        caught_by=("origins",),
    ),
    Mutant(
        name="tokens that a stop token cut are not counted",
        where=_COUNT,
        old="rounds * (a + 1 - num_kept)",
        new="rounds * 0",
        caught_by=("stop tokens",),
    ),
    Mutant(
        name="rounds are counted one place late",
        where=_COUNT,
        old="accepted_hist.at[a]",
        new="accepted_hist.at[a + 1]",
        caught_by=("mixed drafts",),
    ),
    Mutant(
        name="drafts after a rejected one count as reached",
        where=_COUNT,
        old="(drafts < g) & (drafts <= a)",
        new="drafts < g",
        caught_by=("mixed drafts",),
    ),
)

PROPOSALS = (
    Mutant(
        name="the number of drafts is taken on trust",
        where="spec_jax.rounds:limit_proposal",
        old="jnp.clip(proposal.num_drafted, 0, gamma)",
        new="proposal.num_drafted",
        caught_by=("promises that are broken",),
    ),
    Mutant(
        name="a draft outside the vocabulary has a probability",
        where="spec_jax.acceptance:_of_drafts",
        old="fill_value=0",
        new="fill_value=1",
        caught_by=("drafts outside the vocabulary",),
    ),
    Mutant(
        name="logits that are not finite are not counted",
        where="spec_jax.rules:finite_rows",
        old="jnp.isfinite(top[:, 0])",
        new="jnp.isfinite(top[:, 0]) | True",
        caught_by=("logits that are not finite",),
    ),
)

POLICY = (
    Mutant(
        name="a policy takes all drafts for kept",
        where=_TEACH,
        old="proposal.num_drafted, verdict.num_accepted)",
        new="proposal.num_drafted, proposal.num_drafted)",
        caught_by=("what a policy is told",),
    ),
    Mutant(
        name="a policy learns from a starved round",
        where=_TEACH,
        old="jnp.where(starved, 0, count)",
        new="count",
        caught_by=("what a starved round teaches",),
    ),
)

ACCEPTANCE = (
    Mutant(
        name="acceptance reads one row late",
        where=_ACCEPT,
        old="draft_tokens == target_tokens[:-1]",
        new="draft_tokens == target_tokens[1:]",
        caught_by=("acceptance", "right drafts"),
    ),
    Mutant(
        name="a draft is kept after a rejected one",
        where=_ACCEPT,
        old="jnp.cumprod(agrees.astype(jnp.int32))",
        new="agrees.astype(jnp.int32)",
        caught_by=("acceptance",),
    ),
    Mutant(
        name="padding behind the drafts is accepted",
        where=_ACCEPT,
        old="is_real & (draft_tokens == target_tokens[:-1])",
        new="draft_tokens == target_tokens[:-1]",
        caught_by=("acceptance", "padding as draft"),
    ),
    Mutant(
        name="the bonus token is lost",
        where=_ACCEPT,
        old="jnp.arange(gamma + 1, dtype=jnp.int32) <= num_accepted",
        new="jnp.arange(gamma + 1, dtype=jnp.int32) < num_accepted",
        caught_by=("acceptance", "mixed drafts"),
    ),
)

DRAFTS_AND_ORACLES = (
    Mutant(
        name="the draft's cache is not cut",
        where=_DRAFT_COMMIT,
        old="self.model.truncate(memory, kept)",
        new="memory",
        caught_by=("draft rollback",),
    ),
    Mutant(
        name="the draft's cache keeps a rejected draft",
        where=_DRAFT_COMMIT,
        old="length - 1)",
        new="length)",
        caught_by=("draft rollback",),
    ),
    Mutant(
        name="a draft is read from the first row",
        where="spec_jax.drafters.draft_model:DraftModel._draw",
        old="last = num_live - 1",
        new="last = 0",
        caught_by=("perfect draft",),
    ),
    Mutant(
        name="replay follows its own choices",
        where="spec_jax.autoregressive:replay",
        old="tokens=tokens[position - 1][None]",
        new="tokens=chosen[position - 1][None]",
        caught_by=("replay",),
    ),
    Mutant(
        name="plain decoding overlooks stop tokens",
        where="spec_jax.autoregressive:run_step",
        old="starved | is_stop |",
        new="starved |",
        caught_by=("stop tokens",),
    ),
)

EDGE = (
    Mutant(
        name="the token that needs no room is not generated",
        where="spec_jax.session:begin_plain",
        old="capacity + 1)),",
        new="capacity)),",
        caught_by=("longest prompt",),
    ),
    Mutant(
        name="the pending token is prefilled",
        where="spec_jax.session:prefill",
        old="prompt[:-1]",
        new="prompt",
        caught_by=("mixed drafts",),
    ),
    Mutant(
        name="a token past the vocabulary is let in",
        where="spec_jax.session:check_prompt",
        old="worst < vocab_size",
        new="worst <= vocab_size",
        caught_by=("unusable prompt",),
    ),
    Mutant(
        name="a window higher than the slab is let in",
        where="spec_jax.session:check_pair",
        old="drafter.gamma_max + 1 > target.slab",
        new="drafter.gamma_max > target.slab",
        caught_by=("pairs",),
    ),
    Mutant(
        name="a gamma above the largest is let in",
        where="spec_jax.session:check_gamma",
        old="gamma <= gamma_max:",
        new="gamma <= gamma_max + 1:",
        caught_by=("gamma",),
    ),
    Mutant(
        name="a refusal of the draft's cache is overlooked",
        where=_STATE,
        old='check_refused([kv, getattr(state, "memory", None)])',
        new="check_refused([kv])",
        caught_by=("refusals",),
    ),
)

METRICS = (
    Mutant(
        name="acceptance is taken over rounds",
        where=_METRICS,
        old="_ratio(c.accepted, c.proposed)",
        new="_ratio(c.accepted, c.rounds)",
        caught_by=("metrics",),
    ),
    Mutant(
        name="the target's own token is no part of the accepted length",
        where=_METRICS,
        old="_ratio(c.accepted + c.rounds, c.rounds)",
        new="_ratio(c.accepted, c.rounds)",
        caught_by=("metrics",),
    ),
    Mutant(
        name="a speed-up is slower over faster",
        where="spec_jax.metrics:_ratios",
        old="_seconds_per_token(plain, seconds), _seconds_per_token(fast, seconds)",
        new="_seconds_per_token(fast, seconds), _seconds_per_token(plain, seconds)",
        caught_by=("speeds",),
    ),
    Mutant(
        name="a histogram that misses a round is let pass",
        where="spec_jax.metrics:identities",
        old="[sum(c.accepted_hist), c.rounds]",
        new="[c.rounds, c.rounds]",
        caught_by=("identities",),
    ),
)

SAMPLING = (
    Mutant(
        name="sampling is greedy in disguise",
        where="spec_jax.sampling:sample",
        old="settings.temperature == 0, lambda x: x, noisy",
        new="settings.temperature >= 0, lambda x: x, noisy",
        caught_by=("draws",),
    ),
    Mutant(
        name="noise is that of a row's place in the slab",
        where="spec_jax.sampling:sample_rows",
        old="first_position + offset",
        new="offset",
        caught_by=("noise of a row",),
    ),
    Mutant(
        name="the residual is not subtracted",
        where="spec_jax.acceptance:_residual",
        old="target - draft",
        new="target",
        caught_by=("law of rejection",),
    ),
)

MUTANTS = (
    *ROUNDS,
    *PROPOSALS,
    *POLICY,
    *ACCEPTANCE,
    *DRAFTS_AND_ORACLES,
    *EDGE,
    *METRICS,
    *SAMPLING,
)
