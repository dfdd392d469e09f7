"""An environment that holds the ids itself: a guessing game over the token route.

The model guesses a number by calling a tool; the environment answers "higher" or "lower". The first turn
sends messages. Every later turn sends all ids so far and the new messages: the server appends the ids that
the chat template gives them, and changes no earlier id. The program checks this in each turn.

If the server requires an API key, set OPENAI_API_KEY.
"""

import argparse
import json
import os
import random
import sys
from typing import Any

from openai import APIConnectionError, OpenAI, OpenAIError
from openai.types.chat import ChatCompletion, ChatCompletionMessage

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
ROW = "{:>4} {:>7} {:>7} {:>9} {:>8}  {}"


def main() -> int:
    """Play one game; returns 0 when it is over, 1 if the server refuses, 2 if none responds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="server, without /v1 (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="name that GET /v1/models lists (%(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="maximum number of guesses (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the secret number (%(default)s)")
    options = parser.parse_args()
    root = options.url.rstrip("/")
    client = OpenAI(base_url=f"{root}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
    secret = random.Random(options.seed).randint(1, 100)
    try:
        play(client, options.model, options.turns, secret)
    except APIConnectionError:
        print(f"environment.py: no server at {root}: start one, or pass --url", file=sys.stderr)
        return 2
    except OpenAIError as error:
        print(f"environment.py: {error}", file=sys.stderr)
        return 1
    return 0


def play(client: OpenAI, model: str, turns: int, secret: int) -> None:
    """Play up to `turns` guesses; print the number of ids of each turn, and the reward."""
    so_far: list[int] = []
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": OPENING}]}
    reward, sampled = 0.0, 0
    for number in range(1, turns + 1):
        request = {
            "model": model,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
            "temperature": 1.0,
            "max_tokens": 96,
        }
        # The SDK has no method for this route; its `post` has the same retries, errors and types.
        completion = client.post("/chat/completions/tokens", body=request | prompt, cast_to=ChatCompletion)
        choice = completion.choices[0]
        prompt_ids: list[int] = (completion.model_extra or {})["prompt_token_ids"]
        completion_ids: list[int] = (choice.model_extra or {})["token_ids"]
        assert prompt_ids[: len(so_far)] == so_far, f"turn {number} must start with all ids so far"
        new, reward = respond(choice.message, secret)
        if number == 1:
            print(ROW.format("turn", "reused", "appended", "sampled", "total", "environment"))
        appended, reused = len(prompt_ids) - len(so_far), len(so_far)
        so_far = prompt_ids + completion_ids
        sampled += len(completion_ids)
        contents = "; ".join(message["content"] for message in new)
        print(ROW.format(number, reused, appended, len(completion_ids), len(so_far), contents))
        if reward == 1.0:
            break
        prompt = {"prompt_ids": so_far, "append_messages": new}
    print(f"reward {reward:.2f} for {len(so_far)} ids, {sampled} of them sampled; every prompt kept them all")


def respond(message: ChatCompletionMessage, secret: int) -> tuple[list[dict[str, str]], float]:
    """The environment's messages after a turn, and the reward of the turn's best guess."""
    new, best = [], 0.0
    for call in message.tool_calls or []:
        if call.type == "function":
            try:
                guess = int(json.loads(call.function.arguments)["number"])
                word = "correct" if guess == secret else "higher" if guess < secret else "lower"
                content, best = f"{guess}: {word}", max(best, 1 - abs(guess - secret) / 100)
            except (ValueError, KeyError, TypeError) as error:
                content = f"error: {error}"
            new.append({"role": "tool", "tool_call_id": call.id, "content": content})
    # Without a complete tool call there is no result to send.
    return new or [{"role": "user", "content": "Please guess a number."}], best


if __name__ == "__main__":
    sys.exit(main())
