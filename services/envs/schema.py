"""JSON schemas from Python signatures, and arguments back: what a tool's author annotates is what a policy may send.

    int, float, str, bool, list[T], dict[str, T], Literal[…], T | None and other unions,
    dataclasses, TypedDicts, Annotated[T, "description"]

Anything else is a TypeError when the tool is declared, never a surprise in an episode.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

_SCALARS: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


class ArgumentError(ValueError):
    """Arguments that the signature does not take; the message is for the policy."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One named value: a parameter, or a field of a dataclass or TypedDict."""

    annotation: Any
    required: bool
    description: str = ""
    default: Any = None


class Parameters:
    """The parameters of a function, as a policy sees them."""

    def __init__(self, function: Callable[..., Any], *, skip: int = 0):
        """Reads a signature, without its first `skip` parameters. Raises TypeError, naming what cannot be declared."""
        name = function.__qualname__
        described = _described_arguments(inspect.getdoc(function) or "")
        hints = _hints(function, name)
        self._fields: dict[str, Field] = {}
        for parameter in list(inspect.signature(function).parameters.values())[skip:]:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"tool {name}: a policy names its arguments, so {parameter} cannot be one")
            if parameter.name not in hints:
                raise TypeError(f"tool {name}: annotate {parameter.name}, the policy must be told its type")
            required = parameter.default is parameter.empty
            self._fields[parameter.name] = Field(
                annotation=hints[parameter.name],
                required=required,
                description=described.get(parameter.name, ""),
                default=None if required else parameter.default,
            )
        try:
            self.schema = _object(self._fields)
        except TypeError as error:
            raise TypeError(f"tool {name}: {error}") from None

    def bind(self, arguments_json: str) -> dict[str, Any]:
        """The keyword arguments of a call. Raises ArgumentError."""
        return _named_values(self._fields, json_object(arguments_json), "argument ")


def json_object(arguments_json: str) -> dict[str, Any]:
    """A call's arguments, before any check of their types. Raises ArgumentError for what is no JSON object."""
    try:
        arguments = json.loads(arguments_json or "{}", parse_constant=_refuse)
        # JSON can write halves of characters, which no message and no file name can hold.
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ArgumentError("the arguments hold a lone surrogate, which is no text") from None
    except (ValueError, RecursionError):
        raise ArgumentError("the arguments are not JSON") from None
    if not isinstance(arguments, dict):
        raise ArgumentError("the arguments must be a JSON object")
    return arguments


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _hints(of: Any, name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(of, include_extras=True)
    except NameError as error:
        raise TypeError(f"tool {name}: {error}; annotations must be importable when the tool is declared") from None


def _described_arguments(docstring: str) -> dict[str, str]:
    """What the section "Args:" of a docstring says of each parameter, in one line."""
    _, found, section = docstring.partition("\nArgs:\n")
    described: dict[str, str] = {}
    name = ""
    for line in section.splitlines() if found else ():
        if line.strip() and not line.startswith(" "):
            break
        entry = re.match(r" {1,4}(\w+)(?: *\([^)]*\))?: *(.*)", line)
        if entry:
            name = entry[1]
            described[name] = entry[2].strip()
        elif name and line.strip():
            described[name] = f"{described[name]} {line.strip()}".strip()
    return described


def _object(fields: Mapping[str, Field]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, field in fields.items():
        try:
            properties[name] = schema_of(field.annotation)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        if field.description:
            properties[name]["description"] = field.description
        # None only says that the argument may be left out.
        if not field.required and field.default is not None and not dataclasses.is_dataclass(field.default):
            properties[name]["default"] = field.default
    required = [name for name, field in fields.items() if field.required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def schema_of(annotation: Any) -> dict[str, Any]:
    """The JSON schema of a type. Raises TypeError for one that JSON cannot carry unambiguously."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        schema = schema_of(arguments[0])
        described = [note for note in arguments[1:] if isinstance(note, str)]
        return {**schema, "description": described[0]} if described else schema
    if annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    if annotation is type(None):
        return {"type": "null"}
    if origin is list and arguments:
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin is dict and arguments and arguments[0] is str:
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    if origin is Literal and all(isinstance(value, str | int) for value in arguments):
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of(option) for option in arguments]}
    fields = _fields_of(annotation)
    if fields is None:
        name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        raise TypeError(
            f"no JSON schema for {name}: use int, float, str, bool, list[T], dict[str, T], Literal, T | None, "
            "a dataclass or a TypedDict"
        )
    return _object(fields)


def _fields_of(annotation: Any) -> dict[str, Field] | None:
    """The fields of a dataclass or TypedDict; None for anything else."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        hints = _hints(annotation, annotation.__name__)
        missing = dataclasses.MISSING
        return {
            field.name: Field(
                annotation=hints[field.name],
                required=field.default is missing and field.default_factory is missing,
                default=None if field.default is missing else field.default,
            )
            for field in dataclasses.fields(annotation)
            if field.init
        }
    if typing.is_typeddict(annotation):
        hints = typing.get_type_hints(annotation)
        return {name: Field(hint, required=name in annotation.__required_keys__) for name, hint in hints.items()}
    return None


def _named_values(fields: Mapping[str, Field], given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The given values, each as its field's type. Raises ArgumentError."""
    missing = [name for name, field in fields.items() if field.required and name not in given]
    if missing:
        raise ArgumentError(f"{prefix}{missing[0]} is missing")
    unknown = [name for name in given if name not in fields]
    if unknown:
        raise ArgumentError(f"no {prefix}{_shown(unknown[0])}, but {', '.join(fields) or 'none'}")
    return {name: _value(fields[name].annotation, value, f"{prefix}{name}") for name, value in given.items()}


def _value(annotation: Any, value: Any, where: str) -> Any:
    """A JSON value as the annotated type. Raises ArgumentError."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _value(arguments[0], value, where)
    if annotation in _SCALARS:
        return _scalar(annotation, value, where)
    if annotation is type(None) and value is None:
        return None
    if origin is list and isinstance(value, list):
        return [_value(arguments[0], item, f"{where}[{position}]") for position, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal:
        # A bool equals an int, but JSON tells them apart.
        if not any(value == option and type(value) is type(option) for option in arguments):
            raise ArgumentError(f"{where} must be one of {json.dumps(list(arguments))}, not {_shown(value)}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments, value, where)
    fields = _fields_of(annotation)
    if fields is not None and isinstance(value, dict):
        named = _named_values(fields, value, f"{where}.")
        try:
            return named if typing.is_typeddict(annotation) else annotation(**named)
        except ValueError as error:
            raise ArgumentError(f"{where}: {error}") from None
    kind = {list: "an array", type(None): "null"}.get(origin or annotation, "an object")
    raise ArgumentError(f"{where} must be {kind}, not {_shown(value)}")


def _one_of(options: tuple[Any, ...], value: Any, where: str) -> Any:
    errors = []
    for option in options:
        try:
            return _value(option, value, where)
        except ArgumentError as error:
            if option is not type(None):
                errors.append(str(error))
    raise ArgumentError(" or ".join(dict.fromkeys(errors)))


def _scalar(kind: type, value: Any, where: str) -> Any:
    if isinstance(value, bool) or kind is bool:
        fits = isinstance(value, bool) and kind is bool
    elif kind is int:
        fits = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    elif kind is float:
        fits = isinstance(value, int | float)
    else:
        fits = isinstance(value, str)
    article = "an" if _SCALARS[kind][0] in "aeiou" else "a"
    if not fits:
        raise ArgumentError(f"{where} must be {article} {_SCALARS[kind]}, not {_shown(value)}")
    try:
        converted = kind(value)
    except OverflowError:
        converted = math.inf
    if converted in (math.inf, -math.inf):
        raise ArgumentError(f"{where} is too large")
    return converted


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
