"""Writes the model card: README.md and loss.png from log.json, sources.json and the corpus."""

import json
import math

import corpus
import evaluation

PROMPTS = ["class Stack:\n    def __init__(self):\n",
           "import json\n\ndef read_config(path):\n",
           "def is_prime(n):"]
COMPLETION_TOKENS = 96


def plot(log, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axis = pyplot.subplots(figsize=(7, 4), dpi=80)
    steps, losses, _ = zip(*log["steps"])
    axis.plot(steps, losses, color="0.75", linewidth=0.6, label="training batch")
    axis.plot(*zip(*log["held_out"]), color="C0", label="held out (first packed windows)")
    top = sorted(losses)[int(0.99 * (len(losses) - 1))]
    axis.set(xlabel=f"step of {log['batch'] * log['length']:,} tokens", ylabel="nats a token",
             ylim=(0.97 * min(losses), max(1.15 * top, 1.02 * losses[-1])))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def completions(out):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    blocks = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        result = model.generate(ids, max_new_tokens=COMPLETION_TOKENS, do_sample=False)
        text = tokenizer.decode(result[0][ids.shape[1]:], skip_special_tokens=True)
        blocks.append(f"Prompt:\n\n```python\n{prompt.rstrip()}\n```\n\nCompletion:\n\n"
                      f"```python\n{text.strip(chr(10))}\n```\n")
    return "\n".join(blocks), model.num_parameters()


def load_table(loads):
    experts = len(loads[0])
    rows = ["| layer | " + " | ".join(map(str, range(experts))) + " |",
            "|---" * (experts + 1) + "|"]
    for layer, load in enumerate(loads, start=1):
        rows.append(f"| {layer} | " + " | ".join(f"{100 * x:.1f}" for x in load) + " |")
    return "\n".join(rows)


def source_table(sources):
    rows = ["| source | version | licence (as its metadata states it) | files | MB |",
            "|---|---|---|---|---|"]
    for s in sorted(sources, key=lambda s: -s["bytes"]):
        licence = s["licence"].replace("|", "/")
        rows.append(f"| {s['name']} | {s['version']} | {licence} | {s['files']} | "
                    f"{s['bytes'] / 1e6:.2f} |")
    return "\n".join(rows)


def bits_table(log, held_out, unseen):
    """Rows of: bits a byte on the held-out files and on the packages never trained on."""
    columns = [column(log["held_out_result"], held_out)]
    if unseen:
        columns.append(column(log["unseen_result"], unseen))
    names = ["**tiny-coder**", "`xz -9`, each file on its own",
             "`xz -9`, all files as one stream", "order-3 byte model, adaptive"]
    heads = ["held-out files", "unseen packages"][:len(columns)]
    rows = ["| bits a byte | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, *values in zip(names, *columns):
        rows.append(f"| {name} | " + " | ".join(f"{v:.3f}" for v in values) + " |")
    return "\n".join(rows)


def column(result, texts):
    """Bits a byte of the model, of xz -9 and of the order-3 byte model on the same texts."""
    size = sum(len(t.encode()) for t in texts)
    joined, single = evaluation.xz_bits(texts)
    cold = evaluation.ByteModel().feed("".join(texts).encode())
    return [result["nats"] / math.log(2) / size, single / size, joined / size, cold / size]


def read_texts(path, limit=None):
    return [text for _, text in corpus.read_documents(path)][:limit]


def write(data, out, limit=None, hardware=None):
    log = json.loads((out / "log.json").read_text())
    sources = json.loads((out / "sources.json").read_text())
    texts = read_texts(data / "held_out.jsonl", limit)
    unseen = read_texts(data / "unseen.jsonl")
    size = sum(len(t.encode()) for t in texts)
    result = log["held_out_result"]
    text, parameters = completions(out)
    plot(log, out / "loss.png")
    flat = [x for load in result["load"] for x in load]
    fields = {
        "parameters": f"{parameters:,}",
        "size": f"{(out / 'model.safetensors').stat().st_size / 1e6:.1f}",
        "held_files": len(texts), "held_mb": f"{size / 1e6:.2f}",
        "scored": f"{result['tokens']:,}",
        "nats": f"{result['nats'] / result['tokens']:.4f}",
        "bits_table": bits_table(log, texts, unseen),
        "unseen": ", ".join(corpus.UNSEEN.read_text().split()),
        "unseen_mb": f"{sum(len(t.encode()) for t in unseen) / 1e6:.2f}",
        "load_table": load_table(result["load"]),
        "load_min": f"{100 * min(flat):.1f}", "load_max": f"{100 * max(flat):.1f}",
        "completions": text, "count": COMPLETION_TOKENS,
        "train_mb": f"{sum(s['bytes'] for s in sources) / 1e6:.0f}", "sources": len(sources),
        "train_tokens": f"{log['train_tokens'] / 1e6:.1f}",
        "seen": f"{log['tokens_seen'] / 1e6:,.0f}", "epochs": log["epochs"],
        "steps": f"{log['steps_done']:,}", "plain_steps": log["steps_done"],
        "batch": f"{log['batch']} × {log['length']}", "rate": log["rate"],
        "seconds": f"{log['seconds']:.0f}", "hardware": hardware or log["device"],
        "source_table": source_table(sources)}
    template = (corpus.PACKAGES.parent / "card_template.md").read_text()
    for name, value in fields.items():
        template = template.replace("{{" + name + "}}", str(value))
    (out / "README.md").write_text(template)
