"""A commit log in a DynamoDB table, for writers on many machines.

One item per destination, under the partition key `namespace` and the sort key `destination`. Pending items
also carry the attribute `pending`, the sort key of a local secondary index: a local index answers strongly
consistent queries, a global one does not.

Every operation is one conditional request. The client repeats a request whose answer was lost, and then its own
first attempt may refuse it; see `Intents.decide`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from flagstone.errors import InvalidRequest, Unavailable
from flagstone.store.commit_log import CommitRecord, RecordState

_PENDING_INDEX: Final = "pending"
# Placeholders for all names: `state`, `token` and many other words are reserved in expressions.
_SAME_NAMES: Final = {"#version": "version", "#source": "source", "#state": "state"}
_SAME: Final = "#version = :version AND #source = :source AND #state = :state"
_TRANSIENT: Final = frozenset(
    {
        "InternalServerError",
        "LimitExceededException",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "ThrottlingException",
    }
)


class DynamoDbCommitLog:
    """A commit log in the DynamoDB table `table`.

    `namespace` separates stores that share a table: give each base store its own. With `create_table` a
    missing table is created, billed per request. `region` and `endpoint_url` default to the usual AWS
    configuration, from which credentials always come: neither this object nor its pickle contains any. Each
    process makes its own client on first use, also after a fork.
    """

    def __init__(
        self,
        table: str,
        *,
        namespace: str = "flagstone",
        region: str | None = None,
        endpoint_url: str | None = None,
        create_table: bool = False,
    ) -> None:
        if not namespace:
            raise InvalidRequest("the namespace of a DynamoDB commit log must not be empty")
        self._table = table
        self._namespace = namespace
        self._region = region
        self._endpoint_url = endpoint_url
        self._create_table = create_table
        self._clients: dict[int, _Client] = {}

    def __repr__(self) -> str:
        return f"DynamoDbCommitLog({self._table!r}, namespace={self._namespace!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self._table, self._namespace, self._region, self._endpoint_url, self._create_table))

    def find(self, destination: str) -> CommitRecord | None:
        answer = self._client().call(
            "get_item", TableName=self._table, Key=self._key(destination), ConsistentRead=True
        )
        return _record(answer["Item"]) if "Item" in answer else None

    def insert(self, record: CommitRecord) -> bool:
        return self._client().attempt(
            "put_item",
            TableName=self._table,
            Item=self._item(record),
            ConditionExpression="attribute_not_exists(#destination)",
            ExpressionAttributeNames={"#destination": "destination"},
        )

    def replace(self, old: CommitRecord, new: CommitRecord) -> bool:
        return self._client().attempt(
            "put_item", TableName=self._table, Item=self._item(new), **_condition(old)
        )

    def remove(self, record: CommitRecord) -> bool:
        return self._client().attempt(
            "delete_item", TableName=self._table, Key=self._key(record.destination), **_condition(record)
        )

    def pending(self, prefix: str) -> list[CommitRecord]:
        return list(self._query("pending", prefix, IndexName=_PENDING_INDEX))

    def records(self, prefix: str) -> Iterator[CommitRecord]:
        return self._query("destination", prefix)

    def close(self) -> None:
        client = self._clients.pop(os.getpid(), None)
        if client is not None:
            client.close()

    def _query(self, sort_key: str, prefix: str, **options: object) -> Iterator[CommitRecord]:
        names = {"#namespace": "namespace"}
        values = {":namespace": {"S": self._namespace}}
        condition = "#namespace = :namespace"
        if prefix:
            names["#sort"] = sort_key
            values[":folder"] = {"S": f"{prefix}/"}
            condition += " AND begins_with(#sort, :folder)"
        request: dict[str, object] = {
            "TableName": self._table,
            "ConsistentRead": True,
            "KeyConditionExpression": condition,
            "ExpressionAttributeNames": names,
            "ExpressionAttributeValues": values,
            **options,
        }
        while True:
            answer = self._client().call("query", **request)
            for item in answer["Items"]:
                yield _record(item)
            if "LastEvaluatedKey" not in answer:
                return
            request["ExclusiveStartKey"] = answer["LastEvaluatedKey"]

    def _client(self) -> _Client:
        client = self._clients.get(os.getpid())
        if client is not None:
            return client
        opened = _Client(self._region, self._endpoint_url)
        if self._create_table:
            opened.create_table(self._table)
        kept = self._clients.setdefault(os.getpid(), opened)
        if kept is not opened:  # another thread was first
            opened.close()
        return kept

    def _key(self, destination: str) -> dict[str, dict[str, str]]:
        return {"namespace": {"S": self._namespace}, "destination": {"S": destination}}

    def _item(self, record: CommitRecord) -> dict[str, dict[str, str]]:
        item = {
            **self._key(record.destination),
            "source": {"S": record.source},
            "version": {"N": str(record.version)},
            "state": {"S": str(record.state)},
            "created_ms": {"N": str(record.created_ms)},
        }
        if record.token is not None:
            item["token"] = {"S": record.token}
        if record.replaced is not None:
            item["replaced"] = {"S": record.replaced}
        if record.state is RecordState.PENDING:
            item["pending"] = {"S": record.destination}
        return item


class _Client:
    """The service client of one process, with its errors translated."""

    def __init__(self, region: str | None, endpoint_url: str | None) -> None:
        try:
            session: Any = import_module("boto3.session")
            self._errors: Any = import_module("botocore.exceptions")
        except ImportError as error:
            raise InvalidRequest("a DynamoDB commit log needs: pip install 'flagstone[dynamodb]'") from error
        try:
            # Not the default session, which must not be used from several threads.
            self._service: Any = session.Session().client(
                "dynamodb", region_name=region, endpoint_url=endpoint_url
            )
        except self._errors.BotoCoreError as error:
            raise InvalidRequest(f"DynamoDB commit log: {error}") from error

    def call(self, verb: str, **request: object) -> Any:
        try:
            return getattr(self._service, verb)(**request)
        except (self._errors.ClientError, self._errors.BotoCoreError) as error:
            raise self._explain(error) from error

    def attempt(self, verb: str, **request: object) -> bool:
        """Make a conditional request; False when its condition did not hold."""
        try:
            getattr(self._service, verb)(**request)
        except (self._errors.ClientError, self._errors.BotoCoreError) as error:
            if _code(error) == "ConditionalCheckFailedException":
                return False
            raise self._explain(error) from error
        return True

    def create_table(self, table: str) -> None:
        """Create the table if it is missing, and wait until it is ready."""
        key_types = {"namespace": "S", "destination": "S", "pending": "S"}
        try:
            self._service.create_table(
                TableName=table,
                BillingMode="PAY_PER_REQUEST",
                AttributeDefinitions=[
                    {"AttributeName": name, "AttributeType": kind} for name, kind in key_types.items()
                ],
                KeySchema=_key_schema("destination"),
                LocalSecondaryIndexes=[
                    {
                        "IndexName": _PENDING_INDEX,
                        "KeySchema": _key_schema("pending"),
                        "Projection": {"ProjectionType": "ALL"},
                    }
                ],
            )
        except (self._errors.ClientError, self._errors.BotoCoreError) as error:
            if _code(error) != "ResourceInUseException":
                raise self._explain(error) from error
        try:
            self._service.get_waiter("table_exists").wait(TableName=table)
        except (self._errors.ClientError, self._errors.BotoCoreError) as error:
            raise self._explain(error) from error

    def close(self) -> None:
        self._service.close()

    def _explain(self, error: Exception) -> Exception:
        message = f"DynamoDB commit log: {error}"
        code = _code(error)
        if code is None:  # no answer, or none that could be read
            missing = isinstance(error, self._errors.NoCredentialsError | self._errors.NoRegionError)
            return InvalidRequest(message) if missing else Unavailable(message)
        return Unavailable(message) if code in _TRANSIENT else InvalidRequest(message)


def _reopen(
    table: str, namespace: str, region: str | None, endpoint_url: str | None, create_table: object
) -> DynamoDbCommitLog:
    return DynamoDbCommitLog(
        table,
        namespace=namespace,
        region=region,
        endpoint_url=endpoint_url,
        create_table=bool(create_table),
    )


def _key_schema(sort_key: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": "namespace", "KeyType": "HASH"},
        {"AttributeName": sort_key, "KeyType": "RANGE"},
    ]


def _condition(record: CommitRecord) -> dict[str, object]:
    return {
        "ConditionExpression": _SAME,
        "ExpressionAttributeNames": _SAME_NAMES,
        "ExpressionAttributeValues": {
            ":version": {"N": str(record.version)},
            ":source": {"S": record.source},
            ":state": {"S": str(record.state)},
        },
    }


def _code(error: Exception) -> str | None:
    response = getattr(error, "response", None)
    return None if response is None else str(response.get("Error", {}).get("Code"))


def _record(item: dict[str, dict[str, str]]) -> CommitRecord:
    return CommitRecord(
        destination=item["destination"]["S"],
        source=item["source"]["S"],
        version=int(item["version"]["N"]),
        state=RecordState(item["state"]["S"]),
        created_ms=int(item["created_ms"]["N"]),
        token=item["token"]["S"] if "token" in item else None,
        replaced=item["replaced"]["S"] if "replaced" in item else None,
    )
