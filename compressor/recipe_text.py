"""Recipe text: YAML in, one-line explanations out. Knows nothing of what the keys mean."""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from compressor.errors import UsageError


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate and non-text keys, and reads ``1e-2`` as the number YAML 1.2 says it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, "keys must be text", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key '{key_node.value}'", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _load_yaml(text: str, origin: str) -> Any:
    """The one document in `text`. Raises UsageError beginning with `origin`, with the line where YAML found fault."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UsageError(f"{origin}: {where}{_one_line(error.problem or error.context or 'not valid YAML')}") from None
    except yaml.YAMLError as error:  # the reader's own, for control characters
        raise UsageError(f"{origin}: {_one_line(str(error))}") from None
    except ValueError as error:  # a scalar that looks like a date or a number but is none: 2024-13-45
        raise UsageError(f"{origin}: {_one_line(str(error))}; write text in quotes") from None
    except RecursionError:
        raise UsageError(f"{origin}: nested too deeply") from None


def read(file: Path) -> dict:
    """The mapping in a YAML file. Raises UsageError for a file that cannot be read or holds something else."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{file}: no such recipe file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({(error.strerror or str(error)).lower()})") from None
    data = _load_yaml(text, str(file))
    if data is None:
        raise UsageError(f"{file}: is empty; a recipe holds at least name and source.uri")
    if not isinstance(data, dict):
        raise UsageError(f"{file}: holds {_kind(data)}, not a mapping; a recipe begins with name: and source:")
    return data


def parse_override(override: str, model: type[BaseModel]) -> tuple[str, Any]:
    """Split ``a.b=value`` into (dotted key, value read as YAML). Raises UsageError for a key `model` does not have."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UsageError(f"--set {override}: write it as key=value, for example quantization.format=nvfp4")
    section = model
    parts = key.split(".")
    for depth, part in enumerate(parts):
        field = section.model_fields.get(part)
        if field is None:
            raise UsageError(f"--set: {key}: {_unknown(part, section, model)}")
        inner = _section_of(field)
        if depth == len(parts) - 1:
            value = _load_yaml(text, f"--set: {key}")
            if inner is not None:
                _refuse_section(key, value, inner, optional=inner is not field.annotation)
            return key, value
        if inner is None:
            raise UsageError(f"--set: {key}: {'.'.join(parts[: depth + 1])} is a value, not a section")
        section = inner
    raise AssertionError("a key has at least one part")


def _refuse_section(key: str, value: Any, section: type[BaseModel], *, optional: bool) -> None:
    """Refuse `value` for a whole section, save for null and {} where the section may be absent."""
    if not optional or value not in (None, {}):
        more = "; or null to leave it out, {} for its defaults" if optional else ""
        raise UsageError(f"--set: {key}: is a section; set one of its keys: {', '.join(section.model_fields)}{more}")


def assign(raw: dict, key: str, value: Any, file: Path) -> None:
    """Put `value` at dotted `key`, making sections that are missing or null. Raises UsageError where the file has no
    section."""
    *parents, leaf = key.split(".")
    for depth, part in enumerate(parents):
        if raw.get(part) is None:
            raw[part] = {}
        raw = raw[part]
        if not isinstance(raw, dict):
            raise UsageError(
                f"{file}: {'.'.join(parents[: depth + 1])}: {_shown(raw)} is not allowed; must be a mapping"
            )
    raw[leaf] = value


def lookup(raw: dict, key: str) -> Any:
    """The value at dotted `key`, None where a level is missing or is no mapping."""
    value: Any = raw
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def resolve_path(raw: dict, key: str, folder: Path) -> None:
    """Make a path at `key` absolute, relative ones taken from `folder`. `source.uri` only when it is a path."""
    value = lookup(raw, key)
    if not isinstance(value, str) or not value:
        return
    looks_like_a_path = value[0] in "./~" or (value.lower().endswith(".gguf") and ":" not in value)
    if key == "source.uri" and not looks_like_a_path and not (":" not in value and (folder / value).is_dir()):
        return
    if "\0" in value:
        raise UsageError(f"{key}: holds a null character")
    section: Any = lookup(raw, key.rpartition(".")[0])
    section[key.rpartition(".")[2]] = str((folder / Path(value).expanduser()).resolve())


def flatten(data: dict, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries → one level with dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def changes(before: dict, after: dict) -> list[str]:
    """What changed between two nested dictionaries: ``quantization.damping: 0.01 → 0.05`` each."""
    old, new = flatten(before), flatten(after)
    absent = object()

    def shown(value: Any) -> str:
        return "(absent)" if value is absent else json.dumps(value, ensure_ascii=False)

    found = []
    for key in [*new, *(key for key in old if key not in new)]:
        one, other = old.get(key, absent), new.get(key, absent)
        if one != other:
            found.append(f"{key}: {shown(one)} → {shown(other)}")
    return found


def explain(error: ValidationError, model: type[BaseModel], origin: str, set_keys: set[str]) -> str:
    """One line for a failed validation: origin, dotted key, value, what is allowed; and how many more there are.

    `set_keys` are dotted keys that came from the command line: their errors begin with ``--set``.
    """
    # A default that follows from another key says nothing beside that key's own error.
    entries = [entry for entry in error.errors() if entry["type"] != "default_factory_not_called"]
    problems = [_problem(entry, model) for entry in entries]
    key, text = problems[0]
    begin = "--set" if key in set_keys else origin
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{begin}: {key}: {text}{more}" if key else f"{begin}: {text}{more}"


def _problem(entry: Any, model: type[BaseModel]) -> tuple[str, str]:
    """(dotted key, explanation) of one pydantic error."""
    location, kind, context = list(entry["loc"]), entry["type"], entry.get("ctx", {})
    value = entry["input"]
    if kind == "combination":
        key = _dotted([*location, context["key"]])
        if context["value"] is None:
            return key, f"missing; {context['reason']}"
        return key, f"{_shown(context['value'])} is not allowed: {context['reason']}"
    section, field = _locate(location, model)
    key = _dotted(location)
    if kind in ("extra_forbidden", "invalid_key"):
        return key, _unknown(str(location[-1]), section, model)
    if kind == "missing":
        meaning = field.description if field else None
        return key, f"missing ({meaning.rstrip('.')})" if meaning else "missing"
    return key, f"{_shown(value)} is not allowed; {_allowed(kind, entry, context, field, section)}"


def _allowed(kind: str, entry: Any, context: dict, field: FieldInfo | None, section: type[BaseModel]) -> str:
    """What the schema would accept in place of the refused value."""
    value = entry["input"]
    if kind in ("literal_error", "not_one_of"):
        if kind == "not_one_of":
            choices = list(context["allowed"])
        else:
            choices = [str(choice) for choice in get_args(field.annotation)] if field else []
        return f"must be one of {', '.join(choices)}{_nearest(str(value), choices)}"
    if kind == "model_type":
        return f"must be a mapping with keys among {', '.join(section.model_fields)}"
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        return "must be 64 lower-case hex digits" if "{64}" in pattern else f"must match {pattern}"
    if kind == "string_type":
        return "must be text (write it in quotes)" if value is not None else "must be text"
    if kind == "too_short":
        return f"must be a list of at least {context['min_length']}"
    fixed = {
        "int_type": "must be a whole number",
        "int_parsing_size": "is too large",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "list_type": "must be a list",
        "string_too_short": "must not be empty",
    }
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    if kind in bounds:
        signs = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
        return f"must be {signs[bounds[kind]]} {_number(context[bounds[kind]])}"
    return fixed.get(kind) or _one_line(entry["msg"])


def _locate(location: list, model: type[BaseModel]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The section a location lies in (or is) and the field at its end, as far as the schema knows them."""
    section, field = model, None
    for part in location:
        field = section.model_fields.get(part, field if isinstance(part, int) else None)
        inner = _section_of(field, in_lists=True) if field is not None else None
        if inner is None:
            break
        section = inner
    return section, field


def _section_of(field: FieldInfo, *, in_lists: bool = False) -> type[BaseModel] | None:
    """The section that a field holds or, where it may be null, can hold; `in_lists`: that of a list's items too."""
    if get_origin(field.annotation) is list and not in_lists:
        return None
    choices = [choice for choice in get_args(field.annotation) if choice is not NoneType] or [field.annotation]
    only = choices[0] if len(choices) == 1 else None
    return only if isinstance(only, type) and issubclass(only, BaseModel) else None


def _unknown(part: str, section: type[BaseModel], root: type[BaseModel]) -> str:
    """``unknown key`` with the nearest valid one of this section, or the same key where another section has it."""
    valid = list(section.model_fields)
    near = difflib.get_close_matches(part, valid, n=1)
    near += [key for key in _keys(root) if key.rpartition(".")[2] == part]
    return f"unknown key; did you mean '{near[0]}'?" if near else f"unknown key; allowed: {', '.join(valid)}"


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = _section_of(field)
        if inner is None:
            yield prefix + name
        else:
            yield from _keys(inner, f"{prefix}{name}.")


def _nearest(value: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(value, choices, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _dotted(location: list) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def _shown(value: Any) -> str:
    """A value as a reader would write it, shortened."""
    text = _one_line(f"'{value}'" if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(data: Any) -> str:
    return {list: "a list", str: "text", bool: "true or false"}.get(type(data), "a single value")


def _one_line(text: str) -> str:
    return " ".join(text.split())
