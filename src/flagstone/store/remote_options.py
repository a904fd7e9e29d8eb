"""URLs and options of remote stores: which options each service has, and which of them are secrets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from flagstone.config.durations import as_duration
from flagstone.errors import InvalidRequest
from flagstone.store.port import check_path

Service = Literal["s3", "gcs", "azure"]
OptionValue = str | bool | int | float
Options = Mapping[str, OptionValue]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SERVICE_OF_SCHEME: Final[dict[str, Service]] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "az": "azure",
    "azure": "azure",
    "abfs": "azure",
    "abfss": "azure",
}

_SERVICE_OPTIONS: Final[dict[Service, frozenset[str]]] = {
    "s3": _names(
        """access_key_id secret_access_key session_token region endpoint virtual_hosted_style_request
        skip_signature unsigned_payload s3_express request_payer checksum_algorithm disable_tagging
        disable_bulk_delete imdsv1_fallback metadata_endpoint role_arn role_session_name sts_endpoint
        web_identity_token_file container_credentials_relative_uri container_credentials_full_uri
        container_authorization_token_file server_side_encryption sse_kms_key_id sse_bucket_key_enabled
        sse_customer_key_base64"""
    ),
    "gcs": _names(
        """service_account service_account_path service_account_key application_credentials base_url
        bearer_token skip_signature"""
    ),
    "azure": _names(
        """account_name account_key client_id client_secret tenant_id authority_host credential_type sas_key
        token use_emulator use_fabric_endpoint endpoint msi_endpoint object_id msi_resource_id
        federated_token_file use_azure_cli skip_signature disable_tagging encryption_key"""
    ),
}

CLIENT_OPTIONS: Final = _names(
    """allow_http allow_invalid_certificates connect_timeout timeout read_timeout http1_only http2_only
    pool_idle_timeout pool_max_idle_per_host proxy_url proxy_ca_certificate proxy_excludes root_certificate
    user_agent"""
)
"""Options of the HTTP client, the same for every service."""

_SECONDS: Final = frozenset(["connect_timeout", "timeout", "read_timeout", "pool_idle_timeout"])

SECRET_OPTIONS: Final = _names(
    """access_key_id secret_access_key session_token sse_customer_key_base64 service_account_key bearer_token
    account_key client_secret sas_key token encryption_key proxy_url"""
)
"""Never shown, and pickled only on request. A proxy's URL often holds its password."""

_BUCKET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._$-]*\Z")


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """A bucket (container, on Azure) and the folder in it that is the store's root."""

    service: Service
    bucket: str
    prefix: str
    account: str | None = None

    def __str__(self) -> str:
        scheme = {"s3": "s3", "gcs": "gs", "azure": "az"}[self.service]
        if self.account is not None:
            base = f"abfss://{self.bucket}@{self.account}.dfs.core.windows.net"
        else:
            base = f"{scheme}://{self.bucket}"
        return f"{base}/{self.prefix}" if self.prefix else base


def parse_remote_url(url: str) -> RemoteUrl:
    """The parts of `s3://bucket/folder` and similar URLs. No character is decoded, not even `%` and `?`."""
    scheme, separator, rest = url.partition("://")
    service = SERVICE_OF_SCHEME.get(scheme)
    if service is None or not separator:
        raise InvalidRequest(f"{scheme!r} is not a remote store; use s3://, gs:// or az://")
    authority, _, path = rest.partition("/")
    bucket, at, host = authority.partition("@")
    account = None
    if at:
        if not scheme.startswith("abfs"):
            raise InvalidRequest(f"a {scheme}:// URL must not carry credentials; pass them as options")
        account = host.partition(".")[0]
    if not _BUCKET_NAME.match(bucket):
        raise InvalidRequest(f"a {scheme}:// URL needs a bucket: {scheme}://bucket/folder")
    prefix = path.strip("/")
    return RemoteUrl(service, bucket, check_path(prefix) if prefix else "", account)


def check_options(service: Service, options: Options) -> None:
    """Raise `InvalidRequest` for an option that the service does not have, with the nearest one that it has."""
    known = _SERVICE_OPTIONS[service] | CLIENT_OPTIONS
    for name in options:
        if name not in known:
            raise InvalidRequest(f"{service} stores have no option {name!r}{nearest(name, known)}")
    for name in _SECONDS & options.keys():
        client_value(name, options[name])
    endpoint = str(options.get("endpoint", ""))
    if "@" in endpoint.partition("://")[2].partition("/")[0]:
        raise InvalidRequest("option 'endpoint' must not carry credentials; pass them as options")


def nearest(name: str, known: frozenset[str]) -> str:
    """The end of a message about an unknown option: the nearest option, or all of them."""
    plain = name.lower().replace("-", "_")
    for service_prefix in ("aws_", "azure_storage_", "azure_", "google_", "gcs_", "s3_"):
        plain = plain.removeprefix(service_prefix)
    found = difflib.get_close_matches(plain, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else f"; it has {', '.join(sorted(known))}"


def client_value(name: str, value: OptionValue) -> str | bool | timedelta:
    """An option of the HTTP client as obstore takes it. A timeout is text with a unit, or a number of seconds."""
    if name in _SECONDS:
        return _timeout(name, value)
    return value if isinstance(value, bool) else str(value)


def _timeout(name: str, value: OptionValue) -> timedelta:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            timeout = timedelta(seconds=value)
        except (ValueError, OverflowError):
            raise InvalidRequest(f"option {name!r} is {value!r}, which is not a number of seconds") from None
    else:
        timeout = as_duration(value, f"option {name!r}")
    if timeout <= timedelta(0):
        raise InvalidRequest(f"option {name!r} must be longer than 0, not {value!r}")
    return timeout
