# %% [markdown]
# # The key-value cache: where does the error sit, and what do mixed widths buy?
#
# Keys and values of the past are kept for every token, and soon take more memory than the weights. Which of them can
# be stored in 4 bits, and which scheme should be taken for a given number of bits?

# %%
import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from support import MARKS, labels, qwen_quantize, show, workplace

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.embedded import calibration_text_path, embedded_model_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.formats.kv_scheme import parse_kv_scheme
from qwen_quantize.pipeline.kv_observe import observe
from qwen_quantize.pipeline.run import source_tokenizer
from qwen_quantize.pipeline.texts import calibration_batches, load_documents

word = labels("en")
workplace("04_kv_cache")

# %% [markdown]
# ## Where the error sits
#
# Calibration text runs through the model once. For every channel of every head two things are known then: how large the
# error of 4 bits is, and what such an error costs in the layer's output, as a part of the stream that it is added to.
# Their product is the damage. Shades are logarithmic: in this model the first layer, whose stream is still small, has
# nearly all of it.

# %%
source = open_source(embedded_model_path())
reader = ModelReader(source)
text = load_documents(str(calibration_text_path()))
windows = calibration_batches(text, source_tokenizer(source), 8, 512, 0).tokens
seen = observe(reader, windows, parse_kv_scheme("mixed:5,window=0,sinks=0"))
keys = torch.stack([one.keys.damages[0] for one in seen.values()])  # [layers, heads, channels]
values = torch.stack([one.values.damages[0] for one in seen.values()])

# %%
sides = {word("keys", "键（K）"): keys, word("values", "值（V）"): values}
total = float(keys.sum() + values.sum())
shares = {side: 100 * damage.sum(dim=-1) / total for side, damage in sides.items()}  # [layers, heads], %
shades = LogNorm(min(float(share.min()) for share in shares.values()), 100)
figure, plots = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained", width_ratios=(1, 1, 1.6))
for plot, (side, share) in zip(plots, shares.items(), strict=False):
    plot.imshow(share, norm=shades, aspect="auto")
    for layer in range(share.shape[0]):
        for head in range(share.shape[1]):
            percent = float(share[layer, head])
            color = "white" if shades(percent) > 0.5 else "black"
            plot.text(head, layer, f"{percent:.2g} %", ha="center", va="center", color=color)
    plot.grid(False)
    plot.set_xticks(range(share.shape[1]))
    plot.set_yticks(range(share.shape[0]))
    plot.set(
        title=word(f"INT4 damage of {side}, share of all", f"{side}用 INT4 的损害（占总体）"),
        xlabel=word("head", "头"),
        ylabel=word("layer", "层"),
    )
for at, (side, damage) in enumerate(sides.items()):
    ordered = damage.flatten().sort(descending=True).values
    share = 100 * ordered.cumsum(0) / ordered.sum()
    plots[2].plot(
        [100 * (n + 1) / len(share) for n in range(len(share))],
        share,
        ("-", "--")[at],
        color="black",
        marker=MARKS[at],
        markevery=40,
        markerfacecolor="black" if at == 0 else "white",
        label=side,
    )
plots[2].plot([0, 100], [0, 100], ":", color="0.5", label=word("all channels alike", "各通道相同"))
plots[2].set(
    xlabel=word("worst channels, % of all", "最差的通道占比（%）"),
    ylabel=word("their share of the damage, %", "占总损害的比例（%）"),
    title=word("Above the dotted line, mixing widths pays", "高于点线时，混合位宽有益"),
)
plots[2].legend()
show(
    figure,
    word(
        "Two maps of layers and heads with their share of the damage that INT4 keys and values do, and the "
        "share of the worst channels: few channels carry nearly all.",
        "各层各头的 INT4 键与值损失占比，以及最差通道的占比：少数通道占了几乎全部。",
    ),
)

# %% [markdown]
# ## What a scheme costs
#
# Twice: with the newest 128 tokens and the first 4 kept in 16 bits, which `int4` and `mixed` do unless told otherwise,
# and with every token quantized as soon as it can be. (Keys of `int4` and `mixed` share scales over up to 128 tokens,
# and wait in 16 bits until these are together.)

# %%
FAMILIES = {
    "fp8": ["fp8"],
    "int8": ["int8"],
    "int4": ["int4:128", "int4:32"],
    "mixed": ["mixed:4.5", "mixed:5", "mixed:7"],
}
KEPT = {
    word(
        "newest 128 and first 4 tokens kept in 16 bits", "最新 128 个和最前 4 个词元保留 16 位"
    ): "window=128,sinks=4",
    word("every token quantized", "所有词元都量化"): "window=0,sinks=0",
}
measured = {
    (kept, scheme): qwen_quantize(
        f"eval embedded:dense --against embedded:dense --kv-cache {scheme},{words} --max-tokens 4096"
    )
    for kept, words in KEPT.items()
    for family in FAMILIES.values()
    for scheme in family
}

# %%
for (kept, scheme), record in measured.items():
    cache = record["kv_cache"]
    print(
        f"{scheme:10} {cache['bits']:5.2f} bits, {cache['bits_at_context']:5.2f} at {cache['context']} tokens, "
        f"KL {record['kl_mean']:.7f}, perplexity {100 * record['rise']:+.3f} %   {kept}"
    )

# %%
figure, plots = plt.subplots(1, 2, figsize=(12, 4.6), sharey=True, layout="constrained")
for plot, kept in zip(plots, KEPT, strict=True):
    for at, (family, schemes) in enumerate(FAMILIES.items()):
        runs = [measured[kept, scheme] for scheme in schemes]
        bits = [run["kv_cache"]["bits"] for run in runs]
        plot.plot(
            bits,
            [run["kl_mean"] for run in runs],
            ("none", "none", "--", "-")[at],
            color="black",
            marker=MARKS[at],
            markersize=9,
            markerfacecolor="black" if family == "mixed" else "white",
            label=family,
        )
        for scheme, run in zip(schemes, runs, strict=True):
            plot.annotate(
                scheme,
                (run["kv_cache"]["bits"], run["kl_mean"]),
                xytext=(3, -7) if family == "mixed" else (3, 8),
                textcoords="offset points",
                rotation=-35 if family == "mixed" else 0,
                rotation_mode="anchor",
                va="top" if family == "mixed" else "bottom",
                fontsize=9,
            )
    plot.set_yscale("log")
    plot.margins(x=0.12, y=0.12)
    plot.set(
        title=kept, xlabel=word("bits per quantized value, scales included", "每个量化值的位数，含缩放因子")
    )
plots[0].set_ylabel(word("mean KL divergence, nats (lower: more accurate)", "平均 KL 散度，nat（越低越准）"))
plots[1].legend(title=word("scheme", "方案"))
figure.suptitle(
    word(
        "Keep the newest and the first tokens wide; then take the lowest mark left of the bits you can "
        "afford",
        "先保留最新和最前的词元为高精度，再在可承受的位数左侧取最低的点",
    )
)
show(
    figure,
    word(
        "Mean KL against bits of the key-value cache for each scheme, with the newest and first tokens kept"
        " wide and without.",
        "各方案的平均 KL 对键值缓存位数，分保留与不保留最新和最初词元。",
    ),
)

# %% [markdown]
# The arithmetic of a budget, as the plan prints it. `eval` finds fixed scales and widths on the text it measures;
# `--kv-cache` on the main command finds them on calibration text and stores them beside the model.

# %%
for note in measured[next(iter(KEPT)), "mixed:5"]["kv_cache"]["notes"]:
    print(note)
