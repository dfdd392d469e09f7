"""The gateway benchmark: its engine, its requests, its goals and tables, and a short run through wrk."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet_words import Words
from benchmarks.gateway_answers import Answer, CannedAnswer
from benchmarks.gateway_compare import (
    DIRECT,
    OURS,
    Timed,
    recorded,
    request_kinds,
    request_names,
    row_titles,
)
from benchmarks.gateway_conversations import RESTARTED, STATES, WHOLE, Conversations
from benchmarks.gateway_engine import Engine
from benchmarks.gateway_goals import RLLM, ROUTER, Results, goals
from benchmarks.gateway_loads import (
    COLUMNS,
    FEW_GIVEN_IDS,
    MESSAGES_STREAM,
    RECOGNISED,
    RESPONSES_STREAM,
    SMALL_CHAT,
    STREAM,
    Loads,
    make_loads,
)
from benchmarks.gateway_peers import PEERS, Peer, run_peer
from benchmarks.gateway_report import as_json, as_text
from benchmarks.gateway_run import Added, Cell, Sample
from benchmarks.gateway_wrk import CONNECTIONS, Pace, WrkResult, find_wrk
from benchmarks.processes import StartError
from tests.campaign.benchmark_commands import ROOT, run_benchmark
from tokenization import ChatTokenizer

ABOUT = {"date": "today", "cores": "2", "cpu": "some", "rounds": "1", "python": "3", "libraries": ""}
ANSWER = Answer([7, 8, 9], [4, 5, 2], ["a", "b"])
with_wrk = pytest.mark.skipif(
    sys.platform != "linux" or find_wrk() is None, reason="needs wrk, and pins processes to cores"
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    Words().write(folder)
    return folder


@pytest.fixture(scope="module")
def loads(tokenizer_folder: Path) -> Loads:
    return make_loads(ChatTokenizer.load(str(tokenizer_folder)), 10, {"1k": 1_000})


def _body(response: bytes) -> Any:
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    return json.loads(body)


@pytest.mark.parametrize("sent", [b"", b"[3,1]"])
def test_whole_answer_holds_the_evidence_that_is_requested(sent: bytes) -> None:
    canned = CannedAnswer(ANSWER)
    plain = _body(canned.whole(False, False, b""))
    asked = _body(canned.whole(True, True, sent))
    assert plain["choices"][0]["message"] == asked["choices"][0]["message"]
    assert (
        plain["choices"][0]["token_ids"]
        is plain["choices"][0]["logprobs"]
        is plain["prompt_token_ids"]
        is None
    )
    assert asked["prompt_token_ids"] == (json.loads(sent) if sent else ANSWER.prompt)
    assert asked["choices"][0]["token_ids"] == ANSWER.ids
    assert [entry["token"] for entry in asked["choices"][0]["logprobs"]["content"]] == ["a", "b", ""]


def _events(parts: list[bytes]) -> list[Any]:
    """The events of a stream of HTTP chunks, whose lengths are checked."""
    rest, events = b"".join(parts).partition(b"\r\n\r\n")[2], []
    while not rest.startswith(b"0\r\n"):
        length, _, rest = rest.partition(b"\r\n")
        data, rest = rest[: int(length, 16)], rest[int(length, 16) + 2 :]
        events.append(data.decode().removeprefix("data: ").strip())
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_stream_has_a_chunk_for_each_id() -> None:
    canned = CannedAnswer(ANSWER)
    plain, asked = canned.stream(False, False, False, b""), canned.stream(True, True, True, b"[3]")
    chunks = [chunk for chunk in _events(asked) if chunk["choices"]]
    assert chunks[0]["prompt_token_ids"] == [3]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[1:]] == [[token] for token in ANSWER.ids]
    assert chunks[-1]["usage"]["completion_tokens"] == len(ANSWER.ids)
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in _events(plain)]
    assert "".join(texts) == ANSWER.text
    assert all("usage" not in chunk for chunk in _events(plain))


def test_engine_reads_fields_and_not_texts_that_look_like_them(tokenizer_folder: Path) -> None:
    engine = Engine({"one": ANSWER}, str(tokenizer_folder))
    text = json.dumps({"messages": [{"content": 'say "stream":true, "return_token_ids":true'}]}).encode()
    assert _body(b"".join(engine.answer(text)))["prompt_token_ids"] is None
    for separators in ((",", ":"), (", ", ": ")):
        fields = {"return_token_ids": True, "kv_transfer_params": {"prompt_token_ids": [5, 6]}}
        request = json.dumps(fields, separators=separators).encode()
        assert _body(b"".join(engine.answer(request)))["prompt_token_ids"] == [5, 6]
        streamed = json.dumps({**fields, "stream": True}, separators=separators).encode()
        assert _events(engine.answer(streamed))[0]["prompt_token_ids"] == [5, 6]


def test_columns_are_those_of_the_help_and_their_bodies_are_json(loads: Loads) -> None:
    assert tuple(column.name for column in loads.columns) == COLUMNS
    assert [kind.name for kind in request_kinds(loads)] == request_names()
    for column in loads.columns:
        for load in (column.ours, column.theirs):
            assert load.answer in loads.answers
            assert json.loads(load.body(1)) != json.loads(load.body(2))
    small = next(column for column in loads.columns if column.name == SMALL_CHAT)
    assert small.ours == small.theirs


def test_each_step_of_a_conversation_appends_the_answer_and_a_new_message(loads: Loads) -> None:
    load = loads.conversations["1k"][False]
    before, after = (json.loads(load.body(3, steps))["messages"] for steps in (1, 2))
    assert after[: len(before)] == before
    answer, new = after[len(before) :]
    assert answer == {"role": "assistant", "content": loads.answers[load.answer].text}
    assert new["content"].startswith("1000003.1000002:")
    assert before[-1]["content"].startswith("1000003.1000001:")
    assert all("1000003" in message["content"] for message in before if message["role"] == "user")


def test_slow_gateways_get_more_time_and_then_fewer_connections() -> None:
    assert Pace.of(2, 0.001) == Pace(2, CONNECTIONS)
    assert Pace.of(2, 0.1) == Pace(7, CONNECTIONS)
    assert Pace.of(2, 1.0) == Pace(10, 5)
    assert Pace.of(2, 60.0) == Pace(10, 1)


def test_run_resumes_before_the_requests_without_response_and_not_before_its_first() -> None:
    result = WrkResult(900, 2.0, 1.0, 2.0, 0, 0, position=2000)
    assert result.resume(1000) == 2000 - 2 * CONNECTIONS
    assert result.resume(1990) == 1990


def _sample(per_second: float, written_kb: float = 0.0) -> Sample:
    return Sample(per_second, 1.0, 2.0, 0.5, written_kb)


def _results() -> Results:
    results, timed = Results(), {}
    results.compared.rows = [DIRECT, OURS, ROUTER, RLLM]
    results.compared.absent = {RLLM: "not installed: run scripts/install-peers rllm-model-gateway"}
    for row, rate in ((OURS, 30.0), (ROUTER, 100.0)):
        # the median of the rounds counts: 30 and 100
        rounds = [_sample(factor * rate, 120.0 if row == OURS else 0.0) for factor in (1, 9, 0.5)]
        results.compared.cells[SMALL_CHAT, row] = Cell(rounds)
    results.compared.cells[SMALL_CHAT, DIRECT] = Cell(problem="status 500: broken\n")
    for state, long_ms in ((WHOLE, 2.0), (RESTARTED, 5.0)):
        for length, added in (("1k", 1.0), ("128k", long_ms)):
            timed["SQLite", state, length] = Timed(Added([1.0], [1.0 + added]), Cell([_sample(10)]))
    results.conversations = Conversations(["1k", "128k"], timed)
    of_requests = ((SMALL_CHAT, 1.1), (STREAM, 1.0), (MESSAGES_STREAM, 1.9), (RESPONSES_STREAM, 2.1))
    added_ms = {recorded(name): added for name, added in of_requests} | {recorded(FEW_GIVEN_IDS, False): 1.0}
    assert added_ms.keys() <= set(request_names())
    for name, added in added_ms.items():
        results.requests[name] = Timed(Added([1.0], [1.0 + added]), Cell([_sample(10)]))
    return results


def test_goals_are_met_missed_or_not_measured() -> None:
    found = {goal.name: goal for goal in goals(_results())}
    by_words = {name: goal.met for name, goal in found.items()}
    assert by_words[f"{SMALL_CHAT}: rate / that of {ROUTER}"] is True
    assert found[f"{SMALL_CHAT}: rate / that of {ROUTER}"].measured == pytest.approx(0.3)
    assert by_words[f"{SMALL_CHAT}: rate / that of {RLLM}"] is None
    assert by_words["recognised turn, SQLite, whole: added p50 at 128k ids / at 1k"] is False
    assert by_words["recognised turn, SQLite, restarted: added p50 at 128k ids / at 1k"] is False
    assert by_words["recognised turn, Redis, whole: added p50 at 128k ids / at 1k"] is None
    assert by_words[f"{SMALL_CHAT}, recorded: added p50 - that of 50 ids in, not recorded"] is True
    assert by_words[f"{MESSAGES_STREAM}: added p50 / that of {STREAM}, recorded"] is True
    assert by_words[f"{RESPONSES_STREAM}: added p50 / that of {STREAM}, recorded"] is False


def test_report_has_a_row_for_a_gateway_that_is_not_there(loads: Loads) -> None:
    results = _results()
    results.compared.columns = [column for column in loads.columns if column.name == SMALL_CHAT]
    text = as_text(results, ABOUT)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert [RLLM, "not started"] in rows
    assert [DIRECT, "failed"] in rows
    assert [ROUTER, "0.30x"] in rows
    assert [OURS, "120.0"] in rows  # kilobytes written
    assert f"- {RLLM}: not installed: run scripts/install-peers rllm-model-gateway" in text
    assert f"- {DIRECT}, {SMALL_CHAT}: status 500: broken" in text
    json.dumps(as_json(results, ABOUT))


def test_gateway_that_is_not_installed_is_an_error_that_tells_how_to(tmp_path: Path) -> None:
    with (
        pytest.raises(StartError, match="scripts/install-peers no-such-gateway"),
        run_peer(Peer("no-such-gateway", "1", ()), 0, 1, tmp_path),
    ):
        pass


def test_every_peer_is_installed_in_the_version_of_its_row() -> None:
    scripts = [ROOT / "scripts" / name for name in ("install-peers", "install-vllm-router")]
    text = "\n".join(script.read_text() for script in scripts)
    for peer in PEERS:
        assert peer.name in text
        assert peer.version in text
        assert peer.title in row_titles()


@with_wrk
def test_selection_of_nothing_is_an_error_that_lists_the_names() -> None:
    run = run_benchmark("benchmarks/gateway.py", "--only", "no such")
    assert run.returncode == 2
    assert f'"{RECOGNISED}"' in run.stderr
    assert f'"{ROUTER}"' in run.stderr


def _measure(written: Path, tokenizer_folder: Path, *only: str) -> Any:
    """The results of a short run."""
    selected = [argument for text in only for argument in ("--only", text)]
    run = run_benchmark(
        "benchmarks/gateway.py",
        "--quick",
        *selected,
        "--tokenizer",
        str(tokenizer_folder),
        "--json",
        str(written),
    )
    assert run.returncode == 0, run.stderr
    return json.loads(written.read_text())


@with_wrk
@pytest.mark.timeout(200)
def test_short_run_recognises_every_turn_that_wrk_sends(tokenizer_folder: Path, tmp_path: Path) -> None:
    only = [f"{RECOGNISED}/{DIRECT}", f"{RECOGNISED}/{OURS}", "requests/50 ids in"]
    result = _measure(tmp_path / "out.json", tokenizer_folder, *only)
    assert [cell["gateway"] for cell in result["columns"]] == [DIRECT, OURS]
    assert [cell["problem"] for cell in result["columns"]] == ["", ""]
    (sample,) = result["columns"][1]["samples"]
    assert sample["extended"] == 1.0
    assert sample["cpu_ms"] > 0
    assert len(result["requests"]) == 2
    assert all(timed["added"]["proxy_ms"] for timed in result["requests"].values())


@pytest.mark.slow
@with_wrk
@pytest.mark.timeout(200)
def test_short_run_measures_conversations_in_every_state(tokenizer_folder: Path, tmp_path: Path) -> None:
    rows = _measure(tmp_path / "out.json", tokenizer_folder, "conversations/SQLite")["conversations"]
    assert {row["state"] for row in rows} == set(STATES)
    assert all(row["added"]["proxy_ms"] for row in rows)
    under_load = [row["cell"]["samples"] for row in rows if row["cell"]["samples"]]
    assert [sample["extended"] for (sample,) in under_load] == [1.0] * 4
