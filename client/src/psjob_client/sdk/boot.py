"""Runs a script that travels as text in a manifest: `python -c THIS SOURCE [PACKAGE…] [-- ARGUMENT…]`. Only the standard library.

The script becomes a file and this process becomes `python FILE`: tracebacks show its lines, loader processes can import it, and a worker
that goes back to a checkpoint starts it again. It is imported from the working folder, as a script that lies there would be.
"""

import hashlib
import importlib.metadata
import os
import stat
import subprocess
import sys
import tempfile


def missing_packages(packages: list[str]) -> list[str]:
    """Those requirements that this Python does not meet."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement  # type: ignore[no-redef,import-not-found]
    found = []
    for text in packages:
        wanted = Requirement(text)
        try:
            have = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            have = None
        if have is None or not wanted.specifier.contains(have, prereleases=True):
            found.append(text)
    return found


def own_folder(parent: str) -> str:
    """A folder of this user in `parent`, where others may write too: the same each time, unless somebody else has put something there."""
    folder = os.path.join(parent, f"psjob-scripts-{os.getuid()}")
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        found = os.lstat(folder)  # a link would lead to a folder of this user that others may write to
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            return tempfile.mkdtemp(prefix="psjob-scripts-", dir=parent)
    return folder


def write_script(source: str, folder: str) -> str:
    """The script's file, by its content; it takes the place of what is there."""
    path = os.path.join(folder, f"train-{hashlib.sha256(source.encode()).hexdigest()[:12]}.py")
    made, part = tempfile.mkstemp(dir=folder)
    with os.fdopen(made, "w", encoding="utf-8") as file:
        file.write(source)
    os.replace(part, path)
    return path


def main() -> None:
    """Install what is missing, write the script, become it."""
    source, words = sys.argv[1], sys.argv[2:]
    end = words.index("--") if "--" in words else len(words)
    packages, arguments = words[:end], words[end + 1 :]
    paths = [os.getcwd(), os.environ.get("PYTHONPATH", "")]
    wanted = missing_packages(packages) if packages else []
    if wanted:
        target = tempfile.mkdtemp(prefix="psjob-packages-")
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", target, *wanted], check=False)
        if done.returncode:
            sys.exit(f"packages: pip could not install {', '.join(wanted)}; put them into the image, or correct their names")
        paths.insert(0, target)
    path = write_script(source, own_folder(tempfile.gettempdir()))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.execv(sys.executable, [sys.executable, path, *arguments])


if __name__ == "__main__":
    main()
