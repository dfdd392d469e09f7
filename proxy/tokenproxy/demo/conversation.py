"""Hold the same conversation over the token route, the chat route and a stock chat route; compare the ids.

The prompt of a turn after the first is exact if it begins with all ids of the turn before:

    prompt_ids[t+1] == prompt_ids[t] + completion_ids[t] + appended_ids

The client is an unmodified OpenAI SDK. Nothing here tokenizes or detokenizes.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast
from uuid import uuid4

import numpy as np
from openai import NotFoundError, OpenAI, OpenAIError
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from chat_tokenizer.ids_difference import common_prefix
from tokenproxy.demo import ConversationError
from tokenproxy.demo.progress import heartbeat
from tokenproxy.demo.tools import TOOLS, call_tool

TEMPERATURE = 1.2
SEED = 6000
"""Turn n is sampled with seed `SEED + n`, so that every run on one machine prints the same table."""

ANSWER_TOKENS = 48
TOOL_CALL_TOKENS = 96
"""Enough for a complete call: a small model under a grammar may spend a token on every letter."""

Kind = Literal["tools", "answer"]
Messages = list[ChatCompletionMessageParam]


@dataclass(frozen=True)
class Step:
    """One turn of the script."""

    kind: Kind
    """`tools`: the model must call a tool; `answer`: it may call a tool or write text."""
    user: str | None
    """The user's message; None if the turn sends only tool results."""


SCRIPT = (
    Step("tools", "What is the weather in Paris?"),
    Step("answer", None),
    Step("tools", "And how much is 18 * 7?"),
    Step("answer", None),
    Step("answer", "Tell me something about the river there."),
    Step("tools", "Now the weather in Reykjavík, please."),
    Step("answer", None),
)


@dataclass(frozen=True)
class Turn:
    """The ids of one turn, counted."""

    number: int
    """Counts from 1."""
    kind: Kind
    prompt: int
    """Number of ids in the prompt."""
    completion: int
    """Number of sampled ids, including the stop token."""
    before: int
    """Number of ids of the turn before, prompt and completion; 0 in the first turn."""
    reused: int
    """Length of the common prefix of the prompt and the ids of the turn before."""
    cached: int | None
    """Prompt ids from the engine's prefix cache, in whole blocks; None if the server does not report them."""
    seconds: float

    @property
    def appended(self) -> int:
        """Number of prompt ids after the reused ones."""
        return self.prompt - self.reused

    @property
    def exact(self) -> bool | None:
        """Whether the prompt begins with all ids of the turn before; None in the first turn."""
        return None if self.before == 0 else self.reused == self.before


@dataclass(frozen=True)
class Conversation:
    """The turns of one conversation, in order."""

    route: str
    turns: tuple[Turn, ...]
    session: str | None = None
    """The session in which the server recorded it; None if it does not tell."""

    @property
    def follow_ups(self) -> int:
        """Number of turns after the first."""
        return sum(turn.exact is not None for turn in self.turns)

    @property
    def exact(self) -> int:
        """Number of follow-up turns whose prompt begins with all ids of the turn before."""
        return sum(turn.exact is True for turn in self.turns)


class TokenRoute:
    """A client that keeps ids: it sends all ids back, and only the new messages."""

    name = "token route"

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self._ids: list[int] | None = None
        self.session = f"demo-tokens-{uuid4()}"
        """The session in which the server records the conversation."""

    def next_turn(self, new_messages: Messages, **options: Any) -> ChatCompletion:
        """Append `new_messages` to the conversation; returns the model's turn with its ids.

        Raises:
            OpenAIError: the server refused the request, or cannot be reached.
        """
        if self._ids is None:
            body = options | {"messages": new_messages}
        else:
            body = options | {"prompt_ids": self._ids, "append_messages": new_messages}
        completion = self._client.post(
            "/chat/completions/tokens",
            body=body,
            cast_to=ChatCompletion,
            options={"headers": {"X-Session-ID": self.session}},
        )
        prompt_ids, completion_ids = ids_of(completion)
        self._ids = prompt_ids + completion_ids
        return completion


class ChatRoute:
    """A client that keeps messages, as every OpenAI client does: it sends all of them in every turn."""

    name = "chat route"

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self._messages: Messages = []
        self.session: str | None = None
        """As that of `TokenRoute`; None before the first turn."""

    def next_turn(self, new_messages: Messages, **options: Any) -> ChatCompletion:
        """See `TokenRoute.next_turn`."""
        self._messages += new_messages
        response = self._client.chat.completions.with_raw_response.create(
            messages=self._messages, extra_body={"return_token_ids": True} | self.extra_fields(), **options
        )
        self.session = response.headers.get("x-session-id")
        completion: ChatCompletion = response.parse()
        assistant_message = completion.choices[0].message.to_dict()
        self._messages.append(cast(ChatCompletionMessageParam, assistant_message))
        return completion

    def extra_fields(self) -> dict[str, Any]:
        """Fields of the next request that the SDK has no argument for."""
        return {}


class StockRoute(ChatRoute):
    """The chat route of a stock server, which renders and tokenizes all messages again in every turn.

    Every turn sets another argument of the chat template, which the template does not use. So the proxy
    cannot match the conversation and renders it, as vLLM does.
    """

    name = "stock chat route"

    def __init__(self, client: OpenAI) -> None:
        super().__init__(client)
        self._session = f"demo-stock-{uuid4()}"

    def next_turn(self, new_messages: Messages, **options: Any) -> ChatCompletion:
        """See `TokenRoute.next_turn`."""
        return super().next_turn(new_messages, extra_headers={"X-Session-ID": self._session}, **options)

    def extra_fields(self) -> dict[str, Any]:
        """See `ChatRoute.extra_fields`."""
        return {"chat_template_kwargs": {"demo_request": str(uuid4())}}


def converse(
    route: TokenRoute | ChatRoute,
    model: str,
) -> Conversation:
    """Hold the scripted conversation over `route`, and report every 2 s which turn is being generated.

    Raises:
        ConversationError: the server cannot be reached, refused a turn, or returned no ids.
    """
    turns = []
    ids_before: list[int] = []
    completion: ChatCompletion | None = None
    for number, step in enumerate(SCRIPT, start=1):
        new_messages = list(_new_messages(step, completion))
        started = time.monotonic()
        with heartbeat(f"{route.name}, turn {number} of {len(SCRIPT)}"):
            try:
                completion = route.next_turn(new_messages, **_options(model, step, number))
            except NotFoundError as error:
                raise ConversationError(
                    f"the server does not have the {route.name}: start it with `tokenproxy vllm`, or put "
                    f"`tokenproxy serve` in front of it ({error})"
                ) from error
            except OpenAIError as error:
                raise ConversationError(f"{route.name}, turn {number}: {error}") from error
        seconds = time.monotonic() - started
        turns.append(_turn(number, step, completion, ids_before, seconds))
        prompt_ids, completion_ids = ids_of(completion)
        ids_before = prompt_ids + completion_ids
    return Conversation(route.name, tuple(turns), route.session)


def ids_of(completion: ChatCompletion) -> tuple[list[int], list[int]]:
    """The prompt ids and completion ids of a completion with one choice.

    Raises:
        ConversationError: the server returned none.
    """
    prompt_ids = (completion.model_extra or {}).get("prompt_token_ids")
    completion_ids = (completion.choices[0].model_extra or {}).get("token_ids")
    if not (isinstance(prompt_ids, list) and isinstance(completion_ids, list)):
        raise ConversationError(
            "the response has no `prompt_token_ids` or no `choices[0].token_ids`: use a tokenproxy server, "
            "or a vLLM that returns ids for `return_token_ids`"
        )
    return prompt_ids, completion_ids


def _options(model: str, step: Step, number: int) -> dict[str, Any]:
    must_call = step.kind == "tools"
    return {
        "model": model,
        "tools": list(TOOLS),
        "tool_choice": "required" if must_call else "auto",
        "temperature": TEMPERATURE,
        "seed": SEED + number,
        "max_tokens": TOOL_CALL_TOKENS if must_call else ANSWER_TOKENS,
    }


def _new_messages(step: Step, previous: ChatCompletion | None) -> Iterator[ChatCompletionMessageParam]:
    """The results of the previous turn's tool calls, in order, then the user's message."""
    calls = previous.choices[0].message.tool_calls or [] if previous else []
    for call in calls:
        if call.type == "function":
            result = call_tool(call.function.name, call.function.arguments)
            yield {"role": "tool", "tool_call_id": call.id, "content": result}
    if step.user is not None:
        yield {"role": "user", "content": step.user}
    elif not calls:
        # max_tokens cut the call short, so there is no result to send.
        yield {"role": "user", "content": "Please go on."}


def _turn(number: int, step: Step, completion: ChatCompletion, ids_before: list[int], seconds: float) -> Turn:
    prompt_ids, completion_ids = ids_of(completion)
    usage = completion.usage
    details = usage.prompt_tokens_details if usage else None
    return Turn(
        number=number,
        kind=step.kind,
        prompt=len(prompt_ids),
        completion=len(completion_ids),
        before=len(ids_before),
        reused=common_prefix(np.array(ids_before, np.int64), np.array(prompt_ids, np.int64)),
        cached=details.cached_tokens if details else None,
        seconds=seconds,
    )
