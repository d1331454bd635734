"""A stranger's pod: tries to open connections, again and again. Prints a line a round: when it began, and where it came through.

Arguments: `address:port`, each.
"""

import json
import socket
import sys
import threading
import time


def knock(target, reached):
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return
    reached.append(target)


while True:
    begun, reached = time.time(), []
    threads = [threading.Thread(target=knock, args=(target, reached)) for target in sys.argv[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"begun": begun, "reached": sorted(reached)}), flush=True)
    time.sleep(0.3)
