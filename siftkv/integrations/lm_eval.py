"""lm-evaluation-harness over a sifted cache: importing this module registers the model type `siftkv`.

What is scored went through the decode path: a context is prefilled and sifted, then the continuation is fed token by
token, so that a log-likelihood shows what the cache lost. lm-eval's own command line is `siftkv lm-eval`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from siftkv.benchmarks.opening import open_for
from siftkv.engine.outputs import KVReport
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import RequestError
from siftkv.evaluate.generation import Request, complete
from siftkv.evaluate.stepping import SteppedRow, step_rows
from siftkv.models import LoadedModel, list_models, load_model, pull
from siftkv.policies import parse_policy

_log = logging.getLogger("lm_eval.siftkv")
_MAX_MODEL_LEN = 4096
_BATCH = 8
_MAX_GEN_TOKS = 256


@dataclass(frozen=True)
class _Scored:
    """Tokens `target` to be scored after `context`."""

    context: list[int]
    target: list[int]


@register_model("siftkv")
class SiftKVLM(TemplateLM):  # type: ignore[misc]
    """A model whose cache is sifted, as lm-eval sees it.

    pretrained: as in `LLM`, or a `LoadedModel`. kv: a `kv` string; since lm-eval splits its model arguments at commas,
    further settings of the policy may follow as arguments of their own:
    `pretrained=smollm2-135m,kv=diffkv:alpha_high=1,alpha_low=0.02`.
    max_model_len: tokens of context and continuation, contexts beyond lose their start (default: the model's, at most
    4096). batch_size: requests at a time (`auto`: 8). kernels: as in `LLM`.
    Raises ModelError, PolicyError or FormatError for what `LLM` refuses.
    """

    def __init__(
        self,
        pretrained: str | LoadedModel = "smollm2-135m",
        kv: str = "full",
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = _BATCH,
        max_batch_size: int | None = None,
        max_model_len: int | None = None,
        kernels: str = "auto",
        **policy_settings: Any,
    ) -> None:
        super().__init__()
        further = ",".join(f"{key}={value}" for key, value in policy_settings.items())
        policy = parse_policy(f"{kv}{',' if ':' in kv else ':'}{further}" if further else kv)
        if isinstance(pretrained, str):
            if pretrained in [m.name for m in list_models()]:
                pull(pretrained)
            pretrained = load_model(pretrained, dtype, _usable(device))
        self.batch = _BATCH if str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = int(max_model_len or min(pretrained.config.context_limit, _MAX_MODEL_LEN))
        self.llm = open_for(pretrained, policy, self.max_length, self.batch, (), kernels)
        self.tokenizer = self.llm.tokenizer
        self.reports: list[KVReport] = []
        """What the cache of each request held at its end."""

    @property
    def eot_token_id(self) -> int:
        ends = self.llm.engine.eos_token_ids
        if not ends:
            raise RequestError(f"{self.llm.model.name} has no end token, which lm-eval needs")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """What empty contexts consist of: the beginning of a text where the model has one, else its end."""
        begin: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keys its caches of prompts by."""
        return self.llm.model.name.replace("/", "__")

    @property
    def max_gen_toks(self) -> int:
        """Tokens to generate where a task does not say."""
        return _MAX_GEN_TOKS

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; without a second start token where the text has its own."""
        begin = self.tokenizer.bos_token
        special = add_special_tokens if add_special_tokens is not None else not (begin and string.startswith(begin))
        return list(self.tokenizer(string, add_special_tokens=special, verbose=False)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, in the model's template."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = []
        bar = tqdm(total=len(requests), desc="Scoring", disable=disable_tqdm)
        for start in range(0, len(requests), self.batch):
            part = requests[start : start + self.batch]
            scores = self._score([self._cut(context, target) for _, context, target in part])
            for (request, *_), score in zip(part, scores, strict=True):
                if request is not None:
                    self.cache_hook.add_partial("loglikelihood", request, score)
            found += scores
            bar.update(len(part))
        bar.close()
        self._say_size()
        return found

    def _cut(self, context: list[int], target: list[int]) -> _Scored:
        room = self.max_length - len(target)
        if room < 1:
            raise RequestError(f"a continuation of {len(target)} tokens leaves no context: raise max_model_len")
        return _Scored(context[-room:], target)

    def _score(self, rows: list[_Scored]) -> list[tuple[float, bool]]:
        scorer = _Scorer([row.target for row in rows])
        stepped = [SteppedRow(row.context, self.llm.kv) for row in rows]
        self.reports += step_rows(self.llm.engine, stepped, scorer)
        return list(zip(scorer.total, scorer.greedy, strict=True))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of at most `max_length` tokens, each fed token by token."""
        found = []
        for (text,) in tqdm([request.args for request in requests], disable=disable_tqdm, desc="Rolling"):
            windows = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.max_length - 1, 1
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(score for score, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            found.append(total)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop strings, an end token or its limit."""
        jobs = [self._job(str(i), *request.args) for i, request in enumerate(requests)]
        texts = [""] * len(requests)
        outputs = complete(self.llm.engine, self.llm.kv, jobs)
        for key, output, _ in tqdm(outputs, total=len(jobs), disable=disable_tqdm, desc="Generating"):
            texts[int(key)] = output.text
            self.reports += [output.kv] if output.kv else []
            self.cache_hook.add_partial("generate_until", requests[int(key)].args, output.text)
        self._say_size()
        return texts

    def _job(self, key: str, context: str, settings: dict[str, Any]) -> Request:
        until = settings.get("until") or []
        limit = int(settings.get("max_gen_toks", self.max_gen_toks))
        sampled = settings.get("do_sample", float(settings.get("temperature") or 0.0) > 0)
        params = SamplingParams(
            temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
            top_p=float(settings.get("top_p", 1.0)),
            top_k=int(settings.get("top_k", 0)),
            seed=int(settings.get("seed", 0)) if sampled else None,
            stop=[until] if isinstance(until, str) else [stop for stop in until if stop] or None,
            max_tokens=limit,
        )
        room = self.max_length - limit
        if room < 1:
            raise RequestError(f"max_gen_toks={limit} leaves no context: raise max_model_len")
        return Request(key, self.tok_encode(context)[-room:], params)

    def _say_size(self) -> None:
        if self.reports:
            ratio, peak = (fmean(x) for x in zip(*((r.ratio, r.peak_bytes / r.bf16_bytes) for r in self.reports)))
            _log.info(
                "%s: physical KV bytes of %d requests %.1f%% of bf16, %.1f%% at most",
                self.llm.kv.describe(),
                len(self.reports),
                100 * ratio,
                100 * peak,
            )


def _usable(device: str | None) -> str:
    """lm-eval asks for a GPU unless told otherwise."""
    if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
        _log.info("running on the CPU: %s", "no device was named" if device is None else f"there is no {device}")
        return "cpu"
    return device


class _Scorer:
    """Feeds targets and adds up their log-probabilities: a `choose` of `step_rows`.

    total: natural log-likelihood of each row's target. greedy: whether each of its tokens was the likeliest.
    """

    def __init__(self, targets: Sequence[Sequence[int]]) -> None:
        self._targets = targets
        self._at = [0] * len(targets)
        self.total = [0.0] * len(targets)
        self.greedy = [True] * len(targets)

    def __call__(self, rows: list[int], logits: Tensor) -> list[int | None]:
        wanted = [self._targets[row][self._at[row]] if self._targets[row] else 0 for row in rows]
        logprobs = logits.float().log_softmax(-1)
        picked = logprobs.gather(1, torch.tensor(wanted, device=logits.device)[:, None])[:, 0].tolist()
        likeliest = logits.argmax(-1).tolist()
        return [self._next(*found) for found in zip(rows, wanted, picked, likeliest, strict=True)]

    def _next(self, row: int, token: int, logprob: float, likeliest: int) -> int | None:
        if not self._targets[row]:
            return None
        self.total[row] += logprob
        self.greedy[row] = self.greedy[row] and token == likeliest
        self._at[row] += 1
        return token if self._at[row] < len(self._targets[row]) else None
