"""A lab to try things in, until Ctrl-C.

python -m tests.e2e.lab hosts            # laptop, head, w1, w2, w3 and a stranger; for cluster/onprem.yaml
python -m tests.e2e.lab cloud            # a laptop, and a stand-in for EC2; for cluster/aws.yaml
python -m tests.e2e.lab sh HOST COMMAND  # in another terminal; the project is in the laptop's ~/steadfast
"""

import os
import signal
import sys

from tests.e2e.lab.cloud import Cloud
from tests.e2e.lab.hosts import Lab, missing, typing_at
from tests.e2e.user import User


def main(kind: str = "", *words: str) -> None:
    if kind == "sh":
        os.execvp("nsenter", [*typing_at(words[0]), " ".join(words[1:])])
    if kind not in ("hosts", "cloud"):
        sys.exit(__doc__)
    if why := missing():
        sys.exit(why)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Lab() as lab:
        lab.add("laptop", 2, storage=False)
        User(lab).clone()
        cloud = Cloud(lab) if kind == "cloud" else None
        if cloud is None:
            lab.add("stranger", 4, storage=False)
            for name, number in {"head": 10, "w1": 11, "w2": 12, "w3": 13}.items():
                lab.add(name, number)
            lab.give_key("laptop")
        print(*(f"{address}  {name}" for name, address in lab.addresses.items()), sep="\n")
        print("the laptop's key is ~/.ssh/id_lab, the user root; Ctrl-C ends the lab")
        if cloud:
            settings = " ".join(f"{name}={value}" for name, value in cloud.settings.items())
            print(f"a customer's environment: {settings}; an image: {cloud.image()}; a subnet: {cloud.subnet()}")
        try:
            signal.pause()
        except KeyboardInterrupt:
            if cloud:
                cloud.close()


main(*sys.argv[1:])
