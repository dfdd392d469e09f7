"""What a router between proxy and engines can use to stay sticky (docs/kubernetes.md)."""

from collections.abc import Callable

from tests.support.talk import CHAT, Talk, user

_HEADERS = {
    "x-gateway-inference-fairness-id": "team",
    "x-gateway-inference-objective": "rollouts",
    "x-session-token": "cG9kLTE=",
}
"""Those that the endpoint picker of an InferencePool reads."""


def test_every_turn_has_the_whole_history_and_one_session(talk: Callable[..., Talk]) -> None:
    made = talk()
    first = made.ask()
    for question in ("And?", "More."):
        history = [*made.messages, user(question)]
        made.follow(user(question))
        seen = made.pair.fake.last()
        assert seen.path == CHAT
        assert seen.json["messages"] == history
        assert seen.json["kv_transfer_params"]["prompt_token_ids"]
        assert seen.header("x-session-id") == first.session.encode()


def test_headers_of_an_endpoint_picker_reach_it(talk: Callable[..., Talk]) -> None:
    made = talk()
    made.headers = dict(_HEADERS)
    made.ask()
    made.follow(user("And?"))
    seen = made.pair.fake.last()
    assert {name: seen.header(name) for name in _HEADERS} == {
        name: value.encode() for name, value in _HEADERS.items()
    }
