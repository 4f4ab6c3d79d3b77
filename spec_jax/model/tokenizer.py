"""Text to tokens and back, chat templates, stop tokens: a folder's own rules.

Knows the tokenizer files of Hugging Face folders with byte-level BPE, as Qwen3 has;
knows nothing of models, not even how many rows their embeddings have.
"""

import codecs
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from spec_jax import regular_files
from spec_jax.model import chat_template, config as config_lib, hub, stop_texts


_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
OLD_FILES = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
"""Files that would contradict those of `Tokenizer.to_files`."""
_CHAT_OPTIONS: Mapping[str, Any] = {
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
    "enable_thinking": False,
}

Message = Mapping[str, Any]
"""One turn of a chat: `role`, `content` and whatever else the template reads."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A byte-level BPE tokenizer with its chat template and its stop tokens.

    Attributes:
      path: the `tokenizer.json` it came from, for error messages.
      backend: does the encoding.
      chat_template: Jinja source, or None.
      stop_ids: tokens that end a generation, in the folder's order.
      special_tokens: what templates may refer to (`bos_token`, `eos_token`, ...).
      chat_options: what `apply_chat` hands to the template unless it is told otherwise.
    """

    path: pathlib.Path
    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    stop_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chat_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def encode(self, text: str, *, begins: bool = False) -> list[int]:
        """Returns the ids of `text`, in which special tokens are recognised.

        Args:
          begins: whether a text begins here, before which the file may want a token,
            as Llama's wants `<|begin_of_text|>`. A text that has it already, as chat
            templates write it, gets no second one.
        """
        plain = self.backend.encode(text, add_special_tokens=False).ids
        if not begins:
            return plain
        whole = self.backend.encode(text, add_special_tokens=True).ids
        return plain if plain[:1] == whole[:1] else whole

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, special tokens included.

        Bytes that are not UTF-8 become U+FFFD. Ids without a token, such as the
        unused rows of an embedding, have no text.
        """
        return "".join(self.decode_pieces(ids))

    def decode_pieces(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        stops: Sequence[bytes] = (),
    ) -> list[str]:
        """Returns one string per token; together they are `decode(ids)`.

        A character that spans tokens belongs to the token that completes it.

        Args:
          skip_special_tokens: whether tokens of `special_ids` have no text.
          stops: stop texts, before the first of which the strings end. It is looked for
            in the text of all tokens, special ones included.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        raws = stop_texts.before_stop(map(self.bytes_of, ids), stops)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pieces = [
            decoder.decode(b"" if one in hidden else raw)
            for one, raw in zip(ids, raws, strict=True)
        ]
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for."""
        if token_id < 0:
            raise ValueError(f"{token_id=} is negative")
        added = self._added.get(token_id)
        if added is not None:  # Its letters may look like those of bytes.
            return added.content.encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        alphabet = _byte_alphabet()
        try:
            return bytes(alphabet[character] for character in token)
        except KeyError:
            return token.encode()

    @functools.cached_property
    def _added(self) -> Mapping[int, tokenizers.AddedToken]:
        """The file's added tokens, by id."""
        return self.backend.get_added_tokens_decoder()

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, by the file's marks and by `special_tokens`."""
        marked = {one for one, token in self._added.items() if token.special}
        named = map(self.backend.token_to_id, self.special_tokens.values())
        return frozenset(marked.union(one for one in named if one is not None))

    def to_files(self, *, num_positions: int, vocab_size: int) -> dict[str, Any]:
        """Returns the JSON files of which `load` makes an equal tokenizer, by name.

        Args:
          num_positions: of the model.
          vocab_size: of the model; stop ids that are not below it are left out.
        """
        named = {
            f"{name}_id": self.backend.token_to_id(text)
            for name, text in self.special_tokens.items()
            if name in ("bos_token", "pad_token")
        }
        stops = [one for one in self.stop_ids if one < vocab_size]
        first = stops[0] if stops else None
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": num_positions,
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        return {
            "tokenizer.json": json.loads(self.backend.to_str()),
            "tokenizer_config.json": settings,
            "generation_config.json": {
                "pad_token_id": first,
                **named,
                "eos_token_id": first if len(stops) < 2 else stops,
            },
        }

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included; embeddings may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def num_ids(self) -> int:
        """One more than the largest id; ids may have gaps."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary: the sorted (token, id) pairs as JSON."""
        pairs = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can be called."""
        return self.chat_template is not None

    def apply_chat(self, messages: str | Sequence[Message], /, **options: Any) -> str:
        """Returns the prompt of a chat, up to where the assistant's answer begins.

        Args:
          messages: the turns, or the text of a single user turn. They are copied: a
            template cannot change them.
          **options: names that the template reads, over `chat_options`: `tools`,
            `documents`, or `enable_thinking`, without which Qwen3's templates put an
            empty thought before the answer.

        Raises:
          ValueError: there is no template, or it refuses the messages, fails, or takes
            more time or memory than `chat_template` allows, or does not read an option;
            in one line.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.path.parent}: has no chat template")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        options = {**self.chat_options, **options}
        try:
            chat_template.check_options(
                self.chat_template, options, own={"messages", *self.special_tokens}
            )
            return chat_template.render(
                self.chat_template,
                messages,
                **{**_CHAT_OPTIONS, **options},
                **self.special_tokens,
            )
        except ValueError as error:
            raise ValueError(f"{self.path.parent}: chat template: {error}") from None


class PieceDecoder:
    """Decodes a text token by token; never half a character.

    A character that spans tokens comes with the token that completes it, and what may
    be the beginning of a stop text with the token that shows that it is not.

    Args:
      skip_special_tokens: whether tokens of `Tokenizer.special_ids` have no text.
      stops: stop texts, before the first of which the text ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = False,
        stops: Sequence[bytes] = (),
    ):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._search = stop_texts.Search(stops)
        self._held: list[tuple[int, bool]] = []  # bytes, and whether each is shown

    def decode(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Returns the text that `ids` complete.

        Args:
          final: whether no token follows: bytes that are left over become U+FFFD.
        """
        for one in map(int, ids):
            raw = self._tokenizer.bytes_of(one)
            self._held += [(byte, one not in self._skipped) for byte in raw]
            self._search.push(raw)
        is_settled = final and not self._search.is_found
        end = len(self._held) - (0 if is_settled else len(self._search.open))
        shown = bytes(byte for byte, is_shown in self._held[:end] if is_shown)
        del self._held[:end]
        return self._decoder.decode(shown, final=final)


def load(folder: str | pathlib.Path) -> Tokenizer:
    """Reads a folder's tokenizer and, where they are present, the files beside it; or
    that of a GGUF file. A name of `hub.locate` will do.

    The chat template is `chat_template.jinja`, else the `chat_template` of
    `tokenizer_config.json`. The stop tokens are the `eos_token_id` of
    `generation_config.json`, else of `config.json`, else the `eos_token` of
    `tokenizer_config.json`, else `<|endoftext|>` if there is one, else none.

    Raises:
      ValueError: the file of `locate` is missing, malformed or not byte-level; or one
        of the other files is malformed.
    """
    folder = hub.locate(folder)
    path = locate(folder)
    raw = _read_json(path)
    if raw is None:
        hint = hub.hint(folder) or "is this a model folder?"
        raise ValueError(f"{path}: no such file; {hint}")
    decoder = raw.get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise ValueError(f"{path}: only byte-level tokenizers are supported")
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    except Exception as error:  # The bindings raise this very class.
        raise ValueError(f"{path}: not a valid tokenizer: {error}") from None
    # A file may ask for either; both would change a prompt behind its user's back.
    backend.no_truncation()
    backend.no_padding()
    settings = _read_json(folder / "tokenizer_config.json") or {}
    special_tokens = _special_tokens(settings)
    return Tokenizer(
        path=path,
        backend=backend,
        chat_template=_chat_template(folder, settings),
        stop_ids=_stop_ids(folder, backend, special_tokens.get("eos_token")),
        special_tokens=special_tokens,
    )


def locate(folder: str | pathlib.Path) -> pathlib.Path:
    """Returns the path of a folder's tokenizer; there may be no such file.

    `tokenizer.json` in the folder, else the `tokenizer_file` that its
    `tokenizer_config.json` names, relative to the folder: models that share a
    vocabulary need one copy of it.

    Raises:
      ValueError: `tokenizer_config.json` is malformed.
    """
    folder = pathlib.Path(folder)
    path = folder / "tokenizer.json"
    if path.exists():
        return path
    config = folder / "tokenizer_config.json"
    shared = (_read_json(config) or {}).get("tokenizer_file")
    if shared is None:
        return path
    if not isinstance(shared, str):
        raise ValueError(f"{config}: tokenizer_file={shared!r} is not a path")
    return folder / shared


@functools.cache
def _byte_alphabet() -> Mapping[str, int]:
    """Maps each character of a byte-level vocabulary to its byte.

    Printable bytes stand for themselves, the others for U+0100 and on, in order: the
    convention of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """Reads a file's JSON object; None where there is no such file."""
    try:
        return config_lib.read_object(path)
    except FileNotFoundError:
        return None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Reads special tokens by name, from strings or from `{"content": ...}`."""
    named = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[name] = token
    return named


def _chat_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    """Reads the source of the folder's template, if it has one."""
    path = folder / "chat_template.jinja"
    try:
        return regular_files.read(path).decode()
    except FileNotFoundError:
        template = settings.get("chat_template")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    if isinstance(template, list) and all(isinstance(x, dict) for x in template):
        # Several, by name.
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: unreadable chat_template"
        )
    return template


def _stop_ids(
    folder: pathlib.Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    """Returns the stop ids of the first source, in the order that `load` lists."""
    # A model may have more entries than its tokenizer, and its config says how many.
    size = (_read_json(folder / "config.json") or {}).get("vocab_size")
    if type(size) is not int:
        size = backend.get_vocab_size(with_added_tokens=True)
    for name in ("generation_config.json", "config.json"):
        stated = (_read_json(folder / name) or {}).get("eos_token_id")
        if stated is None:
            continue
        try:
            config_lib.check_token_ids("eos_token_id", stated, size)
        except ValueError as error:
            raise ValueError(f"{folder / name}: {error}") from None
        ids = stated if isinstance(stated, list) else [stated]
        return tuple(dict.fromkeys(ids))
    for token in (eos_token, "<|endoftext|>"):
        token_id = None if token is None else backend.token_to_id(token)
        if token_id is not None:
            return (token_id,)
    return ()
