"""Act 3: a checkpoint, and a clone of it: a second database over the same SSTs that can be changed independently."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import flagstone
from shop import Shop, order_value
from stage import MB, Stage, folder_bytes
from summary import count_requests


def branch(stage: Stage, db: flagstone.Db, shop: Shop, url: Path) -> Counter[str]:
    """Run the act; returns the requests that the clone made."""
    stage.act("3 Branch", "checkpoint and clone: no SST is copied")
    stays, goes = (number for number in range(100) if shop.state_of(number) == "paid" and number < 3)
    key, doomed = shop.order_key(stays), shop.order_key(goes)
    with stage.step("checkpoint of all that was written"):
        checkpoint = db.checkpoint(name="before the sale")
    with stage.step("clone of the checkpoint"):
        flagstone.Admin(url).clone("shop-test", checkpoint=checkpoint.id)
    clone_url = url.with_name("shop-test")
    size, whole = folder_bytes(clone_url), folder_bytes(url)

    with stage.step("open, change and close the clone"), flagstone.open(clone_url) as clone:
        stage.check("the clone before", clone.get(key), order_value(stays, "paid"))
        clone.put(key, order_value(stays, "given away"))
        clone.delete(doomed)
        stage.check("the clone after", clone.get(key), order_value(stays, "given away"))
        stage.check("the clone after a deletion", clone.get(doomed), None)
    requests = count_requests(clone)
    stage.check("the original", db.get(key), order_value(stays, "paid"))
    stage.check("the original, deleted in the clone", db.get(doomed), order_value(goes, "paid"))

    db.put(key, order_value(stays, "returned"), await_durable=True)
    with flagstone.open_reader(url, checkpoint=checkpoint.id) as before:
        stage.check("the checkpoint after a later write", before.get(key), order_value(stays, "paid"))
    db.put(key, order_value(stays, "paid"), await_durable=True)
    stage.tell(
        f"The clone began with {size / MB:.3f} MB beside {whole / MB:.0f} MB of the original, "
        "which its writes did not touch."
    )
    return requests
