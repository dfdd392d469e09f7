"""A trainer in a process of its own: `python -m tests.campaign.client.consumer URL NAME HANG_AT`.

Prints the name and the revision of each rollout that it gets. At the rollout HANG_AT it hangs: what it got
and has not acknowledged is lost to it if it is killed.
"""

import sys
import time

from tokenproxy.client import Client

if __name__ == "__main__":
    url, name, hang_at = sys.argv[1:]
    with Client(url) as client:
        for rollout in client.feed(name, limit=3, wait_s=2, patience_s=60):
            print(rollout.rollout, rollout.revision, len(rollout.samples), flush=True)
            if rollout.rollout == hang_at:
                time.sleep(3600)
