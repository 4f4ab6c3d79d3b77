"""The optimiser loop of the embedded pair: resumable, with a log that survives kills.

A run is a pure function of its `Recipe` and its data: batches depend on the step
alone, and a checkpoint holds everything else, so a killed and resumed run writes the
same losses as an undisturbed one.
"""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from rich import progress

from experiments.pair import corpus, muon
from spec_jax.model import config as config_lib, params as params_lib, sequence


Loss = Callable[[params_lib.Params, jax.Array, params_lib.Params | None], jax.Array]
"""`(params, tokens [B, T + 1], teacher) -> mean loss per token, nats`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a training run except its data."""

    steps: int
    batch_size: int = 16
    part_size: int = 2  # sequences at a time: what fits a CPU's caches
    learning_rate: float = 0.02  # Muon, for the matrices of the layers
    adam_learning_rate: float = 0.003  # embedding and norms
    warmup_steps: int = 50
    decay_share: float = 0.3  # of the steps, at the end
    eval_every: int = 50
    save_every: int = 25
    seed: int = 0


def learning_rate(recipe: Recipe, peak: float) -> optax.Schedule:
    """Returns the learning rate by step: it rises, stays at `peak`, and falls.

    It falls linearly to nothing over the last `decay_share` of the steps. Until then a
    run does not depend on `steps`, so that it can be made longer.
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


@functools.cache  # A static argument of the step: one object, one compilation.
def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon for the layers' matrices, Adam for the rest, both by `learning_rate`."""
    adam = optax.adamw(
        learning_rate(recipe, recipe.adam_learning_rate),
        b2=0.98,
        weight_decay=0.0,
        nesterov=True,
    )
    transforms = {
        "adam": adam,
        "muon": muon.muon(learning_rate(recipe, recipe.learning_rate)),
    }
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.partition(transforms, labels)
    )


def labels(params: params_lib.Params) -> params_lib.Params:
    """Which optimiser a leaf is for: the matrices of the layers are Muon's."""
    layer = params_lib.LayerParams(
        input_norm="adam",
        qkv="muon",
        q_norm="adam",
        k_norm="adam",
        attention_out="muon",
        mlp_norm="adam",
        gate_up="muon",
        down="muon",
    )
    return params_lib.Params(
        embed="adam",
        layers=(layer,) * len(params.layers),
        final_norm="adam",
        lm_head=None if params.lm_head is None else "adam",
    )


def text_loss(
    config: config_lib.Qwen3Config,
    params: params_lib.Params,
    tokens: jax.Array,
    teacher: None = None,
) -> jax.Array:
    """Returns the mean cross-entropy of the next token, nats. There is no teacher.

    `config.dtype` is the dtype of the forward pass: with "bfloat16" the float32
    parameters are rounded before they are used, and their gradients are float32.
    """
    del teacher
    labels = tokens[:, 1:, None]
    logits = _logits(config, params, tokens)
    # A comparison and a sum: the gradient of a gather is a serial scatter on a CPU.
    is_label = jnp.arange(logits.shape[-1], dtype=labels.dtype) == labels
    at_label = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - at_label)


def distillation_loss(
    config: config_lib.Qwen3Config,
    teacher_config: config_lib.Qwen3Config,
    params: params_lib.Params,
    tokens: jax.Array,
    teacher: params_lib.Params,
) -> jax.Array:
    """Returns the draft's cross-entropy against the target's distribution, nats.

    Up to the target's entropy, a constant, this is the forward KL divergence.
    """
    targets = jax.nn.softmax(_logits(teacher_config, teacher, tokens))
    logits = _logits(config, params, tokens)
    # Both in one sum: `mean(logsumexp(logits) - sum(targets * logits))`.
    return jnp.mean(
        jax.nn.logsumexp(logits, axis=-1) - jnp.sum(targets * logits, axis=-1)
    )


def _logits(config, params, tokens):
    """Float32 logits of all but the last of `tokens [B, T + 1]`."""
    return sequence.logits(
        params_lib.cast(params, config.dtype), config, tokens[:, :-1]
    )


def held_out_loss(
    loss: Loss,
    params: params_lib.Params,
    data: np.ndarray,
    *,
    batch_size: int,
    teacher: params_lib.Params | None = None,
) -> float:
    """Mean loss over `data [windows, T + 1]`, whole batches only."""
    num_batches = len(data) // batch_size
    parts = [
        loss(params, data[i * batch_size : (i + 1) * batch_size], teacher)
        for i in range(num_batches)
    ]
    return float(np.mean([float(part) for part in parts]))


def value_and_grad(
    loss: Loss,
    params: params_lib.Params,
    tokens: jax.Array,
    teacher: params_lib.Params | None,
    *,
    part_size: int,
) -> tuple[jax.Array, params_lib.Params]:
    """Loss and gradients of a batch, the means of those of its parts.

    A part is `part_size` sequences. On a CPU with 32 MiB of cache, gradients of two at
    a time take a third less than those of sixteen at once: what a layer leaves for the
    backward pass is still there, and less memory is asked of the system anew.

    Raises:
      ValueError: the batch is not of whole parts.
    """
    if len(tokens) % part_size:
        raise ValueError(
            f"a batch of {len(tokens)} sequences is not of whole parts of {part_size}; "
            "choose a divisor as part_size"
        )
    parts = tokens.reshape(-1, part_size, tokens.shape[-1])

    def add(total, part):
        return jax.tree.map(
            jnp.add, total, jax.value_and_grad(loss)(params, part, teacher)
        ), None

    nothing = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(add, nothing, parts)
    return jax.tree.map(lambda x: x / len(parts), total)


@functools.partial(
    jax.jit, static_argnames=("loss", "transform", "part_size"), donate_argnums=(0,)
)
def _step(state, tokens, teacher, *, loss, transform, part_size):
    value, grads = value_and_grad(
        loss, state["params"], tokens, teacher, part_size=part_size
    )
    updates, opt_state = transform.update(grads, state["opt_state"], state["params"])
    return {
        "params": optax.apply_updates(state["params"], updates),
        "opt_state": opt_state,
        "step": state["step"] + 1,
    }, value


def run(
    name: str,
    recipe: Recipe,
    init: params_lib.Params,
    loss: Loss,
    data: np.ndarray,
    held_out: np.ndarray,
    folder: pathlib.Path,
    *,
    teacher: params_lib.Params | None = None,
    stop_after: int | None = None,
) -> params_lib.Params:
    """Trains from `init`, or from the newest checkpoint in `folder`.

    Writes `folder/log.jsonl`, one line a step (`step`, `loss`, and every
    `eval_every` steps `held_out_loss`).

    Args:
      init: donated.
      loss: hashable by identity; traced once.
      teacher: handed to the loss.
      stop_after: stops after this step, as if killed (tests resumption).

    Returns:
      The parameters after the last step that was run.
    """
    state = _start(recipe, init)
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager(
        (folder / "checkpoints").absolute(), options=options
    ) as manager:
        if manager.latest_step() is not None:
            state = manager.restore(
                manager.latest_step(), args=ocp.args.StandardRestore(_abstract(state))
            )
        first = int(state["step"])
        transform, evaluate = optimizer(recipe), jax.jit(loss)
        with _open_log(folder / "log.jsonl", first) as log, _progress(name) as bar:
            task = bar.add_task("", total=recipe.steps, completed=first)
            for step in range(first, recipe.steps):
                tokens = corpus.batch(
                    data, size=recipe.batch_size, step=step, seed=recipe.seed
                )
                started = time.perf_counter()
                state, value = _step(
                    state,
                    tokens,
                    teacher,
                    loss=loss,
                    transform=transform,
                    part_size=recipe.part_size,
                )
                row = {"step": step, "loss": float(value)}
                row["tokens"] = tokens[:, 1:].size
                seconds = time.perf_counter() - started
                row["tokens_per_s"] = round(tokens[:, 1:].size / seconds)
                done = step + 1
                if done == recipe.steps or done % recipe.eval_every == 0:
                    row["held_out_loss"] = held_out_loss(
                        evaluate,
                        state["params"],
                        held_out,
                        batch_size=recipe.batch_size,
                        teacher=teacher,
                    )
                log.write(json.dumps(row) + "\n")
                log.flush()
                bar.update(task, advance=1, description=f"loss {row['loss']:.3f}")
                if done == recipe.steps or done % recipe.save_every == 0:
                    manager.save(done, args=ocp.args.StandardSave(state))
                if done == stop_after:
                    break
    return state["params"]


def _progress(name: str) -> progress.Progress:
    return progress.Progress(
        progress.TextColumn(f"{name} {{task.description}}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )


def restore(recipe: Recipe, init: params_lib.Params, folder: pathlib.Path):
    """The parameters of the newest checkpoint in `folder`, and its step.

    Raises:
      ValueError: no checkpoint there.
    """
    with ocp.CheckpointManager((folder / "checkpoints").absolute()) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError(f"{folder}: no checkpoint; train this stage first")
        state = manager.restore(
            step, args=ocp.args.StandardRestore(_abstract(_start(recipe, init)))
        )
    return state["params"], step


def _start(recipe: Recipe, init: params_lib.Params) -> dict:
    return {
        "params": init,
        "opt_state": optimizer(recipe).init(init),
        "step": jnp.int32(0),
    }


def _abstract(state: dict) -> dict:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


def _open_log(path: pathlib.Path, first_step: int):
    """Opens the log for appending, without the lines past the checkpoint."""
    kept = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break  # The line that the kill cut in half.
            if row["step"] < first_step:
                kept.append(line)
    path.write_text("".join(line + "\n" for line in kept))
    return path.open("a", encoding="utf-8")


def last_held_out_loss(folder: pathlib.Path) -> float:
    """The newest held-out loss in a run's log."""
    with (folder / "log.jsonl").open(encoding="utf-8") as log:
        rows = [json.loads(line) for line in log]
    return [row["held_out_loss"] for row in rows if "held_out_loss" in row][-1]


def tokens_seen(folder: pathlib.Path) -> int:
    """Training tokens of all steps in a run's log."""
    with (folder / "log.jsonl").open(encoding="utf-8") as log:
        return sum(json.loads(line)["tokens"] for line in log)
