"""The same conversation over the token route, the chat route and a stock one, and what became of its ids.

For every turn after the first, a prompt is exact if it begins with the ids of the turn before:

    prompt_ids[t+1] == prompt_ids[t] + completion_ids[t] + appended_ids

The OpenAI SDK is used as it is; nothing here reads or writes text as ids.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast
from uuid import uuid4

from openai import NotFoundError, OpenAI, OpenAIError
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from proxy.demo.errors import ConversationError
from proxy.demo.progress import Heartbeat, Say, say_stderr
from proxy.demo.tools import TOOLS, call_tool

TEMPERATURE = 1.2
SEED = 6000
"""Turn n is sampled with `SEED + n`, so a machine that runs the demo twice sees the same table."""

ANSWER_TOKENS = 48
TOOL_CALL_TOKENS = 96
"""A call cut short is not a call: the grammar lets a small model spend a token on every letter."""

Kind = Literal["tools", "answer"]
Messages = list[ChatCompletionMessageParam]


@dataclass(frozen=True)
class Step:
    """One turn of the script."""

    kind: Kind
    """`tools`: the model must call a tool; `answer`: it may say what it likes."""
    user: str | None
    """What the user says; None where the tools' results come back instead."""


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
    """What one turn did to the ids."""

    number: int
    """From 1."""
    kind: Kind
    prompt: int
    """Ids in the prompt."""
    completion: int
    """Ids sampled, the stop token included."""
    before: int
    """Ids of the turn before, prompt and completion; 0 in the first turn."""
    reused: int
    """Ids at the start of the prompt that are those of the turn before."""
    cached: int | None
    """Ids the engine took from its prefix cache, in whole blocks; None where the server does not tell."""
    seconds: float
    finish_reason: str
    tool_calls: int

    @property
    def appended(self) -> int:
        """Ids of the prompt after the reused ones."""
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

    @property
    def follow_ups(self) -> int:
        """Turns after the first."""
        return sum(turn.exact is not None for turn in self.turns)

    @property
    def exact(self) -> int:
        """Follow-up turns whose prompt begins with all ids of the turn before."""
        return sum(turn.exact is True for turn in self.turns)


class Route(Protocol):
    """One way to ask for the next turn."""

    name: str

    def ask(self, new: Messages, **options: Any) -> ChatCompletion:
        """Say `new` after all that was said before, and get the model's turn with its ids.

        Raises:
            OpenAIError: the server refused, or cannot be reached.
        """
        ...


class TokenRoute:
    """Keeps ids: sends back those it got, and only what is new as messages."""

    name = "token route"

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self._ids: list[int] | None = None

    def ask(self, new: Messages, **options: Any) -> ChatCompletion:
        """See `Route.ask`."""
        if self._ids is None:
            body = options | {"messages": new}
        else:
            body = options | {"prompt_ids": self._ids, "append_messages": new}
        completion = self._client.post("/chat/completions/tokens", body=body, cast_to=ChatCompletion)
        prompt_ids, completion_ids = ids_of(completion)
        self._ids = prompt_ids + completion_ids
        return completion


class ChatRoute:
    """Keeps messages, as every OpenAI client does, and sends all of them back at every turn."""

    name = "chat route"

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self._messages: Messages = []

    def ask(self, new: Messages, **options: Any) -> ChatCompletion:
        """See `Route.ask`."""
        self._messages += new
        completion: ChatCompletion = self._client.chat.completions.create(
            messages=self._messages, extra_body={"return_token_ids": True}, **options
        )
        said = completion.choices[0].message.to_dict()
        self._messages.append(cast(ChatCompletionMessageParam, said))
        return completion


class StockRoute(ChatRoute):
    """The same on a server that recognises nothing: it renders and tokenises all messages again.

    Every turn names another session, so the conversation is unknown each time.
    """

    name = "stock chat route"

    def ask(self, new: Messages, **options: Any) -> ChatCompletion:
        """See `Route.ask`."""
        return super().ask(new, extra_headers={"X-Session-ID": f"stock-{uuid4()}"}, **options)


def converse(
    route: Route, model: str, script: Sequence[Step] = SCRIPT, say: Say = say_stderr
) -> Conversation:
    """Hold the scripted conversation over `route`, saying every 2 s which turn is being generated.

    Raises:
        ConversationError: the server cannot be reached, refused a turn, or left out the ids.
    """
    turns = []
    ids_before: list[int] = []
    answered: ChatCompletion | None = None
    for number, step in enumerate(script, start=1):
        new = list(_new_messages(step, answered))
        started = time.monotonic()
        with Heartbeat(say, f"{route.name}, turn {number} of {len(script)}"):
            try:
                answered = route.ask(new, **_options(model, step, number))
            except NotFoundError as error:
                raise ConversationError(
                    f"the server does not have the {route.name}: start it with `tokenproxy vllm`, or put "
                    f"`tokenproxy serve` in front of it ({error})"
                ) from error
            except OpenAIError as error:
                raise ConversationError(f"{route.name}, turn {number}: {error}") from error
        seconds = time.monotonic() - started
        turns.append(_turn(number, step, answered, ids_before, seconds))
        prompt_ids, completion_ids = ids_of(answered)
        ids_before = prompt_ids + completion_ids
    return Conversation(route.name, tuple(turns))


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix of two id sequences."""
    return next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


def ids_of(completion: ChatCompletion) -> tuple[list[int], list[int]]:
    """Prompt ids and completion ids of a completion with one choice.

    Raises:
        ConversationError: the server left one of them out.
    """
    prompt_ids = (completion.model_extra or {}).get("prompt_token_ids")
    completion_ids = (completion.choices[0].model_extra or {}).get("token_ids")
    if not (isinstance(prompt_ids, list) and isinstance(completion_ids, list)):
        raise ConversationError("the answer holds no `prompt_token_ids` or no `choices[0].token_ids`")
    return prompt_ids, completion_ids


def _options(model: str, step: Step, number: int) -> dict[str, Any]:
    calls = step.kind == "tools"
    return {
        "model": model,
        "tools": list(TOOLS),
        "tool_choice": "required" if calls else "auto",
        "temperature": TEMPERATURE,
        "seed": SEED + number,
        "max_tokens": TOOL_CALL_TOKENS if calls else ANSWER_TOKENS,
    }


def _new_messages(step: Step, answered: ChatCompletion | None) -> Iterator[ChatCompletionMessageParam]:
    """Results of the calls that the model made, in order, then what the user says."""
    calls = answered.choices[0].message.tool_calls or [] if answered else []
    for call in calls:
        if call.type == "function":
            result = call_tool(call.function.name, call.function.arguments)
            yield {"role": "tool", "tool_call_id": call.id, "content": result}
    if step.user is not None:
        yield {"role": "user", "content": step.user}
    elif not calls:
        # The call was cut short, so there is no result to send.
        yield {"role": "user", "content": "Please go on."}


def _turn(number: int, step: Step, completion: ChatCompletion, ids_before: list[int], seconds: float) -> Turn:
    prompt_ids, completion_ids = ids_of(completion)
    choice, usage = completion.choices[0], completion.usage
    details = usage.prompt_tokens_details if usage else None
    return Turn(
        number=number,
        kind=step.kind,
        prompt=len(prompt_ids),
        completion=len(completion_ids),
        before=len(ids_before),
        reused=common_prefix(ids_before, prompt_ids),
        cached=details.cached_tokens if details else None,
        seconds=seconds,
        finish_reason=choice.finish_reason,
        tool_calls=len(choice.message.tool_calls or []),
    )
