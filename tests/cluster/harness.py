"""A whole cluster of real programs on ephemeral ports.

    with Cluster(MODEL, prefill=[2, 2], decode=[1]) as cluster:
        cluster.client.generate([1, 2, 3], max_tokens=4).result()

`prefill` and `decode` list the groups of a pool by their size: [2, 2] is two groups of two ranks.
Everything waits on conditions, by asking the router for its status. At the end each program gets
SIGTERM and must exit 0 by itself, and no log may hold a sanitizer's report.
"""
import collections
import shutil
import signal
import tempfile
import time
from pathlib import Path

import build
import sluice
from processes import HarnessError, Program, wait_until

START_S, IDLE_S, STOP_S = 30, 30, 20

LIVE = []  # clusters that run now, for the report of a failed test
Place = collections.namedtuple("Place", "pool group rank")


class Cluster:
    """Flags of the nodes are keywords with underscores; `router_flags`, `prefill_flags` and
    `decode_flags` are for one kind of program. Unless told otherwise, decode schedules
    asynchronously, as it does on GPUs, and prefill sends latents in several runs of layers, as of
    large models (None: the default)."""

    def __init__(self, model, prefill=(1,), decode=(1,), *, attention="dp", mla_prefill=None,
                 async_scheduling="on", push_layers=2, token_budget=None, prefill_pages=256,
                 decode_pages=256, heartbeat_ms=100, router_flags=None, prefill_flags=None,
                 decode_flags=None, models=None):
        self.model = Path(model)
        self.models = models or {}  # pool -> another checkpoint
        self.sizes = {"prefill": tuple(prefill), "decode": tuple(decode)}
        common = {"attention": attention, "device": "cpu", "threads": 1}
        self.flags = {
            "router": {"heartbeat_ms": heartbeat_ms} | (router_flags or {}),
            "prefill": common | {"pages": prefill_pages, "mla_prefill": mla_prefill,
                                 "token_budget": token_budget or 2048,
                                 "push_layers": push_layers} | (prefill_flags or {}),
            "decode": common | {"pages": decode_pages, "max_batch": 64,
                                "async_scheduling": async_scheduling} | (decode_flags or {}),
        }
        self.router = None
        self.nodes = {}    # Place -> the Program there now
        self.retired = []  # programs that were there before
        self.client = None
        self.baseline_failures = 0

    # ---- life ----

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="sluice-test-"))
        LIVE.append(self)
        try:
            self.start_router()
            for pool, sizes in self.sizes.items():
                for group in range(len(sizes)):
                    self.start_group(pool, group)
            self.wait_ready()
        except BaseException as error:
            tails = self.tails()  # before the logs go
            self._abandon()
            if isinstance(error, HarnessError):
                raise HarnessError(f"{error}\n{tails}") from None
            raise
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.stop()
        finally:
            self._abandon()

    def _abandon(self):
        if self.client is not None:
            self.client.close()
        for program in self.programs(everyone=True):
            program.kill()
            program.release()
        if self in LIVE:
            LIVE.remove(self)
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self):
        """SIGTERM to the nodes, then to the router; each must exit 0."""
        self.client.close()
        for group in (list(self.nodes.values()), [self.router]):
            for program in group:
                program.signal(signal.SIGTERM)
            for program in group:
                self._check_end(program)
        self.check_logs()

    def _check_end(self, program):
        code = program.wait(STOP_S * build.patience())
        if code is None:
            raise HarnessError(f"{program.name} still runs {STOP_S * build.patience()} s after "
                               f"SIGTERM\n{program.tail()}")
        if code != 0 and not program.may_die:
            raise HarnessError(f"{program.name} exited {code} after SIGTERM\n{program.tail()}")
        if program.ended_by_alarm() and not program.may_die:
            raise HarnessError(f"{program.name} was ended by its alarm after SIGTERM\n"
                               f"{program.tail()}")

    # ---- programs ----

    def command(self, kind, flags):
        argv = [build.program(f"sluice-{kind}")]
        for name, value in flags.items():
            if value is not None:
                argv += ["--" + name.replace("_", "-"), str(value)]
        return argv

    def start_program(self, name, kind, flags, environment=None):
        """Starts any program of the cluster's build, watched and cleaned up with the rest."""
        return Program(name, self.command(kind, flags), self.folder / f"{name}.log",
                       environment or build.environment())

    def start_router(self, **changes):
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        flags = {"client_bind": "tcp://127.0.0.1:0", "node_bind": "tcp://127.0.0.1:0",
                 "ready_file": ready} | self.flags["router"] | changes
        if self.router is not None:
            self.retired.append(self.router)
        self.router = self.start_program(f"router-{len(self.retired)}", "router", flags)
        wait_until(ready.exists, START_S * build.patience(), "the router's ready file",
                   [self.router])
        addresses = dict(line.split() for line in ready.read_text().splitlines())
        self.client_address, self.node_address = addresses["client"], addresses["node"]
        if self.client is not None:
            self.client.close()
        self.client = sluice.Client(self.client_address, connect_timeout_s=START_S)

    def node_flags(self, place, **changes):
        model = self.models.get(place.pool, self.model)
        tp = self.sizes[place.pool][place.group]
        return {"router": self.node_address, "model": model, "group": place.group,
                "rank": place.rank, "tp": tp} | self.flags[place.pool] | changes

    def node_environment(self, place):
        return build.environment()

    def start_rank(self, place, **changes):
        """Starts the program of one place; whatever was there before is remembered."""
        if place in self.nodes:
            self.retired.append(self.nodes[place])
        name = f"{place.pool}-{place.group}-{place.rank}-{len(self.retired)}"
        self.nodes[place] = self.start_program(name, place.pool, self.node_flags(place, **changes),
                                               self.node_environment(place))
        return self.nodes[place]

    def start_group(self, pool, group):
        for rank in range(self.sizes[pool][group]):
            self.start_rank(Place(pool, group, rank))

    def group(self, pool, group):
        return [p for place, p in self.nodes.items() if place[:2] == (pool, group)]

    def programs(self, everyone=False):
        now = [self.router, *self.nodes.values()]
        return [p for p in now + (self.retired if everyone else []) if p is not None]

    def signal(self, pool, group, rank, number):
        """A signal to one rank. When it kills or stops, the whole group may end."""
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGABRT):
            for program in self.group(pool, group):
                program.may_die = True
        self.nodes[Place(pool, group, rank)].signal(number)

    # ---- conditions ----

    def wait(self, condition, what, timeout_s=START_S):
        return wait_until(condition, timeout_s * build.patience(), what, self.programs())

    def status(self):
        return self.client.status(timeout_s=START_S * build.patience())

    def wait_status(self, accept, what, timeout_s=START_S):
        """The first status that accept(status) is true for."""
        def look():
            status = self.status()
            return status if accept(status) else None
        try:
            return self.wait(look, what, timeout_s)
        except HarnessError as error:
            raise HarnessError(f"{error}\nlast status: {self.status()}") from None

    def wait_ready(self):
        """Until every place is taken and ready, by heartbeats no older than this call: a rank that
        has just died counts as ready until its silence is noticed."""
        since_s, wanted = time.monotonic(), set(self.nodes)

        def ready(status):
            age_ms = (time.monotonic() - since_s) * 1000
            return wanted <= {Place(r.pool, r.group, r.rank) for r in status.ranks
                              if r.state == "ready" and r.heartbeat_age_ms < age_ms}
        return self.wait_status(ready, f"{len(wanted)} ready ranks")

    def wait_idle(self):
        """Until nothing waits or runs and every page is free, by figures no older than this call:
        a heartbeat from before could hide what the last request left behind."""
        since_s = time.monotonic()

        def idle(status):
            age_ms = (time.monotonic() - since_s) * 1000
            ranks = [r for r in status.ranks if r.state == "ready"]
            return (status.requests_waiting == status.requests_running == 0
                    and all(r.heartbeat_age_ms < age_ms and r.pages_free == r.pages_total
                            and r.running == r.queued_tokens == r.pages_quiescing == 0
                            for r in ranks))
        return self.wait_status(idle, "an idle cluster with every page free", IDLE_S)

    # ---- checks ----

    def check_logs(self):
        for program in self.programs(everyone=True):
            if program.reports():
                lines = "\n".join(program.reports()[:10])
                raise HarnessError(f"{program.name} reported:\n{lines}\n{program.tail(120)}")

    def check_alive(self):
        for program in self.programs():
            if program.exit_code is not None and not program.may_die:
                raise HarnessError(f"{program.name} ended with {program.exit_code}\n"
                                   f"{program.tail()}")

    def check_client(self):
        """Nothing came that belongs to no open request, save answers to late cancels."""
        errors = [e for e in self.client.unattributed if isinstance(e, sluice.ProtocolError)]
        if errors:
            raise HarnessError(f"the client saw protocol violations: {errors}")

    def check(self):
        """What must hold after every test."""
        self.check_alive()
        self.check_logs()
        self.wait_idle()
        self.check_client()

    def tails(self):
        return "\n".join(p.tail() for p in self.programs(everyone=True))
