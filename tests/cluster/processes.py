"""Starting, watching and stopping single programs, each with its log in a file of its own."""
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

TAIL_LINES = 30
# What no program may ever print, whoever asked it for what.
REPORTS = re.compile(r"ERROR: AddressSanitizer|runtime error:|WARNING: ThreadSanitizer|"
                     r"ERROR: LeakSanitizer|SUMMARY: \w*Sanitizer|assertion failed:|"
                     r"UCX  (?:ERROR|FATAL)|==== backtrace \(tid|Assertion .*failed|"
                     r"(?:==|\] )Caught signal")
# A rank's last resort, when something that it waits for never ends.
ALARM = "not gone in time"
LOOK_AGAIN_S = 0.02


class HarnessError(AssertionError):
    """A program or a cluster did not do what it must; the text carries the logs' tails."""


class Program:
    """One process of ours. Its exit wakes waiters through a pidfd, so nobody polls for it."""

    def __init__(self, name, argv, log_path, env):
        self.name = name
        self.argv = [str(a) for a in argv]
        self.log_path = Path(log_path)
        self.may_die = False  # a test has killed it, or expects it to give up
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=subprocess.STDOUT, env=env)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def exit_code(self):
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def wait(self, timeout_s):
        """Its exit code, or None if it still runs after `timeout_s`."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        poller.poll(max(0, int(timeout_s * 1000)))
        return self._process.poll()

    def signal(self, number):
        if self.exit_code is None:
            self._process.send_signal(number)

    def kill(self):
        """Ends it for certain, also when it is stopped."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def release(self):
        os.close(self.pidfd)

    def log(self):
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def tail(self, lines=TAIL_LINES):
        text = "\n".join(self.log().splitlines()[-lines:])
        return f"---- {self.name} (pid {self.pid}, exit {self.exit_code}), end of log ----\n{text}"

    def reports(self):
        """Lines of its log that report a sanitizer's finding or a failed assertion."""
        return [line for line in self.log().splitlines() if REPORTS.search(line)]

    def ended_by_alarm(self):
        return ALARM in self.log()

    def memory_bytes(self):
        """Resident set size."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def wait_until(condition, timeout_s, what, watched=()):
    """Returns condition()'s first true value. It is looked at again every 20 ms, or at once when a
    watched program ends; fails early when one ends that should not."""
    deadline_s = time.monotonic() + timeout_s
    poller = select.poll()
    for program in watched:
        if program.exit_code is None:
            poller.register(program.pidfd, select.POLLIN)
    while True:
        value = condition()
        if value:
            return value
        dead = [p for p in watched if p.exit_code is not None and not p.may_die]
        if dead:
            raise HarnessError(f"{dead[0].name} ended with {dead[0].exit_code} while waiting for "
                               f"{what}\n{dead[0].tail()}")
        if time.monotonic() > deadline_s:
            raise HarnessError(f"waited {timeout_s:.0f} s for {what}")
        for fd, _ in poller.poll(LOOK_AGAIN_S * 1000):
            poller.unregister(fd)
