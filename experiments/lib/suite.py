"""The exactness suite: a row of every prompt in every cell.

Prompts are decoded, and run in the rounds of a cell, both with a recorder. Decoding
gets its pages in another order than the rounds, so that equal bits are also equal over
pages; and slots are used again and again, so that a prompt finds the pages of the
prompts before it.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.lib import (
    exact_cells as cells_lib,
    models as models_lib,
    prompt_files,
    runs,
)
from spec_jax import loading
from spec_jax.debug import evidence, recorder
from spec_jax.drafters import registry
from spec_jax.engine import baseline, checks, scheduler as scheduler_lib
from spec_jax.paging import index


Row = Mapping[str, Any]

Rounds = tuple[evidence.Evidence, dict[str, int]]
"""A run in rounds: the evidence, and its counters by the names of `COUNTS`."""

COUNTS = ("rounds", "proposed", "accepted")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """Folders of models; the draft or the head is None where no cell has one."""

    target: Any
    draft: Any
    head: Any

    def load(self, cell: cells_lib.Cell) -> loading.LanguageModel:
        """Returns a cell's target, with the draft model as its drafter, or a lookup."""
        return loading.load(
            self.target,
            draft=self.draft,
            drafter="ngram" if self.draft is None else "draft-model",
            # As many as fit, whatever the cell's gamma: cells share executables.
            gamma_max=cell.slab - 1,
            dtype=cell.dtype,
            weights=cell.weights if cell.weights != "dense" else None,
            impl=cell.impl,
            cache=cell.cache,
            slab=cell.slab,
        )

    def with_drafter(
        self, lm: loading.LanguageModel, cell: cells_lib.Cell
    ) -> loading.LanguageModel:
        """Returns the models of `load` with the cell's drafter."""
        name = "oracle" if cell.drafter in cells_lib.FORCED else cell.drafter
        draft = self.head if name in registry.NEED_TARGET else self.draft
        how = {"gamma_max": lm.gamma_max, "dtype": cell.dtype}
        parts = models_lib.parts_of(lm, folder=self.target, draft=draft, **how)
        # No shipped head in a draft model's place: the header has the hash of neither.
        parts = dataclasses.replace(parts, has_draft=True)
        lm = lm.with_drafter(*registry.build(name, parts))
        return lm if cell.tree == cells_lib.NO_TREE else lm.with_tree(cell.tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The models, cells and prompts that are to be run.

    Attributes:
      header: description of the run in rows and certificates, JSON values only:
        settings, environment, weights, prompts.
    """

    models: Models
    # In the order of `exact_cells.of_axes`
    cells: Sequence[cells_lib.Cell]
    prompts: Sequence[prompt_files.Prompt]
    gen_tokens: int
    longest: int  # positions that the longest prompt and its text need
    stop_ids: tuple[int, ...]
    header: Mapping[str, Any]
    done: frozenset[tuple[str, int]] = frozenset()  # `key` of rows that exist

    def settings(
        self, lm: loading.LanguageModel, cell: cells_lib.Cell
    ) -> runs.Settings:
        """Returns the settings of a cell's runs, plain or in rounds."""
        pages = index.pages_for(self.longest, cell.page_size)
        return runs.Settings(
            lm=lm,
            gamma=cell.gamma,
            gen_tokens=self.gen_tokens,
            capacity=pages * cell.page_size,
            page_size=cell.page_size,
            stop_ids=self.stop_ids,
            prefill_by_rows=cell.prefill == "rows",
            sampling=cell.settings,
            num_slots=cell.batch,
        )


def decode(settings: runs.Settings, prompt: list[int]) -> evidence.Evidence:
    """Decodes a prompt with a recorder, on shuffled pages where there are pages."""
    lm, kv = settings.lm, runs.new_cache(settings)
    watched = recorder.Recorder(target=lm.target)
    free, num_free = np.array(kv.free_pages), int(kv.num_free)
    free[:num_free] = np.random.default_rng(0).permutation(free[:num_free])
    kv = kv.replace(free_pages=jnp.array(free))
    state = baseline.generate(
        watched,
        lm.params,
        watched.attach(runs.begin_plain(settings, prompt, kv)),
        max_steps=jnp.int32(settings.gen_tokens),
    )
    with contextlib.suppress(FloatingPointError):  # Such logits are counted.
        baseline.check(watched.detach(state)[0], vocab_size=lm.target.config.vocab_size)
    return evidence.of_decode(state, num_prompt=len(prompt))


class _Recorded(scheduler_lib.Scheduler):
    """A scheduler whose rounds are recorded; prompts enter as in any other."""

    @property
    def target(self) -> Any:
        """The target that is recorded."""
        return self.speculator.target.target

    def admit(self, state, slot, request, **how):
        """Admits a request to a recorded state, and frees pages of earlier runs."""
        del how
        state, recording = self.speculator.target.detach(state)
        state = super().admit(state, slot, request)
        return state.replace(cache=recording.replace(cache=state.cache))


class Slots:
    """A cell's slots; a prompt takes the next slot that becomes free.

    Raises:
      ValueError, NotImplementedError: a drafter that has no form for these slots.
    """

    def __init__(self, cell: cells_lib.Cell, settings: runs.Settings):
        """Allocates the slots, all empty; the models have the cell's drafter."""
        policy, first = cell.policy(settings.lm.drafter)
        change = {"gamma_policy": policy, "policy_state": first}
        made = runs.make_scheduler(dataclasses.replace(settings, **change))
        watched = recorder.Recorder(target=made.target)
        speculator = made.speculator.replace(target=watched)
        self._scheduler = _Recorded(**vars(made) | {"speculator": speculator})
        self._state = watched.attach(made.empty(draws=settings.sampling is not None))
        rate = cells_lib.FORCED.get(cell.drafter, 1.0)
        self._request = functools.partial(runs.make_request, settings, rate=rate)
        self._capacity = settings.capacity

    def run(
        self, prompts: Sequence[list[int]], plain: Sequence[evidence.Evidence]
    ) -> list[Rounds]:
        """Runs all prompts; takes the evidence of each before its slot is refilled.

        Args:
          plain: the decoding of each prompt.

        Raises:
          ValueError, MemoryError, RuntimeError: as `Scheduler.run`.
        """
        requests = []
        for ids, one in zip(prompts, plain, strict=True):
            # All texts have one size: nothing compiles anew.
            text = checks.text_buffer([*ids, *one.tokens], self._capacity)
            requests.append(self._request(ids, text.tolist()))
        found: dict[int, Rounds] = {}
        where = {"state": self._state, "keep": lambda *state_and_slot: state_and_slot}
        for one in self._scheduler.run(requests, **where):
            self._state, slot = one.kept  # Valid until the next one is asked for.
            found[one.number] = _of_slot(self._state, slot, len(prompts[one.number]))
        return [found[number] for number in range(len(prompts))]


def _of_slot(state, slot: int, num_prompt: int) -> Rounds:
    found = evidence.of_slot(state, num_prompt=num_prompt, slot=slot)
    counts = {name: int(getattr(state.slots, f"num_{name}")[slot]) for name in COUNTS}
    return found, counts


def rows_of(plan: Plan, cells: Sequence[cells_lib.Cell]) -> Iterator[dict[str, Any]]:
    """Yields the row of every cell and prompt that has none yet.

    Cells that share decoding go through the prompts together, in parts so large that
    batches refill their slots; each prompt of a part is decoded once.
    """
    count = len(plan.prompts)
    for _, sharing in itertools.groupby(cells, lambda cell: cell.plain):
        group = list(sharing)
        lm, slots = None, {}  # All cells of a group have one target and draft.
        largest = max(cell.batch for cell in group)
        size = 2 * largest if largest > 1 else 1
        for first in range(0, count, size):
            part = range(first, min(first + size, count))
            plain = {}  # Decoding by prompt; for this part alone: it holds K/V.
            for cell in group:
                missing = [n for n in part if (cell.name, n) not in plan.done]
                if not missing:
                    continue
                lm = lm or plan.models.load(cell)
                if cell not in slots:
                    own = plan.models.with_drafter(lm, cell)
                    slots[cell] = Slots(cell, plan.settings(own, cell))
                seated = _seated(missing, count, cell.batch)
                for number in set(seated) - set(plain):
                    prompt = plan.prompts[number].ids
                    plain[number] = decode(plan.settings(lm, cell), prompt)
                texts = [plan.prompts[number].ids for number in seated]
                found = slots[cell].run(texts, [plain[number] for number in seated])
                for number, rounds in zip(missing, found, strict=False):
                    yield _row(
                        cell, number, plan.prompts[number], plain[number], rounds
                    )


def _seated(numbers: Sequence[int], count: int, batch: int) -> list[int]:
    """Returns the prompts, and as many others as fill the batch."""
    following = [(numbers[-1] + 1 + n) % count for n in range(count)]
    others = [number for number in following if number not in numbers]
    return [*numbers, *others[: max(batch - len(numbers), 0)]]


def _row(
    cell: cells_lib.Cell,
    number: int,
    prompt: prompt_files.Prompt,
    plain: evidence.Evidence,
    rounds: Rounds,
) -> dict[str, Any]:
    """Returns the row of one prompt in one cell."""
    spec, counts = rounds
    return {
        "kind": "prompt",
        "cell": cell.name,
        "index": number,
        "id": prompt.id,
        "prompt_tokens": len(prompt.ids),
        "tokens": len(spec.tokens),
        **counts,
        "nonfinite_logits": max(plain.nonfinite, spec.nonfinite),
        "constant_logits": int(plain.constant.sum()),
        "differences": [one.to_row() for one in evidence.compare(plain, spec)],
        "plain_sha256": plain.hashes(),
        "spec_sha256": spec.hashes(),
    }


def key(row: Row) -> tuple[str, int]:
    """Returns the cell and the prompt's index, which identify a row."""
    return row["cell"], row["index"]
