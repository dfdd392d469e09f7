"""The requests of `request`, `workers` and `gateway`: bodies with a place for the number of the conversation.

The requests of `gateway` differ in a number in each message, so each starts or continues another one.
Every gateway gets the same ones; the engine answers each as vLLM answers what the gateway asks for.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, repeat
from typing import Any

import msgspec

from benchmarks.client import CHAT, MODEL, TOKENS, http_request
from benchmarks.texts import Answer, Messages, Texts
from chat_tokenizer import ChatTokenizer

NUMBER, STEP = "7000001", "8000001"
"""Stand in texts for the numbers of the conversation and of the step, which have as many digits."""
_FIRST = 1_000_000
SMALL_CHAT, FIRST_TURN, LONG_ANSWER = "1 KB chat", "first turn 32k", "answer 32k"
LONG_TEXT, LONG_BOTH = "answer 32k as text", "history and answer 32k"
STREAM, RECOGNISED, GIVEN_IDS = "stream", "recognised turn 32k", "100k ids in"
COLUMNS = (SMALL_CHAT, FIRST_TURN, LONG_ANSWER, LONG_TEXT, LONG_BOTH, STREAM, RECOGNISED, GIVEN_IDS)
"""Of the comparison of gateways."""
CHUNKS = 256
SMALL_IDS, LONG_IDS, MANY_IDS = 40, 32_000, 100_000
_NEW_IDS = 200
"""Of the message that each step of a conversation appends."""


@lru_cache(maxsize=1000)
def _split(text: bytes) -> list[bytes]:
    return text.split(NUMBER.encode())


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are equal but for their numbers."""

    answer: str
    """Name of the engine's answer."""
    path: str
    opening: bytes
    closing: bytes = b""
    step: bytes = b""
    """What each further turn of a conversation puts between opening and closing."""
    conversations: int = 0
    """How many take turns; each pass over all of them has one step more. 0: every request starts one."""
    service_s: float = 0.0
    """Time of the engine for an answer."""

    def body(self, position: int) -> bytes:
        """The body of a request: with 1,000 conversations, 2,100 is the second step of the hundredth."""
        steps, number = divmod(position, self.conversations) if self.conversations else (0, position)
        taken = [self.step.replace(STEP.encode(), b"%d" % (_FIRST + step)) for step in range(1, steps + 1)]
        parts = (_split(self.opening), *map(_split, taken), _split(self.closing))
        return b"".join((b"%d" % (_FIRST + number)).join(part) for part in parts)

    def request(self, position: int, prefix: str = "") -> bytes:
        """A request as bytes."""
        return http_request(prefix + self.path, self.body(position))

    def requests(self, first: int, prefix: str = "") -> Iterator[bytes]:
        """The requests from a position on."""
        if NUMBER.encode() not in self.opening:
            return repeat(self.request(0, prefix))
        return (self.request(position, prefix) for position in count(first))


@dataclass(frozen=True, slots=True)
class Column:
    """One kind of request: what is sent to tokenproxy, and to the engine and other gateways."""

    name: str
    ours: Load
    theirs: Load
    chunks: int = 0
    """Chunks of a response, if they are counted instead of responses."""

    def load(self, ours: bool) -> Load:
        """What one of them is sent."""
        return self.ours if ours else self.theirs


@dataclass(slots=True)
class Loads:
    """Kinds of requests by name, and the answers of the engine."""

    columns: dict[str, Column] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)

    def chat(self, name: str, messages: Messages, answer: Answer, chunks: int = 0, **more: Any) -> None:
        """Add a chat request."""
        load = Load(self.keep(name, answer), CHAT, *_chat_body(messages, **more))
        self.columns[name] = Column(name, load, load, chunks)

    def given(
        self, name: str, ids: list[int], answer: Answer, *, numbered: bool = True, echo: bool = False
    ) -> None:
        """Add a request that has the prompt's ids: for others, in the field in which vLLM takes them."""
        given = msgspec.json.encode([int(NUMBER), *ids[1:]] if numbered else ids)
        slug = self.keep(name, answer)
        tail = b',"max_tokens":64,"return_token_ids":%b}' % (b"true" if echo else b"false")
        ours = Load(slug, TOKENS, b'{"model":"%b","prompt_ids":%b' % (MODEL.encode(), given), tail)
        opening, closing = _chat_body([{"role": "user", "content": ""}], return_token_ids=echo)
        theirs = Load(
            slug, CHAT, opening, closing[:-1] + b',"kv_transfer_params":{"prompt_token_ids":%b}}' % given
        )
        self.columns[name] = Column(name, ours, theirs)

    def keep(self, name: str, answer: Answer) -> str:
        """Add an answer; returns its name for `Load`."""
        slug = re.sub(r"\W+", "-", name)
        self.answers[slug] = answer
        return slug


def gateway_loads(tokenizer: ChatTokenizer, conversations: int) -> Loads:
    """The requests of `gateway`; where turns are recognised, so many conversations are interleaved."""
    texts, loads = Texts(tokenizer), Loads()
    mark = NUMBER + ": "

    def rendered(messages: Messages) -> list[int]:
        return tokenizer.render(
            [{**m, "content": m["content"].replace(NUMBER, str(_FIRST))} for m in messages]
        )

    question = texts.history(80, mark=mark)
    question[-1]["content"] = (question[-1]["content"] + texts.text(400))[:780]  # with all else 1 KB
    long, first = texts.answer(LONG_IDS), texts.history(100, mark=mark)
    first[-1]["content"] += texts.text(LONG_IDS - 100)
    history = texts.history(LONG_IDS, mark=mark)
    evidence = {"return_token_ids": True, "logprobs": True}

    def answer(messages: Messages, sampled: Answer) -> Answer:
        return msgspec.structs.replace(sampled, prompt=rendered(messages))

    small = texts.answer(SMALL_IDS)
    loads.chat(SMALL_CHAT, question, answer(question, small))
    loads.chat(FIRST_TURN, first, answer(first, small))
    loads.chat(LONG_ANSWER, question, answer(question, long), **evidence)
    loads.chat(LONG_TEXT, question, answer(question, long))
    loads.chat(LONG_BOTH, history, answer(history, long), **evidence)
    loads.chat(STREAM, question, answer(question, texts.answer(CHUNKS)), CHUNKS, stream=True)
    ids = texts.ids(MANY_IDS)
    loads.given(GIVEN_IDS, ids, msgspec.structs.replace(small, prompt=ids))
    replied = answer(history, small)
    new = {"role": "user", "content": f"{NUMBER}.{STEP}: {texts.text(_NEW_IDS)}"}
    step = b"," + msgspec.json.encode([replied.message, new])[1:-1]
    turns = Load(loads.keep(RECOGNISED, replied), CHAT, *_chat_body(history), step, conversations)
    loads.columns[RECOGNISED] = Column(RECOGNISED, turns, turns)
    return loads


def _chat_body(messages: Messages, **more: Any) -> tuple[bytes, bytes]:
    """The body of a chat request up to its last message, and the rest."""
    opening = msgspec.json.encode({"model": MODEL, "messages": messages})[:-2]
    return opening, b"]," + msgspec.json.encode({"max_tokens": 64, **more})[1:]
