"""Settings of Hadoop's S3 client as options of our store. Pure, but for reading the settings of a session.

Teams that read `s3a://` with Spark have `fs.s3a.*` settings: the same bucket then needs no second set of options.
Settings that only tune Hadoop's client are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flagstone.store.remote_options import OptionValue, parse_remote_url

_PREFIXES: Final = ("spark.hadoop.fs.s3a.", "fs.s3a.")
_SAME: Final = {
    "access.key": "access_key_id",
    "secret.key": "secret_access_key",
    "session.token": "session_token",
    "endpoint.region": "region",
}
_ANONYMOUS: Final = "AnonymousAWSCredentialsProvider"


def is_hadoop_option(name: str) -> bool:
    """Whether it is a setting of Hadoop's S3 client."""
    return name.lower().startswith(_PREFIXES)


def store_options(settings: Mapping[str, str], url: str) -> dict[str, OptionValue]:
    """The options of our store for a bucket: the settings of that bucket win over the general ones."""
    if not url.lower().startswith(("s3://", "s3a://")):
        return {}
    own, general = f"bucket.{parse_remote_url(url).bucket}.", {}
    special: dict[str, str] = {}
    for name, value in settings.items():
        prefix = next((each for each in _PREFIXES if name.lower().startswith(each)), None)
        if prefix is None:
            continue
        plain = name[len(prefix) :]
        if plain.startswith(own):
            special[plain.removeprefix(own)] = value
        elif not plain.startswith("bucket."):
            general[plain] = value
    return _translated({**general, **special})


def _translated(settings: Mapping[str, str]) -> dict[str, OptionValue]:
    found: dict[str, OptionValue] = {
        ours: settings[theirs] for theirs, ours in _SAME.items() if settings.get(theirs)
    }
    plain_http = settings.get("connection.ssl.enabled", "true").lower() == "false"
    endpoint = settings.get("endpoint")
    if endpoint:
        found["endpoint"] = endpoint if "://" in endpoint else f"http{'' if plain_http else 's'}://{endpoint}"
        plain_http = str(found["endpoint"]).startswith("http://")
    if plain_http:
        found["allow_http"] = True
    style = settings.get("path.style.access")
    if style is not None and endpoint:
        found["virtual_hosted_style_request"] = style.lower() != "true"
    if settings.get("requester.pays.enabled", "").lower() == "true":
        found["request_payer"] = True
    if _ANONYMOUS in settings.get("aws.credentials.provider", ""):
        found["skip_signature"] = True
    return found


def session_options(spark: Any, url: str) -> dict[str, OptionValue]:
    """The options that the settings of a session give to a bucket."""
    if spark is None or not url.lower().startswith(("s3://", "s3a://")):
        return {}
    settings: Mapping[str, str] = dict(spark.conf.getAll)
    return store_options(settings, url)
