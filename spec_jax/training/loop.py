"""The optimiser loop: resumable, with a log that survives kills.

Needs the extra `train`; no other folder of the package imports this one. The losses are
a pure function of the arguments of `run`: the batch of a step depends on the data, the
recipe and the step alone, and a checkpoint holds everything else, so a killed and
resumed run writes the same losses as an undisturbed one.
"""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import sharding

from spec_jax.training import batches


Params = Any
"""A pytree of float32 arrays, all of which are trained."""

Loss = Callable[[Params, batches.Batch, Any], jax.Array]
"""`(params, batch, teacher) -> mean loss, nats`."""

Measure = Callable[[Params, batches.Batch, Any], dict[str, jax.Array]]
"""`(params, batch, teacher) -> a sum and a count [2]` of a held-out batch, by name: the
number of the name is the quotient over all batches."""

DATA_AXIS = "data"
"""The axis of a mesh over which the sequences of a batch are spread."""


def data_mesh(num_devices: int) -> sharding.Mesh | None:
    """Returns the mesh of `run` of the first devices; None for one.

    Raises:
      ValueError: more devices than there are.
    """
    devices = jax.devices()
    if not 1 <= num_devices <= len(devices):
        raise ValueError(f"{num_devices} devices: jax has {len(devices)} here")
    if num_devices == 1:
        return None
    return sharding.Mesh(np.array(devices[:num_devices]), (DATA_AXIS,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Numbers that decide a training run, beside data, initial weights and loss."""

    steps: int
    batch_size: int = 16
    part_size: int = 2  # sequences at a time: what fits a CPU's caches
    learning_rate: float = 0.02  # Muon, for the matrices of the layers
    adam_learning_rate: float = 0.003  # all other weights
    warmup_steps: int = 50
    decay_share: float = 0.5  # of the steps, at the end
    eval_every: int = 50
    save_every: int = 25
    seed: int = 0


def learning_rate(recipe: Recipe, peak: float) -> optax.Schedule:
    """Returns the learning rate by step: it rises, stays at `peak`, and falls.

    It falls linearly to nothing over the last `decay_share` of the steps. Before that a
    run of at least `2 * warmup_steps` steps does not depend on `steps`, and can be made
    longer.
    """
    warmup = min(recipe.warmup_steps, recipe.steps // 2)
    decay = round(recipe.decay_share * recipe.steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, decay),
        ],
        [warmup, recipe.steps - decay],
    )


_NOT_MUON = (
    *("embed", "lm_head", "out", "confidence", "mask_hidden"),
    *("base", "kernels"),  # of convolutions
)


@functools.cache  # A static argument of the step: one object, one compilation.
def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Returns Muon for the layers' matrices, Adam for the rest, by `learning_rate`."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)

    def mark(path, leaf) -> Any:
        """Marks matrices, but tables and single rows."""
        is_table = jax.tree_util.keystr(path[-1:]).lstrip(".") in _NOT_MUON
        return None if is_table or leaf.ndim < 2 else matrix

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            learning_rate(recipe, recipe.learning_rate),
            adam_learning_rate=learning_rate(recipe, recipe.adam_learning_rate),
            adam_b2=0.98,
            muon_weight_dimension_numbers=functools.partial(
                jax.tree_util.tree_map_with_path, mark
            ),
        ),
    )


def held_out(
    measure: Measure,
    params: Params,
    data: batches.Data,
    *,
    batch_size: int,
    teacher: Any,
    draw: batches.Draw | None,
) -> dict[str, float]:
    """Returns each number over whole batches of `data`; NaN if its count is 0."""
    parts = []
    order = np.argsort(-data.columns, kind="stable")  # Little padding.
    for start in range(0, len(data) - batch_size + 1, batch_size):
        rows = order[start : start + batch_size]
        inputs = data[rows] if draw is None else draw(data[rows], rows, None)
        parts.append(jax.device_get(measure(params, inputs, teacher)))
    sums = {name: np.sum([x[name] for x in parts], 0, float) for name in parts[0]}
    return {
        name: float(x) / float(n) if n else float("nan")
        for name, (x, n) in sums.items()
    }


def value_and_grad(
    loss: Loss,
    params: Params,
    batch: batches.Batch,
    teacher: Any,
    *,
    part_size: int,
    mesh: sharding.Mesh | None = None,
) -> tuple[jax.Array, Params]:
    """Returns loss and gradients of a batch: the means over its parts.

    A part is `part_size` sequences, of each device of a mesh. On a CPU with 32 MiB of
    cache, gradients of two at a time take a third less than those of sixteen at once:
    what a layer leaves for the backward pass is still there, and less memory is asked
    of the system anew.

    Raises:
      ValueError: the batch is not of whole parts.
    """
    size = len(jax.tree.leaves(batch)[0])
    devices = 1 if mesh is None else mesh.size
    if size % (part_size * devices):
        raise ValueError(
            f"a batch of {size} sequences is not of whole parts of {part_size}"
            + (f" on each of {devices} devices" if mesh else "")
            + "; choose a divisor as part_size"
        )

    def split(leaf: jax.Array) -> jax.Array:
        parts = leaf.reshape(-1, part_size * devices, *leaf.shape[1:])
        if mesh is None:
            return parts
        spread = sharding.NamedSharding(mesh, sharding.PartitionSpec(None, DATA_AXIS))
        return jax.lax.with_sharding_constraint(parts, spread)

    parts = jax.tree.map(split, batch)

    def add(total, part):
        return jax.tree.map(
            jnp.add, total, jax.value_and_grad(loss)(params, part, teacher)
        ), None

    nothing = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(add, nothing, parts)
    count = size // (part_size * devices)
    return jax.tree.map(lambda x: x / count, total)


@functools.partial(
    jax.jit,
    static_argnames=("loss", "transform", "part_size", "mesh"),
    donate_argnums=(0,),
)
def _step(state, batch, teacher, *, loss, transform, part_size, mesh):
    value, grads = value_and_grad(
        loss, state["params"], batch, teacher, part_size=part_size, mesh=mesh
    )
    updates, opt_state = transform.update(grads, state["opt_state"], state["params"])
    return {
        "params": optax.apply_updates(state["params"], updates),
        "opt_state": opt_state,
        "step": state["step"] + 1,
    }, value


def run(
    recipe: Recipe,
    init: Params,
    loss: Loss,
    data: batches.Data,
    held_out_data: batches.Data,
    folder: pathlib.Path,
    *,
    teacher: Any,
    measure: Measure,
    draw: batches.Draw | None,
    mesh: sharding.Mesh | None,
    after_step: Callable[[dict[str, float]], Any] = lambda row: None,
    stop_after: int | None = None,
) -> Params:
    """Trains from `init`, or from the newest checkpoint in `folder`.

    Writes `folder/log.jsonl`, one line a step (`step`, `loss`, and every
    `eval_every` steps `held_out_loss` and what `measure` gives, as `held_out_NAME`).

    Args:
      init: donated.
      loss: hashable by identity; traced once.
      teacher: handed to the loss, and not trained.
      measure: as `loss`, of held-out batches.
      draw: adds to each batch what a step draws anew, see `batches.Draw`.
      mesh: of one axis, `DATA_AXIS`: sequences are spread over its devices, and
        parameters are on each.
      after_step: takes what the log says of each step.
      stop_after: stops after this step, as if killed (tests resumption).

    Returns:
      The parameters after the last step that was run.
    """
    state = _start(recipe, init)
    evaluated: Measure = lambda *inputs: {
        "loss": jnp.stack([loss(*inputs), jnp.float32(1)]),
        **measure(*inputs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager(
        (folder / "checkpoints").absolute(), options=options
    ) as manager:
        state, teacher = _resumed(manager, state, teacher, mesh)
        first = int(state["step"])
        evaluate = jax.jit(evaluated)
        with _open_log(folder, first) as log:
            for step in range(first, recipe.steps):
                rows = batches.rows_of_step(
                    data.columns,
                    step=step,
                    size=recipe.batch_size,
                    seed=recipe.seed,
                    unit=recipe.part_size * (1 if mesh is None else mesh.size),
                    is_counted=draw is not None,
                )
                batch = data[rows] if draw is None else draw(data[rows], rows, step)
                state, row = _timed_step(recipe, state, batch, teacher, loss, mesh)
                done = step + 1
                if done == recipe.steps or done % recipe.eval_every == 0:
                    found = held_out(
                        evaluate,
                        state["params"],
                        held_out_data,
                        batch_size=recipe.batch_size,
                        teacher=teacher,
                        draw=draw,
                    )
                    row |= {f"held_out_{name}": x for name, x in found.items()}
                log.write(json.dumps({"step": step} | row) + "\n")
                log.flush()
                after_step(row)
                if done == recipe.steps or done % recipe.save_every == 0:
                    manager.save(done, args=ocp.args.StandardSave(state))
                if done == stop_after:
                    break
    return state["params"]


def _resumed(manager, state, teacher, mesh):
    """Returns the newest checkpoint, or `state` if there are none, and the teacher,
    both on all devices of a mesh."""
    if manager.latest_step() is not None:
        state = _restored(manager, state)
    if mesh is None:
        return state, teacher
    everywhere = sharding.NamedSharding(mesh, sharding.PartitionSpec())
    return jax.device_put((state, teacher), everywhere)


def _timed_step(recipe, state, batch, teacher, loss, mesh):
    """Returns the state after a step, and what the log says of it."""
    started = time.perf_counter()
    state, value = _step(
        state,
        batch,
        teacher,
        loss=loss,
        transform=optimizer(recipe),
        part_size=recipe.part_size,
        mesh=mesh,
    )
    row: dict[str, float] = {"loss": float(value)}
    row["tokens"] = int(np.count_nonzero(batch["mask"]))
    row["tokens_per_s"] = round(row["tokens"] / (time.perf_counter() - started))
    return state, row


def num_steps(folder: pathlib.Path) -> int:
    """Returns the step of the newest checkpoint in `folder`; 0 without one."""
    names = [path.name for path in (folder / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def restore(recipe: Recipe, init: Params, folder: pathlib.Path):
    """Returns the parameters of the newest checkpoint in `folder`, and its step.

    Raises:
      ValueError: no checkpoint there.
    """
    with ocp.CheckpointManager((folder / "checkpoints").absolute()) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError(f"{folder}: no checkpoint; train this stage first")
        return _restored(manager, _start(recipe, init))["params"], step


def _start(recipe: Recipe, init: Params) -> dict:
    return {
        "params": init,
        "opt_state": optimizer(recipe).init(init),
        "step": jnp.int32(0),
    }


def _restored(manager: ocp.CheckpointManager, state: dict) -> dict:
    """Returns the newest checkpoint, of a state like this one."""
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))


def _open_log(folder: pathlib.Path, first_step: int):
    """Opens the log for appending, without the lines past the checkpoint."""
    path, whole = folder / "log.jsonl", folder / "log_whole.jsonl"
    lines = (json.dumps(row) + "\n" for row in log_of(folder, first_step))
    whole.write_text("".join(lines), encoding="utf-8")
    whole.replace(path)  # So the log is never half a file.
    return path.open("a", encoding="utf-8")


def log_of(folder: pathlib.Path, num_steps: int | None = None) -> list[dict[str, Any]]:
    """Returns the rows of a run's log.

    Half a line, which a kill leaves, is skipped.

    Args:
      num_steps: of the first steps alone, as of a checkpoint; None: of all.
    """
    path = folder / "log.jsonl"
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if num_steps is None or row["step"] < num_steps:
            rows.append(row)
    return rows


def last_held_out(folder: pathlib.Path, num_steps: int | None = None) -> dict[str, Any]:
    """Returns the newest row with held-out numbers; `num_steps` as of `log_of`.

    Raises:
      ValueError: nothing was measured so far.
    """
    rows = [row for row in log_of(folder, num_steps) if "held_out_loss" in row]
    if not rows:
        raise ValueError(
            f"{folder}: no held-out text was measured yet: train more steps"
        )
    return rows[-1]


def tokens_seen(folder: pathlib.Path, num_steps: int | None = None) -> int:
    """Returns the training tokens in a run's log; `num_steps` as of `log_of`."""
    return sum(row["tokens"] for row in log_of(folder, num_steps))
