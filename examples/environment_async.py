"""Environments that hold the ids and append to them locally: several guessing games at once.

The library renders the first prompt, and appends the ids of the environment's messages after each turn; the
token route gets plain `prompt_ids`. Each game ends as a training sample: ids, loss mask and reward. If the
server requires an API key, set OPENAI_API_KEY.
"""

import argparse
import asyncio
import json
import os
import random
import sys
from dataclasses import dataclass, field

from openai import APIConnectionError, AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from chat_tokenizer import ChatTokenizer, TokenizationError

OPENING = (
    "I think of a number between 1 and 100. Guess it with the tool; I say whether mine is higher or lower."
)
ARGUMENTS = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 100}},
    "required": ["number"],
    "additionalProperties": False,
}
TOOL = {"name": "guess", "description": "Guess the number", "strict": True, "parameters": ARGUMENTS}
TOOLS = [{"type": "function", "function": TOOL}]


@dataclass
class Game:
    """One conversation as a training sample."""

    secret: int
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """Loss mask: 1 for a sampled id, 0 for an id of the prompt."""
    reward: float = 0.0

    def extend(self, ids: list[int], *, sampled: bool) -> None:
        """Append ids, and their part of the loss mask."""
        self.ids += ids
        self.mask += [int(sampled)] * len(ids)

    def respond(self, message: ChatCompletionMessage) -> list[dict[str, str]]:
        """The environment's messages after a turn."""
        new = []
        for call in message.tool_calls or []:
            if call.type != "function":
                continue
            try:
                guess = int(json.loads(call.function.arguments)["number"])
                content = "higher" if guess < self.secret else "lower" if guess > self.secret else "correct"
                self.reward = max(self.reward, 1 - abs(guess - self.secret) / 100)
            except (ValueError, KeyError, TypeError) as error:
                content = f"error: {error}"
            new.append({"role": "tool", "tool_call_id": call.id, "content": content})
        # Without a complete tool call there is no result to send.
        return new or [{"role": "user", "content": "Please guess a number."}]


async def play(client: AsyncOpenAI, tokenizer: ChatTokenizer, model: str, turns: int, secret: int) -> Game:
    """Play up to `turns` guesses. The tokenizer runs in a thread, so that other games are not blocked."""
    game = Game(secret)
    opening = [{"role": "user", "content": OPENING}]
    game.extend(await asyncio.to_thread(tokenizer.render, opening, tools=TOOLS), sampled=False)
    settings = {"model": model, "tools": TOOLS, "tool_choice": "required", "max_tokens": 96}
    for turn in range(turns):
        body = settings | {"prompt_ids": game.ids}
        completion = await client.post("/chat/completions/tokens", body=body, cast_to=ChatCompletion)
        assert (completion.model_extra or {})["prompt_token_ids"] == game.ids, "the engine's prompt differs"
        choice = completion.choices[0]
        game.extend((choice.model_extra or {})["token_ids"], sampled=True)
        new = game.respond(choice.message)
        if turn == turns - 1 or game.reward == 1.0:
            break
        appended = await asyncio.to_thread(
            tokenizer.append, game.ids, new, tools=TOOLS, finish_reason=choice.finish_reason
        )
        game.extend(appended.close_ids + appended.suffix_ids, sampled=False)
    return game


async def main() -> int:
    """Play the games: returns 0 when all are over, 1 on an error, 2 if no server responds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="server, without /v1 (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="name that GET /v1/models lists (%(default)s)")
    parser.add_argument("--tokenizer", metavar="PATH", required=True, help="the model's folder or hub name")
    parser.add_argument("--games", type=int, default=4, help="number of concurrent games (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="guesses in each game (%(default)s)")
    options = parser.parse_args()
    root = options.url.rstrip("/")
    try:
        tokenizer = ChatTokenizer.load(options.tokenizer)
        async with AsyncOpenAI(
            base_url=f"{root}/v1", api_key=os.environ.get("OPENAI_API_KEY", "-")
        ) as client:
            secrets = [random.Random(number).randint(1, 100) for number in range(options.games)]
            plays = [play(client, tokenizer, options.model, options.turns, secret) for secret in secrets]
            games = await asyncio.gather(*plays)
    except APIConnectionError:
        print(f"environment_async.py: no server at {root}: start one, or pass --url", file=sys.stderr)
        return 2
    except (OpenAIError, TokenizationError) as error:
        print(f"environment_async.py: {error}", file=sys.stderr)
        return 1
    for number, game in enumerate(games, start=1):
        print(f"game {number}: {len(game.ids)} ids, {sum(game.mask)} sampled, reward {game.reward:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
