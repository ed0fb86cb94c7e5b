"""A tiny random model that reads and writes bytes, and a real server in front of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from siftkv import LLM
from siftkv.models import LoadedModel, random_model
from siftkv.server.run import Address, Server, listen, make_server
from siftkv.server.settings import ServerSettings
from siftkv.server.worker import EngineWorker
from tests.tiny import tiny_config, tiny_llm

MODEL = "tiny"
SPECIAL = ("<eos>", "<bos>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{% if tools %}<|im_start|>tools
<tool_call> {% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, and four special ones before them."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")
    fast.chat_template = template
    return fast


def byte_llm(
    kv: str = "diffkv:window=8,sinks=2", template: str | None = TEMPLATE, max_position: int = 2048, **settings: Any
) -> LLM:
    config = tiny_config(vocab_size=256 + len(SPECIAL), max_position=max_position, eos_token_ids=(0, 3))
    model = LoadedModel(config, random_model(config, 0, torch.float32), byte_tokenizer(template), MODEL)
    return tiny_llm(kv, model=model, **({"formats": ["bf16"], "kv_cache_memory_bytes": 8 << 20} | settings))


class Live:
    """A server on a free port, in a thread of its own."""

    def __init__(
        self,
        load: LLM | Callable[[], LLM],
        settings: ServerSettings | None = None,
        max_queue: int = 64,
        address: Address | None = None,
    ) -> None:
        address = replace(address or Address(), port=0)
        self.worker = EngineWorker(load, max_queue).start()
        bound = listen(address)
        self.url = replace(address, port=bound.getsockname()[1]).url
        self.server: Server = make_server(self.worker, settings or ServerSettings(drain_seconds=60), address)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [bound]}, daemon=True)
        self._thread.start()

    def ready(self) -> Live:
        wait_for(lambda: self.worker.state != "starting" and self.server.started)
        return self

    def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **settings)

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **settings)

    def check_settled(self) -> None:
        """Nothing runs, nothing is remembered, every page is free and the bookkeeping is whole."""
        wait_for(lambda: not self.worker.in_system and not self.worker.llm.engine.has_work)
        llm = self.worker.llm
        wait_for(lambda: llm.cache.free_pages == llm.cache.spec.num_pages)
        assert llm.cache.free_slots == llm.cache.spec.max_slots
        assert not llm.engine._live
        llm.cache.check_integrity()

    def join(self, timeout: float = 10) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        self.server.end()
        self.join()
        self.worker.stop()


def wait_for(condition: Callable[[], bool], seconds: float = 20, pause: float = 0.005) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(pause)
