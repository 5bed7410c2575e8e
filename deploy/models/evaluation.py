"""What the card reports: held-out bits and expert load, and the baselines on the same files."""

import lzma
import math

import numpy as np
import torch
import torch.nn.functional as F

WINDOW, STRIDE = 2048, 1024


class RouterTap:
    """Collects what each gate decided, by forward hooks, in the order of the layers."""

    def __init__(self, model):
        self.outputs = []
        self.gates = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
        for gate in self.gates:
            gate.register_forward_hook(lambda _m, _i, out: self.outputs.append(out))

    def drain(self):
        outputs, self.outputs = self.outputs, []
        return outputs


def windows(tokens, lengths, limit=None):
    """(ids, first scored target) of each window of each document.

    A document is <|begin|> text <|end|>; the text's tokens are scored, each once, with at least
    STRIDE tokens of context once the document is that long. Neither special token is scored.
    """
    ends = np.cumsum(lengths)
    for end, length in list(zip(ends, lengths))[:limit]:
        document = tokens[end - length:end - 1].astype(np.int64)
        for start in range(0, max(len(document) - STRIDE, 1), STRIDE):
            yield document[start:start + WINDOW], STRIDE if start else 1


@torch.no_grad()
def held_out(model, path, limit=None):
    """Sum of nats and count of scored tokens, and how often each expert was chosen."""
    torch.set_float32_matmul_precision("highest")
    model.config._experts_implementation = "eager"
    stream, device = np.load(path), model.device
    batch = 16 if device.type == "cuda" else 4
    tap, nats, count = RouterTap(model), 0.0, 0
    loads = torch.zeros(len(tap.gates), model.config.n_routed_experts, dtype=torch.long)
    # Longest first: batches of nearly equal lengths, hardly any padding.
    todo = sorted(windows(stream["tokens"], stream["lengths"], limit), key=lambda w: -len(w[0]))
    for start in range(0, len(todo), batch):
        group = todo[start:start + batch]
        ids = torch.zeros(len(group), len(group[0][0]), dtype=torch.long)
        scored, real = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids).bool()
        for row, (window, first) in enumerate(group):
            ids[row, :len(window)] = torch.from_numpy(window)
            scored[row, first:len(window)] = True
            real[row, :len(window)] = True
        ids, scored, real = ids.to(device), scored.to(device), real.to(device).flatten()
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        nats += float(loss.double()[scored[:, 1:].flatten()].sum())
        count += int(scored[:, 1:].sum())
        for layer, (_, _, chosen) in enumerate(tap.drain()):
            loads[layer] += torch.bincount(chosen[real].flatten().cpu(), minlength=loads.shape[1])
    share = loads.double() / loads.sum(1, keepdim=True)
    return {"nats": nats, "tokens": count, "load": share.tolist()}


def xz_bits(texts):
    """Bits of xz -9: of all the files as one stream, and of each file on its own."""
    blobs = [t.encode() for t in texts]
    joined = lzma.compress(b"".join(blobs), preset=9)
    return 8 * len(joined), 8 * sum(len(lzma.compress(b, preset=9)) for b in blobs)


class ByteModel:
    """Adaptive order-3 model over bytes: each order's counts blend with the order below it."""

    WEIGHT = 3.0

    def __init__(self, order=3):
        self.tables = [{} for _ in range(order + 1)]

    def feed(self, blob):
        """Bits that the blob costs, learning each byte after coding it."""
        bits, history = 0.0, b"\n" * 3
        for symbol in blob:
            probability, nodes = 1.0 / 256, []
            for order, table in enumerate(self.tables):
                node = table.setdefault(history[3 - order:], {-1: 0})
                nodes.append(node)
                probability = ((node.get(symbol, 0) + self.WEIGHT * probability)
                               / (node[-1] + self.WEIGHT))
            bits -= math.log2(probability)
            for node in nodes:
                node[symbol] = node.get(symbol, 0) + 1
                node[-1] += 1
            history = history[1:] + bytes((symbol,))
        return bits
