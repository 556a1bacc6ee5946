"""llama.cpp's own measure of its quantised caches, by its llama-perplexity. Knows nothing of kvfolio.

It compares log-probabilities of the second half of a context with those it saved in a run with an exact cache, and
tokenises the text itself: its positions are not those of the other engines.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Bits a number: 32 of them share an f16 scale, in q4_1 and q5_1 an f16 minimum too.
BITS = {"q8_0": 8 + 16 / 32, "q5_1": 5 + 32 / 32, "q5_0": 5 + 16 / 32, "q4_1": 4 + 32 / 32, "q4_0": 4 + 16 / 32}
MEASURED = {  # what the program prints
    "perplexity": r"Mean PPL\(Q\)\s*:\s*([\d.]+)",
    "reference_perplexity": r"Mean PPL\(base\)\s*:\s*([\d.]+)",
    "mean_kld": r"Mean\s+KLD:\s*([-\d.]+)",
    "p99_kld": r"99\.0%\s+KLD:\s*([-\d.]+)",
    "top1_percent": r"Same top p:\s*([\d.]+)",
}


@dataclass(frozen=True, slots=True)
class LlamaCaches:
    """The programs of a build of llama.cpp, and where to put files."""

    programs: Path  # the folder of llama-perplexity and llama-quantize
    folder: Path  # a temporary one
    num_threads: int
    num_tokens: int  # of one context: its second half is scored

    def measure(self, gguf: Path, text: str, kinds: list[str]) -> dict[str, dict[str, float]]:
        """By kind of cache: the numbers of MEASURED, against its own f32 cache, with the weights of ``gguf`` in f32."""
        model, passage, saved = (self.folder / name for name in ("f32.gguf", "text.txt", "exact.kld"))
        self._run("llama-quantize", "--allow-requantize", str(gguf), str(model), "F32")
        passage.write_text(text)
        common = ["-m", str(model), "-f", str(passage), "-c", str(self.num_tokens), "--chunks", "1", "-b", "512"]
        common += ["-t", str(self.num_threads), "-fa", "on", "--kl-divergence-base", str(saved)]
        self._run("llama-perplexity", *common, "-ctk", "f32", "-ctv", "f32")
        found = {}
        for kind in kinds:
            printed = self._run("llama-perplexity", *common, "--kl-divergence", "-ctk", kind, "-ctv", kind)
            found[kind] = {name: _number(name, pattern, printed) for name, pattern in MEASURED.items()}
        saved.unlink()
        model.unlink()
        return found

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run([str(self.programs / program), *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        return done.stdout + done.stderr


def _number(name: str, pattern: str, printed: str) -> float:
    match = re.search(pattern, printed)
    if match is None:
        raise RuntimeError(f"llama-perplexity printed no {name}:\n{printed[-2000:]}")
    return float(match[1])
