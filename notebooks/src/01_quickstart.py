# %% [markdown]
# # Quickstart: what does it cost to make the model small?
#
# Quantize the model that ships with the package, measure what was lost, and look. Everything runs offline on a CPU
# in about a minute. Words at the figures: `labels("zh")` makes them Chinese where a Chinese font is installed.

# %%
import matplotlib.pyplot as plt
from support import MARKS, bar_look, labels, qwen_quantize, show, workplace

word = labels("en")
workplace("01_quickstart")

# %% [markdown]
# ## Quantize
#
# The same model twice for one chip: in 8-bit floats whose scales are powers of two, and in 4-bit integers beside 16-bit
# activations. Each run reads its result back and measures it on a novel that calibration never saw.

# %%
runs = {
    "ue8m0 (8 bit)": qwen_quantize("--device ascend-950 --quant-method ue8m0 --output-path OUT8"),
    "awq_v2 (4 bit)": qwen_quantize("--device ascend-950 --quant-method awq_v2 --output-path OUT4"),
}

# %% [markdown]
# ## Look
#
# Left: a smaller file. Middle: how much less likely the text becomes; the bar is two standard errors each way, so a bar
# that crosses zero shows no loss. Right: how far the predictions of single tokens move; further left is better.

# %%
figure, (size, rise, tokens) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
names = [word("original (16 bit)", "原模型（16 位）"), *runs]
rows = {row["name"]: row for row in qwen_quantize("compare OUT8 OUT4")["rows"]}
linears = [16.0, *(rows[name]["bits_per_weight"] for name in ("OUT8", "OUT4"))]
for at, bits in enumerate(linears):
    size.bar(at, bits, **bar_look(at))
    size.annotate(f"{bits:.2f}", (at, bits), ha="center", va="bottom")
size.set_xticks(range(3), names, fontsize=8)
size.set(
    ylabel=word("bits per weight, scales included", "每个权重的位数（含缩放因子）"),
    title=word("Size of the linear layers", "线性层的大小"),
)
for at, run in enumerate(runs.values()):
    found = run["validation"]
    rise.errorbar(
        at,
        100 * found["rise"],
        200 * found["rise_standard_error"],
        fmt=MARKS[at],
        color="black",
        capsize=5,
        markerfacecolor="black" if at == 0 else "white",
    )
rise.axhline(0, color="black", linewidth=0.8)
rise.set_xticks(range(2), list(runs))
rise.set(
    xlim=(-0.6, 1.6),
    ylabel=word("rise of perplexity, %", "困惑度上升（%）"),
    title=word("Loss on unseen text (± 2 s.e.)", "未见文本上的损失（±2 标准误）"),
)
for at, (name, run) in enumerate(runs.items()):
    found = run["validation"]
    edges, counts = found["kl_edges"], found["kl_counts"]
    share = [100 * sum(counts[: n + 1]) / sum(counts) for n in range(len(counts))]
    tokens.plot(
        edges[1:],
        share,
        ("-", "--")[at],
        color="black",
        marker=MARKS[at],
        markevery=3,
        markerfacecolor="black" if at == 0 else "white",
        label=name,
    )
tokens.set_xscale("log")
tokens.set(
    xlim=(1e-5, None),
    xlabel=word("KL divergence of a token's prediction, nats", "单个词元预测的 KL 散度（nat）"),
    ylabel=word("tokens at most so far off, %", "不超过该值的词元比例（%）"),
    title=word("How far predictions move", "预测偏移"),
)
tokens.legend(loc="upper left")
show(
    figure,
    word(
        "Three plots of the original, ue8m0 and awq_v2: bits per weight, rise of perplexity with its error,"
        " and the share of tokens whose prediction moved at most so far.",
        "原模型、ue8m0 与 awq_v2 的三幅图：每个权重的位数、困惑度上升及其误差、预测偏移不超过某值的词元占比。",
    ),
)

# %% [markdown]
# ## What had to be assumed
#
# What the chip's documents leave open is listed, and each can be set with `--assume`.

# %%
for assumption in runs["ue8m0 (8 bit)"]["assumptions"]:
    print(f"{assumption['field']} = {assumption['assumed']}: {assumption['why']}")

# %% [markdown]
# ## Your own model
#
# ```sh
# qwen_quantize --model-path MODEL --output-path OUT --device ascend --calibration-dataset calib.jsonl
# ```
#
# Which method for which chip is the question of `02_chips_and_methods`.
