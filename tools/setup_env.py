"""Find or make a Python environment that satisfies requirements.txt; print its interpreter's path, and nothing else, to stdout.

    the environment of this interpreter, if it satisfies the pins
    else .venv in the checkout, made if absent, brought up to the pins with pip

Standard library only. One process at a time works on .venv; the others wait for it. A .venv whose set-up was killed is
known by its marker file and made anew.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements.txt"
VENV = ROOT / ".venv"
INTERPRETER = VENV / "bin" / "python"
UNFINISHED = VENV / ".unfinished"  # there while pip works: a killed run leaves it behind
PIN = re.compile(r'([\w.-]+)==([\w.]+)(?:\s*;\s*python_version\s*(<|>=)\s*"(\d+)\.(\d+)")?')


def pins() -> Iterator[tuple[str, str]]:
    """(package, version) of every line of requirements.txt that holds for this Python."""
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if not line:
            continue
        found = PIN.fullmatch(line)
        if found is None:
            raise SystemExit(f"{REQUIREMENTS}: expected name==version, perhaps with a python_version marker, got: {line}")
        name, wanted, sign, *release = found.groups()
        older = sign is not None and sys.version_info[:2] < tuple(map(int, release))
        if sign is None or older == (sign == "<"):
            yield name, wanted


def unsatisfied() -> list[str]:
    """The pins that this interpreter's environment does not meet. A build's own suffix (2.13.0+cpu) does not count."""
    lacking = []
    for name, wanted in pins():
        try:
            good = version(name).split("+")[0] == wanted
        except PackageNotFoundError:
            good = False
        if not good:
            lacking.append(f"{name}=={wanted}")
    return lacking


def venv_is_ready() -> bool:
    """Whether .venv is whole and meets the pins."""
    if not INTERPRETER.exists() or UNFINISHED.exists():
        return False
    done = subprocess.run([INTERPRETER, __file__, "--check"], capture_output=True)
    return done.returncode == 0


@contextmanager
def alone() -> Iterator[None]:
    """Held by one process at a time; given back by the system if that process dies."""
    with open(ROOT / ".venv.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_venv() -> None:
    """Make .venv where there is none that works, and install the pins into it."""
    works = INTERPRETER.exists() and not subprocess.run([INTERPRETER, "-m", "pip", "--version"], capture_output=True).returncode
    if UNFINISHED.exists() or (VENV.exists() and not works):
        say("an earlier set-up did not finish: making .venv anew")
        shutil.rmtree(VENV)
        works = False
    VENV.mkdir(exist_ok=True)
    UNFINISHED.touch()
    if not works:
        if importlib.util.find_spec("ensurepip") is None:
            raise SystemExit(f"{sys.executable} cannot make virtual environments; install them (Debian, Ubuntu: "
                             "apt-get install python3-venv) and start again")  # fmt: skip
        say(f"making .venv with Python {sys.version.split()[0]}")
        venv.create(VENV, with_pip=True)
    say("installing requirements.txt into .venv (once; torch is large, so this takes minutes)")
    install()
    UNFINISHED.unlink()
    say("environment ready")


def install() -> None:
    """pip, of whose words the pinned packages and errors are shown; all of them are in .venv/pip.log."""
    command = [INTERPRETER, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "-r", REQUIREMENTS]
    lines: list[str] = []
    with open(VENV / "pip.log", "w") as log:
        pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        for line in pip.stdout:
            log.write(line)
            lines.append(line.rstrip())
            if found := re.match(r"Collecting ([\w.-]+==[\w.]+)|Processing .*/([\w.]+-[\w.+]+)-\S+\.whl", line):
                say(f"  {found[1] or found[2]}")
            elif line.startswith("Installing collected packages"):
                say(f"  unpacking {line.count(',') + 1} packages")
    if pip.wait() != 0:
        raise SystemExit("\n".join([*lines[-15:], f"pip failed; all it said is in {VENV / 'pip.log'}"]))


def say(text: str) -> None:
    print(f"[setup] {text}", file=sys.stderr, flush=True)


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return bool(unsatisfied())
    if not unsatisfied():
        print(sys.executable)
        return 0
    if not venv_is_ready():
        with alone():
            if not venv_is_ready():
                make_venv()
    print(os.fspath(INTERPRETER))
    return 0


if __name__ == "__main__":
    sys.exit(main())
