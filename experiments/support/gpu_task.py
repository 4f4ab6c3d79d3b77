"""What every section of the GPU report gets: sizes, time, and where its rows go.

Knows clocks, rows and failures; knows neither kernels nor models beyond their sizes.
"""

import contextlib
import dataclasses
import math
import re
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any, TypeVar

from experiments.lib import records, subjects
from spec_jax.model import config as config_lib


_T = TypeVar("_T")
_TRACEBACK_LINES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much a report measures.

    Attributes:
      target, draft: the models; weights are random.
      height: rows of a slab.
      contexts: positions that steps attend to, in rising order.
      attention_contexts: the same, of the attention kernel alone.
      bitwise_contexts: of the two slots of a slab, pair by pair.
      page_size: positions of a page.
      live_rows: numbers of live rows of a step.
      steps: of one timed call.
      gammas, rates: of the speculative runs; the most important first.
      generated: tokens of a speculative run.
      repeats: timings of each number.
      timed_s: what one timing of a kernel takes, at least.
      streamed_bytes: weights that kernels read in turn: many times the L2 cache.
      copied_bytes: of the array whose copy is the measure of bandwidth.
      most_plans: candidates tried for each shape.
      models, products: what is multiplied.
    """

    target: config_lib.Qwen3Config
    draft: config_lib.Qwen3Config
    height: int = 16
    contexts: tuple[int, ...]
    attention_contexts: tuple[int, ...]
    bitwise_contexts: tuple[tuple[int, int], ...]
    page_size: int = 16
    live_rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    steps: int
    gammas: tuple[int, ...]
    rates: tuple[float, ...] = (0.39, 0.6, 0.8)
    generated: int
    repeats: int
    timed_s: float
    streamed_bytes: int
    copied_bytes: int
    most_plans: int
    models: tuple[str, ...] = ("target", "draft")
    products: tuple[str, ...] = ("qkv", "out", "gate", "down", "head")


REAL = Sizes(
    target=subjects.PRESETS["qwen3-8b"],
    draft=subjects.PRESETS["qwen3-0.6b"],
    contexts=(128, 1024, 4096, 16_384, 32_768),
    attention_contexts=(1024, 4096, 16_384, 32_768),
    bitwise_contexts=((0, 0), (5, 300), (4090, 33), (16_380, 2048)),
    steps=16,
    gammas=(4, 1, 2, 3, 5, 6, 7),
    generated=128,
    repeats=20,
    timed_s=5e-3,
    streamed_bytes=400 * 2**20,
    copied_bytes=2**30,
    most_plans=12,
)

QUICK = dataclasses.replace(
    REAL,
    contexts=(128, 16_384),
    attention_contexts=(1024, 16_384),
    live_rows=(1, 2, 5, 8),
    gammas=(4, 2),
    generated=48,
    repeats=5,
    most_plans=4,
)

_TINY_MODEL = config_lib.Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position_embeddings=256,
    # Tied to the head, a random embedding repeats one token for ever.
    tie_word_embeddings=False,
    dtype="bfloat16",
)

TINY = Sizes(
    target=_TINY_MODEL,
    draft=dataclasses.replace(
        _TINY_MODEL, hidden_size=32, intermediate_size=32, tie_word_embeddings=True
    ),
    contexts=(8, 40),
    attention_contexts=(32,),
    bitwise_contexts=((3, 20),),
    live_rows=(1, 5),
    steps=1,
    gammas=(2,),
    rates=(0.6,),
    generated=6,
    repeats=1,
    timed_s=1e-6,
    streamed_bytes=1,
    copied_bytes=2**20,
    most_plans=1,
    models=("target",),
    products=("out", "gate"),
)
"""For a smoke test: kernels that are interpreted take milliseconds for a row."""


class Task:
    """One section's work: it writes rows as they are known, and keeps to its time."""

    def __init__(
        self,
        *,
        section: str,
        sizes: Sizes,
        impl: str,
        out: records.JsonLines,
        budget_s: float,
        where: dict[str, Any],
        only_hashes: bool = False,
        only: re.Pattern | None = None,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the clock.

        Args:
          section: its letter, for the rows.
          impl: a resolved implementation.
          where: device, versions and commit, for every row.
          only_hashes: of section (a), for a second process to be compared with.
          only: found in the names of the items that are wanted; None is all of them.
          say: gets a line for each row.
        """
        self.section, self.sizes, self.impl = section, sizes, impl
        self.only_hashes, self._only = only_hashes, only
        self.failures = 0
        self._out, self._where, self._say = out, where, say
        self._clock, self._budget_s, self._started = clock, budget_s, clock()

    @property
    def interpret(self) -> bool:
        """Whether the kernels run in Pallas's interpreter, on a CPU."""
        return self.impl == "interpret"

    @property
    def remaining_s(self) -> float:
        return self._budget_s - (self._clock() - self._started)

    def write(self, kind: str, **values: Any) -> dict[str, Any]:
        """Writes one row, and returns it. What is not finite becomes None."""
        row = {"section": self.section, "kind": kind, "impl": self.impl}
        row |= {name: _finite(value) for name, value in values.items()}
        row["at_s"] = round(self._clock() - self._started, 3)
        self._out.write(row | self._where)
        self._say(_line(row))
        return row

    @contextlib.contextmanager
    def guard(self, item: str) -> Iterator[None]:
        """Turns an exception into a row, so that what comes after is still done."""
        try:
            yield
        except Exception as error:
            self.failures += 1
            lines = traceback.format_exc().splitlines()
            self.write(
                "error",
                item=item,
                error=f"{type(error).__name__}: {_first_line(error)}",
                traceback=lines[-_TRACEBACK_LINES:],
            )

    def chosen(self, items: Iterable[_T], *, name: Callable = str) -> list[_T]:
        """The items that `--only` asks for; a row names the others."""
        items = list(items)
        if self._only is None:
            return items
        wanted = [item for item in items if self._only.search(name(item))]
        others = [name(item) for item in items if item not in wanted]
        if others:
            reason = f"--only {self._only.pattern}"
            self.write("left out", items=others, reason=reason)
        return wanted

    def in_time(self, items: Iterable[_T], *, name: Callable = str) -> Iterator[_T]:
        """The items while there is time; a row names those that are left out."""
        waiting = list(items)
        while waiting:
            if self.remaining_s <= 0:
                self.write(
                    "left out",
                    items=[name(item) for item in waiting],
                    reason=f"the section's {self._budget_s:.0f} s were over",
                )
                return
            yield waiting.pop(0)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:500]


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(row: dict[str, Any]) -> str:
    """A row in short, for the console."""
    shown = []
    for name, value in row.items():
        if name in ("section", "kind", "impl", "traceback") or value is None:
            continue
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        shown.append(f"{name}={text if len(text) <= 60 else text[:57] + '...'}")
    return f"({row['section']}) {row['kind']}: {' '.join(shown)}"


def where(sizes: Sizes) -> dict[str, Any]:
    """Code, libraries, device and driver, for every row of this process."""
    return {
        **records.provenance(),
        "dtype": sizes.target.dtype,
        "cuda_plugin_version": _version("jax-cuda13-plugin", "jax-cuda12-plugin"),
        "driver": nvidia_smi("name,driver_version,memory.total,clocks.max.sm"),
    }


def _version(*packages: str) -> str | None:
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{package} {metadata.version(package)}"
    return None


def nvidia_smi(query: str) -> str | None:
    """One line of `nvidia-smi --query-gpu`; None where there is no such program."""
    command = ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
