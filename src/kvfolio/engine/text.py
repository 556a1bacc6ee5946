"""Text to token ids and back: tokenizer, chat template, text as it streams, stop strings.

Knows nothing of networks, requests or sampling: token ids are plain integers that come and go.
"""

import codecs
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from kvfolio.errors import BrokenModelError, RequestError, UnknownModelError
from kvfolio.spec.gguf.header import LazyArray, read_header

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# ``tokenizer.ggml.pre`` names the rule that cuts text into words. transformers knows some and takes GPT-2's for every
# other name, which is right for the first set only. The second cuts out every digit first (llama.cpp, llama-vocab.cpp).
GPT2_CUTS = frozenset({"gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling"})
DIGIT_CUTS = frozenset({"smollm", "starcoder", "refact", "codeshell"})
# Files of these put a start token first unless they say otherwise, and take a word that is a token as it is.
LLAMA3_CUTS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken"})

LOOK_BACK = 8  # ids of the prompt that a decoder may look at: a word, or a character of byte tokens


# ---- the tokenizer --------------------------------------------------------------------------------------------------


class Tokenizer:
    """Text to ids and back, exactly as the model's published tokenizer does it."""

    def __init__(self, reference: Any, backend: Backend | None = None) -> None:
        """``reference``: a transformers tokenizer; ``backend``: what to encode with in place of its own."""
        backend = backend or getattr(reference, "backend_tokenizer", None)
        if backend is None:
            kind = type(reference).__name__
            raise UnknownModelError(f"tokenizer class {kind} has no tokenizer.json form; accepted: one that has")
        backend.no_truncation()  # a published file may cut or pad what it encodes; a prompt is taken whole
        backend.no_padding()
        self._reference = reference
        self._backend = backend
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_id: int | None = reference.bos_token_id
        self.eos_id: int | None = reference.eos_token_id
        self.has_chat_template = bool(reference.chat_template)
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._adds_bos = self.bos_id is not None and backend.encode("").ids[:1] == [self.bos_id]

    @classmethod
    def load(cls, source: str | Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder or of a GGUF file. Reads local files only.

        Raises BrokenModelError when there is none or it cannot be read, UnknownModelError for a kind not known.
        """
        path = Path(source)
        with _quiet():
            return cls(*_from_gguf(path)) if path.suffix.lower() == ".gguf" else cls(_from_folder(path))

    @property
    def num_tokens(self) -> int:
        """Entries of the vocabulary, added tokens included; the network's may be padded to more."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the start or end tokens that the model's own rule adds.

        A start token spelled out at the beginning of the text is not doubled. Empty text becomes the start token
        alone where the model has one, added by its rule or not. Raises RequestError for text that has no ids.
        """
        ids = self._ids(text, add_special_tokens=True)
        if self._adds_bos and ids[1:2] == [self.bos_id]:
            ids = ids[1:]
        if not ids and self.bos_id is not None:
            ids = [self.bos_id]
        if not ids:
            raise RequestError(
                "the prompt is empty and this model has no start token; accepted: text of 1 token or more"
            )
        return ids

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that goes on: no start or end tokens. Raises RequestError for text that has no ids."""
        return self._ids(text, add_special_tokens=False)

    def encode_chat(self, messages: object) -> list[int]:
        """Token ids of a chat, through the model's template and open for the assistant's answer.

        ``messages``: a list of {"role": str, "content": str}. The template writes the start token if the model wants
        one, so none is added to it. Markers that the template writes become one id each. So do markers that a message
        spells out: like transformers' ``apply_chat_template``, this sees one text and cannot tell whose they are.

        Raises RequestError for other messages, for those that the template refuses, and for a model without template.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; accepted: plain text (completions)")
        checked = _checked_messages(messages)
        try:
            text = self._reference.apply_chat_template(checked, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's publisher and may fail in any way
            raise RequestError(f"the model's chat template refuses the messages: {_one_line(error)}") from error
        return self._ids(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids. Special tokens and ids outside the vocabulary have none; broken bytes become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text: part of a character, perhaps; none for special tokens."""
        piece = self._backend.id_to_token(token_id)
        if piece is None or token_id in self._special_ids:
            return b""
        if self.is_byte_level:
            # An added token outside the alphabet of bytes stands for itself.
            is_spelled = all(letter in BYTE_OF_LETTER for letter in piece)
            return bytes(BYTE_OF_LETTER[letter] for letter in piece) if is_spelled else piece.encode()
        return bytes([int(piece[3:5], 16)]) if _is_byte_piece(piece) else piece.replace("▁", " ").encode()

    def is_skipped(self, token_id: int) -> bool:
        """The token has no place in the text: special, or outside the vocabulary."""
        return token_id in self._special_ids or self._backend.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """The token is one raw byte of a sentencepiece vocabulary, such as ``<0xE4>``."""
        return not self.is_byte_level and _is_byte_piece(self._backend.id_to_token(token_id) or "")

    def _ids(self, text: object, add_special_tokens: bool) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # not a string, or one with half a surrogate pair
            shown = repr(text)[:60]
            raise RequestError(f"the prompt {shown} cannot be encoded; accepted: a string of valid Unicode") from error


def _checked_messages(messages: object) -> list[dict[str, str]]:
    accepted = 'accepted: a list of {"role": text, "content": text}'
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(f"messages is {repr(messages)[:60]}; {accepted}, at least one")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            fields = sorted(map(str, message)) if isinstance(message, dict) else repr(message)[:60]
            raise RequestError(f"messages[{number}] is given as {fields}; {accepted}")
        for name in ("role", "content"):
            if not isinstance(message[name], str):
                raise RequestError(f"messages[{number}].{name} is {repr(message[name])[:60]}; {accepted}")
        if not message["role"]:
            raise RequestError(f"messages[{number}].role is empty; {accepted}")
    return [dict(message) for message in messages]


def _byte_alphabet() -> dict[str, int]:
    """Letter → byte of byte-level BPE (GPT-2): a byte that prints is itself, the others are letters from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_alphabet()


def _is_byte_piece(piece: str) -> bool:
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece) is not None


# ---- reading it from files ------------------------------------------------------------------------------------------


def _from_folder(path: Path) -> Any:
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise BrokenModelError(
            f"{path} holds no tokenizer; accepted: a folder with {', '.join(TOKENIZER_FILES)}, or a GGUF file; "
            "copy the file from where the model was published"
        )
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise whatever comes, down to bare Exception
        raise BrokenModelError(f"the tokenizer in {path} cannot be read: {_one_line(error)}") from error


def _from_gguf(path: Path) -> tuple[Any, Backend]:
    metadata = read_header(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise BrokenModelError(f"{path} holds no tokenizer (no tokenizer.ggml.model); convert it with its vocabulary")
    cut = metadata.get("tokenizer.ggml.pre")
    options = {"add_bos_token": True} if kind == "gpt2" and cut in LLAMA3_CUTS else {}  # the file's own word wins
    try:
        # AutoTokenizer would first read the model's config with the gguf package: 4.1 s of 4.4 s for SmolLM2.
        reference = PreTrainedTokenizerFast(
            gguf_file=path.name, name_or_path=str(path.parent), local_files_only=True, **options
        )
    except Exception as error:  # transformers and tokenizers raise whatever comes, down to bare Exception
        raise BrokenModelError(f"the tokenizer in {path} cannot be read: {_one_line(error)}") from error
    backend: Backend = reference.backend_tokenizer
    if kind == "gpt2":
        _cut_words(backend, cut, path)
    elif metadata.get("tokenizer.ggml.add_space_prefix") is False and kind == "llama":
        _drop_leading_space(backend)
    tokens = metadata.get("tokenizer.ggml.tokens")
    return reference, _without_ids_from(len(tokens), backend) if isinstance(tokens, LazyArray) else backend


def _cut_words(backend: Backend, cut: object, path: Path) -> None:
    """Make a byte-level BPE of a GGUF file cut text into words as the file says."""
    if cut in DIGIT_CUTS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif cut not in GPT2_CUTS and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        raise UnknownModelError(
            f"{path} cuts words by the rule {cut!r} (tokenizer.ggml.pre), which is not one kvfolio knows; "
            "use the model's Hugging Face folder, whose tokenizer.json spells the rule out"
        )
    if cut in LLAMA3_CUTS:
        backend.model.ignore_merges = True


def _drop_leading_space(backend: Backend) -> None:
    """Make a sentencepiece tokenizer of a GGUF file put no space before the text."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _without_ids_from(num_tokens: int, backend: Backend) -> Backend:
    """Without the tokens that transformers adds to a vocabulary that lacks GPT-2's or Llama's.

    Their ids lie beyond the network's: a prompt that spells "<|endoftext|>" to Llama 3 would read past its embeddings.
    """
    if backend.get_vocab_size(with_added_tokens=True) <= num_tokens:
        return backend
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < num_tokens]
    return Backend.from_str(json.dumps(state))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' advice about training and newer files off the screen while a tokenizer loads."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 120 else text[:117] + '...'}"


# ---- text as it streams ---------------------------------------------------------------------------------------------


class TextStream:
    """Text of one answer, token by token. All pieces joined are ``tokenizer.decode`` of all ids, whatever the ids.

    A piece never ends inside a character: it waits for the tokens that complete it. Each token costs the same,
    however long the answer.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        """``after``: the ids before the answer, for text that continues a prompt.

        A sentencepiece tokenizer drops the space before the first word of a text. Given the ids before, the answer
        is not the beginning of one and keeps its space: the pieces are then decode(after + ids) beyond decode(after).
        """
        self._tokenizer = tokenizer
        # Byte-level BPE: the text is the bytes of all tokens read as UTF-8, and so can be read as they come.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        # Other decoders look at neighbours: decode the last piece sent and what came since, and take the difference.
        self._window = [token_id for token_id in after[-LOOK_BACK:] if not tokenizer.is_skipped(token_id)]
        self._num_sent = len(self._window)  # ids at the head of the window whose text is already out

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is open."""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if self._tokenizer.is_skipped(token_id):
            return ""
        self._window.append(token_id)
        # A run of byte tokens is read as a whole when it ends: one bad byte spoils all characters of the run.
        return "" if self._tokenizer.is_byte(token_id) else self._take()

    def finish(self) -> str:
        """What is still held back: an open character becomes U+FFFD. Nothing may be pushed afterwards."""
        return self._utf8.decode(b"", final=True) if self._utf8 is not None else self._take()

    def _take(self) -> str:
        sent = self._tokenizer.decode(self._window[: self._num_sent])
        text = self._tokenizer.decode(self._window)
        self._window = self._window[self._num_sent :]
        self._num_sent = len(self._window)
        return text[len(sent) :]


# ---- stop strings ---------------------------------------------------------------------------------------------------


class StopMatcher:
    """Cuts a stream of text before the first stop string and never lets a part of one out.

    The first character that completes a stop string decides; where it completes several, the one that begins first.
    So nothing is held longer than a stop string is still possible, and the text and the hit depend on the characters
    alone, never on how they were cut into pushes. (Of "abcd" and "bc", "bc" ends the text "xabc", after "xa".)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops``: none of them empty."""
        self._stops = tuple(stops)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._num_matched = [0] * len(self._stops)  # per stop: characters of it that the text now ends with
        self._held = ""  # the longest of those, not yet let out
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may go out, the stop string found or None). After a find all further text is dropped."""
        if self._hit is not None or not self._stops:
            return ("" if self._hit is not None else text), self._hit
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            found = self._advance(text[end - 1])
            if found is not None:
                self._hit, self._held = found, ""
                return text[: end - len(found)], found
        num_out = len(text) - max(self._num_matched)
        self._held = text[num_out:]
        return text[:num_out], None

    def finish(self) -> str:
        """The text held back, which turned out to be harmless; "" after a find."""
        held, self._held = self._held, ""
        self._num_matched = [0] * len(self._stops)
        return held

    def _advance(self, letter: str) -> str | None:
        """Read one character; the longest stop string that it completes."""
        found: str | None = None
        for number, stop in enumerate(self._stops):
            matched = self._num_matched[number]
            while matched and stop[matched] != letter:
                matched = self._fallbacks[number][matched - 1]
            matched += stop[matched] == letter
            self._num_matched[number] = matched
            if matched == len(stop) and (found is None or matched > len(found)):
                found = stop
        return found


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of ``stop``: the longest shorter prefix that it ends with (Knuth, Morris, Pratt 1977)."""
    table = [0] * len(stop)
    matched = 0
    for place in range(1, len(stop)):
        while matched and stop[place] != stop[matched]:
            matched = table[matched - 1]
        matched += stop[place] == stop[matched]
        table[place] = matched
    return table
