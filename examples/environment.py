"""An environment that holds the ids itself: a guessing game over the token route.

The model guesses a number by calling a tool; the environment answers "higher" or "lower". The first turn
sends messages. Every later one sends all ids so far, and what happened since as messages: the server puts
the chat template's ids for them behind, and touches nothing before. The program checks that at each turn.

An API key, if the server wants one, is in OPENAI_API_KEY.
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
    """Play one game: 0 when it is over, 1 when the server refuses, 2 when none answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server, without /v1 (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="name that GET /v1/models lists (%(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="guesses the model has (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the number (%(default)s)")
    options = parser.parse_args()
    root = options.url.rstrip("/")
    client = OpenAI(base_url=f"{root}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
    secret = random.Random(options.seed).randint(1, 100)
    try:
        play(client, options.model, options.turns, secret)
    except APIConnectionError:
        print(f"environment.py: no server answers at {root}; --url names another one", file=sys.stderr)
        return 2
    except OpenAIError as error:
        print(f"environment.py: {error}", file=sys.stderr)
        return 1
    return 0


def play(client: OpenAI, model: str, turns: int, secret: int) -> None:
    """Up to `turns` guesses; prints what each did to the ids, and the reward."""
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
        answer = client.post("/chat/completions/tokens", body=request | prompt, cast_to=ChatCompletion)
        choice = answer.choices[0]
        prompt_ids: list[int] = (answer.model_extra or {})["prompt_token_ids"]
        completion_ids: list[int] = (choice.model_extra or {})["token_ids"]
        assert prompt_ids[: len(so_far)] == so_far, f"turn {number} does not start with all ids so far"
        new, reward = respond(choice.message, secret)
        if number == 1:
            print(ROW.format("turn", "reused", "appended", "sampled", "in all", "environment"))
        appended, reused = len(prompt_ids) - len(so_far), len(so_far)
        so_far = prompt_ids + completion_ids
        sampled += len(completion_ids)
        says = "; ".join(message["content"] for message in new)
        print(ROW.format(number, reused, appended, len(completion_ids), len(so_far), says))
        if reward == 1.0:
            break
        prompt = {"prompt_ids": so_far, "append_messages": new}
    print(f"reward {reward:.2f} for {len(so_far)} ids, {sampled} of them sampled; every prompt kept them all")


def respond(said: ChatCompletionMessage, secret: int) -> tuple[list[dict[str, str]], float]:
    """What the environment says to a turn, as messages, and the reward of its best guess."""
    new, best = [], 0.0
    for call in said.tool_calls or []:
        if call.type == "function":
            try:
                guess = int(json.loads(call.function.arguments)["number"])
                word = "correct" if guess == secret else "higher" if guess < secret else "lower"
                content, best = f"{guess}: {word}", max(best, 1 - abs(guess - secret) / 100)
            except (ValueError, KeyError, TypeError) as error:
                content = f"error: {error}"
            new.append({"role": "tool", "tool_call_id": call.id, "content": content})
    # A call that was cut short is no call.
    return new or [{"role": "user", "content": "Please guess a number."}], best


if __name__ == "__main__":
    sys.exit(main())
