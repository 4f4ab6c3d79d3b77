"""Trainings of heads: texts and features of a target, and the drafter that learns them.

Holds the parts that the stages after the rollouts share, and `cache` and `train`.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.heads import families
from experiments.lib import cli, files, terminal
from spec_jax.model import config as config_lib, params as params_lib
from spec_jax.training import heads, loop, targets


FLAGS, SCALE = "flags.json", "feature_scale.npy"  # in `--work`
HELD_OUT_SHARE = 16  # One sequence in this many is held out, at least a batch of them.


def texts_path(args: argparse.Namespace) -> pathlib.Path:
    """Returns the path of the rollouts."""
    return (args.texts or args.work) / "texts.npz"


def texts_of(args: argparse.Namespace) -> targets.Texts:
    """Reads the rollouts; raises `ValueError` if there are none."""
    path = texts_path(args)
    if not path.exists():
        raise ValueError(f"{path}: no such file; run the stage rollouts first")
    with np.load(path) as held:
        parts = dict(held)
    return targets.Texts(**parts | {"samples": int(parts["samples"])})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The models and texts that the stages after the rollouts share."""

    target: config_lib.ModelConfig
    params: params_lib.Params
    family: families.Family
    config: Any  # the drafter's, of a type of the family
    hot: jax.Array | None
    online: targets.Outputs
    base: Any  # the drafter of `--base`, or None
    scale: np.ndarray | None  # of the features, see `targets.scale_of`

    @property
    def teacher(self) -> targets.Teacher:
        """The parts of the target that the drafter is trained with."""
        return targets.teacher_of(self.params, self.hot, self.scale)


def prepare(args: argparse.Namespace) -> Job:
    """Reads target and texts, and returns them with the config of the drafter.

    Raises:
      ValueError: there are no texts; and as `families.plan`.
    """
    texts, family = texts_of(args), families.FAMILIES[args.family]
    args.length = texts.tokens.shape[1]
    target, params = families.load_target(args)
    config, scale = families.plan(args, target), args.work / SCALE
    base = family.files.load(args.base, target, params)[1] if args.base else None
    if base is None:
        size, V = config.draft_vocab_size, target.vocab_size
        hot = targets.draft_vocabulary(texts, size=size, vocab_size=V)
    else:
        hot = base.hot
    return Job(
        target=target,
        params=params,
        family=family,
        config=config,
        hot=None if hot is None else jnp.asarray(hot),
        online=targets.Outputs(
            texts=texts,
            params=params,
            config=target,
            taps=config.taps,
            normalizers=args.family == "dspark" and hot is not None,
        ),
        base=base,
        scale=np.load(scale) if loop.num_steps(args.work) and scale.exists() else None,
    )


def cache(args: argparse.Namespace) -> None:
    """Writes the target's features of the texts that the cache lacks."""
    data = cached(args, prepare(args).online)
    with terminal.counted("cache", total=len(data)) as advance:
        for row in range(len(data)):
            data.rows_of(row)
            advance()


def cached(args: argparse.Namespace, online: targets.Outputs) -> targets.Outputs:
    """Returns the same outputs with their cache on disk, which is beside the texts."""
    return targets.cached(online, texts_path(args).with_name("cache"))


def recipe(args: argparse.Namespace) -> loop.Recipe:
    """Returns the recipe of a training: its steps, batches and learning rates."""
    return loop.Recipe(
        steps=args.steps,
        batch_size=args.batch,
        part_size=args.part,
        learning_rate=args.learning_rate,
        adam_learning_rate=0.15 * args.learning_rate,
        eval_every=args.eval_every,
        save_every=args.save_every,
        seed=args.seed,
    )


def init(args: argparse.Namespace, job: Job) -> loop.Params:
    """Returns the first weights: random ones, or those of `--base`."""
    if job.base is not None:
        found = heads.trained(job.config, job.base)
        return found if job.scale is None else rescaled(found, 1 / job.scale)
    key = jax.random.key(args.seed)
    return job.family.training.init(key, job.config, job.params, job.hot)


def _told(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Returns the family and the flags of these names, as JSON values."""
    flags = {"family": args.family} | {name: getattr(args, name) for name in names}
    return json.loads(json.dumps(flags, default=str))


def keep_flags(args: argparse.Namespace) -> None:
    """Writes the flags of a drafter's training beside its checkpoints.

    Raises:
      ValueError: there are checkpoints of other flags; only `--steps` may differ.
    """
    path = args.work / FLAGS
    flags = _told(args, families.deciding(args.family))
    if path.exists() and loop.num_steps(args.work):
        _held(path, {name: x for name, x in flags.items() if name != "steps"})
    with files.replacing(path) as part:
        part.write_text(json.dumps(flags, indent=2) + "\n", encoding="utf-8")


def as_trained(args: argparse.Namespace) -> dict[str, Any]:
    """Sets the flags of a drafter as they were in its training, and returns them.

    Raises:
      ValueError: there is no training, or flags in `args.given` differ from its own.
    """
    path = args.work / FLAGS
    if not path.exists():
        raise ValueError(f"{path}: no such file; run the stage train first")
    held = _held(path, _told(args, args.given - {"dialect"}))  # This one may differ.
    vars(args).update(held)
    args.taps = held["taps"] and tuple(held["taps"])
    args.base = held["base"] and pathlib.Path(held["base"])
    return held


def _held(path: pathlib.Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the flags of a training; raises `ValueError` if `asked` differs."""
    held = json.loads(path.read_text(encoding="utf-8"))
    for name, value in asked.items():
        if held.get(name) != value:
            was, now = (f"{cli.flag_of(name)} {x}" for x in (held.get(name), value))
            raise ValueError(
                f"{path}: of a training with {was}, and this command has {now}: give "
                "the same, or another --work"
            )
    return held


@functools.cache  # The step takes it as static: a new object would compile anew.
def _bound(function: Any, config: Any, told: tuple) -> Any:
    """Returns a loss, or a measure, that computes in the dtype of the config."""
    bound = functools.partial(function, config, **dict(told))
    return lambda params, batch, teacher: bound(
        rescaled(params, teacher.scale), _cast(batch, config.layer.dtype), teacher
    )


def rescaled(params: Any, scale: Any) -> Any:
    """Returns the weights for features divided by `scale`, if there is one."""
    if scale is None:
        return params
    mask = getattr(params, "mask_hidden", None)  # `mask_hidden` stands in for features.
    own = {} if mask is None else {"mask_hidden": mask / scale}
    return params.replace(fc=params.fc * scale, **own)


def _cast(tree: Any, dtype: str) -> Any:
    """Returns a tree whose floating-point leaves have a dtype.

    Normalizers stay float32: their exponentials are taken.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, x: (
            x.astype(dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            and path[-1:] != (jax.tree_util.DictKey("normalizer"),)
            else x
        ),
        tree,
    )


def num_held_out(args: argparse.Namespace, texts: targets.Texts) -> int:
    """Returns how many of the last texts are held out: all samples of their prompts."""
    count = max(args.batch, len(texts) // HELD_OUT_SHARE)
    return -(-count // texts.samples) * texts.samples


def train(args: argparse.Namespace, *, stop_after: int | None = None) -> dict:
    """Trains the drafter, or resumes that; returns the last held-out numbers."""
    job = prepare(args)
    family, config = job.family, job.config
    if args.compute:  # The dtype of the products.
        layer = dataclasses.replace(config.layer, dtype=args.compute)
        config = dataclasses.replace(config, layer=layer)
    data = job.online
    if args.targets == "cache":
        data = cached(args, data)
    held_out = num_held_out(args, job.online.texts)
    if len(data) < held_out + args.batch:
        raise ValueError(
            f"{len(data)} texts are too few for batches of {args.batch}, of which one "
            "is held out; name more --prompts or --samples, or a smaller --batch"
        )
    first = len(data) - held_out
    keep_flags(args)
    train_data = data.part(slice(first))
    if not loop.num_steps(args.work):
        job = dataclasses.replace(job, scale=targets.scale_of(train_data))
        np.save(args.work / SCALE, job.scale)
    told = families.of_loss(args)
    measured = tuple((name, told[name]) for name in ("steps",) if name in told)
    done = loop.num_steps(args.work)
    with terminal.counted(args.family, total=args.steps, done=done) as advance:
        for of_loss, end in _phases(args, stop_after or args.steps):
            loop.run(
                recipe(args),
                init(args, job),
                _bound(family.training.loss, config, tuple(of_loss.items())),
                train_data,
                data.part(slice(first, None)),
                args.work,
                teacher=_cast(job.teacher, config.layer.dtype),
                measure=_bound(family.training.measure, config, measured),
                draw=families.draw_of(args, config, job.hot),
                mesh=loop.data_mesh(args.devices),
                after_step=lambda row: advance(said=f"loss {row['loss']:.3f}"),
                stop_after=end if end < args.steps else None,
            )
    return loop.last_held_out(args.work)


def _phases(args: argparse.Namespace, end: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the arguments of the loss in each phase, and the step that ends it."""
    told = families.of_loss(args)
    alone = min(args.first_alone or 0, end)
    if loop.num_steps(args.work) < alone or alone == end:
        yield told | {"steps": 1}, alone
    if alone < end:
        yield told, end
