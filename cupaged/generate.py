"""python -m cupaged.generate MODEL "a prompt": generate from the shell, streaming.

With --input FILE, reads JSON lines, each {"prompt": ...}, {"prompt_token_ids": [...]} or {"messages": [...]}
with any fields of SamplingParams, "cache_salt" or "priority" beside it, and writes one JSON line for each to
--output, in order; with n above 1 it has "outputs", a list. A bad line gets {"error": ...}, harms no other.
"""

import argparse
import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from cupaged.flags import add_engine_flags, engine_config, is_watched, say_loading, show_log
from cupaged.llm import LLM
from cupaged.outputs import CompletionOutput, Logprobs, RequestOutput
from cupaged.sampling_params import RequestOutputKind, SamplingParams

_NUMBERS: dict[str, type] = {
    "max_tokens": int,
    "min_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "n": int,
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m cupaged.generate", description=__doc__, allow_abbrev=False
    )
    add_engine_flags(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; or use --input")
    parser.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's message for the chat template"
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="JSON lines to read")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines to write (default: stdout)")
    for name, kind in _NUMBERS.items():
        flag = "--" + name.replace("_", "-")
        text = f"see SamplingParams (default: the model's, else {getattr(SamplingParams(), name)})"
        parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text that ends it; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to max_tokens")
    args = parser.parse_intermixed_args(argv)  # the prompt may stand behind flags
    if (args.prompt is None) == (args.input is None):
        parser.error("give a PROMPT or --input FILE, one of them")
    if args.output is not None and args.input is None:
        parser.error("--output goes with --input; a PROMPT's answer is streamed")
    if args.chat and args.input is not None:
        parser.error("--chat goes with a PROMPT; in --input, give a line 'messages'")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code is 1 if any request was bad."""
    args = parse_args(argv)
    options = _sampling_options(args)
    with ExitStack() as stack:
        try:
            SamplingParams(**options)
            lines = None if args.input is None else _read_lines(args.input)
            out: TextIO = sys.stdout
            if args.output is not None:
                out = stack.enter_context(args.output.open("w", encoding="utf-8"))
            config = engine_config(args)
            say_loading(config)
            if is_watched():
                show_log()
            llm = stack.enter_context(LLM(**{f.name: getattr(config, f.name) for f in fields(config)}))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        options = {**llm.engine.default_sampling_params, **options}
        if lines is None:
            return _stream(llm, args.prompt, args.chat, options)
        return run_lines(llm, lines, options, out)


def _read_lines(path: Path) -> list[str]:
    try:
        # Not splitlines(): JSON strings may hold U+2028 and the other ends of lines it knows.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def run_lines(llm: LLM, lines: list[str], options: dict[str, Any], out: TextIO) -> int:
    """Generate for every JSON line together; write one line each, in order. Return 1 if any was bad."""
    results: dict[int, dict[str, Any]] = {}
    good: dict[int, _Line] = {}
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            parsed = _parse_line(llm, line, options)
            llm.engine.make_request(f"check {number}", *parsed)
            good[number] = parsed
        except (ValueError, TypeError, RecursionError) as error:
            # A message may quote half a surrogate pair, which no file can hold.
            text = str(error).encode(errors="backslashreplace").decode()
            results[number] = {"error": f"line {number + 1}: {text}"}
    is_bad = bool(results)
    each = list(good.values())
    prompts, params = [line.prompt for line in each], [line.params for line in each]
    outputs = llm.generate(prompts, params, priority=[line.priority for line in each])
    for number, output in zip(good, outputs, strict=True):
        results[number] = _as_json(output)
    for number in sorted(results):
        out.write(json.dumps(results[number], ensure_ascii=False) + "\n")
    return int(is_bad)


class _Line(NamedTuple):
    """A line that was read, as LLM.generate takes it."""

    prompt: dict[str, Any]
    params: SamplingParams
    priority: int


def _parse_line(llm: LLM, line: str, options: dict[str, Any]) -> _Line:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {line[:40]!r}")
    sources = [name for name in ("prompt", "prompt_token_ids", "messages") if name in values]
    if len(sources) != 1:
        raise ValueError(f"needs exactly one of prompt, prompt_token_ids, messages; got {sources}")
    source = values.pop(sources[0])
    salt, priority = values.pop("cache_salt", None), values.pop("priority", 0)
    params = SamplingParams(**{**options, **values})
    prompt = {sources[0]: source}
    if sources[0] == "messages":
        prompt = {"prompt_token_ids": _chat_prompt(llm, source)}
    return _Line({**prompt, "cache_salt": salt}, params, priority)


def _chat_prompt(llm: LLM, messages: list[dict[str, Any]]) -> list[int]:
    tokenizer = llm.get_tokenizer()
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


def _as_json(output: RequestOutput) -> dict[str, Any]:
    """Return what a line is answered with; one output stands in it by itself, several are a list."""
    parts = list(map(_completion_json, output.outputs))
    found: dict[str, Any] = parts[0] if len(parts) == 1 else {"outputs": parts}
    found["num_prompt_tokens"] = len(output.prompt_token_ids)
    found["num_cached_tokens"] = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = list(map(_logprobs_json, output.prompt_logprobs))
    return found


def _completion_json(completion: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        found["logprobs"] = list(map(_logprobs_json, completion.logprobs))
    return found


def _logprobs_json(entry: Logprobs | None) -> list[dict[str, Any]] | None:
    """Return the tokens of one position, the one in the text first; JSON has no infinity."""
    if entry is None:
        return None
    return [
        {"token_id": i, **token._asdict(), "logprob": token.logprob if isfinite(token.logprob) else None}
        for i, token in entry.items()
    ]


def _sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the SamplingParams fields that the command line sets."""
    options = {name: getattr(args, name) for name in _NUMBERS if getattr(args, name) is not None}
    if args.stop:
        options["stop"] = args.stop
    if args.ignore_eos:
        options["ignore_eos"] = True
    return options


def _stream(llm: LLM, prompt: str, chat: bool, options: dict[str, Any]) -> int:
    """Print one answer as it comes, or n of them when all are there."""
    is_alone = options.get("n", 1) == 1
    kind = RequestOutputKind.DELTA if is_alone else RequestOutputKind.FINAL_ONLY
    try:
        params = SamplingParams(**{**options, "output_kind": kind})
        source = _chat_prompt(llm, [{"role": "user", "content": prompt}]) if chat else prompt
        llm.engine.add_request("0", source, params)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    while llm.engine.has_unfinished():
        for output in llm.engine.step():
            for completion in output.outputs:
                text = completion.text if is_alone else f"[{completion.index}]{completion.text}\n"
                print(text, end="", flush=True)
    if is_alone:
        print()
    return 0


if __name__ == "__main__":
    # Ends at once. KeyboardInterrupt would be lost if it came inside one of the compiler's callbacks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)  # whoever read our output has seen enough; sys.exit would try to write the rest
    sys.exit(code)
