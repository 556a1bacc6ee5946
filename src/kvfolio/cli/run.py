"""kvfolio run: one prompt, a batch of them, or a chat on a terminal; then the cache's account.

Knows nothing of how a model is run.
"""

import contextlib
import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfolio.cli.options import BlockTokens, Device, Dtype, Json, KvFormat, KvMemory, Model, Threads, load
from kvfolio.errors import KvfolioError, OptionError, RequestError
from kvfolio.planner.memory import DEFAULT_BLOCK_TOKENS, DEFAULT_MAX_RUNNING
from kvfolio.sched.options import DEFAULT_MAX_STEP_TOKENS
from kvfolio.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from kvfolio.engine.account import Account
    from kvfolio.engine.answer import Completion
    from kvfolio.engine.llm import LLM
    from kvfolio.engine.params import SamplingParams


SLOW_SHARE = 0.2  # of the decode limit; below it something else than the memory holds us up


def run(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option(help="One prompt; the model's chat template is applied.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='A batch: JSON lines with "prompt" or "messages", and sampling fields of their own.'),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete prompts as they are, without the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens that make up this share.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens below this share of the most likely one.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes random answers repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    kv_memory: KvMemory = None,
    kv_format: KvFormat = "auto",
    block_tokens: BlockTokens = DEFAULT_BLOCK_TOKENS,
    max_running: Annotated[int, typer.Option(help="The most sequences that run at once.")] = DEFAULT_MAX_RUNNING,
    max_step_tokens: Annotated[int, typer.Option(help="The most tokens of one step.")] = DEFAULT_MAX_STEP_TOKENS,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits alone or in any batch, with any chunking.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a model: one prompt, a batch of them, or a chat on a terminal; then print the cache's account."""
    if prompt is not None and prompts is not None:
        raise OptionError("give --prompt or --prompts, not both")
    lines = None if prompts is None else _read_lines(prompts)
    if lines is None and prompt is None and sys.stdin is None:
        raise OptionError("standard input is closed: give --prompt or --prompts")
    if lines is None and prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if lines is None and prompt is None and raw:
        raise OptionError("--raw needs --prompt or --prompts: a chat is held through the chat template")
    if lines is None and prompt is None and as_json:
        raise OptionError("--json needs --prompt or --prompts: a chat is not one object")
    from kvfolio.engine.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    llm = load(
        model,
        kv_memory=kv_memory,
        kv_format=kv_format,
        block_tokens=block_tokens,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        deterministic=deterministic,
    )
    if lines is not None:
        _run_batch(llm, lines, params, raw, system, as_json)
    elif prompt is not None:
        _run_one(llm, prompt, params, raw, system, as_json)
    else:
        _chat(llm, params, system)


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def _encode(llm: "LLM", text: str, raw: bool, system: str | None) -> list[int]:
    """A prompt's token ids: through the chat template if the model has one and ``raw`` does not forbid it."""
    if raw or not llm.tokenizer.has_chat_template:
        if system is not None:
            raise OptionError("--system needs a chat template: leave out --raw, or use a model that has one")
        if not text:
            raise OptionError("the prompt is empty: give some text")
        return llm.tokenizer.encode(text)
    if not text.strip():
        raise OptionError("the prompt is empty: give some text")
    return llm.tokenizer.encode_chat(_messages(text, system))


def _encode_line(llm: "LLM", line: dict[str, Any], raw: bool, system: str | None) -> list[int]:
    """The token ids of one line of a batch."""
    if "prompt" in line:
        return _encode(llm, line["prompt"], raw, system)
    if raw:
        raise OptionError('"messages" need the chat template: leave out --raw, or give a "prompt"')
    messages = line["messages"]
    if system is not None and isinstance(messages, list):
        messages = [{"role": "system", "content": system}, *messages]
    return llm.tokenizer.encode_chat(messages)


def _run_one(llm: "LLM", prompt: str, params: "SamplingParams", raw: bool, system: str | None, as_json: bool) -> None:
    from kvfolio.engine.account import make_account

    completion = None
    for piece in llm.stream(_encode(llm, prompt, raw, system), params):
        if not as_json:
            print(piece.text, end="", flush=True)
        completion = piece.completion
    assert completion is not None
    account = make_account(llm, [completion])
    if as_json:
        print(json.dumps({**_completion_fields(completion), **dataclasses.asdict(account)}))
        return
    print()
    _print_account(account, [completion])


def _run_batch(
    llm: "LLM", lines: list[dict[str, Any]], params: "SamplingParams", raw: bool, system: str | None, as_json: bool
) -> None:
    from kvfolio.engine.account import make_account

    ids, chosen = [], []
    for number, line in enumerate(lines, 1):
        fields = {name: value for name, value in line.items() if name not in ("prompt", "messages")}
        known = [field.name for field in dataclasses.fields(params)]
        unknown = [name for name in fields if name not in known]
        try:
            if unknown:
                raise OptionError(f"unknown field {unknown[0]!r}; known: prompt or messages, {', '.join(known)}")
            chosen.append(dataclasses.replace(params, **fields))
            ids.append(_encode_line(llm, line, raw, system))
            reason = llm.engine.refusal(tuple(ids[-1]), chosen[-1])
            if reason is not None:
                raise RequestError(reason)
        except KvfolioError as error:
            raise type(error)(f"line {number} of the prompts: {error}") from error
    completions = llm.generate(ids, chosen)
    account = make_account(llm, completions)
    if as_json:
        results = [_completion_fields(completion) for completion in completions]
        print(json.dumps({"results": results, **dataclasses.asdict(account)}))
        return
    for number, completion in enumerate(completions, 1):
        print(f"--- {number}: {completion.usage.prompt_tokens} + {completion.usage.completion_tokens} tokens ---")
        print(completion.text)
    _print_account(account, completions)


def _chat(llm: "LLM", params: "SamplingParams", system: str | None) -> None:
    from kvfolio.engine.account import make_account

    with contextlib.suppress(ImportError):  # line editing and history, where Python was built with it
        importlib.import_module("readline")
    print("chat with the model; /new starts over, /quit or Ctrl-D ends", file=sys.stderr)
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages, completions = list(opening), list[Any]()
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            break
        if text == "/quit":
            break
        if text == "/new":
            messages = list(opening)
            continue
        if text.startswith("/"):
            print(f"unknown command {text.split()[0]}; known: /new, /quit", file=sys.stderr)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        answer = []
        try:
            for piece in llm.stream(messages, params):
                print(piece.text, end="", flush=True)
                answer.append(piece.text)
                if piece.completion is not None:
                    completions.append(piece.completion)
        except KeyboardInterrupt:  # ends this answer, not the chat
            print(" …", end="")
        except KvfolioError as error:  # the question did not fit: the conversation stays as it was
            print(f"error: {error}; /new starts over", file=sys.stderr)
            messages.pop()
            continue
        print()
        messages.append({"role": "assistant", "content": "".join(answer)})
    if completions:
        _print_account(make_account(llm, completions), completions)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that is there twice is refused, since one of its values would be ignored."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"a key is given twice among {[key for key, _ in pairs]}")
    return value


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read: {error}; give a file of JSON lines") from error
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
            raise OptionError(f'{path}, line {number}: expected an object with either "prompt" or "messages"')
        if "prompt" in value and not isinstance(value["prompt"], str):
            raise OptionError(f"{path}, line {number}: the prompt is {type(value['prompt']).__name__}, expected a text")
        lines.append(value)
    if not lines:
        raise OptionError(f"{path} holds no prompts: give one JSON object a line")
    return lines


# ---- printing -------------------------------------------------------------------------------------------------------


def _completion_fields(completion: "Completion") -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": dataclasses.asdict(completion.usage),
        **({} if completion.logprobs is None else {"logprobs": list(completion.logprobs)}),
        **({} if completion.top_logprobs is None else {"top_logprobs": completion.top_logprobs}),
    }


def _print_rows(rows: list[tuple[str, str]]) -> None:
    print(file=sys.stderr)
    for name, value in rows:
        print(f"{name:<12} {value}", file=sys.stderr)


def _print_account(account: "Account", completions: list["Completion"]) -> None:
    kv, speed = account.kv, account.speed
    num_prompt = sum(completion.usage.prompt_tokens for completion in completions)
    num_new = sum(completion.usage.completion_tokens for completion in completions)
    layers = "; ".join(
        f"{layer.num_layers} {layer.kind.replace('_', ' ')} × {layer.num_kv_heads} kv heads × {layer.head_dim}"
        + (f", window {layer.window}" if layer.window else "")
        for layer in kv.layers
    )
    wasted = kv.wasted_bytes / kv.used_bytes if kv.used_bytes else 0.0
    rows = [
        ("tokens", f"{num_prompt:,} prompt + {num_new:,} generated, {account.num_steps:,} steps"),
        ("cache", f"{kv.bytes_per_token:,} B a token planned ({layers}; {kv.format})"),
        (
            "pool",
            f"{format_bytes(kv.allocated_bytes)} allocated, {format_bytes(kv.planned_bytes)} planned: "
            f"{kv.num_blocks:,} blocks of {kv.block_tokens} tokens",
        ),
        (
            "used",
            f"{kv.num_blocks_used:,} blocks, {format_bytes(kv.used_bytes)} at the peak, {wasted:.1%} of it not filled; "
            f"{kv.num_blocks_held} held now",
        ),
        (
            "first token",
            f"{format_seconds(speed.ttft_s)}"
            + (" on average" if len(completions) > 1 else "")
            + f"; loading took {format_seconds(account.load_s)}",
        ),
    ]
    if speed.decode_tokens_per_s is not None and speed.limit_tokens_per_s is not None:
        share = speed.decode_tokens_per_s / speed.limit_tokens_per_s
        rows.append(
            (
                "decode",
                f"{speed.decode_tokens_per_s:.1f} tokens/s; limit {speed.limit_tokens_per_s:.1f} ({share:.0%} of it): "
                f"{format_bytes(speed.bytes_read_per_token or 0)} a token "
                f"at {speed.bandwidth_bytes_per_s / 1e9:.1f} GB/s, measured now",
            )
        )
        if share < SLOW_SHARE:
            rows.append(("", "slow: do other processes hold the cores? fewer --threads may be quicker"))
    rows.append(("kernels", f"{account.kernels}, {account.dtype}, {account.threads} threads"))
    if account.preemptions:
        rows.append(("preemptions", f"{account.preemptions}: the pool ran dry; more --kv-memory avoids it"))
    _print_rows(rows)
