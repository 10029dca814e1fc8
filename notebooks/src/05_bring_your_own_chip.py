# %% [markdown]
# # Bring your own chip: write a profile, probe, calibrate
#
# A chip is one TOML file. Its data sheet says what its matrix unit takes, but not how it rounds; the device itself is
# asked for that. How much is won by asking? The device is emulated here: `device.toml` plays the silicon,
# and nothing below but the probe and the last measurement looks at it.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
from support import MARKS, bar_look, labels, qwen_quantize, show, workplace

word = labels("en")
workplace("05_bring_your_own_chip")

# %% [markdown]
# ## What the data sheet says
#
# What is not stated is unknown, and is not guessed.

# %%
SHEET = """\
[chip]
name = "mychip"
title = "My accelerator (fictitious)"
vendor = "Me"
family = "mychip"
generation = 1
aliases = []
family_aliases = []

[dtypes]
source = ["EXAMPLE"]
confidence = "vendor-doc"
[dtypes.bf16]
storage = true
matrix = true
[dtypes.e4m3fn]
storage = true
convert = true
matrix = true
[dtypes.e8m0]
storage = true
scale = true

[memory]
source = ["EXAMPLE"]
confidence = "vendor-doc"
bandwidth = 800
"""
Path("mychip.toml").write_text(SHEET)
print(qwen_quantize("chips validate mychip.toml"))
plan = qwen_quantize("--device mychip.toml --output-path OUT --dry-run")
for assumption in plan["assumptions"]:
    print(f"assumed: {assumption['field']} = {assumption['assumed']}")

# %% [markdown]
# ## What the silicon does
#
# It cuts off instead of rounding, loses subnormals, and aligns 32 products at once with 13 bits.

# %%
SILICON = """
[arithmetic]
source = ["EXAMPLE"]
confidence = "vendor-doc"
[arithmetic.casts."fp32->e4m3fn"]
rounding = "rtz"
modes = ["rtz"]
overflow = "saturate"
overflow_modes = ["saturate"]
subnormals = "flush"
nan = "propagate"
[arithmetic.matmul."e4m3fn*e4m3fn"]
accumulator = "fp32"
fraction_bits = 13
products_per_step = 32
alignment_rounding = "rtz"
final_rounding = "rtz"
output_mantissa_bits = 23
promotion_interval = { status = "not_applicable", source = ["EXAMPLE"] }
order = "ascending K"
"""
Path("device.toml").write_text(SHEET + SILICON)
probe = qwen_quantize("probe --on emulated:device.toml --quick --chip mychip.toml --output measured.toml")
for product, parameters in probe["parameters"].items():
    for name, found in parameters.items():
        if found["status"] == "measured":
            print(f"{product:24} {name:22} {found['value']}")
print(f"explained, bit for bit: {100 * probe['explained_fraction']['overall']:.1f} % of the products")

# %% [markdown]
# ## Calibrate with and without what was measured
#
# Both results are then run on the device.

# %%
qwen_quantize("--device mychip.toml --output-path GUESSED --no-validate")
qwen_quantize("--device mychip.toml --measured measured.toml --output-path MEASURED --no-validate")
NAMES = {"GUESSED": word("from the data sheet", "仅凭数据手册"), "MEASURED": word("probed first", "先探测")}
found = {name: qwen_quantize(f"eval {name} --device device.toml --max-tokens 8192") for name in NAMES}

# %%
figure, (loss, layers) = plt.subplots(1, 2, figsize=(12, 3.9), layout="constrained")
for at, (name, record) in enumerate(found.items()):
    look = {"color": "black", "marker": MARKS[at], "markerfacecolor": "white" if at == 0 else "black"}
    kl = 1000 * record["kl_mean"]
    loss.bar(at, kl, 0.6, **bar_look(at + 1))
    loss.annotate(
        word(
            f"{kl:.2f}\nperplexity {100 * record['rise']:+.2f} %\n± {200 * record['rise_standard_error']:.2f} %",
            f"{kl:.2f}\n困惑度 {100 * record['rise']:+.2f} %\n± {200 * record['rise_standard_error']:.2f} %",
        ),
        (at, kl),
        ha="center",
        va="bottom",
    )
    depth = [layer["layer"] for layer in record["layers"]]
    layers.plot(
        depth,
        [layer["sqnr_db"] for layer in record["layers"]],
        "--" if at == 0 else "-",
        markersize=9,
        label=NAMES[name],
        **look,
    )
loss.set_xticks(range(2), list(NAMES.values()))
loss.margins(y=0.3)
loss.set(
    xlim=(-0.6, 1.6),
    ylabel=word("mean KL on the device, 0.001 nats", "设备上的平均 KL（0.001 nat）"),
    title=word("The loss: lower is better (± 2 s.e.)", "损失：越低越好（±2 标准误）"),
)
layers.set_xticks(depth)
layers.set(
    xlabel=word("layer", "层"),
    ylabel=word("signal to error, dB", "信号与误差之比（dB）"),
    title=word("After each layer: higher is better", "每层之后：越高越好"),
)
layers.legend()
show(
    figure,
    word(
        "Left: loss on the device when calibrated from the data sheet and after probing; right: signal to "
        "error after each layer. Probing first is better in both.",
        "左：按数据手册校准与先探测再校准时的设备损失；右：各层之后的信噪比。先探测两者都更好。",
    ),
)

# %% [markdown]
# On a real device: `qwen_quantize probe --on npu:0 --chip mychip.toml --output measured.toml`.
