"""A trainer that reads rollouts as they are finished, while environments sample them.

Each environment holds a conversation of a few turns over the token route, and sets a reward: that finishes
its rollout. The trainer reads the feed of finished rollouts, in the order of finishing, and acknowledges what
it "trained" on. If it is killed, the next run with the same --consumer continues after those.

If the server requires an API key, set OPENAI_API_KEY.
"""

import argparse
import os
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tokenproxy.client import Client, FeedRollout, NoResponse, ProxyError

QUESTION = {"role": "user", "content": "Name a colour."}
MORE = {"role": "user", "content": "And another one?"}
ROW = "{:<32} {:>8} {:>6} {:>8} {:>7}"


def main() -> int:
    """Train on some rollouts; returns 0 when it has them, 1 if the server refuses, 2 if none responds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="server, without /v1 (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="name that GET /v1/models lists (%(default)s)")
    parser.add_argument("--rollouts", type=int, default=4, help="number of rollouts (%(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="turns of each (%(default)s)")
    parser.add_argument("--consumer", default="trainer", help="name of the trainer's cursor (%(default)s)")
    options = parser.parse_args()
    run = uuid.uuid4().hex
    with Client(options.url, api_key=os.environ.get("OPENAI_API_KEY")) as client:
        try:
            with ThreadPoolExecutor(4) as threads:
                rollouts = [
                    threads.submit(sample, client, run, options.model, options.turns)
                    for _ in range(options.rollouts)
                ]
                train(client, run, options.consumer, rollouts)
        except NoResponse:
            print(f"trainer.py: no server at {options.url}: start one, or pass --url", file=sys.stderr)
            return 2
        except ProxyError as error:
            print(f"trainer.py: {error}", file=sys.stderr)
            return 1
    return 0


def sample(client: Client, run: str, model: str, turns: int) -> None:
    """Sample one rollout on exact ids, and reward it for the share of its words that differ."""
    name = uuid.uuid4().hex
    client.create_session(name, exists="error", metadata={"run": run, "split": "train"})
    options: dict[str, Any] = {"session": name, "model": model, "temperature": 1.0, "max_tokens": 24}
    turn = client.token_turn(messages=[QUESTION], **options)
    words = str(turn.message["content"]).split()
    for _ in range(turns - 1):
        turn = client.token_turn(turn.ids, [MORE], **options)
        words += str(turn.message["content"]).split()
    client.set_reward(name, len(set(words)) / max(len(words), 1))


def train(client: Client, run: str, consumer: str, rollouts: Sequence[Future[None]]) -> None:
    """Read the rollouts of this run as they are finished.

    Raises:
        ProxyError: the server does not respond, or refused the turn of an environment.
    """
    missing, trained = len(rollouts), 0
    while missing:
        for rollout in rollouts:
            if rollout.done():
                rollout.result()
        # `client.feed` is this loop for programs that never end
        page = client.read_feed(consumer, wait_s=2, metadata={"run": run})
        if page.data and not trained:
            print(ROW.format("rollout", "revision", "ids", "trained", "reward"))
        trained += sum(map(train_on, page.data))
        missing -= len(page.data)
        client.acknowledge(consumer, page.cursor)
    print(f"{len(rollouts)} rollouts, {trained} ids to train on")


def train_on(rollout: FeedRollout) -> int:
    """Print the numbers of a rollout's samples; returns the number of ids to train on."""
    trained = 0
    for sample in rollout.samples:
        ids, mask = sample["prompt_ids"] + sample["completion_ids"], sample["loss_mask"]
        assert len(mask) == len(sample["completion_ids"]) == len(sample["logprobs"])
        trained += sum(mask)
        print(ROW.format(rollout.rollout, rollout.revision, len(ids), sum(mask), f"{sample['reward']:.2f}"))
    return trained


if __name__ == "__main__":
    sys.exit(main())
