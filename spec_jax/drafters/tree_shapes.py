"""The trees that are drafted: found by a search, or given beforehand.

`Tree` says how far a best-first search looks; which nodes it returns depends on the
draft's probabilities. The nodes of a `FixedTree` are ranks among their siblings, the
same in every round, as Medusa's tables and SpecInfer's expansions are.
"""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from spec_jax import regular_files
from spec_jax.engine import protocols


TAU = 0.4
"""Divides log weights unless another is fitted: sharper than probabilities, since the
target's token is the draft's most probable one more often than its probability says."""


_MAX_BYTES = 2**20
"""Most bytes of a file of paths: paths of 64 nodes take a few thousand."""

_NUMBER = r"[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?"
_SEARCH = re.compile(
    rf"([0-9]+)x([0-9]+):([0-9]+)(?:@({_NUMBER}))?(/greedy)?", re.ASCII
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """How far a search looks, and how many nodes it returns.

    Attributes:
      top_k: children of a node, and nodes expanded a level; `K` in `tree_search`.
      depth: drafts on a path, at most; `D`.
      nodes: drafts of a proposal, at most; `W`.
      tau: divides log weights; 1 scores by probability, as EAGLE-2 does.
      greedy: whether children are a draft model's most probable tokens also where the
        target samples, as EAGLE-2's are, rather than drafts that the target is most
        likely to draw. Lossless under the rule "coupled", as any tree is.

    Raises:
      ValueError: a size below one, more nodes than candidates or than a target's
        window takes, or a `tau` that is not above 0.
    """

    top_k: int
    depth: int
    nodes: int
    tau: float = TAU
    greedy: bool = False
    replaces: ClassVar[bool] = False  # See `FixedTree`: siblings of a search differ.

    def __post_init__(self) -> None:
        for name in ("top_k", "depth", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.nodes > self.num_candidates:
            raise ValueError(
                f"nodes={self.nodes} exceed the {self.num_candidates} candidates "
                f"of top_k={self.top_k} and depth={self.depth}: search wider or deeper"
            )
        _check_rows(self.nodes)
        if not self.tau > 0:
            raise ValueError(f"tau={self.tau} must be above 0")

    @property
    def num_candidates(self) -> int:
        """Nodes that a search scores."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def depth_max(self) -> int:
        """Drafts on a path of the nodes that are returned, at most."""
        return min(self.depth, self.nodes)

    @property
    def width(self) -> int:
        """Rows of a level that a search runs, at most."""
        return self.top_k

    @property
    def num_columns(self) -> int:
        """Rows of a slot that a search runs: the root and all frontiers."""
        return 1 + (self.depth - 1) * self.width

    def first(self, level: Int[Array, "*levels"]) -> Int[Array, "*levels"]:
        """Returns the column of a level's first row; the root is level 0."""
        return jnp.maximum(1 + (level - 1) * self.width, 0)

    def rows(self, level: Int[Array, ""]) -> Int[Array, ""]:
        """Returns how many rows of a level are run."""
        return jnp.int32(self.width)

    def frontier(
        self, scores: Float32[Array, "B n"], level: Int[Array, ""]
    ) -> Int[Array, "B K"]:
        """Returns which of a level's candidates the next level expands: the best."""
        return jax.lax.top_k(scores, self.top_k)[1]

    def may_grow(
        self,
        score: Float32[Array, "B C"],
        frontier: Int[Array, "B K"],
        wanted: Int[Array, " B"],
    ) -> Bool[Array, " B"]:
        """Returns where a child of the frontier may be among the best `wanted`."""
        best, _ = jax.lax.top_k(score, self.nodes)
        last = jnp.maximum(wanted, 1)[:, None] - 1
        worst = jnp.take_along_axis(best, last, axis=1)[:, 0]
        # The lower number wins a tie of scores, and children have higher numbers.
        highest = jnp.take_along_axis(score, frontier, axis=1)[:, 0]
        return highest > worst

    def choose(
        self, score: Float32[Array, "B C"], parent: Int[Array, "B C"]
    ) -> tuple[Int[Array, "B W"], Int[Array, "B W"], Int[Array, " B"]]:
        """Returns the best candidates, the columns of their parents, and how many of
        them are real."""
        scores, chosen = jax.lax.top_k(score, self.nodes)
        slots = jnp.arange(chosen.shape[0], dtype=jnp.int32)[:, None]
        columns = jnp.arange(1, self.nodes + 1, dtype=jnp.int32)
        column_of = jnp.zeros(score.shape, jnp.int32)
        columns = jnp.broadcast_to(columns, chosen.shape)
        column_of = column_of.at[slots, chosen].set(columns)
        above = jnp.take_along_axis(parent, chosen, axis=1)
        at = jnp.take_along_axis(column_of, jnp.maximum(above, 0), axis=1)
        num_real = jnp.sum(scores > -jnp.inf, axis=1, dtype=jnp.int32)
        return chosen, jnp.where(above < 0, 0, at), num_real

    @classmethod
    def parse(cls, text: str) -> "Tree":
        """Reads `KxD:W`, with `@tau` and `/greedy`; raises as `parse` does."""
        found = _SEARCH.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is no tree: give children x depth : nodes and, after @, a "
                "tau, as in 4x12:15 or 4x12:15@0.3, and /greedy for children that are "
                "never drawn; or a fixed tree's children by depth, as in 4-2-1"
            )
        *sizes, tau, greedy = found.groups()
        top_k, depth, nodes = map(int, sizes)
        made = cls(top_k=top_k, depth=depth, nodes=nodes, greedy=bool(greedy))
        return dataclasses.replace(made, tau=float(tau)) if tau else made

    def __str__(self) -> str:
        how = "/greedy" if self.greedy else ""
        return f"{self.top_k}x{self.depth}:{self.nodes}@{self.tau:g}{how}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedTree:
    """A tree of the same shape in every round, given by the paths of its nodes.

    Rank `r` is a node's `r`-th most likely child, or the `r`-th that is drawn. Nodes
    are ordered by depth, then by ranks; with fewer asked for the leading ones are
    drafted. Such are Medusa's trees (Cai et al. 2024, https://arxiv.org/abs/2401.10774)
    and SpecInfer's (`of_branching`).

    Attributes:
      paths: of all nodes, in any order, by the ranks on the way to them: (0, 2) is the
        third child of the first one. Each one's parent is among them.
      replaces: whether drawn siblings may be equal, each drawn as if it were alone.

    Raises:
      ValueError: no path, one twice, one without its parent, a rank below 0, or more
        nodes than a target's window takes.
    """

    paths: tuple[tuple[int, ...], ...]
    replaces: bool = False

    def __post_init__(self) -> None:
        by_depth = lambda path: (len(path), path)
        paths = sorted({tuple(path) for path in self.paths}, key=by_depth)
        if not paths or len(paths) != len(self.paths):
            raise ValueError(
                f"{len(self.paths)} paths, {len(paths)} of them different: give each "
                "node's path once, and at least one"
            )
        known = {(), *paths}
        for path in paths:
            if not all(isinstance(rank, int) and rank >= 0 for rank in path):
                raise ValueError(
                    f"path {list(path)}: ranks are whole numbers from 0 on"
                )
            if not path or path[:-1] not in known:
                raise ValueError(
                    f"path {list(path)} has no parent among the paths: add "
                    f"{list(path[:-1])}, and leave the root out"
                )
        _check_rows(len(paths))
        object.__setattr__(self, "paths", tuple(paths))

    @classmethod
    def of_branching(cls, numbers: Sequence[int]) -> "FixedTree":
        """Returns the tree with `numbers[d]` children of each node of depth `d`.

        Raises:
          ValueError: a number below 1, or more nodes than a window takes.
        """
        if not numbers or min(numbers) < 1:
            raise ValueError(
                f"branching {list(numbers)}: give a number of children from 1 on for "
                "each depth"
            )
        level: list[tuple[int, ...]] = [()]
        paths: list[tuple[int, ...]] = []
        for number in numbers:
            level = [(*path, rank) for path in level for rank in range(number)]
            paths += level
            _check_rows(len(paths))
        return cls(paths=tuple(paths))

    @property
    def nodes(self) -> int:
        """Drafts of a proposal, at most."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Drafts on a path, at most."""
        return len(self.paths[-1])

    depth_max = depth

    @property
    def top_k(self) -> int:
        """Children of a node, at most."""
        return 1 + max(path[-1] for path in self.paths)

    tau = 1.0
    """Scores decide nothing but the order of siblings."""

    @functools.cached_property
    def _inner(self) -> np.ndarray:
        """The nodes with children, by depth: their indices among `paths`."""
        parents = {path[:-1] for path in self.paths}
        return np.flatnonzero([path in parents for path in self.paths])

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """The column of each level's first row, from the root's on, and the end."""
        depths = [0, *(len(self.paths[node]) for node in self._inner)]
        return np.append(0, np.cumsum(np.bincount(depths)))

    @property
    def width(self) -> int:
        """Rows of a level that are run, at most."""
        return int(np.diff(self._starts).max())

    @property
    def num_candidates(self) -> int:
        """Nodes that are scored."""
        return self.top_k * self.num_columns

    @property
    def num_columns(self) -> int:
        """Rows of a slot: the root, all levels' nodes with children, and as many more
        as the last level is narrower than the widest one."""
        return int(self._starts[-2]) + self.width

    @functools.cached_property
    def branching(self) -> tuple[int, ...] | None:
        """The children of each node, by depth; None where their numbers differ."""
        sizes = np.bincount([0, *map(len, self.paths)])
        counts = tuple((sizes[1:] // sizes[:-1]).tolist())
        is_even = all(counts) and FixedTree.of_branching(counts).paths == self.paths
        return counts if is_even else None

    @functools.cached_property
    def columns(self) -> np.ndarray:
        """The row that each node's children are drafted from, `[nodes + 1] int32`.

        Entry 0 is the root's. A leaf has `num_columns`, the index past the last row.
        """
        found = np.full(self.nodes + 1, self.num_columns, np.int32)
        found[0] = 0
        found[self._inner + 1] = np.arange(1, self._starts[-1])
        return found

    @functools.cached_property
    def parents(self) -> np.ndarray:
        """The column of each node's parent in a proposal, `[nodes] int32`."""
        column = {path: 1 + i for i, path in enumerate(self.paths)} | {(): 0}
        return np.array([column[path[:-1]] for path in self.paths], np.int32)

    @functools.cached_property
    def candidates(self) -> np.ndarray:
        """The candidate that each node is, `[nodes] int32`: of its row, by its rank."""
        rows = self.columns[self.parents]
        return rows * self.top_k + np.array([p[-1] for p in self.paths], np.int32)

    def first(self, level: Int[Array, "*levels"]) -> Int[Array, "*levels"]:
        """Returns the column of a level's first row; the root is level 0."""
        return jnp.array(self._starts, jnp.int32)[level]

    def rows(self, level: Int[Array, ""]) -> Int[Array, ""]:
        """Returns how many rows of a level are run: its nodes with children."""
        return jnp.array(np.diff(self._starts), jnp.int32)[level]

    def frontier(
        self, scores: Float32[Array, "B n"], level: Int[Array, ""]
    ) -> Int[Array, "B K"]:
        """Returns which of a level's candidates the next level expands."""
        table = np.zeros((self.depth + 1, self.width), np.int32)
        for depth in range(1, self.depth):
            above, start, end = self._starts[depth - 1 : depth + 2]
            found = self.candidates[self._inner[start - 1 : end - 1]]
            table[depth, : len(found)] = found - above * self.top_k
        chosen = jnp.asarray(table)[level]
        return jnp.broadcast_to(chosen, (scores.shape[0], self.width))

    def may_grow(
        self,
        score: Float32[Array, "B C"],
        frontier: Int[Array, "B K"],
        wanted: Int[Array, " B"],
    ) -> Bool[Array, " B"]:
        """Returns where a level is needed: everywhere, whatever its scores."""
        return jnp.ones(wanted.shape, bool)

    def choose(
        self, score: Float32[Array, "B C"], parent: Int[Array, "B C"]
    ) -> tuple[Int[Array, "B W"], Int[Array, "B W"], Int[Array, " B"]]:
        """Returns the candidates of all nodes, the columns of their parents, and that
        all of them are real: no score decides on a node."""
        shape = score.shape[0], self.nodes
        num_real = jnp.full(shape[:1], self.nodes, jnp.int32)
        table = lambda numbers: jnp.broadcast_to(jnp.asarray(numbers), shape)
        return table(self.candidates), table(self.parents), num_real

    def __str__(self) -> str:
        """Writes the branching if it determines the tree, else its paths as JSON."""
        if self.branching is not None:
            return "-".join(map(str, self.branching))
        return json.dumps([list(path) for path in self.paths], separators=(",", ":"))


AnyTree = Tree | FixedTree


def parse(text: str) -> AnyTree:
    """Reads a tree.

    `KxD:W` and `KxD:W@tau` are searches, such as `4x12:15` and `4x12:15@0.3`; with
    `/greedy` children are never drawn, as in EAGLE-2's `4x6:15@1/greedy`. Fixed
    trees are given by their branching, `4-2-1`; by their paths as JSON,
    `[[0],[1],[0,0]]`; or by the name of a file of that, `medusa.json`.

    Raises:
      ValueError: another text, an unreadable file, or a tree that cannot be.
    """
    if text.endswith(".json"):
        try:
            found = regular_files.read(pathlib.Path(text), max_bytes=_MAX_BYTES)
        except FileNotFoundError as error:
            raise ValueError(f"{text}: {error.strerror}") from None
        return _of_json(found, text)
    if text.lstrip().startswith("["):
        return _of_json(text, "the tree")
    if ":" not in text and all(part.isdigit() for part in text.split("-")):
        return FixedTree.of_branching([int(part) for part in text.split("-")])
    return Tree.parse(text)


def _of_json(text: str | bytes, name: str) -> FixedTree:
    try:
        paths = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from None
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
        raise ValueError(f"{name}: give a list of paths, such as [[0],[1],[0,0]]")
    return FixedTree(paths=tuple(map(tuple, paths)))


def _check_rows(num_nodes: int) -> None:
    """Raises `ValueError` unless a window takes the nodes and the root."""
    if num_nodes >= protocols.MAX_TREE_ROWS:
        raise ValueError(
            f"nodes={num_nodes} and the root are more than the "
            f"{protocols.MAX_TREE_ROWS} rows of a window: ask for fewer"
        )


def check_nodes(tree: AnyTree | None, gamma_max: int) -> None:
    """Raises `ValueError` unless a drafter's `gamma_max` is its tree's nodes."""
    if tree is not None and tree.nodes != gamma_max:
        raise ValueError(
            f"gamma_max={gamma_max} of a tree of {tree.nodes} nodes: give both the same"
        )
