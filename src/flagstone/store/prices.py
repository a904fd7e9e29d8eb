"""Prices of an object store: list prices of Amazon S3 in US East (N. Virginia), and of others.

Standard class: unchanged for years. Express One Zone: as lowered in April 2025. Both as published in 2026; transfer
within the region is free, deleting too. The others are what Google's pricing examples (us-east1) and Cloudflare's
pricing page say, without what is free of charge every month.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PRICE_LIST: Final = "US East (N. Virginia), Express One Zone as of April 2025"
SECONDS_A_MONTH: Final = 30 * 24 * 3600
GIGABYTE: Final = 1 << 30


@dataclass(frozen=True)
class Prices:
    """Dollars per request, per gigabyte moved and per gigabyte kept for a month."""

    put: float
    """Also list and copy."""
    get: float
    """Also head."""
    stored_gb: float
    sent_gb: float = 0.0
    received_gb: float = 0.0

    def requests(self, counted: Mapping[str, float]) -> float:
        """Dollars for requests by kind: put, list, copy, get, head, delete."""
        expensive = sum(counted.get(kind, 0) for kind in ("put", "list", "copy"))
        cheap = sum(counted.get(kind, 0) for kind in ("get", "head"))
        return self.put * expensive + self.get * cheap

    def moved(self, *, sent: float, received: float) -> float:
        """Dollars for bytes sent to the store and received from it."""
        return (sent * self.sent_gb + received * self.received_gb) / GIGABYTE


S3_STANDARD: Final = Prices(put=0.005 / 1000, get=0.0004 / 1000, stored_gb=0.023)
S3_EXPRESS: Final = Prices(
    put=0.00113 / 1000, get=0.00003 / 1000, stored_gb=0.11, sent_gb=0.0032, received_gb=0.0006
)
GCS_STANDARD: Final = Prices(put=0.005 / 1000, get=0.0004 / 1000, stored_gb=0.020)
R2_STANDARD: Final = Prices(put=4.50 / 1e6, get=0.36 / 1e6, stored_gb=0.015)
FREE: Final = Prices(put=0.0, get=0.0, stored_gb=0.0)

PRICE_LISTS: Final[Mapping[str, Prices]] = {
    "s3-standard": S3_STANDARD,
    "s3-express": S3_EXPRESS,
    "gcs-standard": GCS_STANDARD,
    "r2-standard": R2_STANDARD,
    "free": FREE,
}
"""The names that the setting `price_list` takes. "free" is for a folder on a disk."""
