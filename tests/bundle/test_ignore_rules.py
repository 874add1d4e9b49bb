"""Which names an ignore file leaves out: what the real git says of them, over random trees and patterns."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotfleet.bundle import ignore

GIT = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed here")
ALPHABET = b"ab.-!#[]*?\\/ ^:\xc3\xa9"
NAMES = st.sampled_from([b"a", b"b", b"ab", b"ba", b"a.b", b"-", b"!a", b"#a", b"a b", b"a ", b"[a]", b"a*", b"\\a",
                         b"\xc3\xa9", b"A", b"aab", b"]", b"^"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(b"/".join)
WORDS = st.sampled_from([b"a", b"b", b"ab", b"*", b"**", b"/", b"?", b"[ab]", b"[!a]", b"[^a]", b"[a-b]", b"[]a]",
                         b"[[:alpha:]]", b"[[:nope:]]", b"[a", b"\\a", b"\\*", b"\\", b"!", b"#", b" ", b"\\ ", b"**/",
                         b"/**", b"a/", b"*.b", b"\r", b"[b-a]", b"[a\\]]", b"[-a]", b"]", b"\xc3\xa9", b"[\xc3\xa9]"])
PATTERNS = st.one_of(st.lists(WORDS, min_size=1, max_size=5).map(b"".join),
                     st.lists(st.sampled_from([bytes([c]) for c in ALPHABET]), min_size=1, max_size=6).map(b"".join))
FILES = st.lists(PATTERNS, min_size=1, max_size=4).map(b"\n".join)


def ours(path: bytes, above: dict[bytes, bytes]) -> bool:
    """Is the file `path` left out, with these ignore files by folder?"""
    rules: list[ignore.Rules] = []
    parts = path.split(b"/")
    for depth in range(len(parts)):
        folder = b"/".join(parts[:depth])
        if folder in above:
            rules.append(ignore.parse(above[folder], folder + b"/" if folder else b""))
        if ignore.ignored(b"/".join(parts[:depth + 1]), depth + 1 < len(parts), rules):
            return True
    return False


class Git:
    """`git check-ignore` over paths that need not exist; the ignore files do."""

    def __init__(self, top: Path) -> None:
        self.top = top
        env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": str(top)}
        self.env = {k: v for k, v in env.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
        subprocess.run(["git", "init", "-q", str(top)], check=True, env=self.env)

    def ignores(self, paths: list[bytes], above: dict[bytes, bytes]) -> set[bytes]:
        for path in self.top.iterdir():
            if path.name != ".git":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in paths:
            where = os.path.join(os.fsencode(self.top), path)
            os.makedirs(os.path.dirname(where), exist_ok=True)
            open(where, "wb").close()
        for folder, text in above.items():
            where = os.path.join(os.fsencode(self.top), folder)
            if os.path.isdir(where):
                with open(os.path.join(where, b".gitignore"), "wb") as file:
                    file.write(text)
        asked = b"".join(b"./" + path + b"\0" for path in paths)
        done = subprocess.run(["git", "check-ignore", "--no-index", "-z", "--stdin"], cwd=self.top, input=asked,
                              capture_output=True, env=self.env, check=False)
        assert done.returncode in (0, 1), done.stderr
        return {path.removeprefix(b"./") for path in done.stdout.split(b"\0") if path}


def tree(paths: list[bytes]) -> list[bytes]:
    """Those that can be files of one tree: none is the folder of another, in the order given."""
    kept: list[bytes] = []
    for path in paths:
        if not any(k == path or k.startswith(path + b"/") or path.startswith(k + b"/") for k in kept):
            kept.append(path)
    return kept


@pytest.fixture(scope="module")
def git(tmp_path_factory) -> Git:
    return Git(tmp_path_factory.mktemp("git"))


@GIT
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PATHS, min_size=5, max_size=25), FILES, st.one_of(st.none(), st.tuples(NAMES, FILES)))
def test_what_git_ignores_and_nothing_else_stays_at_home(git, paths, top, inner):
    above = {b"": top} | ({inner[0]: inner[1]} if inner else {})
    files = tree(paths)
    assert {path for path in files if ours(path, above)} == git.ignores(files, above)


@pytest.mark.parametrize(("text", "left_out"), [
    (b"foo**/bar\n", {b"foox/y/bar", b"foo/bar"}),  # so git reads it, whatever its manual says
    (b"a/**/b\n", {b"a/b", b"a/x/b", b"a/x/y/b"}),
    (b"*\n!*/\n!*.py\n", {b"a.txt", b"d/a.txt"}),
    (b"/*.txt\n", {b"a.txt"}),
    (b"\xef\xbb\xbfa.txt\r\n", {b"a.txt", b"d/a.txt"}),
    (b"caf?\n", {b"cafe"}),  # one byte, not one letter
    (b"trailing \nkept\\ \n", {b"trailing", b"kept "}),
])
@GIT
def test_the_fine_print_of_gits_patterns(git, text, left_out):
    files = [b"foox/y/bar", b"foo/bar", b"a/b", b"a/x/b", b"a/x/y/b", b"a.txt", b"d/a.txt", b"d/a.py", b"cafe",
             "café".encode(), b"trailing", b"kept "]
    if text.startswith(b"*"):
        files = [b"a.txt", b"d/a.txt", b"d/a.py"]
    assert {path for path in files if ours(path, {b"": text})} == left_out == git.ignores(files, {b"": text})


def test_an_ignore_file_that_is_a_link_is_not_followed_and_one_that_is_huge_is_read_in_part(tmp_path):
    (tmp_path / "rules").write_text("a\n")
    (tmp_path / ".gitignore").symlink_to("rules")
    assert ignore.read(str(tmp_path), b"") == []
    (tmp_path / ".gitignore").unlink()
    (tmp_path / ".gitignore").write_bytes(b"a\n" + b"#" * ignore.LARGEST_BYTES)
    assert ignore.ignored(b"a", False, ignore.read(str(tmp_path), b""))
