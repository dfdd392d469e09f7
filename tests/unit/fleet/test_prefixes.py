from proxy.fleet.prefixes import Prefixes
from tokenization import ids


def test_the_replica_with_the_longest_beginning_holds_it() -> None:
    prefixes = Prefixes()
    shared, own = list(range(1000, 1600)), list(range(5000, 6000))
    prefixes.put(ids.dump(shared + own), "a")
    prefixes.put(ids.dump([*shared, *range(7000, 8000)]), "b")
    holders, share = prefixes.find(ids.dump([*shared, *own, 1, 2, 3]))
    assert holders == ("a",)
    assert 0.5 < share <= 1
    holders, share = prefixes.find(ids.dump(shared + [9] * 1000))
    assert holders == ("b", "a"), "all that share the beginning, the last first"
    assert share < 0.5


def test_short_and_unknown_prompts_have_no_holder() -> None:
    prefixes = Prefixes()
    prefixes.put(b"[1,2,3]", "a")
    assert prefixes.find(b"[1,2,3,4]") == ((), 0.0)
    assert prefixes.find(ids.dump(list(range(1000)))) == ((), 0.0)


def test_a_replica_whose_cache_was_cleared_holds_nothing() -> None:
    prefixes, prompt = Prefixes(), b"1," * 4096
    prefixes.put(prompt, "a")
    prefixes.put(prompt, "b")
    prefixes.forget("b")
    assert prefixes.find(prompt)[0] == ("a",)
    prefixes.forget("a")
    assert prefixes.find(prompt) == ((), 0.0)
    prefixes.put(prompt, "b")
    assert prefixes.find(prompt)[0] == ("b",)
