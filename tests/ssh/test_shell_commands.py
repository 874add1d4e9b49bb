"""ssh, exec, rsync-up, rsync-down and port-forward, typed by a user against real sshd processes."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from spotfleet.api.access import ssh, targets
from spotfleet.model import CloudHost, Role, SshAccess
from spotfleet.ssh import fanout, keys
from tests.support.shell.loopback_sshd import LIMIT_S, free_port, until
from tests.support.shell.shell_fleet import CLI, Laptop, listed

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh (Debian: openssh-client)")
TOOLS = ("sh", "bash", "cat", "chmod", "env", "ls", "mkdir", "mv", "ssh", "tar", "timeout", "tty", "sleep")


def tools(folder: Path, *more: str) -> str:
    """A PATH with little in it: no rsync."""
    folder.mkdir()
    for name in (*TOOLS, *more):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return str(folder)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- ssh


def test_ssh_runs_a_command_on_the_machine_and_passes_its_exit_code(rack):
    done = rack.laptop.starts("ssh", "digits", "--", "echo", "$SSH_CONNECTION", ";", "exit", "7")
    assert (done.code, done.out.split()[2]) == (7, "127.0.7.1")


def test_a_machine_is_named_by_fleet_alias_host_or_address(rack):
    head, first, second = ssh.read_targets(rack.laptop.folder).ways
    for target, way in (("", head), ("digits", head), ("digits-w1", second), ("digits-1", first), ("127.0.7.2", first)):
        assert targets.find_target(rack.laptop.house, target, print)[1] == way
    for host, way in (("", head), ("dispatcher", head), ("w1", second), ("digits-w1", second), ("digits-2", second)):
        assert targets.fleet_target(rack.laptop.folder, host, print) == way


def test_plain_ssh_knows_the_names_and_the_second_worker_is_entered_through_the_dispatchers_machine(rack, tmp_path):
    def entered() -> int:
        return (rack.dispatcher.folder / "log").read_text().count("Accepted publickey")

    config, before = rack.laptop.user_config, entered()
    theirs = tmp_path / "theirs"  # OpenSSH looks for ~ in /etc/passwd, not in HOME, so it is named here
    theirs.write_text(config.read_text() + "Host *\n  Port 1\n  User nobody\n  ProxyCommand false\n")
    for alias in ("digits", "digits-w0", "digits-w1"):
        done = subprocess.run(["ssh", "-F", theirs, "-n", alias, "echo", "in"], capture_output=True, text=True,
                              timeout=LIMIT_S)
        assert done.stdout == "in\n", done.stderr
    assert entered() - before == 2  # for itself, and as the way to the second worker


def test_a_terminal_is_asked_for_as_of_ssh(rack):
    done = rack.laptop.starts("ssh", "digits", "-tt", "tty; exit 3")
    assert done.code == 3 and done.out.startswith("/dev/pts/")


def test_a_replaced_host_is_known_at_once_and_a_gone_one_no_more(rack, types):
    head, _, second = rack.hosts()
    rack.laptop.list(head, second)
    done = types("exec", "--host", "w0", "-o", "json", "--", "echo $SSH_CONNECTION")
    assert [line["stdout"].split()[2] for line in json.loads(done.out)] == ["127.0.7.3"]
    done = types("ssh", "digits-w1")
    assert done.code == 1 and "no fleet and no machine 'digits-w1'" in done.err and "digits-w0" in done.err


def test_where_the_provider_does_not_answer_the_machines_are_those_that_were_known(rack, types):
    rack.laptop.listing.unlink()
    done = types("exec", "--host", "w0", "-o", "json", "--", "true")
    assert done.code == 0 and "as last known" in done.err


def test_a_changed_host_key_is_refused_by_every_command(rack, types):
    worker = rack.workers[0]
    worker.stop()
    worker.host_key = keys.derived_host_key("another secret", "impostor")
    worker.start()
    done = types("exec", "--host", "w0", "-o", "json", "--", "true")
    (found,) = json.loads(done.out)
    assert found["exit_code"] == 255 and "another host key than the one that is pinned" in found["trouble"]
    done = types("rsync-up", "--host", "w0", ".", "x")
    assert done.code == 1 and "another host key than the one that is pinned" in done.err


def test_a_fleet_of_processes_has_no_machines_to_enter_and_says_what_to_use_instead(laptop, types):
    folder = laptop.make_fleet()
    folder.save_keys(folder.keys.__class__("admin", "secret", folder.keys.cert, folder.keys.key))
    for words in (["ssh", "digits"], ["exec", "--all", "--", "true"], ["rsync-up", ".", "x"], ["port-forward", "1"]):
        done = types(*words)
        assert done.code == 2 and "run the command here" in done.err, words


# --- exec


def test_exec_runs_in_the_login_shell_of_the_dispatchers_machine_unless_another_is_named(rack, types):
    done = rack.laptop.starts("exec", "digits", "--", "echo $SSH_CONNECTION; exit 9")
    assert (done.code, done.out.split()[2]) == (9, "127.0.7.1")
    done = types("exec", "digits", "--host", "w1", "-o", "json", "--", "printf", "%s|", "a b", "$HOME", "'")
    assert [line["stdout"] for line in json.loads(done.out)] == ["a b|$HOME|'|"]


def test_exec_all_reaches_every_worker_at_once_names_its_lines_and_passes_the_first_failure(rack, types):
    meet = rack.laptop.home / "meet"
    meet.mkdir()
    here = shlex.quote(str(meet))
    both = f"cd {here} && touch $$; for i in $(seq 600); do [ $(ls | wc -l) = 2 ] && break; sleep 0.05; done"
    fail = 'case "$SSH_CONNECTION" in *127.0.7.3*) exit 5;; esac'
    command = f"{both}; [ $i -lt 600 ] || exit 99; echo $SSH_CONNECTION; echo oh >&2; {fail}"
    done = types("exec", "--all", "--", command)
    assert done.code == 5, done.err
    shown = sorted((line.split()[0], line.split()[3]) for line in done.out.splitlines())
    assert shown == [("digits-w0:", "127.0.7.2"), ("digits-w1:", "127.0.7.3")]
    assert {"digits-w0: oh", "digits-w1: oh", "digits-w1: ended with status 5"} == set(done.err.splitlines())


def test_a_host_that_hangs_or_is_away_holds_no_other_back(rack, types, tmp_path):
    head, first, second = rack.hosts()
    door = SshAccess("127.0.7.9", "u", free_port("127.0.7.9"), first.ssh.host_keys)
    rack.laptop.list(head, first, second, listed("digits-3", Role.WORKER, door, since=9.0))
    rack.workers[0].freeze()

    def answer_at_last() -> None:
        until((tmp_path / "second").exists, "the second waits for the first")
        rack.workers[0].thaw()

    thread = threading.Thread(target=answer_at_last)
    thread.start()
    done = types("exec", "--all", "-o", "json", "--",
                 f"case $SSH_CONNECTION in *127.0.7.3*) touch {tmp_path}/second;; esac; echo hello")
    thread.join()
    found = {line["host"]: line for line in json.loads(done.out)}
    assert [found[h]["stdout"] for h in ("digits-1", "digits-2", "digits-3")] == ["hello\n", "hello\n", ""]
    assert found["digits-3"]["exit_code"] == done.code == 255
    assert "runs no sshd at that port" in found["digits-3"]["trouble"]


def test_a_host_that_hangs_for_too_long_is_given_up(rack, monkeypatch):
    monkeypatch.setattr("spotfleet.ssh.fanout.GRACE_S", 0.3)
    rack.workers[0].freeze()
    place = targets.fanout_target(rack.laptop.folder, ssh.read_targets(rack.laptop.folder).workers[0])
    (found,) = fanout.run([place], "echo hello", 0.2, lambda *_: None)
    assert (found.exit_code, found.stdout, found.trouble) == (124, "", "not done within 0.2 s")


def test_a_time_limit_ends_the_command_there_too(rack, types):
    mark = "86399.25"
    done = types("exec", "--host", "w0", "--timeout", "1s", "--", f"sleep {mark}")
    assert done.code == 124 and "digits-w0: not done within 1 s" in done.err
    until(lambda: mark not in str([p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]), "it goes on there")


@pytest.mark.parametrize(("words", "said"), [
    (["exec"], "which command"), (["exec", "digits", "--"], "which command"),
    (["exec", "a", "b", "--", "true"], "stands where only a fleet may"),
    (["exec", "--all", "--host", "w0", "--", "true"], "exclude each other"),
    (["exec", "--timeout", "soon", "--", "true"], "--timeout"),
    (["rsync-up", "x"], "expected SRC and DST"), (["port-forward"], "which port"),
    (["port-forward", "digits", "70000"], "expected PORT"), (["port-forward", "digits", "1:a:b"], "expected PORT")])
def test_what_cannot_be_meant_is_refused_with_an_example(laptop, types, words, said):
    laptop.make_fleet()
    done = types(*words)
    assert done.code == 2 and said in done.err and "hint: " in done.err


# --- files


@pytest.mark.parametrize("without", ["", "here", "there"])
def test_files_go_up_and_come_down_by_rsync_or_where_there_is_none_by_tar(rack, types, tmp_path, monkeypatch, without):
    if not without and shutil.which("rsync") is None:
        pytest.skip("needs rsync (Debian: rsync)")
    worker = rack.workers[0]
    if without == "there":
        worker.stop()
        worker.path = tools(tmp_path / "few")
        worker.start()
    elif without == "here":
        monkeypatch.setenv("PATH", tools(tmp_path / "few"))
    source, far, home = tmp_path / "my source", tmp_path / "far side", rack.laptop.home
    (source / "sub").mkdir(parents=True)
    far.mkdir()
    (source / "a.txt").write_bytes(b"a")
    (source / "sub" / "b.bin").write_bytes(os.urandom(100_000))
    (source / "sub" / "run.sh").write_bytes(b"#!/bin/sh\n")
    (source / "sub" / "run.sh").chmod(0o755)
    for odd in ("-rf", "it's * $HOME \n \"odd\"", "\u00fcn\u00ef:code", " "):
        (source / "sub" / odd).write_text(odd)

    def copies(*words: str) -> str:
        done = types(*words, "--host", "w0")
        assert done.code == 0, done.err
        return done.err

    said = copies("rsync-up", "digits", f"{source}/", f"{far}/inner")
    assert ("copying with tar" in said) == bool(without)
    copies("rsync-up", str(source), str(far))
    assert tree(far / "inner") == tree(far / "my source") == tree(source)
    assert (far / "inner" / "sub" / "run.sh").stat().st_mode & 0o777 == 0o755
    copies("rsync-up", f"{source}/sub/..", f"{far}/dots")  # for rsync, what is in it
    assert tree(far / "dots") == tree(source)
    copies("rsync-up", str(source / "a.txt"), f"{far}/renamed.txt")
    assert (far / "renamed.txt").read_bytes() == b"a"
    copies("rsync-down", f"{far}/inner/", "back")
    copies("rsync-down", f"{far}/inner", ".")
    copies("rsync-down", f"{far}/inner/.", "dot")
    assert tree(home / "dot") == tree(source)
    copies("rsync-down", f"{far}/renamed.txt", "alone.txt")
    assert tree(home / "back") == tree(home / "inner") == tree(source)
    assert (home / "alone.txt").read_bytes() == b"a"


def test_all_hosts_send_theirs_into_a_folder_of_each_host(rack, types, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "log").write_text("x")
    done = types("rsync-down", "--all", f"{tmp_path}/out/", "got")
    assert done.code == 0, done.err
    assert tree(rack.laptop.home / "got") == {"digits-w0/log": b"x", "digits-w1/log": b"x"}


def test_what_is_not_there_or_fails_on_one_host_is_named(rack, types, tmp_path):
    done = types("rsync-up", "digits", "nothing", "x")
    assert done.code == 2 and "nothing does not exist here" in done.err
    done = types("rsync-down", "digits", f"{tmp_path}/nothing", "x")
    assert done.code == 1 and "nothing" in done.err
    if shutil.which("rsync"):
        done = types("rsync-down", "--all", f"{tmp_path}/nothing", "x")
        assert f"error: no such file: {tmp_path}/nothing (on digits-w0, digits-w1)\n" in done.err
        assert "hint: correct the path" in done.err and "again" not in done.err
    rack.workers[0].stop()
    (tmp_path / "file").write_text("x")
    done = types("rsync-up", "--all", str(tmp_path / "file"), f"{tmp_path}/copy")
    assert done.code == 1 and "digits-w0" in done.err and "digits-w1: done" in done.err
    assert (tmp_path / "copy").read_text() == "x"


# --- ports


def test_a_port_here_leads_to_one_there_until_it_is_interrupted(rack):
    with socket.create_server(("127.0.7.3", 0)) as far:
        near, port = free_port("127.0.0.1"), far.getsockname()[1]
        process = subprocess.Popen([CLI, "port-forward", "digits", "--host", "w1", f"{near}:127.0.7.3:{port}"],
                                   env=rack.laptop.environment, stdin=subprocess.DEVNULL)
        try:
            streams = []
            until(lambda: streams.append(connected(near)) or streams[-1], "the port does not open")
            with streams[-1] as ours, far.accept()[0] as theirs:
                ours.sendall(b"through")
                assert theirs.recv(100) == b"through"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_S)
    assert connected(near) is None


def connected(port: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.create_connection(("127.0.0.1", port), 5.0)
    return None


# --- the user's config


def test_a_fleets_end_leaves_the_users_ssh_as_it_was(laptop: Laptop):
    laptop.make_fleet()
    config = laptop.user_config
    config.parent.mkdir(mode=0o700)
    config.write_bytes(b"Host digits\n  User me")
    told: list[str] = []
    ssh.refresh(laptop.folder, [listed("digits-d-0", Role.DISPATCHER, SshAccess("10.0.0.1", "u"))], told.append)
    assert ssh.included(laptop.folder) and config.read_bytes().endswith(b"Host digits\n  User me")
    assert told == [f"note: digits in {config} now means this fleet's, until its end"]
    assert (laptop.folder.path / "ssh" / "id_ed25519").stat().st_mode & 0o777 == 0o600
    ssh.remove(laptop.folder)
    assert config.read_bytes() == b"Host digits\n  User me"
    assert not (laptop.folder.path / "ssh").exists() and not ssh.included(laptop.folder)


def test_plain_ssh_learns_of_other_workers_when_somebody_looks_and_asks_every_machine_only_then(laptop, monkeypatch):
    laptop.make_fleet()
    head, *workers = [listed(name, role, SshAccess(f"10.0.0.{i}", "u")) for i, (name, role) in enumerate([
        ("digits-d-0", Role.DISPATCHER), ("digits-0", Role.WORKER), ("digits-1", Role.WORKER)])]
    laptop.enters(head, workers[0])
    asked: list[int] = []

    def look() -> list[CloudHost]:
        asked.append(1)
        return [head, workers[1]]

    ssh.refresh_if_changed(laptop.folder, ["digits-0"], look)
    ssh.refresh_if_changed(laptop.folder, ["digits-1"], look)  # it was looked up a moment ago
    assert asked == []
    monkeypatch.setattr(ssh, "FOLLOW_S", 0.0)
    ssh.refresh_if_changed(laptop.folder, ["digits-1"], look)
    ssh.refresh_if_changed(laptop.folder, ["digits-1"], look)
    assert asked == [1] and "HostName 10.0.0.2" in ssh.config(laptop.folder).read_text()
    assert [way.aliases for way in ssh.read_targets(laptop.folder).ways] == [("digits", "digits-d-0"),
                                                                      ("digits-w0", "digits-1")]
