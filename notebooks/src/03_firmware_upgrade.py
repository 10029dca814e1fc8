# %% [markdown]
# # After a firmware upgrade: did the answers change, whose fault is it, and does calibrating again help?
#
# Firmware 1.2 of the fictitious chip `example` rounds to nearest, 1.3 cuts off. Nothing crashes, and no error is
# logged. On a real device, `--on npu:0` takes the place of `--on emulated:...`.

# %%
import matplotlib.pyplot as plt
import torch
from support import MARKS, bar_look, labels, qwen_quantize, show, workplace

from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode, encode
from qwen_quantize.formats.tables import FORMATS

word = labels("en")
workplace("03_firmware_upgrade")

# %% [markdown]
# ## Before the upgrade
#
# The model is calibrated for 1.2, and the device is asked how it computes.

# %%
qwen_quantize("--device example@1.2 --output-path OUT --no-validate")
probe = qwen_quantize("probe --on emulated:example@1.2 --quick --fingerprint before.json")

# %% [markdown]
# ## The alarm
#
# After the upgrade the device is asked again. `regress` names what changed, and then runs the model under both
# arithmetics on the same text. How much may be lost is your choice: 0.5 % of perplexity by default, 0.1 % here. Exit
# code 1 is the alarm, and with `--recalibrate` the weights are made anew.

# %%
qwen_quantize("probe --on emulated:example@1.3 --quick --fingerprint after.json")
default = qwen_quantize(
    "regress OUT --before before.json --after after.json --max-tokens 16384", expect=(0, 1)
)
strict = qwen_quantize(
    "regress OUT --before before.json --after after.json --max-tokens 16384 --margin 0.1% --recalibrate NEW",
    expect=(0, 1),
)
for change in strict["changed"]:
    print("changed:", change["text"])
for name, answer in (("0.5 %", default), ("0.1 %", strict)):
    print(f"margin {name}: {answer['verdict']}. {answer['advice']}")

# %%
figure, (cast, gate) = plt.subplots(1, 2, figsize=(12, 3.8), layout="constrained")
values = torch.linspace(1, 2, 801)
for at, (version, rounding) in enumerate({"1.2": Rounding.RNE, "1.3": Rounding.RTZ}.items()):
    rule = CastRule(rounding, Overflow.SATURATE, Subnormals.KEEP)
    e4m3 = FORMATS["e4m3fn"]
    become = decode(encode(values, e4m3, rule), e4m3)
    mean = float((become / values - 1).mean())
    cast.plot(
        values,
        become,
        ("-", "--")[at],
        color="black",
        linewidth=1.6,
        label=word(
            f"firmware {version} ({rounding}), mean {100 * mean:+.1f} %",
            f"固件 {version}（{rounding}），平均 {100 * mean:+.1f} %",
        ),
    )
cast.plot(values, values, ":", color="0.5", label=word("no rounding", "不舍入"))
cast.set(
    xlabel=word("value before the cast to E4M3", "转换为 E4M3 之前的值"),
    ylabel=word("value after it", "转换之后的值"),
    title=word("What changed: the new cast makes everything smaller", "变化：新转换使所有值变小"),
)
cast.legend(fontsize=9)
middle = 100 * strict["rise"]
ends = [[middle - 100 * strict["lower"]], [100 * strict["upper"] - middle]]
gate.errorbar([middle], [0], xerr=ends, fmt="o", color="black", capsize=8, markersize=9)
gate.annotate(
    word("measured loss, lower and upper bound", "测得的损失及上下界"),
    (0.11, -0.04),
    ha="left",
    va="top",
)
for style, margin, answer in (("--", 0.1, strict), (":", 0.5, default)):
    gate.axvline(margin, color="black", linestyle=style)
    gate.text(
        margin,
        0.28,
        word(f" margin {margin} %:\n {answer['verdict']}", f" 容差 {margin} %：\n {answer['verdict']}"),
        va="top",
    )
gate.axvline(0, color="0.5", linewidth=0.8)
gate.set_yticks([])
gate.set(
    xlim=(-0.05, 0.65),
    ylim=(-0.3, 0.3),
    xlabel=word("rise of perplexity through the upgrade, %", "升级导致的困惑度上升（%）"),
    title=word(
        "An alarm unless the whole bar is left of the margin",
        "除非整条误差棒在容差左侧，否则报警",
    ),
)
show(
    figure,
    word(
        "Left: values before and after the cast under the old and the new firmware, the new one below the "
        "old. Right: the measured rise of perplexity between two margins.",
        "左：新旧固件下转换前后的值，新固件偏低。右：测得的困惑度上升与两个容限。",
    ),
)

# %% [markdown]
# ## Whose fault, and did calibrating again help?
#
# `eval --attribute` splits what was lost against the unquantized model among its causes, on one text under three
# conditions.

# %%
conditions = {
    word("old weights\non firmware 1.2", "旧权重\n固件 1.2"): ("OUT", "1.2"),
    word("old weights\non firmware 1.3", "旧权重\n固件 1.3"): ("OUT", "1.3"),
    word("new weights\non firmware 1.3", "新权重\n固件 1.3"): ("NEW", "1.3"),
}
found = {
    name: qwen_quantize(f"eval {folder} --device example@{version} --attribute --max-tokens 8192")
    for name, (folder, version) in conditions.items()
}

# %%
PARTS = {
    "weights": word("quantized weights", "权重量化"),
    "activations": word("cast of activations", "激活值转换"),
    "scale_rounding": word("rounding of scales", "缩放因子舍入"),
}
figure, (whole, causes) = plt.subplots(1, 2, figsize=(12, 3.9), layout="constrained")
for at, record in enumerate(found.values()):
    total = record["attribution"]["total"]
    whole.errorbar(
        at,
        1000 * total["kl_mean"],
        2000 * total["kl_standard_error"],
        fmt=MARKS[at],
        color="black",
        markersize=9,
        capsize=6,
        markerfacecolor="white" if at == 1 else "black",
    )
    whole.annotate(
        f"{1000 * total['kl_mean']:.2f}",
        (at, 1000 * total["kl_mean"]),
        xytext=(12, 0),
        textcoords="offset points",
        va="center",
    )
whole.set_xticks(range(3), list(found))
whole.set(
    xlim=(-0.5, 2.7),
    ylim=(0, None),
    ylabel=word("mean KL from the original, 0.001 nats", "相对原模型的平均 KL（0.001 nat）"),
    title=word("All together (± 2 s.e.): lower is better", "合计（±2 标准误）：越低越好"),
)
for number, (part, label) in enumerate(PARTS.items()):
    heights = [
        1000 * next(one["kl_mean"] for one in record["attribution"]["parts"] if one["part"] == part)
        for record in found.values()
    ]
    bars = causes.bar(
        [at + 0.27 * (number - 1) for at in range(3)], heights, 0.25, label=label, **bar_look(number)
    )
    causes.bar_label(bars, fmt="%.2f", fontsize=8)
causes.set_xticks(range(3), list(found))
causes.set(
    ylabel=word("KL of one cause alone, 0.001 nats", "单一原因的 KL（0.001 nat）"),
    title=word("Each cause alone, the others switched off", "逐一原因，其余关闭"),
)
causes.legend(fontsize=9, loc="upper left")
causes.margins(y=0.2)
show(
    figure,
    word(
        "Mean KL of the old weights on both firmwares and of the new weights on the new one; then the part "
        "of each cause alone.",
        "旧权重在两版固件上、新权重在新固件上的平均 KL；以及各原因单独的部分。",
    ),
)

# %% [markdown]
# The upgrade doubles what the cast of activations costs, and nothing else moves but the scales that go with it. The new
# weights look worse alone: they are larger than the original's on purpose, by what the new cast takes away, so that the
# two together are better than either bar suggests. Left is what counts.

# %%
for name, record in found.items():
    print(
        f"{' '.join(name.split()):32} perplexity {record['perplexity']:.3f}, {100 * record['rise']:+.3f} % "
        f"± {200 * record['rise_standard_error']:.3f} % (2 s.e.), KL {record['kl_mean']:.5f}"
    )

# %% [markdown]
# The embedded model is small and loses little. On SmolLM2-135M the same change of rounding costs far more; the README's
# table under "The gate and a firmware" has it, with what calibrating again takes back. `qwen_quantize init-ci` writes
# a pipeline that does all of this every night.
