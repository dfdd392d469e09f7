import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken

from chat_tokenizer.encoder import PIECE, Encoder, Limit
from chat_tokenizer.errors import Stopped, TemplateUnsupported, TooManyIds
from tests.support.templates.vocabularies import VOCABULARIES

_THREADS = 8
_WORDS = ("weather", "Zürich", "四 °C", "🙂", "<|im_start|>", "<|im_end|>", "def answer():\n    return 42\n")


def _encoder(tokenizer: str) -> Encoder:
    backend = VOCABULARIES[tokenizer]()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    )
    return Encoder(backend.to_str())


def _texts(count: int) -> list[str]:
    source = random.Random(0)
    return [" ".join(source.choices(_WORDS, k=number % 90)) + str(number) for number in range(count)]


def test_threads_that_share_an_encoder_get_the_results_of_one_thread() -> None:
    """A tokenizer that threads share must not fail with "Already borrowed", nor mix up their texts."""
    alone, shared, texts = _encoder("bytes"), _encoder("bytes"), _texts(64)
    barrier = threading.Barrier(_THREADS)

    def results(encoder: Encoder) -> list[object]:
        ids = [encoder.encode(text) for text in texts]
        return [ids, [encoder.decode(each) for each in ids], [encoder.token_strings(each) for each in ids]]

    def work(_number: int) -> list[object]:
        barrier.wait()
        return results(shared)

    expected = results(alone)
    with ThreadPoolExecutor(_THREADS) as threads:
        assert all(found == expected for found in threads.map(work, range(_THREADS)))


def test_truncation_and_padding_of_the_description_are_ignored() -> None:
    backend = VOCABULARIES["bytes"]()
    ids = backend.encode("the weather in Oslo").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert Encoder(backend.to_str()).encode("the weather in Oslo") == ids


def test_a_text_that_is_encoded_in_pieces_has_the_ids_of_the_whole() -> None:
    text = " ".join(_texts(1500))
    assert len(text) > 2 * PIECE
    encoder = _encoder("bytes")
    assert encoder.encode(text) == encoder._tokenizer.encode(text, add_special_tokens=False).ids


def test_a_limit_is_the_number_of_ids_that_a_text_may_have() -> None:
    encoder, text = _encoder("gemma_like"), " ".join(_texts(50))
    ids = encoder.encode(text)
    assert encoder.encode(text, Limit(len(ids))) == ids
    with pytest.raises(TooManyIds) as raised:
        encoder.encode(text, Limit(len(ids) - 1))
    assert raised.value.max_ids == len(ids) - 1 < raised.value.count <= len(ids)


def test_only_the_first_piece_of_a_text_that_cannot_fit_is_tokenised() -> None:
    with pytest.raises(TooManyIds) as raised:
        _encoder("bytes").encode("the weather in Zürich " * 100_000, Limit(1000))
    assert raised.value.at_least
    assert 1000 < raised.value.count < 2 * PIECE


def test_tokenising_stops_when_the_caller_left() -> None:
    answers = iter([False, True])
    with pytest.raises(Stopped):
        _encoder("bytes").encode("a b " * (PIECE // 2), Limit(stopped=lambda: next(answers)))
    assert list(answers) == []


def test_a_text_too_long_to_be_encoded_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chat_tokenizer.encoder.MAX_PIECE", PIECE + 100)
    encoder = _encoder("bytes")
    assert len(encoder.encode("a b " * (PIECE // 2))) > PIECE
    with pytest.raises(TemplateUnsupported, match="send less text"):
        encoder.encode("a" * (PIECE + 101))
