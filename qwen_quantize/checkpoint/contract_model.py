"""Whether the tensors are those of the model that config.json describes, for architectures with a blueprint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qwen_quantize.checkpoint.contract_folder import ModelFolder
from qwen_quantize.checkpoint.contract_linear import PLAIN, LayoutCheck
from qwen_quantize.checkpoint.finding import Finding, warning
from qwen_quantize.checkpoint.mx_oss import BLOCK_BYTES, GROUP
from qwen_quantize.checkpoint.mx_oss_layout import stack_of
from qwen_quantize.checkpoint.next_token import JOINING_LINEAR, next_token_tensors, repeated_tensors
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Blueprint
from qwen_quantize.models.by_name import linear_modules_by_name
from qwen_quantize.models.lookup import architecture_of, find_blueprint

_AGAIN = "write or download the folder again, or take the config.json that belongs to it"
_WEIGHTS = ("weight", "weight_packed", "qweight")
_MOST = 40  # of one rule: a wrong config makes every tensor wrong, and the first few say so
# Tensors that engines know although no blueprint has them: scales of the KV cache, tables that were buffers.
_EXTRA = (
    "k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "kv_cache_scale", "kv_cache_offset", "inv_freq",
    "output_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelView:
    """The linears that the model should have, module -> (out, in), and the blueprint where there is one."""

    blueprint: Blueprint | None
    linears: dict[str, tuple[int, int]]
    findings: tuple[Finding, ...]


def view_model(folder: ModelFolder) -> ModelView:
    """UserErrors of the config become findings."""
    try:
        architecture_of(folder.config)
        blueprint = find_blueprint(folder.config)
    except UserError as error:
        finding = Finding(
            "config.json",
            "config",
            f"{folder.say(error)}; engines build another model, or none",
            "take the config.json of the model",
        )
        return ModelView(None, {}, (finding,))
    if blueprint is None:
        shapes = {name: stored.info.shape for name, stored in folder.tensors.items()}
        return ModelView(None, linear_modules_by_name(shapes), ())
    modules = blueprint.linear_modules()
    present = {
        module: shape
        for module, shape in blueprint.next_token_modules().items()
        if any(f"{module}.{suffix}" in folder.tensors for suffix in _WEIGHTS)
    }
    return ModelView(blueprint, {**modules, **present}, ())


def check_model(folder: ModelFolder, blueprint: Blueprint, check: LayoutCheck) -> list[Finding]:
    """Missing, misshapen and unknown tensors, layers, heads; stacked experts are compared by name only."""
    return _ModelCheck(folder, blueprint, check).run()


class _ModelCheck:
    def __init__(self, folder: ModelFolder, blueprint: Blueprint, check: LayoutCheck) -> None:
        self.folder = folder
        self.blueprint = blueprint
        self.check = check
        self.findings: list[Finding] = []
        self.known = set(check.known)
        self.checked_linears: set[str] = set()
        # Where every expert of a layer stands in one tensor, the blueprint's names do not apply to them.
        self.stacked = {
            name.partition(".experts.")[0]
            for name in folder.tensors
            if ".experts." in name and _is_stack(name)
        }
        self.blocks = {
            name.partition(".experts.")[0]
            for name in folder.tensors
            if name.endswith(("_blocks", "_scales")) and ".experts." in name
        }

    def run(self) -> list[Finding]:
        self.linears(self.blueprint.linear_modules())
        for name, shape in self.blueprint.expected_tensors().items():
            module, _, suffix = name.rpartition(".")
            if suffix == "weight" and module in self.checked_linears:
                continue
            if name == self.blueprint.family.head:
                self.linears({module: (shape[0], shape[1])})
            else:
                self.plain(name, shape)
        self.stacks()
        self.layers()
        self.next_token()
        self.tied_head()
        self.unknown()
        return _shortened(self.findings)

    def linears(self, modules: dict[str, tuple[int, int]]) -> None:
        self.checked_linears |= modules.keys()
        for module, shape in modules.items():
            if module.partition(".experts.")[0] in self.stacked and ".experts." in module:
                continue
            linear = self.check.linears.get(module)
            if linear is not None:
                self.shape(module, linear.shape, shape)
                self.known.update(linear.parts)
                continue
            info = self.folder.info(f"{module}.weight")
            if info is None:
                if not any(f"{module}.{suffix}" in self.folder.tensors for suffix in _WEIGHTS):
                    self.missing(module)
                continue
            self.known.add(info.name)
            if info.dtype in PLAIN:
                self.shape(info.name, info.shape, shape)

    def stacks(self) -> None:
        """Tensors of all experts of a layer, as mx-oss has them: every expert is there, in its shape."""
        members: dict[str, list[tuple[int, int]]] = {}
        modules = {**self.blueprint.linear_modules(), **self.blueprint.next_token_modules()}
        for module, shape in modules.items():
            stack = stack_of(module)
            if stack is not None and module.partition(".experts.")[0] in self.blocks:
                members.setdefault(stack, []).append(shape)
        for stack, shapes in members.items():
            info = self.folder.info(f"{stack}_blocks")
            if info is None:
                self.missing(stack, f"{stack}_blocks")
                continue
            step = 2 if stack.endswith("gate_up_proj") else 1
            rows, columns = shapes[0]
            groups = columns // GROUP
            self.shape(info.name, info.shape, (len(shapes) // step, step * rows, groups, BLOCK_BYTES))

    def missing(self, module: str, tensor: str | None = None) -> None:
        expert = ".experts." in module
        head = f"{module}.weight" == self.blueprint.family.head
        self.findings.append(
            Finding(
                tensor or f"{module}.weight",
                "expert-missing" if expert else "head-missing" if head else "tensor-missing",
                "the model has this linear and no file holds it; "
                + (
                    "tokens routed to the expert get random weights, or the engine stops"
                    if expert
                    else "engines stop, or leave it random without a word"
                ),
                _AGAIN,
            )
        )

    def shape(self, name: str, found: tuple[int, ...] | None, wanted: tuple[int, ...]) -> None:
        if found is not None and tuple(found) != wanted:
            hint = ", which is this one transposed" if tuple(found) == wanted[::-1] else ""
            self.findings.append(
                Finding(
                    name,
                    "tensor-shape",
                    f"its shape is {list(found)} and config.json makes it {list(wanted)}{hint}; engines stop when "
                    "they copy "
                    "it",
                    _AGAIN,
                )
            )

    def plain(self, name: str, shape: tuple[int, ...]) -> None:
        info = self.folder.info(name)
        self.known.add(name)
        if info is None:
            rule = "head-missing" if name == self.blueprint.family.head else "tensor-missing"
            self.findings.append(
                Finding(
                    name, rule, "no file holds it; engines stop, or leave it random without a word", _AGAIN
                )
            )
            return
        self.shape(name, info.shape, shape)
        if info.dtype not in PLAIN:
            self.findings.append(
                Finding(
                    name,
                    "plain-dtype",
                    f"it is {info.dtype}; it is no linear, and engines copy its codes as if they were values",
                    "store it in the model's own dtype",
                )
            )

    def layers(self) -> None:
        before, after = self.blueprint.family.layer_prefix.split("{layer}")
        last = self.blueprint.num_layers + len(self.blueprint.next_token_layers)
        beyond: set[int] = set()
        for name in self.folder.tensors:
            number = name[len(before) :].partition(after)[0] if name.startswith(before) else ""
            if number.isascii() and number.isdigit() and len(number) < 8 and int(number) >= last:
                self.known.add(name)
                if int(number) in beyond:
                    continue
                beyond.add(int(number))
                joining = before + number + after + JOINING_LINEAR in self.folder.tensors
                self.findings.append(
                    Finding(
                        name,
                        "mtp-undescribed" if joining else "layer-count",
                        f"it belongs to layer {number} and config.json counts {last}; "
                        + (
                            "it is a layer for multi-token prediction that num_nextn_predict_layers does not "
                            "count, and "
                            "engines never load it"
                            if joining
                            else "engines stop at it or leave the layer out"
                        ),
                        "correct num_nextn_predict_layers" if joining else "correct num_hidden_layers",
                    )
                )

    def next_token(self) -> None:
        for layer in self.blueprint.next_token_layers:
            prefix = self.blueprint.layer_name(layer, "")
            stored = [name for name in self.folder.tensors if name.startswith(prefix)]
            if not stored:
                self.findings.append(
                    warning(
                        prefix.rstrip("."),
                        "mtp-missing",
                        f"config.json says num_nextn_predict_layers and no tensor of layer {layer} is there; "
                        "speculative "
                        "decoding with it stops at load",
                        "write the layer's tensors too, or set num_nextn_predict_layers to 0",
                    )
                )
                continue
            self.linears(
                {
                    module: shape
                    for module, shape in self.blueprint.next_token_modules().items()
                    if module.startswith(prefix)
                }
            )
            for name, shape in next_token_tensors(self.blueprint, layer).items():
                if name.rpartition(".")[0] not in self.check.linears:
                    self.plain(name, shape)
            for name, shape in repeated_tensors(self.blueprint, layer).items():
                if name in self.folder.tensors:
                    self.plain(name, shape)

    def tied_head(self) -> None:
        family = self.blueprint.family
        head = self.folder.info(family.head)
        if not self.blueprint.config.tie_word_embeddings or head is None:
            return
        self.known.add(head.name)
        embedding = self.folder.info(family.embedding)
        same = embedding is not None and (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
        self.findings.append(
            Finding(
                head.name,
                "tied-head",
                "config.json ties the head to the embedding and the head is stored beside it; "
                + (
                    "engines drop one of the two, which is harmless only while they are equal"
                    if same
                    else "the two differ in dtype or shape, and which one an engine takes depends on it"
                ),
                "remove the head, or set tie_word_embeddings to false if the model was trained so",
            )
        )

    def unknown(self) -> None:
        for name in self.folder.tensors:
            if name in self.known or name.rpartition(".")[2] in _EXTRA or self.is_stacked(name):
                continue
            self.findings.append(
                warning(
                    name,
                    "tensor-unknown",
                    "it belongs to no part of this model and to no quantized linear; vLLM stops at tensors it does "
                    "not know, "
                    "transformers drops them",
                    "remove it, or complete the linear that it belongs to",
                )
            )

    def is_stacked(self, name: str) -> bool:
        return ".experts." in name and name.partition(".experts.")[0] in self.stacked


def _is_stack(name: str) -> bool:
    """Whether a tensor under `experts` is that of all of them: no number follows."""
    return not name.partition(".experts.")[2].partition(".")[0].isdigit()


def _shortened(findings: Iterable[Finding]) -> list[Finding]:
    """At most so many of one rule."""
    kept: list[Finding] = []
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.rule] = counts.get(finding.rule, 0) + 1
        if counts[finding.rule] <= _MOST:
            kept.append(finding)
    return kept
