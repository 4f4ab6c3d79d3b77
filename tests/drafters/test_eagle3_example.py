"""EAGLE's worked example, round by round: "how can" -> "i", and a tree after it.

Target and head are scripts that read nothing but their rows: a row stores its token in
its model's own cache, and answers by the tokens at the places that it may see. So
whatever is stored, seen, moved or forgotten wrongly is another story.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters import each, eagle3 as drafting, tree_shapes
from spec_jax.engine import round as round_lib, rows as rows_lib, scheduler
from spec_jax.model import (
    config as config_lib,
    decoder,
    eagle3,
    eagle3_params,
    params as params_lib,
    qwen3,
    row_model,
)


WORDS = (
    "how . can ! i do1 do2 do3 do11 do12 ? do21 do31 do111 do121 do211 do212 do21'"
).split()
DRAFTED = ["can", "i", *(word for word in WORDS if word.startswith("do"))]
HOT = [WORDS.index(word) for word in sorted(DRAFTED, key=WORDS.index)]
STATE = 100
"""A feature is its token's number, `g_how`; a hidden state is that and `STATE`."""

SAYS = {
    (): {"do1": -0.9, "do2": -1.0, "do3": -2.0},
    ("do1",): {"do11": -0.6, "do12": -1.2},
    ("do2",): {"do21": -0.4},
    ("do3",): {"do31": -1.5},
    ("do1", "do11"): {"do111": -0.8},
    ("do2", "do21"): {"do211": -1.0, "do212": -1.1},
    ("do1", "do12"): {"do121": -2.0},
}
"""Log-probabilities of the head after "i"; what else there is shares the rest."""

TEXT = ("how", "can", "i", "do2", "do21", "do21'")
"""What the target writes; after any other text it writes a full stop."""


def log_probs(seen: tuple[str, ...]) -> np.ndarray:
    """What the head says after pairs of these tokens, of draft tokens."""
    said = SAYS.get(seen[2:], {}) if seen[:2] == ("can", "i") else {}
    rest = 1 - sum(np.exp(list(said.values())))
    other = np.log(rest / (len(HOT) - len(said)))
    found = [said.get(WORDS[token], other) for token in HOT]
    assert other <= -2.5
    return np.array(found, np.float32)


def own_token(seen: tuple[str, ...]) -> np.ndarray:
    """What the target says after this text."""
    follows = len(seen) < len(TEXT) and seen == TEXT[: len(seen)]
    logits = np.zeros(len(WORDS), np.float32)
    logits[WORDS.index(TEXT[len(seen)] if follows else ".")] = 1
    return logits


def run_script(log, says, rows, kv, given, *, size):
    """Runs rows on the host: stores them, and notes what each was given and sees.

    Returns:
      The cache, and what `says` makes of what each row sees, `[R, size]`.
    """

    def host(rows, keys, table, given):
        keys, found = np.array(keys), np.zeros((len(rows.tokens), size), np.float32)
        at = lambda place: (table[0, place // keys.shape[1]], place % keys.shape[1])
        for row in range(int(rows.num_active)):
            places = list(range(int(rows.positions[row]) + 1))
            if rows.branch is not None:
                branch = rows.branch[row][-len(places) :]
                places[-len(branch) :] = branch.tolist()
            keys[at(places[-1])] = rows.tokens[row]
            seen = tuple(WORDS[int(keys[at(place)].flat[0])] for place in places)
            log.append((name_of(given[row]), *seen))
            found[row] = says(seen)
        return keys, found

    keys = kv.k[0]
    shapes = (
        jax.ShapeDtypeStruct(keys.shape, keys.dtype),
        jax.ShapeDtypeStruct((rows.tokens.shape[0], size), jnp.float32),
    )
    keys, found = jax.pure_callback(host, shapes, rows, keys, kv.page_table, given)
    return kv.replace(k=(keys, *kv.k[1:])), found


def name_of(given) -> str:
    """The name of a feature: of the target's, g_how, or of a hidden state, a_do1."""
    (number,) = set(given.tolist())
    kind = "g" if number < STATE else "a"
    return f"{kind}_{WORDS[int(number) % STATE]}"


class Story:
    """The example's rounds, and what each row of target and head was given and saw."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.of_target: list = []
        self.of_head: list = []
        patch.setattr(qwen3, "forward_rows", self.run_target)
        patch.setattr(eagle3, "forward_rows", self.run_head)
        config = config_lib.Qwen3Config(
            vocab_size=len(WORDS),
            hidden_size=4,
            intermediate_size=4,
            num_layers=2,
            num_heads=1,
            num_kv_heads=1,
            head_dim=4,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            dtype="float32",
        )
        head = eagle3_params.Eagle3Config(
            layer=dataclasses.replace(config, num_layers=1),
            draft_vocab_size=len(HOT),
            target_hidden_size=4,
            taps=(1, 0),
        )
        target, model = (
            row_model.RowModel(config=config, impl="xla", slab=9)
            for config in (config, head.layer)
        )
        params = params_lib.init(jax.random.key(0), config)
        key, hot = jax.random.key(1), jnp.array(HOT, jnp.int32)
        head_params = eagle3_params.init(key, head, embed=params.embed, hot=hot)
        drafter = drafting.Eagle3(head=head, model=model, gamma_max=8)
        self.speculator = round_lib.Speculator(
            params=(params, head_params),
            target=rows_lib.SlotRows(model=target, num_slots=1),
            drafter=each.lift(drafter.for_tree(tree_shapes.parse("3x4:8@1")), 1),
        )
        queue = scheduler.Scheduler(
            speculator=self.speculator,
            capacity=32,
            page_size=4,
            num_stop=1,
            prefill_by_rows=True,
        )
        prompt = [WORDS.index(word) for word in TEXT[:2]]
        self.state = queue.begin(scheduler.Request(prompt=prompt, max_tokens=20))
        # A function of its own: an executable is of one story.
        self._run = jax.jit(lambda *given: round_lib.run_round(*given))

    def run_target(self, params, config, rows, kv, *, taps=(), **how):
        """In the place of `qwen3.forward_rows`."""
        numbers = rows.tokens.astype(jnp.float32)[:, None]
        kv, logits = run_script(
            self.of_target, own_token, rows, kv, numbers, size=len(WORDS)
        )
        shape = rows.tokens.shape[0], len(taps), config.hidden_size
        features = jnp.broadcast_to(numbers[:, None], shape)
        return kv, decoder.RowOutputs(logits=logits, features=features)

    def run_head(self, params, config, rows, features, kv, *, impl):
        """In the place of `eagle3.forward_rows`."""
        kv, logits = run_script(
            self.of_head, log_probs, rows, kv, features, size=len(HOT)
        )
        hidden = rows.tokens.astype(jnp.float32)[:, None] + STATE
        return kv, jnp.broadcast_to(hidden, (len(rows.tokens), 4)), logits

    def round(self, gamma: int):
        """Runs a round; returns what happened, and what target and head were given."""
        del self.of_target[:], self.of_head[:]
        slots = self.state.slots.replace(gamma=jnp.array([gamma], jnp.int32))
        state = self.state.replace(slots=slots)
        self.state, info = self._run(self.speculator, state)
        jax.block_until_ready(self.state)
        return info, list(self.of_target), list(self.of_head)

    @property
    def text(self) -> tuple[str, ...]:
        """What is committed."""
        slots = self.state.slots
        return tuple(WORDS[int(t)] for t in slots.tokens[0, : int(slots.length[0])])

    def stored(self, kv) -> tuple[str, ...]:
        """Whose K/V a cache keeps, by position."""
        keys = np.asarray(kv.k[0][kv.page_table[0]]).reshape(-1, 4)[:, 0]
        return tuple(WORDS[int(key)] for key in keys[: int(kv.length[0])])


@pytest.fixture(scope="module")
def begun():
    """The story after its first round, in which no token is drafted."""
    with pytest.MonkeyPatch.context() as patch:
        story = Story(patch)
        _, of_target, of_head = story.round(gamma=0)
        # "how can" -> "i": the row of "can" sees both; the head was not asked.
        assert of_target == [("g_can", "how", "can")] and of_head == []
        assert story.text == ("how", "can", "i")
        yield story, story.state


@pytest.fixture
def story(begun):
    story, story.state = begun
    return story


PAIRS = [("g_how", "can"), ("g_can", "can", "i")]
"""The pairs (feature, token), and what they see: the feature is one position early."""
LEVEL_1 = [("a_i", "can", "i", child) for child in ("do1", "do2", "do3")]
LEVEL_2 = [
    ("a_do2", "can", "i", "do2", "do21"),
    ("a_do1", "can", "i", "do1", "do11"),
    ("a_do1", "can", "i", "do1", "do12"),
]
LEVEL_3 = [
    ("a_do11", "can", "i", "do1", "do11", "do111"),
    ("a_do21", "can", "i", "do2", "do21", "do211"),
    ("a_do21", "can", "i", "do2", "do21", "do212"),
]


def test_candidates_and_tree_mask(story):
    """Each level's rows: their features, their tokens, and whom they see.

    Fails if a child gets a cousin's hidden state, or sees a cousin.
    """
    info, _, of_head = story.round(gamma=8)
    assert of_head == [*PAIRS, *LEVEL_1, *LEVEL_2, *LEVEL_3]
    drafts = [WORDS[int(token)] for token in info.proposal.tokens[0]]
    kept = ["do1", "do2", "do21", "do11", "do3"]
    assert drafts == [*kept, "do12", "do111", "do211"]
    assert info.proposal.parents.tolist() == [[0, 0, 2, 1, 0, 1, 4, 3]]


def test_a_round(story):
    """Six rows: the tree that is verified, whose path is kept, and what goes on.

    Fails if a row's mask, the path, the K/V that is kept or the next pairs are wrong.
    """
    info, of_target, of_head = story.round(gamma=5)
    # The third level cannot be among the best five, and is not run.
    assert of_head == [*PAIRS, *LEVEL_1, *LEVEL_2]
    assert int(info.proposal.num_drafted[0]) == 5
    paths = ["", "do1", "do2", "do2 do21", "do1 do11", "do3"]
    seen = [("how", "can", "i", *path.split()) for path in paths]
    assert of_target == [(f"g_{row[-1]}", *row) for row in seen]

    # SafeAILab's scoring: of each path to a leaf, the leading drafts that the target's
    # own tokens agree with; the longest is kept.
    own = {row: WORDS[int(own_token(row).argmax())] for row in seen}
    scores = {}
    for leaf in ("do3", "do1 do11", "do2 do21"):
        path = leaf.split()
        above = [own[("how", "can", "i", *path[:i])] for i in range(len(path))]
        agrees = np.equal(path, above)
        scores[leaf] = int(np.cumprod(agrees).sum())
    assert scores == {"do3": 0, "do1 do11": 0, "do2 do21": 2}
    assert int(info.outcome.num_accepted[0]) == 2
    assert info.outcome.path[0, :2].tolist() == [2, 3]  # the columns of do2, do21
    assert story.text == ("how", "can", "i", "do2", "do21", "do21'")

    # The K/V of the path, in order; the last token has none. The head keeps pairs of
    # target features alone.
    assert story.stored(story.state.cache) == ("how", "can", "i", "do2", "do21")
    assert story.stored(story.state.memory.kv) == ("can", "i")

    # What the next round is fed.
    _, of_target, of_head = story.round(gamma=5)
    text = ("can", "i", "do2", "do21", "do21'")
    assert of_head[:3] == [
        ("g_i", *text[:3]),
        ("g_do2", *text[:4]),
        ("g_do21", *text),
    ]
    assert of_target[0] == ("g_do21'", "how", *text)
