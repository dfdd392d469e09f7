from chat_tokenizer import ids
from tokenproxy.fleet.choosing import PrefixCaches


def test_the_replica_with_the_longest_beginning_holds_it() -> None:
    caches = PrefixCaches()
    shared, own = list(range(1000, 1600)), list(range(5000, 6000))
    caches.note(ids.dump(shared + own), "a")
    caches.note(ids.dump([*shared, *range(7000, 8000)]), "b")
    assert caches.find(ids.dump([*shared, *own, 1, 2, 3])) == ("a",)
    assert caches.find(ids.dump(shared + [9] * 1000)) == ("a", "b"), "all that share the beginning"


def test_short_and_unknown_prompts_have_no_holder() -> None:
    caches = PrefixCaches()
    caches.note(b"[1,2,3]", "a")
    assert caches.find(b"[1,2,3,4]") == ()
    assert caches.find(ids.dump(list(range(1000)))) == ()
