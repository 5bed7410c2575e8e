"""What all tests share: clusters that live as long as tests want the same one, checks after each
test, and the ends of the logs in the report of a failed one."""
import pytest

import build
import harness


@pytest.fixture(scope="session")
def built():
    """Skips nothing: without the programs a cluster test fails, and says what is missing."""
    if not build.programs_exist():
        pytest.fail(f"no programs in {build.build_dir()}: build first, or set SLUICE_BUILD_DIR")


@pytest.fixture(scope="session")
def cluster_cache(built):
    """Keeps the last cluster; another one is started when other settings are asked for."""
    cache = ClusterCache()
    yield cache
    cache.close()


class ClusterCache:
    def __init__(self):
        self._key, self._cluster = None, None

    def get(self, model, **options):
        key = (str(model), repr(sorted(options.items())))
        if key != self._key:
            self.close()
            self._cluster = harness.Cluster(model, **options).__enter__()
            self._key = key
        return self._cluster

    def drop(self):
        """Ends the cluster without its last checks: a test has failed on it."""
        if self._cluster is not None:
            cluster, self._cluster, self._key = self._cluster, None, None
            cluster.__exit__(AssertionError, None, None)

    def close(self):
        if self._cluster is not None:
            cluster, self._cluster, self._key = self._cluster, None, None
            cluster.__exit__(None, None, None)


@pytest.fixture
def start_cluster(cluster_cache, request):
    """start_cluster(model, **options): a running cluster, shared with earlier tests that asked for
    the same. After the test it must be idle, whole and silent; after a failed one it is dropped."""
    used = []

    def start(model, **options):
        cluster = cluster_cache.get(model, **options)
        used.append(cluster)
        return cluster
    yield start
    if request.node.stash.get(FAILED, False):
        cluster_cache.drop()
        return
    for cluster in used[-1:]:
        try:
            cluster.check()
        except BaseException as error:
            tails = cluster.tails()
            cluster_cache.drop()
            raise harness.HarnessError(f"after the test: {error}\n{tails}") from error


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed:
        item.stash[FAILED] = True
        for cluster in harness.LIVE:
            report.sections.append(("logs of the cluster", cluster.tails()))
