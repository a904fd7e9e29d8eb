"""What an installed wheel must be able to do. cibuildwheel runs this on every wheel, `make dist` on what it built.

    python wheel_program.py [--compiled | --interpreted]

It uses nothing but Flagstone, and works in a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import flagstone
from flagstone import kernels


def main(expected: list[str]) -> None:
    for form in expected:
        assert form == f"--{kernels.FORM}", f"the kernels are {kernels.FORM}"
    with tempfile.TemporaryDirectory() as folder:
        shop = Path(folder, "shop")
        with flagstone.open(shop) as db:
            for number in range(1000):
                db.put(b"order/%04d" % number, b"open")
            db.put(b"order/0001", b"paid", await_durable=True)
            db.flush()
            assert db.scan_arrow(prefix=b"order/").read_all().num_rows == 1000
        with flagstone.open_reader(shop) as reader:
            assert reader.get(b"order/0001") == b"paid"
            assert reader.count(prefix=b"order/") == 1000
        assert flagstone.Admin(shop).verify().ok
    print(f"flagstone {flagstone.__version__} works, kernels {kernels.FORM}: {flagstone.__file__}")


if __name__ == "__main__":
    main(sys.argv[1:])
