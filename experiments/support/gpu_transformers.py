"""Section (e): the same weights in Hugging Face transformers, in the same process.

Plain greedy decoding and assisted generation there, beside plain decoding and rounds
here, in turns. torch reads JAX's weights where they lie. The drafts are the draft
model's own: with random weights hardly any is accepted, on either side.
"""

import dataclasses
import importlib.util
import time
from typing import Any

import jax
import numpy as np

from experiments.lib import timing
from experiments.support import gpu_clock, gpu_rounds, gpu_task
from spec_jax.model import config as config_lib, params as params_lib


GENERATED = 32
GAMMA = 4


def run(task: gpu_task.Task) -> None:
    """The whole section, or one row that says why it is left out."""
    if not task.chosen(["transformers"]):
        return
    why = missing(jax.default_backend())
    if why:
        task.write("left out", items=["transformers"], reason=why)
        return
    generated = min(GENERATED, task.sizes.generated)
    gamma = min(GAMMA, max(task.sizes.gammas))
    runs = gpu_rounds.make_runs(task, generated=generated)
    with task.guard("transformers"):
        _compare(task, runs, generated, gamma)


def missing(backend: str) -> str | None:
    """Why the section cannot run; None if it can."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    import torch

    if backend == "gpu" and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    return None


def _compare(task: gpu_task.Task, runs: gpu_rounds.Runs, generated: int, gamma: int):
    import torch
    import transformers

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    transformers.utils.logging.set_verbosity_error()
    started = time.perf_counter()
    target, draft = (
        to_torch(config, params, device=device)
        for config, params in zip(
            (task.sizes.target, task.sizes.draft), runs.params, strict=True
        )
    )
    settings = draft.generation_config
    settings.num_assistant_tokens = gamma
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    made_s = time.perf_counter() - started
    prompt = np.array(runs.tokens)[: runs.start]
    ids = torch.tensor(prompt[None].astype(np.int64), device=device)
    tokens: dict[str, list[int]] = {}

    def theirs(name: str, **options: Any) -> timing.Thunk:
        def generate(_) -> None:
            with torch.inference_mode():
                output = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=generated,
                    **options,
                )
            tokens[name] = output[0, len(prompt) :].tolist()

        return timing.stopwatch(generate)

    drafter = runs.models.drafter
    thunks = {
        "plain": timing.stopwatch(runs.run_plain, runs.plain_state),
        "speculative": timing.stopwatch(
            lambda state: runs.run_rounds(state, drafter, runs.params[1], gamma),
            lambda: runs.round_state(drafter.gamma_max),
        ),
        "transformers": theirs("transformers"),
        "transformers, assisted": theirs(
            "transformers, assisted", assistant_model=draft
        ),
    }
    timings = timing.interleave(thunks, repeats=max(1, task.sizes.repeats // 6))
    for name, seconds in timings.seconds.items():
        task.write(
            "transformers",
            run=name,
            acceptance="the random draft's own, about 0",
            gamma=gamma if "spec" in name or "assisted" in name else None,
            tokens=generated,
            tokens_returned=len(tokens[name]) if name in tokens else generated,
            context=runs.start,
            prefill="in the time, one forward" if name in tokens else "not timed",
            n=len(seconds),
            **gpu_clock.quartiles("ms", [1e3 * s / generated for s in seconds]),
            **gpu_clock.quartiles(
                "to_plain", timing.ratios(seconds, timings.seconds["plain"])
            ),
            warm_up_s=timings.warm_up[name],
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            models_made_s=made_s,
        )


def to_torch(
    config: config_lib.Qwen3Config, params: params_lib.Params, *, device: str
) -> Any:
    """A `Qwen3ForCausalLM` whose weights are those of `params`, without a copy.

    Raises:
      RuntimeError: weights that the model of transformers does not know, or lacks.
    """
    import torch
    import transformers

    raw = config_lib.to_dict(config)
    raw = {key: raw[key] for key in raw if key not in ("architectures", "model_type")}
    hf_config = transformers.Qwen3Config(**raw)
    dtype = getattr(torch, config.dtype)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    state = {name: torch.from_dlpack(x) for name, x in named_weights(config, params)}
    split = dict(_split(config, state))
    missing, unexpected = model.load_state_dict(split, strict=False, assign=True)
    missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        raise RuntimeError(f"transformers misses {missing} and knows no {unexpected}")
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    return model.eval().requires_grad_(False)


def named_weights(config: config_lib.Qwen3Config, params: params_lib.Params):
    """Names and arrays; the fused ones under `qkv` and `gate_up`, to be split."""
    yield "model.embed_tokens.weight", params.embed
    yield "model.norm.weight", params.final_norm
    if params.lm_head is not None:
        yield "lm_head.weight", params.lm_head
    names = {
        "input_norm": "input_layernorm",
        "qkv": "self_attn.qkv",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "attention_out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate_up": "mlp.gate_up",
        "down": "mlp.down_proj",
    }
    for number, layer in enumerate(params.layers):
        for field in dataclasses.fields(layer):
            name = names[field.name]
            yield f"model.layers.{number}.{name}.weight", getattr(layer, field.name)


def _split(config: config_lib.Qwen3Config, state: dict[str, Any]):
    """Views of the fused matrices under the names of their parts."""
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    parts = {
        "self_attn.qkv": ("self_attn.{}_proj", "qkv", (queries, keys, keys)),
        "mlp.gate_up": ("mlp.{}_proj", ("gate", "up"), (config.intermediate_size,) * 2),
    }
    for name, tensor in state.items():
        for fused, (pattern, letters, sizes) in parts.items():
            if fused in name:
                pieces = tensor.split(sizes)
                for letter, piece in zip(letters, pieces, strict=True):
                    yield name.replace(fused, pattern.format(letter)), piece
                break
        else:
            yield name, tensor
