"""The pool takes what the GPU has left, and no more."""

import pytest
import torch

from siftkv import LLM, SamplingParams
from siftkv.errors import SiftKVError
from tests.tiny import prompt, tiny_model

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


def gpu_llm(**settings: object) -> LLM:
    model = tiny_model(dtype=torch.bfloat16, head_dim=64)
    model.decoder.cuda()
    return LLM(model, "diffkv:window=8", max_num_seqs=4, **settings)  # type: ignore[arg-type]


def test_the_pool_fills_the_share_that_is_asked_for() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.03
    llm = gpu_llm(gpu_memory_utilization=share)
    used = total - torch.cuda.mem_get_info()[0]
    assert 0.5 * 0.03 * total < used - (total - free) <= 0.03 * total
    [out] = llm.generate([prompt(60)], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert len(out.token_ids) == 30
    assert total - torch.cuda.mem_get_info()[0] <= share * total
    assert llm.cache.usage().workspace > 0


def test_a_share_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(SiftKVError, match="no memory is left"):
        gpu_llm(gpu_memory_utilization=1e-6)
    with pytest.raises(SiftKVError, match="above 0 and at most 1"):
        gpu_llm(gpu_memory_utilization=1.5)
