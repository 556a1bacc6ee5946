"""A GGUF file loaded into a transformers model by the gguf package's reader and transformers' own conversions.

Knows nothing of kvfolio. ``from_pretrained(gguf_file=…)`` does the same, needs accelerate and takes half a minute.
"""

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor


@cache  # reading a vocabulary takes seconds
def read(file: Path) -> gguf.GGUFReader:
    """The file as the gguf package reads it."""
    return gguf.GGUFReader(file)


def dequantised(tensor: gguf.ReaderTensor) -> Tensor:
    """One tensor of a reader, in f32."""
    return torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))


def load(file: Path, config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """The model of ``config`` in f32 with the weights of ``file``; every parameter must be found there."""
    reader = read(file)
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    architecture = reader.fields["general.architecture"].contents()
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    spelled = gguf.get_tensor_name_map(code, config.num_hidden_layers)
    names = {spelled.get_name(key, (".weight", ".bias")): key for key in model.state_dict()}
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    state = {}
    for tensor in reader.tensors:
        converted = processor.process(weights=dequantised(tensor).numpy(), name=tensor.name)
        state[names[converted.name]] = torch.from_numpy(np.array(converted.weights))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    model.tie_weights()
    return model
