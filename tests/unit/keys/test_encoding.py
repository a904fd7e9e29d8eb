"""The bytes of the specification, and the errors. Stored keys depend on every line of it."""

from __future__ import annotations

import math
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

import flagstone
from flagstone import keys
from flagstone.errors import CorruptData, InvalidRequest

# The examples of docs/keys.md.
EXAMPLES: list[tuple[Any, str]] = [
    (None, "05"),
    (False, "10"),
    (True, "11"),
    (-(2**63), "20 80 00 00 00 00 00 00 00"),
    (-257, "26 fe ff"),
    (-256, "27 00"),
    (-2, "27 fe"),
    (-1, "28"),
    (0, "29"),
    (1, "2a 01"),
    (255, "2a ff"),
    (256, "2b 01 00"),
    (2**64 - 1, "31 ff ff ff ff ff ff ff ff"),
    (-math.inf, "38 00 0f ff ff ff ff ff ff"),
    (-1.5, "38 40 07 ff ff ff ff ff ff"),
    (0.0, "38 80 00 00 00 00 00 00 00"),
    (1.5, "38 bf f8 00 00 00 00 00 00"),
    (math.inf, "38 ff f0 00 00 00 00 00 00"),
    (math.nan, "38 ff f8 00 00 00 00 00 00"),
    (Decimal("-12.5"), "40 7f fd f2 cc ff"),
    (Decimal(0), "41"),
    (Decimal("0.05"), "42 7f ff 33 00"),
    (Decimal("12.5"), "42 80 02 0d 33 00"),
    (Decimal(1200), "42 80 04 0d 00"),
    (date(1969, 12, 31), "48 7f ff ff ff"),
    (date(1970, 1, 1), "48 80 00 00 00"),
    (datetime(1970, 1, 1, 0, 0, 1), "50 80 00 00 00 00 0f 42 40"),
    (datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), "51 80 00 00 00 00 0f 42 40"),
    ("", "58 00"),
    ("a\x00\x01\x02é", "58 61 01 01 01 02 02 c3 a9 00"),
    ("eu", "58 65 75 00"),
    (b"", "59 00"),
    (b"\x00\x01\xff", "59 01 01 01 02 ff 00"),
]


@pytest.mark.parametrize(("part", "spelt"), EXAMPLES, ids=repr)
def test_a_part_has_the_bytes_of_the_specification(part: Any, spelt: str) -> None:
    raw = bytes.fromhex(spelt)
    decoded = keys.decode(raw)[0]

    assert keys.encode(part) == raw
    assert type(decoded) is type(part)
    assert decoded == part or (math.isnan(part) and math.isnan(decoded))


def test_the_examples_are_in_the_order_of_their_bytes() -> None:
    raws = [keys.encode(part) for part, _ in EXAMPLES]

    assert raws == sorted(raws)


def test_the_key_of_a_tuple_is_the_keys_of_its_parts_joined() -> None:
    assert keys.encode("eu", 42) == keys.encode("eu") + keys.encode(42)
    assert keys.encode(("eu", 42)) == keys.encode(["eu", 42]) == keys.encode("eu", 42)
    assert keys.encode() == keys.encode(()) == b""
    assert keys.decode(b"") == ()


def test_equal_values_have_equal_keys() -> None:
    there = timezone(timedelta(hours=2))

    assert keys.encode(-0.0) == keys.encode(0.0)
    assert keys.encode(Decimal("1.50")) == keys.encode(Decimal("1.5"))
    assert keys.encode(Decimal("-0.00")) == keys.encode(Decimal(0))
    assert keys.encode(datetime(2026, 1, 1, 2, tzinfo=there)) == keys.encode(datetime(2026, 1, 1, tzinfo=UTC))
    assert keys.encode(bytearray(b"x"), memoryview(b"y")) == keys.encode(b"x", b"y")


def test_values_of_different_kinds_have_different_keys() -> None:
    alike = [1, 1.0, Decimal(1), True, "1", b"1"]

    assert len({keys.encode(part) for part in alike}) == len(alike)


def test_a_prefix_scan_finds_exactly_the_tuples_that_begin_with_the_prefix() -> None:
    rows = [
        ("eu",),
        ("eu", None),
        ("eu", 1),
        ("eu", 1, "x"),
        ("eu", 2),
        ("eu\x00", 1),
        ("europe", 1),
        ("ev",),
    ]
    with flagstone.open("memory://keys-prefix/db") as db:
        for row in rows:
            db.put(keys.encode(row), b"v")

        found = [keys.decode(key) for key, _ in db.scan(prefix=keys.encode("eu"))]
        ranged = [keys.decode(key) for key, _ in db.scan(*keys.range("eu"))]
        between = [keys.decode(key) for key, _ in db.scan(keys.encode("eu", 1), keys.successor("eu", 1))]
        everything = [keys.decode(key) for key, _ in db.scan(*keys.range())]

    assert found == ranged == rows[:5]
    assert between == rows[2:4]
    assert everything == rows


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("a", object()), r"parts\[1\] is a object; a key consists of None, bool, int"),
        ((1, ("nested",)), r"parts\[1\] is a tuple"),
        ((1j,), r"parts\[0\] is a complex"),
        ((0, 2**64), r"parts\[1\]: the largest integer is 2\^64 - 1"),
        ((-(2**63) - 1,), r"parts\[0\]: the smallest integer is -2\^63"),
        ((10**300,), r"an integer of 997 bits is above"),
        ((Decimal("NaN"),), r"parts\[0\]: a decimal must be a number"),
        ((Decimal("1" * 39),), r"up to 38 digits; this one has 39"),
        ((Decimal("1e40000"),), "between 1e-32769 and 1e32767"),
        (("\ud800",), r"parts\[0\]: the string is not Unicode text"),
    ],
)
def test_the_error_for_an_invalid_part_names_its_position(parts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        keys.encode(*parts)


def test_a_part_of_a_subclass_has_the_key_of_its_base_class() -> None:
    class Region(str):
        __slots__ = ()

    class Code(int):
        pass

    assert keys.encode(Region("eu"), Code(7)) == keys.encode("eu", 7)


def test_a_key_has_at_most_65535_bytes_and_the_error_names_the_largest_part() -> None:
    assert len(keys.encode("x" * 65_533)) == 65_535

    with pytest.raises(
        InvalidRequest, match=r"has 65536 bytes and may have 65535; parts\[1\], a str, alone has 65535"
    ):
        keys.encode(-1, "x" * 65_533)


@pytest.mark.parametrize(
    ("spelt", "offset", "message"),
    [
        ("00", 0, "no part of a key begins with 0x00"),
        ("29 ff", 1, "no part of a key begins with 0xff"),
        ("29 58 65", 1, "ends inside a string"),
        ("58 01 03 00", 0, "escape that does not exist"),
        ("58 01 00", 0, "escape that does not exist"),
        ("58 ff 00", 0, "not UTF-8"),
        ("2b 01", 0, "ends inside a part of 3 bytes"),
        ("2b 00 01", 0, "not in its shortest form"),
        ("27 ff", 0, "not in its shortest form"),
        ("20 7f ff ff ff ff ff ff ff", 0, "not in its shortest form"),
        ("38 7f ff ff ff ff ff ff ff", 0, "never written"),
        ("38 ff f8 00 00 00 00 00 01", 0, "never written"),
        ("48 80 00", 0, "ends inside a part of 5 bytes"),
        ("42 80 01 0b", 0, "ends inside a decimal"),
        ("42 80 01 00", 0, "never written"),
        ("42 80 01 0b 01 00", 0, "never written"),
        ("42 80 01 0a 00", 0, "never written"),
        ("42 80 01 66 00", 0, "never written"),
        ("42 80 01 " + 20 * "0c" + "00", 0, "a decimal has 40 digits"),
    ],
)
def test_bytes_that_are_not_a_key_raise_corrupt_data_with_the_offset(
    spelt: str, offset: int, message: str
) -> None:
    with pytest.raises(CorruptData, match=message) as caught:
        keys.decode(bytes.fromhex(spelt))

    assert caught.value.offset == offset


def test_decoding_a_time_outside_pythons_years_raises_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match=r"Python has no .*: use decode_arrow"):
        keys.decode(bytes.fromhex("48 ff ff ff ff"))
    with pytest.raises(InvalidRequest, match=r"Python has no .*: use decode_arrow"):
        keys.decode(bytes.fromhex("51 00 00 00 00 00 00 00 00"))


def test_decode_accepts_only_bytes() -> None:
    assert keys.decode(bytearray(b"\x29")) == (0,)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="a key is bytes, not str"):
        keys.decode("eu")  # type: ignore[arg-type]


def test_encoding_one_key_does_not_import_pyarrow() -> None:
    code = "import sys; from flagstone import keys; keys.decode(keys.encode('eu', 1)); print('pyarrow' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)

    assert run.stdout.strip() == "False"
