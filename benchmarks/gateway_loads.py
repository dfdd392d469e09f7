"""The requests of `gateway.py`: bodies with a place for the number of the conversation, and their answers.

All texts are sources of Python's standard library, an agent's usual reading, tokenised by the benchmark's
model. The ids are those of the texts, so they compress as real ones do.
"""

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cases import CHAT, HEADERS, TOKENS
from benchmarks.gateway_answers import MODEL, Answer
from benchmarks.processes import StartError
from tokenization import ChatTokenizer

NUMBER, STEP = "\x01", "\x02"
"""Stand in texts for the numbers of the conversation and of the step."""
FIRST_NUMBER = 1_000_000
"""Numbers have seven digits, so that all conversations are equally long."""
SMALL_CHAT, FIRST_TURN, LONG_ANSWER = "1 KB chat", "first turn 32k", "answer 32k"
LONG_TEXT, LONG_BOTH = "answer 32k as text", "history and answer 32k"
STREAM, RECOGNISED, GIVEN_IDS = "stream", "recognised turn 32k", "100k ids in"
COLUMNS = (SMALL_CHAT, FIRST_TURN, LONG_ANSWER, LONG_TEXT, LONG_BOTH, STREAM, RECOGNISED, GIVEN_IDS)
"""Names of the columns."""
FEW_GIVEN_IDS = "50 ids in"
MESSAGES_STREAM, RESPONSES_STREAM = "stream of /v1/messages", "stream of /v1/responses"
LENGTHS = {"1k": 1_000, "32k": 32_000, "128k": 128_000}
_SMALL_IDS, _STREAMED_IDS, _LONG_IDS, _GIVEN_IDS = 40, 256, 32_000, 100_000
_QUESTION_OF_1KB = 165
_NEW_IDS = 200
"""Of the message that each step appends."""
_SYSTEM = "You fix bugs in a Python repository. Read its sources, then explain."
_QUESTION_IDS, _ANSWER_IDS = 400, 200
"""Of the messages of a history."""
CLIENT_HEADERS = {name: value for name, value in HEADERS.items() if name != "accept-encoding"}
"""Those of the OpenAI SDK; but no gateway is to spend its time with compressing."""
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are equal but for their numbers. See `gateway.lua`."""

    answer: str
    """Name of the engine's answer."""
    path: str
    opening: bytes
    closing: bytes
    step: bytes = b""
    """What each further turn of a conversation puts between opening and closing."""
    conversations: int = 0
    """How many take turns; 0 if every request starts one."""
    sessions: bool = False
    """Whether each conversation names a session."""

    def body(self, number: int, steps: int = 0) -> bytes:
        """The body of one request."""
        taken = b"".join(
            self.step.replace(STEP.encode(), b"%d" % (FIRST_NUMBER + step)) for step in range(1, steps + 1)
        )
        whole = b"".join((self.opening, taken, self.closing))
        return whole.replace(NUMBER.encode(), b"%d" % (FIRST_NUMBER + number))


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the comparison: what is sent to tokenproxy, and to the others."""

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
    """All requests, and the answers of the engine."""

    columns: list[Column] = field(default_factory=list)
    tokens: list[Column] = field(default_factory=list)
    """Of the token route; the last one is also among the columns."""
    translated: list[Column] = field(default_factory=list)
    """The column `stream` in the wire formats of other vendors, which only tokenproxy is sent."""
    conversations: dict[str, dict[bool, Load]] = field(default_factory=dict)
    """Recognised turns, by the length of the history and by whether they are streamed."""
    answers: dict[str, Answer] = field(default_factory=dict)


class Corpus:
    """Text with its ids, the same in every run, none of it twice."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = self._read()

    def take(self, count: int) -> list[tuple[int, str]]:
        """The next ids, each with its text.

        Raises:
            StartError: there are no more.
        """
        taken = list(islice(self._tokens, count))
        if len(taken) < count:
            raise StartError("Python's standard library has too few sources here to write requests from them")
        return taken

    def text(self, count: int) -> str:
        """The text of the next ids."""
        return "".join(piece for _, piece in self.take(count))

    def _read(self) -> Iterator[tuple[int, str]]:
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            # ASCII only: there each character of a token's string is one of the text
            text, start = file.read_bytes().decode("ascii", "ignore"), 0
            ids = self._tokenizer.encode(text)
            for token, string in zip(ids, self._tokenizer.token_strings(ids), strict=True):
                yield token, text[start : start + len(string)]
                start += len(string)


def make_loads(tokenizer: ChatTokenizer, conversations: int, lengths: dict[str, int]) -> Loads:
    """Write all requests and answers.

    Args:
        conversations: how many are interleaved where turns are recognised.
        lengths: of their histories, in ids; `LENGTHS`.

    Raises:
        StartError: there is too little text.
    """
    return _Writer(tokenizer, conversations).write(lengths)


class _Writer:
    """Writes requests and answers."""

    def __init__(self, tokenizer: ChatTokenizer, conversations: int) -> None:
        self._tokenizer, self._conversations = tokenizer, conversations
        self._corpus = Corpus(tokenizer)
        self._stop = tokenizer.stop_id()
        self._small = self._sampled(_SMALL_IDS)
        self._loads = Loads()

    def write(self, lengths: dict[str, int]) -> Loads:
        """See `make_loads`."""
        small, long = self._small, self._sampled(_LONG_IDS)
        question = self._messages(self._corpus.text(_QUESTION_OF_1KB))
        columns = self._loads.columns
        first = self._messages(self._corpus.text(_LONG_IDS - 60))
        columns.append(self._chat(SMALL_CHAT, question, small))
        columns.append(self._chat(FIRST_TURN, first, small))
        evidence = {"return_token_ids": True, "logprobs": True}
        columns.append(self._chat(LONG_ANSWER, question, long, **evidence))
        columns.append(self._chat(LONG_TEXT, question, long))
        columns.append(self._chat(LONG_BOTH, self._history(_LONG_IDS), long, **evidence))
        streamed = self._sampled(_STREAMED_IDS)
        columns.append(self._chat(STREAM, question, streamed, chunks=_STREAMED_IDS, stream=True))
        self._add_translated(columns[-1], question)
        for label, length in lengths.items():
            self._add_conversations(label, length)
        recognised = self._loads.conversations.get("32k") or next(iter(self._loads.conversations.values()))
        columns.append(Column(RECOGNISED, recognised[False], recognised[False]))
        self._add_token_loads()
        columns.append(self._loads.tokens[-1])
        return self._loads

    def _chat(
        self, name: str, messages: Messages, sampled: list[tuple[int, str]], *, chunks: int = 0, **more: Any
    ) -> Column:
        """A column in which every request starts a conversation."""
        opening, closing = _chat_body(messages, **more)
        load = Load(self._answer(name, messages, sampled), CHAT, opening, closing)
        return Column(name, load, load, chunks)

    def _add_conversations(self, label: str, length: int) -> None:
        messages = self._history(length)
        name = self._answer(f"conversation-{label}", messages, self._small)
        answer = {"role": "assistant", "content": self._loads.answers[name].text}
        new = {"role": "user", "content": f"{NUMBER}.{STEP}: {self._corpus.text(_NEW_IDS)}"}
        step = _encode([answer, new])[1:-1]
        self._loads.conversations[label] = {}
        for stream in (False, True):
            opening, closing = _chat_body(messages, **({"stream": True} if stream else {}))
            load = Load(name, CHAT, opening, closing, b"," + step, self._conversations)
            self._loads.conversations[label][stream] = load

    def _add_translated(self, chat: Column, question: Messages) -> None:
        """The same streams for the clients of other vendors."""
        system, user = (message["content"] for message in question)
        asked: dict[str, Any] = {"model": MODEL, "stream": True}
        bodies = {
            MESSAGES_STREAM: {**asked, "system": system, "messages": question[1:], "max_tokens": 64},
            RESPONSES_STREAM: {**asked, "instructions": system, "input": user, "max_output_tokens": 64},
        }
        for name, body in bodies.items():
            path = name.rpartition(" ")[2]
            load = Load(chat.ours.answer, path, _encode(body)[:-1], b"}")
            self._loads.translated.append(Column(name, load, chat.theirs, chat.chunks))

    def _add_token_loads(self) -> None:
        """Ids that the client has; through the others in the field in which vLLM takes them."""
        for name, count in ((FEW_GIVEN_IDS, 50), (GIVEN_IDS, _GIVEN_IDS)):
            ids = [token for token, _ in self._corpus.take(count - 1)]
            given = b"[%s,%s" % (NUMBER.encode(), _encode(ids)[1:])
            slug = self._keep(name, self._answer_of(ids, self._small))
            tail = b',"max_tokens":64,"return_token_ids":false}'
            ours = Load(slug, TOKENS, b'{"model":"%s","prompt_ids":' % MODEL.encode() + given, tail)
            opening, closing = _chat_body([{"role": "user", "content": ""}], return_token_ids=False)
            transfer = b',"kv_transfer_params":{"prompt_token_ids":%s}}' % given
            theirs = Load(slug, CHAT, opening, closing[:-1] + transfer)
            self._loads.tokens.append(Column(name, ours, theirs))

    def _answer(self, name: str, messages: Messages, sampled: list[tuple[int, str]]) -> str:
        """Add the answer to messages; returns its name for `Load`."""
        numbered = [{**m, "content": m["content"].replace(NUMBER, str(FIRST_NUMBER))} for m in messages]
        return self._keep(name, self._answer_of(self._tokenizer.render(numbered), sampled))

    def _keep(self, name: str, answer: Answer) -> str:
        slug = re.sub(r"\W+", "-", name)
        self._loads.answers[slug] = answer
        return slug

    def _answer_of(self, prompt: list[int], sampled: list[tuple[int, str]]) -> Answer:
        return Answer(prompt, [*(token for token, _ in sampled), self._stop], [text for _, text in sampled])

    def _sampled(self, count: int) -> list[tuple[int, str]]:
        return self._corpus.take(count - 1)

    def _messages(self, text: str) -> Messages:
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": f"{NUMBER}: {text}"}]

    def _history(self, length: int) -> Messages:
        """An agent's conversation that renders to about `length` ids."""
        framing = 5 + len(str(FIRST_NUMBER))  # of each message
        messages = self._messages(self._corpus.text(_QUESTION_IDS))
        left = length - _QUESTION_IDS - 60
        exchange = _QUESTION_IDS + _ANSWER_IDS + 2 * framing + 4
        while left >= exchange:
            answer, question = (self._corpus.text(count) for count in (_ANSWER_IDS, _QUESTION_IDS))
            messages += _exchange(answer, question)
            left -= exchange
        if (text := left - 2 * framing - 4) >= 2:
            messages += _exchange(self._corpus.text(text // 3), self._corpus.text(text - text // 3))
        return messages


def _exchange(answer: str, question: str) -> Messages:
    return [
        {"role": "assistant", "content": f"{NUMBER}: {answer}"},
        {"role": "user", "content": f"{NUMBER}: {question}"},
    ]


def _chat_body(messages: Messages, **more: Any) -> tuple[bytes, bytes]:
    """The body of a chat request up to its last message, and the rest."""
    opening = _encode({"model": MODEL, "messages": messages})[:-2]
    return opening, b"]," + _encode({"max_tokens": 64, **more})[1:]


def _encode(value: object) -> bytes:
    encoded = msgspec.json.encode(value)
    for mark in (NUMBER, STEP):
        encoded = encoded.replace(rb"\u%04x" % ord(mark), mark.encode())
    return encoded
