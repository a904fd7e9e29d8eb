"""Where settings come from: files and the environment, as plain mappings without any judgement of the values."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flagstone.config.fields import Kind, Section, SettingRefused, nested_section, suggestion
from flagstone.errors import InvalidRequest

FILE_NAMES: Final = ("SlateDb.json", "SlateDb.toml", "SlateDb.yaml", "SlateDb.yml")
"""In the order in which `Settings.load` lays them over each other."""


def parse_json(text: str) -> dict[str, Any]:
    try:
        return _mapping(json.loads(text))
    except ValueError as error:
        raise InvalidRequest(f"the settings are not JSON: {error}") from None


def load_file(path: Path) -> dict[str, Any]:
    """The mapping in a JSON, TOML or YAML file. An empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidRequest(f"there is no settings file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the settings file {path} cannot be read: {error}") from None
    match path.suffix.lower():
        case ".json":
            return parse_json(text)
        case ".toml":
            try:
                return tomllib.loads(text)
            except tomllib.TOMLDecodeError as error:
                raise InvalidRequest(f"the settings are not TOML: {error}") from None
        case ".yaml" | ".yml":
            return _parse_yaml(text)
        case other:
            raise InvalidRequest(f"a settings file ends in .json, .toml, .yaml or .yml, not {other!r}")


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above`, section by section."""
    merged = dict(below)
    for name, value in above.items():
        held = merged.get(name)
        both = isinstance(held, Mapping) and isinstance(value, Mapping)
        merged[name] = overlay(held, value) if both else value  # type: ignore[arg-type]
    return merged


def read_environment(section: type[Section], prefix: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The values of the variables that begin with `prefix`, nested as their dots say."""
    found: dict[str, Any] = {}
    # Sorted, so that a variable for a whole section comes before those for its fields.
    for variable in sorted(environ):
        if not variable.startswith(prefix) or variable == prefix:
            continue
        names = variable.removeprefix(prefix).lower().split(".")
        kind = _find_kind(section, names, variable)
        if kind is None:
            continue
        value: Any = kind.of_text(_unquoted(environ[variable]))
        for name in reversed(names):
            value = {name: value}
        found = overlay(found, value)
    return found


def _find_kind(section: type[Section], names: list[str], variable: str) -> Kind | None:
    """The field that the names lead to; None when the first one resembles no field at all."""
    for depth, name in enumerate(names):
        kinds = section.kinds()
        kind = kinds.get(name)
        if kind is None:
            near = suggestion(name, kinds)
            if depth == 0 and not near:
                return None
            hint = "; sections and fields are separated by a dot" if "__" in name else near
            raise SettingRefused(".".join(names[: depth + 1]), f"unknown setting{hint} (from {variable})")
        if depth == len(names) - 1:
            return kind
        inside = nested_section(kind)
        if inside is None:
            raise SettingRefused(".".join(names), f"{name} is not a section (from {variable})")
        section = inside
    return None


def _unquoted(text: str) -> str:
    """SlateDB reads a bare 2 as a number and needs ``"2"`` where a setting is text; both mean the same here."""
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text


def _parse_yaml(text: str) -> dict[str, Any]:
    # Imported here: it costs as much as all of this package, and few use it.
    import yaml  # noqa: PLC0415

    try:
        return _mapping(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise InvalidRequest(f"the settings are not YAML: {error}") from None


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"settings are an object of names and values, not {type(value).__name__}")
    return value
