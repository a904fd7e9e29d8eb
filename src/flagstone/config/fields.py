"""The kinds of settings, and sections of settings.

A field is declared with its default and its bounds (`integer(8, minimum=1)`); a section is a frozen dataclass of
fields. Constructing a section checks and normalises every value, so every section object is valid. Every error starts
with the dotted name of the setting: ``compactor_options.worker.max_sst_size: …``.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar, overload

from flagstone.config.durations import format_duration, parse_duration, refusal
from flagstone.errors import InvalidRequest

U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1

_KIND: Final = "kind"
_OURS: Final = "ours"

_Stored = TypeVar("_Stored")
_Given = TypeVar("_Given")


class Accepts(Generic[_Stored, _Given]):
    """The type of a field that is given in more forms than it is stored in: for type checkers, without objects.

    They read it as a descriptor: a section returns `_Stored`, and its constructor takes `_Given`.
    """

    if TYPE_CHECKING:

        @overload
        def __get__(self, section: None, owner: Any) -> Self: ...
        @overload
        def __get__(self, section: object, owner: Any) -> _Stored: ...
        def __get__(self, section: Any, owner: Any) -> Any: ...
        def __set__(self, section: object, value: _Given) -> None: ...


DurationField = Accepts[timedelta, timedelta | str]
OptionalDuration = Accepts[timedelta | None, timedelta | str | None]
SectionField = Accepts[_Stored, _Stored | Mapping[str, Any]]
OptionalSection = Accepts[_Stored | None, _Stored | Mapping[str, Any] | None]


class SettingRefused(InvalidRequest):
    """The setting `name` (dotted, relative to the section being constructed) cannot have the given value."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name = name
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


class Kind(ABC):
    """The values that one field accepts. Its errors do not name the field; the section adds the name."""

    @abstractmethod
    def accept(self, value: Any) -> Any:
        """The value in its normal form."""

    def of_text(self, text: str) -> Any:
        """The value that the text of an environment variable stands for; `accept` checks it afterwards."""
        return text

    def to_plain(self, value: Any) -> Any:
        """The value for JSON, as SlateDB writes it."""
        return value


@dataclass(frozen=True, slots=True)
class Nullable(Kind):
    """The inner kind, or None. An environment variable says ``null`` for None."""

    inner: Kind

    def accept(self, value: Any) -> Any:
        return None if value is None else self.inner.accept(value)

    def of_text(self, text: str) -> Any:
        return None if text == "null" else self.inner.of_text(text)

    def to_plain(self, value: Any) -> Any:
        return None if value is None else self.inner.to_plain(value)


@dataclass(frozen=True, slots=True)
class Boolean(Kind):
    def accept(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise InvalidRequest(f"{value!r} is not true or false")
        return value

    def of_text(self, text: str) -> Any:
        return {"true": True, "false": False}.get(text.lower(), text)


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    minimum: int
    maximum: int

    def accept(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"{value!r} is not a whole number")
        if not self.minimum <= value <= self.maximum:
            raise InvalidRequest(f"{value} is out of range; choose {self.minimum} to {self.maximum}")
        return value

    def of_text(self, text: str) -> Any:
        return int(text) if text.isascii() and text.removeprefix("-").isdigit() else text


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A number with a fraction, which SlateDB stores as text."""

    minimum: float

    def accept(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{value!r} is not a number")
        if not self.minimum <= value < float("inf"):
            raise InvalidRequest(f"{value} is out of range; choose {self.minimum} or more")
        return float(value)

    def of_text(self, text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text


@dataclass(frozen=True, slots=True)
class Duration(Kind):
    minimum: timedelta

    def accept(self, value: Any) -> timedelta:
        if isinstance(value, str):
            value = parse_duration(value)
        if not isinstance(value, timedelta):
            raise InvalidRequest(refusal(value))
        if value < self.minimum:
            least = format_duration(self.minimum)
            raise InvalidRequest(f"{_text(value)} is out of range; choose {least} or more")
        return value

    def to_plain(self, value: timedelta) -> str:
        return format_duration(value)


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    options: tuple[Any, ...]
    any_case: bool = False

    def accept(self, value: Any) -> Any:
        for option in self.options:
            # The types must be equal as well: True == 1, but True is not a size.
            if type(value) is type(option) and value == option:
                return option
            if self.any_case and isinstance(value, str) and value in (option.upper(), option.lower()):
                return option
        raise InvalidRequest(f"{value!r} is not one of {', '.join(map(str, self.options))}")

    def of_text(self, text: str) -> Any:
        return next((option for option in self.options if str(option) == text), text)


@dataclass(frozen=True, slots=True)
class Folder(Kind):
    def accept(self, value: Any) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{value!r} is not the path of a folder")
        return value


@dataclass(frozen=True, slots=True)
class Nested(Kind):
    section: type[Section]

    def accept(self, value: Any) -> Section:
        if isinstance(value, self.section):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{value!r} is not a section of settings")
        return self.section.from_dict(value)

    def of_text(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    def to_plain(self, value: Section) -> dict[str, Any]:
        return value.to_dict()


def boolean(default: bool, *, ours: bool = False) -> Any:
    return _field(default, Boolean(), ours=ours)


def integer(
    default: int | None,
    *,
    minimum: int = 0,
    maximum: int = U64_MAX,
    optional: bool = False,
    ours: bool = False,
) -> Any:
    return _field(default, Integer(minimum, maximum), optional=optional, ours=ours)


def number(default: float, *, minimum: float, ours: bool = False) -> Any:
    return _field(default, Number(minimum), ours=ours)


def duration(default: str | None, *, minimum: str = "1ms", optional: bool = False, ours: bool = False) -> Any:
    value = None if default is None else parse_duration(default)
    return _field(value, Duration(parse_duration(minimum)), optional=optional, ours=ours)


def choice(
    default: Any, *options: Any, any_case: bool = False, optional: bool = False, ours: bool = False
) -> Any:
    return _field(default, Choice(options, any_case), optional=optional, ours=ours)


def folder() -> Any:
    return _field(None, Folder(), optional=True)


def section(default: Section, *, optional: bool = False) -> Any:
    return _field(default, Nested(type(default)), optional=optional)


def _field(default: Any, kind: Kind, *, optional: bool = False, ours: bool = False) -> Any:
    return field(default=default, metadata={_KIND: Nullable(kind) if optional else kind, _OURS: ours})


class Section:
    """Base class of all sections. Normalises values on construction; converts from and to plain mappings.

    Subclasses are frozen, slotted, keyword-only dataclasses whose fields the functions above create.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    if not TYPE_CHECKING:

        def __new__(cls, *_: Any, **values: Any) -> Self:
            # Before `__init__`, which does not know what a misspelt name should have been.
            cls._refuse_unknown(values)
            return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, kind in self.kinds().items():
            try:
                normal = kind.accept(getattr(self, name))
            except SettingRefused as error:
                raise SettingRefused(f"{name}.{error.name}", error.problem) from None
            except InvalidRequest as error:
                raise SettingRefused(name, str(error)) from None
            object.__setattr__(self, name, normal)
        self.check()

    def check(self) -> None:
        """Raise `SettingRefused` if two fields contradict each other."""

    @classmethod
    def kinds(cls) -> dict[str, Kind]:
        """The fields by name, in SlateDB's order."""
        return {entry.name: entry.metadata[_KIND] for entry in fields(cls)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The section with these values and defaults for the rest; raises `SettingRefused` for unknown names."""
        cls._refuse_unknown(values)
        return cls(**values)

    @classmethod
    def of(cls, given: Self | Mapping[str, Any] | None) -> Self:
        """The section that a caller passed as such, as a mapping of names and values, or not at all."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping) or isinstance(given, Section):
            raise InvalidRequest(
                f"settings are a {cls.__name__} or a mapping of names and values, not a {type(given).__name__}"
            )
        return cls.from_dict(given)

    def to_dict(self, *, slatedb_only: bool = False) -> dict[str, Any]:
        """Plain values in SlateDB's layout; `slatedb_only` omits settings that SlateDB does not have."""

        def plain(name: str, kind: Kind) -> Any:
            value = getattr(self, name)
            inside = slatedb_only and isinstance(value, Section)
            return value.to_dict(slatedb_only=True) if inside else kind.to_plain(value)

        return {
            entry.name: plain(entry.name, entry.metadata[_KIND])
            for entry in fields(self)
            if not (slatedb_only and entry.metadata[_OURS])
        }

    def replace(self, **changes: Any) -> Self:
        """A copy with other values for some fields; raises `SettingRefused` for unknown names."""
        self._refuse_unknown(changes)
        return replace(self, **changes)

    @classmethod
    def _refuse_unknown(cls, names: Iterable[str]) -> None:
        known = cls.kinds()
        for name in names:
            if name not in known:
                raise SettingRefused(str(name), f"unknown setting{suggestion(str(name), known)}")


def nested_section(kind: Kind) -> type[Section] | None:
    """The section that a field has as its value, or None if it has a plain value."""
    inner = kind.inner if isinstance(kind, Nullable) else kind
    return inner.section if isinstance(inner, Nested) else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error text about an unknown name: the most similar known name, if there is one."""
    by_lower = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def _text(value: timedelta) -> str:
    return str(value) if value < timedelta(0) else format_duration(value)
