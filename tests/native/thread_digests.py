"""Prints hashes of what the kernels compute, and the size of XLA's thread pool.

`test_native_threads` runs this program under pools of several sizes. Beside the
kernels it hashes a planted fault: sums over as many pieces of K as there are threads.
"""

import functools
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import native_oracle as oracle
import numpy as np
import random_weights
import test_native_head
import test_native_step

from spec_jax.native import calls, draws
from spec_jax.rules import sampling


K, N = 96, 1500  # several chunks of weight rows for each thread


def pool_size() -> int:
    """Counts the threads of XLA's pool, by the name that XLA gives them."""
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    return sum(task.read_text().startswith("tf_XLAEigen") for task in tasks)


def digest(outputs) -> str:
    hashed = hashlib.sha256()
    for output in jax.tree.leaves(outputs):
        hashed.update(np.asarray(output).tobytes())
    return hashed.hexdigest()


def computations(rng):
    """Yields name, jitted call and arguments, with work for several threads."""
    live = np.int32(5)
    for dtype in ("float32", "bfloat16"):
        # Sums of some rows are denormal: every thread flushes them, or none does.
        rows = np.float32([[1], [1], [1e-38], [1e-30], [1]])
        x = (oracle.normal(rng, (5, K), "float32") * rows).astype(np.dtype(dtype))
        w = oracle.normal(rng, (N, K), dtype) * np.dtype(dtype).type(0.1)
        project = functools.partial(
            calls.project, norm=None, residual=None, num_active=live, eps=0.0,
            out_dtype=np.float32,
        )  # fmt: skip
        yield f"project {dtype}", jax.jit(project), {"x": x, "w": w}
        slab = oracle.make_slab(
            rng, [(0, 40), (0, 41), (1, 6)], dtype=dtype, N=16, K=8, H=32,
            page_size=8, prefix=(40, 6),
        )  # fmt: skip
        attend = functools.partial(calls.attend, eps=1e-6, scale=0.2)
        yield f"attend {dtype}", jax.jit(attend), slab.arguments()
        # Threads share the ranges of keys of one head.
        slab = oracle.make_slab(
            rng, [(0, 2050), (0, 2051)], dtype=dtype, N=2, K=1, H=32, page_size=64,
            prefix=(2050,),
        )  # fmt: skip
        yield f"attend long {dtype}", jax.jit(attend), slab.arguments()

    # These are wide enough for threads to share each operation; each has its own dtype.
    sizes = {"intermediate_size": 600, "num_heads": 24, "num_kv_heads": 8}
    target = test_native_step.make("float32", vocab_size=700, **sizes)
    head = test_native_head.make("plain", "bfloat16", **sizes)
    for its, made in ((test_native_step, target), (test_native_head, head)):
        how = {"live": 6, "forward": its.compile_(made[0])}
        yield its.__name__, functools.partial(its.run, *made), how

    logits = oracle.normal(rng, (5, 3000), "float32")
    settings = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (5,)),
        sampling.make_settings(temperature=1.0, top_p=0.9, seed=4),
    )
    how = draws.Draws(settings, jnp.arange(5), 3000, independent=False)
    draw = jax.jit(lambda logits: draws.draw(logits, how, asked=jnp.ones(5, bool)))
    yield "draw", draw, {"logits": logits}


def split_over_threads(x, w, pieces: int):
    """Plants the fault: adds partial sums over pieces of K."""
    edges = [K * i // pieces for i in range(pieces + 1)]
    options = {"norm": None, "residual": None, "eps": 0.0, "num_active": np.int32(5)}
    parts = (
        calls.project(x[:, a:b], w[:, a:b], out_dtype=np.float32, **options)
        for a, b in zip(edges, edges[1:], strict=False)
    )
    return sum(parts)


def main() -> None:
    random_weights.install()
    rng = np.random.default_rng(0)
    found = {}
    for name, call, arguments in computations(rng):
        # Each runs several times, since threads share the work by chance.
        runs = {digest(call(**arguments)) for _ in range(8)}
        found[name] = sorted(runs)
    x, w = (oracle.normal(rng, shape, "float32") for shape in ((5, K), (N, K)))
    planted = jax.jit(functools.partial(split_over_threads, pieces=pool_size()))
    report = {"threads": pool_size(), "split": digest(planted(x, w)), "digests": found}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
