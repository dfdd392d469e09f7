"""Two ways to make the sequence that is trained from a rollout: exact ids, or the history tokenised again.

Both play the same games with the same seeds over the chat route of the same engine.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from openai import OpenAI
from openai.types.chat import ChatCompletion
from transformers import PreTrainedTokenizerBase

from examples.train.game import TOOL, Game, Message, prompt
from examples.train.mismatch import aligned, samples_needed
from tokenproxy.client import Client

_OPTIONS: dict[str, Any] = {
    "tools": [TOOL],
    # "required" would sample under a grammar, whose log-probabilities are not those of the model.
    "tool_choice": "auto",
    # The engine returns log-probabilities of the model's own distribution (raw_logprobs). It samples from the
    # same distribution at temperature 1 without top-k and top-p.
    "temperature": 1.0,
    "top_p": 1.0,
    "max_tokens": 48,
}


@dataclass(frozen=True)
class Rollout:
    """One finished game as the sequence that is trained: p ids of its first prompt, c ids after them."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    """For each completion id 1 if it is trained; [c]."""
    logprobs: list[float]
    """The recorded log-probability of each completion id, NaN where a trained id has none; [c]."""
    reward: float
    samples: int
    """How many training samples hold all its turns with the ids that the engine used."""


class Rollouts(ABC):
    """Plays games in one of the two ways."""

    name: str

    def __init__(self, model: str) -> None:
        """`model` is the name that the engine serves."""
        self._model = model

    def play(self, numbers: Sequence[int], step: int) -> list[Rollout]:
        """Play games at the same time. Equal numbers are a group: one prompt and secret, different seeds."""
        with ThreadPoolExecutor(len(numbers)) as threads:
            return list(threads.map(self._rollout, numbers, [step] * len(numbers), range(len(numbers))))

    @abstractmethod
    def _rollout(self, number: int, step: int, place: int) -> Rollout:
        """Play one game, the one at a place of its step."""

    def _converse(
        self, client: OpenAI, number: int, seed: int, **extra: Any
    ) -> tuple[Game, list[Message], list[ChatCompletion]]:
        """The game, its messages, and what the engine answered in each turn."""
        game, messages, completions = Game(number), prompt(number), list[ChatCompletion]()
        while not game.over:
            own: dict[str, Any] = {
                "model": self._model,
                "messages": messages,
                "seed": seed + len(completions),
            }
            completion = client.chat.completions.create(**_OPTIONS, **own, **extra)
            message = completion.choices[0].message.to_dict()
            completions.append(completion)
            messages += [message, *game.respond(message.get("tool_calls") or [])]
        return game, messages, completions


class ExactRollouts(Rollouts):
    """Plain chat through tokenproxy, which keeps the ids; it makes the training samples too."""

    name = "tokenproxy"

    def __init__(self, model: str, proxy_url: str) -> None:
        super().__init__(model)
        self._url = proxy_url
        self._client = Client(proxy_url)
        self._run = uuid4().hex
        self.last_sessions: list[str] = []
        """Names of the rollouts of the last step."""

    def play(self, numbers: Sequence[int], step: int) -> list[Rollout]:
        """See `Rollouts.play`."""
        self.last_sessions = [uuid4().hex for _ in numbers]
        return super().play(numbers, step)

    def _rollout(self, number: int, step: int, place: int) -> Rollout:
        session = self.last_sessions[place]
        metadata = {"run": self._run, "step": step, "split": "train"}
        made = self._client.create_session(session, exists="error", metadata=metadata)
        openai = OpenAI(base_url=f"{self._url}/sessions/{session}/v1", api_key=made.key or "none")
        game, *_ = self._converse(openai, number, seed_of(step, place))
        self._client.set_reward(session, game.reward)
        found = self._client.samples(session, layout="trl")
        if not found.samples:
            raise RuntimeError(f"the rollout {session} has no training sample: {found.refused}")
        # TRL trains one sequence for each prompt: the largest, if there are several
        sample = max(found.samples, key=lambda sample: sum(sample["env_mask"]))
        return Rollout(
            sample["prompt_ids"],
            sample["completion_ids"],
            sample["env_mask"],
            sample["logprobs"],
            sample["reward"],
            len(found.samples),
        )


class RetokenisedRollouts(Rollouts):
    """Plain chat with a stock vLLM; the trainer renders the finished conversation and tokenises it."""

    name = "re-tokenised"

    def __init__(self, model: str, engine_url: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(model)
        self._openai = OpenAI(base_url=f"{engine_url}/v1", api_key="none")
        self._tokenizer = tokenizer

    def _rollout(self, number: int, step: int, place: int) -> Rollout:
        game, messages, completions = self._converse(
            self._openai, number, seed_of(step, place), logprobs=True, extra_body={"return_token_ids": True}
        )
        ids, spans = self._tokenise(messages, len(prompt(number)))
        mask, recorded = [0] * len(ids), [0.0] * len(ids)
        turns = []
        for (start, end), completion in zip(spans, completions, strict=True):
            prompt_ids, completion_ids, logprobs = _evidence(completion)
            turns.append((prompt_ids, completion_ids))
            mask[start:end] = [1] * (end - start)
            recorded[start:end] = aligned(completion_ids, logprobs, ids[start:end])
        first = spans[0][0]
        return Rollout(
            prompt_ids=ids[:first],
            completion_ids=ids[first:],
            mask=mask[first:],
            logprobs=recorded[first:],
            reward=game.reward,
            samples=samples_needed(turns),
        )

    def _tokenise(self, messages: list[Message], first: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a conversation up to its last turn, and where the turns from message `first` on stand.

        A turn begins after its generation prompt and ends with its stop token.
        """
        ids, spans = list[int](), list[tuple[int, int]]()
        for place in range(first, len(messages)):
            if messages[place]["role"] == "assistant":
                start = len(self._render(messages[:place], generation_prompt=True))
                ids = self._render(messages[: place + 1], generation_prompt=False)
                while ids[-1] != self._tokenizer.eos_token_id:  # what the template puts after it
                    ids.pop()
                spans.append((start, len(ids)))
        return ids, spans

    def _render(self, messages: list[Message], *, generation_prompt: bool) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [_as_vllm_renders(message) for message in messages],
            tools=[TOOL],
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def seed_of(step: int, place: int) -> int:
    """The seed of the first turn of a rollout; turn n has this plus n."""
    return 10_000 * step + 100 * place


def _as_vllm_renders(message: Message) -> Message:
    """A message as vLLM gives it to the chat template: arguments of tool calls are objects, not JSON."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message


def _evidence(completion: ChatCompletion) -> tuple[list[int], list[int], list[float]]:
    """Prompt ids, sampled ids and their log-probabilities of one turn."""
    choice = completion.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    logprobs = [token.logprob for token in choice.logprobs.content]
    completion_ids: list[int] = (choice.model_extra or {})["token_ids"]
    assert len(completion_ids) == len(logprobs)
    return (completion.model_extra or {})["prompt_token_ids"], completion_ids, logprobs
