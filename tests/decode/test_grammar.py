"""Compiled grammars: what may follow a text, along trees of candidates; where texts end; refusals in one line."""

import json
import random
import time

import pytest
import torch
from llguidance import LLParserLimits
from tiny_models import VOCABULARY, tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compressor.decode import grammar
from compressor.decode.law import Law, LawState
from compressor.decode.sampling import ProbabilityError, draw
from compressor.errors import CompressError, UsageError

EOS = 2
TINY = tokenizer()
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
PERSON = {
    **COMPACT,
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ids(text: str, of=TINY) -> list[int]:
    return of.encode(text, add_special_tokens=False)


def wide(size: int) -> PreTrainedTokenizerFast:
    """`size` entries, most of several bytes: a text can be spelled in many ways."""
    rng = random.Random(0)
    tokens = {"<s>": 0, "<unk>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(sorted(alphabet()))}
    for piece in ('{"', '":', '"name', "name", "na", "me", 'me":"', '","', "age", '"age":', '"}', "12", "00", "}}"):
        tokens.setdefault(piece, len(tokens))
    while len(tokens) < size:
        tokens.setdefault("".join(rng.choices('abcdeghilmnorstu",:{}[]0123456789', k=rng.randint(2, 7))), len(tokens))
    inner = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def alphabet() -> list[str]:
    return pre_tokenizers.ByteLevel.alphabet()


def accepts(compiled: grammar.CompiledGrammar, text: str) -> bool:
    mask = compiled.matcher().allowed(ids(text))
    return mask is not None and bool(mask[EOS])


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


# What may follow.


def test_an_accepted_text_passes_token_by_token():
    text = ids('{"name":"Al","age":41}')
    matcher = grammar.json_schema(PERSON, TINY, VOCABULARY).matcher()
    for i, token in enumerate(text):
        mask = matcher.allowed(text[:i])
        assert mask.dtype == torch.bool and mask.shape == (VOCABULARY,) and mask.device.type == "cpu"
        assert mask[token], TINY.decode(text[: i + 1])
    assert matcher.allowed(text)[EOS]


@pytest.mark.parametrize(
    ("good", "wrong"),
    [
        ("", "["),
        ("{", "}"),
        ('{"name":', "1"),
        ('{"name":"Alb', "e"),  # longer than maxLength
        ('{"name":"Al","age":', "-"),
        ('{"name":"Al","age":41', ","),
    ],
)
def test_a_wrong_text_is_refused_at_the_wrong_token(good, wrong):
    matcher = grammar.json_schema(PERSON, TINY, VOCABULARY).matcher()
    mask = matcher.allowed(ids(good))
    assert mask.any() and not mask[ids(wrong)[0]]
    assert matcher.allowed(ids(good + wrong)) is None
    assert matcher.allowed(ids(good + wrong + "}")) is None
    assert same(matcher.allowed(ids(good)), mask)  # and the matcher goes on


def test_the_mask_holds_exactly_the_tokens_that_the_matcher_follows():
    """Every spelling of a text counts, not only the tokenizer's own: `{"` and `{` both begin an object."""
    many = wide(700)
    compiled = grammar.json_schema({"type": "object", "required": ["name"]}, many, 700)
    rng, matcher, path, sizes = random.Random(1), compiled.matcher(), [], []
    for _ in range(40):
        mask = matcher.allowed(path)
        probe = compiled.matcher()
        probe.commit(path)
        follows = [token for token in range(700) if token != EOS and probe.allowed([token]) is not None]
        assert [token for token in mask.nonzero()[:, 0].tolist() if token != EOS] == follows
        sizes.append(len(follows))
        path.append(rng.choice(follows))
    assert min(sizes) < 10 and max(sizes) > 300  # forced and free places were both seen


def test_forced_text_may_be_spelled_in_any_way():
    many = wide(700)
    mask = grammar.json_schema(PERSON, many, 700).matcher().allowed([])
    assert {many.convert_ids_to_tokens(i) for i in mask.nonzero()[:, 0].tolist()} == {"{", '{"'}


@pytest.mark.parametrize("order", ["depth-first", "breadth-first", "any"])
def test_paths_of_a_tree_in_any_order_equal_a_fresh_matcher_on_each(order):
    many = wide(700)
    compiled = [
        grammar.json_schema(PERSON, many, 720),
        grammar.json_schema({"type": ["array", "number"], "items": {"type": "boolean"}}, many, 720),
        grammar.regex(r"(na|me)*(\d\d)?", many, 720),
    ]
    rng = random.Random(order)
    outcomes = {"forbidden": 0, "complete": 0, "open": 0}
    for trial in range(12):
        law = compiled[trial % 3]
        matcher, committed = law.matcher(), []
        for _ in range(4):
            paths = [[]]
            for path in paths:  # grows while it is walked: breadth-first
                if len(paths) < 40 and len(path) < 7:
                    mask = fresh(law, committed, path)
                    inside = [] if mask is None else mask.nonzero()[:, 0].tolist()
                    children = [*rng.sample(inside, min(2, len(inside))), rng.randrange(-1, 725)]
                    paths += [[*path, child] for child in children]
            if order == "depth-first":
                paths.sort()
            elif order == "any":
                rng.shuffle(paths)
            for path in paths:
                expected = fresh(law, committed, path)
                assert same(matcher.allowed(path), expected), (committed, path)
                outcomes["forbidden" if expected is None else "complete" if expected[EOS] else "open"] += 1
            chosen = rng.choice([path for path in paths if fresh(law, committed, path) is not None])
            matcher.commit(chosen)
            committed += chosen
    assert all(count > 50 for count in outcomes.values()), outcomes


def fresh(law, committed, path):
    matcher = law.matcher()
    matcher.commit(committed)
    return matcher.allowed(path)


def test_matchers_of_one_grammar_do_not_see_each_other():
    compiled = grammar.regex("ab", TINY, VOCABULARY)
    one, other = compiled.matcher(), compiled.matcher()
    one.commit(ids("a"))
    assert one.allowed([])[ids("b")[0]] and not one.allowed([])[ids("a")[0]]
    assert other.allowed([])[ids("a")[0]] and not other.allowed([])[ids("b")[0]]


def test_a_mask_is_the_callers_own():
    matcher = grammar.regex("ab", TINY, VOCABULARY).matcher()
    matcher.allowed([]).fill_(True)
    assert matcher.allowed([]).sum() == 1


# The vocabulary.


def test_padded_rows_are_never_allowed():
    plain, padded = (grammar.json_schema({}, TINY, size).matcher() for size in (VOCABULARY, 1000))
    text = ids('{"a": [1, "<extra_300> é", null]}')
    for i in range(len(text) + 1):
        mask = padded.allowed(text[:i])
        assert mask.shape == (1000,) and not mask[VOCABULARY:].any()
        assert torch.equal(mask[:VOCABULARY], plain.allowed(text[:i]))
    assert padded.allowed([*ids('"'), VOCABULARY]) is None
    assert padded.allowed([*ids('"'), ids("a")[0]]) is not None


def test_ids_beyond_the_logits_are_cut_off():
    whole, cut = (grammar.regex(".*", TINY, size).matcher() for size in (VOCABULARY, 100))
    assert torch.equal(cut.allowed([]), whole.allowed([])[:100])
    beyond = ids("é")[0]
    assert beyond >= 100 and cut.allowed([beyond]) is None and whole.allowed([beyond]) is not None


def test_a_grammar_that_the_vocabulary_cannot_spell_is_refused():
    empty = {"type": "object", "additionalProperties": False}
    opening, closing = ids("{")[0], ids("}")[0]
    with pytest.raises(UsageError, match=r"^schema: .* no token of the vocabulary continues the text"):
        grammar.json_schema(empty, TINY, opening)
    matcher = grammar.json_schema(empty, TINY, closing).matcher()  # shows only behind the first token
    with pytest.raises(grammar.GrammarError, match="no token of the vocabulary continues the text"):
        matcher.allowed([opening])
    assert grammar.json_schema(empty, TINY, closing + 1).matcher().allowed([opening])[closing]


def test_special_tokens_stay_outside_the_text():
    mask = grammar.regex(r"(?s).*", TINY, VOCABULARY).matcher().allowed([])
    assert mask[ids("a")[0]] and mask[EOS]
    assert not mask[0] and not mask[1]
    assert grammar.regex(r"(?s).*", TINY, VOCABULARY).matcher().allowed([1]) is None


def test_one_tokenizer_is_prepared_once(monkeypatch):
    built = []
    original = grammar.from_tokenizer
    monkeypatch.setattr(grammar, "from_tokenizer", lambda t: built.append(t) or original(t))
    own = tokenizer()
    for pattern in ("a", "b", "c"):
        grammar.regex(pattern, own, VOCABULARY)
    grammar.json_schema({}, own, VOCABULARY + 7, stops=[5])
    assert len(built) == 1
    assert not grammar.regex("more", own, VOCABULARY + 7).matcher().allowed([])[VOCABULARY]
    own.add_tokens(["more", "<more>"])
    assert grammar.regex("more", own, VOCABULARY + 7).matcher().allowed([])[VOCABULARY]
    assert not grammar.regex("<more>", own, VOCABULARY + 7).matcher().allowed([])[VOCABULARY + 1]  # looks special
    assert len(built) == 2


def test_a_mask_of_a_real_vocabulary_costs_well_below_a_millisecond():
    big = wide(49_152)
    matcher = grammar.json_schema({"type": "object"}, big, 49_152).matcher()
    matcher.commit(ids('{"name":"', big))
    paths = [ids("a" * n, big) for n in range(20)]
    costs = []
    for path in paths:
        start = time.perf_counter()
        assert matcher.allowed(path).sum() > 1000
        costs.append(time.perf_counter() - start)
    assert sorted(costs)[10] < 1e-3  # measured: 0.1 ms


# The end.


def test_eos_is_allowed_at_complete_texts_only():
    matcher = grammar.regex("ab(c|de)?", TINY, VOCABULARY).matcher()
    complete = {text: bool(matcher.allowed(ids(text))[EOS]) for text in ("", "a", "ab", "abc", "abd", "abde")}
    assert complete == {"": False, "a": False, "ab": True, "abc": True, "abd": False, "abde": True}
    assert matcher.allowed(ids("abc")).nonzero().tolist() == [[EOS]]


def test_nothing_follows_the_end():
    matcher = grammar.regex("a*", TINY, VOCABULARY).matcher()
    letter = ids("a")[0]
    assert matcher.allowed([letter, EOS]) is None
    assert matcher.allowed([letter, EOS, letter]) is None
    assert matcher.allowed([letter]) is not None
    matcher.commit([letter, EOS])
    assert matcher.allowed([]) is None and matcher.allowed([letter]) is None
    matcher.commit([])
    with pytest.raises(CompressError, match=r"token 67 at position 2 follows the end of the text"):
        matcher.commit([letter])


def test_every_stop_ends_a_text_where_eos_does():
    stop, letter = 300, ids("b")[0]
    with_stops = grammar.regex("ab?", TINY, VOCABULARY, stops=[stop, letter, 5000])
    without = grammar.regex("ab?", TINY, VOCABULARY).matcher()
    matcher = with_stops.matcher()
    assert matcher.allowed([]).nonzero().tolist() == [[ids("a")[0]]]
    assert matcher.allowed(ids("a")).nonzero()[:, 0].tolist() == [EOS, letter, stop]
    assert without.allowed(ids("a")).nonzero()[:, 0].tolist() == [EOS, letter]
    # `b` is text to the grammar and an end to the model: an end it is.
    assert matcher.allowed(ids("ab")) is None and without.allowed(ids("ab"))[EOS]
    for end in (EOS, letter, stop):
        ended = with_stops.matcher()
        ended.commit([*ids("a"), end])
        assert ended.allowed([]) is None


def test_a_stop_that_is_text_is_refused_inside_it():
    quote = ids('"')[0]
    stopped = grammar.json_schema({"type": "string"}, TINY, VOCABULARY, stops=[ids("x")[0]]).matcher()
    assert not stopped.allowed([quote])[ids("x")[0]] and stopped.allowed([quote])[ids("y")[0]]
    with pytest.raises(CompressError, match=r"token 90 at position 1 is not allowed there"):
        stopped.commit([quote, ids("x")[0]])


def test_a_tokenizer_without_eos_needs_stops():
    bare = PreTrainedTokenizerFast(tokenizer_object=TINY.backend_tokenizer, unk_token="<unk>")
    with pytest.raises(UsageError, match=r"^stops: no id below vocab_size 320"):
        grammar.regex("a*", bare, VOCABULARY)
    matcher = grammar.regex("a*", bare, VOCABULARY, stops=[300]).matcher()
    assert matcher.allowed([]).nonzero()[:, 0].tolist() == [ids("a")[0], 300]  # not </s>, which llguidance guesses
    assert matcher.allowed([EOS]) is None


def test_committing_what_is_forbidden_names_token_and_position_and_changes_nothing():
    matcher = grammar.regex("abc", TINY, VOCABULARY).matcher()
    matcher.commit(ids("a"))
    before = matcher.allowed([])
    for tokens, message in (
        (ids("bb"), "token 68 at position 2 is not allowed"),
        ([*ids("b"), EOS], "token 2 at position 2 is not allowed"),
        ([*ids("bc"), EOS, EOS], "token 2 at position 4 follows the end"),
        ([-1], "token -1 at position 1 is not allowed"),
        ([VOCABULARY], "token 320 at position 1 is not allowed"),
    ):
        with pytest.raises(CompressError, match=f"^grammar: {message}") as caught:
            matcher.commit(tokens)
        assert not isinstance(caught.value, UsageError)  # whoever commits it is at fault, not the grammar
        assert same(matcher.allowed([]), before)
    matcher.commit([*ids("bc"), EOS])
    assert matcher.allowed([]) is None


# Refusals.


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{'type': 'object'}", "is not JSON"),
        ("", "is not JSON"),
        ({"const": {1, 2}}, "is not JSON"),
        ({"const": float("nan")}, "is not JSON"),
        ([1], "schema must be an object or boolean"),
        ("null", "schema must be an object or boolean"),
        ({"type": "foo"}, "Invalid type: foo"),
        ({"properties": 3}, "properties must be an object"),
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"pattern": "(("}, "regex parse error: unclosed group"),
        ({"$ref": "#/nope"}, "Pointer '/nope' does not exist"),
        ({"$ref": "http://example.com/x"}, "Default retriever does not fetch resources"),
        (False, "schema is false"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength (5) is greater than maxLength (2)"),
        ('{"items":' * 500 + "{}" + "}" * 500, "recursion limit exceeded"),
        ('{"items":' * 100_000 + "{}" + "}" * 100_000, "is not JSON"),
    ],
)
def test_an_unusable_schema_is_refused_in_one_line(schema, reason):
    with pytest.raises(UsageError) as refused:
        grammar.json_schema(schema, TINY, VOCABULARY)
    message = str(refused.value)
    assert message.startswith("schema: ") and reason in message and "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("((", "unclosed group"),
        ("a{2,1}", "invalid repetition count range"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        (r"\b", "lookarounds not supported"),
        (r"\p{Foo}", "Unicode property not found"),
        ("a\\", "ends in a lone backslash"),
    ],
)
def test_an_unusable_pattern_is_refused_in_one_line(pattern, reason):
    with pytest.raises(UsageError) as refused:
        grammar.regex(pattern, TINY, VOCABULARY)
    message = str(refused.value)
    assert message.startswith("pattern: ") and reason in message and "\n" not in message and len(message) < 500


def test_a_tokenizer_that_llguidance_cannot_read_is_refused():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    with pytest.raises(UsageError, match=r"^tokenizer: llguidance cannot use"):
        grammar.regex("a", PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"), 3)


def test_a_matcher_that_runs_into_a_limit_says_so_instead_of_ending_the_text(monkeypatch):
    """An engine in error allows EOS and nothing else: unchecked, the text would end incomplete."""
    pattern, text = "[ab]*a[ab]{14}c", ids("abaabbabaababbaab")
    assert grammar.regex(pattern, TINY, VOCABULARY).matcher().allowed(text) is not None
    monkeypatch.setattr(grammar, "_LIMITS", LLParserLimits(verbose_errors=False, max_lexer_states=40))
    matcher = grammar.regex(pattern, TINY, VOCABULARY).matcher()
    with pytest.raises(grammar.GrammarError, match=r"^grammar: llguidance gave up \(lexer error: too many states"):
        for i in range(len(text)):
            matcher.allowed(text[:i])
    for call in (matcher.allowed, matcher.commit):
        with pytest.raises(grammar.GrammarError, match="too many states"):  # for good
            call(ids("a"))
    monkeypatch.setattr(grammar, "_LIMITS", LLParserLimits(verbose_errors=False, max_lexer_states=2))
    with pytest.raises(UsageError, match=r"^pattern: .*too many states"):
        grammar.regex(pattern, TINY, VOCABULARY)


# Kinds of grammars.


@pytest.mark.parametrize(
    ("pattern", "matching", "failing"),
    [
        (r"\d{3}-\d{4}", ["555-0123"], ["555-012", "555-01234", "x555-0123", ""]),
        ("^(yes|no)$", ["yes", "no"], ["yesno", "ye", "Yes"]),
        ("(?i)a/b", ["a/b", "A/B"], ["a\\/b"]),
        (".+", ["é ü", '"'], ["", "a\nb"]),
        ("a\nb", ["a\nb"], ["anb"]),
        ("\\\\", ["\\"], ["\\\\"]),
        ("", [""], ["a"]),
    ],
)
def test_a_regex_accepts_what_it_matches_in_full(pattern, matching, failing):
    compiled = grammar.regex(pattern, TINY, VOCABULARY)
    assert [text for text in matching if not accepts(compiled, text)] == []
    assert [text for text in failing if accepts(compiled, text)] == []


def test_a_lark_grammar_counts_brackets():
    compiled = grammar.lark('start: "(" start ")" | "x"', TINY, VOCABULARY)
    assert accepts(compiled, "((x))") and accepts(compiled, "x")
    assert not accepts(compiled, "((x)") and not accepts(compiled, "(x))")
    with pytest.raises(UsageError, match=r'^lark: .*unknown name: "foo"'):
        grammar.lark("start: foo", TINY, VOCABULARY)


def test_a_schema_may_be_given_as_text():
    compiled = grammar.json_schema(json.dumps(PERSON), TINY, VOCABULARY)
    assert accepts(compiled, '{"name":"Al","age":41}') and not accepts(compiled, '{"name":"Al"}')


# JSON Schema, by its own test suite.

# Valid instances that llguidance refuses, by its documented departures from the standard (docs/json_schema.md) or, for
# numbers, because a constant is spelled as in the schema. None the other way round: no invalid instance passes.
REFUSED = {
    "properties come in the schema's order": {
        ("allOf", "allOf", "allOf"),
        ("allOf", "allOf with base schema", "valid"),
        ("const", "const with object", "same object with different property order is valid"),
    },
    "numbers have one spelling": {
        ("const", "const with 0 does not match other zero-like types", "float zero is valid"),
        ("const", "const with 1 does not match true", "float one is valid"),
        ("const", "const with -2.0 matches integer and float types", "float -2.0 is valid"),
        ("const", "float and integers are equal up to 64-bit representation limits", "float is valid"),
        ("enum", "enum with 0 does not match false", "float zero is valid"),
        ("enum", "enum with [0] does not match [false]", "[0.0] is valid"),
        ("enum", "enum with 1 does not match true", "float one is valid"),
        ("enum", "enum with [1] does not match [true]", "[1.0] is valid"),
        ("type", "integer type matches integers", "a float with zero fractional part is an integer"),
    },
    "format is enforced, not an annotation": {
        ("format", f"{kind} format", f"invalid {kind} string is only an annotation by default")
        for kind in ("email", "ipv4", "ipv6", "hostname", "date", "date-time", "time", "uri", "uuid", "duration")
    },
}


def test_the_json_schema_suite_agrees_but_for_documented_limitations(shared_data):
    compiled, refused, disagreements = 0, [], set()
    for file in sorted((shared_data / "json_schema_suite").glob("*.json")):
        for group in json.loads(file.read_text()):
            try:
                law = grammar.json_schema(group["schema"], TINY, VOCABULARY)
            except UsageError as error:
                assert str(error).startswith("schema: ") and "\n" not in str(error)
                refused.append(str(error))
                continue
            compiled += 1
            for case in group["tests"]:
                for separators in ((",", ":"), None):
                    text = json.dumps(case["data"], separators=separators, ensure_ascii=False)
                    if accepts(law, text) != case["valid"]:
                        assert case["valid"], f"{file.stem}: {group['description']}: {text} must be refused"
                        disagreements.add((file.stem, group["description"], case["description"]))
    assert (compiled, len(refused)) == (169, 214)
    assert disagreements == set.union(*REFUSED.values())
    unclear = ("Unimplemented", "Unsatisfiable", "Unknown format", "oneOf", "not present in a registry", "disjoint")
    other = [e for e in refused if not any(word in e for word in unclear)]
    assert all("Expected positive integer" in e or "too many digits" in e for e in other) and len(other) == 7


# The law.


def test_the_law_gives_forbidden_tokens_nothing_and_ends_after_eos():
    compiled = grammar.json_schema(PERSON, TINY, VOCABULARY)
    state = LawState(Law(temperature=0.7, top_p=0.95, grammar=compiled), VOCABULARY, stops=[EOS])
    free = LawState(Law(temperature=0.7, top_p=0.95), VOCABULARY, stops=[EOS])
    generator = torch.Generator().manual_seed(0)
    state.begin(ids("A person:"))
    path: list[int] = []
    while not state.ends(path):
        assert len(path) < 200
        logits = torch.randn(VOCABULARY, generator=generator)
        logits[EOS] += 3  # ends soon once it may
        probs = state.probs(logits, path)
        mask = compiled.matcher().allowed(path)
        assert probs.sum() == pytest.approx(1) and not probs[~mask].any()
        assert free.probs(logits, path)[~mask].any()  # unlike the law without it
        path.append(int(draw(probs, torch.rand((), generator=generator, dtype=torch.float64))))
    assert path[-1] == EOS
    person = json.loads(TINY.decode(path[:-1]))
    assert list(person) == ["name", "age"] and len(person["name"]) <= 3
    with pytest.raises(ProbabilityError, match="nothing is allowed"):
        state.probs(logits, path)
    assert not state.ends(path[:-1])
    state.commit(path)
    assert state.ends([])
