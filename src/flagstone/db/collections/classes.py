"""The classes that values of a collection may be objects of: dataclasses, models, typed dictionaries. Pure.

The libraries of models are recognised by what their classes have, so none of them is imported before it is in use.
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flagstone.errors import InvalidRequest


def is_typeddict(kind: Any) -> bool:
    """Whether this is a class of `typing.TypedDict`, or of `typing_extensions.TypedDict`."""
    return typing.is_typeddict(kind) or (
        isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__required_keys__")
    )


def names_of_class(kind: Any) -> list[str] | None:
    """The names of the fields; None for a type without fields."""
    if is_typeddict(kind):
        return list(typing.get_type_hints(kind))
    if not isinstance(kind, type):
        return None
    if dataclasses.is_dataclass(kind):
        return [each.name for each in dataclasses.fields(kind)]
    if hasattr(kind, "__struct_fields__"):  # msgspec
        return list(kind.__struct_fields__)
    if hasattr(kind, "model_fields") and hasattr(kind, "model_validate"):  # pydantic
        return list(kind.model_fields)
    return None


def optional_names(kind: Any, hints: Mapping[str, Any]) -> frozenset[str]:
    """The items that a typed dictionary may lack.

    What the class itself says is wrong if its annotations are strings: then it has not looked into them.
    """
    forms = {name: getattr(typing.get_origin(each), "_name", None) for name, each in hints.items()}
    required = {name for name, form in forms.items() if form == "Required"}
    optional = {name for name, form in forms.items() if form == "NotRequired"}
    return frozenset((getattr(kind, "__optional_keys__", frozenset()) | optional) - required)


def defaults_of_class(kind: Any) -> dict[str, Callable[[], Any]]:
    """What makes the value of a field that an object was made without."""
    if dataclasses.is_dataclass(kind):
        return _defaults(dataclasses.fields(kind), dataclasses.MISSING)
    if hasattr(kind, "__struct_fields__"):
        # The class comes from this library, so it is there.
        msgspec = importlib.import_module("msgspec")
        return _defaults(importlib.import_module("msgspec.structs").fields(kind), msgspec.NODEFAULT)
    if hasattr(kind, "model_fields"):
        return {
            name: partial(each.get_default, call_default_factory=True)
            for name, each in kind.model_fields.items()
            if not each.is_required()
        }
    return {}


def maker_of_class(kind: Any, optional: frozenset[str]) -> Callable[[dict[str, Any]], Any]:
    """What makes an object of its fields. Raises `InvalidRequest` if the class cannot be made of them."""
    if is_typeddict(kind):
        return lambda values: {
            name: value for name, value in values.items() if value is not None or name not in optional
        }
    if hasattr(kind, "model_validate"):
        validate = kind.model_validate
        aliases = {name: _alias(name, kind) for name in kind.model_fields}
        return lambda values: validate({aliases[name]: value for name, value in values.items()})
    if dataclasses.is_dataclass(kind) and not all(each.init for each in dataclasses.fields(kind)):
        raise InvalidRequest(f"{kind!r} has fields that its constructor does not take; remove init=False")
    return lambda values: kind(**values)


def _defaults(fields: Any, missing: object) -> dict[str, Callable[[], Any]]:
    defaults: dict[str, Callable[[], Any]] = {}
    for each in fields:
        if each.default_factory is not missing:
            defaults[each.name] = each.default_factory
        elif each.default is not missing:
            defaults[each.name] = partial(_same, each.default)
    return defaults


def _same(value: Any) -> Any:
    return value


def _alias(name: str, kind: Any) -> str:
    """The name under which a model of pydantic takes a field."""
    given = kind.model_fields[name].validation_alias
    if given is None or kind.model_config.get("validate_by_alias") is False:
        return name
    choices = [each for each in getattr(given, "choices", [given]) if isinstance(each, str)]
    if not choices:
        raise InvalidRequest(f"field {name!r} of {kind.__name__} is taken from a path; give it a plain alias")
    return choices[0]
