"""The prices that the command line uses, too."""

from flagstone.store.prices import (
    GIGABYTE,
    PRICE_LIST,
    S3_EXPRESS,
    S3_STANDARD,
    SECONDS_A_MONTH,
    Prices,
)

__all__ = ["GIGABYTE", "PRICE_LIST", "S3_EXPRESS", "S3_STANDARD", "SECONDS_A_MONTH", "Prices"]
