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

from kvfolio.cli.options import (
    BlockTokens,
    Device,
    Dtype,
    Eviction,
    Json,
    KvFormat,
    KvLayers,
    KvMemory,
    MaxPreemptions,
    Model,
    Preemption,
    PrefixCache,
    SinkBlocks,
    SwapMemory,
    Threads,
    load,
)
from kvfolio.cli.run_account import completion_fields, print_account
from kvfolio.errors import KvfolioError, OptionError, RequestError
from kvfolio.planner.memory import DEFAULT_MAX_RUNNING
from kvfolio.sched.options import DEFAULT_MAX_PREEMPTIONS, DEFAULT_MAX_STEP_TOKENS

if TYPE_CHECKING:
    from kvfolio.engine.llm import LLM
    from kvfolio.engine.params import CacheParams, SamplingParams


def run(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option(help="One prompt; the model's chat template is applied.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='A batch: JSON lines with "prompt" or "messages", and fields of their own for sampling and the cache.'
        ),
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
    samples: Annotated[int, typer.Option(help="Answers to each prompt; the prompt is computed once.")] = 1,
    kv_memory: KvMemory = None,
    kv_format: KvFormat = "auto",
    kv_layers: KvLayers = "",
    sink_blocks: SinkBlocks = 0,
    block_tokens: BlockTokens = None,
    max_running: Annotated[int, typer.Option(help="The most sequences that run at once.")] = DEFAULT_MAX_RUNNING,
    max_step_tokens: Annotated[int, typer.Option(help="The most tokens of one step.")] = DEFAULT_MAX_STEP_TOKENS,
    prefix_cache: PrefixCache = True,
    eviction: Eviction = "lru",
    preemption: Preemption = "auto",
    max_preemptions: MaxPreemptions = DEFAULT_MAX_PREEMPTIONS,
    swap_memory: SwapMemory = "0",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits alone or in any batch, with any chunking.")
    ] = False,
    latent_form: Annotated[
        str,
        typer.Option(help="How latent (MLA) layers compute prompts: absorbed, or expanded, quicker for long prompts."),
    ] = "absorbed",
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
    if samples < 1 or (samples > 1 and lines is None and prompt is None):
        raise OptionError(f"--samples is {samples}; accepted: 1 or more, beside --prompt or --prompts")
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
        kv_layers=kv_layers,
        sink_blocks=sink_blocks,
        block_tokens=block_tokens,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        deterministic=deterministic,
        latent_form=latent_form,
        prefix_cache=prefix_cache,
        eviction=eviction,
        preemption=preemption,
        max_preemptions=max_preemptions,
        swap_memory=swap_memory,
    )
    if lines is None and prompt is not None and samples > 1:
        lines = [{"prompt": prompt}]
    if lines is not None:
        _run_batch(llm, lines, params, samples, raw, system, as_json)
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
        print(json.dumps({**completion_fields(completion), **dataclasses.asdict(account)}))
        return
    print()
    print_account(account, [completion])


def _line_params(line: dict[str, Any], params: "SamplingParams") -> "tuple[SamplingParams, CacheParams]":
    """What a line of a batch asks for beside its prompt."""
    from kvfolio.engine.params import CacheParams, Retention

    fields = {name: value for name, value in line.items() if name not in ("prompt", "messages")}
    caching = {field.name: fields.pop(field.name) for field in dataclasses.fields(CacheParams) if field.name in fields}
    known = [field.name for kind in (params, CacheParams) for field in dataclasses.fields(kind)]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise OptionError(f"unknown field {unknown[0]!r}; known: prompt or messages, {', '.join(known)}")
    if "retention" in caching:
        given = caching["retention"] if isinstance(caching["retention"], list) else [caching["retention"]]
        try:
            if not all(isinstance(one, dict) for one in given):
                raise TypeError(f"{json.dumps(caching['retention'])[:60]} is none")
            caching["retention"] = [Retention(**one) for one in given]
        except TypeError as error:
            accepted = ", ".join(field.name for field in dataclasses.fields(Retention))
            raise OptionError(f"retention: {error}; accepted: an object or a list of them, with {accepted}") from error
    return dataclasses.replace(params, **fields), CacheParams(**caching)


def _run_batch(
    llm: "LLM",
    lines: list[dict[str, Any]],
    params: "SamplingParams",
    samples: int,
    raw: bool,
    system: str | None,
    as_json: bool,
) -> None:
    from kvfolio.engine.account import make_account

    ids, chosen, cached = [], [], []
    for number, line in enumerate(lines, 1):
        try:
            line_params, line_caching = _line_params(line, params)
            several = line_params.samples(samples)
            token_ids = _encode_line(llm, line, raw, system)
            reason = llm.engine.refusal(tuple(token_ids), line_params)
            if reason is not None:
                raise RequestError(reason)
        except KvfolioError as error:
            raise type(error)(f"line {number} of the prompts: {error}") from error
        ids += [token_ids] * samples
        chosen += several
        cached += [line_caching] * samples
    completions = llm.generate(ids, chosen, cached)
    account = make_account(llm, completions)
    if as_json:
        results = [completion_fields(completion) for completion in completions]
        print(json.dumps({"results": results, **dataclasses.asdict(account)}))
        return
    for number, completion in enumerate(completions, 1):
        print(f"--- {number}: {completion.usage.prompt_tokens} + {completion.usage.completion_tokens} tokens ---")
        print(completion.text)
    print_account(account, completions)


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
        print_account(make_account(llm, completions), completions)


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
