"""Train SmolLM2-135M with GRPO over several turns: over tokenproxy, and on history that is tokenised again.

`make train-demo` runs it on a CPU, in ten minutes. It starts a stock vLLM and `tokenproxy
serve` in front of it, and plays a game with a tool. Both runs begin with the same weights and play the same
games with the same seeds; the running engine gets the weights of each step through the proxy. Engine and
trainer compute in float32: their log-probabilities differ where they read different ids.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from examples.train.report import HEAD, LEGEND, Step, row, table, write
from tokenproxy.app.children import child_environment, free_port
from tokenproxy.demo import DemoError
from tokenproxy.demo.checkpoint import default_cache_dir, ensure_checkpoint
from tokenproxy.demo.stack import MODEL_NAME, EngineProcess
from tokenproxy.viewer.page import single_file
from tokenproxy.viewer.served import page_from_server

_READY_S = 120.0


def main() -> int:
    """Run both, and print what they measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="make train-demo"
    )
    parser.add_argument("--steps", type=int, default=6, help="optimiser steps of each run (%(default)s)")
    parser.add_argument(
        "--games", type=int, default=1, help="of each step, four rollouts of each (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=default_cache_dir() / "train", help="folder for the results (%(default)s)"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        runs = _run(options.steps, options.games, options.out)
    except DemoError as error:
        print(f"train-demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    write(options.out, runs)
    print(f"\n{table(runs)}\n\nevery step, plots, rollouts of the last step as a page: {options.out}")
    return 0


def _run(steps: int, games: int, out: Path) -> list[list[Step]]:
    """Start engine and proxy, and train both ways; the page with rollouts goes to `out`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    checkpoint = ensure_checkpoint()
    with ExitStack() as stack:
        engine = stack.enter_context(
            EngineProcess(
                checkpoint,
                plugin=False,
                extra_flags=("--block-size", "32"),
                extra_environment={"VLLM_SERVER_DEV_MODE": "1"},
            )
        )
        engine.wait_ready()
        proxy_url = stack.enter_context(_proxy(engine.url))
        print(f"the rollouts, as they are sampled: {proxy_url}/viewer\n\n{LEGEND}\n\n{HEAD}", flush=True)
        folder = Path(stack.enter_context(TemporaryDirectory()))
        return _train_both(checkpoint, engine.url, proxy_url, folder, steps, games, out)


def _train_both(
    checkpoint: Path, engine_url: str, proxy_url: str, folder: Path, steps: int, games: int, out: Path
) -> list[list[Step]]:
    # they import torch and vLLM, which only the engine needs while it starts
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    warnings.filterwarnings("ignore", message="TRL currently supports")
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from examples.train.rollouts import ExactRollouts, RetokenisedRollouts
    from examples.train.trainer import Engine, train

    disable_progress_bar()
    engine = Engine(proxy_url, engine_url, folder)
    exact = ExactRollouts(MODEL_NAME, proxy_url)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    runs: list[list[Step]] = []
    for rollouts in (exact, RetokenisedRollouts(MODEL_NAME, engine_url, tokenizer)):
        done: list[Step] = []
        runs.append(done)

        def report(step: Step, done: list[Step] = done) -> None:
            done.append(step)
            print(row(step), flush=True)

        train(rollouts, engine, checkpoint, steps, games, report)
    page = page_from_server(proxy_url, None, exact.last_sessions)
    out.mkdir(parents=True, exist_ok=True)
    (out / "rollouts.html").write_text(single_file(page))
    return runs


@contextmanager
def _proxy(engine_url: str) -> Iterator[str]:
    """`tokenproxy serve` in front of the engine until the block ends; the value is its URL."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = ["tokenproxy", "serve", "--port", str(port), "--upstream", engine_url, "--store", "memory:"]
    with subprocess.Popen(
        [sys.executable, "-m", "tokenproxy.app.children", sys.executable, "-m", *command],
        stdin=subprocess.PIPE,  # its end ends the proxy
        stderr=subprocess.DEVNULL,
        env=child_environment(),
    ) as process:
        deadline = time.monotonic() + _READY_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise DemoError(f"the proxy was not ready: {' '.join(command)}")
            time.sleep(0.2)
        yield url


def _is_ready(url: str) -> bool:
    """Whether the proxy has its engine, and knows what its chat template appends."""
    try:
        state = httpx.get(f"{url}/ready", timeout=30, trust_env=False).json()
    except httpx.TransportError:
        return False
    return bool(state["ready"]) and all(engine["append"] == "ready" for engine in state["engines"])


if __name__ == "__main__":
    sys.exit(main())
