"""Ranks of a group with unequal numbers of pages, as GPUs with unequal memory free have them. With
TP attention a page id holds on all ranks, so the group uses as many as its smallest rank has."""
import pytest

import build
import goldens
import sluice
from harness import Cluster

MODEL = goldens.GOLDEN / "v2"
PAGE_TOKENS = 64
FEWER, MORE = 80, 96
ROOM = FEWER * PAGE_TOKENS  # tokens


class UnevenCluster(Cluster):
    """Rank r of pool `uneven` has pages[r] pages."""

    def __init__(self, uneven, pages, **options):
        super().__init__(MODEL, prefill=[2], decode=[2], attention="tp", **options)
        self.uneven, self.pages = uneven, pages

    def node_flags(self, place, **changes):
        if place.pool == self.uneven:
            changes = {"pages": self.pages[place.rank]} | changes
        return super().node_flags(place, **changes)


def generate(cluster, first_token, prompt_len, max_tokens=4):
    prompt = [(first_token + i) % 256 for i in range(prompt_len)]
    return cluster.client.generate(prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True,
                                   timeout_s=120 * build.patience())


def check_golden(cluster):
    for case in goldens.load(MODEL)[:4]:
        result = goldens.start(cluster.client, case, 60 * build.patience()).result()
        assert goldens.compare(case, result)[0] == []


@pytest.mark.parametrize("pages", [(MORE, FEWER), (FEWER, MORE)], ids=str)
@pytest.mark.parametrize("pool", ["decode", "prefill"])
def test_group_uses_the_pages_of_its_smallest_rank(built, pool, pages):
    with UnevenCluster(pool, pages) as cluster:
        status = cluster.wait_idle()  # free pages are all that it has
        assert [r.pages_total for r in status.ranks if r.pool == pool] == [FEWER, FEWER]
        check_golden(cluster)
        # More than fit at once: they take every page that there is, and wait for more.
        streams = [generate(cluster, n, 10 * PAGE_TOKENS, 20) for n in range(10)]
        # One that needs all of them, and one that needs one more.
        streams.append(generate(cluster, 3, ROOM - 4))
        with pytest.raises(sluice.RequestError, match=rf"limit: .*\b80\b.* largest {pool} rank"):
            generate(cluster, 3, ROOM + 1).result()
        assert [len(s.result().tokens) for s in streams] == [20] * 10 + [4]
        check_golden(cluster)
        cluster.check()
