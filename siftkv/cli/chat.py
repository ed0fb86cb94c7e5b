"""`siftkv chat`: a conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli import options
from siftkv.cli.console import busy, open_llm, plain_table, say, size, stdout_console, tier_shares
from siftkv.cli.group import Interrupts
from siftkv.defaults import DEFAULT_KV
from siftkv.errors import RequestError

if TYPE_CHECKING:
    from siftkv import LLM, KVReport, SamplingParams

HELP = "/exit ends, /reset forgets the conversation, /kv reports on the KV cache of the last answer."


def chat(
    model: options.Model = "smollm2-135m",
    kv: options.Kv = DEFAULT_KV,
    system: Annotated[str | None, typer.Option(help="A system message.", show_default=False)] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    conditioning: options.Conditioning = "full",
) -> None:
    """Talk with a model. Ctrl-D or /exit ends, Ctrl-C stops an answer.

    Inside: /exit ends, /reset forgets the conversation, /kv reports on the KV cache of the last answer.

    \b
    Examples:
      siftkv chat
      siftkv chat --kv diffkv:alpha_low=0.05 --system "Answer in one sentence."
      printf 'Who wrote Hamlet?\\n/kv\\n' | siftkv chat --temperature 0
    """
    asked = options.SamplingOptions(
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, tuple(stop or ())
    )
    with busy("Starting"):
        from siftkv import parse_policy

        asked.check()
        policy = parse_policy(kv)
    about = {"device": device, "dtype": dtype, "max_model_len": max_model_len, "conditioning": conditioning}
    llm = open_llm(model, kv=policy, max_num_seqs=1, **about)
    conversation = Conversation(llm, asked.params(llm.model.generation), system)
    conversation.check_template()
    interactive = sys.stdin.isatty()
    if interactive:
        say(HELP)
    for line in _lines(interactive):
        if line == "/exit":
            return
        conversation.take(line, interactive)


def _lines(interactive: bool) -> Iterator[str]:
    """What the user says, line by line, until the end of input."""
    if not interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  line editing and history for input()

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return


class Conversation:
    """Messages so far, and the cache report of the last answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.system)
        self.report: KVReport | None = None

    def check_template(self) -> None:
        """Raise RequestError for a model that cannot chat, before the user has typed anything."""
        self.llm.chat_prompt([*self.system, {"role": "user", "content": "Hello"}])

    def take(self, line: str, interactive: bool) -> None:
        """Obey a command or answer a message.

        In a terminal an answer that fails, or is stopped with Ctrl-C, does not end the conversation.
        """
        if line == "/reset":
            self.messages, self.report = list(self.system), None
            say("The conversation is forgotten.")
        elif line == "/kv":
            self.show_cache()
        elif line.startswith("/"):
            say(f"There is no {line.split()[0]}. {HELP}")
        elif line:
            self.messages.append({"role": "user", "content": line})
            answer: list[str] = []
            try:
                self._answer(answer)
            except RequestError as error:
                self.messages.pop()
                if not interactive:
                    raise
                say(f"error: {error}")
                return
            except KeyboardInterrupt:
                if not interactive:
                    raise
                Interrupts.seen = False
                print()
            self.messages.append({"role": "assistant", "content": "".join(answer)})

    def _answer(self, answer: list[str]) -> None:
        """Stream an answer to stdout and into `answer`, so that a stopped one is kept as far as it came."""
        prompt_ids = self.llm.chat_prompt(self.messages)
        chunks = self.llm.stream(prompt_ids, self.params)
        try:
            with busy(f"Reading {len(prompt_ids)} tokens"):
                chunk = next(chunks, None)
            while chunk is not None:
                print(chunk.text, end="", flush=True)
                answer.append(chunk.text)
                if chunk.output is not None:
                    self.report = chunk.output.kv
                chunk = next(chunks, None)
        finally:
            chunks.close()  # type: ignore[attr-defined]
        print()

    def show_cache(self) -> None:
        """Print the report on the cache of the last answer."""
        if self.report is None:
            say("No answer has been finished yet.")
            return
        table = plain_table()
        for name in ("tokens", "physical", "peak", "bf16", "ratio", "a token kept in a head"):
            table.add_column(name, justify="right")
        report = self.report
        table.add_row(
            str(report.tokens_seen),
            size(report.physical_bytes),
            size(report.peak_bytes),
            size(report.bf16_bytes),
            f"{report.ratio:.1%}",
            size(report.bytes_per_live_token),
        )
        console = stdout_console()
        console.print(self.report.policy, soft_wrap=True)
        console.print(table)
        console.print(", ".join(f"{tier} {share:.1%}" for tier, share in tier_shares(report).items()))
