"""Benchmark: tokenproxy and other gateways in front of the same engine. `--help` describes the measurement.

What is compared. Every gateway gets the same client requests; the engine answers each as vLLM answers the
request that the gateway makes of it. So the engine's answers differ where gateways ask for different things:

- vllm-router, smg and litellm forward. The answer has ids and log-probabilities only if the client requested
  them.
- tokenproxy records every turn in SQLite before it responds. It always asks for `return_token_ids` and
  `logprobs`, so the answer holds the prompt's ids, the sampled ids and a log-probability of each; tokenproxy
  removes what the client did not request. It sends later turns as ids, which the engine returns.
- rllm-model-gateway asks for the same, sends text, and writes each request to SQLite after it responded.

The columns; the ids are those of the benchmark's tokenizer:

- 1 KB chat: a body of 1 KB, an answer of 40 ids.
- first turn 32k: messages that render to 32k ids, an answer of 40.
- answer 32k: a small request whose client requests ids and log-probabilities, and an answer of 32k ids. Every
  gateway carries the same 3 MB.
- answer 32k as text: the same for a client that requests neither. Gateways that forward carry 110 KB;
  tokenproxy and rllm-model-gateway read the 3 MB all the same.
- history and answer 32k: about 100 messages that render to 32k ids and belong to no recorded conversation,
  and the answer of `answer 32k`.
- stream: an answer of 256 ids in as many chunks, to a client that requests no ids.
- recognised turn 32k: 1,000 conversations of 32k ids take turns; each request has one exchange more than the
  one before of its conversation. tokenproxy has recorded that one, recognises it, and sends ids.
- 100k ids in: the client sends ids. tokenproxy gets them in `prompt_ids` of its token route, without a
  session, so it does not record them; the others in vLLM's `kv_transfer_params.prompt_token_ids` of the chat
  route.

Requests of a column differ in a number in each message, so each starts or continues another conversation.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import msgspec

from benchmarks.command import LINUX_ONLY, fail, make_parser, print_results, progress, scratch_folder
from benchmarks.gateway_compare import (
    DIRECT,
    OURS,
    Selected,
    compare,
    measure_requests,
    request_kinds,
    request_names,
    row_titles,
    start_targets,
)
from benchmarks.gateway_conversations import STORES, measure_conversations
from benchmarks.gateway_goals import Results
from benchmarks.gateway_loads import COLUMNS, LENGTHS, Loads, make_loads
from benchmarks.gateway_report import as_json, as_text
from benchmarks.gateway_run import Bench, Target
from benchmarks.gateway_wrk import CONNECTIONS, find_wrk
from benchmarks.processes import Cores, StartError, gateway_engine, pinned
from benchmarks.report import machine
from proxy.demo.checkpoint import ensure_checkpoint
from proxy.demo.errors import DemoError
from tokenization import ChatTokenizer, TokenizationError

_DESCRIPTION = f"""\
Compare tokenproxy with vllm-router, smg, rllm-model-gateway and litellm in front of an engine that answers
with fixed bytes at once.

The gateway has one core; the engine and the client, wrk on {CONNECTIONS} connections, share another. Every
gateway gets the same requests, and the engine answers as vLLM would answer what the gateway asks of it. The
first lines of this program describe every column. The gateways alternate in rounds, so that a disturbance of
the machine affects all of them; a cell is the median round. Where {CONNECTIONS} requests at once would take
longer than a round, a gateway gets fewer connections; a remark tells how many. A gateway that is not
installed, does not start or fails has a row without figures, and a remark with the reason.

  responses/s    by column and gateway; of streams the chunks
  CPU ms         CPU time of the gateway's process per response (/proc/PID/stat)
  KB written     file pages that the process changed per recorded turn, until it is idle: the database and its
                 log together (write_bytes of /proc/PID/io; 0 if the folder for temporary files is on tmpfs)
  added p50, p99 sequential requests on one connection, alternately to the engine and through tokenproxy:
                 the percentile through tokenproxy minus the direct median
  recognised     prompts that continue recorded ids, of all prompts

`requests` are tokenproxy's own requests: what recording costs, streams in the wire formats of other vendors,
and the token route (`ids in`).
`conversations` are recognised turns of 1,000 conversations that take turns, by store and length, whole and
streamed; `restarted` is the first request of each conversation in a new process. A missed goal does not
change the exit code: machines differ.

Run it on an idle machine. Linux only: it pins processes to cores and reads /proc.
"""
_EXAMPLES = """\
examples:
  scripts/install-peers                                   install wrk and the other gateways: 1.1 GB
  python benchmarks/gateway.py                            measure everything: about twenty minutes
  python benchmarks/gateway.py --only "1 KB chat"         one column, all gateways
  python benchmarks/gateway.py --only stream/tokenproxy --only stream/vllm-router
  python benchmarks/gateway.py --only requests            tokenproxy's own requests
  python benchmarks/gateway.py --only conversations/SQLite
  python benchmarks/gateway.py --quick                    check that it runs: imprecise numbers
"""
_REQUESTS, _CONVERSATIONS = "requests", "conversations"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure."""

    seconds: int
    rounds: int
    samples: int
    """Sequential requests in each round."""
    conversations: int
    """More than there are connections: a turn must be recorded before the next one of its conversation."""
    lengths: dict[str, int]


FULL = Effort(2, 3, 100, 1000, LENGTHS)
QUICK = Effort(1, 1, 10, 100, {"1k": 1_000, "32k": 32_000})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if sys.platform != "linux":
        return fail("gateway.py", LINUX_ONLY)
    if find_wrk() is None:
        return fail("gateway.py", "wrk is not installed: run scripts/install-peers wrk, or apt install wrk")
    effort = QUICK if options.quick else FULL
    effort = Effort(
        options.seconds or effort.seconds,
        options.rounds or effort.rounds,
        effort.samples,
        effort.conversations,
        effort.lengths,
    )
    selected = _selection(options.only)
    if not _any_selected(selected):
        names = ", ".join(f'"{name}"' for name in (*COLUMNS, _REQUESTS, _CONVERSATIONS))
        rows = ", ".join(f'"{name}"' for name in (*row_titles(), *STORES))
        return fail("gateway.py", f"--only selects nothing; the columns are {names}, the rows {rows}")
    about = {**machine(), "date": datetime.now(UTC).date().isoformat(), "rounds": str(effort.rounds)}
    try:
        results = measure(options.tokenizer or ensure_checkpoint(), effort, selected)
    except (DemoError, TokenizationError, StartError) as error:
        return fail("gateway.py", str(error))
    print_results(as_text(results, about), as_json(results, about), options.json)
    return 0


def measure(checkpoint: Path, effort: Effort, selected: Selected) -> Results:
    """Measure what is selected.

    Raises:
        StartError: the engine or tokenproxy does not start.
        TokenizationError: the checkpoint's tokenizer cannot be loaded.
    """
    progress("write the requests")
    loads = make_loads(ChatTokenizer.load(checkpoint), effort.conversations, effort.lengths)
    cores = Cores.pick()
    with scratch_folder() as folder:
        answers = folder / "answers"
        answers.write_bytes(msgspec.msgpack.encode(loads.answers))
        with gateway_engine(cores.engine, answers, checkpoint) as port, pinned(cores.client):
            bench = Bench(Target(DIRECT, port), loads, folder, effort.seconds)
            results = _of_gateways(bench, cores, effort, selected, loads)
            results.conversations = measure_conversations(
                bench, cores, effort.rounds, effort.samples, selected
            )
    return results


def _of_gateways(bench: Bench, cores: Cores, effort: Effort, selected: Selected, loads: Loads) -> Results:
    """The columns, and tokenproxy's own requests."""
    results = Results()
    columns = [column for column in loads.columns if any(selected(column.name, row) for row in row_titles())]
    rows = [row for row in row_titles() if any(selected(column.name, row) for column in columns)]
    kinds = [kind for kind in request_kinds(loads) if selected(_REQUESTS, kind.name)]
    started = rows if OURS in rows or not kinds else [*rows, OURS]
    with start_targets(cores, bench.engine, bench.folder, started) as (targets, absent):
        compared = [target for target in targets if target.name in rows]
        results.compared = compare(bench, compared, columns, effort.rounds, selected)
        results.compared.rows, results.compared.absent = rows, absent
        ours = next((target for target in targets if target.ours), None)
        if ours is not None and kinds:
            results.requests = measure_requests(bench, ours, kinds, effort.rounds, effort.samples)
    return results


def _selection(only: Sequence[str]) -> Selected:
    """Whether a column and row are selected by the texts of `--only`."""
    pairs = [text.partition("/")[::2] for text in only]
    return lambda column, row: not pairs or any(left in column and right in row for left, right in pairs)


def _any_selected(selected: Selected) -> bool:
    pairs = [(column, row) for column in COLUMNS for row in row_titles()]
    pairs += [(_CONVERSATIONS, store) for store in STORES] + [(_REQUESTS, name) for name in request_names()]
    return any(selected(*pair) for pair in pairs)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(_DESCRIPTION, _EXAMPLES)
    parser.add_argument("--seconds", type=int, metavar="N", help=f"of each load and round ({FULL.seconds})")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"how often to measure ({FULL.rounds})")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="COLUMN/PEER",
        help="only columns and rows with these texts in their names; either may be left out; repeatable",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer (default: the demo's)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
