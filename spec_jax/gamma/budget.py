"""Gamma within a budget: trying drafts costs a bounded share of the time.

Wu et al. (2016), Conservative Bandits, https://arxiv.org/abs/1602.04282: an action that
may be worse than a known one is taken only while what was gained before pays for it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import pytree
from spec_jax.gamma import costs as costs_lib, policy


class BudgetState(pytree.Node):
    """The state of `Budget`; times are in rounds without drafts."""

    asks: policy.State  # of the policy that is bounded
    lost: jax.Array  # [gamma_max + 1] float32, lost by a round that keeps no draft
    late: jax.Array  # [] float32, delay by each token that the drafter sat out
    num_behind: jax.Array  # [] int32, such tokens
    balance: jax.Array  # [] float32, what may be lost; `settle` makes all slots equal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(policy.GammaPolicy):
    """Bounds what a policy may lose against plain decoding.

    All slots share an account of time, in rounds without drafts. A round that drafted
    adds the tokens that it committed, per slot, and subtracts the time that it took by
    measured costs; each token adds `bound / 2` besides, and the first balance is
    `shortest * bound / 2`. A slot asks for what the policy `asks` chooses, but for no
    more than the account could pay if no draft of any slot were kept.

    So by these costs a text of `shortest` tokens or more takes at most `1 + bound`
    times as long as with gamma 0, in the long run `1 + bound / 2`, even if no draft is
    kept. A drafter whose drafts are all rejected is tried once in `lost[1] / (bound /
    2)` rounds, or more rarely if `asks` waits longer. If catching up alone takes more
    than `bound / 2` of the time, it is not tried again in a text once it is off. With
    several slots the bounds hold for the batch; a slot that has to catch up may
    overdraw the account, once, by what the other slots ask for.

    Attributes:
      asks: chooses gamma, and learns; of chains or of trees.
      bound: share of the time of plain decoding that trying drafts may cost.
      shortest: length of a text, in tokens, from which the bound holds.
      savings: rounds that the account holds at most, if above `credit`: a text that
        turns hard loses no more of its gains. The next begins with at most `credit`.
      stake: share of the account that a round may lose; one draft may lose all of it.
      empty_is_free: whether a round costs by its verified drafts, not by the requested
        ones, as with drafters that look up.

    Raises:
      ValueError: a number that is not above 0, or a bound or stake above 1.
    """

    asks: policy.GammaPolicy
    bound: float = 0.02
    shortest: int = 64
    savings: float = 4.0
    stake: float = 0.25
    empty_is_free: bool = False

    settles = True
    """`settle` is told what the round of all slots brought."""

    keeps_state = True
    """Counts of one text are the best guess for the next."""

    def __post_init__(self) -> None:
        shares = 0 < self.bound <= 1 and 0 < self.stake <= 1
        if not (shares and self.shortest > 0 and self.savings > 0):
            raise ValueError(
                f"bound={self.bound} and stake={self.stake} must lie in (0, 1], "
                f"shortest={self.shortest} and savings={self.savings} above 0: "
                "drafting would never be tried"
            )

    @property
    def gamma_max(self) -> int:
        """The largest gamma of `asks`."""
        return self.asks.gamma_max

    @property
    def reads_ranks(self) -> bool:
        """Whether `asks` is for trees."""
        return policy.reads_ranks(self.asks)

    @property
    def credit(self) -> float:
        """Rounds that the account holds at first."""
        return self.shortest * self.bound / 2

    def init(self, costs: costs_lib.RoundCosts, *, asks: policy.State) -> BudgetState:
        """Returns the state.

        Args:
          asks: the first state of the policy `asks`.

        Raises:
          ValueError: times of fewer drafts than may be asked for.
        """
        costs = costs.upto(self.gamma_max)
        round_s = costs.rising_s()
        return BudgetState(
            asks=asks,
            lost=jnp.asarray(round_s / round_s[0] - 1, jnp.float32),
            late=jnp.float32(costs.catch_up_s / round_s[0]),
            num_behind=jnp.int32(0),
            balance=jnp.float32(self.credit),
        )

    def choose(self, state: BudgetState) -> Int[Array, ""]:
        """Returns what `asks` chooses, or as much as the account could pay for."""
        most = state.balance - state.late * state.num_behind.astype(jnp.float32)
        most = jnp.maximum(self.stake * most, jnp.minimum(state.lost[1], most))
        paid = jnp.sum(state.lost[1:] <= most, dtype=jnp.int32)
        return jnp.minimum(self.asks.choose(state.asks), paid)

    def update(
        self, state: BudgetState, *, gamma: Int[Array, ""], **numbers: jax.Array
    ) -> BudgetState:
        """Updates `asks` after a round, and counts tokens that the drafter sat out."""
        return state.replace(
            asks=self.asks.update(state.asks, gamma=gamma, **numbers),
            num_behind=jnp.where(gamma > 0, 0, state.num_behind + 1),
        )

    def settle(self, state, *, asked, num_active, num_verified, num_accepted):
        """Returns the state with a round of all slots in the account.

        Args: as `policy.settles` says; leaves of the state are `[B, ..]`.
        """
        slots = jnp.maximum(num_active, 1).astype(jnp.float32)
        kept = num_accepted.astype(jnp.float32) / slots
        # Verified rows cost by their number, drafting by the longest proposal.
        drafts = jnp.max(asked).astype(jnp.float32)
        if self.empty_is_free:
            drafts = num_verified.astype(jnp.float32) / slots
        behind = jnp.where(asked > 0, state.num_behind, 0).astype(jnp.float32)
        lost = _between(state.lost[0], drafts) + jnp.max(state.late * behind)
        gain = kept - lost + self.bound / 2 * (1.0 + kept)
        # A slot that began anew may have less than the others, which all take that.
        balance = jnp.min(state.balance) + jnp.where(num_active > 0, gain, 0.0)
        balance = jnp.minimum(balance, max(self.savings, self.credit))
        return state.replace(balance=jnp.full_like(state.balance, balance))

    def renew(self, state: BudgetState) -> BudgetState:
        """Returns the state of ONE slot where another text begins.

        The drafter has taken in all of its prompt, and it may not lose what another
        text gained.
        """
        return state.replace(
            asks=policy.renewed(self.asks, state.asks),
            num_behind=jnp.zeros_like(state.num_behind),
            balance=jnp.minimum(state.balance, self.credit),
        )


def _between(table: jax.Array, at: jax.Array) -> jax.Array:
    """Returns a table's value at a place, interpolated between two entries."""
    low = jnp.clip(at.astype(jnp.int32), 0, table.shape[0] - 2)
    share = at - low.astype(jnp.float32)
    return table[low] + share * (table[low + 1] - table[low])
