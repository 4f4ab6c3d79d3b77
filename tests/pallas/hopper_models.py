"""A plain step, a verification and a round of Qwen3, to be compiled and not run."""

import dataclasses
import functools

import hopper
import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import subjects
from spec_jax.drafters import block, draft_model, each, eagle3, tree_shapes
from spec_jax.engine import (
    baseline,
    protocols,
    round as round_lib,
    rows,
    scheduler,
    verification,
)
from spec_jax.gamma import schedule
from spec_jax.model import (
    block_draft,
    decoder,
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
    config = dataclasses.replace(CONFIGS[name], weights=weights)
    if layers:
        config = dataclasses.replace(config, num_layers=layers)
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


def _slots(name: str, *, num_slots: int = 1, **options) -> rows.SlotRows:
    return rows.SlotRows(model=model(name, **options), num_slots=num_slots)


def plain_step(name: str, *, donate=(1,), **options) -> hopper.Program:
    """Builds the step of `baseline.generate` for one token."""
    target = model(name, **options)
    args = params_lib.prepared_shapes(target.config, target.impl), _plain_state(target)
    step = functools.partial(baseline.run_step, target)
    return hopper.Program(fn=step, args=args, donate=donate)


def drawing(rows: int) -> hopper.Program:
    """Builds the draws of a slab of rows."""

    def fn(logits, settings, positions, draws):
        how = {"positions": positions, "draws": draws, "impl": "triton"}
        return draw.draw(logits, settings, **how)

    settings = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows,), leaf.dtype),
        jax.eval_shape(sampling_lib.make_settings),
    )
    draws = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    args = _logits(rows), settings, _ints(rows), draws
    return hopper.Program(fn=fn, args=args)


def distribution(rows: int, *, impl: str) -> hopper.Program:
    """Builds the probabilities of a slab of rows, and sums of what is left of them."""
    sums = _slots("qwen3-0.6b", impl=impl).sums

    def fn(logits, settings):
        probs = sums.distribution(logits, settings)
        return probs, sums.row_sums(jnp.maximum(probs - 1e-3, 0))

    settings = jax.eval_shape(sampling_lib.make_settings)
    return hopper.Program(fn=fn, args=(_logits(rows), settings))


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

    params = params_lib.shapes(target.config)
    args = params, _plain_state(target, draws=draws), _ints()
    return hopper.Program(fn=generate, args=args, donate=(1,))


def prefill(name: str, *, by_rows: bool = True, **options) -> hopper.Program:
    """Builds the prefill of a prompt, by rows or by the library's products."""
    target = model(name, **options)

    def run(params, kv, tokens, length):
        args = params, kv, tokens, length, jnp.int32(0)
        return row_model._prefill(target, *args, by_rows=by_rows)[0]

    args = (params_lib.shapes(target.config), _cache(target), _ints(64), _ints())
    return hopper.Program(fn=run, args=args, donate=(1,))


def verify_tree(name: str, **options) -> hopper.Program:
    """Builds a verification of a tree of `slab.MOST_ROWS` rows, keeping its path."""
    target, depth_max = _slots(name, **options), 15
    nodes = _ints(1, slab.MOST_ROWS)
    window = protocols.Window(
        tokens=nodes, start=_ints(1), num_active=_ints(1), parents=nodes,
        depth_max=depth_max,
    )  # fmt: skip

    def verify(params, kv, window, path, num_kept):
        kv, verified = target.verify(params, kv, window)
        chosen = target.choose(verified.logits, verified.num_active)
        kv = target.keep_path(kv, path, num_kept, start=window.start)
        new_len = window.start + 1 + num_kept
        kv = target.truncate(kv, new_len, asked=jnp.ones((1,), bool))
        return kv, verified.by_column(chosen, fill=0)

    path = _ints(1, depth_max), _ints(1)
    args = (params_lib.shapes(target.config), _cache(target.model), window, *path)
    return hopper.Program(fn=verify, args=args, donate=(1,))


def head(name: str) -> eagle3.Eagle3:
    """Returns an EAGLE-3 head as published, at the shapes of the target `name`."""
    # Taps are those of a target of four layers, which is compiled.
    config = subjects.head_config("eagle3", CONFIGS[name], taps=(1, 2, 3))
    drafter = subjects.head_drafter(config, model(name))
    return dataclasses.replace(drafter, gamma_max=GAMMA_MAX)


def head_round(name: str, *, layers: int) -> hopper.Program:
    """Builds `round.run_round` of one slot, with trees of a head."""
    target = _slots(name, layers=layers)
    drafter = head(name).for_tree(tree_shapes.parse(TREE))
    params = params_lib.shapes(target.config), drafter.head.shapes()
    return _round(target, drafter, params)


BLOCK = 7


def block_head(
    name: str, *, kind: str = "dspark", size: int = BLOCK, depth: int = 5
) -> block.BlockDrafter:
    """Returns DSpark or DFlash as published for 8B, at the shapes of target `name`."""
    changes = {"block_size": size, "depth": depth}
    # Taps are those of a target of six layers, which is compiled.
    config = subjects.head_config(kind, CONFIGS[name], taps=(1, 2, 3, 4, 5), **changes)
    return subjects.head_drafter(config, model(name))


def block_step(name: str, *, size: int, num_blocks: int) -> hopper.Program:
    """Builds a layer of the backbone on blocks of `size` rows, one for each slot."""
    drafter = block_head(name, size=size, depth=1)
    config, sizes = drafter.head, {"capacity": CAPACITY, "page_size": PAGE_SIZE}
    cache = jax.eval_shape(lambda: drafter.model.new_cache(num_blocks, **sizes))

    def step(params, kv, rows):
        return block_draft.forward_block(params, config, rows, kv, impl="triton")

    each_row = dict.fromkeys(("tokens", "slots", "positions"), _ints(size * num_blocks))
    blocks = decoder.Rows(**each_row, num_active=_ints())
    args = config.shapes(), cache, blocks
    return hopper.Program(fn=step, args=args, donate=(1,))


def block_round(
    name: str, *, kind: str, layers: int, size: int, num_slots: int
) -> hopper.Program:
    """Builds `round.run_round` with DFlash, or with DSpark and a schedule."""
    target = _slots(name, layers=layers, num_slots=num_slots)
    drafter = block_head(name, kind=kind, size=size)
    shapes = params_lib.shapes(target.config), drafter.head.shapes()
    if kind == "dflash":
        return _round(target, drafter, shapes)
    chosen = schedule.Schedule(gamma_max=drafter.gamma_max)
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
    speculator, state = _speculation(
        *_pair(name, num_slots=num_slots, **options), draws
    )

    def generate(speculator, state, max_rounds):
        return round_lib.generate(speculator, state, max_rounds=max_rounds)

    return hopper.Program(fn=generate, args=(speculator, state, _ints()), donate=(1,))


def _pair(name: str, *, draft_layers: int | None = None, num_slots: int = 1, **options):
    """Returns a target, a drafter, and the shapes of their weights."""
    target = _slots(name, num_slots=num_slots, **options)
    draft = model(DRAFT, layers=draft_layers)
    drafter = draft_model.DraftModel(model=draft, gamma_max=GAMMA_MAX)
    configs = target.config, draft.config
    shapes = tuple(params_lib.prepared_shapes(each, draft.impl) for each in configs)
    return target, drafter, shapes


def _round(target, drafter, params, **how) -> hopper.Program:
    def run(speculator, state):
        return round_lib.run_round(speculator, state)[0]

    args = _speculation(target, drafter, params, **how)
    return hopper.Program(fn=run, args=args, donate=(1,))


def _speculation(target, drafter, params, draws=False, *, policy_state=None, **how):
    """Returns the speculator that rounds share, and the shapes of their state."""
    drafter = each.lift(drafter, target.num_slots)
    speculator = round_lib.Speculator(
        params=params, target=target, drafter=drafter, **how
    )
    sizes = {"capacity": CAPACITY, "page_size": PAGE_SIZE}
    slots = scheduler.Scheduler(
        speculator=speculator, policy_state=policy_state, **sizes
    )
    return speculator, jax.eval_shape(lambda: slots.empty(draws=draws))
