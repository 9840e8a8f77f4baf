"""python -m cupaged.generate MODEL "a prompt": generate from the shell, streaming.

With --input FILE, reads JSON lines, each {"prompt": ...}, {"prompt_token_ids": [...]} or {"messages": [...]}
with any fields of SamplingParams beside it, and writes one JSON line for each to --output, in order. A bad
line gets {"error": ...} and harms no other.
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
from typing import Any, TextIO

from cupaged.flags import add_engine_flags, engine_config, is_watched, say_loading, show_log
from cupaged.llm import LLM
from cupaged.outputs import Logprobs, RequestOutput
from cupaged.sampling_params import RequestOutputKind, SamplingParams

_NUMBERS: dict[str, type] = {
    "max_tokens": int,
    "min_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
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
    good: list[tuple[int, Any, SamplingParams]] = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            prompt, params = _parse_line(llm, line, options)
            llm.engine.make_request(f"check {number}", prompt, params)
            good.append((number, prompt, params))
        except (ValueError, TypeError, RecursionError) as error:
            # A message may quote half a surrogate pair, which no file can hold.
            text = str(error).encode(errors="backslashreplace").decode()
            results[number] = {"error": f"line {number + 1}: {text}"}
    is_bad = bool(results)
    outputs = llm.generate([prompt for _, prompt, _ in good], [params for _, _, params in good])
    for (number, _, _), output in zip(good, outputs, strict=True):
        results[number] = _as_json(output)
    for number in sorted(results):
        out.write(json.dumps(results[number], ensure_ascii=False) + "\n")
    return int(is_bad)


def _parse_line(llm: LLM, line: str, options: dict[str, Any]) -> tuple[Any, SamplingParams]:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {line[:40]!r}")
    sources = [name for name in ("prompt", "prompt_token_ids", "messages") if name in values]
    if len(sources) != 1:
        raise ValueError(f"needs exactly one of prompt, prompt_token_ids, messages; got {sources}")
    source = values.pop(sources[0])
    params = SamplingParams(**{**options, **values})
    if sources[0] != "messages":
        return {sources[0]: source}, params
    return _chat_prompt(llm, source), params


def _chat_prompt(llm: LLM, messages: list[dict[str, Any]]) -> list[int]:
    tokenizer = llm.get_tokenizer()
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


def _as_json(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    found: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
    }
    if completion.logprobs is not None:
        found["logprobs"] = list(map(_logprobs_json, completion.logprobs))
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = list(map(_logprobs_json, output.prompt_logprobs))
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
    """Print one answer as it comes."""
    try:
        params = SamplingParams(**{**options, "output_kind": RequestOutputKind.DELTA})
        source = _chat_prompt(llm, [{"role": "user", "content": prompt}]) if chat else prompt
        llm.engine.add_request("0", source, params)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    while llm.engine.has_unfinished():
        for output in llm.engine.step():
            print(output.outputs[0].text, end="", flush=True)
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
