# %% [markdown]
# # Which method for which chip?
#
# Every method on one model: how far its predictions move, how many bits it takes, which chips can run it and how fast
# a chip could be at best. The answer is in the last figure; the ones before it show why. A small model is measured here
# (offline, in a few minutes): the order of the methods is what to take from it, not the size of the losses.

# %%
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullFormatter
from support import MARKS, bar_look, labels, qwen_quantize, show, workplace

from qwen_quantize.chip_profiles.leaf import Confidence
from qwen_quantize.chip_profiles.legality import Legality, check
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.formats.schemes import SCHEMES

word = labels("en")
workplace("02_chips_and_methods")
# Method, options, scheme, and what the chip multiplies.
METHODS = {
    "w8a8": ("--quant-method w8a8", "w8a8", "INT8 × INT8"),
    "fp8": ("--quant-method fp8", "fp8", "E4M3 × E4M3"),
    "ue8m0": ("--quant-method ue8m0", "ue8m0", "E4M3 × E4M3"),
    "mxfp8": ("--quant-method mxfp8", "mxfp8", "E4M3 × E4M3, MX"),
    "hif8": ("--quant-method hif8", "hif8", "HiF8 × HiF8"),
    "w4a8": ("--quant-method w4a8", "w4a8", "INT8 × INT8, stored in bytes"),
    "mxfp6": ("--quant-method mxfp6", "mxfp6", "E2M3 × E2M3, MX"),
    "awq_v2": ("--quant-method awq_v2", "w4a16", "16 bit × 16 bit, stored in 4"),
    "awq": ("--quant-method awq", "w4a16", "16 bit × 16 bit, stored in 4"),
    "gptq": ("--quant-method gptq", "w4a16", "16 bit × 16 bit, stored in 4"),
    "rtn": ("--quant-method rtn --scheme w4a16", "w4a16", "16 bit × 16 bit, stored in 4"),
    "nvfp4": ("--quant-method nvfp4", "nvfp4", "E2M1 × E2M1, E4M3 scales"),
    "mxfp4": ("--quant-method mxfp4", "mxfp4", "E2M1 × E2M1, MX"),
}
CHIPS = ("ascend-910b", "ascend-950", "nvidia-h100", "nvidia-b200")

# %% [markdown]
# ## Accuracy against bits
#
# First on a chip that emulates everything, so that all methods stand side by side. `--collect` runs the model on the
# text once; every method then calibrates from what was seen.

# %%
qwen_quantize("--collect STATISTICS")


def quantized(chip: str, method: str) -> dict:
    """The row of `compare` for one method on one chip."""
    out = f"{chip}.{method}"
    qwen_quantize(
        f"--from-statistics STATISTICS --device {chip} {METHODS[method][0]} --output-path {out} "
        "--validation-tokens 4096"
    )
    return qwen_quantize(f"compare {out}")["rows"][0]


on_cpu = {method: quantized("cpu", method) for method in METHODS}

# %%
print(f"{'method':8} {'bits':>6} {'KiB of linears':>15} {'KL, nats':>9} {'perplexity':>11} {'rise':>8}")
for method, row in on_cpu.items():
    print(
        f"{method:8} {row['bits_per_weight']:6.2f} {row['linear_bytes'] / 1024:15.0f} {row['kl_mean']:9.5f} "
        f"{row['perplexity']:11.3f} {100 * row['rise']:+7.2f}%"
    )
print(f"{'original':8} {16:6.2f} {'':15} {0:9.5f} {on_cpu['w8a8']['reference_perplexity']:11.3f}")

# %%
figure, plot = plt.subplots(figsize=(9, 5.2), layout="constrained")
reached, frontier = float("inf"), []
for method, row in sorted(on_cpu.items(), key=lambda item: (item[1]["bits_per_weight"], item[1]["kl_mean"])):
    if row["kl_mean"] < reached:
        reached = row["kl_mean"]
        frontier.append(method)
for at, (method, row) in enumerate(on_cpu.items()):
    best = method in frontier
    plot.plot(
        row["bits_per_weight"],
        row["kl_mean"],
        MARKS[at],
        color="black",
        markersize=8,
        markerfacecolor="black" if best else "white",
        linestyle="none",
        label=f"{method} ({METHODS[method][2]})",
    )
for method in frontier:
    place = (on_cpu[method]["bits_per_weight"], on_cpu[method]["kl_mean"])
    plot.annotate(
        method, place, xytext=(-8, -6), textcoords="offset points", ha="right", va="top", fontweight="bold"
    )
plot.margins(x=0.22, y=0.12)
corners = [(on_cpu[method]["bits_per_weight"], on_cpu[method]["kl_mean"]) for method in frontier]
plot.step(*zip(*corners, strict=True), where="post", color="black", linestyle="--", linewidth=1)
plot.set_yscale("log")
plot.set(
    xlabel=word(
        "bits per weight, scales included (further left: smaller)",
        "每个权重的位数，含缩放因子（越左越小）",
    ),
    ylabel=word("mean KL divergence, nats (lower: more accurate)", "平均 KL 散度，nat（越低越准）"),
    title=word(
        "Take a filled mark that your chip supports: nothing of its size or less is as accurate",
        "选芯片支持的实心点：没有同样大小或更小而同样准确的方法",
    ),
)
plot.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
show(
    figure,
    word(
        "Mean KL divergence against bits per weight, a mark for each method; filled marks on a stepped line"
        " are those that no other method beats in both.",
        "平均 KL 散度对每个权重的位数，每种方法一个点；折线上的实心点是没有其他方法在两方面都胜过的。",
    ),
)

# %% [markdown]
# ## How fast at best?
#
# One answer to one user is bound by memory: for each token the chip reads all weights once. So bandwidth divided by
# bytes bounds the speed. Here for a model of 8 billion weights, with the bandwidth of each chip's profile: a bound, not
# a prediction of an engine. Beyond some tens of users, and for long prompts, the multiplier counts instead: what
# multiplies in 8 or 4 bits is faster there, weights of 4 bits beside 16-bit activations are not.

# %%
WEIGHTS = 8e9
KINDS = [16.0, *(on_cpu[method]["bits_per_weight"] for method in ("w8a8", "mxfp6", "awq_v2"))]
PRESS, VENDOR = word("press", "媒体"), word("vendor", "厂商")
bandwidths = {chip: load_profile(chip).facts.memory.bandwidth for chip in CHIPS}
figure, plot = plt.subplots(figsize=(9, 3.8), layout="constrained")
for at, bits in enumerate(KINDS):
    speeds = [1e9 * found.value * 8 / (WEIGHTS * bits) for found in bandwidths.values()]
    places = [number + 0.2 * (at - 1.5) for number in range(len(CHIPS))]
    bars = plot.bar(places, speeds, 0.18, label=word(f"{bits:.2f} bits", f"{bits:.2f} 位"), **bar_look(at))
    plot.bar_label(bars, fmt="%.0f", fontsize=8)
plot.set_xticks(
    range(len(CHIPS)),
    [
        f"{chip}\n{found.value:.0f} GB/s ({PRESS if found.confidence == Confidence.PRESS else VENDOR})"
        for chip, found in bandwidths.items()
    ],
)
plot.set(
    ylabel=word("tokens/s for one user, at most", "单用户 tokens/s 上限"),
    title=word(
        "Fewer bits, more tokens: calculated from memory bandwidth, not measured; 8 billion weights",
        "位数越少，词元越多：由内存带宽算出的上限，未实测；80 亿权重",
    ),
)
plot.legend(title=word("weights of", "权重"))
show(
    figure,
    word(
        "For each chip, bars of the most tokens per second for one user, with weights of 16, 8, 6 and 4 "
        "bits: the fewer bits, the more tokens.",
        "每种芯片的单用户每秒词元上限，权重为 16、8、6、4 位：位数越少，词元越多。",
    ),
)

# %% [markdown]
# ## Which method for which chip
#
# Now with the arithmetic of each chip as its profile states it. Where no public document says whether the matrix unit
# can do a method the mark is hollow, and the method is not recommended. A ring marks the most accurate method of those
# allowed with 8 bits, and of those with fewer than 5. With 4-bit weights beside 16-bit activations nothing is cast on
# the chip, so those are not run again.
#
# Two things to keep in mind. Marks that nearly touch are equal for all purposes. And INT8 does well on a model whose
# activations have no very loud features, such as this small one; large models may have them, and then 8-bit floats can
# be ahead: run the ringed method and its neighbour on your own model, and `compare` them.

# %%
ALLOWED = {
    (chip, method): check(load_profile(chip), SCHEMES[METHODS[method][1]]).status
    for chip in CHIPS
    for method in METHODS
}
rows = {
    pair: on_cpu[pair[1]] if METHODS[pair[1]][1] == "w4a16" else quantized(*pair)
    for pair, status in ALLOWED.items()
    if status is not Legality.UNSUPPORTED
}

# %%
figure, plots = plt.subplots(1, len(CHIPS), figsize=(13, 5.6), sharey=True, sharex=True, layout="constrained")
order = list(METHODS)
low = 0.7 * min(row["kl_mean"] for row in rows.values())
high = 1.6 * max(row["kl_mean"] for row in rows.values())
taken = {}
for plot, chip in zip(plots, CHIPS, strict=True):
    for at, method in enumerate(order):
        if (chip, method) not in rows:
            words = word("ruled out", "不支持")
            plot.text(0.87 * high, at, words, ha="right", va="center", fontsize=8, color="0.35")
            continue
        firm = ALLOWED[chip, method] is Legality.ALLOWED
        kl = rows[chip, method]["kl_mean"]
        plot.hlines(at, low, kl, color="0.7", linewidth=1, linestyle="-" if firm else ":")
        plot.plot(
            kl, at, "o", markersize=8, color="black", markerfacecolor="black" if firm else "white", zorder=3
        )
    for group in ((7.5, 9.0), (0.0, 5.0)):
        allowed = [
            method
            for method in order
            if ALLOWED[chip, method] is Legality.ALLOWED
            and group[0] < rows[chip, method]["bits_per_weight"] < group[1]
        ]
        if allowed:
            best = min(allowed, key=lambda method: rows[chip, method]["kl_mean"])
            taken[chip, group] = best
            at, kl = order.index(best), rows[chip, best]["kl_mean"]
            plot.plot(
                kl, at, "o", markersize=17, markerfacecolor="none", markeredgecolor="black", markeredgewidth=2
            )
    plot.set_xscale("log")
    plot.set(xlim=(low, high), title=chip, xlabel=word("mean KL, nats", "平均 KL（nat）"))
    plot.xaxis.set_minor_formatter(NullFormatter())
    plot.xaxis.set_major_locator(FixedLocator([1e-4, 1e-3, 1e-2, 1e-1]))
    plot.axhline(5.5, color="0.4", linewidth=0.8, linestyle="-.")
    plot.axhline(6.5, color="0.4", linewidth=0.8, linestyle="-.")
plots[0].set_yticks(
    range(len(order)),
    [
        word(
            f"{method}, {on_cpu[method]['bits_per_weight']:.1f} bits\n{METHODS[method][2]}",
            f"{method}，{on_cpu[method]['bits_per_weight']:.1f} 位\n{METHODS[method][2]}",
        )
        for method in order
    ],
    fontsize=8,
)
plots[0].invert_yaxis()
figure.suptitle(
    word(
        "Take the ringed method: upper ring for accuracy (8 bits), lower ring for size and one user's speed (4 bits)\n"
        "● documents allow it   ○ no document says   ruled out: documents say no      further left is more accurate"
        " (the small model that comes with the package)",
        "选带圈的方法：上圈求准确（8 位），下圈求小和单用户速度（4 位）\n"
        "● 文档允许   ○ 无公开文档   不支持：文档排除      越左越准（随包附带的小模型）",
    )
)
show(
    figure,
    word(
        "One panel for each chip, one row for each method: mean KL where the chip can run it, with a ring "
        "around the method to take at 8 bits and at 4 bits.",
        "每种芯片一幅，每种方法一行：芯片能运行时的平均 KL，圆圈标出 8 位与 4 位时应选的方法。",
    ),
)

# %%
for chip in CHIPS:
    wide, narrow = (
        taken.get((chip, group), "nothing that documents allow") for group in ((7.5, 9.0), (0.0, 5.0))
    )
    print(f"{chip:14} most accurate: {wide:8} smallest: {narrow}")

# %% [markdown]
# `qwen_quantize chips list` has all chips, and `compare` lays your own runs side by side. Whether an engine loads a
# result on a chip is another question than whether the chip can: `qwen_quantize check OUT --engine vllm` answers it.
