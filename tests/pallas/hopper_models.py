"""A plain step, a verification and a round of Qwen3, to be compiled and not run."""

import dataclasses

import hopper
import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import subjects
from spec_jax.drafters import (
    block,
    draft_model,
    each,
    eagle3 as eagle3_lib,
    tree_shapes,
)
from spec_jax.engine import (
    baseline,
    protocols,
    round as round_lib,
    rows,
    scheduler,
    target as target_lib,
    verification,
)
from spec_jax.gamma import schedule
from spec_jax.model import (
    block_draft,
    block_params,
    decoder,
    eagle3,
    eagle3_params,
    params as params_lib,
    row_model,
)
from spec_jax.ops import dispatch, draw
from spec_jax.pallas import slab
from spec_jax.rules import rule as rule_lib, sampling as sampling_lib


CAPACITY, PAGE_SIZE = 4096, 16
GAMMA_MAX = 4
TREE = "4x8:31"  # 32 rows with the root
DRAFT = "qwen3-0.6b"
VOCABULARY = 151_936

CONFIGS = subjects.PRESETS


def model(
    name: str, *, layers: int | None = None, impl="triton", weights: str = "dense"
) -> row_model.RowModel:
    """Returns a released model at its shapes, or with as many layers as asked for."""
    config = CONFIGS[name]
    changes = {"num_layers": layers or config.num_layers, "weights": weights}
    config = dataclasses.replace(config, **changes)
    return row_model.RowModel(config=config, impl=impl, slab=dispatch.slab_rows(impl))


def pool_bytes(model: row_model.RowModel) -> int:
    """Returns the bytes of one layer's keys, as many as of its values."""
    return 2 * CAPACITY * model.config.num_kv_heads * model.config.head_dim


def _cache(model: row_model.RowModel):
    sizes = {"capacity": CAPACITY, "page_size": PAGE_SIZE}
    return jax.eval_shape(lambda: model.new_cache(**sizes))


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _logits(rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, VOCABULARY), jnp.float32)


def _rows(count: int, **others) -> decoder.Rows:
    each = dict.fromkeys(("tokens", "slots", "positions"), _ints(count))
    return decoder.Rows(**each, num_active=_ints(), **others)


def _slots(name: str, *, num_slots: int = 1, **options) -> rows.SlotRows:
    return rows.SlotRows(model=model(name, **options), num_slots=num_slots)


def plain_step(name: str, *, donate=(1,), **options) -> hopper.Program:
    """Builds the step of `baseline.generate` for one token."""
    return _plain_step(model(name, **options), donate=donate)


def drawing(rows: int, *, impl: str = "triton") -> hopper.Program:
    """Builds the draws of a slab of rows."""

    def fn(logits, settings, positions, draws):
        how = {"positions": positions, "draws": draws, "impl": impl}
        return draw.draw(logits, settings, **how)

    settings = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows,), leaf.dtype),
        jax.eval_shape(sampling_lib.make_settings),
    )
    draws = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    args = _logits(rows), settings, _ints(rows), draws
    return hopper.Program(fn=fn, args=args)


def distribution(rows: int, *, impl: str | None) -> hopper.Program:
    """Builds the probabilities of a slab of rows, and sums of what is left of them;
    with `impl=None` by XLA."""
    target = model("qwen3-0.6b", impl=impl or "xla")
    sums = target_lib.sums_of(target)

    def fn(logits, settings):
        probs = sums.distribution(logits, settings)
        return probs, sums.row_sums(jnp.maximum(probs - 1e-3, 0))

    settings = jax.eval_shape(sampling_lib.make_settings)
    return hopper.Program(fn=fn, args=(_logits(rows), settings))


def scaled_step(name: str, **options) -> hopper.Program:
    """Builds `plain_step` for a negative control: XLA computes with the logits."""
    target = model(name, **options)
    return _plain_step(_Scaled(**vars(target)), donate=(1,))


class _Scaled(row_model.RowModel):
    def choose(self, logits, num_active):
        return super().choose(logits * 1.5, num_active)


def _plain_step(target: row_model.RowModel, *, donate) -> hopper.Program:
    def step(params, state):
        return baseline.run_step(target, params, state)

    params = params_lib.prepared_shapes(target.config, target.impl)
    args = (params, _plain_state(target))
    return hopper.Program(fn=step, args=args, donate=donate)


def _plain_state(target: row_model.RowModel, *, draws: bool = False):
    settings = sampling_lib.make_settings() if draws else None
    return jax.eval_shape(
        lambda text, n, kv, stop_ids: baseline.init_state(
            text, length=n, limit=n, cache=kv, stop_ids=stop_ids, sampling=settings
        ),
        *(_ints(CAPACITY + 1), _ints(), _cache(target), _ints(1)),
    )


def plain_generate(name: str, *, draws: bool = False, **options) -> hopper.Program:
    """Builds all of `baseline.generate`, greedy or with settings."""
    target = model(name, **options)

    def generate(params, state, max_steps):
        return baseline.generate(target, params, state, max_steps=max_steps)

    state = _plain_state(target, draws=draws)
    args = (params_lib.shapes(target.config), state, _ints())
    return hopper.Program(fn=generate, args=args, donate=(1,))


def prefill(name: str, *, length: int = 64, by_rows: bool = True, **options):
    """Builds the prefill of a prompt, by rows or by the library's products."""
    target = model(name, **options)

    def run(params, kv, tokens, length):
        args = params, kv, tokens, length, jnp.int32(0)
        return row_model._prefill(target, *args, by_rows=by_rows)[0]

    args = (params_lib.shapes(target.config), _cache(target), _ints(length), _ints())
    return hopper.Program(fn=run, args=args, donate=(1,))


def verify_step(name: str, *, gamma: int = GAMMA_MAX, **options) -> hopper.Program:
    """Builds the verification of `gamma + 1` rows of one slot, with their roll back."""
    target = _slots(name, **options)
    window = protocols.Window(
        tokens=_ints(1, gamma + 1), start=_ints(1), num_active=_ints(1)
    )

    def verify(params, kv, window, new_len):
        kv, verified = target.verify(params, kv, window)
        chosen = target.choose(verified.logits, verified.num_active)
        kv = target.truncate(kv, new_len, asked=jnp.ones((1,), bool))
        return kv, verified.by_column(chosen, fill=0)

    params = params_lib.prepared_shapes(target.config, target.model.impl)
    args = (params, _cache(target.model), window, _ints(1))
    return hopper.Program(fn=verify, args=args, donate=(1,))


def verify_tree(name: str, **options) -> hopper.Program:
    """Builds a verification of a tree of `slab.MOST_ROWS` rows, keeping its path."""
    target = _slots(name, **options)
    size, depth_max = slab.MOST_ROWS, 15
    window = protocols.Window(
        tokens=_ints(1, size),
        start=_ints(1),
        num_active=_ints(1),
        parents=_ints(1, size),
        depth_max=depth_max,
    )

    def verify(params, kv, window, path, num_kept):
        kv, verified = target.verify(params, kv, window)
        chosen = target.choose(verified.logits, verified.num_active)
        kv = target.keep_path(kv, path, num_kept, start=window.start)
        new_len = window.start + 1 + num_kept
        kv = target.truncate(kv, new_len, asked=jnp.ones((1,), bool))
        return kv, verified.by_column(chosen, fill=0)

    params = params_lib.shapes(target.config)
    path = _ints(1, depth_max), _ints(1)
    args = (params, _cache(target.model), window, *path)
    return hopper.Program(fn=verify, args=args, donate=(1,))


def head(name: str, **options) -> eagle3_lib.Eagle3:
    """Returns an EAGLE-3 head as published, at the shapes of the target `name`."""
    # Taps are those of a target of four layers, which is compiled.
    config = subjects.head_config("eagle3", CONFIGS[name], taps=(1, 2, 3))
    target = model(name, **options)
    return subjects.head_drafter(config, target, gamma_max=GAMMA_MAX)


def head_step(name: str, **options) -> hopper.Program:
    """Builds a slab of a head's drafted rows, each with the hidden state of another."""
    drafter = head(name, **options)
    slab, config = drafter.model.slab, drafter.head
    rows = _rows(slab, branch=_ints(slab, tree_shapes.parse(TREE).depth))
    shape = slab, config.hidden_size
    hidden = jax.ShapeDtypeStruct(shape, config.layer.dtype)

    def step(params, kv, rows, hidden):
        return eagle3.forward_rows(
            params, config, rows, hidden, kv, impl=drafter.model.impl
        )

    args = (eagle3_params.shapes(config), _cache(drafter.model), rows, hidden)
    return hopper.Program(fn=step, args=args, donate=(1,))


def head_round(name: str, *, layers: int, **options) -> hopper.Program:
    """Builds `round.run_round` of one slot, with trees of a head."""
    target = _slots(name, layers=layers, **options)
    drafter = head(name, **options).for_tree(tree_shapes.parse(TREE))
    params = params_lib.shapes(target.config), eagle3_params.shapes(drafter.head)
    return _round(target, drafter, params)


BLOCK = 7


def block_head(
    name: str, *, kind: str = "dspark", size: int = BLOCK, depth: int = 5, **options
) -> block.BlockDrafter:
    """Returns DSpark or DFlash as published for 8B, at the shapes of target `name`."""
    changes = {"block_size": size, "depth": depth}
    # Taps are those of a target of six layers, which is compiled.
    config = subjects.head_config(kind, CONFIGS[name], taps=(1, 2, 3, 4, 5), **changes)
    return subjects.head_drafter(config, model(name, **options))


def block_step(name: str, *, size: int, num_blocks: int = 1, **options):
    """Builds a layer of the backbone on blocks of `size` rows, one for each slot."""
    drafter = block_head(name, size=size, depth=1, **options)
    config, sizes = drafter.head, {"capacity": CAPACITY, "page_size": PAGE_SIZE}
    cache = jax.eval_shape(lambda: drafter.model.new_slots(num_blocks, **sizes))

    def step(params, kv, rows):
        return block_draft.forward_block(
            params, config, rows, kv, impl=drafter.model.impl
        )

    args = block_params.shapes(config), cache, _rows(size * num_blocks)
    return hopper.Program(fn=step, args=args, donate=(1,))


def block_round(name: str, *, layers: int, **options) -> hopper.Program:
    """Builds `round.run_round` of one slot, with DFlash."""
    target = _slots(name, layers=layers, **options)
    drafter = block_head(name, kind="dflash", size=16, **options)
    shapes = params_lib.shapes(target.config), block_params.shapes(drafter.head)
    return _round(target, drafter, shapes)


def scheduled_round(
    name: str, *, layers: int, num_slots: int, size: int = BLOCK, **options
) -> hopper.Program:
    """Builds `round.run_round` of a batch, with DSpark and a schedule of its drafts."""
    target = _slots(name, layers=layers, num_slots=num_slots, **options)
    drafter = block_head(name, size=size, **options)
    chosen = schedule.Schedule(gamma_max=drafter.gamma_max)
    shapes = params_lib.shapes(target.config), block_params.shapes(drafter.head)
    state = chosen.init(np.ones(num_slots * (size + 1) + 1, np.float32))
    return _round(target, drafter, shapes, gamma_policy=chosen, policy_state=state)


def spec_round(
    name: str, *, draws=False, rule: verification.Rule = "coupled",
    tree: str | None = None, **options,
) -> hopper.Program:  # fmt: skip
    """Builds `round.run_round` of one slot, with a draft of the shape of `DRAFT`."""
    target, drafter, params = _pair(name, **options)
    if tree:
        drafter = drafter.for_tree(tree_shapes.parse(tree))
    drafter = drafter.for_rule(rule_lib.of(rule))
    return _round(target, drafter, params, draws=draws, rule=rule)


def spec_generate(
    name: str, *, draws: bool = False, num_slots: int = 1, **options
) -> hopper.Program:
    """Builds all of `round.generate`, of one slot or more, greedy or with settings."""
    pair = _pair(name, num_slots=num_slots, **options)
    speculator, state = _speculation(*pair, draws=draws)

    def generate(speculator, state, max_rounds):
        return round_lib.generate(speculator, state, max_rounds=max_rounds)

    return hopper.Program(fn=generate, args=(speculator, state, _ints()), donate=(1,))


def _pair(name: str, *, draft_layers: int | None = None, num_slots: int = 1, **options):
    """Returns a target, a drafter, and the shapes of their weights."""
    target = _slots(name, num_slots=num_slots, **options)
    drafter = draft_model.DraftModel(
        model=model(DRAFT, layers=draft_layers, impl=target.model.impl),
        gamma_max=GAMMA_MAX,
    )
    configs = target.config, drafter.model.config
    return target, drafter, tuple(map(params_lib.shapes, configs))


def _round(target, drafter, params, **how) -> hopper.Program:
    def run(speculator, state):
        return round_lib.run_round(speculator, state)[0]

    args = _speculation(target, drafter, params, **how)
    return hopper.Program(fn=run, args=args, donate=(1,))


def _speculation(
    target, drafter, params, *, draws=False, rule: verification.Rule = "coupled",
    gamma_policy=None, policy_state=None,
):  # fmt: skip
    """Returns the speculator that rounds share, and the shapes of their state."""
    speculator = round_lib.Speculator(
        params=params,
        target=target,
        drafter=each.lift(drafter, target.num_slots),
        rule=rule,
        gamma_policy=gamma_policy,
    )
    slots = scheduler.Scheduler(
        speculator=speculator,
        capacity=CAPACITY,
        page_size=PAGE_SIZE,
        policy_state=policy_state,
    )
    return speculator, jax.eval_shape(lambda: slots.empty(draws=draws))
