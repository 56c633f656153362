"""Are two formulas the same? math-verify, on top of sympy, decides it in a process of its own.

Why another process:
- A short answer can cost hours or all memory (`9^{9^{9^9}}`). Python cannot interrupt a power that is being computed,
  and math-verify's own timeout, an alarm, works in the main thread only. A process can be killed, from any thread.
- sympy turns text into numbers through `eval`: math-verify reads "3" by way of `eval("Integer (3 )")`. Its LaTeX parser
  passes numerals only, but a model's text should not come near an eval at all. In this process that one function of
  sympy is replaced by one that builds numbers and symbols and refuses the rest, and starting programs, opening
  connections and compiling generated functions are refused by the interpreter. math-verify's other parser, for plain
  expressions, evaluates what it matches by design and is never used.

The process starts at the first formula that needs it (a second or two), serves line by line, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading

TIMEOUT = 3.0
"""Seconds of CPU time for one comparison; usual ones take some hundredths. Whatever takes longer counts as different.
CPU time, so that a busy machine does not change a verdict."""
MEMORY = 2 << 30
"""Bytes of address space. sympy needs a quarter of a GiB; a runaway power would take all there is."""
FORBIDDEN = {"os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect"}

_lock = threading.Lock()
_process: subprocess.Popen | None = None
_owner = 0


def equivalent(gold: str, answer: str) -> bool:
    """Whether two formulas (LaTeX or plain) mean the same. False for what cannot be read, or not decided in time."""
    global _process
    with _lock:
        process = _running()
        try:
            process.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            process.stdin.flush()
            verdict = process.stdout.readline()
        except OSError:
            verdict = b""
        if not verdict:  # out of time or memory: the process is gone, the next formula starts another
            process.kill()
            process.wait()
            _process = None
        return verdict == b"same\n"


def _running() -> subprocess.Popen:
    global _process, _owner
    # A forked child has a copy of the parent's pipes: two writers on one pipe would read each other's verdicts.
    if _process is None or _owner != os.getpid() or _process.poll() is not None:
        # -P: this file's folder holds modules named like libraries (reasoning_gym) and must not shadow them.
        command = [sys.executable, "-P", __file__, str(TIMEOUT)]
        _process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _owner = os.getpid()
        if _process.stdout.readline() != b"ready\n":
            _process = None
            raise RuntimeError(
                "the process that compares formulas did not start (its error is above); "
                "is math-verify installed? pip install math-verify"
            )
    return _process


def _serve(timeout: float) -> None:
    import logging
    import resource
    import signal
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which may still want verdicts
    with contextlib.suppress(ValueError, OSError):  # macOS refuses this limit; the time limit stands
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    same = _comparer()
    verdicts = os.fdopen(os.dup(1), "wb", buffering=0)
    verdicts.write(b"ready\n")
    # Libraries that print must reach neither the verdicts nor the user's terminal.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    for line in sys.stdin.buffer:
        # Unhandled, the timer's signal ends the process, whatever it is computing: no Python code has to run for that.
        signal.setitimer(signal.ITIMER_PROF, timeout)
        try:
            verdict = same(*json.loads(line))
        except MemoryError:
            return
        except Exception:  # a parser may raise anything on text that is no formula
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        verdicts.write(b"same\n" if verdict else b"different\n")


def _comparer():
    """math-verify's comparison of two LaTeX texts, with the ways from text to running code closed."""
    import re

    import sympy
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.parsing import sympy_parser

    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    atom = re.compile(r"(-?) ?(Integer|Float|Symbol) \('?([\w.+-]*)'? \)", re.ASCII)

    def build_atom(code, local_dict, global_dict):
        match = atom.fullmatch(code) if isinstance(code, str) else None
        if match is None:
            raise ValueError(f"not a number: {code!r}")
        value = getattr(sympy, match[2])(match[3])
        return -value if match[1] else value

    def read(text: str):
        # In a box, the whole text is one formula; nothing is searched for in it.
        return parse(
            rf"\boxed{{{text}}}", extraction_config=extraction, fallback_mode="no_fallback", parsing_timeout=None
        )

    def same(gold: str, answer: str) -> bool:
        return verify(read(gold), read(answer), timeout_seconds=None)

    def refuse(event: str, arguments: tuple) -> None:
        if event in FORBIDDEN or (event == "compile" and str(arguments[1]).startswith("<lambdify")):
            raise PermissionError(f"judging an answer tried {event}")

    same(r"\frac{x^2}{2}", r"0.5 \cdot x^2")  # loads what sympy loads late, so that the time limit is for answers
    sympy_parser.eval_expr = build_atom
    sys.addaudithook(refuse)
    return same


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
