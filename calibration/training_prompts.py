"""Prompts for training a draft head: made from seeds written for the package, as many as are asked for.

The seeds (training_seeds.jsonl, one object a line) are function ideas with their examples, sentences with slots, and
the words for the slots. A quarter of the prompts ask for Python code, a quarter are word problems with random numbers,
and the rest are general.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from compressor.calibration.prompts import Prompt, _read, calibration_prompts, evaluation_prompts
from compressor.errors import UsageError

MOST = 40_000  # prompts of one list; far beyond it the rarer sentences are used up
TRIES = 200  # draws in a row that were seen before, after which a category counts as used up
_PRONOUNS = {"f": {"he": "she", "him": "her", "his": "her"}, "m": {"he": "he", "him": "him", "his": "his"}}
_DOC_OPENINGS = ("{doc}", "{doc}", "Given {given}, {lower}", "This function {third}", "{doc}\n\nExamples:")
_CODE_FORMS = {"bare": 45, "intro": 14, "fenced": 10, "method": 6, "prose": 10, "ask": 15}
_MUTATIONS = (
    (" == ", " != "),
    (" + 1", ""),
    (" > ", " < "),
    (" < ", " > "),
    (" + ", " - "),
    (" % ", " // "),
    ("max(", "min("),
    (" * ", " + "),
    (" not in ", " in "),
    ("[::-1]", "[::2]"),
    ("sum(", "len("),
)


@cache
def _seeds(kind: str) -> tuple[dict[str, Any], ...]:
    return tuple(seed for seed in _read("training_seeds.jsonl") if seed["kind"] == kind)


@cache
def _words() -> dict[str, list[str]]:
    return {seed["name"]: seed["values"] for seed in _seeds("slot")}


def function_seeds() -> list[dict[str, Any]]:
    """The function ideas: names, params, returns, doc, body (a Python expression) and examples (arguments, result)."""
    return list(_seeds("function"))


def training_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` distinct prompts, of which any beginning is a fair mix; a shorter list is the beginning of a longer one.

    The same count and seed always give the same prompts, and none of them is shipped for calibration or evaluation.
    """
    if not 1 <= count <= MOST:
        raise UsageError(f"training prompts: count must be from 1 to {MOST}, not {count}")
    seen = {_content(prompt) for prompt in [*calibration_prompts(), *evaluation_prompts()]}
    prompts: list[Prompt] = []
    for number, (category, draw) in zip(range(count), _turns(random.Random(f"{seed}")), strict=False):
        content = next((text for _ in range(TRIES) if (text := draw()) not in seen), None)
        if content is None:
            raise UsageError(f"training prompts: only {number} distinct ones could be made of the {count} asked for")
        seen.add(content)
        message = {"role": "user", "content": content}
        prompts.append({"id": f"train-{category}-{number:05d}", "category": category, "messages": [message]})
    return prompts


def _content(prompt: Prompt) -> str:
    return prompt["text"] if "text" in prompt else "\n\n".join(message["content"] for message in prompt["messages"])


def _turns(rng: random.Random) -> Iterator[tuple[str, Callable[[], str]]]:
    """Code, general, word problem, general, and so on: a category and what draws a prompt of it."""
    templates: dict[str, list[dict[str, Any]]] = {}
    for template in _seeds("template"):
        templates.setdefault(template["category"], []).append(template)
    decks = {category: _deck(group, rng) for category, group in templates.items()}
    functions = _deck(function_seeds(), rng)
    general = _deck([category for category in templates if category != "wordproblem"], rng)
    while True:
        yield "code", lambda: _code(next(functions), rng)
        for category in (next(general), "wordproblem", next(general)):
            yield category, lambda deck=decks[category]: _filled(next(deck), rng)  # type: ignore[misc]


def _deck(cards: list[Any], rng: random.Random) -> Iterator[Any]:
    """All cards in random order, again and again."""
    while True:
        yield from rng.sample(cards, len(cards))


def _filled(template: dict[str, Any], rng: random.Random) -> str:
    """The template's sentence with its numbers drawn and each slot filled; slots that differ get different words."""
    text = _fill(template["text"], _numbers(template["numbers"], rng), rng).strip()
    text = re.sub(r" +(?=\n)", "", re.sub(r"\ba (?=[aeio](?!ne\b|u))", "an ", text))
    return text[0].upper() + text[1:]


def _numbers(rules: dict[str, str], rng: random.Random) -> dict[str, str]:
    """Numbers by name from rules: "3-9" or "10-50/5" (a range and its step), or products added up, as in "a*b+c"."""
    numbers: dict[str, int] = {}
    for name, rule in rules.items():
        if bounds := re.fullmatch(r"(\d+)-(\d+)(?:/(\d+))?", rule):
            low, high, step = (int(bound or 1) for bound in bounds.groups())
            numbers[name] = rng.randrange(low, high + 1, step)
            continue
        numbers[name] = 0
        for sign, term in re.findall(r"([+-]?)([^+-]+)", rule):
            product = 1
            for factor in term.split("*"):
                product *= numbers[factor] if factor in numbers else int(factor)
            numbers[name] += -product if sign == "-" else product
    return {name: str(number) for name, number in numbers.items()}


def _fill(text: str, values: dict[str, str], rng: random.Random) -> str:
    """`text` with {slots} replaced: by `values`, else by a word of the list of that name, which `values` then keeps.

    {item2} is another item than {item}. {name} is a person, and {he}, {him} and {his} are that person's pronouns.
    """

    def person(number: str) -> str:
        if f"sex{number}" not in values:
            taken = {value for key, value in values.items() if key.startswith("name")}
            people = [entry.split(":") for entry in _words()["people"]]
            name, sex = rng.choice([entry for entry in people if entry[0] not in taken])
            values.update({f"name{number}": name, f"sex{number}": sex})
        return number

    def value(match: re.Match[str]) -> str:
        slot = match[1]
        word, number = re.fullmatch(r"(\D+)(\d*)", slot).groups()  # type: ignore[union-attr]
        if word.lower() in _PRONOUNS["f"]:
            pronoun = _PRONOUNS[values[f"sex{person(number)}"]][word.lower()]
            return pronoun.capitalize() if word[0].isupper() else pronoun
        if word == "name":
            person(number)
        elif slot not in values:
            choices = [choice for choice in _words()[word] if "{" in choice or choice not in values.values()]
            values[slot] = rng.choice(choices)
            values[slot] = re.sub(r"\{(\w+)\}", lambda inner: _other(inner[1], values, rng), values[slot])
        return values[slot]

    return re.sub(r"\{(\w+)\}", value, text)


def _other(word: str, values: dict[str, str], rng: random.Random) -> str:
    """A word for a slot inside a slot's words, not yet used in this prompt."""
    return _fill("{" + word + "}", {f"used{i}": value for i, value in enumerate(values.values())}, rng)


def _code(seed: dict[str, Any], rng: random.Random) -> str:
    """A prompt about one function: to complete it, to write it, or to explain, test or mend it."""
    name = rng.choice(seed["names"])
    count = rng.choice([n for n in (1, 2, 2, 3, 3) if n <= len(seed["examples"])])
    examples = [seed["examples"][i] for i in sorted(rng.sample(range(len(seed["examples"])), count))]
    form = rng.choices(list(_CODE_FORMS), list(_CODE_FORMS.values()))[0]
    if form == "ask":
        return _ask(seed, name, examples[0], rng)
    if form == "prose":
        shown = " ".join(f"For example, `{name}({given})` should return `{result}`." for given, result in examples[:2])
        opening = rng.choice(["Write a Python function", "Write a function in Python called", "In Python, define"])
        ending = rng.choice(["", " Include a docstring.", " Use type hints.", " Add a short explanation."])
        return f"{opening} `{name}({seed['params']})` that {_third_person(seed['doc'])} {shown}{ending}"
    code = _stub(seed, name, examples, form == "method", rng)
    if form == "bare":
        return code
    if form == "fenced":
        code = f"```python\n{code}```"
    elif form == "method" and rng.random() < 0.5:
        return code
    return f"{rng.choice(_seeds('intro'))['text']}\n\n{code}"


def _third_person(doc: str) -> str:
    return doc.replace("Return ", "returns ", 1)


def _stub(seed: dict[str, Any], name: str, examples: list[list[str]], method: bool, rng: random.Random) -> str:
    """The signature with a docstring and examples, without a body."""
    given = " and ".join(f"`{part.split(':')[0]}`" for part in re.split(r", (?=\w+:)", seed["params"]))
    lower = seed["doc"][0].lower() + seed["doc"][1:]
    opening = rng.choice(_DOC_OPENINGS)
    doc = opening.format(doc=seed["doc"], given=given, lower=lower, third=_third_person(seed["doc"]))
    holder = rng.choice(["Solution", "Helper", "Tools", "Toolbox", "Utils"])
    call = f"{holder}.{name}" if method else name
    shown = [line for args, result in examples for line in (f">>> {call}({args})", result)]
    blank = [""] if rng.random() < 0.3 and "\n" not in doc else []
    quotes = rng.choice(['"""\n', '"""', '"""', '""" '])
    lines = [*f"{quotes}{doc}".split("\n"), *blank, *shown, '"""']
    body = "".join(f"    {line}\n" if line else "\n" for line in lines).replace("\\", "\\\\")
    signature, imports = _typed(f"def {name}({seed['params']}) -> {seed['returns']}:\n", rng.random() < 0.6)
    if not method:
        return imports + signature + body
    inner = "".join(f"    {line}\n" if line else "\n" for line in ("@staticmethod\n" + signature + body).splitlines())
    return f"{imports}class {holder}:\n{inner}"


def _typed(signature: str, old: bool) -> tuple[str, str]:
    """The signature as it is, or (`old`) with the names of the typing module; and the import it then needs."""
    if not old:
        return signature, ""
    signature = re.sub(r"\b(list|dict|tuple)\[", lambda match: match[1].capitalize() + "[", signature)
    signature = re.sub(r"-> (.+) \| None:", r"-> Optional[\1]:", signature)
    used = [name for name in ("Dict", "List", "Optional", "Tuple") if f"{name}[" in signature]
    return signature, f"from typing import {', '.join(used)}\n\n\n" if used else ""


def _ask(seed: dict[str, Any], name: str, example: list[str], rng: random.Random) -> str:
    """A question about the function with its body, or with a mistake in the body."""
    signature, _ = _typed(f"def {name}({seed['params']}) -> {seed['returns']}:\n", False)
    if rng.random() < 0.4:
        signature = f"def {name}({re.sub(r': [^:]+?(?=, [a-z_]+:|$)', '', seed['params'])}):\n"

    def code(expression: str) -> str:
        modules = sorted(set(re.findall(r'__import__\("(\w+)"\)', expression)))
        imports = "".join(f"import {module}\n" for module in modules) + ("\n\n" if modules else "")
        expression = re.sub(r'__import__\("(\w+)"\)', r"\1", expression)
        return f"{imports}{signature}    return {expression}\n"

    body = seed["body"]
    wrong = [body.replace(old, new, 1) for old, new in _MUTATIONS if old in body]
    asks = [ask["text"] for ask in _seeds("ask") if wrong or "{bug}" not in ask["text"]]
    expected = f"`{name}({example[0]})` returns `{example[1]}`."
    values = {"code": code(body), "bug": code(rng.choice(wrong or [body])), "doc": seed["doc"], "example": expected}
    return _fill(rng.choice(asks), values, rng)
