"""A chat request as a conversation: each message by its digests, and the conversation up to each message.

The bytes of a message decide its digests, so those of messages seen before are looked up: a history costs its
scan and one hash over each message, and only what is new is parsed.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from proxy.engine.media import media_kind
from proxy.history.warm import Warm
from tokenization import CanonicalMessage, canonical
from tokenization.cache import BoundedCache
from tokenization.canonical import extend, start

_split = msgspec.json.Decoder(list[msgspec.Raw]).decode
_parse = msgspec.json.Decoder(dict[str, Any]).decode
_NOTHING = start()
SPACE = b" \t\r\n"


class Digested(NamedTuple):
    """What is kept of a message that was seen."""

    message: CanonicalMessage
    assistant: bool
    media: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """What shapes the rendering of a conversation beside its messages."""

    tools: bytes = b""
    """The request's tools as JSON; empty if none."""
    template_kwargs: bytes = b""
    """What goes to the template, as JSON; empty if nothing."""
    add_generation_prompt: bool = True

    def read_tools(self) -> list[dict[str, Any]] | None:
        """The tools, parsed."""
        return msgspec.json.decode(self.tools, type=list[dict[str, Any]]) if self.tools else None

    def read_template_kwargs(self) -> dict[str, Any]:
        """The template's arguments, parsed."""
        return msgspec.json.decode(self.template_kwargs, type=dict[str, Any]) if self.template_kwargs else {}


@dataclass(slots=True)
class Asked:
    """A request for the next turn of a conversation, as a dialect understood it."""

    messages: bytes
    """JSON array of messages."""
    setting: Setting
    model: str | None
    session: str | None
    choices: int = 1
    """How many completions it asks for."""
    temperature: float | None = None
    """What it is to be sampled with; None leaves that to the engine."""
    special: str = ""
    """Why the engine must render this request whatever its history; empty if nothing speaks for it."""


class Begin(NamedTuple):
    """Digests of what stands beside the messages: together, and of each part by itself."""

    whole: bytes
    tools: bytes
    template_kwargs: bytes
    model: bytes


class Digester:
    """Turns requests into conversations, and remembers what it has read. Safe across threads.

    A request mostly holds the bytes of the one before it and some more: then only what is new is read.
    """

    def __init__(self, remembered: int = 65_536, warm_bytes: int = 64 * 2**20) -> None:
        """`remembered` messages are not digested again, and `warm_bytes` of whole conversations not read."""
        self._messages: BoundedCache[bytes, Digested] = BoundedCache(remembered)
        self._begins: BoundedCache[bytes, Begin] = BoundedCache(1024)
        self._warm = Warm(warm_bytes)

    def read(self, asked: Asked, model: str) -> "Conversation":
        """The conversation of a request.

        Args:
            model: which model and tokenizer: ids of another one mean something else.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError: the messages are no JSON array of objects.
            InvalidMessages: one of them is no message.
        """
        begin = self._begin(asked.setting, model)
        before = self._warm.longest(begin.whole, asked.messages)
        if before is None:
            made, new = Conversation([], [], asked.setting, begin), asked.messages
        else:
            made, new = before.copy(asked.setting), before.behind(asked.messages)
        for raw in _split(new):
            made.add(bytes(raw), self._digested(bytes(raw), len(made.raws)))
        made.stem = asked.messages.rstrip(SPACE)[:-1]
        self._warm.put(made, before)
        return made

    def _digested(self, raw: bytes, index: int) -> Digested:
        key = hashlib.blake2b(raw, digest_size=16).digest()
        found = self._messages.get(key)
        if found is None:
            message = _parse(raw)
            made = canonical(message, index)
            media = media_kind(message.get("content")) is not None
            found = Digested(made, message["role"] == "assistant", media)
            self._messages.put(key, found)
        return found

    def _begin(self, setting: Setting, model: str) -> Begin:
        shown = hashlib.blake2b(digest_size=16)
        for part in (setting.tools, setting.template_kwargs, model.encode()):
            shown.update(len(part).to_bytes(8, "little") + part)

        def make() -> Begin:
            tools, kwargs = setting.read_tools(), setting.read_template_kwargs()
            return Begin(
                start(tools=tools, template_kwargs=kwargs, model=model),
                start(tools=tools),
                start(template_kwargs=kwargs),
                start(model=model),
            )

        return self._begins.get_or_make(shown.digest(), make)


@dataclass
class Conversation:
    """Messages with their digests."""

    raws: list[bytes]
    """Each message as the client spelled it."""
    messages: list[Digested]
    setting: Setting
    begin: Begin
    """Digests of everything but the messages."""
    loose: list[bytes] = field(default_factory=list)
    """Digest of the conversation up to and including each message, whatever clients drop or strip."""
    strict: list[bytes] = field(default_factory=list)
    """The same, as this client spells it."""
    content: list[bytes] = field(default_factory=list)
    """As `loose`, whatever tools, template arguments and model stand beside the messages."""
    stem: bytes = b""
    """The array as it came, without its end."""

    def add(self, raw: bytes, made: Digested) -> None:
        """Put a message behind the others."""
        first = not self.raws
        self.raws.append(raw)
        self.messages.append(made)
        self.loose.append(extend(self.begin.whole if first else self.loose[-1], made.message.loose))
        self.strict.append(extend(self.begin.whole if first else self.strict[-1], made.message.strict))
        self.content.append(extend(_NOTHING if first else self.content[-1], made.message.loose))

    def copy(self, setting: Setting) -> "Conversation":
        """The same messages for another request."""
        return Conversation(
            list(self.raws),
            list(self.messages),
            setting,
            self.begin,
            list(self.loose),
            list(self.strict),
            list(self.content),
        )

    def begins(self, messages: bytes) -> bool:
        """Whether an array of messages holds these and others behind them, byte for byte."""
        end = len(self.stem)
        return messages.startswith(self.stem) and messages[end : end + 64].lstrip(SPACE)[:1] == b","

    def behind(self, messages: bytes) -> bytes:
        """The messages behind these in an array that `begins` with them, as an array."""
        return b"[" + messages[len(self.stem) :].lstrip(SPACE)[1:]

    @cached_property
    def ends(self) -> list[int]:
        """Where a recorded turn may end: assistant messages that others follow, the last one first."""
        last = len(self.messages) - 1
        return [i for i in range(last - 1, -1, -1) if self.messages[i].assistant]

    @property
    def ends_with_assistant(self) -> bool:
        """Whether nothing was said since the last turn."""
        return bool(self.messages) and self.messages[-1].assistant

    @property
    def media(self) -> bool:
        """Whether a message holds images or other media."""
        return any(made.media for made in self.messages)

    def parse(self, first: int, behind: int) -> list[dict[str, Any]]:
        """The messages from `first` to before `behind` as objects."""
        return [_parse(raw) for raw in self.raws[first:behind]]

    def json(self, first: int) -> bytes:
        """The messages from `first` on as a JSON array, as they were spelled."""
        return b"[" + b",".join(self.raws[first:]) + b"]"

    def reasonings(self, first: int, behind: int) -> list[bytes]:
        """Digests of the reasoning of the assistant messages from `first` to before `behind`."""
        return [made.message.reasoning for made in self.messages[first:behind] if made.assistant]
