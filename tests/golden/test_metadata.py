"""Every manifest and compactions file of the golden databases: decoded as by the wheel, encoded to the same bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import cramjam
import lz4.block
import pytest
import zstandard

from flagstone.format import flat
from flagstone.format.codec import Codec
from flagstone.format.sst_info import decode_info, decode_stats, encode_info, encode_stats
from flagstone.metadata.compactions import (
    Compactions,
    check_compactions,
    decode_compactions,
    encode_compactions,
)
from flagstone.metadata.invariants import check_manifest
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.manifest_codec import decode_manifest, encode_manifest
from flagstone.runtime.ids import parse_ulid, ulid_text

DATA = Path(__file__).parent / "data"
MANIFESTS = sorted(DATA.rglob("*.manifest"))
COMPACTIONS = sorted(DATA.rglob("*.compactions"))
TABLES = sorted(path for path in DATA.rglob("*.sst") if path.stat().st_size > 10)
EXPECTED = sorted(DATA.glob("*/expected*.json"))
HANDMADE = "handmade_v1"
DECOMPRESS: dict[Codec, Callable[[bytes], bytes]] = {
    Codec.NONE: bytes,
    Codec.ZLIB: zlib.decompress,
    Codec.SNAPPY: lambda block: bytes(cramjam.snappy.decompress_raw(block)),
    Codec.LZ4: lz4.block.decompress,
    Codec.ZSTD: zstandard.ZstdDecompressor().decompress,
}

BLOCK_META = flat.Shape[tuple[Any, ...]](
    "BlockMeta", flat.U64, flat.Bytes(required=True), make=tuple, take=lambda entry: entry
)
INDEX = flat.Shape[tuple[Any, ...]](
    "SsTableIndex",
    flat.Children(BLOCK_META, required=True),
    make=lambda values: values[0],
    take=lambda entries: (entries,),
)


def name(path: Path) -> str:
    return str(path.relative_to(DATA))


def root_of(expected_file: Path, expected: dict[str, Any]) -> Path:
    case = expected_file.parent
    return next(root for root in (case / expected["path"], case / "main" / expected["path"]) if root.exists())


def newest(folder: Path) -> Path:
    return max(folder.iterdir())


def runs_of(tree: Any) -> list[dict[str, Any]]:
    return [{"id": run.id, "views": [ulid_text(view.id) for view in run.views]} for run in tree.runs]


def picture(manifest: Manifest) -> dict[str, Any]:
    marker = manifest.tree.last_compacted_l0
    return {
        "initialized": manifest.initialized,
        "writer_epoch": manifest.writer_epoch,
        "compactor_epoch": manifest.compactor_epoch,
        "last_l0_seq": manifest.last_l0_seq,
        "last_l0_clock_tick": manifest.last_l0_clock_tick,
        "replay_after_wal_id": manifest.replay_after_wal_id,
        "next_wal_sst_id": manifest.wal_id_last_seen + 1,
        "recent_snapshot_min_seq": manifest.recent_snapshot_min_seq,
        "last_compacted_l0_sst_view_id": None if marker is None else ulid_text(marker),
        "l0": [ulid_text(view.id) for view in manifest.tree.l0],
        "sorted_runs": runs_of(manifest.tree),
        "segments": [
            {
                "prefix": segment.prefix.hex(),
                "l0": [ulid_text(view.id) for view in segment.tree.l0],
                "sorted_runs": runs_of(segment.tree),
            }
            for segment in manifest.segments
        ],
        "external_dbs": [
            {
                "path": db.path,
                "source_checkpoint_id": str(db.source_checkpoint_id),
                "final_checkpoint_id": str(db.final_checkpoint_id),
                "sst_ids": [f"SsTableId(value={ulid_text(sst_id)})" for sst_id in db.sst_ids],
            }
            for db in manifest.external_dbs
        ],
        "checkpoints": [
            {
                "id": str(entry.id),
                "manifest_id": entry.manifest_id,
                "create_s": entry.created_s,
                "expire_s": entry.expires_s,
                "name": entry.name,
            }
            for entry in manifest.checkpoints
        ],
    }


def test_the_corpus_has_all_its_manifests_and_compactions_files() -> None:
    assert (len(EXPECTED), len(MANIFESTS), len(COMPACTIONS), len(TABLES)) == (31, 174, 52, 150)


@pytest.mark.parametrize("expected_file", EXPECTED, ids=name)
def test_the_latest_manifest_decodes_to_what_the_wheel_read(expected_file: Path) -> None:
    expected = json.loads(expected_file.read_text())
    path = newest(root_of(expected_file, expected) / "manifest")
    assert int(path.stem) == expected["manifest_id"]
    found = picture(decode_manifest(path.read_bytes()))
    assert found == {key: expected[key] for key in found}


@pytest.mark.parametrize("expected_file", EXPECTED, ids=name)
def test_the_latest_compactions_file_decodes_to_what_the_wheel_read(expected_file: Path) -> None:
    expected = json.loads(expected_file.read_text())
    folder = root_of(expected_file, expected) / "compactions"
    if expected["compactions"] is None:
        assert not folder.exists()
        return
    path = newest(folder)
    held = decode_compactions(path.read_bytes())
    assert expected["compactions"] == {
        "id": int(path.stem),
        "compactor_epoch": held.compactor_epoch,
        "statuses": [[ulid_text(job.id), job.status.name] for job in held.jobs],
    }


@pytest.mark.parametrize("path", MANIFESTS, ids=name)
def test_a_decoded_manifest_is_written_with_the_same_bytes(path: Path) -> None:
    data = path.read_bytes()
    manifest = decode_manifest(data)
    again = encode_manifest(manifest)
    if HANDMADE in path.parts:
        assert decode_manifest(again) == manifest  # version 1 becomes version 2
    else:
        assert again == data


@pytest.mark.parametrize("path", COMPACTIONS, ids=name)
def test_a_decoded_compactions_file_is_written_with_the_same_bytes(path: Path) -> None:
    data = path.read_bytes()
    assert encode_compactions(decode_compactions(data)) == data


@pytest.mark.parametrize("path", TABLES, ids=name)
def test_flatbuffers_of_ssts_are_written_with_the_same_bytes(path: Path) -> None:
    data = path.read_bytes()
    raw_info = data[int.from_bytes(data[-10:-2], "big") : -14]
    info = decode_info(raw_info)
    if HANDMADE not in path.parts:
        assert encode_info(info) == raw_info
    raw_index = payload(data, info.index_offset, info.index_len, info.codec)
    assert flat.encode(INDEX, flat.decode(INDEX, raw_index)) == raw_index
    if info.stats_len:
        raw_stats = payload(data, info.stats_offset, info.stats_len, info.codec)
        assert encode_stats(decode_stats(raw_stats)) == raw_stats


def payload(data: bytes, offset: int, length: int, codec: Codec) -> bytes:
    block = data[offset : offset + length - 4]
    return DECOMPRESS[codec](block)


@pytest.mark.parametrize("folder", sorted({path.parent for path in MANIFESTS}), ids=name)
def test_manifests_of_the_wheel_satisfy_our_manifest_rules(folder: Path) -> None:
    history: list[Manifest] = [decode_manifest(path.read_bytes()) for path in sorted(folder.iterdir())]
    check_manifest(history[0], None)
    for before, after in pairwise(history):
        check_manifest(after, before)


@pytest.mark.parametrize("folder", sorted({path.parent for path in COMPACTIONS}), ids=name)
def test_compactions_files_of_the_wheel_satisfy_our_rules(folder: Path) -> None:
    history: list[Compactions] = [decode_compactions(path.read_bytes()) for path in sorted(folder.iterdir())]
    check_compactions(history[0], None)
    for before, after in pairwise(history):
        check_compactions(after, before)


def test_the_info_of_an_sst_in_the_manifest_equals_the_one_in_the_file() -> None:
    compared = 0
    for path in MANIFESTS:
        for sst in decode_manifest(path.read_bytes()).ssts.values():
            file = path.parent.parent / "compacted" / f"{ulid_text(sst.id)}.sst"
            if file.exists():
                data = file.read_bytes()
                assert decode_info(data[int.from_bytes(data[-10:-2], "big") : -14]) == sst.info
                assert int.from_bytes(data[-2:], "big") == sst.format_version
                compared += 1
    assert compared == 225


def test_a_manifest_of_format_1_is_read_as_views_with_the_ids_of_their_ssts() -> None:
    manifest = decode_manifest(newest(DATA / HANDMADE / "db" / "manifest").read_bytes())
    assert all(view.id == view.sst_id for view in manifest.views)
    assert {sst.format_version for sst in manifest.ssts.values()} == {1}
    assert parse_ulid("01HF7YAT00HX6XV8A99HSWY9BD") in manifest.ssts
