"""Trains with job.yaml and with job-sync.yaml on the same data, and tells what each came to with how many exchanges."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    local, sync = (run(HERE / name) for name in ("job.yaml", "job-sync.yaml"))
    print(f"{'':8}{'exchanges':>12}{'unseen text, nats a character':>34}")
    for name, (exchanges, loss) in {"local": local, "sync": sync}.items():
        print(f"{name:8}{exchanges:12}{loss:34.4f}")
    fewer, worse = sync[0] / local[0], local[1] / sync[1] - 1
    print(f"local: {fewer:.0f} times fewer exchanges, loss {worse:+.1%}")
    return 0 if fewer >= 50 and worse <= 0.02 else 1


def run(manifest: Path) -> tuple[int, float]:
    """(exchanges of each worker, loss on unseen text) of one job."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["psjob", "run", str(manifest), "--summary", "summary.json", *sys.argv[1:]]
        subprocess.run(words, cwd=folder, check=True, stdout=sys.stderr)
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return summary["steps"], summary["metrics"]["unseen_loss"]


if __name__ == "__main__":
    sys.exit(main())
