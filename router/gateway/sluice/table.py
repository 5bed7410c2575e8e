"""A status reply as an aligned text table."""

COLUMNS = (("POOL", "<"), ("GROUP", ">"), ("RANK", ">"), ("STATE", "<"), ("PAGES FREE/TOTAL", ">"),
           ("QUIESCING", ">"), ("RUNNING", ">"), ("QUEUED TOKENS", ">"), ("TOKENS OUT", ">"),
           ("STEPS", ">"), ("HEARTBEAT", ">"))
POOLS = ("prefill", "decode")


def align(rows, directions):
    widths = [max(len(row[i]) for row in rows) for i in range(len(directions))]
    lines = []
    for row in rows:
        cells = [f"{cell:{d}{w}}" for cell, d, w in zip(row, directions, widths)]
        lines.append("  ".join(cells).rstrip())
    return lines


def rank_row(rank):
    return (rank.pool, str(rank.group), f"{rank.rank}/{rank.tp}", rank.state,
            f"{rank.pages_free}/{rank.pages_total}", str(rank.pages_quiescing), str(rank.running),
            str(rank.queued_tokens), str(rank.tokens_out), str(rank.progress),
            f"{rank.heartbeat_age_ms} ms")


def pool_line(pool, ranks):
    """Groups are ready when every one of their ranks is there and ready."""
    groups = {}
    for rank in ranks:
        groups.setdefault(rank.group, []).append(rank)
    ready = sum(len(g) == g[0].tp and all(r.state == "ready" for r in g) for g in groups.values())
    free, total = sum(r.pages_free for r in ranks), sum(r.pages_total for r in ranks)
    queued = f", {sum(r.queued_tokens for r in ranks)} tokens queued" if pool == "prefill" else ""
    return (f"{pool + ' pool':12}  {ready} of {len(groups)} groups ready, {len(ranks)} ranks, "
            f"{free} of {total} pages free, {sum(r.running for r in ranks)} running{queued}")


def format_status(status):
    lines = [f"{'model':12}  {status.model or '-'}",
             f"{'uptime':12}  {status.uptime_ms / 1000:.1f} s",
             f"{'requests':12}  {status.requests_waiting} waiting, "
             f"{status.requests_running} running, {status.requests_finished} finished, "
             f"{status.requests_failed} failed, {status.requests_canceled} canceled, "
             f"{status.requests_refused} refused"]
    for pool in POOLS:
        lines.append(pool_line(pool, [r for r in status.ranks if r.pool == pool]))
    if not status.ranks:
        return "\n".join(lines)
    ranks = sorted(status.ranks, key=lambda r: (POOLS.index(r.pool), r.group, r.rank))
    rows = [tuple(name for name, _ in COLUMNS)] + [rank_row(r) for r in ranks]
    return "\n".join(lines + [""] + align(rows, [d for _, d in COLUMNS]))
